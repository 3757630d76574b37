"""Headers of any names, blanks around names, delimiters: what is removed is reported, and triples
are never.
"""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualkg.data.graph import SPLITS, Graph
from dualkg.data.loading import load_graph
from dualkg.errors import DataError

Rows = list[tuple[str, str, str]]
PAIRS = [(head, tail) for head in range(12) for tail in range(12) if head != tail]
DENSE: Rows = [(f"e{head}", f"r{(head + tail) % 3}", f"e{tail}") for head, tail in PAIRS]
HEADER = (
    "The first line of {} (von, kante, nach) was read as a header: its names occur nowhere else in "
    "their columns."
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALKG_CACHE", str(tmp_path / "cache"))


def write(path: Path, rows: Rows, separator: str = ",") -> Path:
    path.write_text("".join(separator.join(row) + "\n" for row in rows), encoding="utf-8")
    return path


def named(graph: Graph) -> set[tuple[str, str, str]]:
    triples = np.concatenate([graph.split(split) for split in SPLITS]).tolist()
    return {
        (graph.entities[head], graph.relations[relation], graph.entities[tail])
        for head, relation, tail in triples
    }


@pytest.mark.parametrize(
    "header",
    [
        *(
            "src,relation,dst",
            "from,type,to",
            "head_id,relation_id,tail_id",
            "node1,label,node2",
            "Subj,Pred,Obj",
        ),
        *(
            "Head Entity,Relation Type,Tail Entity",
            "start_node,edge_label,end_node",
            "source,edge,target",
        ),
    ],
)
def test_usual_names_are_a_header(tmp_path: Path, header: str) -> None:
    names = tuple(header.split(","))
    path = write(tmp_path / "mine.csv", [names, *DENSE])  # type: ignore[list-item]
    graph = load_graph(path)
    assert named(graph) == set(DENSE)
    assert list(graph.notes) == [f"The first line of {path} was read as a header."]


def test_kgtk_columns_are_found_beside_others(tmp_path: Path) -> None:
    rows = [("id", "node1", "label", "node2"), *((f"x{i}", *row) for i, row in enumerate(DENSE))]
    path = write(tmp_path / "mine.tsv", rows, "\t")  # type: ignore[arg-type]
    assert named(load_graph(path)) == set(DENSE)


def test_a_header_of_unknown_names_is_found_and_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.csv", [("von", "kante", "nach"), *DENSE])
    graph = load_graph(path)
    plain = load_graph(write(tmp_path / "plain.csv", DENSE))
    assert list(graph.notes) == [
        f"{HEADER.format(path)} If it is a triple, use `columns=(1, 2, 3)`."
    ]
    assert graph.entities == plain.entities
    assert graph.fingerprint == plain.fingerprint
    kept = load_graph(path, columns=(1, 2, 3))
    assert ("von", "kante", "nach") in named(kept)
    assert not kept.notes


def test_a_header_in_each_file_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    headers = tmp_path / "headers"
    for path in (folder, headers):
        path.mkdir()
        for i, split in enumerate(SPLITS):
            first = [("von", "kante", "nach")] if path == headers and split != "valid" else []
            write(path / f"{split}.csv", [*first, *DENSE[i::3]])
    graph = load_graph(headers)
    assert graph.fingerprint == load_graph(folder).fingerprint
    (sentence,) = list(graph.notes)
    assert sentence.startswith(
        HEADER.format(f"{headers / 'train.csv'} and of {headers / 'test.csv'}")
    )


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (("e0", "only", "new"), []),  # an entity that other triples have as head
        (("new", "r0", "newer"), []),  # a known relation
        (("new", "only", "newer"), [("other", "once", "another")]),  # not the only such line
        (("new", "only", "newer"), [("newer", "r0", "e1")]),  # an end in the other column
        (("7", "8", "9"), []),  # ids
    ],
)
def test_a_true_triple_in_the_first_line_is_kept(
    tmp_path: Path, first: tuple[str, str, str], more: Rows
) -> None:
    rows = [first, *DENSE, *more]
    graph = load_graph(write(tmp_path / "mine.csv", rows))
    assert named(graph) == set(rows)
    may_be_one = [sentence for sentence in list(graph.notes) if "If it is a header" in sentence]
    assert len(may_be_one) == (first == ("new", "only", "newer"))


def test_few_lines_or_many_relations_prove_no_header(tmp_path: Path) -> None:
    few = [
        ("anna", "likes", "bob"),
        ("carl", "knows", "dora"),
        ("dora", "knows", "carl"),
        ("carl", "knows", "carl"),
    ]
    for rows in (
        few,
        [("a", "b", "c"), *((f"e{i % 5}", f"r{i % 20}", f"e{i % 7}") for i in range(30))],
    ):
        assert named(load_graph(write(tmp_path / "mine.csv", rows), split="100/0/0")) == set(rows)


def test_numbered_columns_keep_the_line_and_mention_a_header(tmp_path: Path) -> None:
    rows = [("id", "von", "kante", "nach"), *((f"x{i}", *row) for i, row in enumerate(DENSE))]
    path = write(tmp_path / "mine.csv", rows)  # type: ignore[arg-type]
    graph = load_graph(path, columns=(2, 3, 4))
    assert ("von", "kante", "nach") in named(graph)
    assert graph.notes[0] == (
        f"The first line of {path} (von, kante, nach) was read as a triple. If it is a header, use "
        "`columns=('von', 'kante', 'nach')`."
    )


def test_notes_name_the_file_that_was_given(tmp_path: Path) -> None:
    """Two files of the same bytes and the same name in two folders; one of them may be gone."""
    for folder in (tmp_path / "old", tmp_path / "new"):
        folder.mkdir()
        path = write(folder / "mine.csv", [("von", "kante", "nach "), *DENSE])
        assert f"Blanks around 1 name was removed ({path})." in list(load_graph(path).notes)


NAME = st.text("abc", min_size=1, max_size=2)


def relations_repeat(rows: Rows) -> bool:
    """A relation of one triple could make the first line, or another one, look like a header."""
    return all([row[1] for row in rows].count(relation) != 1 for relation in "rs")


@given(
    st.lists(st.tuples(NAME, st.sampled_from(["r", "s"]), NAME), min_size=4, unique=True).filter(
        relations_repeat
    ),
    st.lists(
        st.text("xyzäß ", min_size=1).filter(str.strip), min_size=3, max_size=3, unique_by=str.strip
    ),
    st.lists(st.sampled_from(["", " ", "  ", "\u00a0", "\u3000 "]), min_size=3, max_size=3),
)
def test_any_header_and_any_blanks_give_the_same_graph(
    rows: Rows, header: list[str], blanks: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        plain = load_graph(write(Path(name) / "plain.csv", rows), split="100/0/0")
        padded = [
            tuple(cell + blank for cell, blank in zip(row, blanks, strict=True)) for row in rows
        ]
        path = write(Path(name) / "mine.csv", [tuple(header), *padded])  # type: ignore[list-item]
        graph = load_graph(path, split="100/0/0")
        assert graph.fingerprint == plain.fingerprint
        stripped = [
            sentence for sentence in list(graph.notes) if sentence.startswith("Blanks around ")
        ]
        num = len(rows) * sum(map(bool, blanks)) + sum(cell != cell.strip() for cell in header)
        plural = "1 name was" if num == 1 else f"{num:,} names were"
        assert stripped == ([f"Blanks around {plural} removed ({path})."] if num else [])


@pytest.mark.parametrize(
    ("separator", "delimiter"),
    [
        ("|", "pipe"),
        ("|", "|"),
        (";", "semicolon"),
        (",", "comma"),
        ("\t", "tab"),
        ("\t", "\\t"),
        (" ", "space"),
    ],
)
def test_a_delimiter_may_be_chosen(tmp_path: Path, separator: str, delimiter: str) -> None:
    path = write(tmp_path / "mine.dat", DENSE, separator)
    graph = load_graph(path, delimiter=delimiter)
    assert named(graph) == set(DENSE)
    assert graph.read_options["delimiter"] == delimiter


def test_columns_separated_by_spaces_are_recognized(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(
        "".join(f" {h}  {r} \t{t} \r\n" if r == "r0" else f"{h} {r} {t}\n\n" for h, r, t in DENSE)
    )
    with pytest.raises(DataError) as caught:
        load_graph(path)  # there are tabs
    assert "expected 3 columns separated by tabs" in str(caught.value)
    assert named(load_graph(path, delimiter="space")) == set(DENSE)
    path.write_text(path.read_text().replace("\t", " "))
    graph = load_graph(path)
    assert named(graph) == set(DENSE)
    assert list(graph.notes) == [f"The columns of {path} are separated by spaces."]
