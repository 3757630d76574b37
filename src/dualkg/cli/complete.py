"""`complete`, `extend`, `ensemble`, `index`, `export`: make triples, runs and files from runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

import dualkg as kg
from dualkg.cli import common as cli
from dualkg.cli.evaluate import missing_triples
from dualkg.errors import RequestError
from dualkg.files import check_new_folder, locked

if TYPE_CHECKING:
    from dualkg.inference.query_classes import AssumedMissing

NUM_PRINTED = 10  # triples that are printed beside a file, and entities of `extend`
NUM_PRINTED_ALONE = 20
NUM_WRITTEN = 10_000
NUM_CHECKED = 100_000
# Titles of columns by the statistics of an index.
INDEX_STATISTICS = {
    "queries_per_second": "queries/s",
    "exact_queries_per_second": "exact queries/s",
    "bytes": "bytes",
}
TOP = "Number of triples (default: 20; 10,000 with --out; 100,000 with --check)."


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
        bool, Option("--types", help="Leave out entities of an unusual type for the relation.")
    ] = False,
    loops: Annotated[
        bool, Option("--loops", help="Also self-loops of relations that have none in train.")
    ] = False,
    check: Annotated[
        bool, Option("--check", help="Write no file; count the test triples found.")
    ] = False,
    device: cli.Device = None,
) -> cli.Output:
    """Print the most probable triples that the graph lacks, or write them."""
    if check and (out is not None or min_probability):
        raise RequestError("--check writes no file. Leave out --out and --min-probability.")
    if not kg.workflows.is_first_process():
        cli.silence()

    def check_out() -> None:
        if out is not None:
            kg.inference.completion.check_path(out)

    with (
        kg.workflows.opened(run, device=device, check=check_out) as opened,
        cli.progress_bar(f"Completing {opened.graph.name}") as on_progress,
    ):
        arguments: dict[str, Any] = {
            "relations": relation or None,
            "heads": head or None,
            "types": types,
            "loops": loops,
            "on_progress": on_progress,
        }
        if check:
            completion = kg.inference.completion
            checked = completion.check_completion(
                opened.model,
                opened.graph,
                sizes=completion.sizes_up_to(NUM_CHECKED if top is None else top),
                calibration=kg.inference.probability.calibration_for(opened),
                **arguments,
            )
            return _print_check(checked)
        if top is None:
            top = NUM_PRINTED_ALONE if out is None else NUM_WRITTEN
        try:
            made = kg.complete(
                opened, top=top, out=out, min_probability=min_probability, **arguments
            )
        except KeyboardInterrupt:
            cli.note("dualkg: stopped.", style=None)
            raise typer.Exit(130) from None
        highest = None
        if not len(made) and min_probability:
            highest = _highest_probability(opened, arguments)
        missing = kg.inference.probability.calibration_for(opened).assumed_missing
    return _print_completion(
        made, out, min_probability=min_probability, highest=highest, missing=missing
    )


def _highest_probability(run: kg.Run, arguments: dict[str, Any]) -> float | None:
    """The probability of the best triple without a minimum, or None if the filters leave none.

    It is searched for only where nothing else was found, which takes as long again at most.
    """
    best = kg.complete(run, top=1, **arguments).table().to_pylist()
    return best[0]["probability"] if best else None


def _print_check(checked: kg.inference.completion.CompletionCheck) -> cli.Output:
    """How many test triples are among the best, and how many chance would find."""
    yield cli.Result(checked.as_dict())
    columns = zip(
        checked.sizes,
        checked.found,
        checked.expected or (),
        checked.by_degree,
        checked.at_random,
        strict=True,
    )
    rows = []
    for size, num_found, expected, by_degree, at_random in columns:
        texts = [f"{expected:,.1f}", f"{by_degree:,.1f}", f"{at_random:,.3g}"]
        rows.append([size, num_found, *texts])
    titles = ["top", "test triples found", "expected", "by degree", "at random"]
    cli.print_table(titles, rows, left=0)
    counts = f"{checked.num_test:,} test triples among {checked.num_triples:,} candidates"
    cli.stdout.print(f"\n[dim]{counts}[/dim]")


def _print_completion(
    made: kg.inference.completion.Completion,
    out: Path | None,
    *,
    min_probability: float,
    highest: float | None,
    missing: AssumedMissing,
) -> cli.Output:
    num_shown = len(made) if out is None else NUM_PRINTED
    best = made.table().slice(0, num_shown).to_pylist()
    result = {"out": None if out is None else str(out), "triples": len(made), "best": best}
    result["missing"] = missing._asdict()
    if not len(made):
        result["highest_probability"] = highest
    yield cli.Result(result)
    cli.note(f"{missing_triples(missing)}\n", style=None)
    if not len(made):
        cli.stdout.print(_why_empty(min_probability, highest), soft_wrap=True, highlight=False)
        if out is not None:
            cli.note(f"{out} has no triples.", style=None)
        return
    rows = []
    for row in best:
        names = [row.get(f"{part}_label") or row[part] for part in ("head", "relation", "tail")]
        rows.append([str(row["rank"]), *names, row["probability"], f"{row['score']:.3f}"])
    cli.print_table(["rank", "head", "relation", "tail", "probability", "score"], rows, left=4)
    if out is not None:
        cli.note(f"\n{len(made):,} new triples are saved in {out}.", style=None)


def _why_empty(min_probability: float, highest: float | None) -> str:
    if highest is None:
        return "There is no new triple with these options."
    return (
        f"No new triple has a probability of {min_probability:.4g} or more; "
        f"the best has {highest:.4g}."
    )


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
    """Add unseen (inductive) entities to a trained run by a few triples of each."""
    made, extension = kg.workflows.extend_run(
        run,
        file,
        out=out,
        device=device,
        columns=cli.parse_columns(columns),
        delimiter=delimiter,
        max_size=max_size,
    )
    reports = {split: report.as_dict() for split, report in made.reports.items()}
    yield cli.Result({"run": str(made.folder), "extension": extension, "reports": reports})
    for sentence in extension["remarks"]:
        cli.note(sentence)
    num_triples = extension["entities"]
    rows: list[tuple[str, Any]] = list(num_triples.items())[:NUM_PRINTED]
    num_hidden = extension["num_entities"] - NUM_PRINTED
    if num_hidden > 0:
        rows.append((f"and {num_hidden:,} more", ""))
    rows.append(("all", extension["num_triples"]))
    cli.print_table(["new entity", "triples"], rows, bold=[len(rows) - 1])
    cli.stdout.print()
    head, relation, tail = made.graph.train[-1].tolist()
    if made.graph.entities[head] in num_triples:
        cli.print_run(made, "--head", head, relation)
    else:
        cli.print_run(made, "--tail", tail, relation)
    if extension["was_calibrated"]:
        cli.note(f"Calibrate it:\n  {cli.command_line('calibrate', made.folder)}", style=None)


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
    given: Any
    if weights == "fitted":
        given = None
    elif weights == "equal":
        given = weights
    else:
        expected = "fitted, equal, or numbers such as 1,0.5"
        given = cli.parse_numbers("weights", weights, expected=expected)
    with locked(out):
        kg.training.RunFolder(out).check_free(overwrite=overwrite)
        members = [kg.inference.api.open_run(path, device=device) for path in runs]
        made = kg.Ensemble(members, weights=given)
        if weights == "fitted" and not made.fit:
            cli.note(
                f"{made.graph.name} has no validation triples to fit weights on; they are equal."
            )
        made.save(out, overwrite=overwrite)

    columns = kg.evaluation.metrics.columns()
    rows = []
    data = []
    names = [*made.names, "ensemble"]
    weights_of = [*made.model.weights, None]
    scored = [*made.members, made]
    for name, weight, run in zip(names, weights_of, scored, strict=True):
        valid = run.report_on("valid").metrics
        test = run.report_on("test").metrics
        weight_text = "" if weight is None else f"{weight:.4g}"
        rows.append([name, weight_text, valid.row()[0], *test.row()[: len(columns)]])
        data.append(
            {"run": name, "weight": weight, "valid": valid.as_dict(), "test": test.as_dict()}
        )
    better = made.better_member
    yield cli.Result(
        {
            "run": str(out),
            "fit": made.fit,
            "members": data[:-1],
            "ensemble": data[-1],
            "better_member": None if better is None else better.run,
        }
    )
    titles = [made.graph.name, "weight", "valid MRR", *(f"test {name}" for name in columns)]
    cli.print_table(titles, rows, bold=[len(rows) - 1])
    if better is not None:
        cli.note(f"\n{better}", style="yellow")
    cli.note_saved(out, next_command=["calibrate", str(out)], purpose="Use it as a run:")


@cli.command()
def index(
    run: cli.RunPath,
    recall: Annotated[float, Option(help="Minimum recall@10 and recall@100.")] = 0.95,
    out: Annotated[Path | None, Option(help="New folder (default: RUN-index).")] = None,
) -> cli.Output:
    """Build a nearest-neighbour index of the entities of a run and measure its recall and speed."""
    from dualkg.inference.index import build_index, metric_of, save_index

    folder = out or run.resolve().with_name(f"{run.resolve().name}-index")
    is_first = kg.workflows.is_first_process()
    if not is_first:
        cli.silence()
    check = partial(check_new_folder, folder)
    with (
        locked(folder if is_first else None),
        kg.workflows.opened(run, device="cpu", check=check) as loaded,
    ):
        metric_of(loaded.model)
        model = kg.workflows.in_first_process(loaded)
        if model is None:
            return
        built = build_index(model, loaded.graph, recall=recall, made_from=loaded.identity)
        facts = save_index(built, folder).as_dict()
    yield cli.Result({"index": str(folder), **facts})
    stats = facts["stats"]
    columns = ["entities", *(f"recall@{k}" for k in stats["recall"]), *INDEX_STATISTICS.values()]
    row = [facts["shape"][0], *(f"{share:.3f}" for share in stats["recall"].values())]
    row += [f"{stats[key]:,.0f}" for key in INDEX_STATISTICS]
    cli.print_table([*columns, "build time"], [[*row, f"{stats['build_seconds']:.1f} s"]])
    cli.note_saved(folder)


@cli.command(threads=False)
def export(
    run: cli.RunPath,
    out: Annotated[Path | None, Option(help="New folder.")] = None,
    format: Annotated[
        Literal["numpy", "tsv", "safetensors"], Option(help="File format.")
    ] = "numpy",
    gather: Annotated[
        bool,
        Option("--gather", help="Only join the weight files of several processes, in the run."),
    ] = False,
) -> cli.Output:
    """Write the embeddings to files for other programs, with a manifest that explains them."""
    from dualkg.inference.export import export as write

    if gather == (out is not None):
        raise RequestError("dualkg export needs either --out or --gather.")
    if out is None:
        kg.training.run.gather(run)
        weights = str(kg.training.RunFolder(run).weights)
        yield cli.Result([weights])
        print(weights)
        return
    if not kg.workflows.is_first_process():
        cli.silence()
    check = partial(check_new_folder, out)
    with kg.workflows.opened(run, device="cpu", check=check) as opened:
        paths = [str(path) for path in write(opened, out, format=format)]
    yield cli.Result(paths)
    print(*paths, sep="\n")
