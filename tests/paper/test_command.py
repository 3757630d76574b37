"""`reproduce`, as people type it."""

from __future__ import annotations

import json

import pytest

from paper import plan
from tests.paper.conftest import TINY


@pytest.fixture
def dualkg(run_cli, monkeypatch, tmp_path):
    """Types a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return run_cli


def test_a_table_of_facts_is_shown_and_kept(dualkg, tmp_path):
    code, out, _ = dualkg("reproduce", "hyperparameters")
    assert code == 0
    assert "512 → 256" in out
    assert "### Hyper-parameters" in (tmp_path / "records" / "RESULTS.md").read_text(encoding="utf-8")
    code, out, _ = dualkg("reproduce", "hyperparameters", "--json")
    assert len(json.loads(out)[0]["rows"]) == 9


def test_a_table_of_trainings_goes_to_the_records(dualkg, recipes, tmp_path, monkeypatch):
    from paper import what

    monkeypatch.setattr(plan, "GRAPHS", ("world",))
    monkeypatch.setitem(what.REPRODUCTIONS, "main", lambda setting: what._table(TINY, setting))
    words = ("reproduce", "main", "--dataset", "world", "--seeds", "1", "--device", "cpu")
    code, out, _ = dualkg(*words)
    assert code == 0
    assert "ComplEx-DURA against ComplEx" in out.replace("\n", " ")
    assert (tmp_path / "records" / "world" / "complex-dura" / "ranks.parquet").exists()
    assert (tmp_path / "runs" / "reproduce" / "world" / "complex-dura" / "seed-0" / "weights.safetensors").exists()
    code, out, _ = dualkg(*words, "--json")
    [sheet] = json.loads(out)
    assert sheet["rows"][1]["ours"]["mrr"]["sd"] == 0

    (tmp_path / "records" / "world" / "complex-dura" / "record.json").write_text("[]")
    code, _, err = dualkg(*words)
    assert code == 2
    assert "is not a record as it is kept now" in err.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nonsense",), "WHAT should be one of main, regularizers"),
        (("main", "--dataset", "FB15"), "'FB15' is no graph of these tables. Did you mean 'FB15k-237'?"),
        (("main", "--seeds", "0"), "--seeds"),
        (("figure1", "--seeds", "2"), "figure1 is drawn from one seed. Leave it out."),
        (("cost", "--seeds", "1"), "cost is the time of a step"),
    ],
)
def test_what_cannot_be_done_is_told(dualkg, words, sentence):
    code, _, err = dualkg("reproduce", *words)
    assert code == 2
    assert sentence in err
