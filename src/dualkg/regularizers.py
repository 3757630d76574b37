"""Regularizers, each weighted as the paper's experiments are: a mean over the triples of the batch.

A regularizer sees `Factors` and nothing of the model, so that DURA is one formula for every bilinear model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from dualkg.errors import RequestError
from dualkg.models.base import BilinearModel, Factors


class Regularizer(ABC):
    """`weight` (the paper's λ) times the mean of `per_triple` over a batch."""

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

    def check(self, model: BilinearModel) -> None:  # noqa: B027 - most apply to every model
        """Refuse a model that the formula does not apply to."""

    @property
    def choices(self) -> dict[str, object]:
        """The keywords that make this regularizer again."""
        return {"weight": self.weight}


class NoRegularizer(Regularizer):
    """Nothing: the paper's rows without a regularizer."""

    def __init__(self, weight: float = 0.0) -> None:
        super().__init__(0.0)

    def per_triple(self, f: Factors) -> Tensor:
        return f.head.new_zeros(len(f.head))


class Frobenius(Regularizer):
    """‖h‖² + ‖R‖² + ‖t‖²."""

    def per_triple(self, f: Factors) -> Tensor:
        return _squares(f.head) + f.model.relation_norms(f.relations) + _squares(f.tail)


class N3(Regularizer):
    """Σ|h|³ + Σ|r|³ + Σ|t|³, of the modulus where numbers are complex (Lacroix et al., 2018)."""

    def check(self, model: BilinearModel) -> None:
        if not model.diagonal:
            raise RequestError(
                f"N3 bounds a norm of CP decompositions, so it needs a model whose relations are diagonal "
                f"(CP, DistMult, ComplEx); those of {type(model).__name__} are not. Use DURA or Frobenius."
            )

    def per_triple(self, f: Factors) -> Tensor:
        return sum(
            (f.model.squared_modulus(x).pow(1.5).sum(-1) for x in (f.head, f.relation, f.tail)),
            start=f.head.new_zeros(()),
        )


class BasicDURA(Regularizer):
    """‖hR‖² + ‖t‖²: what the dual on the tail side leaves (Section 4.1 of the paper)."""

    def per_triple(self, f: Factors) -> Tensor:
        return _squares(f.mapped_head) + _squares(f.tail)


class DURA(Regularizer):
    """λ1 (‖h‖² + ‖t‖²) + λ2 (‖hR‖² + ‖tRᵀ‖²): what the duals on both sides leave; `plain` is λ1, `mapped` λ2."""

    def __init__(self, weight: float, *, plain: float = 1.0, mapped: float = 1.0) -> None:
        super().__init__(weight)
        if not (plain >= 0 and mapped >= 0):
            raise RequestError(f"DURA's plain and mapped are at least 0; they are {plain} and {mapped}.")
        self.plain = plain
        self.mapped = mapped

    def per_triple(self, f: Factors) -> Tensor:
        plain = _squares(f.head) + _squares(f.tail)
        mapped = _squares(f.mapped_head) + _squares(f.mapped_tail)
        return self.plain * plain + self.mapped * mapped

    @property
    def choices(self) -> dict[str, object]:
        return {"weight": self.weight, "plain": self.plain, "mapped": self.mapped}


class RegP1(Regularizer):
    """‖hR − t‖₁ + ‖tRᵀ − h‖₁, of the modulus where numbers are complex (Reg_p1, Appendix B)."""

    def per_triple(self, f: Factors) -> Tensor:
        modulus = f.model.modulus
        return modulus(f.mapped_head - f.tail).sum(-1) + modulus(f.mapped_tail - f.head).sum(-1)


def _squares(vectors: Tensor) -> Tensor:
    return vectors.square().sum(-1)


REGULARIZERS: dict[str, type[Regularizer]] = {
    "none": NoRegularizer,
    "Frobenius": Frobenius,
    "N3": N3,
    "BasicDURA": BasicDURA,
    "DURA": DURA,
    "RegP1": RegP1,
}
