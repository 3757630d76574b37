"""What `compare` does."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.markup import escape

from dualkg.cli import options, show
from dualkg.cli.sides import Side, load_sides

if TYPE_CHECKING:
    from dualkg.data.graph import Graph, Split
    from dualkg.evaluation.comparison import Comparison, Difference, Part, Question

SIDE = "The folder of a run, of runs of several seeds, or of a record."


def compare(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help=SIDE, show_default=False)],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help=SIDE, show_default=False)],
    split: options.Split = "test",
    by: options.By = None,
    differences: Annotated[int, typer.Option(min=0, help="Show so many questions that they answer most unlike.")] = 0,
    samples: Annotated[int, typer.Option(help="How often the triples are drawn anew.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Tell whether one run is better than another, or within noise: a paired bootstrap over triples."""
    from dualkg.evaluation.comparison import compare_by, compare_ranks, furthest_apart

    options.set_threads(threads)
    options.check_split(split)
    options.check_by(by)
    a, b = load_sides(run_a, run_b, cast("Split", split))
    whole = compare_ranks(a.ranks, b.ranks, samples=samples, seed=seed)
    parts = compare_by(a.ranks, b.ranks, a.triples, a.graph, view=by, samples=samples, seed=seed) if by else {}
    apart = furthest_apart(a.ranks, b.ranks, a.triples, most=differences)
    if as_json:
        facts = {"graph": a.graph.name, "split": split, "seed": seed, "a": a.as_dict(), "b": b.as_dict()}
        facts |= {"sentence": whole.sentence(a.name, b.name), **whole.as_dict()}
        views = {f"by_{by}": {name: part.as_dict() for name, part in parts.items()}} if by else {}
        questions = {"differences": [named(question, a.graph) for question in apart]} if differences else {}
        show.print_json({**facts, **views, **questions})
        return
    print_comparison(whole, a, b, title=f"{a.graph.name} {split}")
    if by:
        print_parts(parts, a, b, title=by)
    if differences:
        print_questions(apart, a, b)


def named(question: Question, graph: Graph) -> dict[str, Any]:
    """A question with the names of what it is about."""
    names = {key: graph.entities.label(getattr(question, key)) for key in ("head", "tail")}
    return {**asdict(question), **names, "relation": graph.relations.label(question.relation)}


def print_comparison(found: Comparison, a: Side, b: Side, *, title: str) -> None:
    table = show.plain_table(escape(title), escape(a.name), escape(b.name), "difference", "95 %", "p")
    for metric, difference in found.differences.items():
        table.add_row(metric, f"{difference.a:.4f}", f"{difference.b:.4f}", *_cells(difference, difference.p_value))
    show.out.print(table)
    show.out.print()
    show.out.print(escape(found.sentence(a.name, b.name)), soft_wrap=True)
    shares = f"better on {found.better:.0%}, worse on {found.worse:.0%} and equal on {found.equal:.0%}"
    show.out.print(f"{escape(a.name)} is {shares} of the {found.num_triples:,} triples.", soft_wrap=True)
    for side in (a, b):
        if len(side.seeds) > 1:
            show.out.print(f"[dim]{escape(side.name)} is the mean of {len(side.seeds)} seeds.[/dim]", soft_wrap=True)


def print_parts(parts: dict[str, Part], a: Side, b: Side, *, title: str) -> None:
    """MRR by a view; bold where it lies outside of noise even for so many looks."""
    table = show.plain_table(title, escape(a.name), escape(b.name), "difference", "95 %", "p", "triples")
    table.columns[0].overflow = "fold"
    for name, part in parts.items():
        found, p_value = part.comparison.mrr, part.p_corrected
        cells = (f"{found.a:.4f}", f"{found.b:.4f}", *_cells(found, p_value), f"{part.comparison.num_triples:,}")
        table.add_row(escape(name), *cells, style="bold" if p_value < 0.05 else None)
    show.out.print()
    show.out.print(table)
    note = f"MRR by {title}; p is corrected for {len(parts)} looks (Holm), and bold where it is below .05."
    show.out.print(f"[dim]{note}[/dim]", soft_wrap=True)


def print_questions(apart: list[Question], a: Side, b: Side) -> None:
    table = show.plain_table("question", "answer", f"rank {escape(a.name)}", f"rank {escape(b.name)}", "1/rank", left=2)
    table.columns[1].no_wrap = False
    for question in apart:
        names = named(question, a.graph)
        answer = names.pop(question.asked)
        asked = {"head": "?", "tail": "?", **names}
        words = f"({asked['head']}, {asked['relation']}, {asked['tail']})"
        ranks = (f"{question.rank_a:,.4g}", f"{question.rank_b:,.4g}")
        table.add_row(escape(words), escape(answer), *ranks, _signed(question.difference))
    show.out.print()
    show.out.print(table)


def _cells(difference: Difference, p_value: float) -> tuple[str, str, str]:
    """The difference, its interval and its p-value; dashes where they are not known."""
    from dualkg.evaluation.comparison import in_short

    if math.isnan(p_value):
        return _signed(difference.difference), "–", "–"
    interval = f"{in_short(difference.low)} to {in_short(difference.high)}"
    return _signed(difference.difference), interval, in_short(p_value)


def _signed(number: float) -> str:
    from dualkg.evaluation.comparison import in_short

    return ("+" if number > 0 else "") + in_short(number)
