"""Optimizers by name and of one's own, schedules, and saved optimizer state."""

import tomllib

import pytest
import torch

import dualkg as kg
from dualkg.training.optimizers import (
    OPTIMIZERS,
    SGD,
    Adagrad,
    Adam,
    Optimizer,
    build_optimizer,
    learning_rate,
)
from dualkg.training.recipe import Recipe, recipe_from
from dualkg.training.updates import OnePassAdagrad, optimizer_tensors, restore_optimizer
from tests.processes import run_python, unload

# -- settings ----------------------------------------------------------------


def test_an_optimizer_is_built_by_its_name_in_any_case():
    assert kg.Optimizer() == Adagrad()
    assert kg.Optimizer(name="adam", learning_rate=0.03) == Adam(learning_rate=0.03)
    assert kg.Optimizer(name="SGD").name == "SGD"
    assert isinstance(kg.Optimizer(name="Adam"), Adam)


def test_a_class_refuses_another_name():
    assert Adam(name="Adam") == Adam()
    with pytest.raises(kg.RequestError) as error:
        Adam(name="SGD")
    assert str(error.value) == "optimizer: name = 'SGD' is not Adam."


def test_a_setting_of_other_optimizers_is_refused():
    with pytest.raises(kg.RequestError, match="is a setting of Adagrad and Adam"):
        kg.Optimizer(name="SGD", epsilon=1e-4)


def test_recipes_of_earlier_versions_list_the_settings_of_all_optimizers():
    table = tomllib.loads(
        '[optimizer]\nname = "Adam"\nlearning_rate = 0.01\nsums = "elements"\nschedule = "linear"\n'
        "decay_from = 0.0\naverage_from = 1.0"
    )
    recipe = recipe_from(table, source="recipe.toml")
    assert recipe.optimizer == Adam(learning_rate=0.01, schedule="linear")
    with pytest.raises(kg.RequestError):
        recipe_from({"optimizer": {"name": "Adam", "sums": "rows"}}, source="recipe.toml")


def test_an_unknown_setting_is_refused_with_similar_ones():
    sentence = "`optimizer.lr` is not a setting of .*Did you mean 'learning_rate'"
    with pytest.raises(kg.RequestError, match=sentence):
        kg.Optimizer(lr=0.1)


def test_a_recipe_writes_the_name_and_its_own_settings():
    recipe = Recipe().with_changes({"optimizer.name": "Adam", "optimizer.epsilon": 1e-4})
    written = tomllib.loads(recipe.as_toml())["optimizer"]
    assert written["name"] == "Adam"
    assert written["epsilon"] == 1e-4
    assert "sums" not in written
    assert recipe_from({"optimizer": written}, source="test").optimizer == recipe.optimizer


def test_shared_settings_remain_when_the_name_changes():
    recipe = Recipe().with_changes({"optimizer.learning_rate": 0.2, "optimizer.schedule": "linear"})
    changed = recipe.with_changes({"optimizer.name": "SGD"})
    assert changed.optimizer == SGD(learning_rate=0.2, schedule="linear")


@pytest.mark.parametrize(
    ("schedule", "decay_from", "rates"),
    [
        ("constant", 0.0, {0.0: 0.2, 0.5: 0.2, 1.0: 0.2}),
        ("linear", 0.0, {0.0: 0.2, 0.5: 0.1, 1.0: 0.0}),
        ("linear", 0.5, {0.0: 0.2, 0.5: 0.2, 0.75: 0.1, 1.0: 0.0}),
        ("cosine", 0.0, {0.0: 0.2, 0.5: 0.1, 1.0: 0.0}),
        ("cosine", 0.5, {0.25: 0.2, 0.75: 0.1}),
    ],
)
def test_learning_rate_schedules(schedule, decay_from, rates):
    choice = Optimizer(learning_rate=0.2, schedule=schedule, decay_from=decay_from)
    for progress, rate in rates.items():
        assert learning_rate(choice, progress) == pytest.approx(rate)


# -- steps -------------------------------------------------------------------


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_optimizer_takes_the_same_steps(name, one_pass):
    def step(parameter, optimizer):
        optimizer.zero_grad()
        parameter.pow(4).sum().backward()
        optimizer.step()

    choice = Optimizer(name=name, learning_rate=0.1)
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = build_optimizer(choice, [parameter], one_pass=one_pass)
    step(parameter, optimizer)

    restored_parameter = torch.nn.Parameter(parameter.detach().clone())
    restored = build_optimizer(choice, [restored_parameter], one_pass=one_pass)
    saved = {key: value.clone() for key, value in optimizer_tensors(optimizer).items()}
    restore_optimizer(restored, saved)
    for _ in range(3):
        step(parameter, optimizer)
        step(restored_parameter, restored)
    assert torch.equal(parameter, restored_parameter)


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("name", ["Adagrad", "Adam"])
def test_epsilon_is_added_to_the_denominator(name, one_pass):
    """Either divides its first gradient g by |g| + epsilon: 3 / (3 + 1) and .003 / 1.003."""
    table = torch.nn.Parameter(torch.zeros(2))
    choice = Optimizer(name=name, learning_rate=0.1, epsilon=1.0)
    optimizer = build_optimizer(choice, [table], one_pass=one_pass)
    (table * torch.tensor([3.0, 0.003])).sum().backward()
    optimizer.step()
    torch.testing.assert_close(table.detach(), torch.tensor([-0.075, -0.0003 / 1.003]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adagrad_in_one_pass_equals_pytorch_with_the_same_state(dtype):
    tables = []
    optimizers = []
    for one_pass in (True, False):
        table = torch.nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=dtype))
        tables.append(table)
        optimizers.append(build_optimizer(Adagrad(), [table], one_pass=one_pass))
    assert type(optimizers[0]) is OnePassAdagrad

    for number in range(5):
        for table, optimizer in zip(tables, optimizers, strict=True):
            optimizer.zero_grad()
            (number * table).pow(4).sum().backward()
            optimizer.step()
    torch.testing.assert_close(*tables, rtol=1e-6, atol=1e-7)
    ours, theirs = (optimizer_tensors(optimizer) for optimizer in optimizers)
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(ours["0.sum"], theirs["0.sum"])


def test_training_does_not_import_the_pytorch_compiler(tmp_path):
    """Its optimizers do, which takes a second and 70 MiB."""
    (tmp_path / "small.tsv").write_text("".join(f"e{i}\tnext\te{i + 1}\n" for i in range(60)))
    code = unload(["torch._dynamo"]) + (
        "import sys, dualkg as kg; g = kg.load_graph(sys.argv[1]);"
        "kg.train(kg.ComplEx(g.shape, dim=2), g, epochs=1, regularizer=kg.DURA(0.1));"
        "print('torch._dynamo' in sys.modules)"
    )
    assert run_python(code, tmp_path / "small.tsv").out.strip() == "False"


# -- an optimizer of one's own -----------------------------------------------


class RMSprop(kg.Optimizer):
    """PyTorch's RMSprop, with a setting of its own."""

    state_tables = 1

    decay: float = 0.99

    def build(self, parameters):
        return torch.optim.RMSprop(parameters, lr=self.learning_rate, alpha=self.decay)


class Unfinished(kg.Optimizer):
    """An optimizer that forgets to implement `build`."""


NAME = f"{__name__}:RMSprop"


def test_an_optimizer_without_build_is_refused_by_name():
    name = f"{__name__}:Unfinished"
    with pytest.raises(kg.RequestError):
        kg.Optimizer(name=name)


@pytest.mark.parametrize("engine", ["reference", "fast"])
def test_an_optimizer_of_your_own_trains_from_a_recipe(small_graph, engine):
    changes = {
        "optimizer.name": NAME,
        "optimizer.learning_rate": 0.01,
        "optimizer.decay": 0.9,
        "training.engine": engine,
        "model.dim": 4,
        "training.epochs": 3,
    }
    recipe = Recipe().with_changes(changes)
    assert recipe.optimizer == RMSprop(learning_rate=0.01, decay=0.9)
    run = kg.train_recipe(recipe, graph=small_graph)
    assert run.history[-1]["loss"] < run.history[0]["loss"]


def test_an_optimizer_of_your_own_trains_from_python_and_is_saved(small_graph, tmp_path):
    optimizer = RMSprop(learning_rate=0.01, decay=0.9, schedule="linear")
    model = kg.ComplEx(small_graph.shape, dim=4)
    run = kg.train(model, small_graph, optimizer=optimizer, epochs=2, out=tmp_path / "run")
    assert run.recipe.own_classes == [NAME]
    loaded = kg.load_run(tmp_path / "run")
    assert loaded.recipe.optimizer == optimizer


def test_a_registered_optimizer_is_a_short_name(small_graph, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS._registered, "RMSprop", RMSprop)
    recipe = Recipe().with_changes({"optimizer.name": "rmsprop"})
    assert recipe.optimizer.name == "RMSprop"
    assert kg.train("ComplEx", small_graph, optimizer="rmsprop", epochs=1).recipe.own_classes == []


def test_the_learning_rate_rises_in_the_warm_up():
    choice = Optimizer(learning_rate=0.2, schedule="linear", decay_from=0.5, warm_up=0.1)
    rates = {0.0: 0.002, 0.05: 0.1, 0.1: 0.2, 0.5: 0.2, 0.75: 0.1}
    for progress, rate in rates.items():
        assert learning_rate(choice, progress) == pytest.approx(rate)
