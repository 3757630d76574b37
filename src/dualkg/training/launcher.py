"""The processes that a launcher such as `torchrun` has started, by the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dualkg.errors import PYTHON, RequestError, Words

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class IncompleteEnvironment(RequestError):
    """Some of the variables that a launcher sets are missing."""

    def __init__(self, present: Sequence[str], missing: Sequence[str]) -> None:
        super().__init__()
        self.present = list(present)
        self.missing = list(missing)

    def message(self, words: Words = PYTHON) -> str:
        are_not = "is not" if len(self.missing) == 1 else "are not"
        return (
            f"{self.present[0]} is set, as by torchrun, and {' and '.join(self.missing)} "
            f"{are_not}. Start the processes with: torchrun --nproc-per-node N -m dualkg …, or "
            f"unset {', '.join(self.present)}."
        )


class InvalidProcessIndex(RequestError):
    """The index of this process is none of the number of processes."""

    def __init__(self, index: str, count: str) -> None:
        super().__init__(
            f"RANK is a number from 0 to WORLD_SIZE − 1; found RANK={index}, WORLD_SIZE={count}."
        )
        self.index = index
        self.count = count


def num_processes() -> int:
    """The number of processes that a launcher such as `torchrun` has started, 1 without one."""
    index = os.environ.get("RANK") or "0"
    count = os.environ.get("WORLD_SIZE") or "1"
    if (index, count) == ("0", "1"):
        return 1
    present = [name for name in VARIABLES if os.environ.get(name)]
    missing = [name for name in VARIABLES if name not in present]
    if missing:
        raise IncompleteEnvironment(present, missing)
    is_index = index.isdecimal() and count.isdecimal() and int(index) < int(count)
    if not is_index:
        raise InvalidProcessIndex(index, count)
    return int(count)
