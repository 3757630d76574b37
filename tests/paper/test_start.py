from __future__ import annotations

import pytest

import dualkg as kg
from paper.plan import GRAPHS, MAIN, OTHERS, TABLES, graph_named, recipe_of, rows_with_recipes
from paper.start import reproduce, trained_run
from tests.paper.conftest import TINY


def test_what_is_missing_is_trained_and_what_is_kept_is_not(recipes, tmp_path):
    where = {"records": tmp_path / "records", "runs": tmp_path / "runs"}
    told: list[str] = []
    first = reproduce(TINY, "world", seeds=1, **where, tell=told.append)
    assert list(first) == ["world/complex", "world/complex-dura"]  # RESCAL has no recipe
    assert len(told) == 3  # two rows, and that RESCAL is left out
    again = reproduce(TINY, "world", seeds=1, **where, tell=told.append)
    assert told[3:] == ["Without a recipe on world, and left out: RESCAL."]
    assert again["world/complex-dura"].runs == first["world/complex-dura"].runs

    more = reproduce(TINY, "world", seeds=2, **where, tell=told.append)
    assert len(told) == 7
    assert more["world/complex-dura"].seeds == [0, 1]
    assert more["world/complex-dura"].runs[0] == first["world/complex-dura"].runs[0]  # not trained again


def test_a_record_gets_the_seeds_that_it_lacks_without_the_runs_of_the_others(recipes, tmp_path):
    first = reproduce(TINY, "world", seeds=1, records=tmp_path / "records", runs=tmp_path / "runs")
    more = reproduce(TINY, "world", seeds=3, records=tmp_path / "records", runs=tmp_path / "elsewhere")
    assert sorted(path.name for path in (tmp_path / "elsewhere" / "world" / "complex-dura").glob("seed-*")) == [
        "seed-1",
        "seed-2",
    ]
    before, after = (found["world/complex-dura"] for found in (first, more))
    assert after.seeds == [0, 1, 2]
    assert after.runs[0] == before.runs[0]
    for number, run in enumerate(after.runs):
        assert (1 / after.ranks()[number]).mean() == pytest.approx(run["reports"]["test"]["metrics"]["mrr"])
    assert whole(after.folder) == ["ranks.parquet", "recipe.toml", "record.json"]


def test_one_row_alone(recipes, tmp_path):
    where = {"records": tmp_path / "records", "runs": tmp_path / "runs"}
    found = reproduce(TINY, "world", seeds=1, only=["complex-dura"], **where)
    assert list(found) == ["world/complex-dura"]
    assert not (tmp_path / "runs" / "world" / "complex").exists()
    with pytest.raises(kg.RequestError, match="The table tiny has no row 'ComplEx-DUR'. .*ComplEx-DURA"):
        reproduce(TINY, "world", seeds=1, only=["ComplEx-DUR"], **where)


def whole(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_table_without_its_recipes_is_refused(recipes, tmp_path):
    (recipes / "world" / "complex.toml").unlink()
    told: list[str] = []
    with pytest.raises(kg.RequestError, match="on world none has both its recipes"):
        reproduce(TINY, "world", seeds=1, records=tmp_path / "records", runs=tmp_path / "runs", tell=told.append)
    assert not (tmp_path / "runs").exists()


def test_a_changed_recipe_is_not_mixed_with_runs_of_the_old_one(recipes, tmp_path):
    where = {"records": tmp_path / "records", "runs": tmp_path / "runs"}
    reproduce(TINY, "world", seeds=1, **where)
    path = recipes / "world" / "complex.toml"
    path.write_text(kg.load_recipe(path, changes={"training.epochs": 1}).as_toml())
    with pytest.raises(kg.RequestError, match="is of an older recipe of ComplEx. Move it away, or use another --runs"):
        reproduce(TINY, "world", seeds=1, **where)
    kept = reproduce(TINY, "world", seeds=1, records=where["records"], runs=tmp_path / "other runs")
    assert kept["world/complex"].runs[0]["epochs"] == 1


def test_weights_are_trained_where_only_a_record_is_kept(recipes, tmp_path):
    graph = kg.load_graph("world")
    folder = trained_run(TINY.rows[1], "world", graph, seed=1, runs=tmp_path / "runs", device="cpu")
    run = kg.load_run(folder)
    assert (run.recipe.regularizer.name, run.recipe.training.seed) == ("DURA", 1)
    before = folder.stat().st_mtime_ns
    assert trained_run(TINY.rows[1], "world", graph, seed=1, runs=tmp_path / "runs", device="cpu") == folder
    assert folder.stat().st_mtime_ns == before


def test_a_row_without_a_recipe_is_told(recipes):
    with pytest.raises(kg.RequestError, match=r"no recipe of RESCAL on world: .*rescal\.toml is missing"):
        recipe_of(TINY.rows[2], "world")


def test_graphs_are_known_by_name():
    assert graph_named("fb15K-237") == "FB15k-237"
    with pytest.raises(kg.RequestError, match="'FB15k' is no graph of these tables"):
        graph_named("FB15k")


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_main_table_has_its_recipes_on_every_graph(graph):
    for row in MAIN.rows if graph in GRAPHS[:2] else MAIN.rows[len(OTHERS) :]:
        recipe = recipe_of(row, graph)
        assert recipe.data.graph == graph
        model, _, regularizer = row.name.partition("-")
        assert recipe.model.name == model
        assert recipe.regularizer.name == (regularizer or "none")


@pytest.mark.parametrize("graph", GRAPHS[:2])
@pytest.mark.parametrize("table", TABLES)
def test_every_table_has_all_its_recipes_on_the_graphs_that_are_here(table, graph):
    found = rows_with_recipes(TABLES[table].rows, graph)
    assert found == [row for row in TABLES[table].rows if row.stem and (table != "beyond" or row in found)]
    assert any({row.name for row in found} >= set(pair) for pair in TABLES[table].pairs)
