"""A command is killed at each fsync and each rename: its target is old or new, and the command, run
again, makes the same as one that was never killed.
"""

import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaigns.arena import CPU, TRAIN, contents
from tests.processes import Finished, run_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

KILLED = """
import os, signal, sys
place = int(sys.argv.pop(1))
count = 0

def killing(call):
    def counted(*arguments, **options):
        global count
        if count == place:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        return call(*arguments, **options)
    return counted

for name in ("fsync", "rename", "replace"):
    setattr(os, name, killing(getattr(os, name)))
try:
    from dualkg.cli import main
    main()
finally:
    print("\\nsyncs and renames:", count)
"""
COMMANDS = {
    "train": (*TRAIN, "--out", "new"),
    "train, overwrite": (*TRAIN, "--seed", 5, "--out", "other", "--overwrite"),
    "resume": ("resume", "stopped", "--device", "cpu"),
    "calibrate": ("calibrate", "other", *CPU),
    "calibrate, overwrite": ("calibrate", "run", "--overwrite", "--coverage", 0.8, *CPU),
    "extend": ("extend", "run", "new-triples.tsv", "--out", "new", *CPU),
    "complete": ("complete", "run", "--top", 50, "--out", "new.tsv", *CPU),
    "predict": ("predict", "run", "--queries", "queries.tsv", "--out", "new.jsonl", *CPU),
    "ensemble": ("ensemble", "run", "other", "--out", "new", "--device", "cpu"),
    "export": ("export", "run", "--out", "new"),
}
# What a command replaces: a file, or the files of a folder.
REPLACED = {
    "train, overwrite": "other/",
    "resume": "stopped/",
    "calibrate, overwrite": "run/calibration",
}
DONE = re.compile("is finished|is a finished run|exists already|has a calibration already")
RESUME = re.compile(r"dualkg resume (\S+?)[,.]? ")
MAX_AGAIN = 3  # a command that is run again may say that it is to be resumed


@pytest.mark.parametrize("name", COMMANDS)
def test_a_kill_at_every_sync_and_rename_loses_nothing(name: str, good: Path, tmp_path: Path):
    here = tmp_path / "here"
    before = contents(good)
    shutil.copytree(good, here)
    ended = run_at(-1, here, COMMANDS[name])
    assert ended.code == 0, ended.err
    expected = contents(here)
    num_places = int(ended.out.rsplit(":", 1)[1])
    assert num_places > 1

    for place in range(num_places):
        shutil.rmtree(here)
        shutil.copytree(good, here)
        ended = run_at(place, here, COMMANDS[name])
        if ended.code != -signal.SIGKILL:  # a run of fewer writes, such as one without a checkpoint
            continue
        lost = [file for file in changed(before, contents(here)) if not is_replaced(name, file)]
        assert not lost, (place, lost)
        finish(COMMANDS[name], here)
        assert contents(here) == expected, place


def run_at(place: int, here: Path, words: tuple[object, ...]) -> Finished:
    return run_python(KILLED, place, *words, cwd=here, environment={"DUALKG_CACHE": str(here)})


def changed(before: dict[str, object], after: dict[str, object]) -> Iterator[str]:
    """Files that are not what they were."""
    return (file for file in before if after.get(file) != before[file])


def is_replaced(name: str, file: str) -> bool:
    target = REPLACED.get(name)
    return target is not None and file.startswith(target)


def finish(words: tuple[object, ...], here: Path) -> None:
    """Run a command again, or what it says resumes it, to its end."""
    for _ in range(MAX_AGAIN):
        ended = run_at(-1, here, words)
        text = " ".join(f"{ended.out} {ended.err} ".split()) + " "
        assert "Traceback" not in text, text
        if ended.code == 0 or DONE.search(text):
            return
        advice = RESUME.search(text)
        assert advice, text
        words = ("resume", advice[1], "--device", "cpu")
    pytest.fail("it cannot be finished")
