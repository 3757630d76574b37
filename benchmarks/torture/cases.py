"""The cases of `inputs`: commands that read malformed graphs, recipes, runs, indexes and words.

Good files are made once. Each case has changed copies of some of them.
"""

import hashlib
import json
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.torture import graph_files
from benchmarks.torture.common import train_and_interrupt
from benchmarks.torture.graph_files import GraphFile, as_tsv, random_triple, rows
from benchmarks.torture.mutations import (
    NAMES,
    NUMBERS,
    as_json,
    as_toml,
    is_parsed,
    mutated_bytes,
    mutated_file,
    mutated_tree,
    sometimes_mutated,
    with_checksum,
)
from benchmarks.torture.special_files import SPECIAL, replace_by_special

NOT_TEXT = "o\udcffx"  # the byte 0xff, as Python reads it from a command line
LOAD_SPACE = "LOAD_SPACE"  # not a command, but the function that reads a search space
INDEX_KINDS: tuple[Literal["exact", "ivf", "hnsw", "sq8"], ...] = ("exact", "ivf", "hnsw", "sq8")
SETTINGS = {
    "model.dim": 4,
    "training.epochs": 2,
    "training.batch_size": 64,
    "regularizer.name": "DURA",
    "regularizer.weight": 0.05,
}
DECISION = {
    "head": "e1",
    "relation": "r1",
    "tail": "e2",
    "verdict": "accepted",
    "probability": 0.5,
    "decided_at": "2026-01-01T00:00:00Z",
}
SPACE = {
    "search": {"method": "tpe", "trials": 1, "seed": 0, "prune": False},
    "space": {
        "model.dim": [2, 4],
        "regularizer.weight": {"low": 0.01, "high": 0.1, "log": True},
    },
}
QUERY = ["--head", "e1", "--relation", "r1"]
COLUMN_CHOICES = ("1,2,3", "head,relation,tail", "3,1,2", "1,2,99")
# Files that a run of the campaign does not have, and those that a killed process leaves.
UNUSUAL = (
    "map.parquet",
    "ensemble.json",
    "sparsity.json",
    "extension.json",
    "tracking.json",
    "tuning.json",
    "weights.safetensors.index.json",
    ".lock",
    ".report.json.abcdefgh.tmp",
)
MINE = (
    "mine.tsv",
    "mine.tsv.gz",
    "mine.csv",
    "mine.jsonl",
    "mine.nt",
    "mine.parquet",
    "mine.zip",
    "mine.tar",
    "mine.tar.gz",
    "mine.npz",
    "mine.toml",
)
PAGES = ("/", "/run", "/api/runs", "/api/decisions", "/api/tails?head=e1&relation=r1")


# Values of options. No number is so large that a command would rightly take hours for it.
VALUES = (
    "",
    " ",
    "0",
    "-1",
    "-0.0",
    "3",
    "0.5",
    "1e-320",
    "1e999",
    "nan",
    "inf",
    "٣",
    "1_0",
    "0x10",
    "1,2",
    "1,,2",
    "a=b",
    "a.b=[1",
    "model.dim=-3",
    "training.seed=nan",
    "cuda:99",
    "meta",
    "auto",
    "all",
    "none",
    "10m",
    "9" * 40,
    "y" * 2000,
    "../x",
    "~nobody/x",
    "a\nb",
    "\x1b[31m",
    "e1",
    NOT_TEXT,
)
# Options that start what does not end here: a browser, a long training.
ENDLESS = ("--open", "--serve", "--epochs", "--samples", "--threads")


class Case(NamedTuple):
    """The words of a command, and whether the parser of the format accepts what it reads."""

    family: str
    words: list[str]
    parsed: bool


class Inputs:
    """Good files and folders, made once, and one function for each family of changed ones."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.good = home / "good"
        self.here = home / "here"
        self.good_graph = str(self.good / "graph.tsv")
        self.good_run = str(self.good / "run")
        self.out = ["--out", str(self.here / "out")]
        self._listening: socket.socket | None = None
        # A family that occurs twice is drawn twice as often.
        self.families: list[Callable[[random.Random], Case]] = [
            self.text,
            self.text,
            self.jsonl,
            self.rdf,
            self.parquet,
            self.archive,
            self.recipe,
            self.space,
            self.run,
            self.run,
            self.run,
            self.checkpoint,
            self.index,
            self.index,
            self.beside,
            self.special,
            self.special,
            self.words,
            self.options,
        ]

    def make(self) -> None:
        """Make what commands read: a graph, runs, indexes and candidates."""
        import dualkg as kg
        from dualkg.inference.index_build import build_index, save_index

        self.good.mkdir(parents=True)
        draw = random.Random(0)
        lines = sorted({"\t".join(random_triple(draw)) for _ in range(400)})
        Path(self.good_graph).write_text("".join(f"{line}\n" for line in lines))

        recipe = kg.Recipe().with_changes({"data.graph": self.good_graph, **SETTINGS})
        run = kg.train_recipe(recipe, out=self.good / "run")
        kg.calibrate(run)
        (self.good / "run" / "decisions.jsonl").write_bytes(as_json(DECISION))
        for kind in INDEX_KINDS:
            index = build_index(run.model, run.graph, kind=kind, recall=0.5)
            save_index(index, self.good / f"index-{kind}")
        longer = recipe.with_changes({"training.checkpoint_seconds": 0.0, "training.epochs": 3})
        train_and_interrupt(longer, self.good / "stopped")
        candidates = [as_json(record) for record in _candidate_records(run.graph)]
        (self.good / "candidates.jsonl").write_bytes(b"\n".join(candidates))

    def busy_port(self) -> int:
        """A port that is in use, by this process."""
        if self._listening is None:
            self._listening = socket.create_server(("127.0.0.1", 0))
        return int(self._listening.getsockname()[1])

    def case(self, draw: random.Random) -> Case:
        shutil.rmtree(self.here, ignore_errors=True)
        self.here.mkdir()
        family = draw.choice(self.families)
        return family(draw)

    # -- graphs ---------------------------------------------------------------

    def text(self, draw: random.Random) -> Case:
        return self._graph(graph_files.text(draw), draw)

    def jsonl(self, draw: random.Random) -> Case:
        return self._graph(graph_files.jsonl(draw), draw)

    def rdf(self, draw: random.Random) -> Case:
        return self._graph(graph_files.rdf(draw), draw)

    def parquet(self, draw: random.Random) -> Case:
        return self._graph(graph_files.parquet(draw), draw)

    def archive(self, draw: random.Random) -> Case:
        return self._graph(graph_files.archive(draw), draw)

    def _graph(self, file: GraphFile, draw: random.Random) -> Case:
        """A command that reads a file of triples."""
        path = self.here / file.name
        path.write_bytes(file.content)
        words = ["inspect", str(path), "--json"]
        kind = draw.randrange(8)
        if kind == 0:
            small = ["--no-tune", "--epochs", "1", "--dim", "2", "--batch-size", "50"]
            words = ["train", str(path), *small, *self.out]
        elif kind == 1:
            words = ["extend", self.good_run, str(path), *self.out]
        elif kind == 2:
            words = ["inspect", self.good_graph, "--labels", str(path)]
        elif kind == 3:
            words += ["--columns", draw.choice(COLUMN_CHOICES)]
        return Case(file.family, words, is_parsed(file.name, file.content))

    # -- recipes and search spaces --------------------------------------------

    def recipe(self, draw: random.Random) -> Case:
        import dualkg as kg

        recipe = kg.load_recipe(self.good / "run" / "recipe.toml")
        content = mutated_file("mine.toml", recipe.as_toml().encode(), draw)
        if draw.random() < 0.05:
            content = _lengthened(content, draw)
        path = self.here / "mine.toml"
        path.write_bytes(content)
        small = ["--epochs", "1", "--dim", "2", "--set", f"data.graph={self.good_graph}"]
        words = ["train", str(path), *small, *self.out]
        return Case("TOML", words, is_parsed(path.name, content))

    def space(self, draw: random.Random) -> Case:
        tree = {"recipe": str(self.good / "run" / "recipe.toml"), **SPACE}
        if draw.random() < 0.75:
            content = as_toml(mutated_tree(tree, draw))
        else:
            content = mutated_bytes(as_toml(tree), draw)
        path = self.here / "space.toml"
        path.write_bytes(content)
        return Case("TOML", [LOAD_SPACE, str(path)], is_parsed(path.name, content))

    # -- runs, checkpoints and indexes ----------------------------------------

    def run(self, draw: random.Random) -> Case:
        folder = self.here / "run"
        shutil.copytree(self.good / "run", folder)
        parsed = _change_in(folder, draw)
        commands = self._commands_on_a_run(str(folder), page=draw.choice(PAGES))
        return Case("run folders", draw.choice(commands), parsed)

    def _commands_on_a_run(self, run: str, *, page: str) -> list[list[str]]:
        return [
            ["predict", run, *QUERY],
            ["predict", run, *QUERY, "--coverage", "0.9"],
            ["similar", run, "e1"],
            ["explain", run, *QUERY, "--tail", "e2"],
            ["evaluate", run, "--json", "--by", "cardinality"],
            ["evaluate", run, "--type-constrained"],
            ["compare", run, self.good_run, "--by", "relation"],
            ["calibrate", run],
            ["complete", run, "--top", "5"],
            ["export", run, *self.out, "--format", "tsv"],
            ["extend", run, self.good_graph, *self.out],
            ["ensemble", run, self.good_run, *self.out],
            ["sparsify", run, "--share", "0.5", *self.out],
            ["nuclear-norm", run],
            ["check", run],
            ["serve", run, "--get", page],
        ]

    def checkpoint(self, draw: random.Random) -> Case:
        from dualkg.training.checkpoint import load_tensors, save_tensors

        folder = self.here / "stopped"
        shutil.copytree(self.good / "stopped", folder)
        words = ["resume", str(folder)]
        if draw.random() < 0.3:
            return Case("checkpoints", words, _change_in(folder, draw, but="recipe.toml"))
        path = folder / "checkpoint.safetensors"
        if draw.random() < 0.3:
            groups, about = load_tensors(path)
            # It is written with the checksum of what it is now.
            save_tensors(groups, path, about=mutated_tree(about, draw))
        else:
            path.write_bytes(mutated_file(path.name, path.read_bytes(), draw))
        return Case("checkpoints", words, is_parsed(path.name, path.read_bytes()))

    def index(self, draw: random.Random) -> Case:
        folder = self.here / "index"
        kind = draw.choice(INDEX_KINDS)
        shutil.copytree(self.good / f"index-{kind}", folder)
        parsed = _change_in(folder, draw)
        return Case("indexes", ["predict", self.good_run, *QUERY, "--index", str(folder)], parsed)

    # -- files beside a run, and words ----------------------------------------

    def beside(self, draw: random.Random) -> Case:
        """Files that a command reads beside a run: candidates, queries, false triples."""
        kind = draw.choice(("candidates", "queries", "negatives"))
        if kind == "candidates":
            path = self.here / "candidates.jsonl"
            good = (self.good / "candidates.jsonl").read_bytes()
            content = mutated_file(path.name, good, draw)
            path.write_bytes(content)
            words = ["evaluate", self.good_run, "--candidates", str(path)]
            return Case("JSONL", words, is_parsed(path.name, content))

        path = self.here / "mine.tsv"
        content = as_tsv(rows(draw))
        if kind == "queries":
            content = content.replace(b"\tr1\t", b"\t?\t")
            words = ["predict", self.good_run, "--queries"]
        else:
            words = ["evaluate", self.good_run, "--task", "classification", "--negatives"]
        content = sometimes_mutated(content, draw)
        path.write_bytes(content)
        return Case("TSV", [*words, str(path)], is_parsed(path.name, content))

    def special(self, draw: random.Random) -> Case:
        """A pipe, a socket, an endless or a sparse file in the place of a file or a lock."""
        kind = draw.choice(sorted(SPECIAL))
        place = draw.choice(("run", "run", "run", "stopped", "index", "mine"))
        if place == "mine":
            path = self.here / draw.choice(MINE)
            replace_by_special(path, kind)
            return Case("special files", self._command_on_a_file(path, draw), False)
        source = f"index-{draw.choice(INDEX_KINDS)}" if place == "index" else place
        folder = self.here / place
        shutil.copytree(self.good / source, folder)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        files += [folder / name for name in UNUSUAL]
        files += [folder.with_name(f".{place}.lock"), folder.with_name(f".{place}.abcdefgh.tmp")]
        replace_by_special(draw.choice(files), kind)
        if place == "index":
            words = ["predict", self.good_run, *QUERY, "--index", str(folder)]
        elif place == "stopped":
            words = ["resume", str(folder)]
        else:
            commands = self._commands_on_a_run(str(folder), page=draw.choice(PAGES))
            words = draw.choice(commands)
        return Case("special files", words, False)

    def _command_on_a_file(self, path: Path, draw: random.Random) -> list[str]:
        if path.suffix == ".toml":
            return draw.choice([["train", str(path), *self.out], [LOAD_SPACE, str(path)]])
        commands = [
            ["inspect", str(path)],
            ["inspect", self.good_graph, "--labels", str(path)],
            ["extend", self.good_run, str(path), *self.out],
            ["predict", self.good_run, "--queries", str(path)],
            ["evaluate", self.good_run, "--candidates", str(path)],
            ["evaluate", self.good_run, "--task", "classification", "--negatives", str(path)],
        ]
        return draw.choice(commands)

    def words(self, draw: random.Random) -> Case:
        """Arguments of any kind: names, numbers, paths."""
        # An argument of a process has no NUL.
        names = [name for name in NAMES if "\0" not in name]
        paths = ["~nobody/x", "/dev/null", str(self.good), "y" * 5000, "1e999", "-", "a/../b", "//"]
        odd = [*names, *paths, NOT_TEXT]
        word = draw.choice(odd)
        other = draw.choice(odd)
        probability = draw.choice(NUMBERS)
        share = draw.choice(NUMBERS)

        run = self.good_run
        graph = self.good_graph
        deep = self.here / "deep" / word[:200].replace("/", "_")
        short = ["--no-tune", "--epochs=1"]
        commands = [
            ["predict", run, f"--head={word}", f"--relation={other}"],
            ["predict", word, f"--head={other}", "--relation=r1"],
            ["train", word, *short, "--dim=2", *self.out],
            ["inspect", word, f"--split={other}"],
            ["inspect", graph, f"--columns={word}", f"--delimiter={other}"],
            ["inspect", graph, f"--max-size={word}"],
            ["evaluate", run, f"--hits={word}"],
            ["train", graph, f"--set={word}={other}", *short],
            ["train", graph, f"--set=training.seed={word}", *short, "--dim=2", *self.out],
            ["complete", run, f"--relation={word}", f"--min-probability={probability}"],
            ["similar", run, f" {word}"],
            ["sparsify", run, f"--share={share}", *self.out],
            ["export", run, f"--out={deep}"],
            ["serve", run, f"--get=/{word}"],
            ["export", run, f"--out={self.here / NOT_TEXT}"],
            ["serve", run, f"--port={self.busy_port()}"],
        ]
        return Case("words", draw.choice(commands), False)

    def options(self, draw: random.Random) -> Case:
        """One or two options of a command, whichever it has, with values of any kind."""
        folder = self.here / "run"
        shutil.copytree(self.good / "run", folder)
        commands = self._commands_on_a_run(str(folder), page=draw.choice(PAGES))
        commands += [
            ["train", self.good_graph, "--no-tune", "--epochs=1", "--dim=2", *self.out],
            ["inspect", self.good_graph],
            ["index", str(folder), *self.out],
            ["sparsity", str(folder)],
            ["tune", str(self.here / "none.toml")],
        ]
        line = draw.choice(commands)
        options = _options_of(line[0])
        for name, takes_value in draw.sample(options, min(len(options), draw.choice((1, 1, 2)))):
            line = [*line, f"{name}={draw.choice(VALUES)}" if takes_value else name]
        return Case("options", line, False)


def _options_of(command: str) -> list[tuple[str, bool]]:
    """The options of a command, and whether each takes a value."""
    from typer.main import get_command

    from dualkg.cli.main import app

    options = []
    for parameter in get_command(app).commands[command].params:  # type: ignore[attr-defined]
        name = parameter.opts[0]
        if name.startswith("-") and name not in ENDLESS:
            options.append((name, not parameter.is_flag))
    return options


def _candidate_records(graph: Any) -> list[dict[str, Any]]:
    """The candidates of each test triple."""
    records = []
    for head, relation, tail in graph.test.tolist():
        record = {
            "head": graph.entities[head],
            "relation": graph.relations[relation],
            "tail": graph.entities[tail],
            "tail_candidates": ["e1", "e2"],
            "head_candidates": ["e3"],
        }
        records.append(record)
    return records


def _change_in(folder: Path, draw: random.Random, *, but: str = "") -> bool:
    """Change one file of a folder, and in three of five cases its checksums.

    Returns whether the parser of the file accepts it.
    """
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != but]
    path = draw.choice(sorted(files))
    content = path.read_bytes()
    kind = draw.randrange(20)
    if kind < 3:
        path.unlink()
        if kind == 1:
            path.mkdir()
        elif kind == 2:
            path.symlink_to(path)
        return False

    changed = b"" if kind == 3 else mutated_file(path.name, content, draw)
    if draw.random() < 0.6:
        if path.suffix == ".json" and b'"sha256"' in content:
            changed = with_checksum(changed)
        _report_change(folder, path, changed)
    path.write_bytes(changed)
    return is_parsed(path.name, changed)


def _lengthened(recipe: bytes, draw: random.Random) -> bytes:
    """A recipe with a text of a megabyte, or with a dotted key of 40 KB, whose parts nest."""
    if draw.random() < 0.5:
        return recipe.replace(b'name = "', b'name = "' + b"x" * 2**20, 1)
    return recipe + b"\n" + b".".join([b"a"] * 20_000) + b" = 1\n"


def _report_change(folder: Path, path: Path, content: bytes) -> None:
    """Write the checksum of a changed file into the report of its run, which lists it."""
    report = folder / "report.json"
    if path == report or not report.is_file():
        return
    tree = json.loads(report.read_bytes())
    name = path.relative_to(folder).as_posix()
    if name in tree["files"]:
        sha256 = hashlib.sha256(content).hexdigest()
        tree["files"][name] = {"bytes": len(content), "sha256": sha256}
        report.write_bytes(with_checksum(as_json(tree)))
