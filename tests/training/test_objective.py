"""Losses as recipes name them: what is written, read, refused, built, and trained."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.data.filters import with_reciprocals
from dualkg.losses.negative_sampling import BatchSampler, MarginRanking, NegativeSampling, SharedSampler, UniformSampler
from dualkg.losses.softmax import AllAnswers, CrossEntropy
from dualkg.training.engines import build_step, choose_engine
from dualkg.training.recipe import Loss, Recipe, load_recipe, recipe_from
from dualkg.training.registry import build_loss
from dualkg.training.trainer import InterruptedRunError, Trainer

SAMPLED = {"loss.kind": "negative sampling"}


def recipe_of(**keys) -> Recipe:
    return Recipe().with_changes({f"loss.{key}": value for key, value in keys.items()})


def loss_of(graph: kg.Graph, *, reciprocal: bool = True, **keys):
    changes = {"model.reciprocal": reciprocal, "training.seed": 3}
    recipe = Recipe().with_changes(changes | {f"loss.{key}": value for key, value in keys.items()})
    return build_loss(recipe, kg.DistMult(graph.shape, dim=2, reciprocal=reciprocal), graph)


# -- recipes ------------------------------------------------------------------------------------------------


def test_cross_entropy_is_written_as_before():
    """Run folders, records and searches from before compare their recipes with these."""
    written = "[loss]\nfrequency_weight = 0.0\nrelation_weight = 0.0\ndropout = 0.0\n\n[optimizer]"
    assert written in Recipe().as_toml()
    assert list(Recipe().model_dump(exclude_none=True)["loss"]) == ["frequency_weight", "relation_weight", "dropout"]
    assert "label_smoothing = 0.1" in recipe_of(label_smoothing=0.1).as_toml()


def test_a_sampled_loss_is_written_with_all_that_it_uses():
    written = tomllib.loads(recipe_of(kind="negative sampling", num_negatives=8).as_toml())["loss"]
    assert written == {
        "kind": "negative sampling",
        "num_negatives": 8,
        "negatives": "uniform",
        "sides": "uniform",
        "temperature": 1.0,
        "subsampling": False,
        "known": False,
    }
    margin = tomllib.loads(recipe_of(kind="margin", negatives="batch", margin=2).as_toml())["loss"]
    assert margin["margin"] == 2.0
    assert not {"temperature", "num_negatives"} & set(margin)


def test_old_recipes_read_as_they_did():
    for path in sorted((Path(__file__).parents[2] / "paper" / "records").rglob("recipe.toml"))[:5]:
        assert load_recipe(path).loss.kind == "cross entropy"
    assert Recipe().model_dump()["loss"]["kind"] == "cross entropy"  # a search asks for the value of any key


losses = st.one_of(
    st.builds(Loss, relation_weight=st.floats(0, 9), label_smoothing=st.floats(0, 0.9)),
    st.builds(
        Loss,
        kind=st.just("negative sampling"),
        num_negatives=st.integers(1, 999),
        negatives=st.sampled_from(["uniform", "shared"]),
        margin=st.none() | st.floats(0, 99),
        temperature=st.floats(0, 9),
        subsampling=st.booleans(),
        known=st.booleans(),
    ),
    st.builds(
        Loss,
        kind=st.just("all answers"),
        dropout=st.floats(0, 0.9),
        head_dropout=st.floats(0, 0.9),
        label_smoothing=st.floats(0, 0.9),
        count_power=st.floats(0, 1),
    ),
    st.builds(Loss, kind=st.just("margin"), negatives=st.just("batch"), margin=st.none() | st.floats(0, 99)),
)


@given(losses)
def test_a_loss_reads_back_as_it_was_written(loss):
    recipe = Recipe(loss=loss)
    assert recipe_from(tomllib.loads(recipe.as_toml()), source="test") == recipe
    assert recipe.with_changes({}) == recipe


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (
            "temperature = 0.5",
            "temperature is for a loss that samples negatives, and .*'cross entropy'; leave",
        ),
        ("margin = 9", "margin is for a loss that samples"),
        ("known = true", "known is for a loss that samples"),
        ('kind = "margin"\ntemperature = 0.5', "temperature is for negative sampling, and loss.kind is 'margin'"),
        (
            'kind = "negative sampling"\nfrequency_weight = 0.9',
            "frequency_weight is for cross entropy, and",
        ),
        ('kind = "margin"\nlabel_smoothing = 0.1', "label_smoothing is for cross entropy"),
        ('kind = "margin"\ndropout = 0.1', "dropout is for cross entropy"),
        ('kind = "margin"\nnegatives = "batch"\nnum_negatives = 9', "num_negatives says how many are drawn"),
        ('kind = "margin"\nsides = "bernoulli"', "is for model.reciprocal = false; it is true"),
        (
            'kind = "sampled"',
            "loss.kind should be 'cross entropy', 'all answers', 'negative sampling' or 'margin'; \"sampled\" came",
        ),
        ('kind = "margin"\nnum_negatives = 0', "loss.num_negatives should be greater than or equal to 1; 0 came"),
        ('kind = "margin"\n[training]\nbatch_size = 1', "training.batch_size should be at least 2; it is 1"),
        ('kind = "margin"\nsides = "both"', "loss.sides = 'both' is for model.reciprocal = false; it is true"),
        ("count_power = 0.5", "count_power is for all answers of a question, and loss.kind is 'cross entropy'"),
        ('kind = "all answers"\nfrequency_weight = 0.5', "frequency_weight is for cross entropy"),
        ('kind = "all answers"\nmargin = 2', "margin is for a loss that samples negatives"),
        ('kind = "all answers"\n[model]\nreciprocal = false', "model.reciprocal should be true"),
        ('kind = "all answers"\n[training]\norder = "queries"', "leave training.order out"),
        (
            'kind = "all answers"\n[regularizer]\nname = "DURA"\nweight = 0.1',
            "regularizer.name should be 'none'; it is 'DURA'",
        ),
        ("label_smoothing = 1.0", "loss.label_smoothing should be less than 1; 1.0 came"),
    ],
)
def test_choices_that_do_nothing_are_refused(table, sentence):
    with pytest.raises(kg.RequestError, match=sentence):
        recipe_from(tomllib.loads(f"[loss]\n{table}"), source="recipe.toml")


# -- from recipes to objects --------------------------------------------------------------------------------


def test_cross_entropy_gets_its_choices(small_graph):
    loss = loss_of(small_graph, frequency_weight=0.5, relation_weight=0.25, dropout=0.1, label_smoothing=0.2)
    assert isinstance(loss, CrossEntropy)
    assert loss.entity_weights.shape == (30,)
    assert (loss.relation_weight, loss.label_smoothing) == (0.25, 0.2)
    assert (loss.dropouts.images.share, loss.dropouts.images.seed) == (0.1, 3)
    assert loss_of(small_graph).entity_weights is None


def test_sampled_losses_get_theirs(small_graph):
    loss = loss_of(small_graph, kind="negative sampling", num_negatives=7, temperature=0.5, margin=4, subsampling=True)
    assert isinstance(loss, NegativeSampling)
    assert isinstance(loss.sampler, UniformSampler)
    assert (loss.sampler.num_negatives, loss.sampler.num_entities) == (7, 30)
    assert (loss.margin, loss.temperature, loss.seed, loss.sides.limits) == (4, 0.5, 3, None)
    assert loss.sampler.known is loss.subsampling is not None
    loss = loss_of(small_graph, kind="margin", negatives="shared", known=True)
    assert isinstance(loss, MarginRanking)
    assert isinstance(loss.sampler, SharedSampler)
    assert (loss.margin, loss.sampler.known, loss.subsampling) == (MarginRanking.MARGIN, None, None)
    assert loss_of(small_graph, kind="negative sampling").margin == NegativeSampling.MARGIN
    assert isinstance(loss_of(small_graph, kind="margin", negatives="batch").sampler, BatchSampler)


def test_bernoulli_chances_are_those_of_the_graph(small_graph):
    loss = loss_of(small_graph, reciprocal=False, kind="margin", sides="bernoulli")
    for relation, limit in enumerate(loss.sides.limits.tolist()):
        of_relation = small_graph.train[small_graph.train[:, 1] == relation]
        heads, tails = (len(set(of_relation[:, column].tolist())) for column in (0, 2))
        assert limit / 2**24 == pytest.approx(tails / (heads + tails), abs=1e-6)


# -- engines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        SAMPLED,
        {"loss.kind": "margin"},
        {"loss.label_smoothing": 0.1},
        {"loss.head_dropout": 0.1},
        {"loss.kind": "all answers"},
    ],
)
def test_these_losses_are_the_plain_engine_s(small_graph, changes):
    model, regularizer = kg.ComplEx(small_graph.shape, dim=2), kg.NoRegularizer()
    recipe = Recipe().with_changes(changes)
    assert choose_engine(recipe, model, regularizer) == "plain"
    for asked in ({"training.engine": "fast"}, {"training.precision": "bf16"}):
        with pytest.raises(kg.RequestError, match=r"fast engine is for cross entropy.* Use --engine reference"):
            choose_engine(recipe.with_changes(asked), model, regularizer)
    with pytest.raises(ValueError, match="'fused' is for cross entropy without label smoothing"):
        build_step(
            "fused", model, build_loss(recipe, model, small_graph), regularizer, torch.optim.SGD(model.parameters())
        )


# -- training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("negative sampling", NegativeSampling), ("margin", MarginRanking), ("all answers", AllAnswers)],
)
def test_a_trainer_trains_by_the_loss_of_its_recipe(small_graph, kind, expected):
    model = kg.ComplEx(small_graph.shape, dim=4)
    trainer = Trainer(model, small_graph, recipe_of(kind=kind), kg.NoRegularizer())
    assert trainer.engine == "plain"
    assert isinstance(trainer.step.loss, expected)


def test_all_answers_get_their_choices_and_every_question_is_an_example(small_graph):
    loss = loss_of(small_graph, kind="all answers", dropout=0.2, head_dropout=0.1, count_power=0.5, label_smoothing=0.3)
    assert isinstance(loss, AllAnswers)
    assert (loss.dropouts.images.share, loss.dropouts.heads.share) == (0.2, 0.1)
    assert (loss.count_power, loss.label_smoothing) == (0.5, 0.3)
    trainer = Trainer(
        kg.ComplEx(small_graph.shape, dim=2), small_graph, recipe_of(kind="all answers"), kg.NoRegularizer()
    )
    asked = {(h, r) for h, r, _ in with_reciprocals(small_graph.train, 4).tolist()}
    assert len(trainer.examples) == len(asked)
    trainer.run()
    assert trainer.progress.history[-1]["loss"] < trainer.progress.history[0]["loss"]


def test_dropout_of_heads_that_are_no_vectors_is_refused(small_graph):
    recipe = recipe_of(head_dropout=0.1)
    with pytest.raises(kg.RequestError, match="Set loss.head_dropout to 0"):
        build_loss(recipe, kg.HAKE(small_graph.shape, dim=2), small_graph)


@pytest.mark.parametrize(
    "of_loss",
    [
        {**SAMPLED, "loss.negatives": "uniform"},
        {**SAMPLED, "loss.negatives": "shared"},
        {**SAMPLED, "loss.negatives": "batch"},
        {"loss.kind": "all answers", "loss.dropout": 0.3, "loss.head_dropout": 0.3},
    ],
    ids=["uniform", "shared", "batch", "all answers"],
)
def test_a_run_that_was_stopped_ends_with_the_same_weights(small_graph, tmp_path, of_loss):
    """Saved in the middle of an epoch, and taken up by another trainer."""
    recipe = Recipe().with_changes({"training.epochs": 3, "training.batch_size": 100, **of_loss})

    def trainer() -> Trainer:
        return Trainer(kg.ComplEx(small_graph.shape, dim=4, seed=1), small_graph, recipe, kg.NoRegularizer())

    through, stopped, resumed = trainer(), trainer(), trainer()
    through.run()
    stopped.checkpoint_path, stopped.stop.asked = tmp_path / "checkpoint.safetensors", True
    with pytest.raises(InterruptedRunError):
        stopped.run()
    resumed.restore(stopped.checkpoint_path)
    assert (resumed.progress.epoch, resumed.progress.step) == (0, 1)
    resumed.run()
    assert torch.equal(through.model.entities, resumed.model.entities)
    assert through.progress.history[-1]["loss"] == resumed.progress.history[-1]["loss"]


def test_negatives_are_others_in_each_epoch(small_graph):
    """The same triples and the same weights: what differs between epochs is what was drawn."""
    recipe = Recipe().with_changes({**SAMPLED, "loss.num_negatives": 2, "training.batch_size": 10_000})
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=1.0).double()
    trainer = Trainer(model, small_graph, recipe, kg.NoRegularizer())
    loss = build_loss(recipe, model, small_graph)
    found = [loss(model, model.factors(*next(trainer.batches(epoch)).T)).item() for epoch in range(5)]
    assert len({round(value, 9) for value in found}) == 5
