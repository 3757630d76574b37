"""Files that are almost in columns: with a number of triples, comments, empty columns or NUL."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dualkg.cli.words import as_options
from dualkg.data.graph import SPLITS, Graph
from dualkg.data.inspection import MIN_RELATIONS, many_relations
from dualkg.data.loading import load_graph
from dualkg.errors import DataError
from tests.data.test_headers import DENSE, named

Rows = list[tuple[str, str, str]]
ALL = "100/0/0"
# Ids of head, tail and relation, as OpenKE writes them: 12 tails and 3 relations.
IDS: Rows = [(head[1:], tail[1:], relation[1:]) for head, relation, tail in DENSE]
PLAIN: Rows = [(head, relation, tail) for head, tail, relation in IDS]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALKG_CACHE", str(tmp_path / "cache"))


def lines(rows: Rows, separator: str = "\t") -> list[str]:
    return [separator.join(row) for row in rows]


def write(path: Path, content: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in content), encoding="utf-8")
    return path


def all_of(path: Path, **options: object) -> Graph:
    return load_graph(path, split=ALL, **options)  # type: ignore[arg-type]


# -- the number of triples ---------------------------------------------------


@pytest.mark.parametrize(
    ("name", "separator"), [("mine.txt", " "), ("mine.txt", "\t"), ("mine.csv", ",")]
)
def test_files_that_begin_with_their_number_of_triples_are_those_of_openke(
    tmp_path: Path, name: str, separator: str
) -> None:
    path = write(tmp_path / name, [str(len(IDS)), *lines(IDS, separator)])
    graph = all_of(path)
    plain = all_of(write(tmp_path / "plain.tsv", lines(PLAIN)))
    assert graph.fingerprint == plain.fingerprint
    assert list(graph.notes)[-1] == (
        f"The first line of {path} is the number of its triples, as in files of OpenKE, so its "
        "columns were read as head, tail and relation. If they are head, relation and tail, use "
        "`columns=(1, 2, 3)`."
    )


def test_chosen_columns_are_read_below_the_number_of_triples(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.tsv", ["# ids", str(len(IDS)), *lines(IDS)])
    plain = all_of(write(tmp_path / "plain.tsv", lines(PLAIN)))
    graph = all_of(path, columns=(1, 3, 2))
    assert graph.fingerprint == plain.fingerprint
    assert list(graph.notes) == [
        f"The first line of {path}, the number of its triples, was skipped.",
        f"1 line that begins with # was skipped ({path}).",
    ]
    assert named(all_of(path, columns=(1, 2, 3))) == set(IDS)


def test_a_header_below_the_number_of_triples_names_the_columns(tmp_path: Path) -> None:
    content = [str(len(IDS)), "# columns", "head\ttail\trelation", *lines(IDS)]
    graph = all_of(write(tmp_path / "mine.tsv", content))
    assert named(graph) == set(PLAIN)


def test_the_splits_of_a_folder_are_judged_together(tmp_path: Path) -> None:
    """A small split has nearly as many relations as tails."""
    folder = tmp_path / "mine"
    folder.mkdir()
    parts = {"train": IDS[4:], "valid": IDS[:2], "test": IDS[2:4]}
    for split, ids in parts.items():
        write(folder / f"{split}.txt", [str(len(ids)), *lines(ids, " ")])
    graph = load_graph(folder)
    assert named(graph) == set(PLAIN)
    assert graph.counts["valid"] == 2


# -- many relations ----------------------------------------------------------


def test_very_many_relations_are_questioned_in_notes_and_warnings(tmp_path: Path) -> None:
    heads = [(head, tail) for head in range(150) for tail in (head + 1, head + 7)]
    rows = [(f"e{head}", f"e{tail % 150}", f"r{head % 3}") for head, tail in heads]
    path = write(tmp_path / "mine.tsv", lines(rows))
    graph = all_of(path)
    expected = (
        "There are 150 relations and 153 entities, which is unusual. If the columns are in another "
        "order than head, relation and tail, choose them, such as `columns=(1, 3, 2)`."
    )
    assert list(graph.notes)[-1] == expected
    assert [str(warning) for warning in graph.inspect().warnings()] == [expected]
    assert graph.inspect().as_dict()["warnings"] == [expected]
    in_order = all_of(path, columns=(1, 3, 2))
    assert list(in_order.notes) == []
    assert in_order.inspect().warnings() == []


def test_only_many_relations_are_questioned() -> None:
    assert many_relations(14, MIN_RELATIONS) is None
    assert many_relations(2 * MIN_RELATIONS + 2, MIN_RELATIONS + 1) is None
    question = many_relations(2 * MIN_RELATIONS + 1, MIN_RELATIONS + 1)
    assert question is not None
    assert "such as --columns 1,3,2." in as_options(question)


# -- comments ----------------------------------------------------------------


def comments_note(number: int, path: Path) -> str:
    what = "1 line that begins with # was"
    if number > 1:
        what = f"{number:,} lines that begin with # were"
    return f"{what} skipped ({path})."


@pytest.mark.parametrize(
    ("name", "separator"), [("mine.tsv", "\t"), ("mine.txt", " "), ("mine.csv", ",")]
)
@pytest.mark.parametrize("header", [[], ["head relation tail"]])
def test_comments_are_skipped_and_counted(
    tmp_path: Path, name: str, separator: str, header: list[str]
) -> None:
    named_columns = [line.replace(" ", separator) for line in header]
    first, *rest = lines(DENSE, separator)
    content = ["# Facts", "#", *named_columns, first, "#", *rest, "# The end of it"]
    path = write(tmp_path / name, content)
    graph = all_of(path)
    assert graph.fingerprint == all_of(write(tmp_path / "plain.tsv", lines(DENSE))).fingerprint
    assert list(graph.notes)[-1] == comments_note(4, path)


def test_a_line_of_three_columns_is_a_triple_whatever_its_first_sign(tmp_path: Path) -> None:
    rows = [("#a", "r", "b"), *DENSE, ("# c", "r", "d"), ("#", "r", "#")]
    graph = all_of(write(tmp_path / "mine.tsv", ["# tags", *lines(rows)]))
    assert ("#a", "r", "b") in named(graph)
    assert ("# c", "r", "d") in named(graph)
    only_tags = [("#a", "r", "#b"), ("#c", "s", "#d")]
    path = write(tmp_path / "tags.tsv", ["# tags", *lines(only_tags)])
    assert named(all_of(path)) == set(only_tags)


def test_a_header_may_begin_with_the_sign_of_comments(tmp_path: Path) -> None:
    rows = [f"{line}\t{number}" for number, line in enumerate(lines(DENSE))]
    path = write(tmp_path / "mine.tsv", ["## by hand", "#head\trelation\ttail\tid", *rows])
    graph = all_of(path)
    assert named(graph) == set(DENSE)
    assert list(graph.notes)[-1] == comments_note(1, path)


def test_a_comment_inside_a_quoted_name_belongs_to_it(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.csv", ['a,r,"b', '# c"', '"#d', 'e",r,f', "# x, y"])
    assert named(all_of(path)) == {("a", "r", "b\n# c"), ("#d\ne", "r", "f")}


def test_a_comment_need_not_be_valid_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.tsv"
    path.write_bytes(b"# caf\xe9\na\tr\tb\r\n# x\r\nc\tr\td\r\n")
    graph = all_of(path)
    assert named(graph) == {("a", "r", "b"), ("c", "r", "d")}
    assert list(graph.notes) == [comments_note(2, path)]


NAME = st.text('ab#," é\0', min_size=1, max_size=3).filter(
    lambda name: name.strip() == name and not name.isspace()
)
COMMENT = st.text("ab# é\0\x85", max_size=5).map(lambda text: f"#{text}")


@given(
    st.lists(st.tuples(NAME, NAME, NAME), min_size=1, max_size=6, unique=True),
    st.lists(st.tuples(st.integers(0, 6), COMMENT), max_size=4),
    st.integers(0, 2),
    st.sampled_from(["\n", "\r\n"]),
)
def test_comments_and_empty_columns_do_not_change_the_graph(
    rows: Rows, comments: list[tuple[int, str]], num_blank: int, line_end: str
) -> None:
    # Without a name of a column and a line that begins otherwise, all lines are comments.
    assume(not num_blank or any(not head.startswith("#") for head, _, _ in rows))
    content = [line + "\t" * num_blank for line in lines(rows)]
    for position, comment in comments:
        content.insert(position, comment)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.tsv"
        plain.write_bytes("\n".join(lines(rows)).encode())
        odd = Path(folder) / "odd.tsv"
        odd.write_bytes(line_end.join(content).encode())
        # Chosen columns, so that no first line is taken for a header.
        graph = all_of(odd) if num_blank else all_of(odd, columns=(1, 2, 3))
        assert named(graph) == set(rows)
        if not num_blank:
            assert graph.fingerprint == all_of(plain, columns=(1, 2, 3)).fingerprint
        skipped = [text for text in list(graph.notes) if "skipped" in text]
        assert skipped == ([comments_note(len(comments), odd)] if comments else [])


# -- empty columns at the end ------------------------------------------------


@pytest.mark.parametrize(("name", "separator"), [("mine.tsv", "\t"), ("mine.csv", ",")])
def test_a_separator_at_the_end_of_each_line_is_ignored(
    tmp_path: Path, name: str, separator: str
) -> None:
    path = write(tmp_path / name, [line + separator for line in lines(DENSE, separator)])
    graph = all_of(path)
    assert graph.fingerprint == all_of(write(tmp_path / "plain.tsv", lines(DENSE))).fingerprint
    assert list(graph.notes) == [
        f"Each line of {path} has an empty column at its end, which was ignored."
    ]


# -- no test triples ---------------------------------------------------------


def make_folder(folder: Path, *splits: str) -> Path:
    folder.mkdir()
    for split in splits:
        write(folder / f"{split}.tsv", lines(DENSE[SPLITS.index(split) :: 3]))  # type: ignore[arg-type]
    return folder


def test_a_folder_may_have_no_test_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mine", "train", "valid")
    graph = load_graph(folder)
    assert (graph.counts["valid"], graph.counts["test"]) == (44, 0)
    assert list(graph.notes) == [f"{folder} has no test file, so there are no test triples."]
    assert load_graph(folder).fingerprint == graph.fingerprint  # from the cache
    assert graph.inspect().warnings() == []


@pytest.mark.parametrize("content", ["", "head\trelation\ttail\n", "# none\n"])
def test_a_test_file_may_be_empty(tmp_path: Path, content: str) -> None:
    folder = make_folder(tmp_path / "mine", "train", "valid")
    (folder / "test.tsv").write_text(content)
    graph = load_graph(folder)
    assert graph.counts["test"] == 0
    expected = f"{folder / 'test.tsv'} is empty, so there are no test triples."
    assert list(graph.notes)[-1] == expected
    (folder / "valid.tsv").write_text(content)
    with pytest.raises(DataError):
        load_graph(folder)


# -- NUL ---------------------------------------------------------------------


@pytest.mark.parametrize(("name", "separator"), [("mine.tsv", "\t"), ("mine.csv", ",")])
def test_names_with_a_nul_are_read_and_reported(tmp_path: Path, name: str, separator: str) -> None:
    rows = [("a\0b", "r", "c"), ("c", "r", "a\0b"), ("c", "\0", "d")]
    path = write(tmp_path / name, lines(rows, separator))
    graph = all_of(path)
    assert named(graph) == set(rows)
    assert list(graph.notes) == [f"3 names contain a NUL character ({path}). Is it text in UTF-8?"]
    (sentence,) = list(Graph.from_triples(rows[:1], split=ALL).notes)
    assert sentence.startswith("1 name contains a NUL character (The list).")
