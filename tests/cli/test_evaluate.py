"""`calibrate` and `evaluate`, as users type them."""

import json

import pytest

import dualkg as kg
from dualkg.analysis.figures import draw_reliability
from dualkg.errors import InvalidValue
from dualkg.inference.classification import corrupt_triples, read_negatives
from tests.raising import refused


@pytest.fixture
def run(small_graph, tmp_path) -> kg.Run:
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.5)
    return kg.train(model, small_graph, epochs=3, out=tmp_path / "run")


def test_calibrate_prints_and_saves_its_checks(run_cli, run, tmp_path):
    result = run_cli("calibrate", run.folder, "--json", "--figure", tmp_path / "drawn")
    assert result.code == 0, result.err
    facts = result.json
    assert facts["calibration"]["overall"]["num_true"] == 40
    assert facts["coverage"]["overall"]["num_queries"] == 40
    assert sum(group["num_true"] for group in facts["calibration"]["table"]) == 40
    assert set(facts["calibration"]["table"][0]) >= {"lower", "upper", "interval"}
    assert set(facts["recalibration"]) == {"used", "log_loss", "gain", "standard_error"}
    assert facts["figures"] == [str(tmp_path / "drawn.png"), str(tmp_path / "drawn.svg")]
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((run.folder / "calibration.json").read_text())
    assert saved["checks"]["coverage"] == facts["coverage"]


def test_calibrate_prints_tables(run_cli, run):
    out = run_cli("calibrate", run.folder, "--coverage", 0.8).out
    for words in (
        "ECE",
        "Brier",
        "with p ≥ .01",
        "predicted",
        "0.02 to 0.05",
        "95% interval",
        "ecalibrated: the cross-fitted gain in log loss on valid is",
        "prediction sets for 80%",
        "for heads",
        "r3",
    ):
        assert words in out


def test_the_share_of_missing_triples_is_told(run_cli, run):
    assert (
        "lacks 6.6% of the true triples, as many as valid" in run_cli("calibrate", run.folder).err
    )
    told = run_cli("calibrate", run.folder, "--missing-share", 0.4)
    assert "lacks 40.0% of the true triples, 188 (--missing-share)" in told.err
    completed = run_cli("complete", run.folder, "--top", 3)
    assert "lacks 40.0% of the true triples" in completed.err
    missing = run_cli("complete", run.folder, "--top", 3, "--json").json["missing"]
    assert missing == pytest.approx({"number": 188, "share": 0.4, "per_valid": 9.4})
    assert run_cli("calibrate", run.folder, "--missing-share", 2).code == 2


def test_calibrate_takes_types(run_cli, run):
    result = run_cli("calibrate", run.folder, "--type-relation", "r1")
    assert "entities have types from the relation r1." in result.err
    both = run_cli("calibrate", run.folder, "--type-relation", "r1", "--types-file", "types.tsv")
    assert both.code == 2
    assert "give --type-relation or --types-file, not both" in both.err


def test_a_damaged_calibration_can_be_overwritten(run_cli, run):
    (run.folder / "calibration.json").write_text("{")
    damaged = run_cli("calibrate", run.folder)
    assert damaged.code == 2
    assert "is damaged: it is not JSON" in damaged.err
    assert run_cli("calibrate", run.folder, "--overwrite").code == 0
    assert run_cli("calibrate", run.folder).code == 0


def test_relation_prediction(run_cli, run):
    facts = run_cli("evaluate", run.folder, "--task", "relation", "--json").json
    assert facts["metrics"] == kg.evaluate_relations(run.model, run.graph).as_dict()
    assert (
        "(head, ?, tail)"
        in run_cli("evaluate", run.folder, "--task", "relation", "--split", "valid").out
    )


def test_classification_with_sampled_negatives(run_cli, run):
    out = run_cli("evaluate", run.folder, "--task", "classification", "--by", "relation").out
    for words in ("accuracy", "F1", "AUC", "made test", "r0", "False triples: sampled"):
        assert words in out


def test_classification_with_given_negatives(run_cli, run, tmp_path):
    """CoDEx has valid_negatives.txt and test_negatives.txt in one folder; naming one finds the
    other.
    """
    for split in ("valid", "test"):
        false = corrupt_triples(run.graph, run.graph.split(split), seed=3).tolist()
        text = "".join(f"e{head}\tr{relation}\te{tail}\n" for head, relation, tail in false)
        (tmp_path / f"{split}_negatives.txt").write_text(text)
    path = tmp_path / "test_negatives.txt"
    facts = run_cli(
        "evaluate", run.folder, "--task", "classification", "--negatives", path, "--json"
    ).json
    assert (facts["negatives"], facts["valid_negatives"]) == ("given", "given")
    assert facts["metrics"]["num_false"] == len(read_negatives(path, run.graph)) == 20


def test_an_empty_reliability_diagram_is_refused():
    with refused(
        InvalidValue,
        setting="panels",
        expected="panels with at least one bin each",
        found={"ComplEx": []},
    ):
        draw_reliability({"ComplEx": []})


def test_reliability_diagram(tmp_path):
    points = [(0.011, 0.0, 0.003), (0.05, 0.07, 0.01), (0.5, 0.4, 0.02)]
    panels = {"ComplEx": points, "CP": points}
    drawing, again = (draw_reliability(panels, graph="world test", ece=0.0123) for _ in range(2))
    assert "Expected calibration error: 0.0123" in drawing.caption
    assert "world test" in drawing.caption
    first = drawing.save(tmp_path / "one")
    second = again.save(tmp_path / "other")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    svg = first[1].read_text()
    for words in ("ComplEx", "CP", "predicted probability", "observed frequency", "10%"):
        assert words in svg


def test_hits_at_any_k_and_restricted_candidates(run_cli, run, tmp_path):
    out = run_cli("evaluate", run.folder, "--hits", "1,5,20", "--by", "direction").out
    assert all(words in out for words in ("H@5", "H@20", "AMR", "AMRI", "head"))
    assert "H@10" not in out
    facts = run_cli("evaluate", run.folder, "--hits", "5", "--type-constrained", "--json").json
    report = kg.evaluate(run.model, run.graph, hits=(5,), type_constrained=True)
    assert facts == json.loads(report.as_json())
    assert facts["candidates"] == "domain or range of the relation in train"
    assert facts["metrics"]["hits_at_5"] == report.hits(5)
    graph = run.graph
    path = tmp_path / "lists.jsonl"
    lines = []
    for h, r, t in graph.test.tolist():
        row = {"head": graph.entities[h], "relation": graph.relations[r], "tail": graph.entities[t]}
        lines.append(
            json.dumps({**row, "tail_candidates": ["e0", "e1"], "head_candidates": ["e2"]})
        )
    path.write_text("\n".join(lines))
    result = run_cli("evaluate", run.folder, "--candidates", path)
    assert result.code == 0, result.err
    assert "Candidates: given lists, without known answers." in result.out
    assert (
        run_cli("evaluate", run.folder, "--candidates", path, "--json").json["metrics"]["mr"] <= 2
    )
    relations = run_cli("evaluate", run.folder, "--task", "relation", "--hits", "2", "--json").json
    assert relations["metrics"] == kg.evaluate_relations(run.model, graph, hits=(2,)).as_dict()
