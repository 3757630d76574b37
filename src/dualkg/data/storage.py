"""A graph as a folder of Parquet files: how the cache and the run folders keep one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.data.graph import SPLITS, Graph, Notes
from dualkg.data.vocabulary import Vocabulary
from dualkg.files import replacing_folder

COLUMNS = ("head", "relation", "tail")
FORMAT = 1  # raised when a folder written before cannot be read any more


def save_graph(graph: Graph, folder: Path) -> None:
    """Write a graph; the folder appears whole or not at all."""
    with replacing_folder(folder, existing="keep") as fresh:
        for vocabulary, name in ((graph.entities, "entities"), (graph.relations, "relations")):
            columns = {"name": vocabulary.names}
            if vocabulary.labels is not None:
                columns["label"] = vocabulary.labels
            _write(columns, fresh / f"{name}.parquet", use_dictionary=False)
        for split in SPLITS:
            columns = {name: pa.array(graph.split(split)[:, i]) for i, name in enumerate(COLUMNS)}
            _write(columns, fresh / f"{split}.parquet", use_dictionary=True)
        about = {
            "format": FORMAT,
            "name": graph.name,
            "source": graph.source,
            "fingerprint": graph.fingerprint,
            "catalogued": graph.catalogued,
            "notes": asdict(graph.notes),
        }
        (fresh / "graph.json").write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")


def load_saved_graph(folder: Path) -> Graph:
    """Read a graph that `save_graph` wrote; OSError or ValueError where that cannot be done."""
    try:
        return _load(folder)
    except (KeyError, TypeError, pa.ArrowException) as error:
        raise ValueError(f"{folder} is damaged ({error})") from error


def _load(folder: Path) -> Graph:
    about = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
    if about["format"] != FORMAT:
        raise ValueError(f"{folder} has format {about['format']}; this version reads {FORMAT}")
    notes = Notes(about["notes"]["duplicates"], about["notes"]["overlaps"], tuple(about["notes"]["remarks"]))
    with _memory_given_back():
        return Graph(
            name=about["name"],
            entities=_vocabulary(folder / "entities.parquet", "entity"),
            relations=_vocabulary(folder / "relations.parquet", "relation"),
            train=_triples(folder / "train.parquet"),
            valid=_triples(folder / "valid.parquet"),
            test=_triples(folder / "test.parquet"),
            source=about["source"],
            fingerprint=about["fingerprint"],
            catalogued=about["catalogued"],
            notes=notes,
        )


@contextmanager
def _memory_given_back() -> Iterator[None]:
    """Arrow's own pool would keep what reading took; small beside a large graph, but more than a small one."""
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def _write(columns: dict[str, pa.Array], path: Path, *, use_dictionary: bool) -> None:
    pq.write_table(pa.table(columns), path, compression="zstd", use_dictionary=use_dictionary, write_page_checksum=True)


def _read(path: Path) -> pa.Table:
    with pq.ParquetFile(path, page_checksum_verification=True) as file:  # `read_table` would load another library
        return file.read()


def _vocabulary(path: Path, kind: str) -> Vocabulary:
    table = _read(path)
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    return Vocabulary(columns["name"], columns.get("label"), kind=kind)


def _triples(path: Path) -> np.ndarray:
    table = _read(path)
    triples = np.empty((table.num_rows, 3), dtype=np.int32)
    for i, name in enumerate(COLUMNS):
        triples[:, i] = table[name].to_numpy()
    return triples
