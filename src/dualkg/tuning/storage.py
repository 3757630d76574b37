"""Where a study is stored: an SQLite file, another database, or a journal in a shared folder."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import sqlalchemy
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import (
    BaseJournalBackend,
    JournalFileBackend,
    JournalFileSymlinkLock,
)

from dualkg.errors import PYTHON, DamagedFile, InvalidValue, MissingExtra, RequestError, Words
from dualkg.files import atomic_write, locked, regular_file

SQLITE_TIMEOUT_SECONDS = 60  # how long a process waits for another one that writes
OPENING_ATTEMPTS = 5
OPENING_PAUSE_SECONDS = 0.3


class StorageNotOpened(RequestError):
    """The database or the file of a study cannot be opened."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason

    def message(self, words: Words = PYTHON) -> str:
        return f"The storage cannot be opened: {self.reason}."


@dataclass(frozen=True)
class StudyStorage:
    """An Optuna storage, and the file whose lock a process holds while it takes a trial.

    SQLite has no row locks, so without the lock two processes could take the same waiting trial.
    The other storages have `lock_path` None and see to it themselves.
    """

    backend: BaseStorage
    lock_path: Path | None = None

    def taking_trial(self) -> AbstractContextManager[None]:
        return locked(self.lock_path, wait=True)


def sqlite_url(path: Path) -> str:
    """The URL of an SQLite file; special characters in its name are quoted."""
    return sqlalchemy.URL.create("sqlite", database=str(path)).render_as_string()


def open_storage(url: str) -> StudyStorage:
    """Open, or create, the storage with a URL such as `sqlite:///a.db` or `journal:/shared/a.log`.

    A path that ends in `.log` is a journal, too.
    """
    if url.startswith("journal:") or url.endswith(".log"):
        return _open_journal(Path(url.removeprefix("journal:")))
    return _open_database(re.sub(r"^postgres(?=[:+])", "postgresql", url))


def _open_journal(path: Path) -> StudyStorage:
    try:
        return StudyStorage(JournalStorage(Journal(path)))
    except OSError as error:
        raise StorageNotOpened(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(path, f"it is not a journal of Optuna ({error})") from None


def _open_database(text: str) -> StudyStorage:
    try:
        url = sqlalchemy.make_url(text)
    except sqlalchemy.exc.ArgumentError:
        raise InvalidValue(
            "storage",
            expected=(
                "the URL of a database, such as sqlite:///study.db, or a journal in a shared "
                "folder, such as journal:/shared/study.log"
            ),
            found=text,
        ) from None

    # Several processes may be creating the tables of a new database at the same time.
    for attempt in range(1, OPENING_ATTEMPTS + 1):
        try:
            if url.get_backend_name() == "sqlite":
                return _open_sqlite(text, url.database)
            return StudyStorage(RDBStorage(text))
        except (ImportError, sqlalchemy.exc.NoSuchModuleError) as error:
            raise _missing_driver(url, error) from None
        except OSError as error:
            raise StorageNotOpened(f"{url.database}: {error.strerror}") from None
        except (sqlalchemy.exc.SQLAlchemyError, RuntimeError) as error:
            if attempt == OPENING_ATTEMPTS:
                raise StorageNotOpened(str(getattr(error, "orig", None) or error)) from None
            time.sleep(OPENING_PAUSE_SECONDS)
    raise AssertionError("unreachable")


def _missing_driver(url: sqlalchemy.URL, error: Exception) -> RequestError:
    if url.drivername == "postgresql":
        return MissingExtra("psycopg", "postgresql", purpose="A storage in PostgreSQL")
    return StorageNotOpened(f"its database driver is not installed: {error.__cause__ or error}")


def _open_sqlite(url: str, database: str | None) -> StudyStorage:
    options: dict[str, Any] = {"connect_args": {"timeout": SQLITE_TIMEOUT_SECONDS}}
    if not database or database == ":memory:":
        return StudyStorage(RDBStorage(url, options))

    # Without a pool, each transaction closes its connection, and none is left for the end.
    options["poolclass"] = sqlalchemy.NullPool
    path = Path(database)
    if path.parent.is_dir():
        _create_sqlite(path)
        # A URL with settings of its own is opened by SQLAlchemy.
        if url == sqlite_url(path):
            options["creator"] = partial(_connect, path)
    return StudyStorage(RDBStorage(url, options), lock_path=path)


def _connect(path: Path) -> sqlite3.Connection:
    """Open an SQLite file that exists. Once it is open, SQLite refuses to write a moved file."""
    return sqlite3.connect(
        f"file:{quote(os.fsencode(path))}?mode=rw",
        uri=True,
        timeout=SQLITE_TIMEOUT_SECONDS,
        check_same_thread=False,
    )


def _create_sqlite(path: Path) -> None:
    """Create the tables of a study, unless they exist.

    The file appears when it is complete: Optuna creates tables and then their indexes, without
    which names of studies are not unique, and does not notice that some are missing.
    """
    with locked(path, wait=True):
        if path.exists():
            regular_file(path)
            return
        with atomic_write(path) as fresh:
            # Without a pool, no connection to the file remains open when it is renamed.
            RDBStorage(sqlite_url(fresh), {"poolclass": sqlalchemy.NullPool})


class Journal(BaseJournalBackend):
    """Optuna's journal file, which a lost machine cannot damage.

    A process that ends while it writes may leave an incomplete last line. Optuna's own backend
    would append to that line and could then read nothing that follows.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            regular_file(path)
        self._file = JournalFileBackend(str(path))
        self._lock = JournalFileSymlinkLock(str(path))

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        return self._file.read_logs(log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = [json.dumps(log, separators=(",", ":")) + "\n" for log in logs]
        self._lock.acquire()
        try:
            with self._path.open("r+b") as file:
                end = _end_of_last_line(file)
                file.truncate(end)
                file.seek(end)
                file.write("".join(lines).encode())
                file.flush()
                os.fsync(file.fileno())
        finally:
            self._lock.release()


def _end_of_last_line(file: BinaryIO) -> int:
    """The number of bytes up to the last line end of an open file."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return 0
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return size
    file.seek(0)
    return file.read().rfind(b"\n") + 1
