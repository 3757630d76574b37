"""From evidence to a probability."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Calibration:
    """p = σ(slope · evidence + offset), with slope > 0: one for each relation with enough data, one for all others."""

    slopes: Tensor  # of each of the graph's relations, `(num_relations,)`
    offsets: Tensor
    own: Tensor  # whether a relation has its own, `(num_relations,)`
    about: dict[str, Any] = field(default_factory=dict)  # on what it was fitted, and how well it held

    def probability(self, evidence: Tensor, relations: Tensor) -> Tensor:
        """Evidence and relation ids of the graph, which broadcast → probabilities. More evidence is never less."""
        slopes, offsets = (one.to(evidence.device)[relations] for one in (self.slopes, self.offsets))
        return torch.sigmoid(slopes * evidence + offsets)

    def least_evidence(self, probability: float, relation: int) -> float:
        """The evidence from which on a triple of a relation is that probable."""
        logit = torch.logit(torch.tensor(float(probability), dtype=torch.float64))
        return float((logit - float(self.offsets[relation])) / float(self.slopes[relation]))

    def as_dict(self) -> dict[str, Any]:
        tables = {name: getattr(self, name).tolist() for name in ("slopes", "offsets", "own")}
        return {**tables, "about": self.about}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Calibration:
        return cls(
            torch.tensor(found["slopes"], dtype=torch.float32),
            torch.tensor(found["offsets"], dtype=torch.float32),
            torch.tensor(found["own"], dtype=torch.bool),
            found.get("about", {}),
        )
