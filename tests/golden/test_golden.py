"""Small trainings agree with the record in golden.json."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import adapter, record
from .cases import COMPLEX, DEFAULTS, ENGINES, Settings, cases, depends_on_processor, network_cases

NOT_RECORDED = "not recorded yet; run `make golden`"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with record.one_thread():
        yield


@pytest.fixture(scope="module")
def graph() -> Any:
    return adapter.small_graph()


def trainings() -> list[Any]:
    """Every third training in the ordinary suite, all in the slow one."""
    parameters = []
    for number, (id, settings) in enumerate(cases().items()):
        marks = () if number % 3 == 0 else pytest.mark.slow
        parameters.append(pytest.param(id, settings, id=id, marks=marks))
    return parameters


@pytest.mark.parametrize(("id", "settings"), trainings())
def test_training(id: str, settings: Settings, graph: Any) -> None:
    expected = record.golden()["trainings"].get(id)
    if expected is None:
        pytest.skip(NOT_RECORDED)
    if depends_on_processor(settings) and record.machine() != record.golden()["machine"]:
        pytest.skip("the precision depends on the processor")
    computed = record.training_record(settings, graph)
    assert record.differences(expected, computed) == []


def network_trainings() -> list[Any]:
    """The compiled form takes ten seconds to compile: one is in the ordinary suite."""
    parameters = []
    for number, (id, settings) in enumerate(network_cases().items()):
        parameters.append(pytest.param(id, settings, "plain", id=f"{id}-plain"))
        marks = () if number == 0 else pytest.mark.slow
        compiled = pytest.param(id, settings, "compiled", id=f"{id}-compiled", marks=marks)
        parameters.append(compiled)
    return parameters


@pytest.mark.parametrize(("id", "settings", "form"), network_trainings())
def test_path_network(id: str, settings: Settings, form: str, graph: Any) -> None:
    """Both forms agree with the record of the plain one, which is in float64 as they are."""
    if form == "compiled":
        pytest.importorskip("numba")
    expected = record.golden()["networks"].get(id)
    if expected is None:
        pytest.skip(NOT_RECORDED)
    computed = record.network_record(settings, graph, compiled=form == "compiled")
    assert record.differences(expected, computed, rtol=record.NETWORK_RTOL) == []


def test_no_recorded_training_was_dropped() -> None:
    advice = "run `make golden` after a removal"
    assert set(record.golden()["trainings"]) <= set(cases()), advice
    assert set(record.golden()["networks"]) <= set(network_cases()), advice


def test_bootstrap() -> None:
    expected = record.golden()["bootstrap"]
    computed = adapter.bootstrap(num_samples=1000, seed=0)
    for path, value in record.flattened(expected):
        assert dict(record.flattened(computed))[path] == pytest.approx(value), path


@pytest.mark.slow
def test_bit_for_bit_on_the_machine_of_the_record(tmp_path: Path) -> None:
    expected = record.golden()
    if record.machine() != expected["machine"]:
        pytest.skip("recorded on another machine or with other libraries")
    file = tmp_path / "golden.json"
    command = [sys.executable, "-m", "tests.golden.record", "--no-tolerances", "--out", str(file)]
    alone = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    subprocess.run(command, cwd=ROOT, env=alone, check=True)
    computed = json.loads(file.read_text(encoding="utf-8"))

    changed = []
    for id, recorded in expected["trainings"].items():
        if recorded.get("sha256") != computed["trainings"][id].get("sha256"):
            changed.append(id)
    assert changed == []


def test_differences_name_the_number() -> None:
    expected = {"numbers": {"losses": [1.0, 0.5], "mrr": [0.2]}, "sha256": "a"}
    nearly = {"numbers": {"losses": [1.0005, 0.5], "mrr": [0.21]}, "sha256": "b"}
    assert record.differences(expected, nearly) == []
    other = {"numbers": {"losses": [1.0, 0.6], "mrr": [0.3]}, "sha256": "c"}
    assert record.differences(expected, other) == [
        "losses.1: 0.5 in the record, 0.6 now",
        "mrr.0: 0.2 in the record, 0.3 now",
    ]
    assert record.differences(expected | {"tolerances": {"losses": 0.5}}, other) == []
    assert record.differences({"refused": True}, other) == ["refused: True in the record, None now"]


def test_ids_are_made_of_what_differs_from_the_defaults() -> None:
    settings = cases()["ComplEx loss.frequency_weight=0.9"]
    assert settings == COMPLEX | {"loss.frequency_weight": 0.9} | ENGINES[0]
    assert DEFAULTS["model.dim"] == 8
