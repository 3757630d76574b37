"""Files and folders that appear whole or not at all, locks, and checksums."""

import errno
import fcntl
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.torture.power import Recorder
from dualkg import files
from dualkg.errors import DamagedFile, FolderMoved, LockedError, PathExists
from dualkg.files import (
    atomic_folder,
    atomic_write,
    checksums,
    file_damage,
    file_record,
    folder_lock,
    held,
    link_or_copy,
    locked,
    locking,
    read_json,
    recover,
    write_json,
    write_text,
    writes,
)
from tests.raising import refused


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
def test_a_failure_leaves_the_former_file_and_nothing_else(
    tmp_path: Path, failure: type[BaseException]
) -> None:
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
    replaced = atomic_folder(path, existing="replace")
    with pytest.raises(RuntimeError), replaced as fresh:  # noqa: PT012
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
def test_a_second_name_has_the_same_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError("this file system knows no links")

    if not linked:
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    (tmp_path / "old").write_text("new")
    (tmp_path / "other").write_text("former")
    link_or_copy(tmp_path / "old", tmp_path / "other")
    (tmp_path / "old").unlink()
    assert (tmp_path / "other").read_text() == "new"


def test_a_target_stays_if_its_source_is_missing(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("good")
    with pytest.raises(FileNotFoundError):
        link_or_copy(tmp_path / "checkpoint", tmp_path / "weights")
    assert {found.name: found.read_text() for found in tmp_path.iterdir()} == {"weights": "good"}


def test_a_file_that_is_linked_to_itself_stays(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("good")
    for _ in range(2):
        link_or_copy(tmp_path / "checkpoint", tmp_path / "weights")
    assert sorted(found.name for found in tmp_path.iterdir()) == ["checkpoint", "weights"]


def test_an_error_names_the_file_and_not_the_temporary_one(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, atomic_write(tmp_path / "report.json") as fresh:
        raise OSError(28, "No space left on device", str(fresh))
    assert caught.value.filename == str(tmp_path / "report.json")


def test_an_error_below_a_folder_that_is_held_names_the_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder_of(tmp_path / "run", file="text")

    def refuse(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with locked(path):
        with pytest.raises(NotADirectoryError) as caught:
            files.make_folder(path / "file" / "checkpoint")
        assert caught.value.filename == str(path / "file" / "checkpoint")
        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="Input/output") as failed:
            files.sync(path / "file")
        assert failed.value.filename == str(path / "file")


# -- replacing a folder ------------------------------------------------------


def folder_of(path: Path, **contents: str) -> Path:
    path.mkdir()
    for name, text in contents.items():
        (path / name).write_text(text)
    return path


@pytest.mark.parametrize("atomic", [True, False])
def test_a_replaced_folder_keeps_what_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    if not atomic:
        monkeypatch.setattr(writes, "_exchange_names", lambda one, other: False)
    path = folder_of(tmp_path / "run", old="1", decisions="2")
    with atomic_folder(path, existing="replace", keep=["decisions", "nothing"]) as fresh:
        (fresh / "new").write_text("3")
    assert {found.name: found.read_text() for found in path.iterdir()} == {
        "new": "3",
        "decisions": "2",
    }
    assert [found.name for found in tmp_path.iterdir()] == ["run"]


def test_the_old_folder_stays_if_the_new_one_cannot_take_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder_of(tmp_path / "run", old="1")
    replace = os.replace

    def fail(source: Path, target: str, **folders: int) -> None:
        if Path(source).suffix == ".tmp":
            raise OSError(5, "Input/output error")
        replace(source, target, **folders)

    monkeypatch.setattr(writes, "_exchange_names", lambda one, other: False)
    monkeypatch.setattr("os.replace", fail)
    with (
        pytest.raises(OSError, match="Input/output"),
        atomic_folder(path, existing="replace") as fresh,
    ):
        (fresh / "new").write_text("2")
    assert [found.name for found in path.iterdir()] == ["old"]
    assert [found.name for found in tmp_path.iterdir()] == ["run"]


def test_a_folder_is_found_again_after_a_kill_between_two_renames(tmp_path: Path) -> None:
    folder_of(tmp_path / ".run.old", old="1")
    recover(tmp_path / "run")
    assert [found.name for found in (tmp_path / "run").iterdir()] == ["old"]
    folder_of(tmp_path / ".run.old", older="1")  # killed after the second rename
    with locked(tmp_path / "run"):
        pass
    assert [found.name for found in tmp_path.iterdir()] == ["run"]
    assert [found.name for found in (tmp_path / "run").iterdir()] == ["old"]


def test_a_folder_that_was_half_filled_is_filled(tmp_path: Path) -> None:
    folder_of(tmp_path / "run", graph="1")
    folder_of(tmp_path / "run" / ".run.abcd1234.full", recipe="2", weights="3")
    recover(tmp_path / "run")
    contents = {found.name: found.read_text() for found in (tmp_path / "run").iterdir()}
    assert contents == {"graph": "1", "recipe": "2", "weights": "3"}


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("place", ["file", "new", "run"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EINVAL, errno.ENOTSUP])
def test_a_folder_that_cannot_be_synced(tmp_path, monkeypatch, number, place, exchange):
    """Some file systems cannot; an error of the disk is told, and what was there is there again."""
    home = folder_of(tmp_path / "home")
    folder_of(home / "run", old="1")
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), home.stat()):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    def write() -> None:
        if place == "file":
            write_text(home / place, "new")
            return
        with atomic_folder(home / place, existing="replace") as fresh:
            (fresh / "new").write_text("2")

    monkeypatch.setattr("os.fsync", fail)
    if not exchange:
        monkeypatch.setattr(writes, "_exchange_names", lambda one, other: False)
    if number in (errno.EINVAL, errno.ENOTSUP):
        write()
        assert (home / place).exists()
        return
    with pytest.raises(OSError, match=re.escape(f"{os.strerror(number)}: '{home / place}'")):
        write()
    assert [found.name for found in home.iterdir()] == ["run"]
    assert [found.name for found in (home / "run").iterdir()] == ["old"]


def test_a_new_folder_is_removed_if_its_name_can_be_neither_synced_nor_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def fail(*arguments: object, **folders: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def replace_once(source: Path, target: str, **folders: int) -> None:
        monkeypatch.setattr("os.replace", fail)
        monkeypatch.setattr("os.fsync", fail)
        replace(source, target, **folders)

    monkeypatch.setattr("os.replace", replace_once)
    with pytest.raises(OSError, match="Input/output"), atomic_folder(tmp_path / "new") as fresh:
        (fresh / "table").write_text("1")
    assert list(tmp_path.iterdir()) == []


# -- locks -------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from dualkg.files import atomic_write, locked
path = Path(sys.argv[1])
with locked(path), atomic_write(path / "weights") as fresh:
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of a folder and is writing a file in it."""
    words = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "run", other="1")
    with holder(path) as process:
        with (
            refused(LockedError, path=path) as caught,
            locked(path),
        ):
            pass
        assert caught.value.holder.startswith(f"process {process.pid} on ")
        assert " since " in caught.value.holder
        with pytest.raises(LockedError), locked(tmp_path / "run" / ".." / "run"):
            pass
        files.remove_strays(path)  # the file that is being written is not taken for a stray one
        assert len(list(path.iterdir())) == 3  # with that file, and the lock of the folder
        process.kill()
        process.wait()
        assert len(list(path.iterdir())) == 3  # with that file, and the lock of the folder
        with locked(path):
            assert files.contents(path) == ["other"]
            assert len(list(path.iterdir())) == 2  # with the lock of the folder
            assert (tmp_path / ".run.lock").read_text().startswith(f"{os.getpid()}\n")
    assert [found.name for found in tmp_path.iterdir()] == ["run"]


def test_a_wrong_call_of_a_function_that_locks_has_the_message_of_python(tmp_path: Path) -> None:
    @files.locks("path")
    def save(path: Path, *, overwrite: bool = False) -> None: ...

    save(tmp_path / "run", overwrite=True)
    with pytest.raises(TypeError, match=r"save\(\) got an unexpected keyword argument 'overwrit'"):
        save(tmp_path / "run", overwrit=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"save\(\) missing 1 required positional argument: 'path'"):
        save()  # type: ignore[call-arg]


def test_a_thread_may_hold_a_lock_twice_and_another_thread_may_not(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def try_it() -> None:
        try:
            with locked(tmp_path / "run"):
                pass
        except LockedError as error:
            errors.append(error)

    with locked(tmp_path / "run"):
        with locked(tmp_path / "run"):
            pass
        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join()
    assert f"process {os.getpid()}" in str(errors[0])
    try_it()
    assert len(errors) == 1


def test_a_lock_leaves_nothing(tmp_path: Path) -> None:
    with locked(tmp_path / "new" / "deep" / "run"), locked(None):
        assert (tmp_path / "new" / "deep" / ".run.lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_nobody_holds_is_removed_when_the_folder_is_opened(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "run", other="1")
    with holder(path) as process:
        recover(path)
        assert (tmp_path / ".run.lock").exists()
        process.kill()
        process.wait()
        recover(path)
    assert [found.name for found in tmp_path.iterdir()] == ["run"]
    (path / files.INNER_LOCK).touch()
    (tmp_path / ".run.lock").touch()
    recover(path)
    assert not (path / files.INNER_LOCK).exists()
    assert not (tmp_path / ".run.lock").exists()


def test_a_lock_that_another_process_made_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / ".run.lock"
    flock = fcntl.flock

    def replace_first(descriptor: int, operation: int) -> None:
        lock.unlink()
        lock.write_text("of another process")
        flock(descriptor, operation)

    assert writes.has_locks(tmp_path)
    lock.touch()
    monkeypatch.setattr("fcntl.flock", replace_first)
    recover(tmp_path / "run")
    assert lock.read_text() == "of another process"


def test_the_root_folder_has_no_name_and_is_opened_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writes, "_children", lambda folder: [])
    recover(Path("//"))
    assert files.lock_holder("/") is None


def test_names_that_are_too_long_to_add_to_are_locked_and_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250)
    with locked(path):
        write_text(path, "text")
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


@pytest.mark.skipif(sys.platform != "linux", reason="nobody can write in /proc on Linux")
def test_a_folder_in_a_place_that_cannot_be_written_is_locked_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        locking, "hidden", lambda path, suffix: Path("/proc/none", f".{path.name}.{suffix}")
    )
    path = folder_of(tmp_path / "run")
    with locked(path):
        assert [found.name for found in path.iterdir()] == [files.INNER_LOCK]
        with atomic_folder(path) as fresh:
            (fresh / "recipe").write_text("1")
    assert [found.name for found in path.iterdir()] == ["recipe"]
    with locked(tmp_path / "none"):  # writing it will fail for its own reason
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_has_the_existence_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr(writes, "_HAS_LOCKS", {})
    path = tmp_path / "run"
    with locked(path):
        (pid, host, *_) = (tmp_path / ".run.lock").read_text().splitlines()
        assert files.lock_holder(path) == f"process {pid} on {host}"
        with locked(path):
            write_text(path, "text")
        recover(path)
        assert (tmp_path / ".run.lock").exists()
        with (
            ThreadPoolExecutor() as threads,
            refused(LockedError, path=path, holder=f"process {pid} on {host}"),
        ):
            threads.submit(lambda: locked(path).__enter__()).result()
    assert [found.name for found in tmp_path.iterdir()] == ["run"]
    (tmp_path / ".run.lock").write_text(f"{2**22 + 1}\n{host}\n")  # of a process that was killed
    with locked(path):
        pass
    assert [found.name for found in tmp_path.iterdir()] == ["run"]


def test_the_lock_of_a_folder_that_is_replaced_is_that_of_the_new_one(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "run", old="1")
    waiting = threading.Event()
    written = threading.Event()

    def write() -> None:
        waiting.set()
        with folder_lock(path):
            (path / "decisions").write_text("2")
        written.set()

    with held.own_lock(path):
        thread = threading.Thread(target=write)
        thread.start()
        waiting.wait()
        path.rename(tmp_path / "former")
        folder_of(path, new="1")
    thread.join()
    assert sorted(found.name for found in path.iterdir()) == ["decisions", "new"]


# -- folders that are held ---------------------------------------------------


def swap(path: Path) -> None:
    """Another folder of the same contents takes the name of a folder."""
    path.rename(path.with_name("moved"))
    folder_of(path, weights="of another")


def unlink_folder(path: Path) -> None:
    shutil.rmtree(path)


def move(path: Path) -> None:
    path.rename(path.with_name("moved"))


def link(path: Path) -> None:
    """A link to another folder takes the name of a folder."""
    path.rename(path.with_name("moved"))
    folder_of(path.with_name("other"), weights="of another")
    path.symlink_to(path.with_name("other"))


CHANGES = [swap, unlink_folder, move, link]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_new", [True, False])
def test_a_folder_that_is_gone_is_not_written(tmp_path: Path, change, is_new: bool) -> None:
    path = tmp_path / "run"
    if not is_new:
        folder_of(path, weights="old")
    with refused(FolderMoved, path=path) as caught, locked(path):
        if is_new:
            with atomic_folder(path) as fresh:
                (fresh / "weights").write_text("old")
        change(path)
        write_text(path / "weights", "new")
    moved = tmp_path / "moved"
    assert caught.value.now == (None if change is unlink_folder else moved)
    texts = {file.parent.name: file.read_text() for file in tmp_path.glob("*/weights")}
    assert "new" not in texts.values()
    assert texts.get("moved", "old") == "old"
    assert not list(tmp_path.glob("**/.*"))


@pytest.mark.parametrize("change", CHANGES)
def test_the_end_of_a_lock_finds_that_the_folder_is_gone(tmp_path: Path, change) -> None:
    path = folder_of(tmp_path / "run", weights="old")
    with refused(FolderMoved), locked(path):
        change(path)
    path = folder_of(tmp_path / "home") / "run"
    with refused(FolderMoved), locked(folder_of(path, weights="old")):
        change(path)
        raise FileNotFoundError(2, "No such file or directory", "run/weights")


def test_an_error_of_its_own_is_not_taken_for_a_moved_folder(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "run", weights="old")
    with pytest.raises(KeyboardInterrupt), locked(path):  # noqa: PT012
        move(path)
        raise KeyboardInterrupt
    path = folder_of(tmp_path / "run")
    with pytest.raises(PermissionError), locked(path):
        raise PermissionError


@pytest.mark.parametrize("operation", [write_text, lambda path, _: files.remove(path)])
def test_a_folder_that_is_swapped_between_check_and_write_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation
) -> None:
    """The last step goes to the folder that is held, whatever has its name."""
    path = folder_of(tmp_path / "run", weights="old")
    is_in = writes._is_in
    remove_in = held.remove_in

    def swap_first(folder: int, name: str) -> bool:
        monkeypatch.undo()
        swap(path)
        return is_in(folder, name)

    def swap_before_removal(folder: int, name: str) -> None:
        monkeypatch.undo()
        swap(path)
        remove_in(folder, name)

    monkeypatch.setattr(writes, "_is_in", swap_first)
    monkeypatch.setattr(held, "remove_in", swap_before_removal)
    with refused(FolderMoved), locked(path):
        operation(path / "weights", "new")
    assert (path / "weights").read_text() == "of another"


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_that_takes_the_name_before_it_is_replaced_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    path = folder_of(tmp_path / "run", weights="old")
    exchange_names = writes._exchange_names

    def swap_first(fresh: Path, name: Path) -> bool:
        monkeypatch.setattr(writes, "_exchange_names", exchange_names)
        swap(path)
        return exchange_names(fresh, name) if exchange else False

    monkeypatch.setattr(writes, "_exchange_names", swap_first)
    with refused(FolderMoved), locked(path), atomic_folder(path, existing="replace") as fresh:
        (fresh / "weights").write_text("new")
    assert (path / "weights").read_text() == "of another"
    assert (tmp_path / "moved" / "weights").read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["moved", "run"]


def test_a_new_folder_whose_parent_is_moved_is_not_begun_again(tmp_path: Path) -> None:
    """The name would be that of a folder with half of its files."""
    home = folder_of(tmp_path / "runs")
    with refused(FolderMoved, path=home / "run"), atomic_folder(home / "run") as fresh:
        write_text(fresh / "weights", "new")
        home.rename(tmp_path / "moved")
        write_text(fresh / "report", "new")
    assert not home.exists()
    assert not (tmp_path / "moved" / "run").exists()


def test_a_subfolder_of_a_folder_that_is_gone_is_not_made(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "run")
    with refused(FolderMoved), locked(path):
        shutil.rmtree(path)
        write_text(path / "checkpoint" / "latest.json", "{}")
    assert not path.exists()


def test_a_folder_that_is_moved_before_a_subfolder_is_made_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder_of(tmp_path / "run")
    mkdir = os.mkdir

    def move_first(name: Path, *options: int, **folders: int) -> None:
        monkeypatch.undo()
        move(path)
        mkdir(name, *options, **folders)

    with refused(FolderMoved), locked(path):
        files.make_folder(path)
        files.make_folder(path / "a" / "b")
        assert (path / "a" / "b").is_dir()
        monkeypatch.setattr("os.mkdir", move_first)
        write_text(path / "checkpoint" / "latest.json", "{}")
    assert not path.exists()


def test_no_folder_is_locked_through_a_link_in_the_place_of_one_that_is_held(
    tmp_path: Path,
) -> None:
    """As that of the second of several seeds."""
    out = tmp_path / "out"
    other = tmp_path / "other"
    out.mkdir()
    other.mkdir()
    with refused(FolderMoved, path=out), locked(out):
        out.rename(tmp_path / "moved")
        out.symlink_to(other)
        with locked(out / "seed-1"):
            write_text(out / "seed-1" / "recipe.toml", "")
    assert not list(other.iterdir())


def test_a_lock_is_made_in_the_folder_that_is_held_whatever_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is replaced by a link just before the lock of one in it is made."""
    out = folder_of(tmp_path / "out")
    other = folder_of(tmp_path / "other", weights="of another")
    has_locks = locking.has_locks

    def link_first(folder: Path) -> bool:
        monkeypatch.undo()
        out.rename(tmp_path / "moved")
        out.symlink_to(other)
        return has_locks(folder)

    with refused(FolderMoved, path=out), locked(out):
        monkeypatch.setattr(locking, "has_locks", link_first)
        with locked(out / "seed-1"):
            write_text(out / "seed-1" / "recipe.toml", "")
    assert [file.name for file in other.iterdir()] == ["weights"]
    assert not list((tmp_path / "moved").iterdir())


def test_a_folder_that_was_moved_is_not_locked_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for the results of a search, which is watched before it is locked."""
    out = folder_of(tmp_path / "out")
    has_locks = locking.has_locks

    def move_first(folder: Path) -> bool:
        monkeypatch.undo()
        move(out)
        return has_locks(folder)

    with refused(FolderMoved, path=out), files.watched(out):
        files.check_held(out)
        monkeypatch.setattr(locking, "has_locks", move_first)
        with locked(out):
            write_text(out / "best.toml", "")
    assert [file.name for file in tmp_path.iterdir()] == ["moved"]


def test_a_file_that_is_gone_at_the_end_is_reported(tmp_path: Path) -> None:
    """The folder of a list is not held, but the list is."""
    home = folder_of(tmp_path / "lists")
    with refused(FolderMoved, path=home / "new.tsv"), locked(home / "new.tsv"):
        write_text(home / "new.tsv", "1")
        write_text(home / "new.tsv", "2")
        shutil.rmtree(home)
    assert not home.exists()


def test_a_temporary_file_in_a_folder_that_was_moved_is_removed(tmp_path: Path) -> None:
    """The next command looks for those in the folder itself, and not in folders in it."""
    path = folder_of(tmp_path / "run")
    with (
        refused(FolderMoved),
        locked(path),
        atomic_write(path / "checkpoint" / "latest.json") as fresh,
    ):
        fresh.write_text("{}")
        move(path)
    assert not list((tmp_path / "moved" / "checkpoint").iterdir())


def test_a_file_is_created_in_the_folder_that_is_held_or_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder_of(tmp_path / "run")
    with refused(FolderMoved), locked(path):
        swap(path)
        with files.create_file(path / "early"):
            pass
    assert [file.name for file in path.iterdir()] == ["weights"]

    shutil.rmtree(path)
    shutil.rmtree(tmp_path / "moved")
    folder_of(path)
    descriptor_above = held._descriptor_above

    def swap_after_the_look(folder: Path) -> tuple[int, Path] | None:
        monkeypatch.undo()
        swap(path)
        return descriptor_above(folder)

    with refused(FolderMoved), locked(path):
        monkeypatch.setattr(held, "_descriptor_above", swap_after_the_look)
        with files.create_file(path / "late") as file:
            file.write(b"1")
    assert [file.name for file in path.iterdir()] == ["weights"]
    assert [file.name for file in (tmp_path / "moved").iterdir()] == ["late"]


@pytest.mark.parametrize("name", ["new.tsv", "new"])
def test_what_a_killed_process_left_is_removed_where_its_command_is_refused(
    tmp_path: Path, name: str
) -> None:
    """The process had made the file or the folder; the same command is then refused."""
    path = tmp_path / name
    if path.suffix:
        path.write_text("complete")
    else:
        folder_of(path, weights="complete")
        (path / files.INNER_LOCK).write_text("1\nhere\n")
    (tmp_path / f".{name}.lock").write_text("1\nhere\n")
    (tmp_path / f".{name}.0123abcd.tmp").mkdir()
    check = files.check_new_file if path.suffix else files.check_new_folder
    with refused(PathExists, path=path):
        check(path)
    assert not [file for file in tmp_path.rglob("*") if file.name.startswith(".")]
    assert path.exists()


def test_a_lock_in_a_folder_that_was_moved_is_removed(tmp_path: Path) -> None:
    home = folder_of(tmp_path / "run")
    with refused(FolderMoved), locked(home), locked(home / "seed-0"):
        move(home)
    assert not list((tmp_path / "moved").iterdir())


def test_a_moved_folder_is_locked_under_its_new_name(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "run")
    with holder(path) as process:
        move(path)
        with refused(LockedError, path=tmp_path / "moved") as caught, locked(tmp_path / "moved"):
            pass
        assert caught.value.holder.startswith(f"process {process.pid} on ")
        assert f"process {process.pid} on " in (files.lock_holder(tmp_path / "moved") or "")
    with locked(tmp_path / "moved"):  # the first process was killed
        pass
    assert not list((tmp_path / "moved").iterdir())


def test_a_new_folder_is_locked_inside_from_its_first_moment(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with locked(path):
        with atomic_folder(path) as fresh:
            (fresh / "weights").write_text("old")
        locks = [(path / files.INNER_LOCK).stat().st_ino]
        with atomic_folder(path, existing="replace") as fresh:
            (fresh / "weights").write_text("new")
        locks.append((path / files.INNER_LOCK).stat().st_ino)
        write_text(path / "report", "new")
    assert locks[0] != locks[1]
    assert sorted(file.name for file in path.iterdir()) == ["report", "weights"]
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_is_mounted_twice_is_locked_once(tmp_path: Path) -> None:
    """A second mount is simulated by the lock in the folder: both paths lead to one file."""
    path = folder_of(tmp_path / "run")
    with locked(path):
        folder = os.open(path, os.O_RDONLY)
        try:
            with refused(LockedError, path="elsewhere"):
                held.lock_inside(folder, "elsewhere")
        finally:
            os.close(folder)


def test_a_process_that_does_not_hold_the_lock_watches_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with refused(FolderMoved), files.watched(path):
        folder_of(path)
        write_text(path / "first", "1")
        assert files.is_held(path / "checkpoint")
        swap(path)
        assert not files.is_held(path / "checkpoint")
        write_text(path / "second", "2")
    assert [file.name for file in path.iterdir()] == ["weights"]


def test_the_message_says_where_the_folder_is_now() -> None:
    assert str(FolderMoved("a", now="/runs/b")) == (
        "a was moved, removed or replaced while it was being written, so nothing more was saved. "
        "It is /runs/b now; what was saved until then is there."
    )
    assert str(FolderMoved("a")).endswith("It was removed, or where it is now is not known.")


# -- checksums ---------------------------------------------------------------


@given(data=st.data())
def test_any_flipped_bit_is_found(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("flip") / "report.json"
    write_json(path, {"mrr": 0.1 + 0.2, "names": ["Ü", None], "by": {1: [1e-30]}})
    assert read_json(path, checksum=True) == {
        "mrr": 0.1 + 0.2,
        "names": ["Ü", None],
        "by": {"1": [1e-30]},
    }
    record = file_record(path)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    assert "its content has changed" in (file_damage(path, record) or "")
    with pytest.raises(DamagedFile):
        read_json(path, checksum=True)


def test_white_space_is_part_of_a_checksum(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(path, {"mrr": 0.5})
    path.write_text(path.read_text() + "\n")
    with refused(DamagedFile, path=path) as caught:
        read_json(path, checksum=True)
    assert caught.value.reason.startswith("its checksum")


@pytest.mark.parametrize("content", ['{"mrr": 0.5}', "{}", "[3]", '{"mrr": "' + "0" * 64 + '"}'])
def test_a_missing_checksum_is_told(tmp_path: Path, content: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(content)
    with refused(DamagedFile, path=path, reason="it has no checksum (the entry 'sha256')"):
        read_json(path, checksum=True)
    assert read_json(path) == json.loads(content)


def test_large_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = partial(file_damage, remembered_bytes=3)
    path = tmp_path / "weights"
    memory = tmp_path / "cache" / "verified"
    path.write_text("good")
    record = file_record(path)
    assert check(path, record, memory=memory) is None
    monkeypatch.setattr(checksums, "file_record", None)  # a second hash would fail
    assert check(path, record, memory=memory) is None
    monkeypatch.undo()
    stamp = path.stat().st_mtime_ns + 10**9
    path.write_text("bad!")
    os.utime(path, ns=(stamp, stamp))
    assert "its content has changed" in (check(path, record, memory=memory) or "")
    path.write_text("longer")
    assert check(path, record, memory=memory) == "it has 6 bytes in place of 4"
    path.unlink()
    assert check(path, record, memory=memory) == "it is missing"


# -- power cuts --------------------------------------------------------------


def change_file(home: Path) -> None:
    write_text(home / "run" / "weights", "new")


def change_folder(home: Path) -> None:
    with atomic_folder(home / "run", existing="replace", keep=["decisions"]) as fresh:
        (fresh / "weights").write_text("new")
        (fresh / "graph").mkdir()
        (fresh / "graph" / "train").write_text("new graph")


def link_file(home: Path) -> None:
    (home / "run" / "checkpoint").write_text("new")
    files.sync(home / "run" / "checkpoint")
    link_or_copy(home / "run" / "checkpoint", home / "run" / "weights")
    (home / "run" / "checkpoint").unlink()


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("change", [change_file, change_folder, link_file])
def test_a_power_cut_leaves_the_old_or_the_new(tmp_path, monkeypatch, change, exchange):
    if not exchange:
        monkeypatch.setattr(writes, "_exchange_names", lambda one, other: False)
    home = folder_of(tmp_path / "home")
    folder_of(home / "run", weights="old", decisions="kept")
    recorder = Recorder(home)
    with recorder.recording():
        change(home)
    chance = random.Random(0)
    found = set()
    for cut in range(recorder.start, recorder.event + 1):
        for by_folder in (True, False):
            for data in ("none", "half", "all"):
                disk = folder_of(tmp_path / "disk")
                for place, content in recorder.state(
                    cut, chance, by_folder=by_folder, data=data
                ).items():
                    (disk / place).mkdir() if content is None else (disk / place).write_bytes(
                        content
                    )
                recover(disk / "run")
                weights = disk / "run" / "weights"
                graph = disk / "run" / "graph" / "train"
                found.add(weights.read_text())
                assert (disk / "run" / "decisions").read_text() == "kept"
                assert graph.exists() == (change is change_folder and weights.read_text() == "new")
                with locked(disk / "run"):
                    pass
                assert [path.name for path in disk.iterdir()] == ["run"]
                assert not [
                    path.name for path in (disk / "run").iterdir() if path.name.startswith(".")
                ]
                shutil.rmtree(disk)
    assert found == {"old", "new"}


def test_a_folder_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    calls = 0

    def replace() -> None:
        with atomic_folder(path, existing="replace") as fresh:
            (fresh / "number").write_text(str(calls))

    @files.rereads("path")
    def read(path: Path, *, replaced: int, fails: bool) -> str:
        nonlocal calls
        calls += 1
        content = (path / "number").read_text()
        if calls <= replaced:
            replace()
            if fails:
                raise DamagedFile(path, "a file is missing")
        return content

    for fails in (True, False):
        calls = 0
        replace()
        assert read(path, replaced=2, fails=fails) == "2"
        assert calls == 3
    calls = 0
    with refused(DamagedFile):
        read(path, replaced=100, fails=True)
    assert calls == locking.MAX_READS


def test_a_folder_that_stays_is_read_once(tmp_path: Path) -> None:
    calls = 0

    @files.rereads("path")
    def read(path: Path) -> None:
        nonlocal calls
        calls += 1
        raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        read(tmp_path)
    assert calls == 1
