"""Small trainings and their ranks agree with what was recorded in golden.json.

On the machine of the record they agree bit for bit, on others within a tolerance. Names of the code
base under test are in adapter.py alone.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from . import adapter, measure
from .checks import check, golden, one_thread, same_machine

FRESH = "DUALKG_GOLDEN_FRESH"  # set in a process that has computed nothing before
MACHINE_DEPENDENT = (
    "auto",
    "bf16",
)  # precisions that another processor chooses or rounds otherwise


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def graph() -> Any:
    return adapter.build_graph(golden()["graph"])


def settings_of(recorded: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return measure.merged(golden()["defaults"], recorded["settings"])


def test_all_models_and_regularizers_are_covered() -> None:
    chosen = [
        adapter.model_and_regularizer(recorded["settings"]) for recorded in golden()["trainings"]
    ]
    assert {model for model, _ in chosen} >= set(adapter.MODEL_NAMES)
    assert {regularizer for _, regularizer in chosen} >= set(adapter.REGULARIZER_NAMES)


TRAININGS = [
    pytest.param(recorded, id=recorded["id"], marks=() if number % 4 == 0 else pytest.mark.slow)
    for number, recorded in enumerate(golden()["trainings"])
]


@pytest.mark.parametrize("recorded", TRAININGS)
def test_training(recorded: dict[str, Any], graph: Any) -> None:
    settings = settings_of(recorded)
    if settings["training"]["precision"] in MACHINE_DEPENDENT and not same_machine():
        pytest.skip("the precision depends on the processor")
    if recorded.get("sensitive") and not (same_machine() and FRESH in os.environ):
        pytest.skip(
            "rounding errors grow too much to compare results of different machines or of a used "
            "process"
        )
    run = measure.train(settings, graph)
    # Biases of MuRP were in a table of their own, and some gradients of its entities were summed in
    # another order.
    exact = settings["model"]["name"] != "MuRP"
    check(
        recorded["results"],
        measure.training_results(run, with_ranks="ranks" in recorded["results"]),
        exact=exact,
    )


@pytest.mark.slow
def test_sensitive_trainings_in_a_fresh_process() -> None:
    """After bfloat16 products in the same process, float32 ones are rounded otherwise on some
    processors.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        __file__,
        "-m",
        "slow or not slow",
        "-k",
        "test_training",
    ]
    alone = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")
    } | {FRESH: "1"}
    done = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("recorded", golden()["rejected"], ids=lambda recorded: recorded["id"])
def test_settings_that_are_rejected(recorded: dict[str, Any], graph: Any) -> None:
    with pytest.raises(adapter.InvalidSettingsError):
        measure.train(settings_of(recorded), graph)


def test_bootstrap() -> None:
    recorded = golden()["bootstrap"]
    check(recorded["results"], measure.bootstrap_results(recorded["inputs"]))
