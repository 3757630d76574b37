"""Search spaces: what they contain, and the errors for mistakes in them."""

import tomllib
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.tuning.space import Range, load_space, space_from
from tests.families import EMBEDDINGS

SHIPPED = sorted((Path(__file__).parents[2] / "paper" / "spaces").glob("*.toml"))


def space(text: str):
    return space_from(tomllib.loads(text), source="mine.toml")


LISTS = st.fixed_dictionaries(
    {
        "model.dim": st.lists(st.integers(1, 50), min_size=1, max_size=4, unique=True),
        "regularizer.weight": st.lists(st.floats(0, 9), min_size=1, max_size=4, unique=True),
        "optimizer.name": st.lists(
            st.sampled_from(["Adagrad", "Adam", "SGD"]), min_size=1, unique=True
        ),
    }
)


@given(lists=LISTS, seed=st.integers(0, 2**32 - 1))
def test_grid_contains_every_point_once(lists, seed):
    loaded = space_from({"space": lists, "search": {"seed": seed}}, source="it")
    points = [tuple(loaded.point(number).values()) for number in range(loaded.num_trials)]
    assert len(points) == loaded.num_points
    assert set(points) == set(product(*lists.values()))
    recipe = loaded.recipe(loaded.point(0))
    assert recipe.model.dim == loaded.point(0)["model.dim"]


@given(lists=LISTS)
def test_dotted_names_may_be_quoted_or_nested(lists):
    nested: dict = {}
    for name, values in lists.items():
        table, key = name.split(".")
        nested.setdefault(table, {})[key] = values
    assert space_from({"space": nested}, source="it") == space_from({"space": lists}, source="it")


def test_number_of_trials_of_a_grid():
    loaded = space('[space]\n"model.dim" = [1, 2, 3]\n[search]\ntrials = 2')
    assert (loaded.num_points, loaded.num_trials) == (3, 2)
    assert space('[space]\n"model.dim" = [1, 2, 3]\n[search]\ntrials = 9').num_trials == 3


def test_range_has_the_number_type_of_the_recipe():
    loaded = space("""
        [space]
        "loss.frequency_weight" = { low = 0, high = 1 }
        "model.dim" = { low = 100, high = 1000, step = 100 }
        [search]
        method = "random"
        trials = 3
    """)
    weight, dim = loaded.dimensions.values()
    assert isinstance(weight, Range)
    assert isinstance(dim, Range)
    assert isinstance(weight.low, float)
    assert isinstance(dim.low, int)
    assert loaded.num_points is None


def test_base_recipe_by_path_with_changes(tmp_path):
    (tmp_path / "base.toml").write_text('[model]\nname = "CP"\ndim = 7\n')
    (tmp_path / "space.toml").write_text("""
        recipe = "base.toml"
        [training]
        epochs = 3
        [space]
        "model.dim" = [1, 2]
        [search]
        name = "mine"
    """)
    loaded = load_space(tmp_path / "space.toml")
    assert loaded.name == "mine"
    assert (loaded.base.model.name, loaded.base.model.dim) == ("CP", 7)
    assert loaded.base.training.epochs == 3


def test_validation_interval_of_trials_and_of_the_best_recipe():
    loaded = space('[training]\nepochs = 40\n[space]\n"model.dim" = [1, 2]')
    assert loaded.trial_recipe({"model.dim": 1}).validation.every == 4
    assert loaded.recipe({"model.dim": 1}).validation.every == 0
    rare = space('[training]\nepochs = 40\n[space]\n"model.dim" = [1, 2]\n[search]\nprune = false')
    assert rare.trial_recipe({"model.dim": 1}).validation.every == 40
    own = space("""
        [validation]
        every = 2
        patience = 3
        [space]
        "model.dim" = [1, 2]
        [search]
        validate_every = 5
    """)
    assert own.recipe({"model.dim": 1}) == own.trial_recipe({"model.dim": 1})
    assert own.recipe({"model.dim": 1}).validation.every == 5


DIM = '[space]\n"model.dim" = '


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            '[spaec]\n"model.dim" = [1]',
            "mine.toml: spaec is not a table of a search space. Did you mean 'space'?",
        ),
        (f"{DIM}[]", "mine.toml: model.dim should be a list of values, [1, 2], or a range"),
        (f"{DIM}5", "model.dim should be a list of values"),
        (f"{DIM}[[5]]", "model.dim should be a list of values"),
        (f"{DIM}[3, 3]", "model.dim lists 3 twice"),
        ('[space]\n"regularizer.weight" = [1, 1.0]', "regularizer.weight lists 1.0 twice"),
        ("[space]", "[space] is empty"),
        ("", "[space] is empty"),
        (
            f"{DIM}{{ low = 1, high = 9 }}",
            "mine.toml: model.dim is a range, and a grid needs a list of values. List them, or "
            'search with method = "tpe" or "random".',
        ),
        (f"{DIM}{{ low = 1 }}", "model.dim should have both ends"),
        (f"{DIM}{{ low = 9, high = 1 }}", "model.dim should have low < high; got 9 and 1."),
        (
            '[space]\n"regularizer.weight" = { low = 0, high = 9, log = true }',
            "regularizer.weight with log = true should have low > 0 and no step; got low = 0.0",
        ),
        ('[space]\n"data.graph" = ["world"]', "data.graph cannot be searched"),
        ('[space]\n"validation.every" = [1]', "validation.every cannot be searched"),
        (f'{DIM}[1]\n[search]\nmethod = "tpe"', 'method = "tpe" needs a number of trials'),
        (f"recipe = 5\n{DIM}[1]", "recipe should be a path"),
        # Mistakes of its recipe and its settings.
        ('[space]\n"training.epoch" = [1]', "training.epoch is not a setting of recipes."),
        ('[space]\n"trainin.epochs" = [1]', "trainin is not a setting of recipes."),
        (f"{DIM}[0]", "model.dim should be greater than or equal to 1; 0 was given."),
        (
            f"{DIM}{{ low = 1, high = 9, lgo = true }}",
            "model.dim.lgo is not a setting of ranges. Did",
        ),
        (f'{DIM}[1]\n[search]\nmethod = "gird"', "search.method should be 'grid', 'tpe' or"),
        (f'{DIM}[1]\n[search]\nmehtod = "grid"', "search.mehtod is not a setting of searches."),
        (f'recipe = "nowhere.toml"\n{DIM}[1]', "nowhere.toml cannot be read"),
        (f"[training]\nepoch = 3\n{DIM}[1]", "training.epoch is not a setting of recipes."),
    ],
)
def test_mistakes_of_a_space_are_refused(text, sentence):
    with pytest.raises(kg.RequestError) as refused:
        space(text)
    assert sentence in str(refused.value).replace("`", "")


def test_files_that_are_not_search_spaces(tmp_path):
    with pytest.raises(kg.RequestError, match="cannot be read: No such file or directory"):
        load_space(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("= 3")
    with pytest.raises(kg.RequestError, match="is not TOML: "):
        load_space(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("name", "graph"), [("world", "world"), ("umls/complex-dura", "UMLS"), ("runs/a", "runs/a")]
)
def test_a_graph_or_a_recipe_is_no_search_space(name, graph):
    with pytest.raises(kg.RequestError) as refused:
        load_space(name)
    assert str(refused.value) == (
        f"{name} is not a search space, a .toml file with values to try in its table [space]. To "
        f"tune a graph without one: dualkg train {graph}"
    )


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_space_of_the_paper_can_be_searched(path, small_graph):
    loaded = load_space(path)
    recipe = loaded.trial_recipe(loaded.point(loaded.num_trials - 1))
    model = EMBEDDINGS[recipe.model.name](small_graph.shape, dim=4)
    recipe.regularizer.build().check(model)
    assert path.stem.startswith(recipe.data.graph.lower())
    assert recipe.model.name.lower() in path.stem
    assert loaded.name == path.stem


CHOSEN = {  # k, batch, λ, λ1, λ2 of the paper's table of hyper-parameters
    "wn18rr-cp": (2000, 100, 0.1, 0.5, 1.5),
    "wn18rr-complex": (2000, 100, 0.1, 0.5, 1.5),
    "wn18rr-rescal": (512, 1024, 0.1, 1.0, 1.0),
    "fb15k-237-cp": (2000, 100, 0.05, 0.5, 1.5),
    "fb15k-237-complex": (2000, 100, 0.05, 0.5, 1.5),
    "fb15k-237-rescal": (512, 512, 0.1, 2.0, 1.5),
    "yago3-10-cp": (1000, 1000, 0.005, 0.5, 1.5),
    "yago3-10-complex": (1000, 1000, 0.05, 0.5, 1.5),
    "yago3-10-rescal": (512, 1024, 0.05, 1.0, 1.0),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_grids_of_the_paper_contain_its_choices(name):
    loaded = load_space(Path(__file__).parents[2] / "paper" / "spaces" / f"{name}.toml")
    keys = (
        "model.dim",
        "training.batch_size",
        "regularizer.weight",
        "regularizer.plain",
        "regularizer.mapped",
    )
    for key, value in zip(keys, CHOSEN[name], strict=True):
        assert value in loaded.dimensions[key]
    assert loaded.dimensions["optimizer.learning_rate"] == (0.1, 0.01)
