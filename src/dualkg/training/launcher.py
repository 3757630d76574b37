"""The processes that a launcher such as `torchrun` has started, by the environment."""

from __future__ import annotations

import os

from dualkg.errors import RequestError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def num_processes() -> int:
    """The number of processes that a launcher such as `torchrun` has started, 1 without one."""
    index = os.environ.get("RANK") or "0"
    count = os.environ.get("WORLD_SIZE") or "1"
    if (index, count) == ("0", "1"):
        return 1
    present = [name for name in VARIABLES if os.environ.get(name)]
    missing = [name for name in VARIABLES if name not in present]
    if missing:
        are_not = "is not" if len(missing) == 1 else "are not"
        raise RequestError(
            f"{present[0]} is set, as by torchrun, and {' and '.join(missing)} {are_not}. Start "
            "the processes with: torchrun --nproc-per-node N -m dualkg …, or unset "
            f"{', '.join(present)}."
        )
    is_index = index.isdecimal() and count.isdecimal() and int(index) < int(count)
    if not is_index:
        raise RequestError(
            f"RANK is a number from 0 to WORLD_SIZE − 1; found RANK={index}, WORLD_SIZE={count}."
        )
    return int(count)
