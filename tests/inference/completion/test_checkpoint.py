"""A search that is stopped or killed ends with the list of one that never was."""

import dataclasses
from math import inf

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import dualkg as kg
from dualkg.inference.completion import Completion, CompletionSettings, complete
from dualkg.inference.completion.checkpoint import OtherSearch, UnusableCheckpoint
from tests.inference.completion.brute_force import MODELS, random_calibration, random_graph
from tests.processes import Started

MANY_BLOCKS = CompletionSettings(max_scores=27, report_interval=inf)
CHECKPOINT_AFTER_EACH = CompletionSettings(max_scores=27, save_interval=0, report_interval=inf)
COLUMNS = (
    "heads",
    "relations",
    "tails",
    "probability",
    "answer_probability",
    "score",
    "log_probability",
)


@pytest.fixture
def options():
    return {"top": 30, "calibration": random_calibration(0), "settings": MANY_BLOCKS}


@pytest.fixture
def checkpoint(tmp_path):
    return tmp_path / "new.tsv.checkpoint"


def stopping_after(number, error):
    """A callback that raises an error after some blocks."""
    calls = []

    def on_progress(done, total):
        calls.append(done)
        if len(calls) == number:
            raise error

    return on_progress


def interrupt(model, graph, checkpoint, options, *, blocks):
    stop = stopping_after(blocks, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        complete(model, graph, **options, checkpoint=checkpoint, on_progress=stop)
    assert checkpoint.exists()


def assert_same(completion: Completion, expected: Completion) -> None:
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(completion, name), getattr(expected, name))


@pytest.mark.parametrize("name", ["ComplEx", "TransE, one way"])
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_an_interrupted_search_resumes(checkpoint, options, name, blocks):
    graph = random_graph(0)
    model = MODELS[name](graph.shape)
    progress = []
    uninterrupted = complete(
        model, graph, **options, on_progress=lambda done, total: progress.append(done)
    )

    interrupt(model, graph, checkpoint, options, blocks=blocks)
    progress_after = []
    resumed = complete(
        model,
        graph,
        **options,
        checkpoint=checkpoint,
        on_progress=lambda done, total: progress_after.append(done),
    )
    assert_same(resumed, uninterrupted)
    assert progress_after == progress[blocks:]
    assert not checkpoint.exists()


def test_a_search_resumes_from_its_last_checkpoint(checkpoint, options):
    """A kill gives no chance to save; each search here ends after two blocks more."""
    options["settings"] = CHECKPOINT_AFTER_EACH
    graph = random_graph(1)
    model = MODELS["CP"](graph.shape)
    num_kills = 0
    completion = None
    while completion is None:
        stop = stopping_after(2, SystemError("killed"))
        try:
            completion = complete(model, graph, **options, checkpoint=checkpoint, on_progress=stop)
        except SystemError:
            num_kills += 1
    assert num_kills >= 4
    assert_same(completion, complete(model, graph, **options))


def test_a_short_search_leaves_nothing_behind(tmp_path, checkpoint, options):
    graph = random_graph(0)
    complete(MODELS["CP"](graph.shape), graph, **options, checkpoint=checkpoint)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changed", "changes"),
    [
        ({"top": 1000}, {"top": (30, 1000)}),
        ({"types": True}, {"types": (False, True)}),
        (
            {"heads": ["e1"], "loops": True},
            {"loops": (False, True), "heads": (None, ["e1"])},
        ),
        ({"relations": ["r0", "r2"]}, {"relations": (["r0", "r1", "r2"], ["r0", "r2"])}),
        ({"min_probability": 0.25}, {"min_probability": (0.0, 0.25)}),
    ],
)
def test_other_options_are_refused(checkpoint, options, changed, changes):
    graph = random_graph(0)
    model = MODELS["CP"](graph.shape)
    interrupt(model, graph, checkpoint, options, blocks=3)
    with pytest.raises(OtherSearch) as error:
        complete(model, graph, **{**options, **changed}, checkpoint=checkpoint)
    assert error.value.path == checkpoint
    assert error.value.changes == changes
    assert checkpoint.exists()


def test_other_tables_are_refused(checkpoint, options):
    graph = random_graph(0)
    model = MODELS["CP"](graph.shape)
    interrupt(model, graph, checkpoint, options, blocks=3)

    def changes_of(model, graph, options):
        with pytest.raises(OtherSearch) as error:
            complete(model, graph, **options, checkpoint=checkpoint)
        return list(error.value.changes)

    other_calibration = {**options, "calibration": random_calibration(9)}
    without_recalibration = {
        **options,
        "calibration": dataclasses.replace(options["calibration"], recalibration=None),
    }
    other_model = kg.CP(graph.shape, dim=3)
    other_graph = dataclasses.replace(graph, test=graph.test[:3])
    assert changes_of(model, graph, other_calibration) == ["checksum of the calibration"]
    assert changes_of(model, graph, without_recalibration) == ["checksum of the calibration"]
    assert changes_of(other_model, graph, options) == ["checksum of the weights"]
    assert changes_of(model, other_graph, options) == ["checksum of the graph"]
    assert checkpoint.exists()


def test_the_size_of_blocks_may_change(checkpoint, options):
    graph = random_graph(0)
    model = MODELS["CP"](graph.shape)
    interrupt(model, graph, checkpoint, options, blocks=3)
    options["settings"] = CompletionSettings()
    completion = complete(model, graph, **options, checkpoint=checkpoint)
    np.testing.assert_array_equal(completion.triples, complete(model, graph, **options).triples)


def test_the_message_names_what_has_changed(checkpoint):
    error = OtherSearch(checkpoint, {"top": (30, 1000), "heads": (None, ["e1"])})
    assert str(error) == (
        f"{checkpoint} is of a search with other options: top was 30 and is now 1000; heads was "
        "None and is now ['e1']. Use the same options to resume it, or remove the file to start "
        "again."
    )


def test_a_file_that_is_no_checkpoint_is_refused(checkpoint, options):
    graph = random_graph(0)
    model = MODELS["CP"](graph.shape)
    checkpoint.write_text("not ours")
    with pytest.raises(UnusableCheckpoint) as error:
        complete(model, graph, **options, checkpoint=checkpoint)
    assert error.value.path == checkpoint
    assert str(error.value) == f"{error.value.cause} Remove it to start again."

    save_file({"x": torch.zeros(1)}, checkpoint)
    with pytest.raises(UnusableCheckpoint):
        complete(model, graph, **options, checkpoint=checkpoint)


KILLED = """
import sys

from dualkg.inference.completion import complete
from tests.inference.completion.brute_force import MODELS, random_calibration, random_graph
from tests.inference.completion.test_checkpoint import CHECKPOINT_AFTER_EACH


def wait_to_be_killed(done, total):
    print("checkpoint saved", flush=True)
    sys.stdin.read()


graph = random_graph(0)
complete(
    MODELS["ComplEx"](graph.shape),
    graph,
    top=30,
    calibration=random_calibration(0),
    checkpoint=sys.argv[1],
    on_progress=wait_to_be_killed,
    settings=CHECKPOINT_AFTER_EACH,
)
"""


def test_a_killed_search_resumes(checkpoint, options):
    with Started(KILLED, checkpoint) as process:
        assert process.stdout.readline() == "checkpoint saved\n"
        process.kill()
    assert checkpoint.exists()

    graph = random_graph(0)
    model = MODELS["ComplEx"](graph.shape)
    resumed = complete(model, graph, **options, checkpoint=checkpoint)
    assert_same(resumed, complete(model, graph, **options))
