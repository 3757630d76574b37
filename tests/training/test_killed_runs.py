"""A real process, killed at random events, ends with the weights of one that never was."""

import random
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import COMMAND, run_python

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
epochs = 2
batch_size = 400
[validation]
every = 1
keep = "best"
"""
# The process ends itself at an event whose number is its last argument: a step, or a file written
# or renamed.
KILLED = """
import os, signal, sys
from dualkg.training.trainer import Trainer, WarmUp
events_left = int(sys.argv.pop())

def counted(function):
    def call(*arguments, **choices):
        global events_left
        events_left -= 1
        if not events_left:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **choices)
    return call

Trainer._checkpoint_due = lambda self: self.progress.step % 3 == 0
WarmUp.take = counted(WarmUp.take)
os.fsync, os.replace, os.rename = map(counted, (os.fsync, os.replace, os.rename))
"""


@pytest.mark.parametrize(
    ("seed", "num_kills"),
    [
        pytest.param(0, 1, marks=pytest.mark.slow),
        pytest.param(0, 4, marks=pytest.mark.slow),
        pytest.param(1, 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_at_random_ends_with_the_same_weights(
    tmp_path: Path, run_cli, seed: int, num_kills: int
):
    recipe = tmp_path / "recipe.toml"
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    recipe.write_text(RECIPE)
    assert run_cli("train", recipe, "--out", whole, "--threads", 1, "--seed", seed).code == 0
    chance = random.Random(seed)
    words = ("train", recipe, "--out", killed, "--threads", 1, "--seed", seed)
    for _ in range(num_kills):
        ended = run_python(KILLED + COMMAND, *words, chance.randrange(20, 60))
        assert ended.code == -signal.SIGKILL, ended.err
        words = ("resume", killed)
    assert run_cli("resume", killed).code == 0
    one, other = (load_file(folder / "weights.safetensors") for folder in (whole, killed))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not [path.name for path in killed.iterdir() if path.name.startswith("checkpoint")]
