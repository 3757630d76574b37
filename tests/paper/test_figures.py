"""The figures: their texts and captions, identical files, and refusals."""

import dataclasses
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dualkg.analysis.figures import Drawing
from paper.figures import (
    SHARED,
    NamedQuery,
    Plane,
    Projection,
    Silhouette,
    draw_dura_weights,
    draw_planes,
    draw_projections,
    draw_quantization,
    draw_sparsity,
    format_bytes,
)
from tests.processes import run_python, unload

NAMES = ["Germany · contains", "funk & soul · artists", "organ · role"]


def projection(num_queries: int = 3) -> Projection:
    random = np.random.default_rng(0)
    queries = tuple(
        NamedQuery(
            number, 0, (NAMES * num_queries)[number], np.arange(10 * number, 10 * number + 10)
        )
        for number in range(num_queries)
    )
    groups = np.repeat(np.arange(num_queries), 10)
    groups[4] = SHARED
    one = Silhouette(0.1234, dict.fromkeys(range(num_queries), 0.1))
    return Projection(
        queries=queries,
        entities=np.arange(10 * num_queries),
        groups=groups,
        positions=random.normal(size=(10 * num_queries, 2)),
        perplexity=9.5,
        silhouettes={"euclidean": one, "cosine": Silhouette(0.5, one.by_group)},
    )


def plane() -> Plane:
    random = np.random.default_rng(1)
    return Plane(
        about={
            **{"query": "felid · include", "num_tails": 6, "num_queries": 42},
            **{
                "distances": {"centroid": 0.25, "hR": 1.5},
                "medians": {"centroid": 0.375, "hR": 2.0},
            },
        },
        mapped_head=np.array([1.0, -2.0]),
        tails=random.normal(size=(6, 2)),
        others=np.vstack([random.uniform(-1, 1, size=(150, 2)), [[90.0, 90.0]]]),
    )


CURVE = {0.0: 0.36, 0.5: 0.35, 0.95: 0.05}
CURVES = {
    "CP": {
        "CP-DURA": [CURVE, {share: mrr - 0.01 for share, mrr in CURVE.items()}],
        "CP-N3": [CURVE, CURVE],
    }
}
WEIGHTS = {(0.5, 0.5): 0.361, (0.5, 1.5): 0.366, (1.0, 0.5): 0.352}


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "projection": lambda: draw_projections(
        {"CP": projection(), "CP-DURA": projection()}, graph="FB15k-237"
    ),
    "sparsity": lambda: draw_sparsity(
        CURVES, published={"CP-DURA": {0.6: 0.366}, "RESCAL": {0.0: 0.352}}, graph="UMLS"
    ),
    "plane": lambda: draw_planes({"CP": plane(), "CP-DURA": plane()}, graph="UMLS"),
    "weights": lambda: draw_dura_weights(WEIGHTS, chosen=(0.5, 1.5), title="CP-DURA"),
}


def texts(svg: Path) -> list[str]:
    return [
        "".join(one.itertext()).strip()
        for one in ET.parse(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


def test_the_same_figure_gives_the_same_bytes(tmp_path):
    for name, draw in DRAWINGS.items():
        first = draw().save(tmp_path / "first" / name)
        assert first == [tmp_path / "first" / f"{name}.png", tmp_path / "first" / f"{name}.svg"]
        assert first[0].read_bytes().startswith(b"\x89PNG")
        assert first[0].stat().st_size > 10_000
        svg = first[1].read_text(encoding="utf-8")
        assert not re.search(r"<dc:date>|20\d\d-\d\d-\d\d", svg)
        assert "<text" in svg
        again = draw().save(tmp_path / "again" / f"{name}.svg")
        assert [path.read_bytes() for path in again] == [path.read_bytes() for path in first]
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == sorted(
        f"{name}.{kind}" for name in DRAWINGS for kind in ("png", "svg")
    )


def test_a_projection_names_its_queries_and_explains_the_rings(tmp_path):
    drawing = DRAWINGS["projection"]()
    found = texts(drawing.save(tmp_path / "it")[1])
    assert {*NAMES, "CP", "CP-DURA", "silhouette 0.123", "answers two or more"} <= set(found)
    assert "Answers to 3 queries of FB15k-237, 30 entities" in drawing.caption
    assert "A ring is an entity that answers several of the queries (1)" in drawing.caption
    assert "by cosine distance it is CP 0.500, CP-DURA 0.500" in drawing.caption


def test_lines_are_named_and_published_points_marked(tmp_path):
    drawing = DRAWINGS["sparsity"]()
    found = texts(drawing.save(tmp_path / "it")[1])
    assert {"CP", "CP-DURA", "CP-N3", "published", "MRR", "95%"} <= set(found)
    assert "the mean of 2 seeds" in drawing.caption
    assert "Diamonds are the numbers of the paper" in drawing.caption
    weights = DRAWINGS["weights"]()
    assert {"0.361", "0.366", "0.352", "–"} <= set(texts(weights.save(tmp_path / "w")[1]))
    assert "Best is 0.366, at λ1 = 0.5 and λ2 = 1.5. Framed: λ1 = 0.5" in weights.caption
    bare = draw_sparsity({"": {"CP": [CURVE]}})
    assert bare.caption == "MRR when the smallest entries of the entity embeddings are set to zero."
    [axes] = bare.figure.axes
    [line] = axes.lines
    np.testing.assert_allclose(line.get_xydata(), list(CURVE.items()))


def test_panels_of_the_plane_have_one_scale(tmp_path):
    far = dataclasses.replace(plane(), mapped_head=np.array([300.0, 0.0]))
    assert "The arrow of CP is cut at the frame." in draw_planes({"CP": far}).caption
    drawing = DRAWINGS["plane"]()
    one, other = drawing.figure.axes
    assert one.get_xlim() == other.get_xlim()
    assert one.get_ylim() == other.get_ylim()
    assert np.ptp(one.get_xlim()) == pytest.approx(np.ptp(one.get_ylim()))
    assert "CP 0.38 and 2.00; CP-DURA 0.38 and 2.00" in drawing.caption
    assert "Outside the frame: 1 entity of CP, 1 entity of CP-DURA." in drawing.caption
    assert "Median of the 42 queries with 5 to 20 tails" in drawing.caption
    found = texts(drawing.save(tmp_path / "it")[1])
    assert {
        "answers to felid · include",
        "hR",
        "tails from their centroid 0.25 · from hR 1.50",
    } <= set(found)


@pytest.mark.slow
def test_the_figures_are_imported_without_matplotlib():
    heavy = {"matplotlib", "sklearn", "scipy"}
    code = "import paper.figures, dualkg.analysis, sys; print(*sys.modules)"
    loaded = set(run_python(unload(heavy) + code).out.split())
    assert "paper.figures" in loaded
    assert not heavy & loaded


def test_a_figure_of_storage_formats(tmp_path):
    def result(storage: str, share: float, size: int) -> dict:
        return {"storage": storage, "share": share, "bytes": size, "metrics": {"mrr": 0.3}}

    results = [result("float32", 0, 4000), result("bf16", 0, 2000), result("int8", 0, 1000)]
    results += [result("sparse", 0.9, 800), result("sparse", 0.5, 3000)]
    first, again = (draw_quantization(results, "made").save(tmp_path / name) for name in ("a", "b"))
    assert {"float32", "bf16", "int8", "50%", "90%", "ComplEx-DURA"} <= set(texts(first[1]))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    assert [format_bytes(num) for num in (12, 1500, 2e6, 3.25e9)] == [
        "12 B",
        "1.5 kB",
        "2 MB",
        "3.25 GB",
    ]
