"""Regularizers, weighted as in the paper's experiments: a mean over the triples of the batch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TypeGuard

from torch import Tensor

from dualkg.errors import RequestError
from dualkg.models import MODELS
from dualkg.models.base import EmbeddingModel, Factors, overridden
from dualkg.models.bilinear import BilinearModel


class Regularizer(ABC):
    """`weight` (the paper's λ) times the mean of `per_triple` over a batch."""

    reads_whole_tables = False  # rather than the vectors of a batch; for the prediction of memory
    sums_over_rows = (
        False  # of whole tables, so that each process can sum over the rows that it has
    )

    def __init__(self, weight: float) -> None:
        if not weight >= 0:
            raise RequestError(f"The weight of a regularizer is at least 0; it is {weight}.")
        self.weight = weight

    def __call__(self, factors: Factors) -> Tensor:
        self.check(factors.model)
        return self.weight * self.per_triple(factors).mean()

    @abstractmethod
    def per_triple(self, f: Factors) -> Tensor:
        """The penalty of each triple, `(batch,)`."""

    def check(self, model: EmbeddingModel) -> None:  # noqa: B027 - most apply to every model
        """Refuse a model that the formula does not apply to."""

    @property
    def config(self) -> dict[str, object]:
        """The keywords that construct this regularizer."""
        return {"weight": self.weight}


# The two vectors that a residual is the difference of, and the vectors of a triple that a relation
# has mapped.
RESIDUALS = {"tail_residual": ("mapped_head", "tail"), "head_residual": ("mapped_tail", "head")}
MAPPED = {"mapped_head", "mapped_tail", *RESIDUALS}


class PowerSum(Regularizer):
    """Σ weight · Σ|x|^power over some vectors x of the triple, of the modulus where numbers are
    complex.
    """

    power = 2

    @property
    @abstractmethod
    def term_weights(self) -> Mapping[str, float]:
        """The weight of each vector of a triple by its name in `Factors`; others have weight 0."""

    def check(self, model: EmbeddingModel) -> None:
        name = type(self).__name__
        kind = type(model).__name__
        if self.term_weights and not model.euclidean:
            raise RequestError(
                f"{name} adds up powers of coordinates, and the numbers of {kind} are not "
                f"coordinates of a vector space. Train {kind} without a regularizer."
            )
        if MAPPED & set(self.term_weights) and not model.has_adjoint:
            raise RequestError(
                f"{name} needs the head and the tail mapped by the relation, and {kind} does not "
                "define both. Use Frobenius, or no regularizer."
            )

    def per_triple(self, f: Factors) -> Tensor:
        terms = [weight * self._size(f, name) for name, weight in self.term_weights.items()]
        return sum(terms[1:], start=terms[0]) if terms else f.head.new_zeros(len(f.head))

    def gradients(self, f: Factors) -> dict[str, Tensor]:
        """Gradients of `weight` times the mean in h, r, t, hR and tRᵀ as if independent, for
        diagonal models alone.
        """
        found: dict[str, Tensor] = {}
        for name, term_weight in self.term_weights.items():
            vectors = getattr(f, name)
            slope = self._slope(f.model, vectors).mul_(term_weight * self.weight / len(vectors))
            for target, sign in zip(RESIDUALS.get(name, (name,)), (1, -1), strict=False):
                found[target] = (
                    found[target].add(slope, alpha=sign) if target in found else slope * sign
                )
        return found

    def _slope(self, model: EmbeddingModel, vectors: Tensor) -> Tensor:
        """∂|x|^power of every coordinate, as a new array."""
        if self.power == 2:
            return 2 * vectors
        modulus = model.modulus(vectors).unsqueeze(1)
        numbers = vectors.view(
            len(vectors), -1, modulus.shape[-1]
        )  # the numbers of one modulus in one column
        if self.power == 1:
            return (numbers / modulus.masked_fill(modulus == 0, 1.0)).view_as(vectors)
        return (self.power * modulus.pow(self.power - 2) * numbers).view_as(vectors)

    def _size(self, f: Factors, name: str) -> Tensor:
        if (
            self.power == 2
        ):  # without a modulus, and without the matrix of a relation for each triple
            return f.relation_norm if name == "relation" else getattr(f, name).square().sum(-1)
        if self.power == 1:
            return f.model.modulus(getattr(f, name)).sum(-1)
        return f.model.squared_modulus(getattr(f, name)).pow(self.power / 2).sum(-1)


class NoRegularizer(PowerSum):
    """No regularization."""

    term_weights: Mapping[str, float] = {}

    def __init__(self, weight: float = 0.0) -> None:
        super().__init__(0.0)


class Frobenius(PowerSum):
    """‖h‖² + ‖R‖² + ‖t‖²."""

    term_weights: Mapping[str, float] = {"head": 1.0, "relation": 1.0, "tail": 1.0}


class N3(PowerSum):
    """Σ|h|³ + Σ|r|³ + Σ|t|³ (Lacroix et al., 2018)."""

    power = 3
    term_weights: Mapping[str, float] = {"head": 1.0, "relation": 1.0, "tail": 1.0}

    def check(self, model: EmbeddingModel) -> None:
        super().check(model)
        if not model.diagonal:
            raise RequestError(
                "N3 bounds a norm of CP decompositions, so it needs a model whose relations are "
                "diagonal (CP, DistMult, ComplEx, SimplE, QuatE); those of "
                f"{type(model).__name__} are not. Use DURA or Frobenius."
            )


class BasicDURA(PowerSum):
    """‖hR‖² + ‖t‖², from the dual on the tail's side (Section 4.1 of the paper)."""

    term_weights: Mapping[str, float] = {"mapped_head": 1.0, "tail": 1.0}


class PlainAndMapped(Regularizer):
    """The weights of λ1 (‖h‖² + ‖t‖²) + λ2 (‖hR‖² + ‖tRᵀ‖²): `plain` is λ1, `mapped` λ2."""

    def __init__(self, weight: float, *, plain: float = 1.0, mapped: float = 1.0) -> None:
        super().__init__(weight)
        if not (plain >= 0 and mapped >= 0):
            name = type(self).__name__
            raise RequestError(
                f"{name}'s plain and mapped are at least 0; they are {plain} and {mapped}."
            )
        self.plain = plain
        self.mapped = mapped

    @property
    def config(self) -> dict[str, object]:
        return {"weight": self.weight, "plain": self.plain, "mapped": self.mapped}


class DURA(PlainAndMapped, PowerSum):
    """λ1 (‖h‖² + ‖t‖²) + λ2 (‖hR‖² + ‖tRᵀ‖²), from the duals on both sides; `plain` is λ1, `mapped`
    λ2.
    """

    @property
    def term_weights(self) -> Mapping[str, float]:
        return {
            "head": self.plain,
            "tail": self.plain,
            "mapped_head": self.mapped,
            "mapped_tail": self.mapped,
        }


class UnweightedDURA(PlainAndMapped):
    """The mean of DURA over all heads, relation ids and tails: equation (9) of the paper over its
    |E|² |R| terms.
    """

    reads_whole_tables = True
    sums_over_rows = True

    def per_triple(self, f: Factors) -> Tensor:
        assert isinstance(f.model, BilinearModel)
        return dura_of_all_triples(f.model, plain=self.plain, mapped=self.mapped).expand(
            len(f.heads)
        )

    def check(self, model: EmbeddingModel) -> None:
        kind = type(model)
        if not (isinstance(model, BilinearModel) and model.has_adjoint):
            raise RequestError(
                "UnweightedDURA sums over all triples in a closed form that bilinear models "
                f"have, and {kind.__name__} has none. Use DURA."
            )
        if kind not in MODELS.values() and isinstance(model, tuple(MODELS.values())):
            parent = next(base.__name__ for base in kind.__mro__ if base in MODELS.values())
            raise RequestError(
                f"UnweightedDURA sums over all triples in a closed form that is {parent}'s, and "
                f"{kind.__name__}, which is derived from {parent}, may map differently. Derive it "
                "from BilinearModel, or use DURA."
            )


class RegP1(PowerSum):
    """‖hR − t‖₁ + ‖tRᵀ − h‖₁ (Reg_p1, Appendix B)."""

    power = 1
    term_weights: Mapping[str, float] = {"tail_residual": 1.0, "head_residual": 1.0}


def dura_of_all_triples(model: BilinearModel, *, plain: float, mapped: float) -> Tensor:
    """The mean of DURA over all heads, relation ids and tails, a scalar, from sums over the
    tables.
    """
    num_entities = model.shape.num_entities
    num_relations = model.num_relation_ids
    heads, mapped_heads = model.total_squared_norms(transposed=False)
    tails, mapped_tails = model.total_squared_norms(transposed=True)
    of_plain = (heads + tails) / num_entities
    of_mapped = (mapped_heads + mapped_tails) / (num_entities * num_relations)
    return plain * of_plain + mapped * of_mapped


REGULARIZERS: dict[str, type[Regularizer]] = {"none": NoRegularizer}
REGULARIZERS |= {
    kind.__name__: kind for kind in (Frobenius, N3, BasicDURA, DURA, UnweightedDURA, RegP1)
}


def is_power_sum(regularizer: Regularizer) -> TypeGuard[PowerSum]:
    """Whether kernels can compute it: the formula of `PowerSum`, with vectors and a power that they
    know.
    """
    return (
        isinstance(regularizer, PowerSum)
        and overridden(regularizer) <= {"term_weights", "power", "check", "config"}
        and regularizer.power in (1, 2, 3)
        and regularizer.term_weights.keys() <= {"head", "relation", "tail", *MAPPED}
    )
