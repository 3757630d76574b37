"""`index` and `forms`: answers without scoring every entity, and entities in fewer bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.markup import escape

from dualkg.cli import options, show

if TYPE_CHECKING:
    from dualkg.answers.index import FormPoint
    from dualkg.answers.index.building import Kind
    from dualkg.answers.index.tables import Form
    from dualkg.data.graph import Split

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
    from dualkg.answers.index import build_index, save_index
    from dualkg.answers.index.storage import about, check_free
    from dualkg.training import load_run

    options.set_threads(threads)
    folder = out or run.resolve().with_name(f"{run.resolve().name}-index")
    check_free(folder)
    loaded = load_run(run)
    kept = form or ("sparse" if loaded.sparsity and kind == "exact" else "float32")
    built = build_index(loaded.model, loaded.graph, kind=cast("Kind", kind), recall=recall, form=cast("Form", kept))
    facts = about(save_index(built, folder))
    if as_json:
        show.print_json({"index": str(folder), **facts})
        return
    print_facts(facts)
    show.err.print(f"\nKept in [bold]{escape(str(folder))}[/bold].", soft_wrap=True)


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
    from dualkg.answers.index import measure_forms
    from dualkg.answers.index.forms import SHARES

    options.set_threads(threads)
    options.check_split(split)
    wanted = SHARES if shares is None else options.numbers_of("--shares", shares)
    loaded = options.load_on(run, device)
    model = loaded.model
    points = measure_forms(model, loaded.graph, shares=wanted, split=cast("Split", split))
    if picture:
        from dualkg.answers.index.figure import draw_forms

        name = type(model.embedding).__name__
        for path in draw_forms(points, title=name, graph=loaded.graph.name).save(picture):
            show.err.print(f"Drawn in [bold]{escape(str(path))}[/bold].", soft_wrap=True)
    if as_json:
        show.print_json([point.as_dict() for point in points])
    else:
        print_forms(points)


def print_facts(about: dict[str, Any]) -> None:
    """Recall against the exact index, and what a second, a file and the building come to."""
    tables = about["tables"]
    depths = [f"recall@{k}" for k in tables["tail"]["facts"]["recall"]]
    title = f"{about['kind']}, {about['metric']}"
    columns = ("questions/s", "exact", "bytes", "built in")
    table = show.plain_table(title, "entities", *depths, *columns)
    for side, one in tables.items():
        facts = one["facts"]
        name = f"{side}s" if len(tables) > 1 else "tails and heads"
        recall = [f"{share:.3f}" for share in facts["recall"].values()]
        rates = [f"{facts[key]:,.0f}" for key in ("queries_per_second", "exact_queries_per_second", "bytes")]
        table.add_row(name, f"{one['shape'][0]:,}", *recall, *rates, f"{facts['build_seconds']:.1f} s")
    show.print_whole(table)


def print_forms(points: list[FormPoint]) -> None:
    from dualkg.evaluation.metrics import COLUMNS

    table = show.plain_table("entities as", "bytes", *COLUMNS)
    for point in points:
        table.add_row(point.name, f"{point.bytes:,}", *point.metrics.row()[: len(COLUMNS)])
    show.print_whole(table)
