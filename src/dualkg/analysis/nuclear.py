"""Theorem 1: DURA over all entities and relations bounds the nuclear 2-norm of the tensor of
scores.

X is the tensor of all scores, X_ijk = Σ_d h_id r_jd t_kd; for ComplEx the complex one, before the
real part is taken. docs/analysis.md derives the bound.
"""

import math
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from dualkg.errors import RequestError
from dualkg.models.base import EmbeddingModel, Model
from dualkg.models.bilinear import BilinearModel
from dualkg.models.diagonal import CP, ComplEx, DistMult
from dualkg.regularizers import dura_of_all_triples

ModelT = TypeVar("ModelT", bound=Model)


@dataclass(frozen=True)
class NuclearBound:
    """DURA over all entities and relations, and the bounds on the nuclear 2-norm of X.

    ‖X‖* ≤ `components` ≤ `bound`, where `components` is Σ_d ‖h_d‖‖r_d‖‖t_d‖. Rebalancing leaves
    `components` unchanged and reduces the bound to it. `num_relations` counts reciprocal relations.
    """

    dura: float
    bound: float
    components: float
    plain: float
    mapped: float
    num_entities: int
    num_relations: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def nuclear_bound(model: Model, *, plain: float = 1.0, mapped: float = 1.0) -> NuclearBound:
    """Equation (9) weighted by λ1 (`plain`) and λ2 (`mapped`), and the bound that follows from
    it.
    """
    bilinear = _check(model, plain, mapped)
    head, relation, tail = component_norms(bilinear)
    num_entities = model.shape.num_entities
    num_relations = model.num_relation_ids
    with torch.no_grad():  # (9) is a sum, and this is its mean
        mean = dura_of_all_triples(deepcopy(bilinear).double(), plain=plain, mapped=mapped)
    dura = num_entities**2 * num_relations * float(mean)
    bound = dura / (
        4 * num_entities * math.sqrt(plain) * math.sqrt(mapped) * math.sqrt(num_relations)
    )
    components = float((head * relation * tail).sum())
    return NuclearBound(dura, bound, components, plain, mapped, num_entities, num_relations)


@torch.no_grad()
def rebalanced(model: ModelT, *, plain: float = 1.0, mapped: float = 1.0) -> ModelT:
    """A model with the same X and the smallest bound, Σ_d ‖h_d‖‖r_d‖‖t_d‖.

    The factors of each component are scaled to ‖h_d‖ = ‖t_d‖ and ‖r_d‖ = √(λ1 |R| / λ2). A
    component with a zero factor adds nothing to X, so all its factors become zero.
    """
    _check(model, plain, mapped)
    head, relation, tail = component_norms(model.embedding)
    wanted = math.sqrt(plain * model.num_relation_ids / mapped)
    alive = (head > 0) & (relation > 0) & (tail > 0)
    shrunk = relation / wanted  # moved from the relation to the entities
    scales = {
        "entities": (shrunk * tail / head).sqrt(),
        "relations": 1 / shrunk,
        "tails": (shrunk * head / tail).sqrt(),
    }
    copy = deepcopy(model)
    for name, table in copy.named_parameters():
        scale = torch.where(alive, scales[name], 0.0).repeat(model.embedding.numbers_per_coordinate)
        table.copy_(table.double() * scale)
    return copy


def bound_before_and_after(
    model: Model, *, plain: float = 1.0, mapped: float = 1.0
) -> dict[str, NuclearBound]:
    """The bound of a trained model, and of the same model rebalanced, where bound and components
    are equal.
    """
    trained = deepcopy(model).double()  # in float32, rounding would keep the two sides apart
    models = {"trained": trained, "rebalanced": rebalanced(trained, plain=plain, mapped=mapped)}
    return {name: nuclear_bound(one, plain=plain, mapped=mapped) for name, one in models.items()}


def component_norms(model: EmbeddingModel) -> tuple[Tensor, Tensor, Tensor]:
    """‖h_d‖, ‖r_d‖ and ‖t_d‖ of every component, each `(dim,)`, in float64."""
    head, relation, tail = (
        model.squared_modulus(table.detach().double()).sum(0).sqrt()
        for table in (model.head_table, model.relations, model.tail_table)
    )
    return head, relation, tail


def _check(model: Model, plain: float, mapped: float) -> BilinearModel:
    # The exact types: a subclass may score differently, and then X is another tensor.
    if not isinstance(model, BilinearModel) or type(model) not in (CP, DistMult, ComplEx):
        own = type(model.embedding).__name__
        raise RequestError(
            "Theorem 1 holds for CP, DistMult and ComplEx, whose scores are sums over "
            "components; the model is "
            f"{own if model is model.embedding else f'the dual of {own}'}."
        )
    if not (0 < plain < math.inf and 0 < mapped < math.inf):
        raise RequestError(
            f"λ1 and λ2 must be above 0 and finite; plain is {plain}, mapped is {mapped}."
        )
    return model
