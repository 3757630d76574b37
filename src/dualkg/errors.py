"""Errors, whose messages say what was expected, what was found and what to do; and names in
messages: similar ones, and characters that would change what is displayed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MIN_SIMILARITY = 0.6  # the fraction of letters that two names must have in common
MAX_SUGGESTED = 3  # similar names
MAX_WORD = 400
MAX_SENTENCE = 2000  # characters of a message
SYNONYMS = (  # words for one setting in dualkg, other libraries and the literature
    {"lr", "learning_rate", "alpha", "step_size"},
    {"dim", "embedding_dim", "embedding_size", "dimension", "hidden_dim", "hidden_size"},
    {"batch_size", "batch", "batchsize", "bs"},
    {"epochs", "num_epochs", "max_epochs", "n_epochs"},
    {"optimizer", "optim", "optimiser"},
    {"regularizer", "reg", "regularization", "regulariser"},
    {"weight", "lambda", "lam", "reg_weight", "regularization_weight", "regularizer_weight"},
    {"loss", "criterion", "objective", "loss_function"},
    {"patience", "early_stopping", "stopper", "early_stop"},
    {
        "num_negatives",
        "negatives",
        "num_neg",
        "num_negs",
        "num_negs_per_pos",
        "negative_sample_size",
    },
    {"margin", "gamma"},
    {"adversarial_temperature", "temperature"},
    {"label_smoothing", "smoothing", "label_smooth"},
    {"seed", "random_seed", "random_state"},
    {"device", "gpu", "cuda"},
    {"reciprocal", "inverse", "inverse_relations", "create_inverse_triples"},
    {"out", "output", "output_dir", "save_dir", "save_path"},
    {"top", "top_k", "topk", "k"},
    {"track", "tracker", "result_tracker", "logger"},
)
# How libraries say that the system refuses memory, or a thread, which needs some.
NO_MEMORY = re.compile(
    "(can.?t|cannot|failed to) allocate|(not enough|out of) memory|bad_alloc|failed to map segment"
    "|can.?t start new thread|failed to launch worker thread",
    re.IGNORECASE,
)
# Control codes of terminals, bidirectional overrides and isolates, which reorder text around them,
# and invisible ones.
REORDERING = (
    *range(0x80, 0xA0),
    0x200B,
    *range(0x202A, 0x202F),
    0x2060,
    *range(0x2066, 0x206A),
    0xFEFF,
)
VISIBLE = dict.fromkeys((*range(32), 127), "�") | {ord("\t"): "⇥", ord("\n"): "↵", ord("\r"): "↵"}
VISIBLE |= {0x2028: "↵", 0x2029: "↵"} | {code: f"⟨U+{code:04X}⟩" for code in REORDERING}
VISIBLE_LINES = {code: text for code, text in VISIBLE.items() if chr(code) not in "\t\n"}
JSON_ESCAPES = {
    code: f"\\u{code:04x}" for code in REORDERING
}  # the same JSON, harmless in a terminal


def shortened(text: str) -> str:
    """A text whose words, and which itself, are not longer than a reader can use."""
    text = re.sub(rf"\S{{{MAX_WORD + 1},}}", lambda found: _cut(found[0], MAX_WORD), text)
    return _cut(text, MAX_SENTENCE)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most * 3 // 4]}…{text[-most // 4 + 1 :]}"


class DualkgError(Exception):
    """The run failed. The command line prints the message and exits with `exit_code`.

    A message marks arguments and recipe keys in backquotes, as in `overwrite=True`; the command
    line prints them as its options. Long words and long sentences are cut in their middle: they
    quote what somebody wrote.

    Examples:
        >>> try:
        ...     kg.load_graph("wrld")
        ... except kg.DualkgError as error:
        ...     print(type(error).__name__, error.exit_code)
        RequestError 2
    """

    exit_code = 1
    silent = False  # whether another process has reported it

    def __init__(self, message: object = "") -> None:
        super().__init__(shortened(str(message)))


class RequestError(DualkgError):
    """The request was wrong: a name or a value that cannot be used.

    Examples:
        >>> kg.load_graph("wrld")
        Traceback (most recent call last):
        ...
        dualkg.errors.RequestError: There is no graph, file or folder 'wrld'. ...
    """

    exit_code = 2


class InvalidValue(RequestError):
    """A setting has a value that it cannot have.

    `setting` is the name of an argument (`k`) or, with a dot, a key of a recipe (`model.dim`).
    `expected` completes "should be", and `advice` is a sentence of its own.
    """

    def __init__(self, setting: str, *, expected: str, found: object, advice: object = "") -> None:
        value = f"'{found}'" if isinstance(found, str) else f"{found}"
        sentence = f"`{setting}` should be {expected}; {value} was given. {advice}"
        super().__init__(sentence.rstrip())
        self.setting = setting
        self.expected = expected
        self.found = found


class UnknownName(RequestError):
    """Nothing of a kind has the name; `suggestions` are similar names, best first.

    Without similar names, `known` is listed, if it is short enough to be read.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        *,
        suggestions: Sequence[str] = (),
        known: Sequence[str] = (),
        advice: object = "",
    ) -> None:
        sentence = f"No {kind} is named '{name}'."
        if suggestions:
            sentence += one_of(suggestions)
        elif known:
            sentence += f" There are: {', '.join(known)}."
        super().__init__(f"{sentence} {advice}".rstrip())
        self.kind = kind
        self.name = name
        self.suggestions = list(suggestions)
        self.known = list(known)


class PathExists(RequestError):
    """A file or folder that would be written exists already."""

    def __init__(self, path: object, *, what: str = "", overwritable: bool = True) -> None:
        is_what = f"is {what}" if what else "exists already"
        advice = "Name another with `out`."
        if overwritable:
            advice = "Use `overwrite=True`, or name another with `out`."
        super().__init__(f"{path} {is_what}. {advice}")
        self.path = path
        self.what = what
        self.overwritable = overwritable


class DamagedFile(RequestError):
    """A file of a run, a graph or a cache cannot be used as it is."""

    def __init__(self, path: object, reason: str, *, advice: object = "") -> None:
        super().__init__(f"{path} is damaged: {reason}. {advice}".rstrip())
        self.path = path
        self.reason = reason


class MissingExtra(RequestError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, *, purpose: str) -> None:
        line = f"pip install 'dualkg[{extra}]'"
        super().__init__(f"{purpose} needs {package}. Install it: {line}")
        self.package = package
        self.extra = extra


class LockedError(RequestError):
    """Another process is writing the file or folder; `holder` describes it, if it is known."""

    def __init__(self, path: object, *, holder: str = "") -> None:
        writer = holder or "another process"
        super().__init__(f"{path} is being written by {writer}. Try again when that has ended.")
        self.path = path
        self.holder = holder


class OutOfMemory(DualkgError):
    """The system or a GPU refused memory; `num_bytes` were wanted, if the library says it."""

    def __init__(self, num_bytes: int | None = None) -> None:
        wanted = f": {num_bytes / 2**30:,.2f} GiB were refused" if num_bytes else ""
        super().__init__(
            f"There is not enough memory{wanted}. Use a smaller `model.dim` or "
            "`training.batch_size`, or allow more memory."
        )
        self.num_bytes = num_bytes


def out_of_memory(error: BaseException) -> OutOfMemory | None:
    """What an error of Python, NumPy, Arrow or PyTorch stands for, if it is about memory.

    PyTorch raises a RuntimeError if a CPU has too little, and others raise their own.
    """
    text = str(error)
    if not isinstance(error, MemoryError) and not NO_MEMORY.search(text):
        return None
    wanted = re.search(r"allocate (\d+) bytes", text)
    return OutOfMemory(int(wanted[1]) if wanted else None)


class DataError(RequestError):
    """The triples cannot be read, or are not those of the named graph.

    Examples:
        >>> issubclass(kg.DataError, kg.DualkgError)
        True
    """


class DivergedError(DualkgError):
    """A loss or a score became NaN or infinite.

    Examples:
        >>> issubclass(kg.DivergedError, kg.DualkgError)
        True
    """


def visible(text: str, *, lines: bool = False) -> str:
    """A text without invisible control characters; `lines` keeps tabs and line ends."""
    return text.replace("\r\n", "\n").translate(VISIBLE_LINES if lines else VISIBLE)


def close_matches(name: str, names: Iterable[str]) -> list[str]:
    """The few names most similar to `name`, best first; case is ignored."""
    from rapidfuzz import process
    from rapidfuzz.distance import Indel, Levenshtein

    if len(name) > MAX_WORD:
        return []
    by_folded: dict[str, str] = {}
    for known in names:
        by_folded.setdefault(known.casefold(), known)
    folded = name.casefold()
    matches = process.extract(
        folded,
        by_folded.keys(),
        scorer=Indel.normalized_similarity,
        score_cutoff=MIN_SIMILARITY,
        limit=4 * MAX_SUGGESTED,
    )
    # Typing errors are single letters that are added, left out or replaced.
    similar = sorted(
        (match[0] for match in matches), key=lambda match: Levenshtein.distance(folded, match)
    )
    return [by_folded[match] for match in similar[:MAX_SUGGESTED]]


def unmarked(sentence: str) -> str:
    """A sentence about a file, whose keys are not options of a command, without marks."""
    return sentence.replace("`", "")


def close_settings(name: str, names: Iterable[str]) -> list[str]:
    """The settings that a word stands for, or else those that are written alike."""
    word = name.casefold().replace("-", "_")
    names = list(names)
    meant = {other for group in SYNONYMS if word in group for other in group}
    synonyms = [setting for setting in names if setting.replace("-", "_") in meant]
    return synonyms or close_matches(name, names)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """` Did you mean 'Paris'?`, or an empty string if no name is similar."""
    return one_of(close_matches(name, names))


def one_of(names: Iterable[str]) -> str:
    """` Did you mean 'a', 'b' or 'c'?`, or an empty string without names."""
    matches = [f"'{match}'" for match in names]
    if not matches:
        return ""
    listed = matches[0] if len(matches) == 1 else f"{', '.join(matches[:-1])} or {matches[-1]}"
    return f" Did you mean {listed}?"
