"""`calibrate` and the tasks of `evaluate`, as people see them."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

import dualkg as kg
from dualkg.analysis.figures import draw_reliability
from dualkg.cli import evaluate, output
from dualkg.inference.classification import corrupt_triples, read_negatives

app = typer.Typer()
app.command()(evaluate.calibrate)
app.command("nothing")(lambda: None)  # with a single command typer would leave out its name


@pytest.fixture
def run(small_graph, tmp_path, monkeypatch) -> kg.Run:
    monkeypatch.setattr(output.out, "_width", 120)
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.5)
    return kg.train(model, small_graph, epochs=3, out=tmp_path / "run")


def test_calibrate_prints_and_keeps_what_it_found(run, tmp_path):
    told = CliRunner().invoke(app, ["calibrate", str(run.folder), "--json", "--figure", str(tmp_path / "drawn")])
    assert told.exit_code == 0, told.output
    facts = json.loads(told.stdout)
    assert facts["calibration"]["overall"]["num_true"] == 40
    assert facts["coverage"]["overall"]["num_queries"] == 40
    assert facts["figures"] == [str(tmp_path / "drawn.png"), str(tmp_path / "drawn.svg")]
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((run.folder / "calibration.json").read_text())
    assert kept["checks"]["coverage"] == facts["coverage"]


def test_calibrate_for_people(run, capsys):
    evaluate.calibrate(run.folder, coverage=0.8)
    out = capsys.readouterr().out
    for words in ("ECE", "Brier", "with p ≥ .01", "predicted", "prediction sets for 80%", "for heads", "r3"):
        assert words in out


def test_calibrate_again_mends_a_damaged_file(run):
    (run.folder / "calibration.json").write_text("{")
    with pytest.raises(kg.RequestError, match="is damaged: it is not JSON"):
        evaluate.calibrate(run.folder)
    evaluate.calibrate(run.folder, again=True)
    evaluate.calibrate(run.folder)


def test_relation_prediction(run, capsys):
    evaluate.evaluate_task(run.folder, "relation", split="test", as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert facts["metrics"] == kg.evaluate_relations(run.model, run.graph).as_dict()
    evaluate.evaluate_task(run.folder, "relation", split="valid")
    assert "(head, ?, tail)" in capsys.readouterr().out


def test_classification_with_sampled_negatives(run, capsys):
    evaluate.evaluate_task(run.folder, "classification", split="test", by="relation")
    out = capsys.readouterr().out
    for words in ("accuracy", "F1", "AUC", "made test", "r0", "False triples: sampled"):
        assert words in out


def test_classification_with_given_negatives(run, tmp_path, capsys):
    """CoDEx has valid_negatives.txt and test_negatives.txt side by side; naming one finds the other."""
    for split in ("valid", "test"):
        false = corrupt_triples(run.graph, run.graph.split(split), seed=3).tolist()
        text = "".join(f"e{head}\tr{relation}\te{tail}\n" for head, relation, tail in false)
        (tmp_path / f"{split}_negatives.txt").write_text(text)
    path = tmp_path / "test_negatives.txt"
    evaluate.evaluate_task(run.folder, "classification", split="test", negatives=path, as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert (facts["negatives"], facts["valid_negatives"]) == ("given", "given")
    assert facts["metrics"]["num_false"] == len(read_negatives(path, run.graph)) == 20


@pytest.mark.parametrize(
    ("task", "choices", "sentence"),
    [
        ("clustering", {}, "--task is one of link, classification, relation; 'clustering' came"),
        ("relation", {"by": "relation"}, "--task relation is reported as a whole"),
        ("relation", {"negatives": "x.tsv"}, "--negatives is for --task classification"),
        ("classification", {"by": "direction"}, "--task classification is reported by relation; 'direction' came"),
        ("classification", {"negatives": "nowhere.tsv"}, "There is no file nowhere.tsv"),
    ],
)
def test_nonsense_gets_a_sentence(run, task, choices, sentence):
    with pytest.raises(kg.RequestError, match=sentence):
        evaluate.evaluate_task(run.folder, task, split="test", **choices)


def test_a_diagram_needs_something_to_draw():
    with pytest.raises(kg.RequestError, match="A reliability diagram needs a panel with a bin in it"):
        draw_reliability({"ComplEx": []})


def test_the_diagram_says_what_it_shows(tmp_path):
    points = [(0.011, 0.0, 0.003), (0.05, 0.07, 0.01), (0.5, 0.4, 0.02)]
    panels = {"ComplEx": points, "CP": points}
    drawing, again = (draw_reliability(panels, graph="world test", ece=0.0123) for _ in range(2))
    assert "Expected calibration error: 0.0123" in drawing.caption
    assert "world test" in drawing.caption
    first, second = drawing.save(tmp_path / "one"), again.save(tmp_path / "other")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    svg = first[1].read_text()
    for words in ("ComplEx", "CP", "probability predicted", "share found true", "10%"):
        assert words in svg
