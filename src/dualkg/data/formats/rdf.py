"""RDF, by pyoxigraph: N-Triples, Turtle, N-Quads, TriG and RDF/XML."""

from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import pyarrow as pa

from dualkg.data.readers import Reader, blocks_of, reads
from dualkg.errors import RequestError
from dualkg.extras import optional_import

# The names of the formats in pyoxigraph.
FORMATS = {
    ".nt": "N_TRIPLES",
    ".ttl": "TURTLE",
    ".nq": "N_QUADS",
    ".trig": "TRIG",
    ".rdf": "RDF_XML",
}
LABEL = "http://www.w3.org/2000/01/rdf-schema#label"
SKIPPED = {"literal": "a literal", "blank": "a blank node", "quoted": "a quoted triple"}


@reads(*FORMATS)
class RdfReader(Reader):
    """Triples of three IRIs; an English or untagged rdfs:label becomes a label."""

    def blocks(self) -> Generator[pa.RecordBatch]:
        if self.columns is not None:
            raise RequestError(
                f"{self.name} is RDF, which has no columns to choose. Leave them out."
            )
        yield from blocks_of(self._triples(), self.options.block_rows)

    def _triples(self) -> Iterator[tuple[str, str, str]]:
        num_skipped = Counter[str]()
        named_graphs = set[str]()
        preferences = dict[str, int]()
        for triple in self._parse():
            named_graphs.add(str(triple.graph_name))
            kinds = {type(triple.subject).__name__, type(triple.object).__name__}
            if "Literal" in kinds:
                is_label = self._add_label(triple, preferences)
                num_skipped["literal"] += not is_label
            elif "BlankNode" in kinds:
                num_skipped["blank"] += 1
            elif kinds == {"NamedNode"}:
                yield triple.subject.value, triple.predicate.value, triple.object.value
            else:
                num_skipped["quoted"] += 1

        if len(named_graphs) > 1:
            graphs = f"{len(named_graphs):,} named graphs"
            self.notes.append(f"{self.name}: the triples of {graphs} were put together.")
        counts = [
            f"{num_skipped[kind]:,} with {text}"
            for kind, text in SKIPPED.items()
            if num_skipped[kind]
        ]
        if counts:
            self.notes.append(f"{self.name}: triples skipped: {', '.join(counts)}.")

    def _parse(self) -> Iterator[Any]:
        with optional_import("pyoxigraph", purpose=f"{self.name} is RDF, and reading it"):
            import pyoxigraph as ox

        rdf_format = getattr(ox.RdfFormat, FORMATS[self.data.suffix])
        with self.data.open() as stream:
            try:
                yield from ox.parse(stream, format=rdf_format)
            except SyntaxError as error:
                detail = str(error.msg).partition(": ")[2] or str(error.msg)
                raise self.unusable(
                    f"this is not valid {rdf_format.name} ({detail.rstrip('.')})",
                    place=f"line {error.lineno or 1:,}",
                    advice="Correct the line, or remove it.",
                ) from error

    def _add_label(self, triple: Any, preferences: dict[str, int]) -> bool:
        """Keep a label unless it is in another language, and say whether it is a label.

        English precedes untagged labels; of equal ones the first counts.
        """
        is_named = type(triple.subject).__name__ == "NamedNode"
        if not is_named or triple.predicate.value != LABEL:
            return False
        language = (triple.object.language or "").lower()
        if language and language.partition("-")[0] != "en":
            return False

        name = triple.subject.value
        preference = {"en": 0, "": 1}.get(language, 2)
        if preference < preferences.get(name, 3):
            self.labels[name] = triple.object.value
            preferences[name] = preference
        return True
