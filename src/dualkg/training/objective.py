"""From the loss that a recipe names to the object that computes it."""

from __future__ import annotations

from typing import Any

from dualkg.data.graph import Graph
from dualkg.errors import RequestError
from dualkg.losses import (
    AllAnswers,
    AnyLoss,
    BatchSampler,
    CrossEntropy,
    Dropouts,
    MarginRanking,
    NegativeSampling,
    Sampler,
    SharedSampler,
    Sides,
    TrainingAnswers,
    UniformSampler,
    frequency_weights,
)
from dualkg.models.base import Model
from dualkg.training.recipe import Recipe
from dualkg.training.sections import Loss


def build_loss(recipe: Recipe, model: Model, graph: Graph) -> AnyLoss:
    """The loss of a recipe, with all that it knows of a graph where the model is."""
    choice, seed = recipe.loss, recipe.training.seed
    if choice.kind == "cross entropy":
        return _cross_entropy(recipe, model, graph)
    answers = TrainingAnswers(graph.train, graph.shape, device=model.device)
    if choice.kind == "all answers":
        return AllAnswers(
            answers,
            batch_size=recipe.training.batch_size,
            count_power=choice.count_power,
            dropouts=_dropouts(recipe, model),
            label_smoothing=choice.label_smoothing,
        )
    bernoulli = choice.sides == "bernoulli" and not model.reciprocal
    keywords: dict[str, Any] = {
        "sides": Sides(answers.head_chances() if bernoulli else None, both=choice.sides == "both"),
        "subsampling": answers if choice.subsampling else None,
        "seed": seed,
    }
    if choice.margin is not None:
        keywords["margin"] = choice.margin
    sampler = _sampler(choice, graph.shape.num_entities, known=None if choice.known else answers)
    if choice.kind == "margin":
        return MarginRanking(sampler, **keywords)
    return NegativeSampling(sampler, temperature=choice.temperature, **keywords)


def _cross_entropy(recipe: Recipe, model: Model, graph: Graph) -> CrossEntropy:
    choice, weights = recipe.loss, None
    if choice.frequency_weight:
        weights = frequency_weights(graph.train, graph.shape.num_entities, choice.frequency_weight)
        weights = weights.to(model.device, next(model.parameters()).dtype)
    return CrossEntropy(
        entity_weights=weights,
        relation_weight=choice.relation_weight,
        dropouts=_dropouts(recipe, model),
        label_smoothing=choice.label_smoothing,
        by_question=recipe.training.order == "questions",
    )


def _dropouts(recipe: Recipe, model: Model) -> Dropouts:
    shares = {"dropout": recipe.loss.dropout, "head_dropout": recipe.loss.head_dropout}
    for key, share in shares.items():
        if share and not model.embedding.euclidean:
            raise RequestError(
                f"Dropout sets coordinates to zero, and the numbers of {type(model).__name__} are not coordinates of a "
                f"vector space. Set loss.{key} to 0."
            )
    return Dropouts(images=shares["dropout"], heads=shares["head_dropout"], seed=recipe.training.seed)


def _sampler(choice: Loss, num_entities: int, *, known: TrainingAnswers | None) -> Sampler:
    if choice.negatives == "batch":
        return BatchSampler(known=known)
    kind = {"uniform": UniformSampler, "shared": SharedSampler}[choice.negatives]
    return kind(num_entities, num_negatives=choice.num_negatives, known=known)
