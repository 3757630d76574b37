"""Theorem 1: DURA over all triples bounds the nuclear 2-norm of the tensor of scores.

X is the tensor of all scores, X_ijk = Σ_d h_id r_jd t_kd; for ComplEx the complex one, before the
real part is taken. docs/analysis.md derives the bound.
"""

import math
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from dualkg.errors import InvalidValue, RequestError
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
    """Equation (9) weighted by λ1 (`plain`) and λ2 (`mapped`), and the bound that follows."""
    bilinear = _check(model, plain, mapped)
    num_entities = model.shape.num_entities
    num_relations = model.num_relation_ids

    # Equation (9) is a sum over all triples, and the regularizer is their mean.
    with torch.no_grad():
        mean = dura_of_all_triples(deepcopy(bilinear).double(), plain=plain, mapped=mapped)
    dura = num_entities**2 * num_relations * float(mean)
    divisor = 4 * num_entities * math.sqrt(plain) * math.sqrt(mapped) * math.sqrt(num_relations)

    head, relation, tail = component_norms(bilinear)
    components = float((head * relation * tail).sum())
    return NuclearBound(
        dura=dura,
        bound=dura / divisor,
        components=components,
        plain=plain,
        mapped=mapped,
        num_entities=num_entities,
        num_relations=num_relations,
    )


@torch.no_grad()
def rebalanced(model: ModelT, *, plain: float = 1.0, mapped: float = 1.0) -> ModelT:
    """A model with the same X and the smallest bound, Σ_d ‖h_d‖‖r_d‖‖t_d‖.

    The factors of each component are scaled to ‖h_d‖ = ‖t_d‖ and ‖r_d‖ = √(λ1 |R| / λ2). A
    component with a zero factor adds nothing to X, so all its factors become zero.
    """
    _check(model, plain, mapped)
    head, relation, tail = component_norms(model.embedding)
    relation_target = math.sqrt(plain * model.num_relation_ids / mapped)
    # The factor that moves from the relation to the two entities.
    moved = relation / relation_target
    is_nonzero = (head > 0) & (relation > 0) & (tail > 0)

    copy = deepcopy(model)
    embedding = copy.embedding
    scales = [
        (embedding.head_table, (moved * tail / head).sqrt()),
        (embedding.relations, 1 / moved),
    ]
    if embedding.tail_table is not embedding.head_table:
        scales.append((embedding.tail_table, (moved * head / tail).sqrt()))

    for table, scale in scales:
        column_scale = torch.where(is_nonzero, scale, 0.0)
        table.copy_(table.double() * column_scale.repeat(embedding.numbers_per_coordinate))
    return copy


def bound_before_and_after(
    model: Model, *, plain: float = 1.0, mapped: float = 1.0
) -> dict[str, NuclearBound]:
    """The bounds of a trained model and of the same model rebalanced.

    After rebalancing, `bound` equals `components`. Both models are float64: in float32, rounding
    would keep the two apart.
    """
    trained = deepcopy(model).double()
    balanced = rebalanced(trained, plain=plain, mapped=mapped)
    return {
        "trained": nuclear_bound(trained, plain=plain, mapped=mapped),
        "rebalanced": nuclear_bound(balanced, plain=plain, mapped=mapped),
    }


def component_norms(model: EmbeddingModel) -> tuple[Tensor, Tensor, Tensor]:
    """‖h_d‖, ‖r_d‖ and ‖t_d‖ of every component, each `(dim,)`, in float64."""

    def norms(table: Tensor) -> Tensor:
        return model.squared_modulus(table.detach().double()).sum(0).sqrt()

    return norms(model.head_table), norms(model.relations), norms(model.tail_table)


def _check(model: Model, plain: float, mapped: float) -> BilinearModel:
    # The types are compared exactly: a subclass may score differently, and then X is another
    # tensor.
    if not isinstance(model, BilinearModel) or type(model) not in (CP, DistMult, ComplEx):
        name = type(model.embedding).__name__
        is_dual = model is not model.embedding
        raise RequestError(
            "Theorem 1 holds for CP, DistMult and ComplEx, whose scores are sums over components; "
            f"the model is {f'the dual of {name}' if is_dual else name}."
        )
    for setting, weight in (("plain", plain), ("mapped", mapped)):
        if not 0 < weight < math.inf:
            raise InvalidValue(setting, expected="above 0 and finite", found=weight)
    return model
