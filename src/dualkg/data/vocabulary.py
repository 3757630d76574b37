"""Names and labels of entities or relations, and their ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dualkg.data.triples import slices
from dualkg.errors import InvalidValue, RequestError, UnknownName, close_matches

MANY_NAMES = 200_000
# More names are found by an index of hashes, as a dictionary takes over 100 bytes for each.
INDEXED_NAMES = 1_000_000
MAX_MATCHES = 5  # names of an ambiguous label that are listed


class Vocabulary:
    """The names of entities or relations (`kind`) in the order of their ids, with optional labels.

    Names are stored as one Arrow array, so that millions of them take little more memory than their
    text.

    Args:
        names: The names in the order of their ids.
        labels: Readable labels by name, or in the order of the ids.
        kind: "entity" or "relation".

    Examples:
        >>> graph.entities[graph.entities.id("France")]
        'France'
    """

    def __init__(
        self,
        names: Sequence[str] | pa.Array,
        labels: Mapping[str, str] | pa.Array | None = None,
        *,
        kind: str = "entity",
    ) -> None:
        if not isinstance(names, pa.Array):
            names = pa.array(names, pa.string())
        if isinstance(labels, Mapping):
            labels = _labels_in_order(names, labels)
        self.kind = kind
        self.names: pa.Array = names
        self.labels: pa.Array | None = labels

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, id: int) -> str:
        return str(self.names[id].as_py())

    def __contains__(self, name: object) -> bool:
        """Whether it is a name or a label; faster than `id`, which looks for similar names."""
        return name in self._ids or name in self._ids_of_label

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.names.equals(other.names)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Vocabulary({len(self):,} names of kind {self.kind!r})"

    def label(self, id: int) -> str:
        """The label, or the name if there is none."""
        label = None if self.labels is None else self.labels[id].as_py()
        return label or self[id]

    def with_labels(self, ids: Sequence[int]) -> list[tuple[str, str]]:
        """The name and the label of each id: for many ids faster than one by one."""
        rows = pa.array(ids, pa.int64())
        names = self.names.take(rows).to_pylist()
        if self.labels is None:
            return [(name, name) for name in names]
        labels = self.labels.take(rows).to_pylist()
        return [(name, label or name) for name, label in zip(names, labels, strict=True)]

    def text(self, id: int) -> str:
        """The label if it is unique, so that `id` finds it; else the name."""
        label = self.label(id)
        is_own_name = self._ids.get(label, id) == id
        is_unique = len(self._ids_of_label.get(label, [id])) == 1
        return label if is_own_name and is_unique else self[id]

    def id(self, name: str | int) -> int:
        """The id of a name, of a label, or an id itself; names take precedence over labels."""
        if not isinstance(name, str):
            return self._checked_id(name)

        id = self._ids.get(name)
        if id is not None:
            return id

        ids = self._ids_of_label.get(name) or self.ids_ignoring_case(name)
        if len(ids) == 1:
            return ids[0]
        if ids:
            plural = "entities" if self.kind == "entity" else f"{self.kind}s"
            listed = ", ".join(f"'{self[id]}'" for id in ids[:MAX_MATCHES])
            raise RequestError(
                f"'{name}' matches {len(ids)} {plural}: {listed}. Use one of these names."
            )
        raise UnknownName(self.kind, name, suggestions=self._similar_names(name))

    def ids(self, names: Sequence[str]) -> list[int]:
        """The ids of several names, in their order."""
        return [self.id(name) for name in names]

    def _checked_id(self, id: object) -> int:
        if isinstance(id, bool) or not isinstance(id, (int, np.integer)):
            raise InvalidValue(self.kind, expected="a name or an id", found=id)
        if not 0 <= id < len(self):
            known = f"ids go from 0 to {len(self) - 1:,}" if len(self) else "none is known"
            raise RequestError(f"There is no {self.kind} {id:,}: {known}.")
        return int(id)

    def ids_ignoring_case(self, name: str) -> list[int]:
        """The ids with this name or label, ignoring case."""
        if len(self.names) <= INDEXED_NAMES:
            return sorted(set(self._ids_of_folded.get(name.casefold(), [])))

        # A dictionary of so many names takes too much memory: all of them are scanned.
        import pyarrow.compute as pc

        wanted = pa.scalar(name.lower(), self.names.type)
        columns = [self.names] if self.labels is None else [self.names, self.labels]
        ids = set[int]()
        for column in columns:
            for part in slices(len(column)):
                is_same = pc.equal(pc.utf8_lower(column[part]), wanted).fill_null(False)
                positions = np.flatnonzero(is_same.to_numpy(zero_copy_only=False))
                ids.update((part.start + positions).tolist())
        return sorted(ids)

    def _similar_names(self, name: str) -> list[str]:
        """Similar names or labels, best first.

        Of very many names, only those of similar length with the same first letter are compared.
        """
        names = self.names
        if len(names) > MANY_NAMES:
            import pyarrow.compute as pc  # slow to import, and rarely needed

            length_difference = pc.abs(pc.subtract(pc.utf8_length(names), len(name)))
            first_letters = pc.utf8_lower(pc.utf8_slice_codeunits(names, 0, 1))
            is_similar = pc.and_(
                pc.less_equal(length_difference, 2), pc.equal(first_letters, name[:1].lower())
            )
            names = names.filter(is_similar)
        return close_matches(name, [*self._ids_of_label, *names.to_pylist()])

    @cached_property
    def _ids(self) -> dict[str, int] | NameIndex:
        if len(self.names) > INDEXED_NAMES:
            return NameIndex(self.names)
        return {name: id for id, name in enumerate(self.names.to_pylist())}

    @cached_property
    def _ids_of_label(self) -> dict[str, list[int]]:
        ids: dict[str, list[int]] = {}
        if self.labels is None:
            return ids
        for id, label in enumerate(self.labels.to_pylist()):
            if label:
                ids.setdefault(label, []).append(id)
        return ids

    @cached_property
    def _ids_of_folded(self) -> dict[str, list[int]]:
        """The ids of names and labels in lower case."""
        ids: dict[str, list[int]] = {}
        for id, name in enumerate(self.names.to_pylist()):
            ids.setdefault(name.casefold(), []).append(id)
        for label, ids_of_label in self._ids_of_label.items():
            ids.setdefault(label.casefold(), []).extend(ids_of_label)
        return ids


class NameIndex:
    """The ids of very many names, by their hashes: 16 bytes for each; a dictionary takes 100."""

    def __init__(self, names: pa.Array) -> None:
        self._names = names
        hashes = np.empty(len(names), np.int64)
        for part in slices(len(names)):
            hashes[part] = [hash(name) for name in names[part].to_pylist()]
        self._ids = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._ids]

    def get(self, name: object, default: Any = None) -> Any:
        first = np.searchsorted(self._hashes, hash(name), side="left")
        last = np.searchsorted(self._hashes, hash(name), side="right")
        for id in self._ids[first:last].tolist():
            if self._names[id].as_py() == name:
                return id
        return default

    def __contains__(self, name: object) -> bool:
        return self.get(name) is not None


def text_of(names: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Where each name starts, and the last one ends, in the bytes of all; and these bytes."""
    _, offsets, content = names.buffers()
    letters = np.frombuffer(content or b"", np.uint8)
    if not len(names):
        return np.zeros(1, np.int64), letters
    offset_type = np.int64 if names.type == pa.large_string() else np.int32
    ends = np.frombuffer(offsets, offset_type)[names.offset : names.offset + len(names) + 1]
    return ends.astype(np.int64, copy=False), letters


def _labels_in_order(names: pa.Array, labels: Mapping[str, str]) -> pa.Array | None:
    """The label of each name, null if it has none; None if no name has one."""
    parts = []
    for part in slices(len(names)):
        labels_of_part = map(labels.get, names[part].to_pylist())
        parts.append(pa.array(labels_of_part, names.type))
    if all(part.null_count == len(part) for part in parts):
        return None
    return pa.concat_arrays(parts)
