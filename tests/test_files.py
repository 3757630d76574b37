"""Files and folders that appear whole or not at all, locks, and checksums."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dualkg.errors import DamagedFile, DualkgError, LockedError, PathExists, RequestError
from dualkg.files import (
    atomic_folder,
    atomic_write,
    check_new_file,
    check_new_folder,
    contents,
    exists,
    file_damage,
    file_record,
    folder_check,
    folder_lock,
    link_or_copy,
    lock_holder,
    locked,
    open_regular,
    read_json,
    read_text,
    recover,
    regular_file,
    write_json,
    write_text,
    writing,
    written_token,
)
from tests.raising import refused


def folder_of(path: Path, **contents: str) -> Path:
    path.mkdir(parents=True)
    for name, text in contents.items():
        (path / name).write_text(text)
    return path


def texts(folder: Path) -> dict[str, str]:
    """The files below a folder, also hidden ones."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_text() for file in files}


def write_folder(path: Path, **options: Any) -> None:
    with atomic_folder(path, **options) as fresh:
        (fresh / "recipe").write_text("new")


# -- atomic writes -----------------------------------------------------------


def test_a_file_takes_the_place_of_the_former(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "report.json"
    write_text(path, "first")
    with atomic_write(path) as fresh:
        fresh.write_text("Ünïcode 東京", encoding="utf-8")
        assert fresh.suffix == ".json"
        assert path.read_text() == "first"
    assert path.read_bytes().decode() == "Ünïcode 東京"
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("of the user")
    (tmp_path / "link").symlink_to("file")
    write_text(tmp_path / "link", "new")
    assert not (tmp_path / "link").is_symlink()
    assert texts(tmp_path) == {"file": "of the user", "link": "new"}


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_the_former_file_and_folder_alone(
    tmp_path: Path, failure: type[BaseException]
) -> None:
    folder_of(tmp_path / "run", weights="good")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise failure

    with pytest.raises(failure), atomic_write(tmp_path / "run" / "weights") as fresh:
        fail(fresh)
    with pytest.raises(failure), atomic_folder(tmp_path / "run", existing="replace") as fresh:
        fail(fresh / "weights")
    assert texts(tmp_path) == {"run/weights": "good"}
    assert contents(tmp_path) == ["run"]


def test_errors_name_the_file_and_not_the_temporary_one(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, atomic_write(tmp_path / "report.json") as fresh:
        raise OSError(errno.ENOSPC, "No space left on device", str(fresh))
    assert caught.value.filename == str(tmp_path / "report.json")
    with pytest.raises(OSError) as caught, atomic_folder(tmp_path / "run") as fresh:
        (fresh / "deep" / "weights").touch()
    assert caught.value.filename == str(tmp_path / "run" / "deep" / "weights")
    with (
        pytest.raises(OSError, match=r"could not be written \(I/O error: full\)"),
        writing(tmp_path / "weights", ValueError),
    ):
        raise ValueError("Error while serializing: I/O error: full")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    folder_of(tmp_path / "run", weights="good")
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="Input/output error: .*weights"):
        write_text(tmp_path / "run" / "weights", "new")
    with pytest.raises(OSError, match="Input/output error"):
        write_folder(tmp_path / "run", existing="replace")
    assert texts(tmp_path) == {"run/weights": "good"}


def test_a_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one"
    with atomic_folder(path) as fresh:
        (fresh / "recipe").write_text("new")
        assert not path.exists()
    assert texts(tmp_path) == {"runs/one/recipe": "new"}


@pytest.mark.parametrize(
    ("existing", "left"),
    [("refuse", "former"), ("keep", "former"), ("replace", "recipe")],
)
def test_a_folder_that_exists(tmp_path: Path, existing: Any, left: str) -> None:
    path = folder_of(tmp_path / "one", former="old", decisions="mine")
    if existing == "refuse":
        with pytest.raises(OSError, match=r"not empty: '.*/one'"):
            write_folder(path, existing=existing)
    else:
        write_folder(path, existing=existing, keep=["decisions", "nothing"])
    assert contents(path) == sorted(["decisions", left])
    assert contents(tmp_path) == ["one"]


def test_an_empty_folder_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    write_folder(tmp_path / "one")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write_folder(Path(), last="recipe")
    assert contents(Path()) == ["recipe"]
    assert texts(tmp_path) == {"one/recipe": "new", "here/recipe": "new"}


def test_a_file_in_the_way_of_a_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("a file")
    with pytest.raises(NotADirectoryError):
        write_folder(tmp_path / "one")
    assert texts(tmp_path) == {"one": "a file"}


@pytest.mark.parametrize("has_links", [True, False])
def test_a_second_name_has_the_same_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError("this file system knows no links")

    if not has_links:
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    folder_of(tmp_path / "run", checkpoint="new", weights="former")
    for _ in range(2):
        link_or_copy(tmp_path / "run" / "checkpoint", tmp_path / "run" / "weights")
    assert texts(tmp_path / "run") == {"checkpoint": "new", "weights": "new"}
    with pytest.raises(FileNotFoundError):
        link_or_copy(tmp_path / "run" / "none", tmp_path / "run" / "weights")
    assert contents(tmp_path / "run") == ["checkpoint", "weights"]


@pytest.mark.parametrize("write", [atomic_write, atomic_folder, locked])
def test_a_name_that_is_no_text_is_not_written(tmp_path: Path, write: Any) -> None:
    with pytest.raises(RequestError, match="is not UTF-8"), write(tmp_path / "o\udcffx"):
        pass
    assert list(tmp_path.iterdir()) == []


# -- kills -------------------------------------------------------------------

# Writes with a process that is killed before a step, for each step until one writes to its end.
KILLED = """
import itertools, json, os, signal, sys
from pathlib import Path
from dualkg.files import atomic_folder, atomic_write, locked, recover

def write(home):
    if sys.argv[1] == "file":
        with atomic_write(home / "weights") as fresh:
            fresh.write_text("new")
    else:
        with (
            locked(home / "run"),
            atomic_folder(home / "run", existing="replace", keep=["kept"]) as fresh,
        ):
            (fresh / "weights").write_text("new")
            (fresh / "report").write_text("new")

def kill_before(step):
    number = itertools.count()
    for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
        def counted(*arguments, call=getattr(os, name), **options):
            if next(number) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)
        setattr(os, name, counted)

for step in itertools.count():
    home = Path(sys.argv[2], str(step))
    (home / "run").mkdir(parents=True)
    (home / "weights").write_text("old")
    (home / "run" / "weights").write_text("old")
    (home / "run" / "kept").write_text("old")
    child = os.fork()
    if not child:
        kill_before(step)
        write(home)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    recover(home / "run")
    files = [file for file in home.rglob("[!.]*") if file.is_file()]
    files = [file for file in files if "/." not in str(file)]
    print(json.dumps({str(file.relative_to(home)): file.read_text() for file in files}))
    write(home)
    if status == 0:
        break
"""


@pytest.mark.parametrize(("kind", "num_steps"), [("file", 3), ("folder", 9)])
def test_a_kill_at_any_step_leaves_the_former_or_the_new(
    tmp_path: Path, kind: str, num_steps: int
) -> None:
    output = subprocess.run(
        [sys.executable, "-c", KILLED, kind, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
    )
    states = [json.loads(line) for line in output.stdout.splitlines()]
    old = {"weights": "old", "run/weights": "old", "run/kept": "old"}
    new = {**old, "weights": "new"}
    if kind == "folder":
        new = {**old, "run/weights": "new", "run/report": "new"}
    assert len(states) > num_steps
    assert all(state in (old, new) for state in states)
    assert states[0] == old
    assert states[-1] == new
    for home in tmp_path.iterdir():  # the write was repeated after the kill
        assert new.items() <= texts(home).items()


def test_leftovers_of_a_kill_are_removed_once_they_are_old(tmp_path: Path) -> None:
    beside = folder_of(tmp_path / ".0123abcd.tmp.run", weights="half")
    path = folder_of(tmp_path / "run", weights="good")
    inside = path / ".0123abcd.tmp.weights"
    inside.write_text("half")
    with locked(path):
        assert contents(path) == ["weights"]
        assert inside.exists()
    for left in (beside, inside):
        os.utime(left, (time.time() - 3600, time.time() - 3600))
    with locked(path):
        pass
    assert texts(tmp_path) == {"run/weights": "good"}


# -- locks -------------------------------------------------------------------

HOLD = """
import sys
from dualkg.files import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of a folder."""
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


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "run", other="1")
    folder_of(tmp_path / ".none.old")
    with holder(path) as process:
        text = lock_holder(path)
        assert text is not None
        assert text.startswith(f"process {process.pid} on ")
        assert " since " in text
        assert lock_holder(path, other=True) == text
        with refused(LockedError, path=path, holder=text), locked(path):
            pass
        with pytest.raises(LockedError), locked(tmp_path / "run" / ".." / "run"):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / ".run.lock").exists()
        assert lock_holder(path) is None
        with locked(path, wait=True):
            assert lock_holder(path) is not None
            assert lock_holder(path, other=True) is None
    assert not (tmp_path / ".run.lock").exists()


def test_a_folder_that_another_process_replaces_is_not_put_back(tmp_path: Path) -> None:
    with holder(tmp_path / "run"):
        folder_of(tmp_path / ".run.old", weights="1")
        recover(tmp_path / "run")
        assert not (tmp_path / "run").exists()
    recover(tmp_path / "run")
    assert contents(tmp_path / "run") == ["weights"]


def test_a_thread_may_hold_a_lock_twice_and_another_thread_may_not(tmp_path: Path) -> None:
    holders: list[str] = []

    def lock() -> None:
        try:
            with locked(tmp_path / "run"):
                holders.append("own")
        except LockedError as error:
            holders.append(error.holder)

    with locked(tmp_path / "run"):
        with locked(tmp_path / "run"):
            pass
        thread = threading.Thread(target=lock)
        thread.start()
        thread.join()
    lock()
    assert holders[0].startswith(f"process {os.getpid()} on ")
    assert holders[1:] == ["own"]


def test_a_lock_leaves_nothing(tmp_path: Path) -> None:
    with locked(tmp_path / "new" / "deep" / "run"), locked(None):
        assert (tmp_path / "new" / "deep" / ".run.lock").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path / "run"), folder_lock(tmp_path):
        write_text(tmp_path / "run", "text")
    assert (tmp_path / "run").read_text() == "text"


def test_the_lock_of_a_folder_that_is_replaced_is_that_of_the_new_one(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "run", decisions="1")
    waiting = threading.Event()

    def write() -> None:
        waiting.set()
        with folder_lock(path):
            (path / "decisions").write_text("2")

    with folder_lock(path):
        thread = threading.Thread(target=write)
        thread.start()
        waiting.wait()
        path.rename(tmp_path / "former")
        folder_of(path, decisions="1")
    thread.join()
    assert texts(path) == {"decisions": "2"}


def test_a_folder_that_was_moved_fails_a_check(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "run", weights="1")
    check = folder_check(path / "weights")
    check()
    path.rename(tmp_path / "moved")
    with pytest.raises(DualkgError, match="run was moved, removed or replaced"):
        check()
    folder_of(path, weights="1")
    with pytest.raises(DualkgError, match="run was moved, removed or replaced"):
        check()


def test_another_machine_finds_the_token_if_it_sees_the_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "new", folder_of(tmp_path / "run")):
        with written_token(path) as token:
            assert token.is_seen(path)
            assert not token._replace(text="other").is_seen(path)
            assert not token.is_seen(tmp_path / "elsewhere" / "run")
        assert not token.is_seen(path)


# -- reading -----------------------------------------------------------------


def test_json_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(path, {"name": "東京", "numbers": [1, 2]})
    content = read_json(path, dict[str, Any], checksum=True)
    assert content == {"name": "東京", "numbers": [1, 2]}
    path.write_text(path.read_text().replace("2", "3", 1))
    with pytest.raises(DamagedFile, match="its checksum is not that of its content"):
        read_json(path, checksum=True)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a": ', "it is not JSON"),
        (b"\xff", "it is not JSON"),
        (b"[" * 10**5, "it is not JSON"),
        (b'{"a": 1}', "it has no checksum"),
        (b"[]", "it has no checksum"),
        (b'{"sha256": 3}', "it has no checksum"),
        (b'{"sha256": "\\ud800"}', "its checksum is not"),
    ],
)
def test_damaged_json_is_refused(tmp_path: Path, text: bytes, reason: str) -> None:
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(DamagedFile, match=reason):
        read_json(tmp_path / "a.json", checksum=True)


def test_json_of_another_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": "b"}')
    with pytest.raises(DamagedFile, match="a: Input should be a valid integer"):
        read_json(tmp_path / "a.json", dict[str, int])
    (tmp_path / "b.json").symlink_to("nowhere")
    with pytest.raises(DamagedFile, match="it is a link to nowhere"):
        exists(tmp_path / "b.json")


@pytest.mark.parametrize("read", [open_regular, regular_file, read_text, file_record])
def test_pipes_devices_and_large_files_are_refused(tmp_path: Path, read: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read(path)
    with pytest.raises(DamagedFile):
        read_json(tmp_path / "pipe")


def test_a_file_has_at_most_the_bytes_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1\r2\r\n")
    assert read_text(tmp_path / "a", max_bytes=5) == "1\n2\n"
    with pytest.raises(OSError, match="it has 5 bytes, and at most 4 are read"):
        read_text(tmp_path / "a", max_bytes=4)


def test_what_exists_is_not_new(tmp_path: Path) -> None:
    folder_of(tmp_path / "run", recipe="1")
    (tmp_path / "empty").mkdir()
    check_new_file(tmp_path / "none")
    check_new_folder(tmp_path / "empty")
    for check, path in ((check_new_file, "empty"), (check_new_folder, "run")):
        with refused(PathExists, path=tmp_path / path, overwritable=False):
            check(tmp_path / path)


def test_damage_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_text("good")
    record = file_record(path)
    assert file_damage(path, record) is None
    path.write_text("gold")
    assert "its content has changed" in str(file_damage(path, record))
    path.write_text("better")
    assert file_damage(path, record) == "it has 6 bytes in place of 4"
    path.unlink()
    assert file_damage(path, record) == "it is missing"


def test_a_large_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_text("good")
    options = {"memory": tmp_path / "cache" / "verified", "remembered_bytes": 4}
    record = file_record(path)
    hashed: list[Path] = []
    monkeypatch.setattr("dualkg.files.file_record", lambda path: hashed.append(path) or record)
    for _ in range(2):
        assert file_damage(path, record, **options) is None
    assert hashed == [path]
    os.utime(path, (0, 0))
    assert file_damage(path, record, **options) is None
    assert hashed == [path, path]
