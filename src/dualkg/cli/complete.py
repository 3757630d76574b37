"""`complete`: the most plausible triples that a graph does not have."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from dualkg.cli import options, output
from dualkg.errors import RequestError

if TYPE_CHECKING:
    from dualkg.data.graph import Split
    from dualkg.inference.completion import Completion
    from dualkg.inference.completion_check import Check
    from dualkg.inference.index import StorageFormat
    from dualkg.inference.index_build import IndexKind
    from dualkg.inference.quantization import StoragePoint
    from dualkg.training.run import Run


SHOWN = 10


def complete(
    run: options.RunPath,
    out: Annotated[Path | None, typer.Option(help="A new file: .tsv or .parquet.")] = None,
    top: Annotated[int | None, typer.Option(help="How many triples (default: 10,000; with --check 100,000)")] = None,
    relation: Annotated[list[str] | None, typer.Option(help="Only of this relation; repeatable.")] = None,
    head: Annotated[list[str] | None, typer.Option(help="Only with this head; repeatable.")] = None,
    min_probability: Annotated[float, typer.Option(help="None that is less probable.")] = 0.0,
    types: Annotated[
        bool, typer.Option("--types", help="Only heads and tails that the relation has in train.")
    ] = False,
    loops: Annotated[
        bool, typer.Option("--loops", help="Also triples of an entity with itself; else only where train has such.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="No list: count the test triples that stand in one made without them.")
    ] = False,
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Write the most plausible triples that the graph does not have; stopped, the same command goes on."""
    options.set_threads(threads)
    narrowing: dict[str, Any] = {"relations": relation or None, "heads": head or None, "types": types, "loops": loops}
    if check:
        if out is not None or min_probability:
            raise RequestError("--check writes no list. Leave out --out and --min-probability.")
        found = check_run(run, top=100_000 if top is None else top, device=device, **narrowing)
        output.print_json(found.as_dict()) if as_json else print_check(found)
        return
    if out is None:
        raise RequestError("Name a file for the new triples, such as --out new.tsv.")
    choices = {"top": 10_000 if top is None else top, "min_probability": min_probability, **narrowing}
    made = complete_run(run, out, device=device, **choices)
    if as_json:
        output.print_json({"out": str(out), "triples": len(made), "best": made.table().slice(0, SHOWN).to_pylist()})
        return
    print_best(made)
    output.err.print(f"\n{len(made):,} new triples are in [bold]{escape(str(out))}[/bold].", soft_wrap=True)


def complete_run(path: Path, out: Path, *, device: str | None, **choices: Any) -> Completion:
    """Make the list and write it; beside it, while it is made, what was done so far."""
    from dualkg.inference.calibration_store import ensure_calibration
    from dualkg.inference.completion import check_file
    from dualkg.inference.completion import complete as make_list
    from dualkg.training.api import choose_device
    from dualkg.training.run import load_run

    run = load_run(path)
    check_file(out, run.graph)
    model = run.model.to(choose_device(device))
    checkpoint = out.with_name(f"{out.name}.checkpoint")
    try:
        with _progress(f"Completing {run.graph.name}") as on_progress:
            made = make_list(
                model,
                run.graph,
                calibration=ensure_calibration(run),
                on_progress=on_progress,
                checkpoint=checkpoint,
                **choices,
            )
    except KeyboardInterrupt:
        output.err.print("dualkg: stopped. The same command goes on from there.")
        raise typer.Exit(130) from None
    made.save(out)
    return made


def check_run(path: Path, *, top: int, device: str | None, **choices: Any) -> Check:
    from dualkg.inference.calibration_store import ensure_calibration
    from dualkg.inference.completion_check import sizes_up_to, study
    from dualkg.training.api import choose_device
    from dualkg.training.run import load_run

    run = load_run(path)
    model = run.model.to(choose_device(device))
    with _progress(f"Completing {run.graph.name}") as on_progress:
        calibration = ensure_calibration(run)
        return study(
            model, run.graph, sizes=sizes_up_to(top), calibration=calibration, on_progress=on_progress, **choices
        )


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr; nothing where stderr is no terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=output.err, transient=True)
    task = bar.add_task(escape(title), total=None)
    with bar:
        yield lambda done, whole: bar.update(task, completed=done, total=whole)


def print_best(made: Completion) -> None:
    """The first of a list, by what people call them."""
    table = output.plain_table("rank", "head", "relation", "tail", "probability", "score", left=4)
    for column in table.columns[1:4]:  # names may be long, and numbers must stay in sight
        column.no_wrap, column.overflow = False, "fold"
    for row in made.table().slice(0, SHOWN).to_pylist():
        names = (Text(row.get(f"{part}_label") or row[part]) for part in ("head", "relation", "tail"))
        table.add_row(f"{row['rank']}", *names, f"{row['probability']:.4f}", f"{row['score']:.3f}")
    output.out.print(table)


def print_check(found: Check) -> None:
    table = output.plain_table("top", "test triples in it", "promised", "by degree", "at random", left=0)
    for size, hits, promised, degree, chance in zip(
        found.sizes, found.found, found.expected or (), found.by_degree, found.at_random, strict=True
    ):
        table.add_row(f"{size:,}", f"{hits:,}", f"{promised:,.1f}", f"{degree:,.1f}", f"{chance:,.3g}")
    output.out.print(table)
    output.out.print(f"\n[dim]{found.num_test:,} test triples among {found.num_triples:,} that could be new[/dim]")


def extend(
    run: options.RunPath,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Triples of the new entities.", show_default=False)],
    out: Annotated[Path, typer.Option(help="A new folder.")],
    columns: options.Columns = None,
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Give new entities a place in a trained model, by a few triples of each."""
    from dualkg.inference.extension import extend_run

    options.set_threads(threads)
    made, note = extend_run(run, file, out=out, columns=options.columns_of(columns) if columns else None, device=device)
    if as_json:
        reports = {split: report.as_dict() for split, report in made.reports.items()}
        output.print_json({"run": str(made.folder), "extension": note, "reports": reports})
        return
    for sentence in note["remarks"]:
        output.err.print(f"[dim]{escape(sentence)}[/dim]")
    print_inductive_entities(note)
    output.out.print()
    output.print_metrics({f"{made.graph.name} {split}": report.metrics for split, report in made.reports.items()})
    tell_how_to_ask(made, note)


def print_inductive_entities(note: dict[str, Any], *, most: int = 10) -> None:
    table = output.plain_table("new", "triples")
    for name, number in list(note["entities"].items())[:most]:
        table.add_row(escape(name), f"{number:,}")
    if note["num_entities"] > most:
        table.add_row(f"and {note['num_entities'] - most:,} more", "")
    table.add_row("all", f"{note['num_triples']:,}", style="bold")
    output.out.print(table)


def tell_how_to_ask(run: Run, note: dict[str, Any]) -> None:
    """A question about the inductive_entity of the last triple."""
    output.err.print(f"\nKept in [bold]{escape(str(run.folder))}[/bold]. Ask it something:", soft_wrap=True)
    head, relation, tail = run.graph.train[-1].tolist()
    place, entity = ("--head", head) if run.graph.entities[head] in note["entities"] else ("--tail", tail)
    asked = [place, run.graph.entities.text(entity), "--relation", run.graph.relations.text(relation)]
    command = shlex.join(["dualkg", "predict", str(run.folder), *asked])
    output.err.print(f"  {command}", markup=False, soft_wrap=True)


app = typer.Typer()


@app.command()
def index(
    run: options.RunPath,
    kind: Annotated[str, typer.Option(help="exact, ivf, hnsw or sq8.")] = "ivf",
    recall: Annotated[
        float, typer.Option(help="The share of the best 10, and of the best 100, that ivf, hnsw and sq8 must find.")
    ] = 0.95,
    form: Annotated[
        str | None, typer.Option(help="How exact keeps its table: float32, float16, bf16, int8 or sparse.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder (default: RUN-index)")] = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Build an index of a run's entities, and measure it."""
    from dualkg.inference.index_build import build_index, check_free, describe_index, save_index
    from dualkg.training.run import load_run

    options.set_threads(threads)
    folder = out or run.resolve().with_name(f"{run.resolve().name}-index")
    check_free(folder)
    loaded = load_run(run)
    kept = form or ("sparse" if loaded.sparsity and kind == "exact" else "float32")
    built = build_index(
        loaded.model, loaded.graph, kind=cast("IndexKind", kind), recall=recall, storage=cast("StorageFormat", kept)
    )
    facts = describe_index(save_index(built, folder))
    if as_json:
        output.print_json({"index": str(folder), **facts})
        return
    print_facts(facts)
    output.err.print(f"\nKept in [bold]{escape(str(folder))}[/bold].", soft_wrap=True)


@app.command()
def forms(
    run: options.RunPath,
    shares: Annotated[str | None, typer.Option(help="Shares of zeros: 0.5,0.9 (default: 0.5 to 0.9)")] = None,
    split: options.Split = "test",
    picture: Annotated[Path | None, typer.Option(help="Also draw them: this file as PNG and as SVG.")] = None,
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Rank a run with its entities kept in fewer bytes."""
    from dualkg.inference.quantization import SHARES, measure_storage_formats

    options.set_threads(threads)
    options.check_split(split)
    wanted = SHARES if shares is None else options.numbers_of("--shares", shares)
    loaded = options.load_on(run, device)
    model = loaded.model
    points = measure_storage_formats(model, loaded.graph, shares=wanted, split=cast("Split", split))
    if picture:
        from paper.figures import draw_storage_formats

        name = type(model.embedding).__name__
        for path in draw_storage_formats(points, title=name, graph=loaded.graph.name).save(picture):
            output.err.print(f"Drawn in [bold]{escape(str(path))}[/bold].", soft_wrap=True)
    if as_json:
        output.print_json([point.as_dict() for point in points])
    else:
        print_storage_formats(points)


def print_facts(about: dict[str, Any]) -> None:
    """Recall against the exact index, and what a second, a file and the building come to."""
    tables = about["tables"]
    depths = [f"recall@{k}" for k in tables["tail"]["stats"]["recall"]]
    title = f"{about['kind']}, {about['metric']}"
    columns = ("questions/s", "exact", "bytes", "built in")
    table = output.plain_table(title, "entities", *depths, *columns)
    for side, one in tables.items():
        facts = one["stats"]
        name = f"{side}s" if len(tables) > 1 else "tails and heads"
        recall = [f"{share:.3f}" for share in facts["recall"].values()]
        rates = [f"{facts[key]:,.0f}" for key in ("queries_per_second", "exact_queries_per_second", "bytes")]
        table.add_row(name, f"{one['shape'][0]:,}", *recall, *rates, f"{facts['build_seconds']:.1f} s")
    output.print_whole(table)


def print_storage_formats(points: list[StoragePoint]) -> None:
    from dualkg.evaluation.report import COLUMNS

    table = output.plain_table("entities as", "bytes", *COLUMNS)
    for point in points:
        table.add_row(point.name, f"{point.bytes:,}", *point.metrics.row()[: len(COLUMNS)])
    output.print_whole(table)
