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


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        (
            "[training]\nepoch = 5",
            r"training.epoch is not a setting of recipes. Did you mean 'epochs'\?",
        ),
        (
            "[trainning]\nepochs = 5",
            r"trainning is not a setting of recipes. Did you mean 'training'\?",
        ),
        (
            "[training]\nzzz = 5",
            r"training.zzz is not a setting of recipes. There are: epochs, batch_size",
        ),
        (
            "[training]\nepochs = 'ten'",
            r"training.epochs should be a valid integer, .*; 'ten' was given",
        ),
        (
            "[training]\nepochs = 0",
            r"training.epochs should be greater than or equal to 1; 0 was given",
        ),
        (
            "[optimizer]\nschedule = 'step'",
            r"optimizer.schedule should be 'constant', 'linear' or 'cosine'; 'step'",
        ),
        ("[training\nepochs = 5", r"recipe.toml is not TOML"),
        (
            "[loss]\nfrequency_weight = 2",
            r"loss.frequency_weight should be less than or equal to 1; 2 was given",
        ),
    ],
)
def test_invalid_recipes_are_refused_in_one_sentence(tmp_path, toml, sentence):
    path = tmp_path / "recipe.toml"
    path.write_text(toml)
    with pytest.raises(kg.RequestError, match=sentence):
        load_recipe(path)


def test_a_missing_recipe_is_refused():
    with pytest.raises(kg.RequestError, match="nowhere.toml cannot be read: No such file"):
        load_recipe(Path("nowhere.toml"))


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


@pytest.mark.parametrize("setting", ["epochs=5", "training.epochs", ""])
def test_a_change_without_section_or_value_is_refused(setting):
    with pytest.raises(kg.RequestError, match="written section.key=value, as in training.epochs=5"):
        parse_changes([setting])


def test_changes_are_validated():
    with pytest.raises(kg.RequestError, match="training.epoch is not a setting"):
        Recipe().with_changes({"training.epoch": 5})
    assert Recipe().with_changes({"training.epochs": 5}).training.epochs == 5


def test_shipped_recipes_are_listed_and_loaded_by_name():
    names = list_recipes()
    assert "fb15k-237/complex-dura" in names
    for name in names:
        assert load_recipe(name).data.graph.lower() == name.partition("/")[0]
    changed = load_recipe("umls/complex-dura", changes={"training.epochs": 3})
    assert changed == load_recipe("umls/complex-dura").with_changes({"training.epochs": 3})
    with pytest.raises(
        kg.RequestError,
        match="neither a file nor the name of a recipe. Did you mean 'umls/complex-dura'",
    ):
        load_recipe("umls/complex-dur")


def test_shipped_recipes_are_valid_and_name_what_exists():
    root = Path(__file__).parents[2]
    paths = [*root.glob("src/dualkg/recipes/*/*.toml"), *root.glob("paper/recipes/*/*.toml")]
    assert len(paths) >= 4
    for path in paths:
        recipe = load_recipe(path)
        recipe.model.model_copy(update={"dim": 2}).build(kg.GraphShape(3, 2), seed=0)
        recipe.regularizer.build()


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        (ModelConfig(name="Complx"), "No model is named 'Complx'. Did you mean 'ComplEx'?"),
        (ModelConfig(name="nowhere.at:all"), "'nowhere.at:all' cannot be imported"),
        (
            ModelConfig(name="dualkg.models:MODELS"),
            "should be a subclass of dualkg's EmbeddingModel",
        ),
        (ModelConfig(options={"depth": 3}), "ComplEx cannot be made from .model.: .*depth"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(choice, sentence):
    with pytest.raises(kg.RequestError, match=sentence):
        choice.build(kg.GraphShape(3, 2), seed=0)


def test_plain_and_mapped_are_settings_of_dura_only():
    with pytest.raises(kg.RequestError, match="N3 has no plain: those are DURA's"):
        RegularizerConfig(name="N3", weight=0.1, plain=1.0).build()
    with pytest.raises(kg.RequestError, match="No regularizer is named 'dur'. Did you mean 'DURA'"):
        RegularizerConfig(name="dur").build()


def test_a_regularizer_needs_a_weight():
    with pytest.raises(
        kg.RequestError, match="DURA needs a weight, the paper's λ: set regularizer.weight"
    ):
        RegularizerConfig(name="DURA").build()
    assert RegularizerConfig().build().weight == 0


@pytest.mark.parametrize("table", ["patience = 3", 'keep = "best"'])
def test_patience_and_keep_need_validation(table):
    with pytest.raises(
        kg.RequestError, match="validation: .* so every should be at least 1; it is 0"
    ):
        recipe_from(tomllib.loads(f"[validation]\n{table}"), source="recipe.toml")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda graph, model: kg.train(graph, model), "The model comes first, then the graph"),
        (
            lambda graph, model: kg.train(model, graph, regularizer=0.05),
            "float 0.05 was given",
        ),
        (
            lambda graph, model: kg.train(model, graph, loss=kg.OneVsAll),
            "the class OneVsAll was given",
        ),
        (
            lambda graph, model: kg.train(model, graph, optimizer="adamw"),
            "No optimizer is named 'adamw'. Did you mean 'Adam'",
        ),
        (
            lambda graph, model: kg.train(model, graph, validation=True),
            "validation should be an instance",
        ),
        (
            lambda graph, model: kg.train("ComplX", graph),
            "No model is named 'ComplX'. Did you mean 'ComplEx'",
        ),
        (lambda graph, model: kg.ComplEx("WN18RR", dim=2), r"Load it: kg.load_graph\('WN18RR'\)"),
        (lambda graph, model: kg.ComplEx(graph.train, dim=2), "'numpy.ndarray'> was given"),
        (
            lambda graph, model: kg.Optimizer(lr=0.1),
            "optimizer.lr is not a setting of Adagrad. Did you mean 'learning_rate'",
        ),
        (
            lambda graph, model: kg.Validation(patience=2),
            "patience and keep use the validation split",
        ),
    ],
)
def test_a_wrong_type_gets_a_sentence(small_graph, call, sentence):
    with pytest.raises(kg.RequestError, match=sentence):
        call(small_graph, kg.ComplEx(small_graph, dim=2))


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
