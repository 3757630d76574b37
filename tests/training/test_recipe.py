import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.errors import InvalidValue, UnknownName, Unsupported
from dualkg.models.base import NotAGraph
from dualkg.settings import InvalidSettings, UnknownSetting
from dualkg.training.api import WrongArgument
from dualkg.training.classes import ImportFailed
from dualkg.training.recipe import (
    Data,
    InvalidChange,
    InvalidRecipe,
    MissingSetting,
    ModelConfig,
    Optimizer,
    Recipe,
    RecipeNotFound,
    RegularizerConfig,
    Training,
    UnreadableRecipe,
    Validation,
    list_recipes,
    load_recipe,
    parse_changes,
    recipe_from,
)
from tests.raising import check_error, refused

UNVALIDATED = "patience and keep use the validation split, so every should be at least 1; it is 0"
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
    ("toml", "setting", "suggestions"),
    [
        ("[training]\nepoch = 5", "training.epoch", ["epochs"]),
        ("[trainning]\nepochs = 5", "trainning", ["training"]),
        ("[training]\nzzz = 5", "training.zzz", []),
    ],
)
def test_unknown_keys_of_recipes_are_refused(tmp_path, toml, setting, suggestions):
    path = tmp_path / "recipe.toml"
    path.write_text(toml)
    with refused(InvalidRecipe, source=str(path)) as caught:
        load_recipe(path)
    problem = caught.value.problem
    check_error(problem, UnknownSetting, setting=setting, owner="recipes", suggestions=suggestions)
    if not suggestions:
        assert problem.known[:2] == ["epochs", "batch_size"]


@pytest.mark.parametrize(
    ("toml", "setting", "expected", "found"),
    [
        (
            "[training]\nepochs = 'ten'",
            "training.epochs",
            "a valid integer, unable to parse string as an integer",
            "ten",
        ),
        ("[training]\nepochs = 0", "training.epochs", "greater than or equal to 1", 0),
        (
            "[optimizer]\nschedule = 'step'",
            "optimizer.schedule",
            "'constant', 'linear' or 'cosine'",
            "step",
        ),
        ("[loss]\nfrequency_weight = 2", "loss.frequency_weight", "less than or equal to 1", 2),
    ],
)
def test_invalid_values_of_recipes_are_refused(tmp_path, toml, setting, expected, found):
    path = tmp_path / "recipe.toml"
    path.write_text(toml)
    with refused(InvalidRecipe, source=str(path)) as caught:
        load_recipe(path)
    check_error(caught.value.problem, InvalidValue, setting=setting, expected=expected, found=found)


def test_recipes_that_cannot_be_read_are_refused(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("[training\nepochs = 5")
    with refused(UnreadableRecipe, path=path) as caught:
        load_recipe(path)
    assert caught.value.reason.startswith("is not TOML: Expected ']'")

    missing = Path("nowhere.toml")
    with refused(
        UnreadableRecipe, path=missing, reason="cannot be read: No such file or directory"
    ):
        load_recipe(missing)


KNOWN = ["epochs", "batch_size"]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            UnreadableRecipe(Path("a.toml"), "cannot be read: No such file or directory"),
            "a.toml cannot be read: No such file or directory.",
        ),
        (
            InvalidRecipe(
                "a.toml",
                UnknownSetting("training.epoch", "recipes", suggestions=["epochs"], known=KNOWN),
            ),
            "a.toml: training.epoch is not a setting of recipes. Did you mean 'epochs'?",
        ),
        (
            UnknownSetting("training.zzz", "recipes", suggestions=[], known=KNOWN),
            "training.zzz is not a setting of recipes. There are: epochs, batch_size.",
        ),
        (
            InvalidChange("epochs=5", ["training.epochs=5"]),
            "A change is written section.key=value, as in training.epochs=5; it is 'epochs=5'. "
            "Did you mean 'training.epochs=5'?",
        ),
        (
            RecipeNotFound("umls/complex", ["umls/complex-dura"]),
            "umls/complex is neither a file nor the name of a recipe. "
            "Did you mean 'umls/complex-dura'?",
        ),
        (
            UnknownName(
                "model", "Complx", suggestions=["ComplEx"], advice="Your own is module:Class."
            ),
            "No model is named 'Complx'. Did you mean 'ComplEx'? Your own is module:Class.",
        ),
        (
            ImportFailed("nowhere.at:all", "ModuleNotFoundError: No module named 'nowhere'"),
            "'nowhere.at:all' cannot be imported: ModuleNotFoundError: No module named 'nowhere'.",
        ),
        (
            MissingSetting("DURA", "regularizer.weight", meaning="a weight, the paper's λ"),
            "DURA needs a weight, the paper's λ: set regularizer.weight.",
        ),
        (
            WrongArgument("graph", expected="a graph", found="a model", advice="Swap them."),
            "graph should be a graph; a model was given. Swap them.",
        ),
        (
            InvalidSettings("validation", "every should be at least 1; it is 0"),
            "validation: every should be at least 1; it is 0.",
        ),
    ],
)
def test_words_of_messages(error, sentence):
    assert str(error) == sentence


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


@pytest.mark.parametrize(
    ("change", "suggestions"),
    [("epochs=5", ["training.epochs=5"]), ("training.epochs", []), ("", [])],
)
def test_a_change_without_section_or_value_is_refused(change, suggestions):
    with refused(InvalidChange, change=change, suggestions=suggestions):
        parse_changes([change])


def test_a_change_of_thousands_of_parts_is_refused_and_not_quoted_whole():
    key = ".".join(["a"] * 20_000)
    with refused(InvalidChange, change="a." * 25 + "…", suggestions=[]):
        Recipe().with_changes({key: 1})


def test_changes_are_validated():
    with refused(InvalidRecipe, source="") as caught:
        Recipe().with_changes({"training.epoch": 5})
    check_error(caught.value.problem, UnknownSetting, setting="training.epoch")
    assert Recipe().with_changes({"training.epochs": 5}).training.epochs == 5


def test_shipped_recipes_are_listed_and_loaded_by_name():
    names = list_recipes()
    assert "fb15k-237/complex-dura" in names
    for name in names:
        assert load_recipe(name).data.graph.lower() == name.partition("/")[0]
    changed = load_recipe("umls/complex-dura", changes={"training.epochs": 3})
    assert changed == load_recipe("umls/complex-dura").with_changes({"training.epochs": 3})
    with refused(RecipeNotFound, name="umls/complex-dur") as caught:
        load_recipe("umls/complex-dur")
    assert caught.value.suggestions[0] == "umls/complex-dura"


def test_shipped_recipes_are_valid_and_name_what_exists():
    root = Path(__file__).parents[2]
    paths = [*root.glob("src/dualkg/recipes/*/*.toml"), *root.glob("paper/recipes/*/*.toml")]
    assert len(paths) >= 4
    for path in paths:
        recipe = load_recipe(path)
        recipe.model.model_copy(update={"dim": 2}).build(kg.GraphShape(3, 2), seed=0)
        recipe.regularizer.build()


def test_a_model_that_cannot_be_built_is_refused():
    def build(**choices):
        ModelConfig(**choices).build(kg.GraphShape(3, 2), seed=0)

    with refused(UnknownName, kind="model", name="Complx", suggestions=["ComplEx"]):
        build(name="Complx")
    with refused(
        ImportFailed,
        name="nowhere.at:all",
        reason="ModuleNotFoundError: No module named 'nowhere'",
    ):
        build(name="nowhere.at:all")
    with refused(Unsupported, what="'dualkg.models:MODELS'") as caught:
        build(name="dualkg.models:MODELS")
    assert caught.value.reason.startswith("should be a subclass of dualkg's Model")
    with refused(Unsupported, what="ComplEx") as caught:
        build(options={"depth": 3})
    assert caught.value.reason.startswith("cannot be made from [model]: ")
    assert caught.value.reason.endswith("'depth'")


def test_plain_and_mapped_are_settings_of_dura_only():
    with refused(Unsupported, what="N3", reason="has no plain: those are DURA's"):
        RegularizerConfig(name="N3", weight=0.1, plain=1.0).build()
    with refused(UnknownName, kind="regularizer", name="dur", suggestions=["DURA"]):
        RegularizerConfig(name="dur").build()


def test_a_regularizer_needs_a_weight():
    with refused(
        MissingSetting,
        owner="DURA",
        setting="regularizer.weight",
        meaning="a weight, the paper's λ",
    ):
        RegularizerConfig(name="DURA").build()
    assert RegularizerConfig().build().weight == 0


@pytest.mark.parametrize("table", ["patience = 3", 'keep = "best"'])
def test_patience_and_keep_need_validation(table):
    with refused(InvalidRecipe, source="recipe.toml") as caught:
        recipe_from(tomllib.loads(f"[validation]\n{table}"), source="recipe.toml")
    check_error(caught.value.problem, InvalidSettings, where="validation", reason=UNVALIDATED)


def test_a_final_sample_needs_its_size():
    with refused(InvalidRecipe, source="recipe.toml") as caught:
        recipe_from({"validation": {"final": "sample"}}, source="recipe.toml")
    reason = "final = 'sample' ranks a sample after training, so queries should be its size"
    check_error(caught.value.problem, InvalidSettings, where="validation", reason=reason)


@pytest.mark.parametrize(
    ("call", "kind", "parameters"),
    [
        (
            lambda graph, model: kg.train(graph, model),
            WrongArgument,
            {"argument": "graph", "expected": "a graph", "found": "a model"},
        ),
        (
            lambda graph, model: kg.train(model, graph, regularizer=0.05),
            WrongArgument,
            {"argument": "regularizer", "found": "float 0.05"},
        ),
        (
            lambda graph, model: kg.train(model, graph, loss=kg.OneVsAll),
            WrongArgument,
            {"argument": "loss", "found": "the class OneVsAll"},
        ),
        (
            lambda graph, model: kg.train(model, graph, validation=True),
            WrongArgument,
            {"argument": "validation", "found": "bool True"},
        ),
        (
            lambda graph, model: kg.train("ComplX", graph),
            UnknownName,
            {"kind": "model", "name": "ComplX", "suggestions": ["ComplEx"]},
        ),
        (lambda graph, model: kg.ComplEx("WN18RR", dim=2), NotAGraph, {"given": "WN18RR"}),
        (
            lambda graph, model: kg.Optimizer(lr=0.1),
            UnknownSetting,
            {"setting": "optimizer.lr", "owner": "Adagrad", "suggestions": ["learning_rate"]},
        ),
        (
            lambda graph, model: kg.Validation(patience=2),
            InvalidSettings,
            {"where": "validation", "reason": UNVALIDATED},
        ),
    ],
)
def test_a_wrong_type_gets_a_sentence(small_graph, call, kind, parameters):
    with refused(kind, **parameters):
        call(small_graph, kg.ComplEx(small_graph, dim=2))


def test_an_unknown_optimizer_of_train(small_graph):
    with refused(InvalidRecipe, source="") as caught:
        kg.train("ComplEx", small_graph, optimizer="adamw")
    check_error(
        caught.value.problem, UnknownName, kind="optimizer", name="adamw", suggestions=["Adam"]
    )


def test_a_model_for_an_array_of_triples(small_graph):
    with pytest.raises(NotAGraph) as caught:
        kg.ComplEx(small_graph.train, dim=2)
    assert caught.value.given is small_graph.train


def test_words_of_what_is_not_a_graph():
    example = "A model is built for a graph or its shape, as in kg.ComplEx(graph, dim=100); "
    assert str(NotAGraph("WN18RR")) == (
        f"{example}'WN18RR' was given. Load it: kg.load_graph('WN18RR')."
    )
    assert str(NotAGraph(3)) == f"{example}<class 'int'> was given."


def test_words_about_a_model_and_a_graph_in_the_wrong_order(small_graph):
    with pytest.raises(WrongArgument) as caught:
        kg.train(small_graph, kg.ComplEx(small_graph, dim=2))
    advice = "The model comes first, then the graph: kg.train(model, graph)."
    assert str(caught.value).endswith(advice)


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
