"""Losses as recipes name them: what is written, read, refused, built, and trained."""

import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.data.filters import with_reciprocals
from dualkg.errors import InvalidValue, UnknownName, Unsupported
from dualkg.losses.negative_sampling import BoundSampledLoss
from dualkg.losses.softmax import BoundKvsAll, BoundOneVsAll
from dualkg.settings import InvalidSettings, UnknownSetting
from dualkg.training.engines import EngineUnavailable, choose_engine
from dualkg.training.errors import InterruptedRunError
from dualkg.training.recipe import (
    ForeignSetting,
    InvalidRecipe,
    NotImportable,
    Recipe,
    RenamedKey,
    load_recipe,
    recipe_from,
)
from dualkg.training.trainer import Trainer
from tests.raising import check_error, refused

SAMPLED = {"loss.name": "NegativeSampling"}


def recipe_of(**keys) -> Recipe:
    return Recipe().with_changes({f"loss.{key}": value for key, value in keys.items()})


def loss_of(graph: kg.Graph, *, reciprocal: bool = True, **keys):
    changes = {"model.reciprocal": reciprocal, "training.seed": 3}
    recipe = Recipe().with_changes(changes | {f"loss.{key}": value for key, value in keys.items()})
    model = kg.DistMult(graph.shape, dim=2, reciprocal=reciprocal)
    return recipe.loss.bind(model, graph, batch_size=recipe.training.batch_size, seed=3)


# -- recipes -----------------------------------------------------------------


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
    with refused(InvalidRecipe, source="") as caught:
        recipe_of(relation_weight=0.2).with_changes({"loss.name": "KvsAll"})
    check_error(
        caught.value.problem,
        ForeignSetting,
        setting="loss.relation_weight",
        owners=["OneVsAll", "SampledSoftmax"],
        name="KvsAll",
    )


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


SAMPLED_LOSSES = "NegativeSampling and MarginRanking"


NEGATIVES = ["NegativeSampling"]
SAMPLED_ONLY = ["NegativeSampling", "MarginRanking"]
SMOOTHED = ["OneVsAll", "KvsAll"]
WEIGHTED = ["OneVsAll", "SampledSoftmax"]


@pytest.mark.parametrize(
    ("table", "setting", "owners", "name"),
    [
        ("adversarial_temperature = 0.5", "adversarial_temperature", NEGATIVES, "OneVsAll"),
        ("margin = 9", "margin", SAMPLED_ONLY, "OneVsAll"),
        ("filtered = true", "filtered", SAMPLED_ONLY, "OneVsAll"),
        (
            'name = "MarginRanking"\nadversarial_temperature = 0.5',
            "adversarial_temperature",
            NEGATIVES,
            "MarginRanking",
        ),
        (
            'name = "NegativeSampling"\nfrequency_weight = 0.9',
            "frequency_weight",
            WEIGHTED,
            "NegativeSampling",
        ),
        (
            'name = "MarginRanking"\nlabel_smoothing = 0.1',
            "label_smoothing",
            SMOOTHED,
            "MarginRanking",
        ),
        ('name = "MarginRanking"\ndropout = 0.1', "dropout", SMOOTHED, "MarginRanking"),
        ("count_exponent = 0.5", "count_exponent", ["KvsAll"], "OneVsAll"),
        ('name = "KvsAll"\nfrequency_weight = 0.5', "frequency_weight", WEIGHTED, "KvsAll"),
        ('name = "KvsAll"\nmargin = 2', "margin", SAMPLED_ONLY, "KvsAll"),
    ],
)
def test_settings_of_other_losses_are_refused(table, setting, owners, name):
    with refused(InvalidRecipe, source="recipe.toml") as caught:
        recipe_from(tomllib.loads(f"[loss]\n{table}"), source="recipe.toml")
    check_error(
        caught.value.problem, ForeignSetting, setting=f"loss.{setting}", owners=owners, name=name
    )


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (
            'name = "MarginRanking"\nsampler = "in-batch"\nnum_negatives = 9',
            "loss.num_negatives has no effect with loss.sampler = 'in-batch'; leave it out",
        ),
        (
            'name = "MarginRanking"\ncorruption = "bernoulli"',
            "with reciprocal relations only tails are corrupted, so loss.corruption = 'bernoulli' "
            "is for model.reciprocal = false; it is true",
        ),
        (
            'name = "MarginRanking"\ncorruption = "both"',
            "with reciprocal relations only tails are corrupted, so loss.corruption = 'both' is "
            "for model.reciprocal = false; it is true",
        ),
        (
            'name = "MarginRanking"\n[training]\nbatch_size = 1',
            "negatives are drawn by what a batch holds, and a triple alone would draw the same in "
            "every epoch, so training.batch_size should be at least 2; it is 1",
        ),
        (
            'name = "KvsAll"\n[model]\nreciprocal = false',
            "KvsAll is a loss of tail queries, so model.reciprocal should be true; it is false",
        ),
        (
            'name = "KvsAll"\n[training]\norder = "queries"',
            "KvsAll groups the answers of a query anyway; leave training.order out",
        ),
        (
            'name = "KvsAll"\n[regularizer]\nname = "DURA"\nweight = 0.1',
            "a regularizer is a mean over triples, and KvsAll trains on queries, so "
            "regularizer.name should be 'none'; it is 'DURA'",
        ),
    ],
)
def test_settings_that_do_not_combine_are_refused(table, reason):
    with refused(InvalidRecipe, source="recipe.toml") as caught:
        recipe_from(tomllib.loads(f"[loss]\n{table}"), source="recipe.toml")
    check_error(caught.value.problem, InvalidSettings, reason=reason)


@pytest.mark.parametrize(
    ("table", "setting", "expected", "found"),
    [
        (
            'name = "MarginRanking"\nnum_negatives = 0',
            "loss.num_negatives",
            "greater than or equal to 1",
            0,
        ),
        ("label_smoothing = 1.0", "loss.label_smoothing", "less than 1", 1.0),
        (
            "dropout = 'half'",
            "loss.dropout",
            "a valid number, unable to parse string as a number",
            "half",
        ),
        # values of earlier versions
        (
            '[training]\norder = "questions"',
            "training.order",
            "'triples' or 'queries'",
            "questions",
        ),
        (
            '[training]\nengine = "fused"',
            "training.engine",
            "'auto', 'reference' or 'fast'",
            "fused",
        ),
    ],
)
def test_invalid_values_of_losses_are_refused(table, setting, expected, found):
    with refused(InvalidRecipe, source="recipe.toml") as caught:
        recipe_from(tomllib.loads(f"[loss]\n{table}"), source="recipe.toml")
    check_error(caught.value.problem, InvalidValue, setting=setting, expected=expected, found=found)


@pytest.mark.parametrize(
    ("table", "old", "new"),
    [
        ("known = true", "known", "filtered, with the opposite meaning"),
        ('sides = "both"', "sides", "corruption"),
        ('negatives = "shared"', "negatives", "sampler"),
        ("temperature = 1", "temperature", "adversarial_temperature"),
        ("count_power = 1", "count_power", "count_exponent"),
        ('kind = "margin"', "kind", "name, which is one of NegativeSampling, MarginRanking, "),
    ],
)
def test_keys_of_earlier_versions_are_refused(table, old, new):
    with refused(InvalidRecipe, source="recipe.toml") as caught:
        recipe_from(tomllib.loads(f"[loss]\n{table}"), source="recipe.toml")
    check_error(caught.value.problem, RenamedKey, old=f"loss.{old}")
    assert caught.value.problem.new.startswith(f"loss.{new}")


def test_unknown_losses_and_settings_are_refused():
    with refused(InvalidRecipe, source="recipe.toml") as caught:
        recipe_from({"loss": {"name": "sampled"}}, source="recipe.toml")
    check_error(caught.value.problem, UnknownName, kind="loss", name="sampled")
    assert caught.value.problem.suggestions[0] == "SampledSoftmax"
    with refused(InvalidRecipe, source="recipe.toml") as caught:
        recipe_from({"loss": {"power": 1}}, source="recipe.toml")
    check_error(caught.value.problem, UnknownSetting, setting="loss.power", owner="OneVsAll")
    assert caught.value.problem.suggestions == []
    assert caught.value.problem.known[0] == "frequency_weight"


def test_words_of_messages():
    assert str(ForeignSetting("loss.margin", SAMPLED_ONLY, name="OneVsAll")) == (
        "loss: margin is a setting of NegativeSampling and MarginRanking; loss.name is "
        "'OneVsAll'; leave it out."
    )
    assert str(RenamedKey("loss.sides", "loss.corruption")) == (
        "loss.sides is now loss.corruption."
    )


# -- from recipes to objects -------------------------------------------------


def test_one_vs_all_gets_its_settings(small_graph):
    loss = loss_of(
        small_graph, frequency_weight=0.5, relation_weight=0.25, dropout=0.1, label_smoothing=0.2
    )
    assert isinstance(loss, BoundOneVsAll)
    assert loss.entity_weights.shape == (30,)
    assert (loss.relation_weight, loss.label_smoothing) == (0.25, 0.2)
    assert (loss.dropouts.mapped.share, loss.dropouts.mapped.seed) == (0.1, 3)
    assert loss_of(small_graph).entity_weights is None


def test_sampled_losses_get_their_settings(small_graph):
    settings = {
        "num_negatives": 7,
        "adversarial_temperature": 0.5,
        "margin": 4,
        "subsampling": True,
    }
    bound = loss_of(small_graph, name="NegativeSampling", **settings)
    assert isinstance(bound, BoundSampledLoss)
    assert bound.loss.sampler == "uniform"
    assert (bound.loss.num_negatives, bound.num_entities) == (7, 30)
    assert (bound.loss.margin, bound.loss.adversarial_temperature) == (4, 0.5)
    assert (bound.seed, bound.head_probabilities) == (3, None)
    assert bound.loss.filtered
    assert bound.loss.subsampling
    assert bound.answers is not None
    bound = loss_of(small_graph, name="MarginRanking", sampler="shared", filtered=False)
    assert isinstance(bound.loss, kg.MarginRanking)
    assert bound.loss.sampler == "shared"
    assert (bound.loss.margin, bound.answers) == (1.0, None)
    assert loss_of(small_graph, name="NegativeSampling").loss.margin == 9.0
    assert loss_of(small_graph, name="MarginRanking", sampler="in-batch").loss.sampler == "in-batch"


def test_bernoulli_probabilities_are_those_of_the_graph(small_graph):
    bound = loss_of(small_graph, reciprocal=False, name="MarginRanking", corruption="bernoulli")
    for relation, probability in enumerate(bound.head_probabilities.tolist()):
        of_relation = small_graph.train[small_graph.train[:, 1] == relation]
        heads, tails = (len(set(of_relation[:, column].tolist())) for column in (0, 2))
        assert probability == pytest.approx(tails / (heads + tails), abs=1e-6)


def test_k_vs_all_gets_its_settings_and_every_query_is_an_example(small_graph):
    loss = loss_of(
        small_graph,
        name="KvsAll",
        dropout=0.2,
        head_dropout=0.1,
        count_exponent=0.5,
        label_smoothing=0.3,
    )
    assert isinstance(loss, BoundKvsAll)
    assert (loss.dropouts.mapped.share, loss.dropouts.given.share) == (0.2, 0.1)
    assert (loss.count_exponent, loss.label_smoothing) == (0.5, 0.3)
    trainer = Trainer(
        kg.ComplEx(small_graph.shape, dim=2),
        small_graph,
        recipe_of(name="KvsAll"),
        kg.NoRegularizer(),
    )
    queries = {(h, r) for h, r, _ in with_reciprocals(small_graph.train, 4).tolist()}
    assert len(trainer.examples) == len(queries)
    trainer.run()
    assert trainer.progress.history[-1]["loss"] < trainer.progress.history[0]["loss"]


def test_dropout_of_heads_that_are_not_vectors_is_refused(small_graph):
    with refused(Unsupported, what="Dropout", advice="Set loss.head_dropout to 0."):
        kg.OneVsAll(head_dropout=0.1).bind(
            kg.HAKE(small_graph.shape, dim=2), small_graph, batch_size=9, seed=0
        )


# -- a loss of one's own -----------------------------------------------------


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
    assert choose_engine(again.recipe, again.model, kg.NoRegularizer()).step == "autograd"


def test_a_loss_that_cannot_be_imported_is_not_saved(small_graph, tmp_path):
    class LocalLoss(SquaredLoss):
        pass

    with refused(NotImportable, name=LocalLoss.__qualname__):
        kg.train(
            kg.ComplEx(small_graph.shape, dim=2),
            small_graph,
            loss=LocalLoss(),
            out=tmp_path / "run",
        )


# -- engines -----------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        SAMPLED,
        {"loss.name": "MarginRanking"},
        {"loss.label_smoothing": 0.1},
        {"loss.head_dropout": 0.1},
        {"loss.name": "KvsAll"},
    ],
)
def test_these_losses_are_trained_by_the_reference_engine(small_graph, changes):
    model = kg.ComplEx(small_graph.shape, dim=2)
    regularizer = kg.NoRegularizer()
    recipe = Recipe().with_changes(changes)
    engine = choose_engine(recipe, model, regularizer)
    assert engine.step == "autograd"
    for requested in ({"training.engine": "fast"}, {"training.precision": "bf16"}):
        with refused(EngineUnavailable, what="The fast engine") as caught:
            choose_engine(recipe.with_changes(requested), model, regularizer)
        assert caught.value.reason.startswith("is for OneVsAll, each triple against one whole")
        assert caught.value.settings["training.engine"] == "reference"


# -- training ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NegativeSampling", BoundSampledLoss),
        ("MarginRanking", BoundSampledLoss),
        ("KvsAll", BoundKvsAll),
    ],
)
def test_a_trainer_trains_by_the_loss_of_its_recipe(small_graph, name, expected):
    model = kg.ComplEx(small_graph.shape, dim=4)
    trainer = Trainer(model, small_graph, recipe_of(name=name), kg.NoRegularizer())
    assert trainer.engine.step == "autograd"
    assert isinstance(trainer.step.loss, expected)


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
