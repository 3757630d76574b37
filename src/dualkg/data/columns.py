"""The columns of head, relation and tail: recognized in a header, or chosen by name or number."""

from collections.abc import Sequence

from dualkg.errors import DataError, InvalidValue, RequestError, close_matches, one_of

Columns = Sequence[str | int]
Indices = tuple[int, ...]

ROLES = ("head", "relation", "tail")
MAX_LISTED = 20  # columns in a message
# Earlier words take precedence, so that `head relation tail source` is read as intended.
HEAD_WORDS = "head subject subj source src from start node1 h s"
RELATION_WORDS = "relation predicate property relationship rel pred edge link type r p label"
TAIL_WORDS = "tail object obj target dst dest destination to end node2 t o"
WORDS = {
    "head": tuple(HEAD_WORDS.split()),
    "relation": tuple(RELATION_WORDS.split()),
    "tail": tuple(TAIL_WORDS.split()),
}
# As in head_id, Head Entity or edge_type.
ENDINGS = ("", "id", "name", "entity", "node", "type", "uri", "iri", "label")


def check_columns(columns: Columns | None) -> None:
    """Refuse a choice of columns that no file could satisfy."""
    if columns is None:
        return

    are_three = not isinstance(columns, str) and len(columns) == len(ROLES) == len(set(columns))
    if not are_three or not all(type(column) in (str, int) for column in columns):
        raise InvalidValue(
            "columns",
            expected="three different names or numbers, of head, relation and tail, such as "
            "('subject', 'predicate', 'object') or (1, 2, 3)",
            found=columns,
        )

    for column in columns:
        if isinstance(column, int) and column < 1:
            raise InvalidValue("columns", expected="counted from 1", found=column)


def recognize_header(cells: Sequence[str]) -> Indices | None:
    """The positions of head, relation and tail in a header, or None if the cells are not one."""
    words = [_letters_of(cell) for cell in cells]
    indices: list[int] = []
    for role in ROLES:
        index = _find_role(role, words)
        if index is None or index in indices:
            return None
        indices.append(index)
    return tuple(indices)


def _letters_of(cell: str) -> str:
    """`Head Entity` and `head_entity` are the same word."""
    return "".join(letter for letter in cell.casefold() if letter.isalnum())


def _find_role(role: str, words: Sequence[str]) -> int | None:
    for ending in ENDINGS:
        for word in WORDS[role]:
            # A single letter stands by itself: `sid` is no head.
            if len(word) == 1 and ending:
                continue
            if word + ending in words:
                return words.index(word + ending)
    return None


def find_columns(columns: Columns, header: Sequence[str], name: str) -> Indices:
    """The positions of the chosen columns in a header, or in a first line if all are numbers."""
    indices = tuple(_find_column(column, header, name) for column in columns)
    if len(set(indices)) < len(indices):
        raise RequestError(
            f"{name} has one column that {tuple(columns)} means twice. Choose three different "
            "columns."
        )
    return indices


def _find_column(column: str | int, header: Sequence[str], name: str) -> int:
    if isinstance(column, int):
        if column > len(header):
            raise DataError(
                f"{name} has {len(header)} columns, and column {column} was given. Choose numbers "
                f"from 1 to {len(header)}."
            )
        return column - 1

    indices = [index for index, cell in enumerate(header) if cell == column]
    if not indices:
        folded = column.strip().casefold()
        indices = [index for index, cell in enumerate(header) if cell.strip().casefold() == folded]

    if not indices:
        raise DataError(
            f"{name} has no column named '{column}'. Its columns are {quoted(header)}."
            f"{one_of(close_matches(column, header))}"
        )
    if len(indices) > 1:
        raise DataError(
            f"{name} has {len(indices)} columns named '{column}'. Choose by number instead."
        )
    return indices[0]


def quoted(names: Sequence[str]) -> str:
    """The first names of a list, in quotes."""
    return ", ".join(f"'{name}'" for name in names[:MAX_LISTED])
