"""N-Triples and Turtle, by pyoxigraph: IRIs are names, and literals are at most labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import pyarrow as pa

from dualkg.data.archives import Source
from dualkg.data.columns import Columns, Reader, block_of
from dualkg.errors import DataError, RequestError
from dualkg.extras import optional_import

NUM_TRIPLES = 1 << 17
LABEL = "http://www.w3.org/2000/01/rdf-schema#label"
SKIPPED = {"literal": "a literal", "blank": "a blank node", "quoted": "a quoted triple"}


class RdfReader(Reader):
    """Triples whose three terms are IRIs; an English or untagged rdfs:label becomes a label."""

    def __init__(self, source: Source, columns: Columns | None = None) -> None:
        super().__init__(source, columns)
        self._places: dict[str, int] = {}

    def blocks(self) -> Generator[pa.RecordBatch]:
        if self.columns is not None:
            raise RequestError(f"{self.source.name} is RDF, which has no columns to choose. Leave them out.")
        skipped: Counter[str] = Counter()
        found: list[tuple[str, str, str]] = []
        for triple in self._parsed():
            kind = self._kind(triple)
            if kind == "names":
                found.append((triple.subject.value, triple.predicate.value, triple.object.value))
            elif kind != "label":
                skipped[kind] += 1
            if len(found) == NUM_TRIPLES:
                yield _block(found)
                found = []
        if found:
            yield _block(found)
        if skipped:
            self.remarks.append(f"{self.source.name}: {_counted(skipped)} skipped.")

    def _parsed(self) -> Iterator[Any]:
        with optional_import("pyoxigraph", purpose=f"{self.source.name} is RDF, and reading it"):
            import pyoxigraph as ox
        rdf_format = ox.RdfFormat.TURTLE if self.source.suffix == ".ttl" else ox.RdfFormat.N_TRIPLES
        with self.source.open() as stream:
            try:
                yield from ox.parse(stream, format=rdf_format)
            except SyntaxError as error:
                detail = str(error.msg).partition(": ")[2] or str(error.msg)
                raise DataError(
                    f"{self.source.name}, line {error.lineno or 1:,}: this is not valid "
                    f"{rdf_format.name} ({detail.rstrip('.')}). Correct the line, or remove it."
                ) from error

    def _kind(self, triple: Any) -> str:
        """`names` for a triple to keep, `label` for one that became a label, or why it is skipped."""
        subject, target = type(triple.subject).__name__, type(triple.object).__name__
        if target == "Literal":
            if subject == "NamedNode" and triple.predicate.value == LABEL and self._label(triple):
                return "label"
            return "literal"
        if "BlankNode" in (subject, target):
            return "blank"
        return "names" if (subject, target) == ("NamedNode", "NamedNode") else "quoted"

    def _label(self, triple: Any) -> bool:
        """Keep a label for people: English goes before untagged, and among equals the first counts."""
        language = (triple.object.language or "").lower()
        if language and language.partition("-")[0] != "en":
            return False
        place = {"en": 0, "": 1}.get(language, 2)
        name = triple.subject.value
        if place < self._places.get(name, 3):
            self.labels[name], self._places[name] = triple.object.value, place
        return True


def _block(found: list[tuple[str, str, str]]) -> pa.RecordBatch:
    return block_of(*(pa.array(names, pa.string()) for names in zip(*found, strict=True)))


def _counted(skipped: Counter[str]) -> str:
    """`1,234 triples with a literal and 5 with a blank node were`."""
    kinds = [kind for kind in SKIPPED if skipped[kind]]
    first, *rest = kinds
    noun = "triple" if skipped[first] == 1 else "triples"
    parts = [f"{skipped[first]:,} {noun} with {SKIPPED[first]}"]
    parts += [f"{skipped[kind]:,} with {SKIPPED[kind]}" for kind in rest]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{listed} {'was' if skipped.total() == 1 else 'were'}"
