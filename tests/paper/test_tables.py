from __future__ import annotations

import json
from pathlib import Path

import dualkg as kg
from paper.pages import BEGIN, END, readme_table, results_page, with_table
from paper.plan import TABLES
from paper.published import published, published_metrics
from paper.records import load_records
from paper.start import reproduce
from paper.tables import datasets_sheet, hyperparameters_sheet, table_sheet, training_time
from tests.paper.conftest import TINY

ROOT = Path(__file__).parents[2]


def test_what_the_paper_printed():
    assert published_metrics("ComplEx-DURA", "WN18RR") == {"mrr": 0.491, "hits_at_1": 0.449, "hits_at_10": 0.571}
    assert published_metrics("CP-FRO", "WN18RR") == {"mrr": 0.46, "hits_at_10": 0.48}
    assert published_metrics("ComplEx-Reg_p1", "FB15k-237")["mrr"] == 0.316
    assert published_metrics("ComplEx-DURA", "YAGO3-10-quarter") == {}
    for table in ("main", "regularizers", "p1"):
        assert all(published_metrics(row.name, "WN18RR") for row in TABLES[table].rows)


def test_a_table_shows_ours_beside_what_was_published(recipes, tmp_path, monkeypatch):
    monkeypatch.setitem(published()["main_results"], "ComplEx-DURA", {"world": [0.2, None, 0.4]})
    found = reproduce(TINY, "world", seeds=2, records=tmp_path / "records", runs=tmp_path / "runs")
    sheet = table_sheet(TINY, "world", load_records(tmp_path / "records"))
    mean, sd = found["world/complex-dura"].metric("mrr")
    row = next(row for row in sheet.rows if row[0] == "ComplEx-DURA")
    cells = dict(zip(sheet.columns, row, strict=True))
    assert cells["published"] == "0.200"
    assert cells["MRR"] == f"{mean:.4f} ± {sd:.4f}"
    assert cells["difference"] == f"{mean - 0.2:+.4f}"
    assert cells["H@1 (published)"] == f"{found['world/complex-dura'].metric('hits_at_1')[0]:.4f}"
    assert cells["H@10 (published)"].endswith(" (0.400)")
    assert [row[0] for row in sheet.rows] == ["ComplEx", "ComplEx-DURA"]
    assert len(sheet.notes) == 1  # DURA against nothing, by a bootstrap
    assert "95 %" in sheet.notes[0]
    facts = next(fact for fact in sheet.facts if fact["row"] == "ComplEx-DURA")
    assert facts["ours"]["mrr"]["mean"] == mean
    json.dumps(sheet.as_dict())


def test_a_graph_the_paper_has_not_has_no_published_column(recipes, tmp_path):
    reproduce(TINY, "world", seeds=1, records=tmp_path / "records", runs=tmp_path / "runs")
    sheet = table_sheet(TINY, "world", load_records(tmp_path / "records"))
    assert not [column for column in sheet.columns if "published" in column or "difference" in column]


def test_times_beside_other_work_are_bounds(recipes, tmp_path):
    """Until a seed is trained alone, whose time is then the one to show."""
    where = {"records": tmp_path / "records", "runs": tmp_path / "runs"}
    found = reproduce(TINY, "world", seeds=1, beside_others=True, **where)
    kept = found["world/complex-dura"]
    assert kept.times_are_bounds
    assert training_time(TINY, ("world",), found) is None

    def shown() -> str:
        sheet = table_sheet(TINY, "world", load_records(tmp_path / "records"))
        row = next(row for row in sheet.rows if row[0] == "ComplEx-DURA")
        return dict(zip(sheet.columns, row, strict=True))["training"]

    assert shown().startswith("≤ ")
    alone = reproduce(TINY, "world", seeds=2, **where)["world/complex-dura"]
    assert not alone.times_are_bounds
    assert alone.cost("training_seconds") == alone.runs[1]["costs"]["training_seconds"]
    assert not shown().startswith("≤")


def test_times_are_summed_over_the_rows_with_dura(recipes, tmp_path):
    found = reproduce(TINY, "world", seeds=1, records=tmp_path / "records", runs=tmp_path / "runs")
    total = training_time(TINY, ("world",), found)
    assert total["training_seconds"] == found["world/complex-dura"].cost("training_seconds") > 0
    assert training_time(TINY, ("world", "WN18RR"), found) is None  # a row is missing
    del found["world/complex-dura"].runs[0]["costs"]["ranking_seconds"]
    assert training_time(TINY, ("world",), found) is None


def test_the_data_sets_are_counted_not_copied():
    counts = published()["datasets"]["WN18RR"] | {"valid": 3000}
    sheet = datasets_sheet({"WN18RR": counts})
    rows = {row[0]: row for row in sheet.rows}
    assert rows["WN18RR"][1:] == ["40,943", "11", "86,835", "3,000", "3,134", "valid 3,034 printed"]
    assert rows["FB15k-237"][-1] == "not here"
    assert "YAGO3-10-quarter" not in rows


def test_hyper_parameters_are_those_of_the_recipes():
    sheet = hyperparameters_sheet()
    rows = {(row[0], row[1]): row for row in sheet.rows}
    assert rows["RESCAL-DURA", "WN18RR"][2] == "512 → 256"
    assert rows["ComplEx-DURA", "FB15k-237"][2] == "2000"
    assert len(rows) == 9


def test_the_committed_pages_are_made_from_the_committed_records():
    assert (ROOT / "records" / "RESULTS.md").read_text(encoding="utf-8") == results_page(ROOT / "records")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert BEGIN in readme
    assert END in readme
    assert with_table(readme, readme_table(ROOT / "records")) == readme


def test_the_committed_hyper_parameters_are_those_of_the_recipes():
    kept = (ROOT / "records" / "figures" / "hyperparameters.md").read_text(encoding="utf-8")
    assert kept.strip() == hyperparameters_sheet().as_markdown()


def test_only_what_stands_between_the_marks_changes():
    page = f"a\n{BEGIN}\nold\n{END}\nb"
    assert with_table(page, r"new \1") == f"a\n{BEGIN}\nnew \\1\n{END}\nb"


def test_nothing_recorded_is_an_empty_page(tmp_path):
    assert "## Main results" not in results_page(tmp_path)
    assert "ComplEx" not in readme_table(tmp_path)


def test_costs_are_measured_side_by_side():
    import torch

    from paper.cost import cost_sheet, measure_cost

    recipe = kg.Recipe().with_changes(
        {"model.dim": 4, "regularizer.name": "DURA", "regularizer.weight": 0.1, "training.batch_size": 100}
    )
    found = measure_cost(recipe, kg.load_graph("world"), device=torch.device("cpu"), steps=2, rounds=2)
    assert set(found["seconds_per_step"]) == {"none", "Frobenius", "DURA"}
    assert all(seconds > 0 for seconds in found["seconds_per_step"].values())
    assert cost_sheet([found]).rows[0][0] == "ComplEx"
