"""From evidence to a probability."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Calibration:
    """p = σ(slope · evidence + offset), but at most the ceiling, with slope > 0: more evidence is never less.

    A relation has a slope, and an offset for each of the four `Kinds` of its triples: its own where there is enough
    data, one for all others.
    """

    slopes: Tensor  # of each of the graph's relations, `(num_relations,)`
    offsets: Tensor  # of each relation and kind, `(num_relations, 4)`
    own: Tensor  # whether a relation has its own, `(num_relations,)`
    ceiling: float = 1.0  # what no probability is above
    about: dict[str, Any] = field(default_factory=dict)  # on what it was fitted, and how well it held

    def log_odds(self, evidence: Tensor, relations: Tensor, kinds: Tensor) -> Tensor:
        """Evidence, relation ids of the graph and kinds, which broadcast → log odds, as if there were no ceiling.

        They order triples as probabilities do, and also those that stand at the ceiling.
        """
        slopes, offsets = (one.to(evidence.device) for one in (self.slopes, self.offsets))
        return slopes[relations] * evidence + offsets[relations, kinds]

    def probability(self, evidence: Tensor, relations: Tensor, kinds: Tensor) -> Tensor:
        """The same → probabilities. More evidence is never less."""
        return torch.sigmoid(self.log_odds(evidence, relations, kinds)).clamp(max=self.ceiling)

    def as_dict(self) -> dict[str, Any]:
        tables = {name: getattr(self, name).tolist() for name in ("slopes", "offsets", "own")}
        return {**tables, "ceiling": self.ceiling, "about": self.about}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Calibration:
        return cls(
            torch.tensor(found["slopes"], dtype=torch.float32),
            torch.tensor(found["offsets"], dtype=torch.float32),
            torch.tensor(found["own"], dtype=torch.bool),
            float(found["ceiling"]),
            found.get("about", {}),
        )
