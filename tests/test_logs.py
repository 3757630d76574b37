"""Log lines of long computations: how often, what they say, and where the command line writes
them.
"""

import logging
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg import logs
from dualkg.inference.completion import complete
from dualkg.inference.index import build_index
from dualkg.inference.probability import Calibration
from dualkg.training.api import data_of, default_recipe
from dualkg.training.trainer import ProgressEvent, Trainer
from dualkg.tuning.plan import SearchPlan


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(logs, "clock", made)
    return made


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="dualkg")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "dualkg"]


def test_the_first_line_then_one_in_ten_seconds_and_the_last(clock, lines):
    log = logs.ProgressLog("Task")
    for done in range(1, 41):  # an event every second
        log.count(done, 40, "steps")
        clock.now += 1
    assert lines() == [f"Task: {done} of 40 steps" for done in (1, 11, 21, 31, 40)]


@given(st.lists(st.integers(0, 30), max_size=30))
def test_two_lines_are_never_closer_than_ten_seconds(waits):
    written = []
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "clock", clock)
        patch.setattr(logs.logger, "isEnabledFor", lambda level: True)
        patch.setattr(logs.logger, "info", lambda *words: written.append(clock.now))
        log = logs.ProgressLog("Task")
        for wait in waits:
            log(lambda: "")
            clock.now += wait
    assert all(later - earlier >= logs.SECONDS for earlier, later in pairwise(written))
    assert bool(written) == bool(waits)


def test_a_short_computation_without_a_first_line_is_silent(clock, lines):
    log = logs.ProgressLog("Task", first=False)
    log(lambda: "at once")
    clock.now = 10.0
    log(lambda: "after ten seconds")
    assert lines() == ["Task: after ten seconds"]


def test_a_text_is_not_computed_where_nobody_listens(caplog):
    caplog.set_level(logging.WARNING, logger="dualkg")
    logs.ProgressLog("Task")(lambda: pytest.fail("computed"), last=True)


def test_training_logs_its_start_its_end_and_its_result(small_graph, clock, lines):
    run = kg.train(kg.ComplEx(small_graph, dim=4), small_graph, epochs=3, batch_size=100)
    first, trained, ranked = lines()
    assert first.startswith("made ComplEx: epoch 1/3  loss ")
    assert trained.startswith("made ComplEx: 3 epochs in ")
    assert (
        ranked
        == f"made ComplEx: valid MRR {run.reports['valid'].mrr:.4f}, test MRR {run.report.mrr:.4f}"
    )


def test_a_split_without_triples_has_no_mrr_in_the_log(small_graph, clock, lines):
    graph = replace(small_graph, test=small_graph.test[:0])
    run = kg.train(kg.ComplEx(graph, dim=4), graph, epochs=1)
    assert lines()[-1] == f"made ComplEx: valid MRR {run.reports['valid'].mrr:.4f}"
    assert repr(run) == "TrainedRun(ComplEx on made)"
    graph = replace(graph, valid=graph.valid[:0])
    kg.train(kg.ComplEx(graph, dim=4), graph, epochs=1)
    assert lines()[-1] == "made ComplEx: no held-out triples to rank"


def test_a_slow_training_logs_within_an_epoch(small_graph, clock, lines):
    def slow(event: object) -> None:
        clock.now += 5

    kg.train(
        kg.ComplEx(small_graph, dim=4), small_graph, epochs=1, batch_size=100, on_progress=slow
    )
    steps = [line.rpartition("step ")[2].split()[0] for line in lines() if "step " in line]
    assert steps[:2] == ["1/5", "3/5"]


def test_the_time_left_of_a_training_is_known_after_the_warm_up(small_graph, clock, lines):
    events = []

    def slow(event: ProgressEvent) -> None:
        events.append(event)
        clock.now += 10

    kg.train(
        kg.ComplEx(small_graph, dim=4), small_graph, epochs=2, batch_size=100, on_progress=slow
    )
    first, *later = [line for line in lines() if "step " in line]
    assert first.endswith("step 1/5")
    assert all(" left" in line for line in later)
    assert events[0].seconds_left is None
    for event in events[1:]:
        assert (event.seconds_left > 0) == (event.share_done < 1)


def test_a_resumed_training_estimates_by_its_own_steps(small_graph):
    model = kg.ComplEx(small_graph, dim=4)
    recipe = default_recipe(
        data_of(small_graph), small_graph, {"training.epochs": 4, "training.batch_size": 100}
    )
    events: list[ProgressEvent] = []
    trainer = Trainer(model, small_graph, recipe, kg.NoRegularizer(), on_progress=events.append)
    trainer.progress.epoch = 3
    trainer.run()
    assert [event.seconds_left is None for event in events[:2]] == [True, False]
    assert events[-1].share_done == 1.0


def test_the_time_left_by_hand(clock):
    estimate = logs.TimeLeft()
    assert estimate(10, 40) is None  # what was done before has no time
    clock.now = 20.0
    assert estimate(10, 40) is None
    assert estimate(20, 40) == 40.0
    assert estimate(50, 40) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "a second"), (42.4, "42 s"), (150, "2 min"), (5400, "90 min"), (9000, "2.5 h")],
)
def test_times_in_words(seconds, text):
    assert logs.describe_seconds(seconds) == text
    assert logs.describe_time_left(seconds) == f"about {text} left"
    assert logs.describe_time_left(None) == ""


def test_completion_and_calibration_log(small_graph, clock, lines):
    model = kg.ComplEx(small_graph, dim=4, init_scale=0.5)
    complete(model, small_graph, top=5)
    Calibration.fit(model, small_graph)
    found = lines()
    assert any(line.startswith("Completing made: ") and line.endswith("queries") for line in found)
    assert found[-2].startswith("Calibrating made: 4 relations are fitted")
    assert found[-1].startswith("Calibrating made: recalibration is ")


def test_searches_log_trials_and_the_best_so_far(small_graph, clock, lines, tmp_path):
    def slow(event: object) -> None:
        clock.now += 5

    tables = {
        "model": {"dim": 2},
        "training": {"epochs": 1},
        "space": {"optimizer.learning_rate": [0.1, 0.2]},
    }
    kg.search(tables, out=tmp_path, graph=small_graph, on_progress=slow)
    found = lines()
    assert found[0].startswith("Tuning ComplEx on made: ")
    assert found[-1].startswith("Tuning ComplEx on made: 2 of 2 trials")
    assert "best valid MRR 0." in found[-1]
    assert " left" not in found[0] + found[-1]
    assert all(" left" in line for line in found[2:-1])


def test_automatic_tuning_logs_the_trial_and_one_best_mrr(small_graph, clock, lines):
    def slow(event: object) -> None:
        clock.now += 5

    plan = SearchPlan(rungs=(1 / 3, 1.0), max_trials=(2, 2))
    changes = {"model.dim": 2, "training.epochs": 9}
    kg.fit(small_graph, tune=plan, changes=changes, on_event=slow)
    found = [line for line in lines() if line.startswith("Tuning ComplEx on made: trial ")]
    assert found[0].startswith(
        "Tuning ComplEx on made: trial 1: the starting values  epoch 1/3  loss "
    )
    assert all(line.count("valid MRR") <= 1 for line in found)
    assert any("best valid MRR 0." in line for line in found[1:])


def test_automatic_tuning_logs_the_time_left_of_its_budget(small_graph, clock, lines):
    def slow(event: object) -> None:
        clock.now += 5

    plan = SearchPlan(budget=1e-3, rungs=(1 / 3, 1.0))
    changes = {"model.dim": 2, "training.epochs": 9}
    kg.fit(small_graph, tune=plan, changes=changes, on_event=slow)
    found = [line for line in lines() if line.startswith("Tuning ComplEx on made: trial ")]
    assert found
    assert all(re.search(r"  at most .+ left$", line) for line in found)


def test_an_index_logs_what_it_builds(small_graph, clock, lines):
    build_index(kg.ComplEx(small_graph, dim=4, init_scale=0.5), small_graph, recall=0.5)
    first, second = lines()
    assert first == "Index of made: building, 30 entities"
    assert second.startswith("Index of made: built in ")


def test_commands_write_lines_to_stderr_where_there_is_no_terminal(run_cli, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.tsv").write_text("\n".join(f"{i % 20}\t{i % 3}\t{i % 7}" for i in range(200)))
    level = logs.logger.level
    result = run_cli(
        "train", "mine.tsv", "--no-tune", "--dim", 4, "--epochs", 1, "--out", "runs/a", "--json"
    )
    assert result.code == 0
    assert "mine ComplEx: 1 epochs in " in result.err
    assert result.json["run"] == "runs/a"
    assert logs.logger.handlers == []
    assert logs.logger.level == level
    monkeypatch.setattr("dualkg.cli.common.stderr._force_terminal", True)
    shown = run_cli("train", "mine.tsv", "--no-tune", "--dim", 4, "--epochs", 1, "--out", "runs/b")
    assert "epochs in" not in shown.err  # the progress bar is there
