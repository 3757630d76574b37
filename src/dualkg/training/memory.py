"""Whether weights and optimizer fit in memory, and the memory that is free."""

import math
import re
from collections import defaultdict
from pathlib import Path

import torch

from dualkg.errors import RequestError
from dualkg.evaluation.ranking import BLOCK_ELEMENTS
from dualkg.models.base import Model
from dualkg.tables.base import TABLE_NAMES
from dualkg.training.recipe import Recipe

RANKING_BYTES = 6 * BLOCK_ELEMENTS  # a block of scores and temporary arrays


def optimizer_bytes(recipe: Recipe, model: Model) -> dict[torch.device, float]:
    """Bytes of the optimizer's state, and of a second set of weights if one is kept, by device."""
    keeps_two = recipe.validation.keep == "best" or recipe.optimizer.average_from < 1
    needed: dict[torch.device, float] = defaultdict(float)
    for name, table in model.named_parameters():
        state = recipe.optimizer.state_tables * table.nbytes
        if recipe.optimizer.sums_by_row and name.rpartition(".")[2] in TABLE_NAMES:
            state = len(table) * table.element_size()
        needed[table.device] += state + keeps_two * table.nbytes
    return dict(needed)


def check_memory(recipe: Recipe, model: Model, *, num_sharing: int = 1) -> None:
    """Refuse a model whose optimizer does not fit beside it.

    What a step needs besides is seen when it is taken. `num_sharing` is how many processes share
    the memory of the device.
    """
    for device, needed in optimizer_bytes(recipe, model).items():
        available = available_memory(device, num_sharing=num_sharing)
        if needed > available:
            raise RequestError(
                f"The state of {recipe.optimizer.name} would need {gib(needed)} in addition to the "
                f"model, and {gib(available)} are free on {device}. Choose a smaller `model.dim`, "
                "`optimizer.sums = rows`, which needs less, or divide the tables over several "
                "processes: torchrun --nproc-per-node N -m dualkg …"
            )


def available_memory(device: torch.device, *, num_sharing: int = 1) -> float:
    """Free bytes: on a GPU with what PyTorch has reserved, on a CPU as Linux reports them.

    Each of several processes that share the device has its part of what is free.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] / num_sharing + unused
    return min(_free_on_machine(), _free_in_group()) / num_sharing


def _free_on_machine(description: Path = Path("/proc/meminfo")) -> float:
    text = description.read_text() if description.is_file() else ""
    match = re.search(r"^MemAvailable:\s*(\d+)", text, re.MULTILINE)
    return float(match[1]) * 1024 if match else math.inf


def _free_in_group(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Free bytes in a container with a limit; its page cache would be given up."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = float((folder / "memory.current").read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
        statistics = dict(line.split() for line in lines)
        cached = float(statistics["inactive_file"]) + float(statistics["active_file"])
        return math.inf if limit == "max" else max(float(limit) - used + cached, 0.0)
    except (OSError, ValueError, KeyError):
        return math.inf


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
