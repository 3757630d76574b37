"""The benchmark of inductive entities on a small graph; no test depends on its times."""

import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import completion
import inductive


def test_both_methods_find_the_same_rows(tmp_path):
    job = asdict(completion.Job("world", 4))
    arrays = str(tmp_path / "weights.npz")
    completion.make_weights(job, device="cpu", arrays=arrays, steps=4)
    found = inductive.measure(job, device="cpu", arrays=arrays, quick=True)
    assert found["difference"] < 0.01
    assert all(found["seconds"]["1"][way]["best"] > 0 for way in ("dualkg", "autograd"))
    assert found["batch_seconds"] > 0
