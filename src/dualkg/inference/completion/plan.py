"""The parts that a search is divided into, in the order in which they are searched."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualkg.inference.calibration import PriorCorrection
from dualkg.inference.completion.candidates import CandidateFilter
from dualkg.inference.scoring import Ids

HEADS = 0
TAILS = 1
KNOWN = (0,)
NEW = (1,)
KNOWN_OR_NEW = (0, 1)


class PartEntities(NamedTuple):
    """The entities of a part, ascending: those that its queries give, and candidate answers.

    `is_new` `(num_entities,)` is 1 for entities that are new to the side of the answers.
    """

    given: Ids
    answers: Ids
    is_new: Ids


@dataclass(frozen=True)
class SearchPart:
    """Queries of a relation from one side, and their candidate answers.

    `given` is the side that the queries give: 0 for heads, to find tails, and 1 for tails, to find
    heads. `new_given` and `new_answers` say whether entities are taken that are known to their side
    in train (0), new to it (1), or both. `prior` is that of the most probable domain/range pattern
    of the part.
    """

    relation: int
    given: int
    new_given: tuple[int, ...]
    new_answers: tuple[int, ...]
    num_queries: int
    prior: float

    def entities(self, candidates: CandidateFilter) -> PartEntities:
        ends = candidates.heads_and_tails(self.relation)
        new = candidates.new_to(self.relation)

        given = ends[self.given]
        is_new_given = new[self.given]
        given = given[np.isin(is_new_given[given], self.new_given)]

        answers = ends[1 - self.given]
        is_new_answer = new[1 - self.given]
        answers = answers[np.isin(is_new_answer[answers], self.new_answers)]
        return PartEntities(given, answers, is_new_answer)


def plan_search(
    candidates: CandidateFilter, prior_correction: PriorCorrection | None = None
) -> list[SearchPart]:
    """The parts of a search, the most probable first and then the cheapest.

    Good triples that are found early raise the bound for all others. Without a calibration a
    relation is one part. With one, nearly all triples that can be among the best have an entity in
    the domain or range of their relation. So the few entities on one side are queried, then the few
    on the other side for answers that are new to the first, and at last the pairs in which both are
    new.
    """
    parts = []
    for relation in candidates.relations.tolist():
        priors = torch.zeros(2, 2)  # by head, then by tail
        if prior_correction is not None:
            priors = prior_correction.priors[relation].reshape(2, 2).T
        parts += _parts_of_relation(
            relation, candidates, priors, calibrated=prior_correction is not None
        )
    return sorted(parts, key=lambda part: (-part.prior, part.num_queries, part.relation))


def _parts_of_relation(
    relation: int, candidates: CandidateFilter, priors: Tensor, *, calibrated: bool
) -> list[SearchPart]:
    heads, tails = candidates.heads_and_tails(relation)
    new = candidates.new_to(relation)
    # The numbers of candidates that are known and new, by side.
    counts = np.stack(
        [np.bincount(new[HEADS, heads], minlength=2), np.bincount(new[TAILS, tails], minlength=2)]
    )

    # The side with fewer queries is given first. If both have as many, it is the side whose queries
    # have more answers: these are less likely each, and fewer pass.
    first_given = KNOWN if calibrated else KNOWN_OR_NEW
    num_queries = counts[:, first_given].sum(1).tolist()
    num_known = (new == 0).sum(1).tolist()
    first = HEADS
    if (num_queries[TAILS], num_known[TAILS]) < (num_queries[HEADS], num_known[HEADS]):
        first = TAILS

    choices: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    choices = [(first, first_given, KNOWN_OR_NEW)]
    if calibrated:
        second = 1 - first
        choices += [(second, KNOWN, NEW), (first, NEW, NEW)]

    parts = []
    for given, new_given, new_answers in choices:
        num_given = int(counts[given, new_given].sum())
        if num_given and counts[1 - given, new_answers].any():
            by_given = priors.T if given == TAILS else priors
            prior = float(by_given[new_given[0], list(new_answers)].max())
            parts.append(SearchPart(relation, given, new_given, new_answers, num_given, prior))
    return parts
