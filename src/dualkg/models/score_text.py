"""The score of a model in words and in NumPy, for readers of exported embeddings.

A model has its text beside its code, as the class attribute `score_text`. The lines of NumPy are
the body of a function in which `h`, `r` and `t` are the rows of a triple, `d` is the dimension of
the model, and `arrays` has all exported arrays by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

NORMS = {
    1: ("‖x‖₁ (the sum of the moduli)", "np.abs(x).sum()"),
    2: ("‖x‖₂", "np.linalg.norm(x)"),
    "squared": ("‖x‖₂²", "np.linalg.norm(x) ** 2"),
}


class Formula(NamedTuple):
    """An expression in mathematical notation and in NumPy."""

    words: str
    numpy: str


INNER_PRODUCT = Formula("⟨x, t⟩", "(x * t).sum()")


class Description(NamedTuple):
    """A score in words, and the lines of NumPy that return it."""

    words: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class OptionText:
    """What an option of a bilinear model that is switched on adds to its score.

    `before` are lines that change the rows, `after` lines that change the mapped entity x. Some
    options change only mapped heads.
    """

    words: str
    before: tuple[str, ...]
    after: tuple[str, ...] = ()
    only_heads: bool = False


@dataclass(frozen=True)
class ScoreText(ABC):
    """The text of a model.

    `prepare` are lines that come first. `entity` and `relation` are the parts of a row, equally
    long, except for biases at its end, which are one number each. `arrays` says what arrays other
    than those of entities and relations contain.
    """

    _: KW_ONLY
    prepare: tuple[str, ...] = ()
    entity: tuple[str, ...] = ("coordinates",)
    relation: tuple[str, ...] = ("coordinates",)
    arrays: Mapping[str, str] = field(default_factory=dict)

    @abstractmethod
    def describe(self, options: Mapping[str, Any], *, dual: str = "none") -> Description:
        """The score of a model with some options, or of its dual on one side."""


@dataclass(frozen=True)
class BilinearText(ScoreText):
    """The product of a mapped entity x with the other entity.

    `head` is the mapped head and `tail` the mapped tail; the product is of the mapped head.
    """

    head: Formula
    tail: Formula
    _: KW_ONLY
    product: Formula = INNER_PRODUCT
    options: Mapping[str, OptionText] = field(default_factory=dict)

    def describe(self, options: Mapping[str, Any], *, dual: str = "none") -> Description:
        maps_tail = dual == "head"
        mapped = self.tail if maps_tail else self.head
        product = self.product
        if dual != "none":
            entity = "h" if maps_tail else "t"
            product = Formula(f"−‖x − {entity}‖₂²", f"-(np.abs(x - {entity}) ** 2).sum()")

        words = mapped.words
        before = list(self.prepare)
        after: list[str] = []
        for name, option in self.options.items():
            if options.get(name) and not (maps_tail and option.only_heads):
                words += option.words
                before += option.before
                after += option.after
        lines = (*before, f"x = {mapped.numpy}", *after, f"return {product.numpy}")
        return Description(f"{product.words} with x = {words}", lines)


@dataclass(frozen=True)
class NormText(ScoreText):
    """The negative norm of a difference x; the option `norm` chooses the norm."""

    difference: Formula

    def describe(self, options: Mapping[str, Any], *, dual: str = "none") -> Description:
        norm, by_numpy = NORMS[options["norm"]]
        lines = (*self.prepare, f"x = {self.difference.numpy}", f"return -{by_numpy}")
        return Description(f"−{norm} with x = {self.difference.words}", lines)


@dataclass(frozen=True)
class WholeText(ScoreText):
    """Another score; the last line of `prepare` returns it."""

    words: str

    def describe(self, options: Mapping[str, Any], *, dual: str = "none") -> Description:
        return Description(self.words, self.prepare)
