"""Errors that several modules of the package raise."""

from dualkg.errors import PYTHON, DataError, Words


class MissingTriples(DataError):
    """A split has no triples, and something cannot be computed without them.

    `purpose` begins the sentence ("Calibration"). With `only_there`, triples that another split
    contains too do not count.
    """

    def __init__(self, graph: str, split: str, *, purpose: str, only_there: bool = False) -> None:
        super().__init__()
        self.graph = graph
        self.split = split
        self.purpose = purpose
        self.only_there = only_there

    def message(self, words: Words = PYTHON) -> str:
        missing = f"{self.graph} has none"
        if self.only_there:
            missing += " that are not in another split too"
        return (
            f"{self.purpose} needs {self.split} triples, and {missing}. Split the graph so that "
            f"{self.split} has some."
        )


class NameNotForTsv(DataError):
    """A name has a tab or a line end, which would break the lines of a TSV file.

    `kind` says what it is the name of ("entity"), and `alternative` completes "Write".
    """

    def __init__(self, name: str, *, kind: str, alternative: str) -> None:
        super().__init__()
        self.name = name
        self.kind = kind
        self.alternative = alternative

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"The {self.kind} {self.name!r} has a tab or a line end in its name, which a TSV file "
            f"cannot hold. Write {self.alternative} instead."
        )
