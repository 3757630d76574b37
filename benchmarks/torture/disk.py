"""A disk that forgets: file operations are recorded, and replayed up to any of them.

A write is on the disk for certain once its file is synced, a name once its folder is. Until then a
power cut may lose it: the data of a file (none, half or all of it is there), and names, in two
models. *Ordered*: the disk has all changes of names up to some moment since the last sync, as
journaling file systems have. *By folder*: each folder has its own such moment.
"""

import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from dualkg import files

CHANGES_OF_NAMES = ("rename", "replace", "link", "unlink", "mkdir", "rmdir")
Data = Literal["none", "half", "all"]
Entry = tuple[int, str]  # the inode of a folder, and a name in it
Tree = dict[str, bytes | None]  # path → data, or None for a folder


@dataclass
class File:
    """The data of a file: at each event at which it had changed, or was synced."""

    writes: list[tuple[int, bytes]] = field(default_factory=list)
    synced: list[int] = field(default_factory=list)

    def data_after(self, cut: int, data: Data, chance: random.Random) -> bytes:
        """What the disk may have after a cut, of what was not synced before it."""
        last_sync = last_before(cut, self.synced)
        safe = b""
        later = []
        for event, content in self.writes:
            if event < last_sync:
                safe = content
            elif event <= cut:
                later.append(content)
        if not later or data == "none":
            return safe
        if data == "all":
            return later[-1]
        return later[-1][: chance.randint(0, len(later[-1]))]


@dataclass(frozen=True)
class Change:
    """A change of names: entries that are added, with their inodes, or removed at once.

    A sync of `folder` makes all of it certain.
    """

    event: int
    folder: int
    added: dict[Entry, int]
    removed: tuple[Entry, ...]


def last_before(cut: int, events: Iterable[int]) -> int:
    """The last of some events up to a cut, 0 without one."""
    return max((event for event in events if event <= cut), default=0)


class Recorder:
    """Records changes to files below a folder, by Python's functions and by looking before each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[int, File] = {}
        self.folders: dict[int, list[int]] = {}  # the events at which a folder was synced
        self.changes: list[Change] = []
        self.names: dict[Entry, int] = {}
        self.stamps: dict[int, tuple[int, int]] = {}
        self.event = 0
        self.pinned: list[int] = []  # descriptors, so that no inode number is used again
        self.look()
        self.event += 1
        for file in self.files.values():
            file.synced.append(self.event)
        for syncs in self.folders.values():
            syncs.append(self.event)
        self.start = self.event

    # -- recording ------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        try:
            with ExitStack() as patches:
                for name in CHANGES_OF_NAMES:
                    call = self._recorded(getattr(os, name))
                    patches.enter_context(patch.object(os, name, call))
                exchange = self._recorded(files.writes._exchange_names)
                patches.enter_context(patch.object(files.writes, "_exchange_names", exchange))
                patches.enter_context(patch.object(os, "fsync", self._synced(os.fsync)))
                yield
        finally:
            self.look()
            for descriptor in self.pinned:
                os.close(descriptor)

    def _recorded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: self.operation(call, *arguments, **options)

    def _synced(self, call: Callable[[int], None]) -> Callable[[int], None]:
        return lambda descriptor: self.sync(call, descriptor)

    def look(self) -> None:
        """Note new names and data: libraries write files without asking Python."""
        names: dict[Entry, int] = {}
        for place, folders, file_names in os.walk(self.root):
            folder = Path(place).stat().st_ino
            if folder not in self.folders:
                self.pinned.append(os.open(place, os.O_RDONLY))
                self.folders[folder] = []
            for name in folders:
                names[folder, name] = Path(place, name).stat().st_ino
            for name in file_names:
                names[folder, name] = self._look_at(Path(place, name))
        for entry, inode in names.items():
            if self.names.get(entry) != inode:
                self._change(entry[0], added={entry: inode})
        for entry in self.names.keys() - names.keys():
            self._change(entry[0], removed=(entry,))
        self.names = names

    def _look_at(self, path: Path) -> int:
        """Note the data of a file that has changed, and return its inode."""
        stat = path.stat()
        inode = stat.st_ino
        stamp = (stat.st_size, stat.st_mtime_ns)
        if self.stamps.get(inode) == stamp:
            return inode
        if inode not in self.files:
            self.pinned.append(os.open(path, os.O_RDONLY))
            self.files[inode] = File()
        self.stamps[inode] = stamp
        self.files[inode].writes.append((self.event, path.read_bytes()))
        return inode

    def _change(
        self, folder: int, *, added: dict[Entry, int] | None = None, removed: tuple[Entry, ...] = ()
    ) -> None:
        self.event += 1
        self.changes.append(Change(self.event, folder, added or {}, removed))

    def operation(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Do something, and note all changes of names that it made as one."""
        self.look()
        names_before = self.names
        num_changes = len(self.changes)
        result = call(*arguments, **options)
        self.look()
        parts = self.changes[num_changes:]
        if not parts:
            return result
        added: dict[Entry, int] = {}
        for part in parts:
            added |= part.added
        removed = tuple(entry for entry in names_before if entry not in self.names)
        folders = [folder for folder, _ in added]
        folder = folders[0] if folders else parts[0].folder
        self.changes[num_changes:] = [Change(self.event, folder, added, removed)]
        return result

    def sync(self, call: Callable[[int], None], descriptor: int) -> None:
        self.look()
        call(descriptor)
        self.event += 1
        inode = os.fstat(descriptor).st_ino
        if inode in self.files:
            self.files[inode].synced.append(self.event)
        elif inode in self.folders:
            self.folders[inode].append(self.event)

    # -- after a cut ----------------------------------------------------------

    def state(self, cut: int, chance: random.Random, *, by_folder: bool, data: Data) -> Tree:
        """A tree that may be on the disk after a cut."""
        entries = self._entries(cut, chance, by_folder=by_folder)
        tree: Tree = {}

        def walk(folder: int, place: str) -> None:
            for (parent, name), inode in entries.items():
                if parent != folder:
                    continue
                path = f"{place}{name}"
                if inode in self.folders:
                    tree[path] = None
                    walk(inode, f"{path}/")
                else:
                    tree[path] = self.files[inode].data_after(cut, data, chance)

        walk(self.root.stat().st_ino, "")
        return tree

    def _entries(self, cut: int, chance: random.Random, *, by_folder: bool) -> dict[Entry, int]:
        """The names that the disk has: all up to a moment between the last sync and the cut."""
        syncs = [*self.folders.values(), *(file.synced for file in self.files.values())]
        last_sync = max(last_before(cut, events) for events in syncs)
        moment = chance.randint(last_sync, cut)
        moments = {}
        for folder, events in self.folders.items():
            moments[folder] = chance.randint(last_before(cut, events), cut)

        entries: dict[Entry, int] = {}
        for change in self.changes:
            if change.event > (moments[change.folder] if by_folder else moment):
                continue
            for entry in change.removed:
                entries.pop(entry, None)
            entries |= change.added
        return entries
