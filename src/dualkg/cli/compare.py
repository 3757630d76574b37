"""What `compare` does."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.markup import escape

from dualkg.cli import options, show
from dualkg.errors import RequestError

if TYPE_CHECKING:
    from dualkg.data.graph import Graph, Split, Triples
    from dualkg.evaluation.comparison import Comparison, Difference, Floats, Part, Question
    from dualkg.evaluation.ranking import Ranks
    from dualkg.training import RunFolder

SIDE = "The folder of a run, or of runs of several seeds."


@dataclass(frozen=True)
class Side:
    """One of the two: what it is called, the runs that it is the mean of, and their ranks."""

    path: Path
    name: str
    seeds: list[int]
    graph: Graph
    triples: Triples
    ranks: Floats

    def as_dict(self) -> dict[str, Any]:
        return {"run": str(self.path), "name": self.name, "seeds": self.seeds}


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


def load_sides(run_a: Path, run_b: Path, split: Split) -> tuple[Side, Side]:
    """Both sides; refused where they are not of the same triples of the same graph."""
    a, b = load_side(run_a, split), load_side(run_b, split)
    same_names = a.graph.entities == b.graph.entities and a.graph.relations == b.graph.relations
    same_triples = a.triples.shape == b.triples.shape and bool((a.triples == b.triples).all())
    if a.graph.fingerprint != b.graph.fingerprint or not (same_names and same_triples):
        if a.graph.name != b.graph.name:
            of = f"{run_a} is of {a.graph.name} and {run_b} of {b.graph.name}"
            raise RequestError(f"{of}; only runs of the same graph can be compared.")
        raise RequestError(
            f"{run_a} and {run_b} are both of {a.graph.name}, but the data were not the same: other triples, another "
            f"split, or another order. Train both on the same files."
        )
    if a.name == b.name:  # then what they are kept in tells them apart
        a, b = (replace(side, name=str(side.path)) for side in (a, b))
    return a, b


def load_side(path: Path, split: Split) -> Side:
    from dualkg.evaluation.comparison import of_seeds
    from dualkg.reproduce.records import whatever_seed
    from dualkg.training import load_recipe

    folders = finished_runs(path)
    recipes = [load_recipe(folder.recipe) for folder in folders]
    if len({whatever_seed(recipe) for recipe in recipes}) > 1:
        raise RequestError(f"The runs in {path} are not of one recipe, so they have no mean. Name one of them.")
    if len({folder.saved_environment.get("data") for folder in folders}) > 1:
        raise RequestError(f"The runs in {path} are not of the same data, so they have no mean. Name one of them.")
    graph = folders[0].load_graph()
    if not len(graph.split(split)):
        raise RequestError(f"The graph of {path} has no {split} triples to compare by.")
    ranks = [saved_ranks(folder, split) for folder in folders]
    choice, kept_small = recipes[0].model, recipes[0].regularizer.name
    dual = "" if choice.dual == "none" else f"-dual-{choice.dual}"
    return Side(
        path=path,
        name=choice.name + dual + ("" if kept_small == "none" else f"-{kept_small}"),
        seeds=[recipe.training.seed for recipe in recipes],
        graph=graph,
        triples=ranks[0].triples,
        ranks=of_seeds(ranks),
    )


def finished_runs(path: Path) -> list[RunFolder]:
    """The run that a folder is, or the finished ones that lie in it."""
    from dualkg.reproduce.records import find_runs
    from dualkg.training import RunFolder

    own = RunFolder(path)
    inside = [own] if own.recipe.exists() else [RunFolder(found.parent) for found in path.glob("seed-*/recipe.toml")]
    if not inside:
        own.check_is_run()
    unfinished = [folder for folder in inside if not folder.finished]
    if len(unfinished) == len(inside):
        raise RequestError(f"{path} holds no finished run. {unfinished[0].how_to_go_on()}")
    if unfinished:
        count = f"{len(unfinished)} of the {len(inside)} runs in {path}"
        show.err.print(f"[dim]{escape(count)} are not finished, and left out.[/dim]", soft_wrap=True)
    return [RunFolder(found) for found in find_runs([path])]


def saved_ranks(folder: RunFolder, split: Split) -> Ranks:
    """The ranks that are kept with the run, or where they are not, as for train, those of its model."""
    from dualkg.evaluation import load_ranks
    from dualkg.training import load_run

    kept = folder.ranks(split)
    return load_ranks(kept) if kept.exists() else load_run(folder.path).report_on(split).ranks


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
