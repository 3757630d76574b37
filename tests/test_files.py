"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dualkg.files import atomic_folder, atomic_write, link_or_copy, write_text


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def write_half(path: Path, failure: type[BaseException]) -> None:
    path.write_text("half")
    raise failure


def test_a_file_takes_the_place_of_the_former(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "report.json"
    write_text(path, "first ü")
    write_text(path, "second")
    assert path.read_bytes() == b"second"
    assert [found.name for found in path.parent.iterdir()] == ["report.json"]


def test_text_is_written_as_utf8(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "Ünïcode 東京")
    assert (tmp_path / "a").read_bytes().decode("utf-8") == "Ünïcode 東京"


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_the_former_file_and_nothing_else(tmp_path: Path, failure: type[BaseException]) -> None:
    path = tmp_path / "weights"
    write_text(path, "good")
    with pytest.raises(failure), atomic_write(path) as fresh:
        write_half(fresh, failure)
    assert {found.name: found.read_text() for found in tmp_path.iterdir()} == {"weights": "good"}


def test_the_former_file_is_there_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_text(path, "good")
    with atomic_write(path) as fresh:
        fresh.write_text("better")
        assert path.read_text() == "good"
    assert path.read_text() == "better"


def test_files_and_folders_have_the_usual_rights(tmp_path: Path, umask: None) -> None:
    write_text(tmp_path / "file", "text")
    with atomic_folder(tmp_path / "folder"):
        pass
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o750


def test_a_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one"
    with atomic_folder(path) as fresh:
        (fresh / "recipe").write_text("x")
        assert not path.exists()
    assert (path / "recipe").read_text() == "x"
    assert [found.name for found in path.parent.iterdir()] == ["one"]


def test_a_failure_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "one") as fresh:
        write_half(fresh / "recipe", RuntimeError)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_process_put_there_first_stays(tmp_path: Path) -> None:
    path = tmp_path / "one"
    with atomic_folder(path, existing="keep") as fresh:
        (fresh / "mine").write_text("x")
        path.mkdir()
        (path / "theirs").write_text("y")
    assert [found.name for found in tmp_path.iterdir()] == ["one"]
    assert [found.name for found in path.iterdir()] == ["theirs"]


def test_a_folder_that_came_meanwhile_is_refused_where_it_must_not_be_lost(tmp_path: Path) -> None:
    path = tmp_path / "one"
    with pytest.raises(OSError, match="not empty"), atomic_folder(path) as fresh:  # noqa: PT012
        (fresh / "mine").write_text("x")
        path.mkdir()
        (path / "theirs").write_text("y")
    assert [found.name for found in tmp_path.iterdir()] == ["one"]
    assert [found.name for found in path.iterdir()] == ["theirs"]


def test_a_folder_is_replaced_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.mkdir()
    (path / "old").write_text("y")
    with pytest.raises(RuntimeError), atomic_folder(path, existing="replace") as fresh:  # noqa: PT012
        (fresh / "new").write_text("x")
        raise RuntimeError
    assert [found.name for found in path.iterdir()] == ["old"]
    with atomic_folder(path, existing="replace") as fresh:
        (fresh / "new").write_text("x")
    assert [found.name for found in path.iterdir()] == ["new"]
    assert [found.name for found in tmp_path.iterdir()] == ["one"]


def test_the_working_folder_can_be_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with atomic_folder(Path(), last="a") as fresh:
        for name in ("a", "b"):
            (fresh / name).write_text(name)
    assert sorted(found.name for found in Path.cwd().iterdir()) == ["a", "b"]


def test_an_empty_folder_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with atomic_folder(tmp_path / "one") as fresh:
        (fresh / "mine").write_text("x")
    assert [found.name for found in (tmp_path / "one").iterdir()] == ["mine"]


def test_a_file_in_the_way_of_a_folder_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("a file")
    with pytest.raises(OSError), atomic_folder(tmp_path / "one"):
        pass
    assert (tmp_path / "one").read_text() == "a file"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("linked", [True, False])
def test_a_second_name_has_the_same_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError("this file system knows no links")

    if not linked:
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    (tmp_path / "old").write_text("new")
    (tmp_path / "other").write_text("former")
    link_or_copy(tmp_path / "old", tmp_path / "other")
    (tmp_path / "old").unlink()
    assert (tmp_path / "other").read_text() == "new"
