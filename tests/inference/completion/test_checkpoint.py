"""A search that is stopped or killed ends with the list of one that never was."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import dualkg as kg
from dualkg.inference import completion
from dualkg.inference.completion import complete
from tests.inference.completion.brute_force import MODELS, random_calibration, random_graph
from tests.processes import Started


@pytest.fixture
def options(monkeypatch):
    """A search of many blocks."""
    monkeypatch.setitem(completion.MAX_SCORES, "cpu", 27)
    return {"top": 30, "calibration": random_calibration(0)}


def stopping_after(number, error):
    calls = []

    def on_progress(done, total):
        calls.append(done)
        if len(calls) == number:
            raise error

    return on_progress


def assert_same(one, other):
    for name in (
        "heads",
        "relations",
        "tails",
        "probability",
        "answer_probability",
        "score",
        "log_probability",
    ):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("name", ["ComplEx", "TransE, one way"])
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_an_interrupted_search_resumes(tmp_path, options, name, blocks):
    graph = random_graph(0)
    checkpoint = tmp_path / "new.tsv.checkpoint"
    model = MODELS[name](graph.shape)
    uninterrupted = []
    resumed = []
    whole = complete(
        model, graph, **options, on_progress=lambda done, whole: uninterrupted.append(done)
    )
    with pytest.raises(KeyboardInterrupt):
        complete(
            model,
            graph,
            **options,
            checkpoint=checkpoint,
            on_progress=stopping_after(blocks, KeyboardInterrupt()),
        )
    assert checkpoint.exists()
    again = complete(
        model,
        graph,
        **options,
        checkpoint=checkpoint,
        on_progress=lambda done, whole: resumed.append(done),
    )
    assert_same(again, whole)
    assert resumed == uninterrupted[blocks:]
    assert not checkpoint.exists()


def test_a_search_resumes_from_its_last_checkpoint(tmp_path, options, monkeypatch):
    """A kill gives no chance to save; each search here dies after two blocks more."""
    monkeypatch.setattr(completion, "SAVE_INTERVAL", 0)
    graph = random_graph(1)
    checkpoint = tmp_path / "new.tsv.checkpoint"
    model = MODELS["CP"](graph.shape)
    num_deaths = 0
    while True:
        try:
            found = complete(
                model,
                graph,
                **options,
                checkpoint=checkpoint,
                on_progress=stopping_after(2, SystemError("dead")),
            )
            break
        except SystemError:
            num_deaths += 1
    assert num_deaths >= 4
    assert_same(found, complete(model, graph, **options))


def test_a_short_search_leaves_nothing_behind(tmp_path, options):
    graph = random_graph(0)
    (tmp_path / ".new.tsv.checkpoint.a_1b2c3d.tmp").write_text("killed while it was written")
    complete(
        MODELS["CP"](graph.shape), graph, **options, checkpoint=tmp_path / "new.tsv.checkpoint"
    )
    assert not list(tmp_path.iterdir())


def test_other_options_are_refused(tmp_path, options):
    graph = random_graph(0)
    checkpoint = tmp_path / "new.tsv.checkpoint"
    model = MODELS["CP"](graph.shape)
    with pytest.raises(KeyboardInterrupt):
        complete(
            model,
            graph,
            **options,
            checkpoint=checkpoint,
            on_progress=stopping_after(3, KeyboardInterrupt()),
        )
    other_graph = dataclasses.replace(graph, test=graph.test[:3])
    for changed, sentence in (
        (
            {"top": 1000},
            "new.tsv.checkpoint is of a search with other options: top was 30 and is now 1000. Use",
        ),
        ({"types": True}, "types was False and is now True"),
        (
            {"heads": ["e1"], "loops": True},
            "loops was False and is now True; heads was None and is now .'e1'.",
        ),
        ({"relations": ["r0", "r2"]}, "relations was .'r0', 'r1', 'r2'. and is now .'r0', 'r2'."),
        ({"min_probability": 0.25}, "min_probability was 0.0 and is now 0.25"),
        ({"calibration": random_calibration(9)}, "checksum of the calibration was"),
    ):
        with pytest.raises(kg.RequestError, match=sentence):
            complete(model, graph, **{**options, **changed}, checkpoint=checkpoint)
    with pytest.raises(kg.RequestError, match="checksum of the weights was"):
        complete(kg.CP(graph.shape, dim=3), graph, **options, checkpoint=checkpoint)
    with pytest.raises(kg.RequestError, match="checksum of the graph was"):
        complete(model, other_graph, **options, checkpoint=checkpoint)
    assert checkpoint.exists()


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, options):
    graph = random_graph(0)
    checkpoint = tmp_path / "new.tsv.checkpoint"
    checkpoint.write_text("not ours")
    with pytest.raises(
        kg.RequestError, match="new.tsv.checkpoint cannot be read .*Remove it to start again"
    ):
        complete(MODELS["CP"](graph.shape), graph, **options, checkpoint=checkpoint)
    save_file({"x": torch.zeros(1)}, checkpoint)
    with pytest.raises(
        kg.RequestError, match="new.tsv.checkpoint cannot be read .*Remove it to start again"
    ):
        complete(MODELS["CP"](graph.shape), graph, **options, checkpoint=checkpoint)


KILLED = """
import sys
from dualkg.inference import completion
from dualkg.inference.completion import complete
from tests.inference.completion.brute_force import MODELS, random_calibration, random_graph

completion.SAVE_INTERVAL = 0
completion.MAX_SCORES["cpu"] = 27
graph = random_graph(0)


def wait_to_be_killed(done, total):
    print("checkpoint saved", flush=True)
    sys.stdin.read()


complete(
    MODELS["ComplEx"](graph.shape), graph, top=30, calibration=random_calibration(0), checkpoint=sys.argv[1],
    on_progress=wait_to_be_killed,
)
"""


def test_a_killed_search_resumes(tmp_path, options):
    checkpoint = tmp_path / "new.tsv.checkpoint"
    with Started(KILLED, checkpoint) as process:
        assert process.stdout.readline() == "checkpoint saved\n"
        process.kill()
    assert checkpoint.exists()
    graph = random_graph(0)
    model = MODELS["ComplEx"](graph.shape)
    assert_same(
        complete(model, graph, **options, checkpoint=checkpoint), complete(model, graph, **options)
    )
