"""Path networks in the tables: training by seeds, ensembles, and unseen entities."""

import json

import pytest

import dualkg as kg
from paper import registry
from paper.records import Config, load_record
from paper.studies import STUDIES, study_inductive_models, study_path_duality
from tests.inference.test_extension import bead_graph
from tests.paper.conftest import DURA

PATHS = {
    "model.name": "PathNetwork",
    "model.options.steps": 2,
    "regularizer.name": "none",
    "optimizer.name": "Adam",
    "training.epochs": 1,
}


@pytest.fixture
def words(write_recipes, tmp_path, monkeypatch) -> tuple[object, ...]:
    write_recipes({"path-network": PATHS, "rescal-dura": {"model.name": "RESCAL"} | DURA})
    monkeypatch.setattr(registry, "GRAPHS", ("world",))
    return ("paths", "--dataset", "world", "--device", "cpu", "--records", tmp_path / "records")


def test_seeds_of_several_calls_are_one_record(run_paper, words, tmp_path):
    records = tmp_path / "records"
    shown = run_paper(*words, "--seeds", 1, "--ensemble", "rescal-dura", "--json")
    assert shown.code == 0, shown.err
    table, ensembles = shown.json
    measured = {row["row"]: row["measured"] for row in table["rows"]}
    assert measured["PathNetwork"]["mrr"]["sd"] == 0
    assert [row["seed"] for row in ensembles["rows"]] == [0]

    shown = run_paper(*words, "--seeds", 2, "--ensemble", "RESCAL-DURA", "--shared-device")
    assert shown.code == 0, shown.err
    record = load_record(records / "world" / "path-network")
    assert record.seeds == [0, 1]
    assert [run["costs"].get("shared_device", False) for run in record.runs] == [False, True]
    saved = json.loads((records / "figures" / "path-ensemble-world.json").read_text())["results"]
    assert [(one["row"], one["seed"]) for one in saved] == [
        ("PathNetwork + RESCAL-DURA", 0),
        ("PathNetwork + RESCAL-DURA", 1),
    ]
    assert len(saved[0]["weights"]) == 2
    assert saved[0]["best_member"] in ("PathNetwork", "RESCAL-DURA")
    page = (records / "RESULTS.md").read_text()
    assert "## Path networks" in page
    assert "Ensembles of a path network and embeddings: world" in page


@pytest.mark.parametrize("graph", ["YAGO3-10-quarter", "world", *registry.PATHS.other_graphs])
def test_a_path_network_has_embeddings_beside_it(graph):
    assert Config(dataset=graph).graphs((), registry.PATHS.other_graphs) == (graph,)
    rows = registry.rows_with_recipes(registry.PATHS.rows, graph)
    assert {"PathNetwork", "ComplEx-DURA"} <= {row.name for row in rows}


def test_both_directions_of_a_network_are_weighted_on_validation():
    graph = bead_graph()
    graph = kg.Graph(
        graph.name, graph.entities, graph.relations, graph.train, graph.test, graph.test
    )
    recipe = kg.Recipe().with_changes({"training.batch_size": 32} | PATHS | {"model.dim": 16})
    run = kg.train_recipe(recipe, graph=graph, device="cpu")
    result = study_path_duality(run, graph)
    mrrs = dict(result["valid_by_weight"][str(result["normalized"])])
    assert mrrs[0.0] == pytest.approx(run.report_on("valid").mrr)
    assert mrrs[result["weight"]] == max(mrrs.values())
    assert result["valid"]["both"]["mrr"] == pytest.approx(max(mrrs.values()))
    about = {"row": "PathNetwork", "recipes": "", "seed": 0}
    rows = list(STUDIES["path-duality"].rows([{**about, **result}]))
    assert [row[0] for row in rows] == ["PathNetwork", "both directions"]


def test_unseen_entities_are_added_to_both_models(tmp_path):
    graph = bead_graph()
    graph = kg.Graph(
        graph.name, graph.entities, graph.relations, graph.train, graph.test, graph.test
    )
    base = {"data.graph": "beads", "training.batch_size": 32}
    recipes = {
        "PathNetwork": kg.Recipe().with_changes(base | PATHS | {"model.dim": 16}),
        "ComplEx-DURA": kg.Recipe().with_changes(base | DURA | {"model.dim": 8}),
    }
    config = Config(seeds=1, device="cpu")
    results = list(study_inductive_models(graph, recipes, config=config, share=0.2))
    assert [(one["row"], one["seed"]) for one in results] == [
        ("PathNetwork", 0),
        ("ComplEx-DURA", 0),
    ]
    assert results[0]["num_triples"] == results[1]["num_triples"] > 0
    queries = [one["all_queries"]["num_queries"] for one in results]
    assert queries[0] == queries[1] > 0
    assert json.loads(json.dumps(results)) == results
    [table] = STUDIES["inductive-models"].tables(results, graph.name)
    assert [row[0] for row in table.rows] == ["PathNetwork", "ComplEx-DURA"]

    recorded = Config(seeds=2, device="cpu", earlier=tuple(results))
    [paths] = study_inductive_models(
        graph, {"PathNetwork": recipes["PathNetwork"]}, config=recorded, share=0.2
    )
    assert paths["seed"] == 1
