"""The benchmark of completion on a small graph; no test depends on its times."""

import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import completion
from tests.processes import run_python


def test_a_list_is_measured(tmp_path):
    job = asdict(completion.Job("world", 4, types=True, top=50))
    arrays = str(tmp_path / "weights.npz")
    completion.make_weights(job, device="cpu", arrays=arrays, steps=4)
    found = completion.measure(job, device="cpu", arrays=arrays, quick=True)
    assert found["num_found"] == 50
    assert 0 < found["least_probability"] < 1
    assert found["seconds"] > 0


@pytest.mark.slow
def test_the_script_lists_its_jobs():
    code = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    printed = run_python(code, completion.__file__, "--list", "--device", "cuda").out.splitlines()
    assert printed == ["FB15k-237 ComplEx dim 2000 whole"]
