"""The decision store: new facts that people accepted or rejected, saved with a run as JSON
lines.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import TypeAdapter, ValidationError

from dualkg.data.graph import Graph
from dualkg.errors import DualkgError, RequestError
from dualkg.files import exists, folder_lock, read_bytes, write_text

Verdict = Literal["accepted", "rejected"]
Triple = tuple[str, str, str]


@dataclass(frozen=True)
class Decision:
    """An accepted or rejected triple, by name, so that other models of the same graph can use it.

    `probability` is what the run with the identity `made_from` predicted at that time, and
    `decided_at` is ISO 8601 in UTC. `decided_by` and `note` are what a curator gives.
    """

    head: str
    relation: str
    tail: str
    verdict: Verdict
    probability: float | None
    decided_at: str
    made_from: str | None = None
    decided_by: str | None = None
    note: str | None = None

    @property
    def triple(self) -> Triple:
        return self.head, self.relation, self.tail


DECISION = TypeAdapter(Decision)


@dataclass(frozen=True)
class DecisionStore:
    """The decisions of one file, oldest first.

    The file is written atomically, and processes that write it wait for each other. `check` raises
    if the folder is not the right one; it is called before the file is read and, while the folder
    is locked, before it is written.
    """

    path: Path
    check: Callable[[], None] | None = None

    def load(self) -> dict[Triple, Decision]:
        """Return all decisions by triple."""
        if self.check is not None:
            self.check()
        return _read_lines(self._lines(), self.path)

    def _lines(self) -> list[bytes]:
        try:
            if not exists(self.path):
                return []
            return read_bytes(self.path).split(b"\n")
        except OSError as error:
            raise RequestError(f"{self.path} cannot be read: {error.strerror}.") from None

    def update(
        self, added: Iterable[Decision], *, removed: Iterable[Triple] = ()
    ) -> dict[Triple, Decision]:
        """Remove and add decisions, replacing earlier ones on the same triple; return all."""
        if self.check is not None:
            self.check()
        try:
            with folder_lock(self.path.parent):
                decisions = self.load()
                for triple in removed:
                    decisions.pop(triple, None)
                for decision in added:
                    # A decision that is changed moves to the end.
                    decisions.pop(decision.triple, None)
                    decisions[decision.triple] = decision
                self._save(decisions.values())
        except OSError as error:
            reason = f"{self.path} cannot be written: {error.strerror}."
            raise DualkgError(f"{reason} Nothing was stored.") from None
        return decisions

    def _save(self, decisions: Iterable[Decision]) -> None:
        write_text(self.path, as_json_lines(decisions))


@dataclass(frozen=True)
class Decided:
    """The decisions on a graph; one on a `symmetric` fact holds in both directions."""

    by_triple: Mapping[Triple, Decision]
    symmetric: frozenset[str] = frozenset()

    @classmethod
    def of(cls, decisions: Mapping[Triple, Decision], graph: Graph) -> Self:
        names = graph.relations.names
        ids = np.flatnonzero(graph.symmetric_relations).tolist()
        return cls(decisions, frozenset(names[id].as_py() for id in ids))

    def __len__(self) -> int:
        return len(self.by_triple)

    def on(self, head: str, relation: str, tail: str) -> Decision | None:
        """The decision on a triple, or on its reverse where that is the same fact."""
        decision = self.by_triple.get((head, relation, tail))
        if decision is None and relation in self.symmetric:
            decision = self.by_triple.get((tail, relation, head))
        return decision

    def verdict(self, head: str, relation: str, tail: str) -> Verdict | None:
        decision = self.on(head, relation, tail)
        return decision.verdict if decision else None

    def directions(self) -> Iterator[tuple[Triple, Decision]]:
        """Each decision with its triple, and again with the reverse where that is the same fact."""
        for triple, decision in self.by_triple.items():
            yield triple, decision
            head, relation, tail = triple
            if relation in self.symmetric and head != tail:
                yield (tail, relation, head), decision

    def without_reverse(self, triple: Triple) -> list[Triple]:
        """The reverse of a triple, if there is a decision on it that one on the triple replaces."""
        head, relation, tail = triple
        reverse = (tail, relation, head)
        is_same_fact = relation in self.symmetric and head != tail
        return [reverse] if is_same_fact and reverse in self.by_triple else []


def _read_lines(lines: Iterable[bytes], path: Path) -> dict[Triple, Decision]:
    decisions = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            decision = DECISION.validate_json(line)
        except ValidationError as error:
            raise invalid_decision(path, number, error) from None
        decisions[decision.triple] = decision
    return decisions


def invalid_decision(path: Path, line: int, reason: ValidationError | str) -> RequestError:
    """The error for a line of a file, counted from 1, that is no decision."""
    if isinstance(reason, ValidationError):
        first = reason.errors()[0]
        reason = ": ".join([*map(str, first["loc"]), first["msg"]])
    return RequestError(f"Line {line:,} of {path} is no decision ({reason}). Correct or remove it.")


def as_json_lines(decisions: Iterable[Decision]) -> str:
    lines = [f"{json.dumps(asdict(decision), ensure_ascii=False)}\n" for decision in decisions]
    return "".join(lines)
