"""The default recipe: the regularizer that applies to a model, registered or of the user's own."""

import pytest
import torch

import dualkg as kg
from dualkg.training.api import data_of, default_recipe
from tests.models import odd_models as odd

ODD = "tests.models.odd_models"


@pytest.mark.parametrize(
    ("model", "regularizer"),
    [
        ("RotatE", "DURA"),
        ("se", "none"),
        ("HAKE", "none"),
        (f"{ODD}:Scaled", "none"),
        (f"{ODD}:ScaledWithAdjoint", "DURA"),
        (f"{ODD}:AnglesWithAdjoint", "none"),
        (f"{ODD}:Shy", "DURA"),
    ],
)
def test_the_default_regularizer_applies_to_the_model(small_graph, model, regularizer):
    recipe = default_recipe(data_of(small_graph), small_graph, {"model.name": model})
    assert recipe.regularizer.name == regularizer
    recipe.regularizer.build().check(recipe.model.build(small_graph.shape, seed=0).embedding)


@pytest.mark.parametrize(
    ("options", "regularizer"),
    [
        ({"model.options.batch_norm": True}, "none"),
        ({"model.options": {"batch_norm": True}}, "none"),
        ({"model.options.batch_norm": False}, "DURA"),
        ({"model.options.relation_dim": 3, "model.dim": 5}, "DURA"),
    ],
)
def test_the_default_regularizer_applies_to_the_options_of_a_model(
    small_graph, options, regularizer
):
    run = kg.fit(
        small_graph,
        model="TuckER",
        tune=False,
        changes={"model.dim": 4, "training.epochs": 1, **options},
    )
    assert run.recipe.regularizer.name == regularizer


def test_an_option_that_a_model_does_not_have_is_refused(small_graph):
    with pytest.raises(kg.RequestError):
        kg.fit(small_graph, tune=False, changes={"model.options.batch_norm": True})


def test_a_regularizer_that_is_named_is_kept(small_graph):
    names = {"model.name": f"{ODD}:Scaled", "regularizer.name": "DURA"}
    assert default_recipe(data_of(small_graph), small_graph, names).regularizer.name == "DURA"


@pytest.mark.parametrize(
    ("build", "regularizer"),
    [
        (odd.Scaled, "none"),
        (odd.ScaledWithAdjoint, "DURA"),
        (odd.AnglesWithAdjoint, "none"),
        (lambda shape, dim: kg.TuckER(shape, dim=dim, batch_norm=True), "none"),
        (lambda shape, dim: kg.Dual(kg.ComplEx(shape, dim=dim)), "DURA"),
    ],
)
def test_an_instance_is_trained_with_the_regularizer_that_applies(small_graph, build, regularizer):
    run = kg.train(build(small_graph.shape, dim=2), small_graph, epochs=1)
    assert run.recipe.regularizer.name == regularizer


def test_a_class_of_a_function_can_be_trained(small_graph):
    """No module has it by its name."""

    class Local(odd.Scaled):
        pass

    run = kg.train(Local(small_graph.shape, dim=2), small_graph, epochs=1)
    assert run.recipe.regularizer.name == "none"


def test_a_loss_of_queries_has_no_regularizer_by_default(small_graph):
    run = kg.train("ComplEx", small_graph, loss=kg.KvsAll(), epochs=1)
    assert run.recipe.regularizer.name == "none"


def test_adam_has_the_learning_rate_of_distance_models_for_ones_own(small_graph):
    model = odd.Scaled(small_graph.shape, dim=2)
    run = kg.train(model, small_graph, optimizer="Adam", epochs=1)
    by_name = {"model.name": f"{ODD}:Scaled", "optimizer.name": "Adam"}
    recipe = default_recipe(data_of(small_graph), small_graph, by_name)
    assert run.recipe.optimizer.learning_rate == recipe.optimizer.learning_rate == 0.001
    assert torch.isfinite(model.entities).all()
