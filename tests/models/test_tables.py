"""The tables of docs/models.md say what the classes do."""

import re
from pathlib import Path

import dualkg as kg
from dualkg.training.engines import Job, kernels_know_relations
from tests.families import BILINEAR, EMBEDDINGS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SHAPE = kg.GraphShape(30, 3)


def table(first: str) -> dict[str, dict[str, str]]:
    """A table of docs/models.md by the start of its header: for each model, the cells by column."""
    text = PAGE.read_text(encoding="utf-8")
    match = re.search(rf"^(\| {re.escape(first)} .*\|)\n\|[-|]+\|\n((?:\|.*\|\n)+)", text, re.M)
    assert match, f"docs/models.md has no table that begins with {first}"
    _, *columns = _cells(match[1])
    rows = {}
    for line in match[2].splitlines():
        name, *cells = _cells(line)
        rows[re.sub(r"\W", "", name)] = dict(zip(columns, cells, strict=True))
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_docs_have_the_table_of_capabilities():
    def says(name: str) -> dict[str, str]:
        model = EMBEDDINGS[name](SHAPE, dim=2)
        return {
            "dual": "yes" if name in BILINEAR else "no",
            "DURA": "yes" if model.has_adjoint else "no",
            "N3": "yes" if model.diagonal and model.euclidean else "no",
            "fast engine": "yes" if model.score_form else "no",
            "GPU kernels": "yes"
            if kernels_know_relations(Job(model, kg.OneVsAll(), kg.DURA(1.0), "Adagrad"))
            else "no",
        }

    expected = {name: says(name) for name in EMBEDDINGS}
    for name in ("TransE", "RotatE", "ModE"):
        expected[name]["fast engine"] = 'norm "squared"'
        assert EMBEDDINGS[name](SHAPE, dim=2, norm="squared").score_form == "squared distances"
    expected["QuatE"]["GPU kernels"] = "not normalized"
    scaling = kg.QuatE(SHAPE, dim=2, normalized=False)
    assert kernels_know_relations(Job(scaling, kg.OneVsAll(), kg.DURA(1.0), "Adagrad"))
    assert table("model | dual") == expected


def test_docs_have_the_numbers_of_parameters():
    said = {**table("bilinear model | h R"), **table("distance model | mapped head")}
    assert set(said) == set(EMBEDDINGS)
    for name, row in said.items():
        model = EMBEDDINGS[name](SHAPE, dim=3, **({"relation_dim": 5} if name == "TuckER" else {}))
        dim = 3
        counted = {"dim": dim, "dim²": dim * dim, "relation_dim": 5}
        entity = sum(
            table.shape[1] for table in model.parameters() if table.shape[0] == SHAPE.num_entities
        )
        for found, column in (
            (entity, "parameters per entity"),
            (model.relations.shape[1], "parameters per relation"),
        ):
            assert _count(row[column], counted) == found, f"{name}, {column}"


def _count(text: str, counted: dict[str, int]) -> int:
    """`2 · dim + 2`, or `dim as head, dim as tail`, with numbers for its words."""
    terms = re.split(r" \+ |, ", re.sub(r" as \w+", "", text.replace("`", "")))
    total = 0
    for term in terms:
        *times, word = term.split(" · ")
        total += (int(times[0]) if times else 1) * (counted[word] if word in counted else int(word))
    return total
