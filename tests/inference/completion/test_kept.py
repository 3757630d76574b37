"""A search that is stopped or killed ends with the list of one that never was."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import dualkg as kg
from dualkg.inference import completion, completion_search
from dualkg.inference.completion import complete
from tests.inference.completion.brute_force import MODELS, random_calibration, random_graph


@pytest.fixture
def choices(monkeypatch):
    """A search of many blocks."""
    monkeypatch.setitem(completion_search.SCORES, "cpu", 27)
    return {"top": 30, "calibration": random_calibration(0)}


def stopping_after(number, error):
    told = []

    def on_progress(done, whole):
        told.append(done)
        if len(told) == number:
            raise error

    return on_progress


def assert_same(one, other):
    for name in ("heads", "relations", "tails", "probability", "answer_probability", "score", "log_probability"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("name", ["ComplEx", "TransE, one way"])
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_a_stopped_search_goes_on(tmp_path, choices, name, blocks):
    graph, checkpoint = random_graph(0), tmp_path / "new.tsv.checkpoint"
    model = MODELS[name](graph.shape)
    at_a_stretch, told = [], []
    whole = complete(model, graph, **choices, on_progress=lambda done, whole: at_a_stretch.append(done))
    with pytest.raises(KeyboardInterrupt):
        complete(
            model, graph, **choices, checkpoint=checkpoint, on_progress=stopping_after(blocks, KeyboardInterrupt())
        )
    assert checkpoint.exists()
    again = complete(model, graph, **choices, checkpoint=checkpoint, on_progress=lambda done, whole: told.append(done))
    assert_same(again, whole)
    assert told == at_a_stretch[blocks:]
    assert not checkpoint.exists()


def test_what_is_saved_now_and_then_is_enough(tmp_path, choices, monkeypatch):
    """A kill gives no chance to save; each search here dies after two blocks more."""
    monkeypatch.setattr(completion, "SECONDS", 0)
    graph, checkpoint = random_graph(1), tmp_path / "new.tsv.checkpoint"
    model = MODELS["CP"](graph.shape)
    num_deaths = 0
    while True:
        try:
            found = complete(
                model, graph, **choices, checkpoint=checkpoint, on_progress=stopping_after(2, SystemError("dead"))
            )
            break
        except SystemError:
            num_deaths += 1
    assert num_deaths >= 4
    assert_same(found, complete(model, graph, **choices))


def test_a_short_search_leaves_nothing_behind(tmp_path, choices):
    graph = random_graph(0)
    complete(MODELS["CP"](graph.shape), graph, **choices, checkpoint=tmp_path / "new.tsv.checkpoint")
    assert not list(tmp_path.iterdir())


def test_other_choices_are_told(tmp_path, choices):
    graph, checkpoint = random_graph(0), tmp_path / "new.tsv.checkpoint"
    model = MODELS["CP"](graph.shape)
    with pytest.raises(KeyboardInterrupt):
        complete(model, graph, **choices, checkpoint=checkpoint, on_progress=stopping_after(3, KeyboardInterrupt()))
    other_graph = dataclasses.replace(graph, test=graph.test[:3])
    for changed, sentence in (
        (
            {"top": 1000},
            "new.tsv.checkpoint is a list that was begun with other choices: top was 30 and is now 1,000. Give",
        ),
        ({"types": True}, "types was off and is now on"),
        ({"heads": ["e1"], "loops": True}, "loops was off and is now on and heads was all and is now e1"),
        ({"relations": ["r0", "r2"]}, "relations was r0, r1, r2 and is now r0, r2"),
        ({"min_probability": 0.25}, "min-probability was 0.0 and is now 0.25"),
        ({"calibration": random_calibration(9)}, "the calibration was not the same"),
    ):
        with pytest.raises(kg.RequestError, match=sentence):
            complete(model, graph, **{**choices, **changed}, checkpoint=checkpoint)
    with pytest.raises(kg.RequestError, match="the weights were not the same"):
        complete(kg.CP(graph.shape, dim=3), graph, **choices, checkpoint=checkpoint)
    with pytest.raises(kg.RequestError, match="the graph was not the same"):
        complete(model, other_graph, **choices, checkpoint=checkpoint)
    assert checkpoint.exists()


def test_a_file_that_is_something_else_is_told(tmp_path, choices):
    graph, checkpoint = random_graph(0), tmp_path / "new.tsv.checkpoint"
    checkpoint.write_text("not ours")
    with pytest.raises(kg.RequestError, match="new.tsv.checkpoint cannot be read .*Remove it to begin again"):
        complete(MODELS["CP"](graph.shape), graph, **choices, checkpoint=checkpoint)
    save_file({"x": torch.zeros(1)}, checkpoint)
    with pytest.raises(kg.RequestError, match="new.tsv.checkpoint cannot be read .*Remove it to begin again"):
        complete(MODELS["CP"](graph.shape), graph, **choices, checkpoint=checkpoint)


KILLED = """
import time
import sys
from dualkg.inference import completion, completion_search
from dualkg.inference.completion import complete
from tests.inference.completion.brute_force import MODELS, random_calibration, random_graph

completion.SECONDS = 0
completion_search.SCORES["cpu"] = 27
graph = random_graph(0)
complete(
    MODELS["ComplEx"](graph.shape), graph, top=30, calibration=random_calibration(0), checkpoint=sys.argv[1],
    on_progress=lambda done, whole: time.sleep(0.1),
)
"""


def test_a_killed_search_goes_on(tmp_path, choices):
    checkpoint = tmp_path / "new.tsv.checkpoint"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(checkpoint)], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 100
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    _, err = process.communicate()
    assert checkpoint.exists(), err.decode()
    graph = random_graph(0)
    model = MODELS["ComplEx"](graph.shape)
    assert_same(complete(model, graph, **choices, checkpoint=checkpoint), complete(model, graph, **choices))
