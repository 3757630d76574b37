"""Theorem 1: DURA over all entities and relations bounds the nuclear 2-norm of the tensor of scores.

X is the tensor of all scores, X_ijk = Σ_d h_id r_jd t_kd, of component d the outer product of three columns. For
ComplEx it is the complex one, before the real part is taken. docs/analysis.md derives the bound."""

from __future__ import annotations

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
from dualkg.regularizers import UnweightedDURA

ModelT = TypeVar("ModelT", bound=Model)


@dataclass(frozen=True)
class NuclearBound:
    """DURA over all entities and relations, and the two ends of what it says of the nuclear 2-norm of X.

    ‖X‖* ≤ `components` ≤ `bound`; `components` is Σ_d ‖h_d‖‖r_d‖‖t_d‖, which rebalancing leaves as it is and brings
    the bound down to. `num_relations` counts reciprocals.
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
    """Equation (9) weighted by λ1 (`plain`) and λ2 (`mapped`), and the bound that it implies."""
    bilinear = _check(model, plain, mapped)
    head, relation, tail = component_norms(bilinear)
    num_entities, num_relations = model.shape.num_entities, model.num_relation_ids
    with torch.no_grad():  # (9) is the sum that this is the mean of
        mean = UnweightedDURA(1.0, plain=plain, mapped=mapped).mean_over_all_triples(deepcopy(bilinear).double())
    dura = num_entities**2 * num_relations * float(mean)
    return NuclearBound(
        dura=dura,
        bound=dura / (4 * num_entities * math.sqrt(plain) * math.sqrt(mapped) * math.sqrt(num_relations)),
        components=float((head * relation * tail).sum()),
        plain=plain,
        mapped=mapped,
        num_entities=num_entities,
        num_relations=num_relations,
    )


@torch.no_grad()
def rebalanced(model: ModelT, *, plain: float = 1.0, mapped: float = 1.0) -> ModelT:
    """The same X from other factors, those at which the bound is Σ_d ‖h_d‖‖r_d‖‖t_d‖, the least it can be.

    Each component's factors are scaled to ‖h_d‖ = ‖t_d‖ and ‖r_d‖ = √(λ1 |R| / λ2). A component with a factor of
    zeros adds nothing to X, so all three become zero.
    """
    _check(model, plain, mapped)
    head, relation, tail = component_norms(model.embedding)
    wanted = math.sqrt(plain * model.num_relation_ids / mapped)
    alive = (head > 0) & (relation > 0) & (tail > 0)
    shrunk = relation / wanted  # what the relation gives up, the entities take
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


def bound_before_and_after(model: Model, *, plain: float = 1.0, mapped: float = 1.0) -> dict[str, NuclearBound]:
    """The bound of a model as it was trained, and of the same model rebalanced, where the two sides meet."""
    trained = deepcopy(model).double()  # in float32 the rebalanced factors would be rounded, and the sides nearly meet
    forms = {"trained": trained, "rebalanced": rebalanced(trained, plain=plain, mapped=mapped)}
    return {name: nuclear_bound(form, plain=plain, mapped=mapped) for name, form in forms.items()}


def component_norms(model: EmbeddingModel) -> tuple[Tensor, Tensor, Tensor]:
    """‖h_d‖, ‖r_d‖ and ‖t_d‖ of every component, each `(dim,)`, in float64."""
    head, relation, tail = (
        model.squared_modulus(table.detach().double()).sum(0).sqrt()
        for table in (model.head_table, model.relations, model.tail_table)
    )
    return head, relation, tail


def _check(model: Model, plain: float, mapped: float) -> BilinearModel:
    # One's own model may inherit their tables, but not their X.
    if not isinstance(model, BilinearModel) or type(model) not in (CP, DistMult, ComplEx):
        raise RequestError(
            f"The bound is for models that add up components, CP, DistMult and ComplEx; this is "
            f"{_describe(model)}, and Theorem 1 says nothing of it."
        )
    if not (0 < plain < math.inf and 0 < mapped < math.inf):
        raise RequestError(f"The bound divides by λ1 and λ2, so both are above 0; plain is {plain}, mapped {mapped}.")
    return model


def _describe(model: Model) -> str:
    own = type(model.embedding).__name__
    return own if model is model.embedding else f"the dual of {own}"
