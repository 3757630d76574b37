"""The study of defaults: what it trains, and its table."""

import pytest

from dualkg.tuning.plan import SearchPlan
from paper.records import Config
from paper.studies import STUDIES, best_recipe, measure_defaults
from tests.tuning.test_automatic import graph  # noqa: F401 - a fixture


def test_tuned_and_fixed_defaults_are_measured_with_every_seed(graph):  # noqa: F811
    lines = []
    config = Config(seeds=2, device="cpu", log=lines.append)
    results = measure_defaults(config, graph, plan=SearchPlan(max_trials=(2, 4)))
    assert [seed["seed"] for seed in results["seeds"]] == [0, 1]
    assert [set(seed) for seed in results["seeds"]] == [
        {"seed", "tuned", "fixed"}
    ] * 2  # there is no recipe
    assert results["seeds"][0]["tuned"]["trials"] == 4
    assert len(lines) == 2
    [table] = STUDIES["defaults"].tables(results, graph.name)
    assert [row[0] for row in table.rows] == ["default", "--no-tune"]
    assert table.rows[0][2].startswith(
        f"{sum(seed['tuned']['test'] for seed in results['seeds']) / 2:.4f} ±"
    )
    assert len(table.notes) == 2


@pytest.mark.parametrize(("graph_name", "relation_weight"), [("FB15k-237", 4.0), ("WN18RR", 0.0)])
def test_the_best_recipe_has_the_dimension_of_the_default(graph_name, relation_weight):
    recipe = best_recipe(graph_name, 64)
    assert recipe.data.graph == graph_name
    assert recipe.model.dim == 64
    assert recipe.loss.relation_weight == relation_weight
    assert best_recipe("Nations", 64) is None
