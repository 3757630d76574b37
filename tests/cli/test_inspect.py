"""`inspect`, as people type it."""

import sys

import pytest

import dualkg as kg


@pytest.fixture
def inverse_folder(monkeypatch, tmp_path):
    """Given splits whose test triples are inverses of training triples: `part$1 [of]$` and `含`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    whole = [f"part{i}\tpart$1 [of]$\twhole{i // 3}" for i in range(30)]
    parts = [f"whole{i // 3}\t含\tpart{i}" for i in range(30)]
    for split, lines in {
        "train": whole + parts[:20],
        "valid": parts[20:25],
        "test": parts[25:],
    }.items():
        (tmp_path / "mine" / f"{split}.tsv").write_text("\n".join(lines))
    return "mine"


def test_inspect(run_cli, inverse_folder):
    code, out, err = run_cli("inspect", inverse_folder)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "mine train valid test" in lines
    assert "triples 50 5 5" in lines
    assert "triples leaked by train 5 (100.0%) 5 (100.0%)" in lines
    assert "by an inverse relation 5 (100.0%) 5 (100.0%)" in lines
    assert "Degrees in train: mean 2.5, median 2, maximum 6." in lines
    assert "Connected components of train: 10; the largest has 4 entities (10.0%)." in lines
    assert "N-1 1 30 0 0" in lines
    assert "part$1 [of]$ 30 0 N-1 1.0 3.0 0%" in lines
    assert "part$1 [of]$ / 含 inverse 100% 5 5" in lines
    assert (
        "Leakage: 100.0% of the test triples follow from train by duplicate, inverse or "
        "symmetric relations" in err
    )
    about = run_cli("inspect", inverse_folder, "--json").json
    assert about["held_out"]["test"]["inverse"] == 5
    assert about["redundant_relations"][0]["leaked"] == {"valid": 5, "test": 5}
    assert about["figures"] == []
    assert about["fingerprint"] == kg.load_graph(inverse_folder).fingerprint


def test_inspect_lists_the_largest_relations_only(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [f"e{i}\tr{r}\te{(i + r) % 40}" for r in range(20) for i in range(40 - r)]
    (tmp_path / "mine.tsv").write_text("\n".join(lines))
    code, out, err = run_cli("inspect", "mine.tsv", "--split", "100/0/0")
    assert (code, "r14 " in out, "r15 " in out) == (0, True, False)
    assert "5 more relations: --json lists all." in err
    assert len(run_cli("inspect", "mine.tsv", "--json").json["by_relation"]) == 20


def test_the_picture_of_a_graph(run_cli, inverse_folder, tmp_path):
    pytest.importorskip("matplotlib")
    code, _, err = run_cli("inspect", inverse_folder, "--picture", "graph.png")
    assert code == 0
    assert "Figure: graph.svg" in err
    assert (tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "graph.svg").read_text()
    for text in (
        "mine: 40 entities, 2 relations, 60 triples",
        "100.0%",
        "part$1 [of]$",
        "含",
        "N-1: 60%",
        "2–3",
    ):
        assert f">{text}<" in drawn
    assert "Train leaks 100.0% of valid and 100.0% of test." in drawn


def test_a_picture_needs_matplotlib(run_cli, inverse_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = run_cli("inspect", inverse_folder, "--picture", "graph.png")
    assert (code, out) == (2, "")
    assert "A figure needs matplotlib. Install it: pip install 'dualkg[analysis]'" in err


def test_train_warns_of_leakage_in_one_line(run_cli, inverse_folder):
    code, _, err = run_cli(
        "train", inverse_folder, "--no-tune", "--dim", 4, "--epochs", 1, "--threads", 1
    )
    assert code == 0
    warned = [line for line in err.splitlines() if "Leakage" in line]
    assert len(warned) == 1
    assert warned[0].startswith("Leakage: 100.0% of the test triples follow from train")
    assert warned[0].endswith("See: dualkg inspect mine")
