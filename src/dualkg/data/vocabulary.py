"""Names and labels of entities or relations, and their ids."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from dualkg.data.spill import NameIndex, slices
from dualkg.errors import RequestError, did_you_mean

MANY_NAMES = 200_000
INDEXED_NAMES = (
    1_000_000  # more are found by an index of hashes, as a dictionary takes over 100 bytes for each
)


class Vocabulary:
    """The names of entities or relations (`kind`) in the order of their ids, with optional labels.

    Names are stored as one Arrow array, so that millions of them take little more memory than their
    text.
    """

    def __init__(
        self,
        names: Sequence[str] | pa.Array,
        labels: Mapping[str, str] | pa.Array | None = None,
        *,
        kind: str = "entity",
    ) -> None:
        self.kind = kind
        self.names: pa.Array = (
            names if isinstance(names, pa.Array) else pa.array(names, pa.string())
        )
        if isinstance(labels, Mapping):
            parts = (self.names[part].to_pylist() for part in slices(len(self.names)))
            found = [pa.array(map(labels.get, names), self.names.type) for names in parts]
            labels = (
                pa.concat_arrays(found)
                if any(part.null_count < len(part) for part in found)
                else None
            )
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
        found = self.labels[id].as_py() if self.labels is not None else None
        return found or self[id]

    def text(self, id: int) -> str:
        """The label if it is unique, so that `id` finds it; else the name."""
        label = self.label(id)
        return (
            label
            if self._ids.get(label, id) == id and len(self._ids_of_label.get(label, [id])) == 1
            else self[id]
        )

    @cached_property
    def _ids(self) -> dict[str, int] | NameIndex:
        if len(self.names) > INDEXED_NAMES:
            return NameIndex(self.names)
        return {name: id for id, name in enumerate(self.names.to_pylist())}

    @cached_property
    def _ids_of_label(self) -> dict[str, list[int]]:
        ids: dict[str, list[int]] = {}
        for id, label in enumerate([] if self.labels is None else self.labels.to_pylist()):
            if label:
                ids.setdefault(label, []).append(id)
        return ids

    @cached_property
    def _ids_of_folded(self) -> dict[str, list[int]]:
        ids: dict[str, list[int]] = {}
        for id, name in enumerate(self.names.to_pylist()):
            ids.setdefault(name.casefold(), []).append(id)
        for label, found in self._ids_of_label.items():
            ids.setdefault(label.casefold(), []).extend(found)
        return ids

    def ids_ignoring_case(self, name: str) -> list[int]:
        """The ids with this name or label, ignoring case."""
        if len(self.names) <= INDEXED_NAMES:
            return sorted(set(self._ids_of_folded.get(name.casefold(), [])))
        import pyarrow.compute as pc

        wanted = pa.scalar(name.lower(), self.names.type)
        found = set[int]()
        for texts in (self.names, *([] if self.labels is None else [self.labels])):
            for part in slices(len(texts)):  # without a dictionary, by a scan of all names
                same = pc.equal(pc.utf8_lower(texts[part]), wanted).fill_null(False)
                found.update(
                    (part.start + np.flatnonzero(same.to_numpy(zero_copy_only=False))).tolist()
                )
        return sorted(found)

    def id(self, name: str | int) -> int:
        """The id of a name, of a label, or an id itself; names take precedence over labels."""
        if not isinstance(name, str):
            if isinstance(name, bool) or not isinstance(name, (int, np.integer)):
                raise RequestError(
                    f"An {self.kind} is given by its name or by its id; {name!r} was given."
                )
            if not 0 <= name < len(self):
                known = f"ids go from 0 to {len(self) - 1:,}" if len(self) else "none is known"
                raise RequestError(f"There is no {self.kind} {int(name):,}: {known}.")
            return int(name)
        if (id := self._ids.get(name)) is not None:
            return id
        ids = self._ids_of_label.get(name) or self.ids_ignoring_case(name)
        if len(ids) == 1:
            return ids[0]
        if ids:
            options = ", ".join(f"'{self[id]}'" for id in ids[:5])
            plural = "entities" if self.kind == "entity" else f"{self.kind}s"
            raise RequestError(
                f"'{name}' matches {len(ids)} {plural}: {options}. Use one of these names."
            )
        known = f"among the {len(self):,} known" if len(self) else "because none is known"
        raise RequestError(f"No {self.kind} is named '{name}' {known}.{self._suggestion(name)}")

    def ids(self, names: Sequence[str]) -> list[int]:
        return [self.id(name) for name in names]

    def _suggestion(self, name: str) -> str:
        """A similar name or label; of very many names, only those of similar length with the same
        first letter.
        """
        names = self.names
        if len(names) > MANY_NAMES:
            import pyarrow.compute as pc  # slow to import, and rarely needed

            similar = pc.and_(
                pc.less_equal(pc.abs(pc.subtract(pc.utf8_length(names), len(name))), 2),
                pc.equal(pc.utf8_lower(pc.utf8_slice_codeunits(names, 0, 1)), name[:1].lower()),
            )
            names = names.filter(similar)
        return did_you_mean(name, [*self._ids_of_label, *names.to_pylist()])
