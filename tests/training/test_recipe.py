"""Recipes: what is written, read, changed and shipped."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.training.recipe import (
    Data,
    ModelConfig,
    Optimizer,
    Recipe,
    RegularizerConfig,
    Training,
    Validation,
    list_recipes,
    load_recipe,
    parse_changes,
    recipe_from,
)

weights = st.floats(0, 1e6)
recipes = st.builds(
    Recipe,
    data=st.builds(
        Data, graph=st.text(), columns=st.none() | st.tuples(*[st.text() | st.integers(1, 9)] * 3)
    ),
    model=st.builds(
        ModelConfig,
        name=st.text(),
        dim=st.integers(1, 4000),
        reciprocal=st.booleans(),
        init_scale=st.none() | st.just("xavier") | weights,
        options=st.dictionaries(
            st.text(), st.integers(-9, 9) | st.text() | st.booleans(), max_size=3
        ),
    ),
    regularizer=st.builds(RegularizerConfig, weight=weights, plain=st.none() | weights),
    loss=st.builds(kg.OneVsAll, frequency_weight=st.floats(0, 1)),
    optimizer=st.builds(
        Optimizer, learning_rate=st.floats(1e-9, 10), schedule=st.sampled_from(["linear", "cosine"])
    ),
    training=st.builds(Training, seed=st.integers(0, 2**32 - 1)),
    validation=st.builds(
        Validation, every=st.integers(1, 9), keep=st.sampled_from(["last", "best"])
    ),
)


@given(recipes)
def test_a_recipe_reads_back_as_it_was_written(recipe):
    assert recipe_from(tomllib.loads(recipe.as_toml()), source="test") == recipe


def test_changes_are_toml_values_or_text():
    changes = parse_changes(
        ["training.epochs=5", "model.name=CP", "validation.keep='best'", "data.graph=a b"]
    )
    assert changes == {
        "training.epochs": 5,
        "model.name": "CP",
        "validation.keep": "best",
        "data.graph": "a b",
    }


def test_shipped_recipes_are_listed_and_loaded_by_name():
    names = list_recipes()
    assert "fb15k-237/complex-dura" in names
    for name in names:
        assert load_recipe(name).data.graph.lower() == name.partition("/")[0]
    changed = load_recipe("umls/complex-dura", changes={"training.epochs": 3})
    assert changed == load_recipe("umls/complex-dura").with_changes({"training.epochs": 3})


def test_shipped_recipes_are_valid_and_name_what_exists():
    root = Path(__file__).parents[2]
    paths = [*root.glob("src/dualkg/recipes/*/*.toml"), *root.glob("paper/recipes/*/*.toml")]
    assert len(paths) >= 4
    for path in paths:
        recipe = load_recipe(path)
        recipe.model.model_copy(update={"dim": 2}).build(kg.GraphShape(3, 2), seed=0)
        recipe.regularizer.build()


def test_names_in_place_of_objects(small_graph):
    run = kg.train(
        "complex", small_graph, regularizer="dura", optimizer="adam", loss="onevsall", epochs=1
    )
    assert (run.recipe.model.name, run.recipe.regularizer.name, run.recipe.optimizer.name) == (
        "ComplEx",
        "DURA",
        "Adam",
    )
    assert run.recipe.optimizer.learning_rate == 0.03
    assert (
        kg.train("TransE", small_graph, optimizer="Adam", epochs=1).recipe.optimizer.learning_rate
        == 0.001
    )


@pytest.mark.parametrize("table", ["3", "0.5", "true", '"every"'])
def test_a_table_that_is_a_value_is_refused(tmp_path, table):
    path = tmp_path / "mine.toml"
    path.write_text(f"validation = {table}\n")
    for changes in ({}, {"training.epochs": 1}, {"validation.patience": 2}):
        with pytest.raises(kg.RequestError):
            load_recipe(path, changes=changes)
