"""Errors of files that are missing, unreadable, damaged, truncated or too large once they are
decompressed.
"""

import hashlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dualkg as kg
from dualkg.data import archives
from dualkg.data.archives import ExpandsTooMuch, find_sources
from dualkg.data.encoding import read_triples
from dualkg.data.readers import one_source
from dualkg.errors import DataError

Write = Callable[[str, bytes], Path]
# Names without a pattern, so that the compressed bytes are spread over the whole file.
TSV = b"".join(b"%x\tr\t%x\n" % (i * 2654435761 % 2**32, i * 40503 % 65521) for i in range(5000))
PACKED = [
    "train.tsv.gz",
    "train.tsv.xz",
    "train.tsv.bz2",
    "train.tsv.zst",
    "train.zip",
    "train.tar",
    "train.tar.gz",
    "train.tar.xz",
    "train.tar.zst",
]


def test_a_missing_file_gets_a_suggestion(write: Write) -> None:
    path = write("train.tsv", TSV)
    for name in ("trian.tsv", "trian.tsv.gz"):
        with pytest.raises(DataError) as caught:
            one_source(path.with_name(name))
        expected = f"There is no file {path.with_name(name)}. Did you mean 'train.tsv'?"
        assert str(caught.value) == expected
    for name in ("zzz.zip", "zzz.tar.xz"):
        with pytest.raises(DataError) as caught:
            one_source(path.with_name(name))
        assert str(caught.value) == f"There is no file {path.with_name(name)}."
    nowhere = path.parent / "nowhere"
    with pytest.raises(DataError) as caught:
        one_source(nowhere / "train.tsv")
    expected = f"There is no file {nowhere}/train.tsv: the folder {nowhere} does not exist."
    assert str(caught.value) == expected


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    for name in ("folder", "folder.tsv", "folder.zip", "folder.tar.gz"):
        (tmp_path / name).mkdir()
        with pytest.raises(DataError) as caught:
            one_source(tmp_path / name)
        assert str(caught.value) == (
            f"{tmp_path / name} is a folder where a file of triples was expected. Name a file "
            "inside it."
        )


def packed(kit, name: str) -> bytes:
    members = {"train.tsv": TSV}
    if name.endswith(".zip"):
        return kit.zipped(members)
    if ".tar" in name:
        return kit.tarred(members, name.partition(".tar")[2])
    return kit.compressed(TSV, Path(name).suffix)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("kept", [0.001, 0.3, 0.5, 0.9])
def test_a_truncated_file_is_reported_as_damaged(kit, write: Write, name: str, kept: float) -> None:
    whole = packed(kit, name)
    path = write(name, whole[: int(len(whole) * kept)])
    with pytest.raises(DataError) as caught:
        kit.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", [name for name in PACKED if name != "train.tar"])
def test_a_missing_last_byte_is_detected(kit, write: Write, name: str) -> None:
    whole = packed(kit, name)
    assert len(kit.named(kit.read(write(name, whole)))) == 5000
    with pytest.raises(DataError):
        kit.read(write(name, whole[:-1]))


# A .tar has no checksum of its content, and a .zst only if its writer adds one.
@pytest.mark.parametrize("name", [name for name in PACKED if not name.endswith((".tar", ".zst"))])
def test_changed_bytes_are_detected(kit, write: Write, name: str) -> None:
    whole = bytearray(packed(kit, name))
    middle = len(whole) // 2
    whole[middle : middle + 8] = bytes(byte ^ 0xFF for byte in whole[middle : middle + 8])
    with pytest.raises(DataError):
        kit.read(write(name, bytes(whole)))


@pytest.mark.parametrize("name", [*PACKED, "train.parquet"])
def test_a_file_of_another_format_than_its_suffix_is_an_error(kit, write: Write, name: str) -> None:
    with pytest.raises(DataError):
        kit.read(write(name, TSV))


def test_a_broken_header_inside_a_tar_is_not_its_end(kit, write: Write) -> None:
    whole = bytearray(kit.tarred({"one.tsv": b"a\tr\tb\n", "two.tsv": b"c\tr\td\n"}))
    whole[1024:1100] = b"?" * 76
    path = write("mine.tar", bytes(whole))
    with pytest.raises(DataError):
        find_sources(path)


def test_an_encrypted_archive_is_an_error(kit, write: Write) -> None:
    whole = bytearray(kit.zipped({"mine.tsv": TSV}))
    # The first bit of the flags, in the local header and in the directory, means encrypted.
    directory = zipfile.ZipFile(io.BytesIO(whole)).start_dir
    whole[6] |= 1
    whole[directory + 8] |= 1
    path = write("mine.zip", bytes(whole))
    with pytest.raises(DataError, match="mine.tsv is encrypted, and only plain archives are read"):
        kit.read(path)


def test_an_archive_of_several_files_is_not_one_source(kit, write: Write) -> None:
    path = write("mine.zip", kit.zipped({"a.tsv": b"a\tr\tb\n", "b.tsv": b"a\tr\tb\n"}))
    with pytest.raises(DataError) as caught:
        one_source(path)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value) == (
        f"{path} holds 2 files of triples, and one was expected. Its files: a.tsv, b.tsv. "
        "Make an archive of one, or extract the one you mean."
    )
    with pytest.raises(DataError) as caught:
        one_source(write("empty.zip", kit.zipped({})))
    assert "holds 0 files of triples" in str(caught.value)
    with pytest.raises(DataError, match="There is no file of triples to read"):
        read_triples({})


# -- decompressed size -------------------------------------------------------

LINES = b"a\tr\tb\n" * 200_000  # 1.2 MB, which compress to a few kB


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "FREE_SIZE", 1 << 20)


@pytest.mark.parametrize("name", [f"mine.tsv{kind}" for kind in archives.COMPRESSIONS])
def test_a_file_that_expands_too_much_is_refused(
    kit, write: Write, small_limits, name: str
) -> None:
    path = write(name, kit.compressed(LINES, name.removeprefix("mine.tsv")))
    with pytest.raises(ExpandsTooMuch) as caught:
        kit.read(path)
    assert str(caught.value).startswith(f"{path} expands to more than 1 MiB, ")
    assert str(caught.value).endswith("If you expect that, allow more with `max_size='1G'`.")
    assert one_source(path, max_size="1.2M").checksum() == hashlib.sha256(LINES).hexdigest()


def test_archives_that_expand_too_much_are_refused(kit, write: Write, small_limits) -> None:
    path = write("mine.zip", kit.zipped({"x.tsv": LINES}))
    with pytest.raises(ExpandsTooMuch) as caught:
        kg.load_graph(path)
    assert str(caught.value).startswith(f"{path}:x.tsv")
    path = write("mine.tar.gz", kit.tarred({"x.tsv": LINES}, ".gz"))
    with pytest.raises(ExpandsTooMuch) as caught:
        kg.load_graph(path)
    assert str(caught.value).startswith(str(path))
    assert kg.load_graph(path, max_size="4M", split="100/0/0").read_options["max_size"] == "4M"
    inner = write("inner.tar", kit.tarred({"x.tsv.gz": kit.compressed(LINES, ".gz")}))
    with pytest.raises(ExpandsTooMuch) as caught:
        kg.load_graph(inner)
    assert str(caught.value).startswith(f"{inner}:x.tsv.gz")


def test_an_ordinary_file_of_any_size_is_read(kit, write: Write, small_limits) -> None:
    assert (
        one_source(write("mine.tsv", LINES), max_size=1).checksum()
        == hashlib.sha256(LINES).hexdigest()
    )


@pytest.mark.parametrize("in_memory", [archives.IN_MEMORY, 1000])
@pytest.mark.parametrize("compression", ["", *archives.COMPRESSIONS])
def test_members_of_a_tar(kit, write: Write, monkeypatch, compression: str, in_memory: int) -> None:
    monkeypatch.setattr(archives, "IN_MEMORY", in_memory)
    members = {
        "train.tsv": TSV,
        "empty.txt": b"",
        "more/valid.tsv.gz": kit.compressed(TSV[:60], ".gz"),
    }
    path = write(f"mine.tar{compression}", kit.tarred(members, compression))
    found = {source.name: source.checksum() for source in find_sources(path)}
    contents = {"train.tsv": TSV, "empty.txt": b"", "more/valid.tsv.gz": TSV[:60]}
    assert found == {
        f"{path}:{name}": hashlib.sha256(content).hexdigest() for name, content in contents.items()
    }
    cut = path.read_bytes()[: -len(path.read_bytes()) // 2]
    with pytest.raises(DataError):
        [source.checksum() for source in find_sources(write(f"cut.tar{compression}", cut))]


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("1.5k", 1536), ("2 MiB", 2 << 20), ("16GB", 16 << 30), (7, 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert archives.parse_size(text) == size


@pytest.mark.parametrize("suffix", archives.COMPRESSIONS)
def test_a_damaged_compressed_parquet_file_is_an_error(kit, write: Write, suffix: str) -> None:
    sink = io.BytesIO()
    names = [f"e{number}" for number in range(2000)]
    pq.write_table(pa.table({"h": names, "r": names, "t": names}), sink)
    whole = kit.compressed(sink.getvalue(), suffix)
    assert len(kit.named(kit.read(write(f"mine.parquet{suffix}", whole)))) == 2000
    for content in (whole[: len(whole) // 2], whole[:40] + whole[60:]):
        with pytest.raises(DataError):
            kit.read(write(f"mine.parquet{suffix}", content))
