"""A failing disk: full, read-only, or with an error at any write, sync or rename of a command.

A C shim that is loaded before the C library fails one call, or all from one call on, below a
folder. A case fails if the command ends in a traceback, in a message without the name of a file, or
damages what was there before; or if the command does not succeed when it is run again with a good
disk. It needs Linux and a C compiler.
"""

import contextlib
import ctypes
import errno
import hashlib
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.torture.common import ON_CPU, TRACEBACK, failure, rounds, write_triples
from benchmarks.torture.inputs import run_command

SECONDS = 60  # of a case
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
enum { WRITE = 1, SYNC = 2, NAME = 4, RENAME = 8, REMOVE = 16 };
static char home[4096];
static long seen, first, counts[5];
static int number, kinds, sticky, armed;
void fault_arm(const char *folder, int which, long place, int code, int all_later) {
    strncpy(home, folder, sizeof home - 1);
    kinds = which; first = place; number = code; sticky = all_later; seen = 0; armed = 1;
}
long fault_disarm(void) { armed = 0; return seen; }
long fault_count(int bit) { return counts[bit]; }
static int fails(const char *path, int kind) {
    if (!armed || strncmp(path, home, strlen(home))) return 0;
    for (int bit = 0; bit < 5; bit++) if (kind >> bit & 1) __sync_fetch_and_add(&counts[bit], 1);
    if (!(kinds & kind)) return 0;
    long place = __sync_fetch_and_add(&seen, 1);
    if (first < 0 || place < first || (place > first && !sticky)) return 0;
    if (number < 0) kill(getpid(), -number);
    errno = number;
    return 1;
}
static int fails_fd(int fd, int kind) {
    if (!armed) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(path, kind);
}
static int fails_at(int folder, const char *path, int kind) {
    if (!armed) return 0;
    if (path[0] == '/') return fails(path, kind);
    char full[8192], link[64];
    if (folder == AT_FDCWD) { if (!getcwd(full, 4096)) return 0; }
    else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, full, 4095);
        if (length < 0) return 0;
        full[length] = 0;
    }
    strcat(full, "/");
    strncat(full, path, 4000);
    return fails(full, kind);
}
#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, #name)
#define BY_FD(type, name, kind, args, ...) type name args { \
    REAL(type, name, __VA_ARGS__); if (fails_fd(fd, kind)) return -1; return real
BY_FD(ssize_t, write, WRITE, (int fd, const void *a, size_t n), int, const void *, size_t)(fd, a, n); }
BY_FD(ssize_t, pwrite, WRITE, (int fd, const void *a, size_t n, off_t o), int, const void *, size_t, off_t)
    (fd, a, n, o); }
BY_FD(ssize_t, pwrite64, WRITE, (int fd, const void *a, size_t n, off_t o), int, const void *, size_t, off_t)
    (fd, a, n, o); }
BY_FD(ssize_t, writev, WRITE, (int fd, const struct iovec *a, int n), int, const struct iovec *, int)(fd, a, n); }
BY_FD(int, ftruncate, WRITE, (int fd, off_t n), int, off_t)(fd, n); }
BY_FD(int, ftruncate64, WRITE, (int fd, off_t n), int, off_t)(fd, n); }
BY_FD(int, fsync, SYNC, (int fd), int)(fd); }
BY_FD(int, fdatasync, SYNC, (int fd), int)(fd); }
size_t fwrite(const void *a, size_t size, size_t n, FILE *file) {
    REAL(size_t, fwrite, const void *, size_t, size_t, FILE *);
    return fails_fd(fileno(file), WRITE) ? 0 : real(a, size, n, file);
}
#define BY_NAME(name, kind, args, path, at, ...) int name args { \
    REAL(int, name, __VA_ARGS__); if (fails_at(at, path, kind)) return -1; return real
BY_NAME(rename, NAME | RENAME, (const char *a, const char *b), b, AT_FDCWD, const char *, const char *)(a, b); }
BY_NAME(renameat, NAME | RENAME, (int d, const char *a, int e, const char *b), b, e, int, const char *, int,
        const char *)(d, a, e, b); }
BY_NAME(renameat2, NAME | RENAME, (int d, const char *a, int e, const char *b, unsigned f), b, e, int, const char *,
        int, const char *, unsigned)(d, a, e, b, f); }
BY_NAME(link, NAME, (const char *a, const char *b), b, AT_FDCWD, const char *, const char *)(a, b); }
BY_NAME(linkat, NAME, (int d, const char *a, int e, const char *b, int f), b, e, int, const char *, int, const char *,
        int)(d, a, e, b, f); }
BY_NAME(mkdir, NAME, (const char *a, mode_t m), a, AT_FDCWD, const char *, mode_t)(a, m); }
BY_NAME(mkdirat, NAME, (int d, const char *a, mode_t m), a, d, int, const char *, mode_t)(d, a, m); }
BY_NAME(unlink, REMOVE, (const char *a), a, AT_FDCWD, const char *)(a); }
BY_NAME(unlinkat, REMOVE, (int d, const char *a, int f), a, d, int, const char *, int)(d, a, f); }
BY_NAME(rmdir, REMOVE, (const char *a), a, AT_FDCWD, const char *)(a); }
#define OPEN(name, args, at, path, call, ...) int name args { \
    REAL(int, name, __VA_ARGS__); mode_t mode = 0; \
    va_list rest; va_start(rest, flags); if (flags & (O_CREAT | O_TMPFILE)) mode = va_arg(rest, mode_t); va_end(rest); \
    if ((flags & (O_CREAT | O_WRONLY | O_RDWR)) && fails_at(at, path, NAME)) return -1; return real call; }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path, (path, flags, mode), const char *, int, ...)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path, (path, flags, mode), const char *, int, ...)
OPEN(openat, (int d, const char *path, int flags, ...), d, path, (d, path, flags, mode), int, const char *, int, ...)
OPEN(openat64, (int d, const char *path, int flags, ...), d, path, (d, path, flags, mode), int, const char *, int, ...)
"""
WRITE = 1
SYNC = 2
NAME = 4
RENAME = 8
REMOVE = 16
# The kinds of calls that fail, the error, and whether all later ones fail, too. Nothing can be
# written from the first call on where the disk is read-only.
FAULTS = {
    "full": (WRITE | NAME, errno.ENOSPC, True),
    "quota": (WRITE, errno.EDQUOT, True),
    "error at one write": (WRITE, errno.EIO, False),
    "error at one sync": (SYNC, errno.EIO, False),
    "error at one name": (NAME, errno.EIO, False),
    "errors from one call on": (WRITE | SYNC | NAME, errno.EIO, True),
    "read-only": (WRITE | NAME, errno.EROFS, True),
}
SMALL = ["--no-tune", "--epochs", "2", "--dim", "2"]
COMMANDS = {
    "train": ["train", "graph.tsv", *SMALL, "--out", "new"],
    "overwrite": ["train", "graph.tsv", *SMALL, "--out", "run", "--overwrite"],
    "resume": ["resume", "stopped"],
    "calibrate": ["calibrate", "run", "--overwrite"],
    "complete": ["complete", "run", "--out", "new.tsv"],
    "complete parquet": ["complete", "run", "--out", "new.parquet"],
    "predict": ["predict", "run", "--queries", "queries.tsv", "--out", "new.jsonl"],
    "extend": ["extend", "run", "extension.tsv", "--out", "new"],
    "index": ["index", "run", "--kind", "exact", "--out", "new"],
    "index ivf": ["index", "run", "--kind", "ivf", "--recall", "0.1", "--out", "new"],
    "export": ["export", "run", "--out", "new"],
    "export safetensors": ["export", "run", "--format", "safetensors", "--out", "new"],
    "export tsv": ["export", "run", "--format", "tsv", "--out", "new"],
    "sparsify": ["sparsify", "run", "--share", "0.5", "--out", "new"],
    "ensemble": ["ensemble", "run", "run", "--weights", "equal", "--out", "new"],
}
REPLACED = {
    "calibrate": ["calibration.json"],
    "overwrite": None,
    "resume": None,
}  # files of `run` that may change


def compile_shim(folder: Path) -> Path:
    source = folder / "shim.c"
    library = folder / "shim.so"
    source.write_text(SHIM)
    command = ["cc", "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library


def load_shim(library: str) -> Any:
    """The functions of the shim, in a process that was started with it; a negative code is a
    signal.
    """
    shim: Any = ctypes.CDLL(library)
    shim.fault_arm.argtypes = [
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_long,
        ctypes.c_int,
        ctypes.c_int,
    ]
    shim.fault_disarm.restype = shim.fault_count.restype = ctypes.c_long
    return shim


def make_good(good: Path) -> None:
    """A graph, a run with calibration, one that was interrupted, queries, and triples of a new
    entity.
    """
    import dualkg as kg

    good.mkdir()
    write_triples(good / "graph.tsv")
    (good / "queries.tsv").write_text("thing1\tcolour\t?\n")
    (good / "extension.tsv").write_text("new\tcolour\tcolour1\nnew\tshape\tshape2\n")
    changes = {
        "data.graph": str(good / "graph.tsv"),
        "model.dim": 2,
        "training.epochs": 2,
        "training.batch_size": 64,
    }
    recipe = kg.Recipe().with_changes(
        {**changes, "regularizer.name": "DURA", "regularizer.weight": 0.05}
    )
    kg.calibrate(kg.train_recipe(recipe, out=good / "run"))

    def stop(event: Any) -> None:
        if event.epoch == 2:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        slow = recipe.with_changes({"training.checkpoint_seconds": 0.0})
        kg.train_recipe(slow, out=good / "stopped", on_progress=stop)


def hashes(folder: Path) -> dict[str, str]:
    files = [one for one in folder.rglob("*") if one.is_file() and not one.name.endswith(".lock")]
    return {
        str(one.relative_to(folder)): hashlib.sha256(one.read_bytes()).hexdigest() for one in files
    }


def run_case(
    shim: Any, here: Path, name: str, fault: str, draw: random.Random, counts: dict[Any, int]
) -> tuple[str, str | None]:
    """Fail one call of a command, or all from one on; return how it ended and what is wrong with
    that.
    """
    outcome = ["not reached"]
    problem = _run_case(shim, here, name, fault, draw, counts, outcome)
    return outcome[-1], problem


def made_files(here: Path) -> dict[str, str]:
    """What a command made, but for files with times in them."""
    return {
        name: sha
        for name, sha in hashes(here).items()
        if name.startswith("new") and not name.endswith(".json")
    }


def _run_case(
    shim: Any,
    here: Path,
    name: str,
    fault: str,
    draw: random.Random,
    counts: dict[Any, Any],
    outcome: list[str],
) -> str | None:
    words, (kinds, code, sticky) = COMMANDS[name], FAULTS[fault]
    good = here.with_name("good")

    def fresh() -> None:
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(good, here)
        os.chdir(here)

    if (name, kinds) not in counts:
        fresh()
        shim.fault_arm(os.fsencode(here), kinds, -1, 0, 0)
        ended, text = run_command(words)
        counts[name, kinds], counts[name] = shim.fault_disarm(), made_files(here)
        if ended:
            return f"it fails on a good disk: {text[-300:]}"
    place = 0 if fault == "read-only" else draw.randrange(max(1, counts[name, kinds]))
    fresh()
    before = hashes(here)
    shim.fault_arm(os.fsencode(here), kinds, place, code, int(sticky))
    try:
        ended, text = run_command(words)
    finally:
        seen = shim.fault_disarm()
    what = f"at call {place} of {counts[name, kinds]}"
    if seen > place:
        outcome.append("refused with a sentence" if ended else "done all the same")
    if ended not in (0, 1, 2) or TRACEBACK in text:
        return f"{what}: status {ended}: {text[-800:]}"
    after = hashes(here)
    if ended and seen > place:
        last = text.strip().splitlines()[-1] if text.strip() else ""
        named = re.findall(
            r"[\w./-]*(?:run|stopped|new|\.lock)[\w./-]*", last.partition("dualkg: ")[2]
        )
        if not named:
            return f"{what}: a message without the name of a file: {last[-300:]}"
    changed = [file for file, sha in before.items() if after.get(file) != sha]
    allowed = REPLACED.get(name, [])
    if allowed is not None and (
        bad := [file for file in changed if Path(file).name not in allowed]
    ):
        return f"{what}: {', '.join(bad)} changed, and the command ended with {ended}"
    if (
        ended
        and fault != "read-only"
        and not sticky
        and (stray := [file for file in after if ".tmp" in file])
    ):
        return f"{what}: {', '.join(stray[:3])} was left"
    folder = {"overwrite": "run", "resume": "stopped"}.get(name, "run")
    made = name.startswith(("complete", "predict", "export"))
    if ended == 0 and made and made_files(here) != counts[name]:
        return f"{what}: it ended with 0, and its files are not those of a good disk"
    if ended == 0 or name == "overwrite":
        checked, report = run_command(
            ["check", "new" if name == "train" and ended == 0 else folder]
        )
        if checked and not (name == "overwrite" and "dualkg resume" in report):
            return f"{what}: damaged after status {ended}: {report[-300:]}"
    if ended and (again := _repeat(name, words)):
        return f"{what}: {again}"
    return None


def _repeat(name: str, words: list[str]) -> str | None:
    """Run the command again with a good disk, or resume what it began."""
    if (
        name in ("train", "overwrite")
        and Path(words[words.index("--out") + 1], "checkpoint.safetensors").exists()
    ):
        words = ["resume", words[words.index("--out") + 1]]
    ended, text = run_command(words)
    if name == "resume" and "is finished" in text:
        return None
    return f"run again, it ended with {ended}: {text[-300:]}" if ended else None


def worker(pipe: Connection, home: str, library: str) -> None:
    """Run cases, (command, fault, seed) each, in a process with the shim."""
    os.environ |= {"DUALKG_CACHE": str(Path(home) / "cache"), "COLUMNS": "200", **ON_CPU}
    os.environ.pop("DUALKG_DATA", None)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    import torch

    torch.set_num_threads(1)
    shim = load_shim(library)
    if not Path(home, "good").exists():
        make_good(Path(home, "good"))
    counts: dict[Any, int] = {}
    pipe.send("ready")
    while (case := pipe.recv()) is not None:
        name, fault, seed = case
        try:
            pipe.send(run_case(shim, Path(home, "here"), name, fault, random.Random(seed), counts))
        except Exception as error:  # of the campaign itself
            pipe.send(("none", f"the campaign failed: {type(error).__name__}: {error}"))


def start(home: str, library: Path) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    before = os.environ.get("LD_PRELOAD")
    os.environ["LD_PRELOAD"] = str(library)
    try:
        process = context.Process(target=worker, args=(theirs, home, str(library)), daemon=True)
        process.start()
    finally:
        os.environ.pop("LD_PRELOAD")
        if before is not None:
            os.environ["LD_PRELOAD"] = before
    theirs.close()
    if not ours.poll(300) or ours.recv() != "ready":
        raise RuntimeError("the worker did not start")
    return process, ours


def campaign(*, minutes: float, seed: int) -> dict[str, Any]:
    """Fail calls of all commands in turn; the figures are the number of cases by fault and by
    command.
    """
    by_fault = Counter[str]()
    by_command = Counter[str]()
    failures = list[dict[str, Any]]()
    outcomes = Counter[str]()
    pairs = [(name, fault) for name in COMMANDS for fault in FAULTS]
    random.Random(seed).shuffle(pairs)
    with tempfile.TemporaryDirectory(prefix="dualkg-faults-") as home:
        try:
            library = compile_shim(Path(home))
        except (OSError, subprocess.CalledProcessError) as error:
            return {"cases": 0, "skipped": f"there is no C compiler ({error})", "failures": []}
        process, pipe = start(home, library)
        try:
            for number in rounds(minutes):
                name, fault = pairs[number % len(pairs)]
                by_fault[fault] += 1
                by_command[name] += 1
                try:
                    pipe.send((name, fault, f"{seed}-{number}"))
                    late = ("none", f"longer than {SECONDS} seconds")
                    outcome, problem = pipe.recv() if pipe.poll(SECONDS) else late
                except EOFError:
                    outcome = "none"
                    problem = "the process ended"
                outcomes[f"{fault}: {outcome}"] += 1
                if problem:
                    failures.append(
                        failure("faults", number=number, command=name, fault=fault, problem=problem)
                    )
                if problem and ("seconds" in problem or "process ended" in problem):
                    process.kill()
                    process.join()
                    process, pipe = start(home, library)
        finally:
            process.kill()
            process.join()
    figures = {"by_fault": by_fault, "by_command": by_command, "outcomes": outcomes}
    return {"cases": by_fault.total(), **figures, "failures": failures}
