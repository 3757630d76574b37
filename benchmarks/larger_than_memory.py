"""Reading graphs larger than memory by dualkg, DuckDB and Polars: what each takes, and whether the
results agree.

`python benchmarks/larger_than_memory.py` writes a file of triples of names, and reads it by each
library in turn, in fresh processes, for several rounds. Two jobs are measured:

- `encode` gives names their ids by first appearance, and writes names and triples to disk;
- `answers` sorts the distinct answers to the queries of both directions.

DuckDB and Polars are no dependencies of dualkg: install them for this benchmark alone.
"""

import hashlib
import inspect
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import distributed
import measurement
from measurement import log

TOPIC = "larger_than_memory"
MEMORY_LIMIT = "1GB"  # of DuckDB, which writes the rest to disk
THREADS = 2
ROWS = 1 << 20
ROLES = ("head", "relation", "tail")
FACTS = ("seconds", "cpu_seconds", "peak_mib", "peak_mib_without_maps", "mib_after_imports")
Triples = npt.NDArray[np.int32]
Ids = npt.NDArray[np.int64]


class Job(NamedTuple):
    """What is read, and how often."""

    name: str
    work: str
    num_triples: int
    num_names: int
    rounds: int = 3


class Encoded(NamedTuple):
    """Names in the order of their ids, in parts, and triples of ids in the order of the file."""

    entities: Iterator[pa.Array]
    relations: Iterator[pa.Array]
    triples: Iterator[Triples]


class Answers(NamedTuple):
    """Sorted queries, where the answers of each begin, and sorted answers, in parts."""

    queries: Iterator[Ids]
    offsets: Iterator[Ids]
    answers: Iterator[Triples]


# -- names to ids ------------------------------------------------------------


def encode_by_dualkg(path: Path, folder: Path) -> Encoded:
    from dualkg.data.encoding import read_triples
    from dualkg.data.loading import find_sources

    read = read_triples({"train": find_sources(path)[0]})
    return Encoded(iter([read.entities]), iter([read.relations]), iter([read.triples["train"]]))


def encode_by_duckdb(path: Path, folder: Path) -> Encoded:
    database = _duckdb(folder)
    database.execute(f"""
        CREATE TABLE lines AS
        SELECT row_number() OVER () - 1 AS number, head, relation, tail
        FROM read_csv(
            '{path}', delim = '\t', header = false, quote = '', escape = '',
            columns = {{'head': 'VARCHAR', 'relation': 'VARCHAR', 'tail': 'VARCHAR'}}
        )
    """)
    ends = """
        SELECT head AS name, 2 * number AS position FROM lines
        UNION ALL SELECT tail, 2 * number + 1 FROM lines
    """
    links = "SELECT relation AS name, number AS position FROM lines"
    for table, positions in (("entities", ends), ("relations", links)):
        database.execute(f"""
            CREATE TABLE {table} AS
            SELECT name, (row_number() OVER (ORDER BY first) - 1)::INTEGER AS id
            FROM (SELECT name, min(position) AS first FROM ({positions}) GROUP BY name)
        """)
    database.execute("""
        CREATE TABLE triples AS
        SELECT heads.id AS head, relations.id AS relation, tails.id AS tail
        FROM lines
        JOIN entities AS heads ON lines.head = heads.name
        JOIN relations ON lines.relation = relations.name
        JOIN entities AS tails ON lines.tail = tails.name
        ORDER BY number
    """)

    def names(table: str) -> Iterator[pa.Array]:
        query = f"SELECT name FROM {table} ORDER BY id"
        for batch in database.execute(query).to_arrow_reader(ROWS):
            yield batch.column("name")

    def triples() -> Iterator[Triples]:
        for batch in database.execute("FROM triples").to_arrow_reader(ROWS):
            yield np.stack([column.to_numpy() for column in batch.columns], axis=1)

    return Encoded(names("entities"), names("relations"), triples())


def encode_by_polars(path: Path, folder: Path) -> Encoded:
    import polars as pl

    lines = pl.scan_csv(
        path, separator="\t", has_header=False, quote_char=None, new_columns=ROLES
    ).with_row_index("number")
    number = pl.col("number").cast(pl.Int64)
    heads = lines.select(name="head", position=2 * number)
    tails = lines.select(name="tail", position=2 * number + 1)
    links = lines.select(name="relation", position=number)
    for table, positions in (("entities", pl.concat([heads, tails])), ("relations", links)):
        firsts = positions.group_by("name").agg(pl.col("position").min()).sort("position")
        ids = firsts.select("name").with_row_index("id").cast({"id": pl.Int32})
        ids.sink_ipc(folder / f"{table}.arrow", engine="streaming")
    entities = pl.scan_ipc(folder / "entities.arrow")
    relations = pl.scan_ipc(folder / "relations.arrow")
    found = lines
    for role, known in (("head", entities), ("relation", relations), ("tail", entities)):
        renamed = known.rename({"name": role, "id": f"{role}_id"})
        found = found.join(renamed, on=role, how="left")
    found = found.sort("number").select("head_id", "relation_id", "tail_id")
    found.sink_ipc(folder / "triples.arrow", engine="streaming")

    def batches(name: str) -> Iterator[pa.RecordBatch]:
        with pa.ipc.open_file(pa.memory_map(str(folder / f"{name}.arrow"))) as file:
            for index in range(file.num_record_batches):
                yield file.get_batch(index)

    def triples() -> Iterator[Triples]:
        for batch in batches("triples"):
            yield np.stack([column.to_numpy() for column in batch.columns], axis=1)

    entity_names = (batch.column("name") for batch in batches("entities"))
    relation_names = (batch.column("name") for batch in batches("relations"))
    return Encoded(entity_names, relation_names, triples())


# -- sorted answers ----------------------------------------------------------


def answers_by_dualkg(path: Path, folder: Path) -> Answers:
    from dualkg.data.filters import KnownAnswers
    from dualkg.data.triples import GraphShape

    triples = np.load(path, mmap_mode="c")
    num_entities, num_relations = json.loads(path.with_suffix(".json").read_text())
    known = KnownAnswers([triples], GraphShape(num_entities, num_relations))
    return Answers(iter([known.queries]), iter([known.offsets]), iter([known.answers]))


def answers_by_duckdb(path: Path, folder: Path) -> Answers:
    triples = np.load(path, mmap_mode="r")
    _, num_relations = json.loads(path.with_suffix(".json").read_text())
    width = 2 * num_relations
    database = _duckdb(folder)
    batches = (
        pa.record_batch([pa.array(column) for column in part.T], names=ROLES)
        for part in (triples[start : start + ROWS] for start in range(0, len(triples), ROWS))
    )
    schema = pa.schema(dict.fromkeys(ROLES, pa.int32()))
    reader = pa.RecordBatchReader.from_batches(schema, batches)
    database.register("given", reader)
    database.execute("CREATE TABLE triples AS FROM given")
    database.execute(f"""
        CREATE TABLE answers AS
        SELECT DISTINCT query, answer FROM (
            SELECT head::BIGINT * {width} + relation AS query, tail AS answer FROM triples
            UNION ALL
            SELECT tail::BIGINT * {width} + relation + {num_relations}, head FROM triples
        ) ORDER BY query, answer
    """)
    counts = "SELECT query, count(*) AS size FROM answers GROUP BY query ORDER BY query"
    database.execute(f"CREATE TABLE queries AS {counts}")

    def column(query: str) -> Iterator[Any]:
        for batch in database.execute(query).to_arrow_reader(ROWS):
            yield batch.column(0).to_numpy()

    return Answers(
        column("SELECT query FROM queries"),
        _offsets(column("SELECT size FROM queries")),
        column("SELECT answer FROM answers"),
    )


def answers_by_polars(path: Path, folder: Path) -> Answers:
    import polars as pl

    triples = np.load(path, mmap_mode="r")
    _, num_relations = json.loads(path.with_suffix(".json").read_text())
    width = 2 * num_relations
    table = {role: triples[:, index] for index, role in enumerate(ROLES)}
    lines = pl.LazyFrame(table)
    head, relation, tail = (pl.col(role).cast(pl.Int64) for role in ROLES)
    tails = lines.select(query=head * width + relation, answer="tail")
    heads = lines.select(query=tail * width + relation + num_relations, answer="head")
    distinct = pl.concat([tails, heads]).unique().sort("query", "answer")
    distinct.sink_ipc(folder / "answers.arrow", engine="streaming")
    answers = pl.scan_ipc(folder / "answers.arrow")
    sizes = answers.group_by("query").agg(size=pl.len().cast(pl.Int64)).sort("query")
    sizes.sink_ipc(folder / "queries.arrow", engine="streaming")

    def column(file_name: str, name: str) -> Iterator[Any]:
        with pa.ipc.open_file(pa.memory_map(str(folder / file_name))) as file:
            for index in range(file.num_record_batches):
                yield file.get_batch(index).column(name).to_numpy()

    return Answers(
        column("queries.arrow", "query"),
        _offsets(column("queries.arrow", "size")),
        column("answers.arrow", "answer"),
    )


def _offsets(sizes: Iterator[Ids]) -> Iterator[Ids]:
    end = 0
    yield np.zeros(1, np.int64)
    for part in sizes:
        ends = end + np.cumsum(part)
        end = int(ends[-1])
        yield ends


def _duckdb(folder: Path) -> Any:
    import duckdb

    database = duckdb.connect(str(folder / "graph.duckdb"))
    database.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
    database.execute(f"SET threads = {THREADS}")
    database.execute(f"SET temp_directory = '{folder / 'spilled'}'")
    return database


# -- measuring ---------------------------------------------------------------

WORKS: dict[str, dict[str, Callable[[Path, Path], Any]]] = {
    "encode": {
        "dualkg": encode_by_dualkg,
        "duckdb": encode_by_duckdb,
        "polars": encode_by_polars,
    },
    "answers": {
        "dualkg": answers_by_dualkg,
        "duckdb": answers_by_duckdb,
        "polars": answers_by_polars,
    },
}


def read_once(work: str, library: str, path: str, folder: str) -> dict[str, Any]:
    """Seconds, peak memory and the checksum of a result, each part of which is read once."""
    if library == "dualkg":
        import dualkg.data.filters
        import dualkg.data.loading  # noqa: F401
    else:
        __import__(library)
    checksums = []

    def read() -> dict[str, Any]:
        for parts in WORKS[work][library](Path(path), Path(folder)):
            checksum = hashlib.sha256()
            for part in parts:
                _update(checksum, part)
            checksums.append(checksum.hexdigest()[:16])
        return {}

    before = round(measurement.resident_mib() or 0)
    found = distributed.measured(read)
    return found | {"checksums": checksums, "mib_after_imports": before}


def _update(checksum: Any, part: Any) -> None:
    """Add names, each ended by a line end, or ids as 8 bytes each, so that types do not matter."""
    for start in range(0, len(part), ROWS):
        rows = part[start : start + ROWS]
        if isinstance(rows, pa.Array):
            checksum.update("".join(f"{name}\n" for name in rows.to_pylist()).encode())
        else:
            checksum.update(np.ascontiguousarray(rows, dtype=np.int64).data)


def measure(job: Job, device: str) -> Iterator[dict[str, Any]]:
    """The libraries in turn, for several rounds; the order of each round is that of the one before
    it, reversed.
    """
    libraries = list(WORKS[job.work])
    rounds: dict[str, list[dict[str, Any]]] = {library: [] for library in libraries}
    with tempfile.TemporaryDirectory(prefix="dualkg-larger-") as folder:
        path = _input_of(job, Path(folder))
        for number in range(job.rounds):
            for library in libraries[:: (-1) ** number]:
                rounds[library].append(_read_in_fresh_process(job, library, path))
                log(f"{job.name}, round {number + 1}, {library}: {rounds[library][-1]}")
        size = path.stat().st_size
    facts = {library: _summary(runs, job.work, library) for library, runs in rounds.items()}
    expected = facts["dualkg"]["checksums"]
    for library_facts in facts.values():
        library_facts["same_result"] = library_facts["checksums"] == expected
    yield {
        "triples": job.num_triples,
        "names": job.num_names,
        "file_mib": size >> 20,
        "memory_limit_of_duckdb": MEMORY_LIMIT,
        "threads": THREADS,
        "rounds": job.rounds,
        "versions": {name: measurement.version(name) for name in ("duckdb", "polars", "pyarrow")},
        "libraries": facts,
    }


def _input_of(job: Job, folder: Path) -> Path:
    """A file of names, or one of ids in the format of saved graphs."""
    if job.work == "encode":
        path = folder / "triples.tsv"
        distributed.write_triples(path, num_triples=job.num_triples, num_names=job.num_names)
        return path
    random = np.random.default_rng(0)
    sizes = (job.num_names, distributed.NUM_RELATIONS, job.num_names)
    columns = [
        (size * random.random(job.num_triples) ** power).astype(np.int32)
        for size, power in zip(sizes, (3, 2, 2), strict=True)
    ]
    path = folder / "triples.npy"
    np.save(path, np.stack(columns, axis=1))
    path.with_suffix(".json").write_text(json.dumps(sizes[:2]))
    return path


def _read_in_fresh_process(job: Job, library: str, path: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        os.environ["DUALKG_CACHE"] = folder
        os.environ["POLARS_MAX_THREADS"] = str(THREADS)
        task = {"what": "read", "work": job.work, "library": library}
        task |= {"path": str(path), "folder": folder}
        return measurement.in_fresh_process(Path(__file__), task)


def _summary(runs: list[dict[str, Any]], work: str, library: str) -> dict[str, Any]:
    """Medians of the rounds, and the lines of code that the library needs."""
    failures = [run["failed"] for run in runs if "failed" in run]
    if failures:
        return {"failed": failures[0], "checksums": []}
    summary: dict[str, Any] = {fact: statistics.median(run[fact] for run in runs) for fact in FACTS}
    summary["seconds_of_rounds"] = [run["seconds"] for run in runs]
    summary["checksums"] = runs[0]["checksums"]
    summary["lines"] = lines_of(work, library)
    return summary


def lines_of(work: str, library: str) -> int:
    """Lines of code, without blank ones: of the function above, or of what dualkg has for it."""
    if library != "dualkg":
        return _num_lines(WORKS[work][library])
    from dualkg.data import filters, spill

    if work == "answers":
        return _num_lines(filters.KnownAnswers._on_disk) + _num_lines(spill.PartitionedRows)
    needed = (spill.Column, spill.PartitionedRows, spill.SpilledNames, spill.SpilledTriples)
    return sum(_num_lines(part) for part in (*needed, spill.hash_names, spill.first_positions))


def _num_lines(part: Any) -> int:
    return sum(bool(line.strip()) for line in inspect.getsource(part).splitlines())


def jobs(*, quick: bool) -> list[Job]:
    if quick:
        return [
            Job("encode", "encode", 20_000, 5_000, 1),
            Job("answers", "answers", 20_000, 500, 1),
        ]
    return [
        Job("encode", "encode", 10_000_000, 4_000_000),
        Job("answers", "answers", 10_000_000, 2_000_000),
    ]


def main() -> None:
    choices = measurement.parser(__doc__).parse_args()
    choices.device = choices.device or "cpu"
    measurement.run(
        TOPIC,
        choices,
        jobs={"cpu": jobs(quick=choices.quick)},
        tasks={"read": read_once},
        measure=measure,
    )


if __name__ == "__main__":
    sys.exit(main())
