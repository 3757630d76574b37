"""The checksums of files, which the report of a run holds."""

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualkg.files.reads import open_regular, read_text
from dualkg.files.writes import open_text

REMEMBERED_BYTES = 2**22  # files of this size are hashed on first use only, smaller ones always


@dataclass(frozen=True)
class FileRecord:
    """What `file_record` saves, to check a file of records by."""

    bytes: int
    sha256: str


def file_record(path: Path) -> dict[str, Any]:
    """The size and the checksum of a file."""
    with open_regular(path) as file:
        return {
            "bytes": os.fstat(file.fileno()).st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def file_damage(
    path: Path,
    record: dict[str, Any],
    *,
    memory: Path | None = None,
    remembered_bytes: int = REMEMBERED_BYTES,
) -> str | None:
    """What is wrong with a file, by its `file_record`; None if nothing is.

    The file `memory` remembers which large files, of at least `remembered_bytes`, were good, by
    name, size and time, so that each is hashed once.
    """
    try:
        status = path.stat()
        if status.st_size != record["bytes"]:
            return f"it has {status.st_size:,} bytes in place of {record['bytes']:,}"
        identity = f"{path.resolve()} {status.st_dev} {status.st_ino}"
        version = f"{status.st_size} {status.st_mtime_ns} {record['sha256']}"
        line = hashlib.sha256(os.fsencode(f"{identity} {version}")).hexdigest()
        remembered = memory if status.st_size >= remembered_bytes else None
        if remembered and remembered.exists() and line in read_text(remembered):
            return None
        if file_record(path)["sha256"] != record["sha256"]:
            return "its content has changed: its sha256 is not the one in the report"
    except FileNotFoundError:
        return "it is missing"
    except (OSError, KeyError, TypeError) as error:
        return f"it cannot be checked ({error})"
    if remembered:
        with suppress(OSError):
            remembered.parent.mkdir(parents=True, exist_ok=True)
            keep = remembered.exists() and remembered.stat().st_size < 10**5
            with open_text(remembered, "a" if keep else "w") as file:
                file.write(f"{line}\n")
    return None
