"""The folder of the checkpoints of several processes: all agree which of them is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dualkg.errors import DamagedFile
from dualkg.files import (
    check_type,
    file_damage,
    read_json,
    remove,
    sync,
    write_json,
)
from dualkg.logs import logger
from dualkg.tables.files import shard_file
from dualkg.tables.processes import Processes

Records = dict[str, dict[str, Any]]  # size and checksum by the name of a file
RECORD_NUMBERS = 1 + 32  # the size of a file, and the bytes of its sha256
DAMAGED_SHARD = "its size or its sha256 is not the one in latest.json"
AFTER_DAMAGE = "Restore it from a copy, or train the run again."


class CheckpointFolder:
    """A folder with the last checkpoints; `pointer` names the last that is complete."""

    def __init__(self, path: Path, group: Processes) -> None:
        self.path = path
        self.group = group
        self.pointer = path / "latest.json"

    def about(self) -> dict[str, Any]:
        return dict(read_json(self.pointer, dict[str, Any], checksum=True))

    def start(self, about: dict[str, Any]) -> None:
        """Before the first step there are no tensors."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.pointer, {"when": "start", **about})

    def _folders(self) -> list[Path]:
        self.path.mkdir(parents=True, exist_ok=True)
        return [folder for folder in self.path.iterdir() if folder.name.isdigit()]

    def next_folder(self) -> Path:
        """The folder of the next checkpoint, on which all processes agree."""
        last = 0
        if self.group.first:
            last = max((int(folder.name) for folder in self._folders()), default=0)
        number = int(self.group.largest(last + 1)[0])
        return self.path / f"{number:06d}"

    def gather_records(self, folder: Path, record: dict[str, Any] | None) -> Records:
        """Size and checksum of each shard of a checkpoint; each process has its own, or none."""
        count = self.group.count
        numbers = [0] * (count * RECORD_NUMBERS)
        if record is not None:
            start = self.group.index * RECORD_NUMBERS
            own_numbers = [record["bytes"], *bytes.fromhex(record["sha256"])]
            numbers[start : start + RECORD_NUMBERS] = own_numbers
        # Only the process that has a shard has other numbers than 0 in its place.
        gathered = [int(number) for number in self.group.largest(*numbers)]
        records: Records = {}
        for process in range(count):
            size, *digest = gathered[process * RECORD_NUMBERS : (process + 1) * RECORD_NUMBERS]
            if size:
                name = shard_file(folder, process).name
                records[name] = {"bytes": size, "sha256": bytes(digest).hex()}
        return records

    def check(self, about: dict[str, Any]) -> None:
        """Refuse a damaged checkpoint in all processes, each of which reads some of its shards.

        Earlier versions wrote no checksums.
        """
        folder = self.path / str(about["folder"])
        if "files" not in about:
            logger.warning("%s has no checksums: an earlier version wrote it", folder)
            return
        records = check_type(about["files"], Records, source=self.pointer)
        found = {file.name for file in folder.glob("*.safetensors")}
        names = sorted(found | records.keys())
        damaged = 0
        for number, name in enumerate(names[self.group.index :: self.group.count]):
            if name not in records or file_damage(folder / name, records[name]):
                damaged = max(damaged, 1 + self.group.index + number * self.group.count)
        damaged = int(self.group.largest(damaged)[0])
        if damaged:
            error = DamagedFile(folder / names[damaged - 1], DAMAGED_SHARD, advice=AFTER_DAMAGE)
            error.silent = not self.group.first
            raise error

    def point_to(self, folder: Path, about: dict[str, Any], records: Records) -> None:
        """Make a folder the last checkpoint; the one before it is kept."""
        for file in (*folder.iterdir(), folder):
            sync(file)
        before = self.about().get("folder") if self.pointer.exists() else None
        write_json(self.pointer, {**about, "folder": folder.name, "files": records})
        for old in self._folders():
            if old.name not in (folder.name, before):
                remove(old)
