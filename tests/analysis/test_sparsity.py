"""λ-sparsity: the threshold, the zeros, sparse run folders, storage, and the curve."""

import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import dualkg as kg
from dualkg.analysis.sparsity import (
    SHARES,
    count,
    entity_tables,
    find_thresholds,
    sparsified,
    sparsify,
    sparsity_curve,
    storage_of,
)
from dualkg.errors import InvalidValue, PathExists, RequestError
from dualkg.inference.export import export
from dualkg.training.checkpoint import compress, expand, read_weights
from dualkg.training.errors import DamagedRun, NotARun, RunNotFinished
from dualkg.training.run_folder import RunFolder
from tests.models import odd_models as odd

KINDS = (kg.CP, kg.DistMult, kg.ComplEx, kg.RESCAL)
PERCENTS = st.integers(0, 99).map(lambda percent: percent / 100)


def sparsity(table: torch.Tensor, threshold: float) -> float:
    """The paper's s_λ: the share of entries whose magnitude is below the threshold λ."""
    return float((table.abs() < threshold).double().mean())


@pytest.fixture
def run(small_graph, tmp_path) -> kg.Run:
    model = kg.CP(small_graph.shape, dim=5, init_scale=0.1)
    return kg.train(
        model, small_graph, regularizer=kg.DURA(0.01), epochs=2, batch_size=50, out=tmp_path / "run"
    )


# -- the threshold -----------------------------------------------------------


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=40), PERCENTS)
def test_the_threshold_gives_the_largest_share_not_above_the_target(entries, share):
    table = torch.tensor(entries, dtype=torch.float32)[:, None]
    [threshold] = find_thresholds([table], [share])
    reachable = [sparsity(table, above) for above in (*table.abs().flatten().tolist(), 0.0)]
    wanted = Fraction(str(share))
    assert sparsity(table, threshold) == max(
        one for one in reachable if Fraction(one).limit_denominator(40) <= wanted
    )


@given(st.integers(1, 300), PERCENTS, st.integers(0, 5))
def test_without_equal_entries_the_share_is_met_to_the_entry(num_entries, share, seed):
    random = np.random.default_rng(seed)
    entries = torch.from_numpy(
        random.permutation(np.arange(1.0, num_entries + 1)) * random.choice([-1, 1], num_entries)
    )
    tables = entries.split(max(1, num_entries // 3))  # one threshold over all of them
    [threshold] = find_thresholds(tables, [share])
    num_below = sum(int((table.abs() < threshold).sum()) for table in tables)
    assert num_below == int(Fraction(str(share)) * num_entries)


def test_a_share_is_taken_as_written():
    """0.29 · 100 is 28.999999999999996 to a computer."""
    [threshold] = find_thresholds([torch.arange(1.0, 101.0)], [0.29])
    assert threshold == 30


def test_entries_at_the_threshold_stay():
    assert sparsity(torch.tensor([0.0, 1.0, -1.0, 2.0]), 1.0) == 0.25


@pytest.mark.parametrize("kind", KINDS)
def test_entity_entries_become_zero_and_relations_never(kind):
    model = kind(kg.GraphShape(20, 3), dim=4, seed=1)
    [threshold] = find_thresholds(entity_tables(model).values(), [0.6])
    sparse = sparsified(model, threshold)
    torch.testing.assert_close(sparse.relations, model.relations, rtol=0, atol=0)
    entries = torch.cat([table.detach().flatten() for table in entity_tables(sparse).values()])
    before = torch.cat([table.detach().flatten() for table in entity_tables(model).values()])
    assert int((entries == 0).sum()) == int(0.6 * len(entries))
    assert not (before == 0).any()  # what was given is as it was
    remaining = entries != 0
    torch.testing.assert_close(entries[remaining], before[remaining], rtol=0, atol=0)
    assert float(before[~remaining].abs().max()) < threshold <= float(before[remaining].abs().min())


def test_cp_has_two_entity_tables_and_a_dual_those_of_its_primal():
    shape = kg.GraphShape(4, 2)
    assert list(entity_tables(kg.CP(shape, dim=2))) == ["entities", "tails"]
    assert list(entity_tables(kg.RESCAL(shape, dim=2))) == ["entities"]
    assert list(entity_tables(kg.Dual(kg.ComplEx(shape, dim=2)))) == ["primal.entities"]


def test_a_model_without_entity_tables_is_refused():
    with pytest.raises(RequestError, match="Sparsity is defined for entity tables, and Normalised"):
        entity_tables(odd.Normalised(kg.GraphShape(4, 2), dim=2))


# -- the sparse run ----------------------------------------------------------


@given(
    st.integers(0, 6),
    st.sampled_from((1, 3, 256, 257)),
    st.sampled_from((0.0, 0.1, 0.9, 1.0)),
    st.integers(0, 9),
)
def test_a_sparse_table_is_restored(rows, columns, density, seed):
    random = torch.Generator().manual_seed(seed)
    table = torch.randn(rows, columns, generator=random)
    table = table * (torch.rand(rows, columns, generator=random) < density)
    parts = compress(table)
    torch.testing.assert_close(expand(**parts, shape=table.shape), table, rtol=0, atol=0)
    assert parts["columns"].dtype == (torch.uint8 if columns <= 256 else torch.uint16)
    numbers, num_bytes = count(table, "CSR")
    assert sum(part.nbytes for part in parts.values()) == num_bytes
    assert sum(part.numel() for part in parts.values()) == numbers


def test_a_sparse_run_is_a_run_like_any_other(run, tmp_path):
    made = sparsify(run.folder, share=0.7, out=tmp_path / "sparse")
    again = kg.load_run(tmp_path / "sparse")
    for name, table in again.model.state_dict().items():
        torch.testing.assert_close(table, made.model.state_dict()[name], rtol=0, atol=0)
    zeros = sum(int((table == 0).sum()) for table in entity_tables(again.model).values())
    assert zeros == 0.7 * 2 * 30 * 5
    assert again.sparsity == {
        **made.sparsity,
        "source": str(run.folder),
        "target_share": 0.7,
        "share": 0.7,
    }
    saved = RunFolder(made.folder).saved_reports()
    for split in ("valid", "test"):
        report = kg.evaluate(again.model, again.graph, split=split)
        assert report.metrics == made.reports[split].metrics
        assert saved[split]["metrics"] == report.metrics.as_dict()
    assert saved["test"]["metrics"]["mrr"] != run.report.mrr
    assert len(kg.Predictor(again.model, again.graph).tails("e0", "r0", k=3)) == 3
    export(again, tmp_path / "out")
    assert np.load(tmp_path / "out" / "tails.npy").shape == (30, 5)


def test_nothing_of_the_zeros_is_on_disk_even_when_it_is_loaded_saved_and_made_sparser(
    run, tmp_path
):
    first = sparsify(run.folder, share=0.5, out=tmp_path / "first")
    kg.load_run(first.folder).save(tmp_path / "copy")
    second = sparsify(tmp_path / "copy", share=0.8, out=tmp_path / "second")
    for folder, num_values in ((first.folder, 150), (tmp_path / "copy", 150), (second.folder, 60)):
        saved = load_file(folder / "weights.safetensors")
        assert set(saved) == {
            "model/relations",
            "csr/entities/values",
            "csr/entities/columns",
            "csr/entities/starts",
            "csr/tails/values",
            "csr/tails/columns",
            "csr/tails/starts",
        }
        assert len(saved["csr/entities/values"]) + len(saved["csr/tails/values"]) == num_values
        assert saved["csr/tails/columns"].dtype == torch.uint8


def test_the_new_folder_is_named_after_the_share(run):
    assert sparsify(run.folder, share=0.25).folder == run.folder.with_name("run-sparse-0.25")


def test_a_dual_can_be_made_sparse(small_graph, tmp_path):
    model = kg.Dual(kg.DistMult(small_graph.shape, dim=4))
    kg.train(model, small_graph, epochs=1, batch_size=50, out=tmp_path / "run")
    made = sparsify(tmp_path / "run", share=0.5)
    assert kg.evaluate(kg.load_run(made.folder).model, small_graph).mrr == made.report.mrr


@pytest.mark.parametrize("share", [-0.1, 1, 70, float("nan")])
def test_an_invalid_share_is_refused(run, share):
    with pytest.raises(InvalidValue, match=r"70 % is written 0.7."):
        sparsify(run.folder, share=share)


def test_unusable_folders_are_refused(run, tmp_path):
    with pytest.raises(PathExists):
        sparsify(run.folder, share=0.5, out=run.folder)
    with pytest.raises(NotARun, match="does not exist"):
        sparsify(tmp_path / "nowhere", share=0.5)
    RunFolder(run.folder).report.unlink()
    with pytest.raises(RunNotFinished):
        sparsify(run.folder, share=0.5)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("damage", ["missing", "short", "outside", "rows"])
def test_damaged_files_are_reported(run, damage):
    weights = RunFolder(sparsify(run.folder, share=0.5).folder).weights
    saved = load_file(weights)
    if damage == "missing":
        del saved["csr/tails/columns"]
    elif damage == "short":
        saved["csr/tails/values"] = saved["csr/tails/values"][:1].clone()
    elif damage == "rows":
        saved["csr/tails/starts"] = saved["csr/tails/starts"][:-1].clone()
    else:
        saved["csr/tails/columns"] = torch.full_like(saved["csr/tails/columns"], 9)
    save_file(
        saved,
        weights,
        metadata={"about": json.dumps({"shapes": {"entities": [30, 5], "tails": [30, 5]}})},
    )
    with pytest.raises(DamagedRun, match=f"it has {weights.stat().st_size:,} bytes in place of "):
        kg.load_run(weights.parent)
    with pytest.raises(RequestError, match="its CSR of tails is damaged"):
        read_weights(weights)


# -- storage and the curve ---------------------------------------------------


def test_storage_by_hand():
    """3 entities, dim 2, 2 relation ids, 2 entries left: 2·2 + 3 + 1 by rows, 2·2 + 2 + 1 by
    columns.
    """
    model = kg.DistMult(kg.GraphShape(3, 1), dim=2)
    with torch.no_grad():
        model.entities.copy_(torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0]]))
    storage = storage_of(model)
    assert {form: size.numbers for form, size in storage.entity_tables.items()} == {
        "dense": 6,
        "CSR": 8,
        "CSC": 7,
    }
    assert {form: size.numbers for form, size in storage.whole_model.items()} == {
        "dense": 10,
        "CSR": 12,
        "CSC": 11,
    }
    # Two values of 4 bytes and an index of 1; then 4 starts of rows, or 3 of columns, of 1.
    assert {form: size.bytes for form, size in storage.entity_tables.items()} == {
        "dense": 24,
        "CSR": 14,
        "CSC": 13,
    }
    assert storage.entity_tables["CSR"].numbers_saved == pytest.approx(-1 / 3)
    assert storage.whole_model["CSC"].bytes_saved == pytest.approx(11 / 40)
    assert storage.share == pytest.approx(4 / 6)
    assert storage.on_disk is None


def test_at_70_percent_zeros_the_paper_s_count_saves_40_percent_not_65():
    model = kg.CP(kg.GraphShape(1000, 2), dim=2000)
    [threshold] = find_thresholds(entity_tables(model).values(), [0.7])
    storage = storage_of(sparsified(model, threshold)).entity_tables
    assert storage["CSR"].numbers_saved == pytest.approx(0.4, abs=2e-3)
    assert storage["CSC"].numbers_saved == pytest.approx(0.4, abs=2e-3)
    # An index has 2 bytes and a value 4.
    assert storage["CSR"].bytes_saved == pytest.approx(0.55, abs=2e-3)


def test_bytes_on_disk_are_those_of_the_file(run):
    dense = storage_of(run.model, weights=RunFolder(run.folder).weights)
    assert dense.on_disk["entity_tables"] == dense.entity_tables["dense"].bytes == 1200
    made = sparsify(run.folder, share=0.7)
    weights = RunFolder(made.folder).weights
    sparse = storage_of(made.model, weights=weights)
    assert sparse.on_disk["entity_tables"] == sparse.entity_tables["CSR"].bytes
    assert sparse.on_disk["whole_model"] == weights.stat().st_size
    assert 0 < sparse.on_disk["whole_model"] - sparse.whole_model["CSR"].bytes < 1000  # the header


def test_the_curve_begins_at_the_run_and_passes_through_the_sparse_run(run):
    points = sparsity_curve(run.model, run.graph)
    assert [point.target_share for point in points] == list(SHARES)
    assert points[0].metrics == run.report.metrics
    assert points[0].share == 0
    made = sparsify(run.folder, share=0.7)
    [same] = [point for point in points if point.target_share == 0.7]
    assert same.metrics == made.report.metrics
    assert (same.share, same.threshold) == (made.sparsity["share"], made.sparsity["threshold"])
    [valid] = sparsity_curve(run.model, run.graph, shares=[0], split="valid")
    assert valid.metrics == run.report_on("valid").metrics


def test_a_curve_needs_shares_and_triples(run):
    with pytest.raises(InvalidValue):
        sparsity_curve(run.model, run.graph, shares=[0.5, 95])
    graph = kg.Graph(
        "bare", run.graph.entities, run.graph.relations, run.graph.train, *[run.graph.test[:0]] * 2
    )
    with pytest.raises(RequestError, match="bare has no test triples to evaluate on"):
        sparsity_curve(run.model, graph)
