"""The catalogue: its entries, downloads, and recognition by counts and checksums."""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from dualkg.data import loading as module
from dualkg.data.archives import cache_folder
from dualkg.data.errors import (
    DamagedData,
    DownloadDiscarded,
    DownloadFailed,
    OtherGraph,
    UnusableData,
)
from dualkg.data.graph import SPLITS
from dualkg.data.loading import Entry, catalogue, fetch, find_entry, load_graph
from dualkg.errors import DataError, Unsupported
from tests.data.reading.conftest import compressed, tarred, zipped
from tests.raising import refused

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
}
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
        {},
        sha256(ARCHIVE),
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
    assert re.match(r"https://\S+(\.tar\.gz|/\{split\}\.txt)$", entry.address)
    assert entry.about
    assert entry.licence
    assert list(entry.counts) == ["entities", "relations", *SPLITS]
    assert all(count > 0 for count in entry.counts.values())
    assert set(entry.sha256) | set(entry.md5) <= set(SPLITS)
    assert all(re.fullmatch("[0-9a-f]{64}", sum) for sum in entry.sha256.values())
    # A sum that is not known is owned up to.
    archived = "{split}" not in entry.address
    assert (set(entry.sha256) == set(SPLITS)) != bool(entry.note)
    assert bool(entry.archive_sha256) == (archived and not entry.note)


def test_two_entries_are_never_the_same() -> None:
    assert len({entry.address for entry in catalogue().values()}) == len(NAMES)
    assert len({tuple(entry.counts.items()) for entry in catalogue().values()}) == len(NAMES)


@pytest.mark.parametrize(("written", "name"), [("wn18rr", "WN18RR"), ("CODEX-m", "CoDEx-M")])
def test_names_are_found_in_any_case(written: str, name: str) -> None:
    found = find_entry(written)
    assert found is not None
    assert found.name == name


def test_a_prefix_of_a_name_is_not_an_entry() -> None:
    assert find_entry("YAGO3-10-quarter") is None


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
    listed(address=f"{server.address}/small/{{split}}.txt", archive_sha256=None)
    assert load_graph("Small").catalogued
    assert server.requested == ["/small/train.txt", "/small/valid.txt", "/small/test.txt"]
    assert files_in(cache / "downloads" / "Small") == ["test.txt", "train.txt", "valid.txt"]


def test_an_archive_with_another_checksum_is_deleted(
    listed: Callable[..., Entry], server: Server, cache: Path
) -> None:
    server.served["/small.tar.gz"] = tarred(FILES | {"train.txt": b"a\tr\tb\n"}, ".gz")
    with pytest.raises(DownloadFailed) as caught:
        load_graph("Small")
    assert caught.value.graph == "Small"
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


def test_a_damaged_download_is_downloaded_again(
    listed: Callable[..., Entry], server: Server, cache: Path
) -> None:
    (path,) = {source.path for source in fetch(listed())}
    path.write_bytes(ARCHIVE[:-9])
    assert load_graph("Small").counts == COUNTS
    assert len(server.requested) == 2


@pytest.mark.parametrize("page", [b"<html>Please log in first</html>", ARCHIVE[:-20]])
def test_a_download_that_is_not_an_archive_is_deleted(
    listed: Callable[..., Entry], server: Server, cache: Path, page: bytes
) -> None:
    listed(archive_sha256=None)
    server.served["/small.tar.gz"] = page
    with refused(DownloadDiscarded) as caught:
        load_graph("Small")
    assert caught.value.address.endswith("/small.tar.gz")
    assert isinstance(caught.value.cause, DamagedData)
    assert caught.value.cause.source.endswith("Small.tar.gz")
    assert str(caught.value).endswith("small.tar.gz was deleted.")
    assert files_in(cache) == []


def test_a_download_of_another_graph_is_deleted(
    listed: Callable[..., Entry], server: Server, cache: Path
) -> None:
    server.served["/small.tar.gz"] = tarred(FILES | {"train.txt": b"a\tr\tb\n"}, ".gz")
    listed(archive_sha256=None)
    with pytest.raises(DownloadDiscarded) as caught:
        load_graph("Small")
    address = f"{server.address}/small.tar.gz"
    assert caught.value.address == address
    assert isinstance(caught.value.cause, OtherGraph)
    assert str(caught.value) == (
        f"Small should have 3 train triples; {address} has 1. The download from {address} was "
        "deleted."
    )
    assert files_in(cache) == []


def test_a_downloaded_page_in_place_of_a_split_is_deleted(
    listed: Callable[..., Entry], server: Server, cache: Path
) -> None:
    server.served |= {f"/small/{name}": content for name, content in FILES.items()}
    server.served["/small/train.txt"] = b"<html>Please log in first</html>"
    listed(
        address=f"{server.address}/small/{{split}}.txt",
        archive_sha256=None,
        sha256={split: SUMS[split] for split in ("valid", "test")},
    )
    with pytest.raises(DownloadDiscarded) as caught:
        load_graph("Small")
    assert isinstance(caught.value.cause, UnusableData)
    assert caught.value.cause.place == "line 1"
    assert files_in(cache) == []


def test_bad_labels_do_not_delete_downloads(
    listed: Callable[..., Entry], cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "labels.tsv").write_bytes(b"a\n")
    with pytest.raises(UnusableData) as caught:
        load_graph("Small", labels=tmp_path / "labels.tsv")
    assert caught.value.source == str(tmp_path / "labels.tsv")
    assert files_in(cache) == ["Small.tar.gz"]


def test_a_missing_address_is_an_error(
    listed: Callable[..., Entry], server: Server, cache: Path
) -> None:
    server.served.clear()
    with pytest.raises(DownloadFailed) as caught:
        load_graph("Small")
    assert caught.value.problem.endswith("(HTTPError)")
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


def test_an_unwritable_cache_is_not_reported_as_a_network_error(
    listed: Callable[..., Entry], cache: Path
) -> None:
    cache.write_text("a file in the way")
    with pytest.raises(DownloadFailed) as caught:
        load_graph("Small")
    assert caught.value.problem.startswith("could not be saved in ")
    assert "DUALKG_CACHE" in caught.value.advice


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


def test_compressed_splits_are_the_same_graph(listed: Callable[..., Entry], tmp_path: Path) -> None:
    for folder in ("mine", "Small"):
        (tmp_path / folder).mkdir()
        for name, content in FILES.items():
            (tmp_path / folder / f"{name}.gz").write_bytes(compressed(content, ".gz"))
        graph = load_graph(tmp_path / folder)
        assert (graph.name, graph.catalogued) == ("Small", True)


def test_other_bytes_under_another_name_get_no_catalogue_name(
    listed: Callable[..., Entry], tmp_path: Path
) -> None:
    (tmp_path / "mine.tar").write_bytes(tarred(FILES | {"test.txt": b"b\ts\tc\n"}))
    graph = load_graph(tmp_path / "mine.tar")
    assert (graph.name, graph.catalogued, graph.counts) == ("mine", False, COUNTS)


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
    with pytest.raises(Unsupported) as caught:
        load_graph(tmp_path / "Small.tar", columns=(3, 2, 1))
    assert caught.value.what == "Small"
    assert caught.value.reason.startswith("is read as it is published, and columns (3, 2, 1)")


def test_the_same_counts_with_other_bytes_are_refused(
    listed: Callable[..., Entry], tmp_path: Path
) -> None:
    path = tmp_path / "Small.tar"
    other = b"b\ts\tc\n"
    path.write_bytes(tarred(FILES | {"test.txt": other}))
    with pytest.raises(OtherGraph) as caught:
        load_graph(path)
    assert (caught.value.graph, caught.value.rename) == ("Small", str(path))
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
    with pytest.raises(OtherGraph) as caught:
        load_graph(path)
    assert caught.value.expected == f"a train file whose md5 begins with {'0' * 12}"
    assert caught.value.found.endswith(f"begins with {right[:12]}")


@pytest.mark.parametrize("name", ["Small.tsv", "SMALL.tar"])
def test_one_file_is_not_a_graph_with_three_splits(
    listed: Callable[..., Entry], tmp_path: Path, name: str
) -> None:
    rows = b"".join(b"e%d\tr\te%d\n" % (head, tail) for head in range(9) for tail in range(head))
    (tmp_path / name).write_bytes(rows if name.endswith(".tsv") else tarred({"all.tsv": rows}))
    with pytest.raises(OtherGraph) as caught:
        load_graph(tmp_path / name)
    assert caught.value.found == f"{tmp_path / name} is one file of triples"
