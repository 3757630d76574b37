"""The parts that a search is divided into, in the order in which they are searched."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dualkg.inference.calibration import PriorCorrection
from dualkg.inference.completion.candidates import CandidateFilter
from dualkg.inference.scoring import Ids
from dualkg.without_torch.query_classes import NUM_CLASSES, NUM_KNOWN

HEADS = 0
TAILS = 1
# Classes of queries; without a calibration all are of the first.
KNOWN = tuple(range(NUM_KNOWN))
NEW = tuple(range(NUM_KNOWN, NUM_CLASSES))
KNOWN_OR_NEW = (*KNOWN, *NEW)


class PartEntities(NamedTuple):
    """The entities of a part: those that its queries give, and candidate answers, ascending.

    `given` has an array for each class of `given_classes`, ascending. `answer_classes`
    `(num_entities,)` are the classes of all entities at the side of the answers.
    """

    given: list[Ids]
    given_classes: list[int]
    answers: Ids
    answer_classes: Ids


def classes_of(
    relation: int, candidates: CandidateFilter, prior_correction: PriorCorrection | None
) -> Ids:
    """The classes of all entities as heads and as tails, `(2, num_entities)`."""
    if prior_correction is None:
        return np.zeros((2, candidates.graph.shape.num_entities), dtype=np.int64)
    return prior_correction.query_classes.of_relation(relation)


@dataclass(frozen=True)
class SearchPart:
    """Queries of a relation from one side, and their candidate answers.

    `given` is the side that the queries give: 0 for heads, to find tails, and 1 for tails, to find
    heads. `given_classes` and `answer_classes` say of which classes the entities of both sides are.
    `prior` is that of the most probable pair of classes of the part.
    """

    relation: int
    given: int
    given_classes: tuple[int, ...]
    answer_classes: tuple[int, ...]
    num_queries: int
    prior: float

    def entities(
        self, candidates: CandidateFilter, prior_correction: PriorCorrection | None
    ) -> PartEntities:
        ends = candidates.heads_and_tails(self.relation)
        classes = classes_of(self.relation, candidates, prior_correction)

        entities = ends[self.given]
        of_entities = classes[self.given][entities]
        given_classes = sorted(set(of_entities.tolist()) & set(self.given_classes))
        given = [entities[of_entities == of_class] for of_class in given_classes]

        answers = ends[1 - self.given]
        of_answers = classes[1 - self.given]
        answers = answers[np.isin(of_answers[answers], self.answer_classes)]
        return PartEntities(given, given_classes, answers, of_answers)


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
        parts += parts_of_relation(relation, candidates, prior_correction)
    return sorted(parts, key=lambda part: (-part.prior, part.num_queries, part.relation))


def parts_of_relation(
    relation: int, candidates: CandidateFilter, prior_correction: PriorCorrection | None
) -> list[SearchPart]:
    calibrated = prior_correction is not None
    priors = torch.zeros(NUM_CLASSES, NUM_CLASSES)  # by head, then by tail
    if prior_correction is not None:
        priors = prior_correction.priors(relation)

    # The numbers of candidates of each class, by side.
    ends = candidates.heads_and_tails(relation)
    classes = classes_of(relation, candidates, prior_correction)
    counts = np.stack(
        [
            np.bincount(of_side[entities], minlength=NUM_CLASSES)
            for of_side, entities in zip(classes, ends, strict=True)
        ]
    )

    # The side with fewer queries is given first. If both have as many, it is the side whose queries
    # have more answers: these are less likely each, and fewer pass.
    first_given = KNOWN if calibrated else KNOWN_OR_NEW
    num_queries = counts[:, first_given].sum(1).tolist()
    num_known = (candidates.new_to(relation) == 0).sum(1).tolist()
    first = HEADS
    if (num_queries[TAILS], num_known[TAILS]) < (num_queries[HEADS], num_known[HEADS]):
        first = TAILS

    choices: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    choices = [(first, first_given, KNOWN_OR_NEW)]
    if calibrated:
        second = 1 - first
        choices += [(second, KNOWN, NEW), (first, NEW, NEW)]

    parts = []
    for given, given_classes, answer_classes in choices:
        num_given = int(counts[given, given_classes].sum())
        if num_given and counts[1 - given, answer_classes].any():
            by_given = priors.T if given == TAILS else priors
            prior = float(by_given[list(given_classes)][:, list(answer_classes)].max())
            part = SearchPart(relation, given, given_classes, answer_classes, num_given, prior)
            parts.append(part)
    return parts
