"""Training what a table lacks."""

import pytest

import dualkg as kg
from dualkg.errors import UnknownName, Unsupported
from dualkg.training.run import RunFolder
from paper.records import Config, OlderRecipe
from paper.registry import GRAPHS, MAIN, PATH_NETWORK, TABLES, recipe_of, rows_with_recipes
from tests.paper.conftest import TINY
from tests.raising import refused


@pytest.fixture
def config(tmp_path):
    """Make a configuration with some options."""

    def make(seeds: int = 1, **options) -> Config:
        folders = {"records": tmp_path / "records", "runs": tmp_path / "runs", "device": "cpu"}
        return Config(**(folders | {"seeds": seeds} | options))

    return make


def test_missing_seeds_are_trained_and_recorded_ones_are_not(recipes, config):
    lines: list[str] = []
    first = config(log=lines.append).train_table(TINY, "world")
    assert list(first) == ["world/complex", "world/complex-dura"]  # RESCAL has no recipe
    assert len(lines) == 3  # two rows, and that RESCAL is left out
    again = config(log=lines.append).train_table(TINY, "world")
    assert lines[3:] == ["Left out, because there is no recipe on world: RESCAL."]
    assert again["world/complex-dura"].runs == first["world/complex-dura"].runs

    more = config(2, log=lines.append).train_table(TINY, "world")
    assert len(lines) == 7
    assert more["world/complex-dura"].seeds == [0, 1]
    assert (
        more["world/complex-dura"].runs[0] == first["world/complex-dura"].runs[0]
    )  # not trained again


def test_a_record_is_extended_by_seeds_without_the_runs_of_the_others(recipes, config, tmp_path):
    before = config().train_table(TINY, "world")["world/complex-dura"]
    after = config(3, runs=tmp_path / "elsewhere").train_table(TINY, "world")["world/complex-dura"]
    trained = sorted(
        path.name for path in (tmp_path / "elsewhere" / "world" / "complex-dura").glob("seed-*")
    )
    assert trained == ["seed-1", "seed-2"]
    assert after.seeds == [0, 1, 2]
    assert after.runs[0] == before.runs[0]
    for seed in (1, 2):
        report = kg.load_run(
            tmp_path / "elsewhere" / "world" / "complex-dura" / f"seed-{seed}"
        ).report
        assert after.test_metrics[seed].mrr == pytest.approx(report.mrr)
    assert sorted(path.name for path in after.folder.iterdir()) == [
        "ranks.parquet",
        "recipe.toml",
        "record.json",
    ]


def test_one_row_alone(recipes, config, tmp_path):
    assert list(config(rows=("complex-dura",)).train_table(TINY, "world")) == ["world/complex-dura"]
    assert not (tmp_path / "runs" / "world" / "complex").exists()
    with pytest.raises(UnknownName) as error:
        config(rows=("ComplEx-DUR",)).train_table(TINY, "world")
    assert error.value.kind == "row of the table tiny"
    assert error.value.suggestions[0] == "ComplEx-DURA"


def test_a_table_without_a_pair_of_recipes_is_refused(recipes, config, tmp_path):
    (recipes / "world" / "complex.toml").unlink()
    with refused(
        Unsupported,
        what="The table tiny",
        reason="compares rows, and on world no pair has both recipes",
    ):
        config().train_table(TINY, "world")
    assert not (tmp_path / "runs").exists()


def test_a_changed_recipe_is_not_mixed_with_runs_of_the_old_one(recipes, config, tmp_path):
    config().train_table(TINY, "world")
    path = recipes / "world" / "complex.toml"
    path.write_text(kg.load_recipe(path, changes={"training.epochs": 1}).as_toml())
    with refused(OlderRecipe, row="ComplEx") as error:
        config().train_table(TINY, "world")
    assert str(error.value) == (
        f"{error.value.folder} has an older recipe of ComplEx. Move it away, or use another runs."
    )
    records = config(runs=tmp_path / "other runs").train_table(TINY, "world")
    assert records["world/complex"].runs[0]["epochs"] == 1


def test_weights_are_trained_once(recipes, config):
    graph = kg.load_graph("world")
    folder = config().trained_run(TINY.rows[1], graph, 1)
    run = kg.load_run(folder)
    assert (run.recipe.regularizer.name, run.recipe.training.seed) == ("DURA", 1)
    weights = RunFolder(folder).weights
    before = weights.stat().st_mtime_ns
    assert config().trained_run(TINY.rows[1], graph, 1) == folder
    assert weights.stat().st_mtime_ns == before


def test_a_missing_recipe_is_reported(recipes):
    with refused(
        Unsupported,
        what="RESCAL",
        reason="has no recipe on world: world/rescal.toml is missing",
    ):
        recipe_of(TINY.rows[2], "world")


def test_graphs_are_looked_up_by_name():
    assert Config("fb15K-237").graphs(GRAPHS) == ("FB15k-237",)
    assert Config("umls").graphs(("UMLS",)) == ("UMLS",)
    with pytest.raises(UnknownName) as error:
        Config("FB15k").graphs(GRAPHS)
    assert error.value.name == "FB15k"


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_main_table_has_recipes_on_every_graph(graph):
    for row in MAIN.rows if graph in GRAPHS[:2] else MAIN.rows[4:]:
        recipe = recipe_of(row, graph)
        assert recipe.data.graph == graph
        model, _, regularizer = row.name.partition("-")
        assert recipe.model.name == model
        assert recipe.regularizer.name == (regularizer or "none")


@pytest.mark.parametrize("graph", GRAPHS[:2])
@pytest.mark.parametrize("table", TABLES)
def test_every_table_has_its_recipes_on_the_graphs_of_the_paper(table, graph):
    found = rows_with_recipes(TABLES[table].rows, graph)
    assert found == [
        row
        for row in TABLES[table].rows
        if row.recipe and (table not in ("extensions", "paths") or row in found)
    ]
    if table == "paths" and PATH_NETWORK not in found:
        pytest.skip(f"there is no recipe of path networks on {graph}")
    assert any({row.name for row in found} >= set(pair) for pair in TABLES[table].pairs)
