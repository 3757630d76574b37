"""Models of link prediction; `MODELS` maps names in recipes to classes.

Every name in the `__all__` of a module is exported here and is public in `dualkg`.
"""

from dualkg.models import (
    base,
    bilinear,
    diagonal,
    distance,
    ensemble,
    matrix,
    partial,
    paths,
)
from dualkg.models.base import *  # noqa: F403
from dualkg.models.base import MODELS
from dualkg.models.bilinear import *  # noqa: F403
from dualkg.models.diagonal import *  # noqa: F403
from dualkg.models.distance import *  # noqa: F403
from dualkg.models.ensemble import *  # noqa: F403
from dualkg.models.matrix import *  # noqa: F403
from dualkg.models.partial import *  # noqa: F403
from dualkg.models.paths import *  # noqa: F403

__all__ = ["MODELS"]
__all__ += base.__all__
__all__ += bilinear.__all__
__all__ += diagonal.__all__
__all__ += distance.__all__
__all__ += ensemble.__all__
__all__ += matrix.__all__
__all__ += partial.__all__
__all__ += paths.__all__
