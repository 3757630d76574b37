"""Models and regularizers of a user, for tests of what applies to them."""

import torch
from torch.nn import functional as F

import dualkg as kg


class TwoTables(kg.RESCAL):
    """A second table looked up by relation."""

    def __init__(self, shape, **choices):
        super().__init__(shape, **choices)
        self.scales = self.table(self.num_relation_ids, 1)

    def map_head(self, head, relations):
        return super().map_head(head, relations) * (1 + F.embedding(relations, self.scales))

    def map_tail(self, tail, relations):
        return super().map_tail(tail, relations) * (1 + F.embedding(relations, self.scales))


class Normalised(kg.DistMult):
    """Entity vectors of length one."""

    @property
    def head_table(self):
        return F.normalize(self.entities, dim=-1)

    tail_table = head_table


class Shy(kg.DistMult):
    """Heads are scored by half."""

    def head_scores(self, f):
        return super().head_scores(f) / 2


class WholeTable(kg.Regularizer):
    """Penalises all entities, of the batch or not."""

    def per_triple(self, f):
        return f.model.entities.square().sum().expand(len(f.heads))


class ByRelation(kg.Regularizer):
    """Penalises triples of later relations more."""

    def __init__(self, weight, *, power=1.0):
        super().__init__(weight)
        self.power = power

    @property
    def config(self):
        return {"weight": self.weight, "power": self.power}

    def per_triple(self, f):
        return f.mapped_head.square().sum(-1) * f.relations.to(torch.float64) ** self.power


class Scaled(kg.DistanceModel):
    """A relation scales each coordinate; the class does not say that its maps are adjoint."""

    def map_head(self, head, relations):
        return head * F.embedding(relations, self.relations)

    def map_tail(self, tail, relations):
        return tail * F.embedding(relations, self.relations)

    def distance(self, points, others):
        return (points - others).square().sum(-1)


class ScaledWithAdjoint(Scaled):
    """The same maps, and the class says that they are adjoint."""

    has_adjoint = True


class AnglesWithAdjoint(ScaledWithAdjoint):
    """Numbers that are no coordinates, so that sums of their powers are no norms."""

    euclidean = False
