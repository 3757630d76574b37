"""Processes that were started with different recipes, data or folders are noticed, in all."""

import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dualkg as kg
from dualkg.data.graph import Graph
from dualkg.errors import RequestError
from dualkg.tables.processes import Processes
from dualkg.training.agreement import (
    CHECKSUM,
    check_agreement,
    check_shared,
    disagreement,
    training_facts,
)
from dualkg.training.distributed import train_in_processes
from dualkg.training.recipe import Recipe
from tests.processes import COMMAND, Finished, Started, group_environment
from tests.training.test_distributed import RECIPE, graph_of, in_processes

CPU = torch.device("cpu")


# -- the comparison ----------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"), [("training.seed", 1), ("model.dim", 9), ("loss.label_smoothing", 0.1)]
)
def test_settings_of_a_recipe_are_compared(key: str, value: float) -> None:
    graph = graph_of(7)
    recipes = [Recipe(), Recipe().with_changes({key: value})]
    facts = [training_facts(recipe, graph, CPU) for recipe in recipes]
    assert {name for name in facts[1] if facts[0].get(name) != facts[1][name]} == {f"`{key}`"}


def test_the_order_of_triples_is_compared() -> None:
    graph = graph_of(7)
    facts = [training_facts(Recipe(), own, CPU) for own in (graph, permuted(graph))]
    assert facts[0].pop(CHECKSUM) != facts[1].pop(CHECKSUM)
    assert facts[0] == facts[1]


def test_the_message_names_the_first_difference_and_the_hosts() -> None:
    facts = [{"a": "0", "b": "1"}, {"a": "0", "b": "1"}, {"a": "0"}, {"a": "0", "b": "2"}]
    assert disagreement(facts, ["a", "a", "b", "b"]) == (
        "The processes disagree on b: it is 1 in process 0 on a, and not set in process 2 on b. "
        "Start all of them with the same recipe, data and version; nothing was trained or written."
    )


# -- two processes -----------------------------------------------------------


def permuted(graph: Graph) -> Graph:
    return replace(graph, train=graph.train[::-1].copy()).with_fingerprint()


def disagree(group: Processes, path: Path) -> None:
    """Recipes or graphs that differ are refused in both processes, and no others."""
    assert group.gather("ä" * group.index) == ["", "ä"]
    graph = graph_of(9)
    base = {"data.graph": "x", "model.dim": 4, "training.epochs": 1, "regularizer.name": "DURA"}
    recipe = Recipe().with_changes({**base, "regularizer.weight": 0.1})
    others = [recipe.with_changes({"training.seed": 1}), recipe]
    for other, own_graph in zip(others, (graph, permuted(graph)), strict=True):
        own = (recipe, graph) if group.first else (other, own_graph)
        with pytest.raises(RequestError, match="The processes disagree on") as refusal:
            train_in_processes(*own, group, out=path)
        assert refusal.value.silent == (not group.first)
    engine = {"the engine": "fast step" if group.first else "reference step"}
    with pytest.raises(RequestError, match="fast step in process 0 on .*, and reference step in"):
        check_agreement(group, engine)
    assert not path.parent.exists()
    train_in_processes(recipe, graph, group, out=path)


def test_two_processes_that_disagree_train_nothing(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run"
    in_processes(2, disagree, path, folder=tmp_path)
    assert kg.load_run(path).report.mrr > 0


def run_together(
    words: Sequence[Sequence[object]], *, folders: Sequence[Path], **environment: str
) -> list[Finished]:
    """The command in processes that meet at a free port, each with its own words and folder."""
    group = group_environment(len(words))
    started = []
    for index, (own, folder) in enumerate(zip(words, folders, strict=True)):
        variables = {"RANK": str(index), **group, **environment}
        started.append(Started(COMMAND, *own, cwd=folder, environment=variables))
    finished = [process.finish() for process in started]
    for process in started:
        process.__exit__()
    return finished


def test_the_command_says_once_that_processes_disagree(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(RECIPE)
    words = ["train", "r.toml", "--out", "run", "--set", "training.epochs=1"]
    first, second = run_together(
        [words, [*words, "--set", "training.seed=7"]], folders=[tmp_path, tmp_path]
    )
    assert (first.code, second.code) == (2, 2)
    host = socket.gethostname()
    sentence = f"--seed: it is 0 in process 0 on {host}, and 7 in process 1 on {host}."
    assert sentence in first.err
    assert "Saved" not in first.err + first.out
    assert "disagree" not in second.err
    assert not (tmp_path / "run").exists()


# -- folders that are not shared ---------------------------------------------


def look_for_folders(group: Processes, folder: Path) -> None:
    """Only a folder that both processes see is accepted, whether it exists already or not."""
    own = folder / str(group.index)
    host = socket.gethostname()
    for path in (own / "run", own / "is-there", folder / "only-0" / str(group.index)):
        with pytest.raises(RequestError, match=f"is not seen by process 1 on {host}") as refusal:
            check_shared(group, path, patience=0)
        assert refusal.value.silent == (not group.first)
    check_shared(group, folder / "run")
    check_shared(group, folder / "shared")
    (folder / f"link-{group.index}").symlink_to(folder / "shared")
    check_shared(group, folder / f"link-{group.index}")
    for path in (folder, own):
        assert not [child for child in path.iterdir() if child.name.startswith(".")]


def test_a_folder_that_is_not_shared_is_noticed(tmp_path: Path) -> None:
    for name in ("0/is-there", "1/is-there", "shared", "only-0/0"):
        (tmp_path / "folders" / name).mkdir(parents=True)
    in_processes(2, look_for_folders, tmp_path / "folders", folder=tmp_path)
    assert not list((tmp_path / "folders" / "shared").iterdir())


@pytest.mark.slow
def test_the_command_refuses_a_folder_of_each_node(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "r.toml").write_text(RECIPE)
    words = ["train", "r.toml", "--out", "runs/run"]
    first, second = run_together([words, words], folders=folders)
    assert (first.code, second.code) == (2, 2)
    assert f"is not seen by process 1 on {socket.gethostname()}." in first.err
    assert "--out" in first.err
    assert "run folder" not in second.err
    for folder in folders:
        assert [child.name for child in folder.iterdir()] == ["r.toml"]
