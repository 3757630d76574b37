"""Regularizers, weighted as in the paper's experiments: a mean over the triples of the batch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TypeGuard

from torch import Tensor

from dualkg.errors import InvalidValue, RequestError
from dualkg.models import MODELS
from dualkg.models.base import EmbeddingModel, Factors, Model, overridden
from dualkg.models.bilinear import BilinearModel
from dualkg.registry import Registry

__all__ = [
    "DURA",
    "N3",
    "REGULARIZERS",
    "BasicDURA",
    "Frobenius",
    "NoRegularizer",
    "RegP1",
    "Regularizer",
    "UnweightedDURA",
]

REGULARIZERS: Registry[type["Regularizer"]] = Registry("regularizer", group="dualkg.regularizers")
"""Regularizers by name, as recipes write them: `REGULARIZERS["N3"]` is `kg.N3`."""


class Regularizer(ABC):
    """`weight` (the paper's λ) times the mean of `per_triple` over a batch.

    Args:
        weight: The factor of the penalty, λ in the paper.

    Examples:
        >>> class L1(kg.Regularizer):
        ...     def per_triple(self, f):
        ...         return f.head.abs().sum(-1) + f.tail.abs().sum(-1)
        >>> run = kg.train(kg.ComplEx(graph.shape, dim=8), graph, regularizer=L1(0.01), epochs=1)
    """

    # Whether it reads whole tables rather than the vectors of a batch, which needs more memory.
    reads_whole_tables = False
    # Whether it is a sum over the rows of whole tables, so that each process can sum over its own.
    sums_over_rows = False

    def __init__(self, weight: float) -> None:
        if not weight >= 0:
            raise InvalidValue("regularizer.weight", expected="at least 0", found=weight)
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
    """Σ weight · Σ|x|^power over some vectors x of the triple; |x| is the complex modulus."""

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
        if not MAPPED & set(self.term_weights) or model.has_adjoint:
            return
        if type(model).__module__.startswith("dualkg."):
            raise RequestError(
                f"{name} needs the adjoint of the map of heads (t Rᵀ beside h R), and this {kind} "
                "has none. Use Frobenius, or no regularizer."
            )
        raise RequestError(
            f"{name} needs a map_tail that is the adjoint of map_head (t Rᵀ beside h R), and "
            f"{kind} does not say that its map_tail is: has_adjoint is False. If map_tail maps a "
            "tail to where its head is expected, set has_adjoint = True in the class; otherwise "
            "use Frobenius, or no regularizer."
        )

    def per_triple(self, f: Factors) -> Tensor:
        terms = [weight * self._size(f, name) for name, weight in self.term_weights.items()]
        return sum(terms[1:], start=terms[0]) if terms else f.head.new_zeros(len(f.head))

    def gradients(self, f: Factors) -> dict[str, Tensor]:
        """Gradients of `weight` times the mean in h, r, t, hR and tRᵀ, as if independent.

        They are for diagonal models alone.
        """
        gradients: dict[str, Tensor] = {}
        for name, term_weight in self.term_weights.items():
            vectors = getattr(f, name)
            slope = self._slope(f.model, vectors).mul_(term_weight * self.weight / len(vectors))
            for target, sign in zip(RESIDUALS.get(name, (name,)), (1, -1), strict=False):
                if target in gradients:
                    gradients[target] = gradients[target].add(slope, alpha=sign)
                else:
                    gradients[target] = slope * sign
        return gradients

    def _slope(self, model: EmbeddingModel, vectors: Tensor) -> Tensor:
        """∂|x|^power of every coordinate, as a new array."""
        if self.power == 2:
            return 2 * vectors
        modulus = model.modulus(vectors).unsqueeze(1)
        # The numbers of one modulus are in one column.
        numbers = vectors.view(len(vectors), -1, modulus.shape[-1])
        if self.power == 1:
            return (numbers / modulus.masked_fill(modulus == 0, 1.0)).view_as(vectors)
        return (self.power * modulus.pow(self.power - 2) * numbers).view_as(vectors)

    def _size(self, f: Factors, name: str) -> Tensor:
        if self.power == 2 and name == "relation":
            # Without the matrix of a relation for each triple.
            return f.relation_norm
        vectors: Tensor = getattr(f, name)
        if self.power == 2:
            return vectors.square().sum(-1)
        if self.power == 1:
            return f.model.modulus(vectors).sum(-1)
        return f.model.squared_modulus(vectors).pow(self.power / 2).sum(-1)


@REGULARIZERS.named("none")
class NoRegularizer(PowerSum):
    """No regularization.

    Args:
        weight: Has no effect.

    Examples:
        >>> run = kg.train("ComplEx", graph, regularizer=kg.NoRegularizer(), epochs=1)
        >>> run.recipe.regularizer.name
        'none'
    """

    term_weights: Mapping[str, float] = {}

    def __init__(self, weight: float = 0.0) -> None:
        super().__init__(0.0)


@REGULARIZERS.register
class Frobenius(PowerSum):
    """‖h‖² + ‖R‖² + ‖t‖².

    Args:
        weight: λ.

    Examples:
        >>> kg.Frobenius(0.01).weight
        0.01
    """

    term_weights: Mapping[str, float] = {"head": 1.0, "relation": 1.0, "tail": 1.0}


@REGULARIZERS.register
class N3(PowerSum):
    """Σ|h|³ + Σ|r|³ + Σ|t|³ (Lacroix et al., 2018).

    Args:
        weight: λ.

    Examples:
        >>> run = kg.train("ComplEx", graph, regularizer=kg.N3(0.01), epochs=1)
        >>> run.recipe.regularizer.name
        'N3'
    """

    power = 3
    term_weights: Mapping[str, float] = {"head": 1.0, "relation": 1.0, "tail": 1.0}

    def check(self, model: EmbeddingModel) -> None:
        super().check(model)
        if not model.diagonal:
            raise RequestError(
                "N3 bounds a norm of CP decompositions, so it needs a model whose relations are "
                "diagonal (CP, DistMult, ComplEx, SimplE, QuatE); the relations of "
                f"{type(model).__name__} are not. Use DURA or Frobenius."
            )


@REGULARIZERS.register
class BasicDURA(PowerSum):
    """‖hR‖² + ‖t‖², from the dual on the tail's side (Section 4.1 of the paper).

    Args:
        weight: λ.

    Examples:
        >>> kg.BasicDURA(0.05).weight
        0.05
    """

    term_weights: Mapping[str, float] = {"mapped_head": 1.0, "tail": 1.0}


class PlainAndMapped(Regularizer):
    """The weights of λ1 (‖h‖² + ‖t‖²) + λ2 (‖hR‖² + ‖tRᵀ‖²): `plain` is λ1, `mapped` λ2."""

    def __init__(self, weight: float, *, plain: float = 1.0, mapped: float = 1.0) -> None:
        super().__init__(weight)
        for name, value in (("plain", plain), ("mapped", mapped)):
            if not value >= 0:
                raise InvalidValue(f"regularizer.{name}", expected="at least 0", found=value)
        self.plain = plain
        self.mapped = mapped

    @property
    def config(self) -> dict[str, object]:
        return {"weight": self.weight, "plain": self.plain, "mapped": self.mapped}


@REGULARIZERS.register
class DURA(PlainAndMapped, PowerSum):
    """λ1 (‖h‖² + ‖t‖²) + λ2 (‖hR‖² + ‖tRᵀ‖²), from the duals on both sides.

    `plain` is λ1, and `mapped` is λ2.

    Args:
        weight: λ.
        plain: λ1, the weight of the embeddings.
        mapped: λ2, the weight of the mapped embeddings.

    Examples:
        >>> penalty = kg.DURA(0.05, plain=0.5, mapped=1.5)
        >>> run = kg.train("ComplEx", graph, regularizer=penalty, epochs=1)
        >>> run.recipe.regularizer.weight
        0.05
    """

    @property
    def term_weights(self) -> Mapping[str, float]:
        return {
            "head": self.plain,
            "tail": self.plain,
            "mapped_head": self.mapped,
            "mapped_tail": self.mapped,
        }


@REGULARIZERS.register
class UnweightedDURA(PlainAndMapped):
    """The mean of DURA over all heads, relation ids and tails.

    It is equation (9) of the paper, divided by its |E|² |R| terms.

    Args:
        weight: λ.
        plain: λ1, the weight of the embeddings.
        mapped: λ2, the weight of the mapped embeddings.

    Examples:
        >>> penalty = kg.UnweightedDURA(0.05, plain=0.5, mapped=1.5)
        >>> penalty.plain, penalty.mapped
        (0.5, 1.5)
    """

    reads_whole_tables = True
    sums_over_rows = True

    def per_triple(self, f: Factors) -> Tensor:
        assert isinstance(f.model, BilinearModel)
        mean = dura_of_all_triples(f.model, plain=self.plain, mapped=self.mapped)
        return mean.expand(len(f.heads))

    def check(self, model: EmbeddingModel) -> None:
        kind = type(model)
        if not (isinstance(model, BilinearModel) and model.has_adjoint):
            raise RequestError(
                "UnweightedDURA sums over all triples in a closed form that bilinear models have, "
                f"and {kind.__name__} has none. Use DURA."
            )
        registered = set(MODELS.values())
        parents = [base.__name__ for base in kind.__mro__[1:] if base in registered]
        if kind not in registered and parents:
            raise RequestError(
                f"UnweightedDURA sums over all triples in the closed form of {parents[0]}, and "
                f"{kind.__name__}, which is derived from {parents[0]}, may map differently. Derive "
                "it from BilinearModel, or use DURA."
            )


@REGULARIZERS.register
class RegP1(PowerSum):
    """‖hR − t‖₁ + ‖tRᵀ − h‖₁ (Reg_p1, Appendix B).

    Args:
        weight: λ.

    Examples:
        >>> kg.RegP1(0.01).weight
        0.01
    """

    power = 1
    term_weights: Mapping[str, float] = {"tail_residual": 1.0, "head_residual": 1.0}


def dura_of_all_triples(model: BilinearModel, *, plain: float, mapped: float) -> Tensor:
    """The mean of DURA over all heads, relation ids and tails, from sums over the tables."""
    num_entities = model.shape.num_entities
    num_relations = model.num_relation_ids
    heads, mapped_heads = model.total_squared_norms(transposed=False)
    tails, mapped_tails = model.total_squared_norms(transposed=True)
    of_plain = (heads + tails) / num_entities
    of_mapped = (mapped_heads + mapped_tails) / (num_entities * num_relations)
    return plain * of_plain + mapped * of_mapped


def has_dura(model: Model | type[Model]) -> bool:
    """Whether DURA is defined for a model, or for the models of a class."""
    is_class = isinstance(model, type) and issubclass(model, EmbeddingModel)
    if not is_class and not isinstance(model, EmbeddingModel):
        return False
    return model.euclidean and model.has_adjoint  # type: ignore[union-attr, return-value]


def is_power_sum(regularizer: Regularizer) -> TypeGuard[PowerSum]:
    """Whether kernels can compute it.

    That needs the formula of `PowerSum`, with vectors and a power that kernels know.
    """
    if not isinstance(regularizer, PowerSum):
        return False
    has_own_formula = not overridden(regularizer) <= {"term_weights", "power", "check", "config"}
    known_terms = {"head", "relation", "tail", *MAPPED}
    is_known = regularizer.power in (1, 2, 3) and regularizer.term_weights.keys() <= known_terms
    return is_known and not has_own_formula
