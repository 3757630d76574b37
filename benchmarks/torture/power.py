"""Power cuts: file operations are recorded and replayed up to any of them, on a disk that forgets.

A write is on the disk for certain once its file is synced, a name once its folder is. Until then a
cut may lose it: the data of a file (none, half or all of it is there), and names, in two models.
*Ordered*: the disk has all changes of names up to some moment since the last sync, as journaling
file systems have. *By folder*: each folder has its own such moment. Every state must open as the
old or the new one; an unfinished run must resume to the same weights.
"""

import hashlib
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.torture.common import failure, in_process, load_program, rounds, write_triples
from dualkg import files

SETTINGS = (
    "--no-tune",
    "--dim",
    4,
    "--epochs",
    2,
    "--batch-size",
    50,
    "--engine",
    "reference",
    "--device",
    "cpu",
)

# -- recording ----------------------------------------------------------------


@dataclass
class File:
    """The data of a file: at each event at which it had changed, or was synced."""

    writes: list[tuple[int, bytes]] = field(default_factory=list)
    synced: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Change:
    """A change of names: entries (folder, name, inode) that are added or removed at once.

    A sync of `folder` makes all of it certain.
    """

    event: int
    folder: int
    added: tuple[tuple[int, str, int], ...]
    removed: tuple[tuple[int, str], ...]


class Recorder:
    """Records changes to files below a folder, by Python's functions and by looking before each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[int, File] = {}
        self.folders: dict[int, list[int]] = {}  # the events at which a folder was synced
        self.changes: list[Change] = []
        self.names: dict[tuple[int, str], int] = {}
        self.stamps: dict[int, tuple[int, int]] = {}
        self.event = 0
        self.pinned: list[int] = []  # descriptors, so that no inode number is used again
        self.look()
        self.event += 1
        for file in self.files.values():
            file.synced.append(self.event)
        for folder in self.folders:
            self.folders[folder].append(self.event)
        self.start = self.event

    def look(self) -> None:
        """Note new names and data: libraries write files without asking Python."""
        found: dict[tuple[int, str], int] = {}
        for folder, inner, names in os.walk(self.root):
            inode = Path(folder).stat().st_ino
            if inode not in self.folders:
                self.pinned.append(os.open(folder, os.O_RDONLY))
                self.folders[inode] = []
            for name in (*inner, *names):
                path = Path(folder, name)
                stat = path.stat()
                found[inode, name] = stat.st_ino
                stamp = stat.st_size, stat.st_mtime_ns
                if name in names and self.stamps.get(stat.st_ino) != stamp:
                    if stat.st_ino not in self.files:
                        self.pinned.append(os.open(path, os.O_RDONLY))
                    self.stamps[stat.st_ino] = stamp
                    self.files.setdefault(stat.st_ino, File()).writes.append(
                        (self.event, path.read_bytes())
                    )
        for key, inode in found.items():
            if self.names.get(key) != inode:
                self._change(key[0], added=((*key, inode),))
        for key in self.names.keys() - found.keys():
            self._change(key[0], removed=(key,))
        self.names = found

    def _change(self, folder: int, *, added: Any = (), removed: Any = ()) -> None:
        self.event += 1
        self.changes.append(Change(self.event, folder, tuple(added), tuple(removed)))

    def operation(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Do something, and note all changes of names that it made as one."""
        self.look()
        before = self.names
        answer = call(*arguments, **options)
        count = len(self.changes)
        self.look()
        if len(self.changes) > count:
            parts = self.changes[count:]
            self.changes = self.changes[:count]
            added = tuple(one for part in parts for one in part.added)
            folder = added[0][0] if added else parts[0].folder
            removed = tuple(key for key in before if key not in self.names)
            self.changes.append(Change(self.event, folder, added, removed))
        return answer

    def sync(self, call: Callable[[int], None], descriptor: int) -> None:
        self.look()
        call(descriptor)
        self.event += 1
        inode = os.fstat(descriptor).st_ino
        if inode in self.files:
            self.files[inode].synced.append(self.event)
        elif inode in self.folders:
            self.folders[inode].append(self.event)

    @contextmanager
    def recording(self) -> Iterator[None]:
        renames = ("rename", "replace", "link", "unlink", "mkdir", "rmdir")
        originals = {name: getattr(os, name) for name in (*renames, "fsync")}

        def recorded(name: str) -> Callable[..., Any]:
            return lambda *arguments, **options: self.operation(
                originals[name], *arguments, **options
            )

        exchange = files._exchange_names
        patches = [patch.object(os, name, recorded(name)) for name in renames]
        patches.append(
            patch.object(os, "fsync", lambda descriptor: self.sync(originals["fsync"], descriptor))
        )
        patches.append(
            patch.object(files, "_exchange_names", lambda *names: self.operation(exchange, *names))
        )
        for one in patches:
            one.start()
        try:
            yield
        finally:
            for one in patches:
                one.stop()
            self.look()
            for descriptor in self.pinned:
                os.close(descriptor)

    def state(
        self, cut: int, chance: random.Random, *, by_folder: bool, data: str
    ) -> dict[str, bytes | None]:
        """A tree that may be on the disk after a cut: path → data, or None for a folder."""

        def last(events: list[int]) -> int:
            return max((event for event in events if event <= cut), default=0)

        syncs = [*self.folders.values(), *(file.synced for file in self.files.values())]
        moment = chance.randint(max(map(last, syncs)), cut)
        moments = {
            inode: chance.randint(last(events), cut) for inode, events in self.folders.items()
        }
        entries: dict[tuple[int, str], int] = {}
        for change in self.changes:
            if change.event <= (moments[change.folder] if by_folder else moment):
                for key in change.removed:
                    entries.pop(key, None)
                entries |= {(folder, name): inode for folder, name, inode in change.added}
        tree: dict[str, bytes | None] = {}

        def walk(folder: int, place: str) -> None:
            for (parent, name), inode in entries.items():
                if parent != folder:
                    continue
                if inode in self.folders:
                    tree[f"{place}{name}"] = None
                    walk(inode, f"{place}{name}/")
                else:
                    tree[f"{place}{name}"] = self._data(
                        inode, cut, last(self.files[inode].synced), chance, data
                    )

        walk(self.root.stat().st_ino, "")
        return tree

    def _data(self, inode: int, cut: int, synced: int, chance: random.Random, data: str) -> bytes:
        writes = [(event, content) for event, content in self.files[inode].writes if event <= cut]
        safe = [content for event, content in writes if event < synced]
        later = [content for event, content in writes if event >= synced]
        if not later or data == "all":
            return writes[-1][1] if writes else b""
        if data == "none":
            return safe[-1] if safe else b""
        return later[-1][: chance.randint(0, len(later[-1]))]


# -- scenarios: what happens, and what opens afterwards ----------------------


@dataclass
class Scenario:
    """The commands before, those that are recorded, and a function that names the outcome."""

    before: list[tuple[object, ...]]
    recorded: list[tuple[object, ...]]
    outcome: Callable[[Path], str]
    exchange: bool = True


def run_outcome(path: Path) -> str:
    """The weights of `run`, resumed if it is not finished."""
    from safetensors.numpy import load_file

    from dualkg.training.ensemble import load_run
    from dualkg.training.run import RunFolder

    folder = RunFolder(path / "run")
    files.recover(folder.path)
    if not folder.path.exists() or not files.contents(folder.path):
        return "nothing"
    if not folder.finished:
        _command(path, ("resume", "run", "--device", "cpu"))
    load_run(folder.path)
    damage = folder.damage()
    if damage:
        raise ValueError(f"damaged: {damage}")
    with files.locked(folder.path):
        pass
    hidden = [file.name for file in (*path.glob(".*"), *folder.path.glob(".*"))]
    if hidden:
        raise ValueError(f"left: {hidden}")
    tables = load_file(folder.weights)
    content = b"".join(tables[name].tobytes() for name in sorted(tables))
    return hashlib.sha256(content).hexdigest()[:12]


def calibration_outcome(path: Path) -> str:
    from dualkg.inference.calibration import load_calibration
    from dualkg.training.ensemble import load_run

    run = load_run(path / "run")
    if not (path / "run" / "calibration.json").exists():
        return "nothing"
    return str(load_calibration(path / "run", run.graph).calibration.as_dict())


def file_outcome(name: str) -> Callable[[Path], str]:
    """Either no file or folder, or a whole one."""

    def outcome(path: Path) -> str:
        files.recover(path / name)
        if not (path / name).exists():
            return "nothing"
        parts = [path / name] if (path / name).is_file() else sorted((path / name).rglob("*"))
        content = b"".join(
            part.name.encode() + part.read_bytes() for part in parts if part.is_file()
        )
        return hashlib.sha256(content).hexdigest()[:12]

    return outcome


def train(seed: int, *more: object) -> tuple[object, ...]:
    return ("train", "mine.tsv", *SETTINGS, "--seed", seed, "--out", "run", *more)


SCENARIOS = {
    "train": Scenario([], [train(0)], run_outcome),
    "train, checkpoints": Scenario(
        [], [train(0, "--set", "training.checkpoint_seconds=0")], run_outcome
    ),
    "overwrite": Scenario([train(0)], [train(1, "--overwrite")], run_outcome),
    "overwrite by two renames": Scenario(
        [train(0)], [train(1, "--overwrite")], run_outcome, exchange=False
    ),
    "fill an empty folder": Scenario([("mkdir", "run")], [train(0)], run_outcome),
    "resume": Scenario(
        [train(0), ("unlink", "run/report.json")],
        [("resume", "run", "--device", "cpu")],
        run_outcome,
    ),
    "calibrate": Scenario(
        [train(0)], [("calibrate", "run", "--device", "cpu")], calibration_outcome
    ),
    "extend": Scenario(
        [("train", "mine.tsv", *SETTINGS, "--out", "base")],
        [("extend", "base", "new.tsv", "--out", "run", "--device", "cpu")],
        run_outcome,
    ),
    "export": Scenario([train(0)], [("export", "run", "--out", "tables")], file_outcome("tables")),
    "complete": Scenario(
        [train(0), ("calibrate", "run", "--device", "cpu")],
        [("complete", "run", "--top", 20, "--out", "list.tsv", "--device", "cpu")],
        file_outcome("list.tsv"),
    ),
    "index": Scenario(
        [train(0)], [("index", "run", "--kind", "exact", "--out", "index")], file_outcome("index")
    ),
}


def _command(home: Path, words: tuple[object, ...]) -> None:
    if words[0] in ("mkdir", "unlink"):
        getattr(home / str(words[1]), str(words[0]))()
        return
    here = Path.cwd()
    output = StringIO()
    os.chdir(home)
    try:
        with redirect_stdout(output), redirect_stderr(output):
            status = in_process([str(word) for word in words])
    finally:
        os.chdir(here)
    if status:
        raise ValueError(f"{words[:2]} ended with {status}: {output.getvalue()[-500:]}")


def record(scenario: Scenario, home: Path) -> tuple[Recorder, set[str]]:
    """Run a scenario; return its record and the outcomes that are allowed: before and after it."""
    write_triples(home / "mine.tsv")
    (home / "new.tsv").write_text("newcomer\tcolour\tcolour1\n", encoding="utf-8")
    for words in scenario.before:
        _command(home, words)
    with tempfile.TemporaryDirectory() as copy:
        allowed = {scenario.outcome(Path(shutil.copytree(home, copy, dirs_exist_ok=True)))}
    recorder = Recorder(home)
    exchange = files._exchange_names if scenario.exchange else lambda *names: False
    with patch.object(files, "_exchange_names", exchange), recorder.recording():
        for words in scenario.recorded:
            _command(home, words)
    return recorder, allowed | {scenario.outcome(home)}


def campaign(*, minutes: float, seed: int) -> dict[str, Any]:
    """Try cuts of each scenario in random order, all of them or for its share of the time."""
    load_program()
    end = time.monotonic() + 60 * minutes
    chance = random.Random(seed)
    failures = []
    counts = Counter[str]()
    scenarios = {}
    variants = [
        (by_folder, data) for by_folder in (False, True) for data in ("none", "half", "all")
    ]
    # Short scenarios come first, and leave their time to others.
    for left, (name, scenario) in zip(
        range(len(SCENARIOS), 0, -1), reversed(SCENARIOS.items()), strict=True
    ):
        with tempfile.TemporaryDirectory() as folder:
            recorder, allowed = record(scenario, Path(folder))
            seen: dict[int, str] = {}
            cuts = list(range(recorder.start, recorder.event + 1))
            chance.shuffle(cuts)
            for number in rounds((end - time.monotonic()) / 60 / left, most=len(cuts)):
                for by_folder, data in variants:
                    tree = recorder.state(cuts[number], chance, by_folder=by_folder, data=data)
                    key = hash(tuple(sorted(tree.items())))
                    if key not in seen:
                        seen[key] = _open(tree, scenario)
                    if seen[key] not in allowed:
                        about = {
                            "cut": cuts[number] - recorder.start,
                            "by_folder": by_folder,
                            "data": data,
                        }
                        about |= {
                            "scenario": name,
                            "outcome": seen[key],
                            "files": sorted(tree),
                            "seed": seed,
                        }
                        failures.append(failure("power", **about))
            scenarios[name] = {
                "events": len(cuts),
                "cuts": number + 1,
                "different_states": len(seen),
            }
        counts.update(scenarios[name])
        counts["states"] += (number + 1) * len(variants)
    return {**counts, "by_scenario": scenarios, "failures": failures}


def _open(tree: dict[str, bytes | None], scenario: Scenario) -> str:
    """The outcome of a tree on a disk of its own, or the error."""
    with tempfile.TemporaryDirectory() as folder:
        for place, content in tree.items():
            if content is None:
                Path(folder, place).mkdir()
            else:
                Path(folder, place).write_bytes(content)
        try:
            return scenario.outcome(Path(folder))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
