"""The reader of RDF, by pyoxigraph: IRIs are names, and literals are at most labels."""

from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import pyarrow as pa

from dualkg.data.readers import FileReader, make_block
from dualkg.errors import DataError, RequestError
from dualkg.extras import optional_import

NUM_TRIPLES = 1 << 17
LABEL = "http://www.w3.org/2000/01/rdf-schema#label"
FORMATS = {".nt": "N_TRIPLES", ".ttl": "TURTLE", ".nq": "N_QUADS", ".trig": "TRIG", ".rdf": "RDF_XML"}
SKIPPED = {"literal": "a literal", "blank": "a blank node", "quoted": "a quoted triple"}


class RdfReader(FileReader):
    """Triples whose three terms are IRIs; an English or untagged rdfs:label becomes a label."""

    def blocks(self) -> Generator[pa.RecordBatch]:
        if self.columns is not None:
            raise RequestError(f"{self.name} is RDF, which has no columns to choose. Leave them out.")
        self._label_ranks: dict[str, int] = {}
        skipped: Counter[str] = Counter()
        found: list[tuple[str, str, str]] = []
        named_graphs: set[str] = set()
        for triple in self._parse():
            kind = self._classify(triple)
            named_graphs.add(str(triple.graph_name))
            if kind == "names":
                found.append((triple.subject.value, triple.predicate.value, triple.object.value))
            elif kind != "label":
                skipped[kind] += 1
            if len(found) == NUM_TRIPLES:
                yield _block(found)
                found = []
        if found:
            yield _block(found)
        if len(named_graphs) > 1:
            self.remarks.append(f"{self.name}: the triples of {len(named_graphs):,} named graphs were put together.")
        if skipped:
            counts = ", ".join(f"{skipped[kind]:,} with {text}" for kind, text in SKIPPED.items() if skipped[kind])
            self.remarks.append(f"{self.name}: triples skipped: {counts}.")

    def _parse(self) -> Iterator[Any]:
        with optional_import("pyoxigraph", purpose=f"{self.name} is RDF, and reading it"):
            import pyoxigraph as ox
        rdf_format = getattr(ox.RdfFormat, FORMATS[self.source.suffix])
        with self.source.open() as stream:
            try:
                yield from ox.parse(stream, format=rdf_format)
            except SyntaxError as error:
                detail = str(error.msg).partition(": ")[2] or str(error.msg)
                raise DataError(
                    f"{self.name}, line {error.lineno or 1:,}: this is not valid "
                    f"{rdf_format.name} ({detail.rstrip('.')}). Correct the line, or remove it."
                ) from error

    def _classify(self, triple: Any) -> str:
        """`names` for a triple to keep, `label` for one that became a label, or why it is skipped."""
        subject, target = type(triple.subject).__name__, type(triple.object).__name__
        if target == "Literal":
            if subject == "NamedNode" and triple.predicate.value == LABEL and self._add_label(triple):
                return "label"
            return "literal"
        if "BlankNode" in (subject, target):
            return "blank"
        return "names" if (subject, target) == ("NamedNode", "NamedNode") else "quoted"

    def _add_label(self, triple: Any) -> bool:
        """Keep a label unless it is in another language; English precedes untagged, then the first one wins."""
        language = (triple.object.language or "").lower()
        if language and language.partition("-")[0] != "en":
            return False
        rank = {"en": 0, "": 1}.get(language, 2)
        name = triple.subject.value
        if rank < self._label_ranks.get(name, 3):
            self.labels[name], self._label_ranks[name] = triple.object.value, rank
        return True


def _block(found: list[tuple[str, str, str]]) -> pa.RecordBatch:
    return make_block(*(pa.array(names, pa.string()) for names in zip(*found, strict=True)))
