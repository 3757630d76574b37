"""The catalogue: its entries, downloads, and recognition by counts and checksums."""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from dualkg.data import catalogue as module
from dualkg.data import loading
from dualkg.data.archives import ExpandsTooMuch, cache_folder
from dualkg.data.catalogue import Entry, catalogue, find_entry
from dualkg.data.columns import check_columns
from dualkg.data.graph import SPLITS
from dualkg.data.loading import load_graph, names_in_data_folder
from dualkg.errors import DataError, RequestError
from tests.data.reading.conftest import compressed, tarred, zipped

NAMES = {
    "WN18RR",
    "FB15k-237",
    "YAGO3-10",
    "UMLS",
    "Kinship",
    "Nations",
    "Countries-S1",
    "Countries-S2",
    "Countries-S3",
    "CoDEx-S",
    "CoDEx-M",
    "CoDEx-L",
    "FB15k",
    "WN18",
    "DB100K",
    "Aristo-v4",
    "Wikidata5M",
    "OpenBioLink",
    "Hetionet",
    "PrimeKG",
    "DRKG",
    "BioKG",
    "CSKG",
    "ConceptNet",
    "OpenEA-D-W-15K",
}
DIGITS = {"md5": 32, "sha256": 64, "sha512": 128}
FILES = {
    "train.txt": b"a\tr\tb\nb\tr\tc\nc\ts\ta\n",
    "valid.txt": b"a\tr\tc\n",
    "test.txt": b"b\ts\ta\n",
}
ARCHIVE = tarred(FILES, ".gz")
COUNTS = {"entities": 3, "relations": 2, "train": 3, "valid": 1, "test": 1}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


SUMS = {split: sha256(FILES[f"{split}.txt"]) for split in SPLITS}


class Server:
    """A web server on this machine; `served` maps paths to bytes, `requested` lists the requested
    paths.
    """

    def __init__(self) -> None:
        self.served: dict[str, bytes] = {}
        self.requested: list[str] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.requested.append(self.path)
                content = owner.served.get(self.path)
                self.send_response(200 if content is not None else 404)
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *message: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Server()
    thread = Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("DUALKG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def listed(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Entry]:
    """A catalogue of one entry, Small, that the server has as a .tar.gz archive."""
    server.served["/small.tar.gz"] = ARCHIVE
    entry = Entry(
        "Small",
        "a graph",
        f"{server.address}/small.tar.gz",
        COUNTS,
        "none",
        SUMS,
        checksum=f"sha256:{sha256(ARCHIVE)}",
    )

    def patched(**changes: object) -> Entry:
        changed = replace(entry, **changes)
        monkeypatch.setattr(module, "catalogue", lambda: {changed.name: changed})
        return changed

    patched()
    return patched


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_the_catalogue_lists_the_usual_benchmarks() -> None:
    assert set(catalogue()) == NAMES


@pytest.mark.parametrize("entry", catalogue().values(), ids=lambda entry: entry.name)
def test_every_entry_is_complete(entry: Entry) -> None:
    assert re.match(r"https://[^\s?]+$", entry.address)
    assert entry.file_name != entry.name
    assert entry.about
    assert entry.licence

    # A graph without a published split has a number of triples, if one is known.
    numbers_of_triples = [what for what in entry.counts if what not in ("entities", "relations")]
    assert list(entry.counts)[:2] == ["entities", "relations"]
    assert numbers_of_triples in (list(SPLITS), ["triples"], [])
    assert entry.is_split == (numbers_of_triples == list(SPLITS))
    assert all(count > 0 for count in entry.counts.values())

    assert set(entry.sha256) | set(entry.md5) <= set(SPLITS)
    checksums = [entry.checksum] if entry.checksum else []
    checksums += [entry.known_hash(split) for split in (*entry.sha256, *entry.md5)]
    for checksum in checksums:
        kind, _, digits = checksum.partition(":")
        assert re.fullmatch(f"[0-9a-f]{{{DIGITS[kind]}}}", digits)
    # A checksum that is not known is owned up to.
    assert entry.checked_by in DIGITS or "counts" in entry.note or "numbers" in entry.note
    assert not (entry.checksum and "{split}" in entry.address)

    assert set(entry.files) in (set(), set(SPLITS), {"triples"})
    assert not entry.files or entry.is_split == ("train" in entry.files)
    check_columns(entry.columns)
    if entry.labels:
        assert entry.labels["address"].startswith("https://")
        assert entry.labels["suffix"].startswith(".")
        assert len(entry.labels["columns"]) == 2
        if "checksum" in entry.labels:
            kind, _, digits = entry.labels["checksum"].partition(":")
            assert re.fullmatch(f"[0-9a-f]{{{DIGITS[kind]}}}", digits)


def test_the_docs_list_every_entry_with_counts_and_licence() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text("utf-8")
    rows = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0]] = cells[1:]
    for entry in catalogue().values():
        numbers = list(entry.counts.values())
        triples = " / ".join(f"{number:,}" for number in numbers[2:]) or "not published"
        assert rows[entry.name] == [
            f"{numbers[0]:,}",
            f"{numbers[1]:,}",
            triples,
            entry.checked_by,
            entry.licence,
        ]


@pytest.mark.parametrize(("written", "name"), [("wn18rr", "WN18RR"), ("CODEX-m", "CoDEx-M")])
def test_names_are_found_in_any_case(written: str, name: str) -> None:
    found = find_entry(written)
    assert found is not None
    assert found.name == name


def test_the_variable_sets_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALKG_CACHE", "~/kept")
    assert cache_folder() == Path.home() / "kept"
    monkeypatch.delenv("DUALKG_CACHE")
    assert cache_folder().name == "dualkg"


def test_an_archive_is_downloaded_once(
    listed: Callable[..., Entry], server: Server, cache: Path
) -> None:
    graphs = [load_graph(name) for name in ("Small", "small")]
    assert server.requested == ["/small.tar.gz"]
    assert files_in(cache / "downloads") == ["Small.tar.gz"]
    for graph in graphs:
        assert (graph.name, graph.source, graph.catalogued) == ("Small", "Small", True)
        assert graph.counts == COUNTS


def test_single_files_are_fetched_by_split(
    listed: Callable[..., Entry], server: Server, cache: Path
) -> None:
    server.served |= {f"/small/{name}": content for name, content in FILES.items()}
    listed(address=f"{server.address}/small/{{split}}.txt", checksum="")
    assert load_graph("Small").catalogued
    assert server.requested == ["/small/train.txt", "/small/valid.txt", "/small/test.txt"]
    assert files_in(cache / "downloads" / "Small") == ["test.txt", "train.txt", "valid.txt"]


def test_an_archive_with_another_checksum_is_deleted(
    listed: Callable[..., Entry], server: Server, cache: Path
) -> None:
    server.served["/small.tar.gz"] = tarred(FILES | {"train.txt": b"a\tr\tb\n"}, ".gz")
    with pytest.raises(DataError) as caught:
        load_graph("Small")
    assert str(caught.value).startswith("Small")
    sentence = str(caught.value)
    assert sentence.startswith(
        f"Small is not what {server.address}/small.tar.gz holds: SHA256 hash of downloaded file"
    )
    assert (
        f"expected sha256:{sha256(ARCHIVE)} but got {sha256(server.served['/small.tar.gz'])}. "
        in sentence
    )
    assert "The download was deleted. To work offline, put its archive into a folder" in sentence
    assert caught.value.exit_code == 2
    assert files_in(cache) == []
    server.served["/small.tar.gz"] = ARCHIVE
    assert load_graph("Small").counts == COUNTS


@pytest.mark.parametrize("page", [b"<html>Please log in first</html>", ARCHIVE[:-20]])
def test_a_download_that_is_not_an_archive_is_deleted(
    listed: Callable[..., Entry], server: Server, cache: Path, page: bytes
) -> None:
    listed(checksum="")
    server.served["/small.tar.gz"] = page
    with pytest.raises(DataError) as caught:
        load_graph("Small")
    assert str(caught.value).endswith("/small.tar.gz was deleted.")
    assert "Small.tar.gz" in str(caught.value)
    assert str(caught.value).endswith("small.tar.gz was deleted.")
    assert files_in(cache) == []


def test_a_download_of_another_graph_is_deleted(
    listed: Callable[..., Entry], server: Server, cache: Path
) -> None:
    server.served["/small.tar.gz"] = tarred(FILES | {"train.txt": b"a\tr\tb\n"}, ".gz")
    listed(checksum="")
    with pytest.raises(DataError) as caught:
        load_graph("Small")
    address = f"{server.address}/small.tar.gz"
    assert str(caught.value).endswith(f"The download from {address} was deleted.")
    assert str(caught.value) == (
        f"Small should have 3 train triples; {address} has 1. The download from {address} was "
        "deleted."
    )
    assert files_in(cache) == []


def test_bad_labels_do_not_delete_downloads(
    listed: Callable[..., Entry], cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "labels.tsv").write_bytes(b"a\n")
    with pytest.raises(DataError) as caught:
        load_graph("Small", labels=tmp_path / "labels.tsv")
    assert str(caught.value).startswith(str(tmp_path / "labels.tsv"))
    assert files_in(cache) == ["Small.tar.gz"]


def test_a_missing_address_is_an_error(
    listed: Callable[..., Entry], server: Server, cache: Path
) -> None:
    server.served.clear()
    with pytest.raises(DataError) as caught:
        load_graph("Small")
    assert "(HTTPError)" in str(caught.value)
    assert files_in(cache) == []


def test_no_connection_is_an_error(listed: Callable[..., Entry], cache: Path) -> None:
    listed(address="http://127.0.0.1:1/small.tar.gz")
    with pytest.raises(DataError) as caught:
        load_graph("Small")
    assert str(caught.value) == (
        "Small could not be downloaded from http://127.0.0.1:1/small.tar.gz (ConnectionError). "
        "To work offline, put its archive into a folder and name that folder in the variable "
        "DUALKG_DATA."
    )
    assert files_in(cache) == []


def test_a_file_that_is_no_archive_is_named_in_the_advice() -> None:
    hetionet = catalogue()["Hetionet"]
    assert hetionet.offline_advice.startswith("To work offline, put it as Hetionet.sif.gz into")
    for name in ("CoDEx-S", "DRKG", "BioKG"):
        advice = catalogue()[name].offline_advice
        assert advice.startswith("To work offline, put its archive into")


def test_an_unwritable_cache_is_not_reported_as_a_network_error(
    listed: Callable[..., Entry], cache: Path
) -> None:
    cache.write_text("a file in the way")
    with pytest.raises(DataError) as caught:
        load_graph("Small")
    assert "could not be saved in " in str(caught.value)
    assert "DUALKG_CACHE" in str(caught.value)


def test_the_data_folder_precedes_the_network(
    listed: Callable[..., Entry], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.zip").write_bytes(
        zipped({f"deep/{name}": content for name, content in FILES.items()})
    )
    monkeypatch.setenv("DUALKG_DATA", str(tmp_path))
    graph = load_graph("Small")
    assert (graph.name, graph.catalogued, server.requested) == ("Small", True, [])


@pytest.mark.parametrize("suffix", [".tar", ".tar.xz", ".tar.zst", ".tbz2"])
def test_a_repacked_archive_under_another_name_is_the_same_graph(
    listed: Callable[..., Entry], tmp_path: Path, suffix: str
) -> None:
    compression = {".tar": "", ".tbz2": ".bz2"}.get(suffix, suffix.removeprefix(".tar"))
    packed = {f"x/{name}": content for name, content in reversed(FILES.items())} | {
        "x/README": b"hello"
    }
    (tmp_path / f"mine{suffix}").write_bytes(tarred(packed, compression))
    graph = load_graph(tmp_path / f"mine{suffix}")
    assert (graph.name, graph.catalogued) == ("Small", True)


def test_other_counts_are_another_graph_whatever_the_checksums(
    listed: Callable[..., Entry], tmp_path: Path
) -> None:
    listed(counts=COUNTS | {"entities": 4})
    (tmp_path / "mine.tar").write_bytes(tarred(FILES))
    assert not load_graph(tmp_path / "mine.tar").catalogued


def test_other_columns_are_another_graph(listed: Callable[..., Entry], tmp_path: Path) -> None:
    for name in ("mine.tar", "Small.tar"):
        (tmp_path / name).write_bytes(tarred(FILES))
    assert not load_graph(tmp_path / "mine.tar", columns=(3, 2, 1)).catalogued
    assert load_graph(tmp_path / "mine.tar", columns=(1, 2, 3)).catalogued
    with pytest.raises(RequestError) as caught:
        load_graph(tmp_path / "Small.tar", columns=(3, 2, 1))
    assert str(caught.value).startswith("Small")
    assert "is read as it is published, and columns (3, 2, 1)" in str(caught.value)


def test_the_same_counts_with_other_bytes_are_refused(
    listed: Callable[..., Entry], tmp_path: Path
) -> None:
    path = tmp_path / "Small.tar"
    other = b"b\ts\tc\n"
    path.write_bytes(tarred(FILES | {"test.txt": other}))
    with pytest.raises(DataError) as caught:
        load_graph(path)
    assert f"give {path} another name" in str(caught.value)
    assert str(caught.value) == (
        f"Small should have a test file whose sha256 begins with {SUMS['test'][:12]}; that of "
        f"{path}:test.txt begins with {sha256(other)[:12]}. If it is another graph, give {path} "
        "another name."
    )


def test_an_md5_that_differs_is_refused(listed: Callable[..., Entry], tmp_path: Path) -> None:
    path = tmp_path / "Small.tar"
    path.write_bytes(tarred(FILES))
    right = hashlib.md5(FILES["train.txt"], usedforsecurity=False).hexdigest()
    listed(sha256={}, md5={"train": right})
    assert load_graph(path).catalogued
    listed(sha256={}, md5={"train": "0" * 32})
    with pytest.raises(DataError) as caught:
        load_graph(path)
    assert f"a train file whose md5 begins with {'0' * 12}" in str(caught.value)
    assert f"begins with {right[:12]}" in str(caught.value)


# Layouts of publishers.

TRIPLES = [
    (f"e{head}", f"r{(head + tail) % 2}", f"e{tail}") for head in range(9) for tail in range(head)
]
WHOLE = {"entities": 9, "relations": 2, "triples": 36}


def lines(*order: int, extra: str = "", separator: str = "\t") -> bytes:
    """The triples with their columns in an order; `extra` is in all other columns."""
    rows = []
    for triple in TRIPLES:
        rows.append(separator.join(triple[place] if place >= 0 else extra for place in order))
    return ("\n".join(rows) + "\n").encode()


SPLIT_LINES = {split: lines(0, 1, 2).splitlines(True) for split in SPLITS}
PARTS = {
    "train": b"".join(SPLIT_LINES["train"][:28]),
    "valid": b"".join(SPLIT_LINES["valid"][28:32]),
    "test": b"".join(SPLIT_LINES["test"][32:]),
}
PART_COUNTS = {"entities": 9, "relations": 2, "train": 28, "valid": 4, "test": 4}


def of_parts(pattern: str) -> dict[str, bytes]:
    return {pattern.format(split=split): content for split, content in PARTS.items()}


# The entry whose layout it is, the file that its publisher has, and the counts of the stand-in.
LAYOUTS = {
    "Hetionet": (compressed(b"source\tmetaedge\ttarget\n" + lines(0, 1, 2), ".gz"), WHOLE),
    "PrimeKG": (
        b"relation,display_relation,x_index,y_index\n"
        + lines(1, -1, 0, 2, extra='"a, b"', separator=","),
        WHOLE,
    ),
    "CSKG": (
        compressed(
            b"id\tnode1\trelation\tnode2\tnode1;label\n" + lines(-1, 0, 1, 2, -1, extra='say "x'),
            ".gz",
        ),
        WHOLE,
    ),
    "ConceptNet": (
        compressed(lines(-1, 1, 0, 2, -1, extra='{"weight": 1.0, "a": "b"}'), ".gz"),
        WHOLE,
    ),
    "DRKG": (
        tarred(
            {
                "./._drkg.tsv": b"hidden",
                "./drkg.tsv": lines(0, 1, 2),
                "./entity2src.tsv": b"e0\tsource\n",
                "./embed/relations.tsv": b"r0\t0\n",
            },
            ".gz",
        ),
        WHOLE,
    ),
    "BioKG": (
        zipped({"biokg.links.tsv": lines(0, 1, 2), "biokg.metadata.tsv": b"e0\ta\tb\n"}),
        {"entities": 9, "relations": 2},
    ),
    "OpenEA-D-W-15K": (
        zipped(
            {
                f"OpenEA_dataset_v2.0/{pair}/rel_triples_{side}": lines(0, 1, 2)
                if number == 0
                else b"a\tb\tc\n"
                for number, (pair, side) in enumerate(
                    [("D_W_15K_V1", 1), ("D_W_15K_V1", 2), ("D_W_15K_V2", 1), ("EN_DE_15K_V1", 1)]
                )
            }
        ),
        WHOLE,
    ),
    "Aristo-v4": (zipped(of_parts("{split}")), PART_COUNTS),
    "Wikidata5M": (tarred(of_parts("wikidata5m_transductive_{split}.txt"), ".gz"), PART_COUNTS),
    "OpenBioLink": (
        zipped(of_parts("{split}.tsv") | {"entities.tsv": b"0\tGENE\n", "_dict_of_heads.pkl": b""}),
        PART_COUNTS,
    ),
}


LABELS = {
    "Hetionet": b"id\tname\tkind\n" + b"".join(b"e%d\tThe %d\tGene\n" % (n, n) for n in range(9)),
    "PrimeKG": b"node_index,node_id,node_type,node_name,node_source\n"
    + b"".join(b'e%d,7,drug,"The %d",X\n' % (n, n) for n in range(9)),
}


@pytest.fixture
def published(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Entry]:
    """An entry of the catalogue whose address is on the server, with a stand-in of its layout."""

    def patched(name: str, **changes: object) -> Entry:
        entry = catalogue.__wrapped__()[name]
        content, counts = LAYOUTS[name]
        path = f"/published/{Path(entry.address).name}"
        server.served[path] = content
        facts: dict[str, object] = {"address": server.address + path, "counts": counts}
        if entry.checksum:
            kind = entry.checked_by
            facts["checksum"] = f"{kind}:{hashlib.new(kind, content).hexdigest()}"
        if entry.labels:
            server.served["/labels"] = LABELS[name]
            labels = entry.labels | {"address": f"{server.address}/labels"}
            if "checksum" in labels:
                labels["checksum"] = f"md5:{hashlib.md5(LABELS[name]).hexdigest()}"
            facts["labels"] = labels
        changed = replace(entry, **(facts | changes))
        monkeypatch.setattr(module, "catalogue", lambda: {name: changed})
        monkeypatch.setattr(loading, "catalogue", lambda: {name: changed})
        return changed

    return patched


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_of_a_publisher_is_read(
    published: Callable[..., Entry], server: Server, cache: Path, name: str
) -> None:
    entry = published(name)
    graph = load_graph(name.lower())
    assert (graph.name, graph.source, graph.catalogued) == (name, name, True)
    triples = {
        (graph.entities[head], graph.relations[relation], graph.entities[tail])
        for split in SPLITS
        for head, relation, tail in graph.split(split).tolist()
    }
    assert triples == set(TRIPLES)
    assert graph.counts.keys() >= PART_COUNTS.keys()
    if entry.is_split:
        assert graph.counts == PART_COUNTS
    assert load_graph(name).fingerprint == graph.fingerprint
    assert len(server.requested) == 1 + bool(entry.labels)
    assert entry.file_name in files_in(cache / "downloads")


@pytest.mark.parametrize("name", LABELS)
def test_labels_of_a_publisher_are_read(
    published: Callable[..., Entry], tmp_path: Path, name: str
) -> None:
    published(name)
    graph = load_graph(name)
    assert graph.entities.id("The 3") == graph.entities.id("e3")
    assert graph.relations.labels is None

    (tmp_path / "own.tsv").write_bytes(b"e3\tMine\n")
    assert load_graph(name, labels=tmp_path / "own.tsv").entities.id("Mine") == graph.entities.id(
        "e3"
    )


def test_labels_with_other_columns_are_refused(
    published: Callable[..., Entry], server: Server, cache: Path
) -> None:
    published("Hetionet")
    server.served["/labels"] = b"<html>\tPlease log in\n"
    with pytest.raises(DataError) as caught:
        load_graph("Hetionet")
    assert "id" in str(caught.value)
    assert files_in(cache) == []


def test_labels_with_another_checksum_are_refused(
    published: Callable[..., Entry], server: Server
) -> None:
    published("PrimeKG")
    server.served["/labels"] += b"\n"
    with pytest.raises(DataError) as caught:
        load_graph("PrimeKG")
    assert "MD5 hash of downloaded file" in str(caught.value)


@pytest.mark.parametrize("name", ["FB15k", "WN18", "DB100K"])
def test_split_files_of_a_publisher_are_read(
    listed: Callable[..., Entry], server: Server, name: str
) -> None:
    facts = {
        "FB15k": ("/FB15k/{split}.txt", True),
        "WN18": ("/wn18/{split}.txt", True),
        "DB100K": ("/DB100K/_{split}.txt", False),
    }
    pattern, has_md5 = facts[name]
    server.served |= of_parts(pattern)
    md5 = {split: hashlib.md5(content).hexdigest() for split, content in PARTS.items()}
    entry = listed(
        address=f"{server.address}{pattern}",
        checksum="",
        sha256={},
        md5=md5 if has_md5 else {},
        counts=PART_COUNTS,
    )
    assert entry.checked_by == ("md5" if has_md5 else "counts")
    assert load_graph("Small").counts == PART_COUNTS

    server.served[pattern.format(split="test")] = PARTS["test"].replace(b"r0", b"r1")
    shutil.rmtree(cache_folder())
    if has_md5:
        with pytest.raises(DataError) as caught:
            load_graph("Small")
        assert "MD5 hash of downloaded file" in str(caught.value)


def test_a_graph_without_published_split_is_split_as_requested(
    published: Callable[..., Entry],
) -> None:
    published("Hetionet")
    first = load_graph("Hetionet", split="50/25/25", seed=1)
    assert first.counts != load_graph("Hetionet").counts
    assert first.read_options == {"split": "50/25/25", "split_seed": 1}


@pytest.mark.parametrize("name", ["DRKG", "OpenBioLink"])
@pytest.mark.parametrize("what", ["entities", "relations"])
def test_a_wrong_count_is_refused_where_no_checksum_is_published(
    published: Callable[..., Entry], cache: Path, name: str, what: str
) -> None:
    counts = LAYOUTS[name][1]
    entry = published(name, counts=counts | {what: 1234})
    with pytest.raises(DataError) as caught:
        load_graph(name)
    assert f"1,234 {what}" in str(caught.value)
    assert f"{entry.address} has {counts[what]:,}" in str(caught.value)
    assert files_in(cache) == []


def test_duplicates_are_counted_as_publishers_do(
    published: Callable[..., Entry], server: Server
) -> None:
    entry = published("ConceptNet", counts=WHOLE | {"triples": 72})
    content = compressed(2 * lines(-1, 1, 0, 2, -1, extra="{}"), ".gz")
    server.served[entry.address.removeprefix(server.address)] = content
    graph = load_graph("ConceptNet")
    assert sum(len(graph.split(split)) for split in SPLITS) == 36


def test_other_counts_of_published_bytes_are_a_note(published: Callable[..., Entry]) -> None:
    published("Aristo-v4", counts=PART_COUNTS | {"entities": 10})
    graph = load_graph("Aristo-v4")
    assert graph.catalogued
    assert list(graph.notes) == [
        "Aristo-v4 has 9 entities; its publisher counts 10. The checksum of the download is the "
        "published one."
    ]


@pytest.mark.parametrize("name", ["Aristo-v4", "OpenEA-D-W-15K", "Hetionet"])
def test_a_wrong_checksum_of_any_kind_is_refused(
    published: Callable[..., Entry], cache: Path, name: str
) -> None:
    entry = published(name)
    kind, _, digits = entry.checksum.partition(":")
    published(name, checksum=f"{kind}:{'0' * len(digits)}")
    with pytest.raises(DataError) as caught:
        load_graph(name)
    assert f"{kind.upper()} hash of downloaded file" in str(caught.value)
    assert files_in(cache) == []


def test_a_later_change_is_noticed_where_no_checksum_is_published(
    published: Callable[..., Entry], server: Server, cache: Path
) -> None:
    entry = published("DRKG")
    load_graph("DRKG")
    assert files_in(cache / "downloads") == ["DRKG.tar.gz", "DRKG.tar.gz.sha256"]
    (cache / "downloads" / "DRKG.tar.gz").unlink()
    path = entry.address.removeprefix(server.address)
    server.served[path] = tarred({"drkg.tsv": lines(2, 1, 0)}, ".gz")
    with pytest.raises(DataError) as caught:
        load_graph("DRKG")
    first = cache / "downloads" / "DRKG.tar.gz.sha256"
    text = f"DRKG is not what {entry.address} held at the first download: SHA256 hash"
    assert str(caught.value).startswith(text)
    assert f"If the publisher changed it, delete {first} to accept" in str(caught.value)
    first.unlink()
    assert load_graph("DRKG").catalogued


def test_an_archive_with_other_files_is_refused(
    published: Callable[..., Entry], server: Server, cache: Path
) -> None:
    entry = published("DRKG")
    server.served[entry.address.removeprefix(server.address)] = tarred({"other.tsv": b""}, ".gz")
    with pytest.raises(DataError) as caught:
        load_graph("DRKG")
    assert "should hold drkg.tsv; it holds other.tsv" in str(caught.value)
    assert files_in(cache) == []


def test_a_download_beyond_the_limit_of_size_is_kept(
    published: Callable[..., Entry], cache: Path
) -> None:
    published("Hetionet")
    with pytest.raises(ExpandsTooMuch) as caught:
        load_graph("Hetionet", max_size=100)
    assert "allow more with `max_size='1G'`" in str(caught.value)
    assert "Hetionet.sif.gz" in files_in(cache / "downloads")


@pytest.mark.parametrize("name", ["Hetionet", "PrimeKG", "ConceptNet", "DRKG", "Wikidata5M"])
def test_a_published_file_in_the_data_folder_precedes_the_network(
    published: Callable[..., Entry],
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    entry = published(name)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / entry.file_name).write_bytes(LAYOUTS[name][0])
    monkeypatch.setenv("DUALKG_DATA", str(tmp_path / "data"))
    assert load_graph(name).catalogued
    assert server.requested == []
    assert names_in_data_folder() == [name]
