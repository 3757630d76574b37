"""`kg.calibrate`, `kg.complete` and `kg.search`: from a run, from its folder, and with wrong
arguments.
"""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import dualkg as kg
from dualkg.errors import InvalidValue, PathExists, RequestError, UnknownName
from dualkg.inference.completion import complete as complete_graph
from dualkg.inference.probability import calibration_for
from dualkg.training.errors import NotARun
from tests.conftest import graph_of
from tests.raising import refused


@pytest.fixture(scope="module")
def graph() -> kg.Graph:
    random = np.random.default_rng(0)
    triples = np.unique(np.stack([random.integers(0, n, 200) for n in (20, 3, 20)], axis=1), axis=0)
    random.shuffle(triples)
    return graph_of(triples[40:], triples[:20], triples[20:40], num_entities=20, num_relations=3)


@pytest.fixture
def run(graph, tmp_path) -> kg.Run:
    return kg.train(
        kg.ComplEx(graph.shape, dim=4, init_scale=0.5), graph, epochs=1, out=tmp_path / "run"
    )


def test_calibrate_fits_saves_and_checks(run):
    calibration = kg.calibrate(run.folder, coverage=0.8)
    saved = json.loads((run.folder / "calibration.json").read_text())
    assert saved["checks"] == json.loads(json.dumps(calibration.checks))
    assert calibration.checks["coverage"]["target_coverage"] == 0.8
    assert calibration.checks["calibration"]["overall"]["num_true"] == 40
    assert kg.calibrate(run).as_dict() == calibration.as_dict()
    (run.folder / "calibration.json").write_text("{")
    with pytest.raises(kg.RequestError, match="is damaged"):
        kg.calibrate(run)
    assert kg.calibrate(run, overwrite=True).as_dict() == calibration.as_dict()
    assert all(
        one.probability is not None
        for one in kg.load_run(run.folder).predictor().tails("e1", "r0", known="omit")
    )


def test_a_share_of_missing_triples_is_saved_without_a_fit(run):
    """It changes probabilities of new triples alone: not their order, and no check on test."""
    measured = kg.calibrate(run)
    before = kg.complete(run, top=30)
    given = kg.calibrate(run, missing_share=0.5)
    assert {**given.as_dict(), "missing_share": None} == measured.as_dict()
    assert given.checks["calibration"] == measured.checks["calibration"]
    assert given.checks["new_triples"] is None

    after = kg.complete(kg.load_run(run.folder), top=30)
    assert (after.triples == before.triples).all()
    assert (after.probability > before.probability).all()
    assert kg.calibrate(run.folder).missing_share == 0.5
    again = kg.calibrate(run.folder, overwrite=True)
    assert (again.as_dict(), again.checks) == (measured.as_dict(), measured.checks)
    with refused(InvalidValue, setting="missing_share"):
        kg.calibrate(run, missing_share=1.0)


def test_types_are_saved_with_the_calibration_and_used(run, tmp_path):
    plain = kg.calibrate(run)
    queries = [(head, relation) for head in range(20) for relation in range(3)]

    def probabilities():
        predictor = kg.load_run(run.folder).predictor()
        answers = predictor.tails(*map(list, zip(*queries, strict=True)), k=20)
        return [{one.id: one.probability for one in of_query} for of_query in answers]

    without_types = probabilities()
    path = tmp_path / "types.tsv"
    # Nobody else is of the type of an odd entity, so nothing says that it lacks a triple.
    types = [f"e{id}\t{f'odd {id}' if id % 2 else 'even'}\n" for id in range(20)]
    path.write_text("".join(types), encoding="utf-8")
    with_file = kg.calibrate(run, types_file=path)
    assert with_file.checks["types"] == {"source": "types.tsv", "entities": 20}
    with_types = probabilities()
    assert with_types != without_types
    # The lines are those of before, and the types are kept until another is asked for.
    assert with_file.slopes.tolist() == plain.slopes.tolist()
    assert kg.calibrate(run).types.names[:2] == ["even", "odd 1"]
    assert probabilities() == with_types
    of_relation = kg.calibrate(run, type_relation="r2").types
    assert of_relation.source == "the relation r2"
    assert kg.calibrate(run, overwrite=True).types is None
    assert probabilities() == without_types


def test_types_are_from_a_relation_or_a_file(run, tmp_path):
    with pytest.raises(kg.RequestError, match="give `type_relation` or `types_file`, not both"):
        kg.calibrate(run, type_relation="r2", types_file=tmp_path / "types.tsv")
    with refused(UnknownName, name="instance_of"):
        kg.calibrate(run, type_relation="instance_of")
    assert not (run.folder / "calibration.json").exists()


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("is_done", [True, False])
def test_a_calibration_that_is_replaced_is_the_old_or_the_new_one(
    run, monkeypatch, failure, is_done
):
    """With its checks, wherever the command is killed or the disk is full."""
    path = run.folder / "calibration.json"
    kg.calibrate(run, coverage=0.8, overwrite=True)
    allowed = [path.read_bytes()]
    kg.calibrate(run, coverage=0.7, overwrite=True)
    allowed.append(path.read_bytes())
    assert len(set(allowed)) == 2
    replace = os.replace
    for last in range(1, 10):
        path.write_bytes(allowed[0])
        calls = []

        def stop(*names, calls=calls, last=last, **folders):
            calls.append(names)
            if len(calls) == last and not is_done:
                raise failure
            replace(*names, **folders)
            if len(calls) == last:
                raise failure

        monkeypatch.setattr("os.replace", stop)
        try:
            kg.calibrate(run, coverage=0.7, overwrite=True)
        except (KeyboardInterrupt, OSError):
            pass
        else:
            break  # there is no further call
        finally:
            monkeypatch.undo()
        assert path.read_bytes() in allowed
    assert last == 2  # the calibration, and no further call


def test_calibrate_a_run_without_a_folder(graph):
    run = kg.train(kg.ComplEx(graph.shape, dim=4, init_scale=0.5), graph, epochs=1)
    assert 0 <= kg.calibrate(run).checks["coverage"]["overall"]["coverage"] <= 1


def test_complete_is_the_completion_of_the_model_with_its_calibration(run, tmp_path):
    found = kg.complete(run.folder, top=30, out=tmp_path / "new.parquet", types=True)
    wanted = complete_graph(
        run.model, run.graph, top=30, calibration=calibration_for(run), types=True
    ).table()
    assert (
        found.table().to_pylist()
        == wanted.to_pylist()
        == pq.read_table(tmp_path / "new.parquet").to_pylist()
    )
    assert kg.complete(run, top=30, types=True).table().equals(wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.parquet", "run"]
    with refused(PathExists, path=tmp_path / "new.parquet"):
        kg.complete(run, out=tmp_path / "new.parquet")


def test_search_takes_a_mapping_and_has_a_folder_of_its_own(graph, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tables = {
        "model": {"name": "DistMult", "dim": 2},
        "training": {"epochs": 1},
        "space": {"regularizer.weight": [0.0, 0.1]},
    }
    result = kg.search(tables, graph=graph)
    assert result.num_done == 2
    assert result.recipe is not None
    assert (tmp_path / "runs" / "tune-search" / "best.toml").exists()
    assert kg.search is kg.tuning.search


@pytest.mark.parametrize(
    ("function", "given", "kind", "parameters"),
    [
        (
            kg.calibrate,
            3,
            RequestError,
            {},
        ),
        (
            kg.complete,
            None,
            RequestError,
            {},
        ),
        (kg.calibrate, "nowhere", NotARun, {"path": Path("nowhere")}),
        (
            kg.search,
            3,
            InvalidValue,
            {
                "setting": "space",
                "expected": "a .toml file, a mapping of its tables, or a SearchSpace",
                "found": 3,
            },
        ),
        (
            kg.search,
            {"spaces": {}},
            kg.RequestError,
            {},
        ),
    ],
)
def test_wrong_arguments_are_named(function, given, kind, parameters):
    with refused(kind, **parameters):
        function(given)
