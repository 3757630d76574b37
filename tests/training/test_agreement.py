"""Processes that were started with different recipes, data or folders are noticed, in all."""

import json
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.data.graph import Graph
from dualkg.tables.processes import Processes
from dualkg.training.agreement import (
    CHECKSUM,
    Disagreement,
    FolderNotShared,
    ProcessesDisagree,
    check_agreement,
    check_shared,
    find_differences,
    training_facts,
)
from dualkg.training.distributed import train_in_processes
from dualkg.training.recipe import Recipe
from tests.processes import COMMAND, Finished, Started, group_environment
from tests.raising import refused
from tests.training.test_distributed import RECIPE, graph_of, in_processes

CPU = torch.device("cpu")
FACTS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["1", "2", ""]))


# -- the comparison ----------------------------------------------------------


@given(st.lists(FACTS, min_size=1, max_size=4))
def test_a_fact_differs_if_it_is_not_the_same_in_all_processes(facts: list[dict[str, str]]) -> None:
    differences = find_differences(facts)
    expected = set()
    for name in "abcd":
        if any(of_process.get(name) != facts[0].get(name) for of_process in facts):
            expected.add(name)
    assert {difference.what for difference in differences} == expected
    assert len(differences) == len(expected)
    for difference in differences:
        assert difference.values == tuple(of_process.get(difference.what) for of_process in facts)


@given(FACTS, st.integers(1, 5))
def test_processes_with_the_same_facts_agree(facts: dict[str, str], count: int) -> None:
    in_another_order = dict(sorted(facts.items(), reverse=True))
    assert find_differences([facts, *[in_another_order] * count]) == []


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "training.seed": st.integers(0, 3),
        "optimizer.learning_rate": st.sampled_from([0.1, 0.2]),
        "regularizer.weight": st.sampled_from([0.01, 0.05]),
        "model.dim": st.sampled_from([8, 16]),
        "loss.label_smoothing": st.sampled_from([0.1, 0.2]),
        "validation.every": st.integers(0, 2),
    },
)


@given(CHANGES, CHANGES)
def test_every_setting_of_a_recipe_is_compared(
    changes: dict[str, Any], others: dict[str, Any]
) -> None:
    graph = graph_of(7)
    named = {"data.graph": "x", "regularizer.name": "DURA", "regularizer.weight": 0.1}
    recipes = [Recipe().with_changes({**named, **own}) for own in (changes, others)]
    facts = [training_facts(recipe, graph, CPU) for recipe in recipes]
    assert (not find_differences(facts)) == (recipes[0] == recipes[1])
    assert json.loads(json.dumps(facts[0])) == facts[0]


@given(st.permutations(range(12)))
def test_the_order_of_triples_is_compared(order: list[int]) -> None:
    graph = graph_of(7)
    triples = graph.train.copy()
    triples[:12] = triples[:12][order]
    other = replace(graph, train=triples).with_fingerprint()
    facts = [training_facts(Recipe(), of_process, CPU) for of_process in (graph, other)]
    is_same = np.array_equal(triples, graph.train)
    names = [difference.what for difference in find_differences(facts)]
    assert names == ([] if is_same else [CHECKSUM])


def test_a_graph_on_disk_is_another_than_the_same_in_memory(tmp_path: Path) -> None:
    """Their batches are in another order."""
    graph = graph_of(7)
    mapped = np.memmap(tmp_path / "train", graph.train.dtype, "w+", shape=graph.train.shape)
    mapped[:] = graph.train
    facts = [training_facts(Recipe(), own, CPU) for own in (graph, replace(graph, train=mapped))]
    (difference,) = find_differences(facts)
    assert difference.values == ("memory", "disk")


def test_a_graph_in_memory_without_a_checksum_is_compared_too() -> None:
    graph = graph_of(7)
    facts = [
        training_facts(Recipe(), each, CPU) for each in (graph, replace(graph, fingerprint=""))
    ]
    assert facts[0] == facts[1]


def test_the_message_names_the_difference_and_the_hosts() -> None:
    seeds = Disagreement("training.seed", ("0", "0", "1", "1"))
    error = ProcessesDisagree([seeds], ["a", "a", "b", "b"])
    assert str(error) == (
        "The processes disagree on training.seed: it is 0 in process 0 on a, and 1 in process 2 on "
        "b and 1 more. Start all of them with the same recipe, data and version; nothing was "
        "trained or written."
    )
    more = [Disagreement(name, ("0.1", None)) for name in ("x.a", "x.b", "x.c", "x.d", "x.e")]
    text = str(ProcessesDisagree(more, ["a", "b"]))
    assert "it is 0.1 in process 0 on a, and not set in process 1 on b." in text
    assert "They also differ in x.b, x.c, x.d, …." in text


# -- two processes -----------------------------------------------------------


def permuted(graph: Graph) -> Graph:
    return replace(graph, train=graph.train[::-1].copy()).with_fingerprint()


def disagree(group: Processes, path: Path) -> None:
    """Every pair of recipes or graphs that differ is refused in both processes, and no other."""
    assert group.gather("ä" * group.index) == ["", "ä"]
    graph = graph_of(9)
    base = {"data.graph": "x", "model.dim": 4, "training.epochs": 1, "regularizer.name": "DURA"}
    recipe = Recipe().with_changes({**base, "regularizer.weight": 0.1})
    for key, value in (
        ("training.seed", 1),
        ("optimizer.learning_rate", 0.03),
        ("regularizer.weight", 0.2),
    ):
        own = recipe if group.first else recipe.with_changes({key: value})
        values = (json.dumps(recipe.value_of(key)), json.dumps(value))
        with refused(
            ProcessesDisagree,
            differences=[Disagreement(key, values)],
            hosts=[socket.gethostname()] * 2,
            silent=not group.first,
        ):
            train_in_processes(own, graph, group, out=path)
    own_graph = graph if group.first else permuted(graph)
    with refused(ProcessesDisagree) as refusal:
        train_in_processes(recipe, own_graph, group, out=path)
    assert [difference.what for difference in refusal.value.differences] == [CHECKSUM]
    engine = {"the engine": "fast step" if group.first else "reference step"}
    with pytest.raises(ProcessesDisagree):
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
    sentence = f"training.seed: it is 0 in process 0 on {host}, and 7 in process 1 on {host}."
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
        with refused(
            FolderNotShared,
            path=path,
            hosts={1: host},
            first_host=host,
            silent=not group.first,
        ):
            check_shared(group, path, patience=0)
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


def test_the_message_names_the_hosts_that_do_not_see_the_folder() -> None:
    hosts = {8: "b", 9: "b", 16: "c", 24: "d", 32: "e"}
    error = FolderNotShared(Path("runs/big"), hosts, first_host="a")
    assert str(error) == (
        "The run folder runs/big is not the same for all processes: what process 0 writes there on "
        "a is not seen by process 8 on b, process 16 on c, process 24 on d, and on 1 more machine. "
        "Name a folder that all machines share, under the same path, with out; nothing was trained."
    )


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
