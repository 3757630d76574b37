import json

import pytest

from dualkg.training.api import spread
from paper import tables
from paper.pages import PAGES
from paper.records import RECORDS, Config, load_records
from paper.registry import published
from paper.studies import STUDIES
from paper.tables import (
    BEGIN,
    END,
    hyperparameters_table,
    results_page,
    results_table,
    training_time,
    with_table,
)
from tests.paper.conftest import TINY


@pytest.fixture
def train(recipes, tmp_path):
    """Train the tiny table with some options."""

    def run(seeds: int = 1, **options):
        config = Config(
            seeds=seeds,
            records=tmp_path / "records",
            runs=tmp_path / "runs",
            device="cpu",
            **options,
        )
        return config.train_table(TINY, "world")

    return run


def test_a_table_compares_measured_with_published_numbers(train, tmp_path, monkeypatch):
    monkeypatch.setitem(published()["main_results"], "ComplEx-DURA", {"world": [0.2, None, 0.4]})
    records = train(2)
    table = results_table(TINY, "world", load_records(tmp_path / "records"))
    mean, sd = spread(records["world/complex-dura"].values("mrr"))
    row = next(row for row in table.rows if row[0] == "ComplEx-DURA")
    cells = dict(zip(table.columns, row, strict=True))
    assert cells["published"] == "0.200"
    assert cells["MRR"] == f"{mean:.4f} ± {sd:.4f}"
    assert cells["difference"] == f"{mean - 0.2:+.4f}"
    assert (
        cells["H@1 (published)"]
        == f"{spread(records['world/complex-dura'].values('hits_at_1'))[0]:.4f}"
    )
    assert cells["H@10 (published)"].endswith(" (0.400)")
    assert [row[0] for row in table.rows] == ["ComplEx", "ComplEx-DURA"]
    assert len(table.notes) == 1  # DURA against no regularizer, by a bootstrap
    assert "95 %" in table.notes[0]
    facts = next(fact for fact in table.facts if fact["row"] == "ComplEx-DURA")
    assert facts["measured"]["mrr"]["mean"] == mean
    json.dumps(table.as_dict())


def test_times_on_a_shared_device_are_bounds(train, tmp_path):
    """Until a seed is trained alone, whose time is then shown."""
    records = train(shared_device=True)
    assert records["world/complex-dura"].times_are_bounds
    assert training_time(TINY, ("world",), records) is None

    def shown() -> str:
        table = results_table(TINY, "world", load_records(tmp_path / "records"))
        row = next(row for row in table.rows if row[0] == "ComplEx-DURA")
        return dict(zip(table.columns, row, strict=True))["training"]

    assert shown().startswith("≤ ")
    alone = train(2)["world/complex-dura"]
    assert not alone.times_are_bounds
    assert alone.cost("training_seconds") == alone.runs[1]["costs"]["training_seconds"]
    assert not shown().startswith("≤")


def test_hyper_parameters_are_those_of_the_recipes():
    rows = {(row[0], row[1]): row for row in hyperparameters_table().rows}
    assert rows["RESCAL-DURA", "WN18RR"][2] == "512 → 256"
    assert rows["ComplEx-DURA", "FB15k-237"][2] == "2000"
    assert len(rows) == 9


@pytest.mark.slow
def test_the_committed_page_is_made_from_the_committed_records():
    assert (RECORDS / "RESULTS.md").read_text(encoding="utf-8") == results_page(
        RECORDS, STUDIES.values()
    )


def test_committed_pages_have_the_numbers_of_the_committed_records(monkeypatch):
    """All lines of the page except the bootstrap comparisons, which take most of the time."""
    monkeypatch.setattr(tables, "_comparisons", lambda *ignored: [])
    committed = iter((RECORDS / "RESULTS.md").read_text(encoding="utf-8").splitlines())
    assert all(
        line in committed for line in results_page(RECORDS, STUDIES.values()).splitlines()
    )  # in the same order
    for path, make_table in PAGES.items():
        page = path.read_text(encoding="utf-8")
        assert BEGIN in page
        assert END in page
        assert with_table(page, make_table(RECORDS)) == page
