"""Losses as recipes name them: what is written, read, refused, built, and trained."""

import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.training.engines import choose_engine
from dualkg.training.errors import InterruptedRunError
from dualkg.training.recipe import Recipe, load_recipe, recipe_from
from dualkg.training.trainer import Trainer

SAMPLED = {"loss.name": "NegativeSampling"}


def recipe_of(**keys) -> Recipe:
    return Recipe().with_changes({f"loss.{key}": value for key, value in keys.items()})


def test_a_loss_is_written_with_its_name_and_all_settings():
    written = tomllib.loads(Recipe().as_toml())["loss"]
    keys = [
        "name",
        "frequency_weight",
        "relation_weight",
        "dropout",
        "head_dropout",
        "label_smoothing",
        "exclude_known",
    ]
    assert list(written) == keys
    assert tomllib.loads(recipe_of(name="NegativeSampling", num_negatives=8).as_toml())["loss"] == {
        "name": "NegativeSampling",
        "num_negatives": 8,
        "sampler": "uniform",
        "corruption": "uniform",
        "margin": 9.0,
        "subsampling": False,
        "filtered": True,
        "adversarial_temperature": 1.0,
    }
    margin = tomllib.loads(recipe_of(name="MarginRanking", sampler="in-batch", margin=2).as_toml())[
        "loss"
    ]
    assert margin["margin"] == 2.0
    assert "adversarial_temperature" not in margin


def test_shared_settings_remain_when_the_loss_name_changes():
    changed = recipe_of(dropout=0.2).with_changes({"loss.name": "KvsAll"})
    assert changed.loss == kg.KvsAll(dropout=0.2)


def test_recipes_of_records_are_read():
    for path in sorted((Path(__file__).parents[2] / "paper" / "records").rglob("recipe.toml")):
        assert isinstance(load_recipe(path).loss, kg.Loss)


losses = st.one_of(
    st.builds(kg.OneVsAll, relation_weight=st.floats(0, 9), label_smoothing=st.floats(0, 0.9)),
    st.builds(
        kg.NegativeSampling,
        num_negatives=st.integers(1, 999),
        sampler=st.sampled_from(["uniform", "shared"]),
        margin=st.floats(0, 99),
        adversarial_temperature=st.floats(0, 9),
        subsampling=st.booleans(),
        filtered=st.booleans(),
    ),
    st.builds(
        kg.KvsAll,
        dropout=st.floats(0, 0.9),
        head_dropout=st.floats(0, 0.9),
        label_smoothing=st.floats(0, 0.9),
        count_exponent=st.floats(0, 1),
    ),
    st.builds(kg.MarginRanking, sampler=st.just("in-batch"), margin=st.floats(0, 99)),
)


@given(losses)
def test_a_loss_reads_back_as_it_was_written(loss):
    recipe = Recipe(loss=loss)
    assert recipe_from(tomllib.loads(recipe.as_toml()), source="test") == recipe
    assert recipe.with_changes({}) == recipe


class SquaredLoss(kg.Loss):
    """(score − target)² of the triples of a batch."""

    target: float = 1.0

    def bind(self, model, graph, **training):
        return lambda model, f: (model.triple_scores(f) - self.target).square().mean()


class ScaledOneVsAll(kg.OneVsAll):
    """OneVsAll that binds to another function, so that the fast step does not apply."""

    def bind(self, model, graph, **training):
        bound = super().bind(model, graph, **training)
        return lambda model, f: 2 * bound(model, f)


@pytest.mark.parametrize("loss", [SquaredLoss(target=0.5), ScaledOneVsAll(dropout=0.1)])
def test_a_loss_of_your_own_trains_from_python_and_from_a_recipe(small_graph, tmp_path, loss):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.1)
    plain = {
        "regularizer": kg.NoRegularizer(),
        "optimizer": kg.Optimizer(),
    }  # the defaults of a recipe
    run = kg.train(model, small_graph, loss=loss, **plain, epochs=3, out=tmp_path / "run")
    assert run.history[-1]["loss"] < run.history[0]["loss"]
    loaded = kg.load_run(tmp_path / "run")
    assert loaded.recipe.loss == loss
    name = f"{type(loss).__module__}:{type(loss).__name__}"
    assert tomllib.loads(loaded.recipe.as_toml())["loss"]["name"] == name
    settings = {f"loss.{key}": value for key, value in loss.model_dump().items()}
    changes = {
        "loss.name": name,
        **settings,
        "model.dim": 4,
        "model.init_scale": 0.1,
        "training.epochs": 3,
    }
    again = kg.train_recipe(
        Recipe().with_changes(changes | {"training.batch_size": 100}), graph=small_graph
    )
    assert torch.equal(again.model.entities, run.model.entities)
    assert choose_engine(again.recipe, again.model, kg.NoRegularizer()).step == "reference"


@pytest.mark.parametrize(
    "loss",
    [
        {**SAMPLED, "loss.sampler": "uniform"},
        {**SAMPLED, "loss.sampler": "shared"},
        {**SAMPLED, "loss.sampler": "in-batch"},
        {"loss.name": "KvsAll", "loss.dropout": 0.3, "loss.head_dropout": 0.3},
    ],
    ids=["uniform", "shared", "in-batch", "K-vs-all"],
)
def test_an_interrupted_run_ends_with_the_same_weights(small_graph, tmp_path, loss):
    """Saved in the middle of an epoch, and resumed by another trainer."""
    recipe = Recipe().with_changes({"training.epochs": 3, "training.batch_size": 100, **loss})

    def trainer() -> Trainer:
        return Trainer(
            kg.ComplEx(small_graph.shape, dim=4, seed=1), small_graph, recipe, kg.NoRegularizer()
        )

    through = trainer()
    stopped = trainer()
    resumed = trainer()
    through.run()
    stopped.checkpoint_path = tmp_path / "checkpoint.safetensors"
    stopped.stop.requested = True
    with pytest.raises(InterruptedRunError):
        stopped.run()
    resumed.restore(stopped.checkpoint_path)
    assert (resumed.progress.epoch, resumed.progress.step) == (0, 1)
    resumed.run()
    assert torch.equal(through.model.entities, resumed.model.entities)
    assert through.progress.history[-1]["loss"] == resumed.progress.history[-1]["loss"]


def test_negatives_differ_between_epochs(small_graph):
    """The same triples and the same weights: what differs between epochs is what was drawn."""
    recipe = Recipe().with_changes(
        {**SAMPLED, "loss.num_negatives": 2, "training.batch_size": 10_000}
    )
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=1.0).double()
    trainer = Trainer(model, small_graph, recipe, kg.NoRegularizer())
    loss = recipe.loss.bind(model, small_graph, batch_size=10_000, seed=0)
    found = [
        loss(model, model.factors(*next(trainer.batches(epoch)).T)).item() for epoch in range(5)
    ]
    assert len({round(value, 9) for value in found}) == 5
