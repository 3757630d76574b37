"""What the processor can do."""

from __future__ import annotations

from functools import cache
from pathlib import Path

BF16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}  # the last is ARM's


@cache
def has_bf16_products(description: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor itself multiplies matrices of bfloat16; not known, so False, where Linux does not say."""
    if not description.is_file():
        return False
    for line in description.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, flags = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return not BF16_FLAGS.isdisjoint(flags.split())
    return False
