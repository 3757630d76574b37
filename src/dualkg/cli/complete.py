"""`complete`, `extend`, `ensemble`, `index` and `export`: make new triples, runs, indexes and files
from a run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

import dualkg as kg
from dualkg.cli import common as cli
from dualkg.errors import RequestError
from dualkg.files import check_new_folder, locked

NUM_PRINTED = 10
TOP = "Number of triples (default: 20; 10,000 with --out; 100,000 with --check)."
StorageFormat = Literal["float32", "float16", "bf16", "int8", "sparse"]


@cli.command()
def complete(
    run: cli.RunPath,
    out: Annotated[
        Path | None,
        Option(help="New file for the triples: .tsv or .parquet (default: print them)."),
    ] = None,
    top: Annotated[int | None, Option(help=TOP)] = None,
    relation: Annotated[
        list[str] | None, Option(help="Only triples with this relation; repeatable.")
    ] = None,
    head: Annotated[
        list[str] | None, Option(help="Only triples with this head; repeatable.")
    ] = None,
    min_probability: Annotated[float, Option(help="Minimum probability of a triple.")] = 0.0,
    types: Annotated[
        bool, Option("--types", help="Only entities in the domain or range of the relation.")
    ] = False,
    loops: Annotated[
        bool, Option("--loops", help="Also self-loops of relations that have none in train.")
    ] = False,
    check: Annotated[
        bool, Option("--check", help="Write no file; count the test triples found.")
    ] = False,
    device: cli.Device = None,
) -> cli.Output:
    """Print the most probable triples that the graph lacks, or write them; with --out, it resumes
    after Ctrl-C.
    """
    if check and (out is not None or min_probability):
        raise RequestError("--check writes no file. Leave out --out and --min-probability.")
    loaded = cli.load_on_device(run, device)
    arguments: dict[str, Any] = {
        "relations": relation or None,
        "heads": head or None,
        "types": types,
        "loops": loops,
    }
    with cli.progress_bar(f"Completing {loaded.graph.name}") as arguments["on_progress"]:
        if check:
            arguments["calibration"] = kg.inference.calibration.calibration_for(loaded).calibration
            sizes = kg.inference.completion.sizes_up_to(100_000 if top is None else top)
            checked = kg.inference.completion.check_completion(
                loaded.model, loaded.graph, sizes=sizes, **arguments
            )
            return _found(checked)
        try:
            top = (20 if out is None else 10_000) if top is None else top
            made = kg.complete(
                loaded, top=top, out=out, min_probability=min_probability, **arguments
            )
        except KeyboardInterrupt:
            cli.note(
                f"dualkg: stopped.{' Run the same command again to resume.' * (out is not None)}",
                style=None,
            )
            raise typer.Exit(130) from None
    return _completed(made, out)


def _found(checked: kg.inference.completion.CompletionCheck) -> cli.Output:
    yield cli.Result(checked.as_dict())
    numbers = (
        checked.sizes,
        checked.found,
        checked.expected or (),
        checked.by_degree,
        checked.at_random,
    )
    rows = [
        [size, found, f"{expected:,.1f}", f"{degree:,.1f}", f"{chance:,.3g}"]
        for size, found, expected, degree, chance in zip(*numbers, strict=True)
    ]
    cli.print_table(
        ["top", "test triples found", "expected", "by degree", "at random"], rows, left=0
    )
    counts = f"{checked.num_test:,} test triples among {checked.num_triples:,} candidates"
    cli.stdout.print(f"\n[dim]{counts}[/dim]")


def _completed(made: kg.inference.completion.Completion, out: Path | None) -> cli.Output:
    best = made.table().slice(0, len(made) if out is None else NUM_PRINTED).to_pylist()
    yield cli.Result({"out": None if out is None else str(out), "triples": len(made), "best": best})
    rows = []
    for row in best:
        names = [row.get(f"{part}_label") or row[part] for part in ("head", "relation", "tail")]
        rows.append([str(row["rank"]), *names, row["probability"], f"{row['score']:.3f}"])
    cli.print_table(["rank", "head", "relation", "tail", "probability", "score"], rows, left=4)
    if out is not None:
        cli.note(f"\n{len(made):,} new triples are saved in {out}.", style=None)


@cli.command()
def extend(
    run: cli.RunPath,
    file: Annotated[
        Path, Argument(metavar="FILE", help="Triples of the new entities.", show_default=False)
    ],
    out: Annotated[Path, Option(help="New folder for the extended run.")],
    columns: cli.Columns = None,
    max_size: cli.MaxSize = None,
    delimiter: cli.Delimiter = None,
    device: cli.Device = None,
) -> cli.Output:
    """Add unseen entities to a trained run by a few triples of each (inductive, without
    training).
    """
    read: dict[str, Any] = {
        "columns": cli.parse_columns(columns),
        "delimiter": delimiter,
        "max_size": max_size,
    }
    made, extension = kg.inference.extension.extend_run(run, file, out=out, device=device, **read)
    reports = {split: report.as_dict() for split, report in made.reports.items()}
    yield cli.Result({"run": str(made.folder), "extension": extension, "reports": reports})
    for sentence in extension["remarks"]:
        cli.note(sentence)
    rows = list(extension["entities"].items())[:NUM_PRINTED]
    if extension["num_entities"] > NUM_PRINTED:
        rows.append((f"and {extension['num_entities'] - NUM_PRINTED:,} more", ""))
    rows.append(("all", extension["num_triples"]))
    cli.print_table(["new entity", "triples"], rows, bold=[len(rows) - 1])
    cli.stdout.print()
    head, relation, tail = made.graph.train[-1].tolist()
    query = (
        ("--head", head) if made.graph.entities[head] in extension["entities"] else ("--tail", tail)
    )
    cli.print_run(made, *query, relation)


@cli.command()
def ensemble(
    runs: Annotated[
        list[Path], Argument(metavar="RUN...", help="Folders of runs, or of several seeds.")
    ],
    out: Annotated[Path, Option(help="New folder for the ensemble.")],
    weights: Annotated[
        str, Option(help="fitted (on validation), equal, or numbers such as 1,0.5.")
    ] = "fitted",
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing ensemble.")] = False,
    device: cli.Device = None,
) -> cli.Output:
    """Combine runs on one graph into one that scores by their weighted sum, and evaluate it."""
    columns = kg.evaluation.metrics.columns()
    given: Any = None if weights == "fitted" else weights
    if weights not in ("fitted", "equal"):
        given = cli.parse_numbers("--weights, if not fitted or equal,", weights)
    with locked(out):
        kg.training.RunFolder(out).check_free(overwrite=overwrite)
        made = kg.Ensemble([cli.load_on_device(path, device) for path in runs], weights=given)
        if weights == "fitted" and not made.fit:
            cli.note(
                f"{made.graph.name} has no validation triples to fit weights on; they are equal."
            )
        made.save(out, overwrite=overwrite)
    rows = []
    data = []
    names = [*made.names, "ensemble"]
    weights_of = [*made.model.weights, None]
    members = [*made.members, made]
    for name, weight, run in zip(names, weights_of, members, strict=True):
        valid, test = (run.report_on(split).metrics for split in ("valid", "test"))
        rows.append(
            [
                name,
                "" if weight is None else f"{weight:.4g}",
                valid.row()[0],
                *test.row()[: len(columns)],
            ]
        )
        data.append(
            {"run": name, "weight": weight, "valid": valid.as_dict(), "test": test.as_dict()}
        )
    yield cli.Result({"run": str(out), "fit": made.fit, "members": data[:-1], "ensemble": data[-1]})
    titles = [made.graph.name, "weight", "valid MRR", *(f"test {name}" for name in columns)]
    cli.print_table(titles, rows, bold=[len(rows) - 1])
    cli.note_saved(out, next_command=["calibrate", str(out)], purpose="Use it as a run:")


@cli.command()
def index(
    run: cli.RunPath,
    kind: Annotated[Literal["exact", "ivf", "hnsw", "sq8"], Option(help="Type of index.")] = "ivf",
    recall: Annotated[
        float, Option(help="Minimum recall@10 and recall@100 of an approximate index.")
    ] = 0.95,
    storage: Annotated[
        StorageFormat | None, Option(help="Storage format of an exact index.")
    ] = None,
    out: Annotated[Path | None, Option(help="New folder (default: RUN-index).")] = None,
) -> cli.Output:
    """Build a nearest-neighbour index of the entities of a run and measure its recall and speed."""
    from dualkg.inference.index_build import build_index, describe_index, save_index

    folder = out or run.resolve().with_name(f"{run.resolve().name}-index")
    with locked(folder):
        check_new_folder(folder)
        loaded = kg.load_run(run)
        storage = storage or ("sparse" if loaded.sparsity and kind == "exact" else "float32")
        built = build_index(loaded.model, loaded.graph, kind=kind, recall=recall, storage=storage)
        facts = describe_index(save_index(built, folder))
    yield cli.Result({"index": str(folder), **facts})
    tables = facts["tables"]
    rows = []
    for side, table in tables.items():
        stats = table["stats"]
        recalls = [f"{share:.3f}" for share in stats["recall"].values()]
        rates = [
            f"{stats[key]:,.0f}"
            for key in ("queries_per_second", "exact_queries_per_second", "bytes")
        ]
        name = f"{side}s" if len(tables) > 1 else "tails and heads"
        rows.append([name, table["shape"][0], *recalls, *rates, f"{stats['build_seconds']:.1f} s"])
    columns = ["entities", *(f"recall@{k}" for k in tables["tail"]["stats"]["recall"])]
    columns += ["queries/s", "exact queries/s", "bytes", "build time"]
    cli.print_table([f"{facts['kind']}, {facts['metric']}", *columns], rows)
    cli.note_saved(folder)


@cli.command(threads=False)
def export(
    run: cli.RunPath,
    out: Annotated[Path, Option(help="New folder.")],
    format: Annotated[
        Literal["numpy", "tsv", "safetensors"], Option(help="File format.")
    ] = "numpy",
) -> cli.Output:
    """Write the embeddings to files for other programs, with a manifest that explains them."""
    from dualkg.inference.export import export as write

    paths = [str(path) for path in write(kg.load_run(run), out, format=format)]
    yield cli.Result(paths)
    print(*paths, sep="\n")
