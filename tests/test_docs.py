"""The pages, held against the program: help, links, recipe keys, commands, and every Python
example.
"""

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer

import dualkg as kg
from dualkg.cli.main import app
from dualkg.losses import LOSSES
from dualkg.serve import ServedRuns, application, request_once
from dualkg.training.recipe import Recipe, _toml
from scripts import path_pictures

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file it says it is, and its text."""

    language: str
    title: str
    text: str


def blocks_of(page: Path, language: str) -> list[Block]:
    found = re.findall(
        r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', page.read_text(encoding="utf-8"), re.M | re.S
    )
    return [Block(*parts) for parts in found if parts[0] == language]


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


def constraint(name: str) -> str:
    pinned = re.search(
        rf"^{name}==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M
    )
    assert pinned, f"{name} is not in constraints.txt"
    return pinned[1]


def test_the_page_of_commands_is_what_the_commands_say():
    for name in ("typer", "rich"):
        if metadata.version(name) != constraint(name):
            pytest.skip(
                f"help is laid out by {name}, and this is not the version of constraints.txt"
            )
    words = [sys.executable, str(ROOT / "scripts" / "cli_page.py"), "--check"]
    told = subprocess.run(words, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr


def test_the_page_of_path_networks_has_the_numbers_of_its_pictures():
    numbers = path_pictures.load_numbers()
    page = path_pictures.PAGE.read_text(encoding="utf-8")
    for name in ("example", "pairs", "neighbours"):
        assert page.count(f"<!-- {name}, from paths.json: begin -->") == 1
    assert path_pictures.with_texts(page, numbers) == page

    graph = kg.load_graph("world")
    assert numbers["removed"] == path_pictures.removed_triples(graph)
    assert numbers["pairs"]["world"] == pytest.approx(path_pictures.pair_shares(graph))


def test_shares_of_pairs_are_those_of_the_benchmark_graphs(data_folder):
    for name, shares in path_pictures.load_numbers()["pairs"].items():
        assert path_pictures.pair_shares(kg.load_graph(name)) == pytest.approx(shares), name


def test_the_pictures_of_path_networks_are_drawn_from_their_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    if metadata.version("matplotlib") != constraint("matplotlib"):
        pytest.skip("this is not the version of matplotlib of constraints.txt")
    for name, drawing in path_pictures.drawings(path_pictures.load_numbers()).items():
        _, svg = drawing.save(tmp_path / name)
        assert svg.read_bytes() == (ROOT / "docs" / svg.name).read_bytes(), name


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_relative_link_leads_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    missing = []
    for link in links:
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = page.parent / path if path else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors_of(target)
        ):
            missing.append(link)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_prose_is_as_wide_as_code(page):
    """Tables and what is typed or printed aside."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert [
        line for line in text.splitlines() if len(line) > 120 and not line.startswith(("|", "    "))
    ] == []


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made where the pages are shown."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_table_of_recipe_keys_lists_each_key_and_its_default():
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+\.\w+)` \| (?:`([^`]*)`|–) \|", page, re.M)
    expected = []
    for section, table in Recipe.model_fields.items():
        if section == "loss":  # its other keys depend on the name; the next test reads their table
            expected.append(("loss.name", written(type(table.default).__name__)))
            continue
        if section == "optimizer":
            expected.append(("optimizer.name", written(type(table.default).__name__)))
        for key, field in type(table.default).model_fields.items():
            default = field.get_default(call_default_factory=True)
            expected.append((f"{section}.{key}", written(default)))
    assert listed == expected


def test_the_table_of_losses_lists_each_argument_and_its_default():
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    table = re.search(r"^\| argument \| (.+) \| meaning \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", page, re.M)
    assert table
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in table[2].splitlines()
    ]
    for column, name in enumerate(table[1].split(" | "), start=1):
        listed = {row[0]: row[column] for row in rows if row[column] != "–"}
        assert listed == {
            key: written(field.default) for key, field in LOSSES[name].model_fields.items()
        }
    assert set(table[1].split(" | ")) == set(LOSSES)


def written(default: object) -> str:
    """A default as a recipe writes it; nothing where the choice is left to the model or the
    regularizer.
    """
    return "" if default is None else "{}" if default == {} else _toml(default)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks_of(page, "console")], ids=relative
)
def test_every_command_can_be_typed(page):
    """Each `$ dualkg …` names a command that is there, and options it has; nothing is run."""
    commands = typer.main.get_command(app).commands
    for block in blocks_of(page, "console"):
        for line in re.findall(r"^\$ dualkg (.+)$", block.text.replace("\\\n", " "), re.M):
            name, *words = shlex.split(line, comments=True)
            if name.startswith("--"):
                continue
            commands[name].make_context(f"dualkg {name}", words)


def test_errors_that_the_pages_show_are_what_the_program_says(run_cli, untrained, tmp_path):
    """A misspelt graph in start.md, a misspelt entity in serve.md, a file too small in data.md."""
    said = [run_cli("train", "wrld").err]

    served = application(ServedRuns.load([untrained], device="cpu"))
    response = request_once(served, "/api/tails?head=Frnace&relation=capital")
    said.append(f"{response.body.decode()}\n")

    two = tmp_path / "two.tsv"
    two.write_text("a\tr\tb\na\tr\tc\n", encoding="utf-8")
    refused = run_cli("train", two, "--no-tune").err
    said.append(refused.replace(f"dualkg: {two}", "two.tsv"))

    for name, sentence in zip(("start.md", "serve.md", "data.md"), said, strict=True):
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert one_line(sentence) in one_line(page)


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def untrained(tmp_path):
    """A run of the bundled graph whose model has learned nothing."""
    graph = kg.load_graph("world")
    kg.train(kg.ComplEx(graph.shape, dim=1), graph, batch_size=10_000, epochs=1).save(
        tmp_path / "run"
    )
    return tmp_path / "run"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks_of(page, "python") and page.parent.name != "tutorials"],
    ids=relative,
)
def test_the_examples_run(page, tmp_path, monkeypatch, small_world):
    """The blocks of a page one after the other, as a reader would type them, but for one epoch of a
    small graph.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kg, "train", in_one_epoch(kg.train))
    names: dict[str, Any] = {"__name__": "__main__"}
    modules = set(sys.modules)
    try:
        for number, block in enumerate(blocks_of(page, "python"), start=1):
            if block.title:
                (tmp_path / block.title).write_text(block.text, encoding="utf-8")
            else:
                exec(compile(block.text, f"{page.name}, example {number}", "exec"), names)
    finally:
        for name in set(sys.modules) - modules:
            if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
                sys.modules[name].__file__
            ):
                del sys.modules[name]


def in_one_epoch(train):
    return lambda *nouns, epochs=1, **choices: train(
        *nouns, **{"batch_size": 1000, **choices}, epochs=1
    )
