"""Training what a table lacks."""

import pytest

import dualkg as kg
from dualkg.errors import RequestError, UnknownName
from paper.records import Config
from paper.registry import GRAPHS, MAIN, PATH_NETWORK, TABLES, recipe_of, rows_with_recipes
from tests.paper.conftest import TINY


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


def test_a_changed_recipe_is_not_mixed_with_runs_of_the_old_one(recipes, config, tmp_path):
    config().train_table(TINY, "world")
    path = recipes / "world" / "complex.toml"
    path.write_text(kg.load_recipe(path, changes={"training.epochs": 1}).as_toml())
    with pytest.raises(RequestError, match="has an older recipe of ComplEx. Move it away"):
        config().train_table(TINY, "world")
    records = config(runs=tmp_path / "other runs").train_table(TINY, "world")
    assert records["world/complex"].runs[0]["epochs"] == 1


def test_what_cannot_be_trained_is_refused(recipes, config, tmp_path):
    with pytest.raises(UnknownName, match="row of the table tiny .* Did you mean 'ComplEx-DURA'"):
        config(rows=("ComplEx-DUR",)).train_table(TINY, "world")
    with pytest.raises(UnknownName, match="FB15k-237"):
        Config("FB15k").graphs(GRAPHS)
    with pytest.raises(RequestError, match="RESCAL has no recipe on world: world/rescal.toml"):
        recipe_of(TINY.rows[2], "world")
    (recipes / "world" / "complex.toml").unlink()
    with pytest.raises(RequestError, match="tiny compares rows, and on world no pair has both"):
        config().train_table(TINY, "world")
    assert not (tmp_path / "runs").exists()


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
