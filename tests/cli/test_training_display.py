"""What a training tells on a terminal before it starts."""

import sys

from dualkg.cli.training_display import TrainingDisplay, ask_to_start
from dualkg.workflows.expectation import Expectation

HOUR = Expectation(tuning=2400, training=1100, ranking=100, memory=2**30)
MINUTE = Expectation(tuning=40, training=15, ranking=5, memory=2**30)


def test_a_person_is_asked_before_long_work_alone(capsys):
    questions = []
    display = TrainingDisplay(ask=lambda: questions.append("Start?"))
    display._announce(MINUTE)
    assert questions == []
    display._announce(HOUR)
    assert questions == ["Start?"]
    assert "Training about 18 min, ranking about 2 min" in capsys.readouterr().err


def test_a_program_is_not_asked():
    assert not sys.stdin.isatty()
    ask_to_start()
