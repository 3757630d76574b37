"""Two processes write one target at the same time: it is what one of them wrote, and the other says
why it did not.
"""

import shutil
from pathlib import Path

import pytest

import dualkg as kg
from tests.campaigns.arena import CPU, TRAIN, content, contents
from tests.processes import COMMAND, Started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROUNDS = 5
SEEDS = (3, 4)
REFUSALS = (
    "is being written by",
    "exists already",
    "is finished",
    "is a finished run",
    "was replaced after it was loaded",
    "is not finished",
    "is in training",
    "which would be lost",
)


@pytest.fixture(scope="module")
def good(good: Path) -> Path:
    """The runs, and what each seed makes: `seed-3`, `seed-4`."""
    for seed in SEEDS:
        race(good, [(*TRAIN, "--seed", seed, "--out", f"seed-{seed}")])
    return good


def race(home: Path, commands: list[tuple[object, ...]]) -> list[str]:
    """Start commands together; return what those that did not succeed said."""
    started = [Started(COMMAND, *words, cwd=home) for words in commands]
    refused = []
    for process in started:
        with process:
            ended = process.finish()
        if ended.code:
            text = " ".join((ended.out + ended.err).split())
            assert "Traceback" not in text, text
            assert any(sentence in text for sentence in REFUSALS), text
            refused.append(text)
    return refused


@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_two_trainings_of_one_run(good: Path, tmp_path: Path, options: tuple[str, ...]):
    expected = [content(good / f"seed-{seed}" / "weights.safetensors") for seed in SEEDS]
    for number in range(ROUNDS):
        here = tmp_path / str(number)
        shutil.copytree(good, here)
        target = "other" if options else "new"
        lines = [(*TRAIN, "--seed", seed, "--out", target, *options) for seed in SEEDS]
        refused = race(here, lines)
        assert len(refused) == 1 or (options and not refused)
        assert content(here / target / "weights.safetensors") in expected
        kg.load_run(here / target)
        assert left(here) == []


def test_two_lists_of_new_facts(good: Path, tmp_path: Path):
    line = ("complete", "run", "--top", 20, "--out", "new.tsv", *CPU)
    for number in range(ROUNDS):
        here = tmp_path / str(number)
        shutil.copytree(good, here)
        assert len(race(here, [line, line])) == 1
        assert len((here / "new.tsv").read_text(encoding="utf-8").splitlines()) == 21
        assert left(here) == []


def test_a_calibration_belongs_to_the_weights_beside_it(good: Path, tmp_path: Path):
    lines = [
        ("calibrate", "run", "--overwrite", *CPU),
        (*TRAIN, "--seed", SEEDS[0], "--out", "run", "--overwrite"),
    ]
    for number in range(ROUNDS):
        here = tmp_path / str(number)
        shutil.copytree(good, here)
        race(here, lines)
        run = kg.load_run(here / "run")
        if (here / "run" / "calibration.json").exists():
            run.predictor().tails("thing1", "colour", k=1)  # refuses one of other weights


def left(home: Path) -> list[str]:
    """Locks and temporary files."""
    hidden = [path.name for path in home.rglob(".*") if path.name != ".verified"]
    assert contents(home)
    return hidden
