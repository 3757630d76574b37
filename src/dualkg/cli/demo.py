"""What `demo` does: the whole path from triples to answers, on the bundled graph."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from dualkg.cli import output
from dualkg.cli.predict import best_heads, best_tails
from dualkg.data.loading import load_graph
from dualkg.files import write_text
from dualkg.inference.predictor import Prediction, Predictor
from dualkg.training.api import default_recipe, train_recipe
from dualkg.training.recipe import Data
from dualkg.training.run import Run

QUESTIONS = (
    ("Khartoum", "located_in", None),
    ("Luxembourg", "borders", None),
    ("Palau", "currency", None),
    ("Kenya", "part_of", None),
    ("New Zealand", "celebrates", None),
    (None, "official_language", "Arabic"),
)
EPOCHS = 10
REGULARIZERS: dict[str, dict[str, object]] = {
    "with DURA": {},
    "without": {"regularizer.name": "none", "regularizer.weight": 0.0},
}


def run_demo(*, device: str | None, picture: Path | None) -> None:
    """Train twice, compare, ask."""
    screen = Console(highlight=False, record=picture is not None, width=96 if picture else None)
    graph = load_graph("world")
    counts = graph.counts
    screen.print(
        f"[bold]world[/bold]: {counts['entities']:,} entities, {counts['relations']} relations, "
        f"{counts['train']:,} triples to learn, {counts['test']:,} withheld to be found\n"
    )
    runs: dict[str, Run] = {}
    table = output.plain_table("ComplEx, test split", "MRR", "H@1", "H@3", "H@10", "seconds")
    for name, changes in REGULARIZERS.items():
        recipe = default_recipe(Data(graph="world"), graph, {**changes, "training.epochs": EPOCHS})
        started = time.perf_counter()
        with output.watching(f"ComplEx {name}") as on_progress:
            runs[name] = train_recipe(recipe, graph=graph, device=device, on_progress=on_progress)
        row = runs[name].report.metrics.row()[:4]
        table.add_row(name, *row, f"{time.perf_counter() - started:.0f}")
    screen.print(table)
    screen.print()
    _ask(screen, Predictor(runs["with DURA"].model, graph))
    screen.print(
        "\n[dim]Train a run to keep, and ask it yourself:[/dim]"
        f"\n  {_command()} train world"
        f"\n  {_command()} predict runs/world --head Kenya --relation borders"
        "\n[dim]Or look at it in a browser, with probabilities:[/dim]"
        f"\n  {_command()} calibrate runs/world"
        f"\n  {_command()} serve runs/world --open",
        soft_wrap=True,
    )
    if picture:
        svg = screen.export_svg(title="make demo")
        write_text(picture, re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))  # fetch no font from elsewhere


def _command() -> str:
    """How the command is called from here: `make demo` leaves it in the virtual environment."""
    called = Path(sys.argv[0])
    return "dualkg" if shutil.which("dualkg") or called.name != "dualkg" else os.path.relpath(called)


def _ask(screen: Console, predictor: Predictor) -> None:
    screen.print(
        "Answers with DURA: [green]✓ known[/green] from training, [bold cyan]★ withheld[/bold cyan] and found, "
        "the rest new\n"
    )
    table = output.plain_table("question", "answers", left=2)
    table.columns[1].no_wrap = False
    for head, relation, tail in QUESTIONS:
        if head is not None:
            answers = best_tails(predictor, head, relation, top=5)
        else:
            assert tail is not None
            answers = best_heads(predictor, relation, tail, top=5)
        table.add_row(escape(f"{head or '?'}  {relation}  {tail or '?'}"), ", ".join(_shown(a) for a in answers))
    screen.print(table)


def _shown(answer: Prediction) -> str:
    if answer.split == "train":
        return f"[green]{escape(answer.label)} ✓[/green]"
    if answer.known:
        return f"[bold cyan]{escape(answer.label)} ★[/bold cyan]"
    return escape(answer.label)
