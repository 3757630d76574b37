"""A real process, killed at random events, ends with the weights of one that never was."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

RECIPE = """
[data]
graph = "world"
[model]
name = "ComplEx"
dim = 16
[regularizer]
name = "DURA"
weight = 0.05
[optimizer]
schedule = "linear"
[training]
epochs = 4
batch_size = 200
checkpoint_seconds = 0.05
[validation]
every = 2
keep = "best"
"""


def start(*words: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "dualkg", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err.decode()


@pytest.mark.parametrize(
    ("seed", "max_kills"),
    [(0, 1), pytest.param(0, 3, marks=pytest.mark.slow), pytest.param(1, 3, marks=pytest.mark.slow)],
)
def test_a_run_killed_at_random_ends_with_the_same_weights(tmp_path: Path, run_cli, seed: int, max_kills: int):
    recipe, whole, killed = tmp_path / "recipe.toml", tmp_path / "whole", tmp_path / "killed"
    recipe.write_text(RECIPE)
    assert run_cli("train", recipe, "--out", whole, "--threads", 1, "--seed", seed).code == 0
    chance = random.Random(seed)
    process = start("train", recipe, "--out", killed, "--threads", 1, "--seed", seed)
    num_kills = 0
    while num_kills < max_kills:
        deadline = time.monotonic() + 100
        before = _state(killed)
        # Wait for the run to move, so that every kill meets a process at work, then for a random while.
        while _state(killed) == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.4))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        num_kills += 1
        process = start("resume", killed)
    finish(process)
    assert num_kills >= 1
    one, other = (load_file(folder / "weights.safetensors") for folder in (whole, killed))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not [path.name for path in killed.iterdir() if path.name.startswith("checkpoint")]


def _state(folder: Path) -> int | None:
    """When the checkpoint was last written, or None."""
    try:
        return (folder / "checkpoint.safetensors").stat().st_mtime_ns
    except FileNotFoundError:
        return None
