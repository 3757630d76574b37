"""Errors, whose messages say what was expected, what was found and what to do; and names in
messages: similar ones, and characters that would change what is displayed.
"""

import difflib
import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

MIN_SIMILARITY = 0.6  # the fraction of letters that two names must have in common
MAX_COMPARED = 300  # names that difflib compares
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
    """The run failed. The command line prints the sentence and exits with `exit_code`.

    Long words and long sentences are cut in their middle: they quote what somebody wrote.
    """

    exit_code = 1
    silent = False  # whether another process has said it

    def __init__(self, sentence: object = "") -> None:
        super().__init__(shortened(str(sentence)))


class RequestError(DualkgError):
    """The request was wrong: a name or a value that cannot be used."""

    exit_code = 2


class LockedError(RequestError):
    """Another process is writing the file or folder."""


class DataError(RequestError):
    """The triples cannot be read, or are not those of the named graph."""


class DivergedError(DualkgError):
    """A loss or a score became NaN or infinite."""


def visible(text: str, *, lines: bool = False) -> str:
    """A text without invisible control characters; `lines` keeps tabs and line ends."""
    return text.replace("\r\n", "\n").translate(VISIBLE_LINES if lines else VISIBLE)


def close_matches(name: str, names: Iterable[str], *, most: int = 3) -> list[str]:
    """The names most similar to `name`, best first; case is ignored."""
    if len(name) > MAX_WORD:
        return []
    by_folded: dict[str, str] = {}
    for known in names:
        by_folded.setdefault(known.casefold(), known)
    folded = name.casefold()
    matches = difflib.get_close_matches(
        folded, _with_common_letters(folded, list(by_folded)), n=4 * most, cutoff=MIN_SIMILARITY
    )
    # difflib prefers long common runs; typing errors are single letters.
    matches.sort(key=lambda match: edit_distance(folded, match))
    return [by_folded[match] for match in matches[:most]]


def _with_common_letters(name: str, names: list[str]) -> list[str]:
    """The names that have enough letters in common with a name, in any order; at most
    `MAX_COMPARED`, best first.

    It counts letters by NumPy: `difflib` filters in the same way, and takes seconds for 40,000
    names.
    """
    if len(names) <= MAX_COMPARED:
        return names
    letters = np.frombuffer(
        "".join(f"{one}\n" for one in names).encode("utf-32-le", "surrogatepass"), dtype=np.uint32
    )
    lengths = np.array([len(one) + 1 for one in names])
    starts = np.cumsum(lengths) - lengths
    common = np.zeros(len(names), dtype=np.int64)
    for letter, number in Counter(name).items():
        common += np.minimum(
            np.add.reduceat(letters == ord(letter), starts, dtype=np.int64), number
        )
    similarities = 2 * common / (lengths - 1 + len(name)).clip(1)
    best = np.argsort(-similarities, kind="stable")[:MAX_COMPARED]
    return [names[index] for index in best.tolist() if similarities[index] >= MIN_SIMILARITY]


def edit_distance(one: str, other: str) -> int:
    """Levenshtein distance: letters to insert, delete or replace."""
    above = list(range(len(other) + 1))
    for row, letter in enumerate(one, start=1):
        here = [row]
        for column, wanted in enumerate(other, start=1):
            here.append(
                min(above[column] + 1, here[-1] + 1, above[column - 1] + (letter != wanted))
            )
        above = here
    return above[-1]


def close_settings(name: str, names: Iterable[str]) -> list[str]:
    """The settings that a word stands for, or else those that are written alike."""
    word = name.casefold().replace("-", "_")
    names = list(names)
    meant = {other for group in SYNONYMS if word in group for other in group}
    return [one for one in names if one.replace("-", "_") in meant] or close_matches(name, names)


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
