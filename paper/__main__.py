"""`python -m paper`: reproduce tables and figures of the paper, run studies, and record runs."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape
from typer import Argument, Option

import dualkg as kg
from dualkg.analysis import sparsity
from dualkg.cli import common as cli
from dualkg.cli import main
from dualkg.cli.training_display import TrainingDisplay
from dualkg.errors import InvalidValue, RequestError
from dualkg.files import write_text
from dualkg.inference.api import open_run
from dualkg.training.api import choose_device
from dualkg.training.errors import InterruptedRunError
from dualkg.training.recipe import recipe_from
from dualkg.training.trainer import Trainer
from paper import tables
from paper.nuclear import bound_before_and_after
from paper.pages import PAGES
from paper.records import RECORDS, RUNS, Config, check_committed, load_records, record_runs
from paper.registry import (
    GRAPHS,
    PATH_NETWORK,
    PATHS,
    PUBLISHED_GRAPHS,
    TABLES,
    ResultTable,
)
from paper.runs import sparsify
from paper.studies import STUDIES
from paper.tables import DATASETS, Study, Table, write_pages

VALIDATIONS = 4  # validations during a trial; the last one is at its end
TRAIN_SAMPLE = 2000  # training triples that a trial ranks too, to see how far they are memorized
BOUNDS = {
    "dura": "DURA over all entities and relations",
    "bound": "bound on the nuclear 2-norm",
    "components": "Σ‖h‖‖r‖‖t‖ of the components",
}
app = typer.Typer(
    name="python -m paper",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
Dataset = Annotated[str | None, Option(help="One graph (default: the graphs of the paper).")]
Rows = Annotated[list[str] | None, Option("--row", help="Only this row of the table; repeatable.")]
Records = Annotated[Path, Option(help="Folder of the records.", show_default=False)]
Runs = Annotated[Path, Option(help="Folder of the runs, with their weights.")]
SHARED_DEVICE = Option(
    "--shared-device", help="Other work runs on the device: record times as upper bounds."
)
SEEDS = Option(min=1, help="Number of seeds.")


def table_command(table: ResultTable) -> Callable[..., None]:
    @cli.command()
    def command(
        dataset: Dataset = None,
        seeds: Annotated[int, SEEDS] = 3,
        row: Rows = None,
        records: Records = RECORDS,
        runs: Runs = RUNS,
        shared_device: Annotated[bool, SHARED_DEVICE] = False,
        device: cli.Device = None,
    ) -> cli.Output:
        with TrainingDisplay(table.name) as on_progress:
            config = Config(
                dataset=dataset,
                seeds=seeds,
                rows=tuple(row or ()),
                records=records,
                runs=runs,
                device=device,
                shared_device=shared_device,
                log=cli.note,
                on_progress=on_progress,
            )
            graphs = config.graphs(PUBLISHED_GRAPHS)
            config.on_each_graph(graphs, lambda graph: config.train_table(table, graph))
        recorded = load_records(records)
        update_pages(records)
        return show([tables.results_table(table, graph, recorded) for graph in graphs])

    return command


def study_command(study: Study) -> Callable[..., None]:
    @cli.command()
    def command(
        dataset: Dataset = None,
        seeds: Annotated[int, SEEDS] = 3 if study.several_seeds else 1,
        records: Records = RECORDS,
        runs: Runs = RUNS,
        device: cli.Device = None,
    ) -> cli.Output:
        if seeds > 1 and not study.several_seeds:
            raise InvalidValue(
                "seeds",
                expected=f"1, because the study {study.name} uses one seed",
                found=seeds,
                advice="Leave out `seeds`.",
            )
        check_committed()
        with TrainingDisplay(study.name) as on_progress:
            config = Config(
                dataset=dataset,
                seeds=seeds,
                records=records,
                runs=runs,
                device=device,
                log=cli.note,
                on_progress=on_progress,
            )
            measured = study.run(config)
        update_pages(records)
        return show(measured)

    return command


@cli.command()
def paths(
    dataset: Dataset = None,
    seeds: Annotated[int, SEEDS] = 3,
    row: Annotated[
        list[str] | None,
        Option(help="A row of the table to train (default: PathNetwork); repeatable."),
    ] = None,
    ensemble: Annotated[
        list[str] | None,
        Option(
            help="A row of embeddings, such as RESCAL-DURA, that PathNetwork is combined with; "
            "repeatable."
        ),
    ] = None,
    records: Records = RECORDS,
    runs: Runs = RUNS,
    shared_device: Annotated[bool, SHARED_DEVICE] = False,
    device: cli.Device = None,
) -> cli.Output:
    """Path networks: train the missing seeds, and ensembles with embeddings (--ensemble)."""
    members = tuple(PATHS.row(name).name for name in ensemble or ())
    study = STUDIES["path-ensemble"]

    with TrainingDisplay(PATHS.name) as on_progress:
        config = Config(
            dataset=dataset,
            seeds=seeds,
            rows=tuple(row or (PATH_NETWORK.name,)),
            records=records,
            runs=runs,
            device=device,
            shared_device=shared_device,
            log=cli.note,
            on_progress=on_progress,
        )

        def on_graph(graph: str) -> list[Table]:
            config.train_table(PATHS, graph)
            shown = [tables.results_table(PATHS, graph, load_records(records))]
            if members:
                check_committed()
                shown += study.run(replace(config, dataset=graph, rows=members))
            return shown

        graphs = config.graphs(PUBLISHED_GRAPHS, PATHS.other_graphs)
        shown = config.on_each_graph(graphs, on_graph)
    update_pages(records)
    return show([table for tables_of_graph in shown for table in tables_of_graph])


@cli.command()
def inductive_models(
    dataset: Dataset = None,
    seeds: Annotated[int, SEEDS] = 3,
    epochs: Annotated[
        int | None, Option(min=1, help="Epochs of the path network (default: of its recipe).")
    ] = None,
    records: Records = RECORDS,
    shared_device: Annotated[bool, SHARED_DEVICE] = False,
    device: cli.Device = None,
) -> cli.Output:
    """Unseen entities: a path network and embeddings, both with `extend`, on an inductive split."""
    check_committed()
    study = STUDIES["inductive-models"]
    with TrainingDisplay(study.name) as on_progress:
        config = Config(
            dataset=dataset,
            seeds=seeds,
            records=records,
            device=device,
            shared_device=shared_device,
            epochs=epochs,
            log=cli.note,
            on_progress=on_progress,
        )
        measured = study.run(config)
    update_pages(records)
    return show(measured)


OWN_COMMANDS = {"paths": paths, "inductive-models": inductive_models}
for _name, _command in OWN_COMMANDS.items():
    app.command(_name)(_command)
for _table in TABLES.values():
    if _table.name in OWN_COMMANDS:
        continue
    help_text = f"{_table.title}: train what is missing, and compare with published numbers."
    app.command(_table.name, help=help_text)(table_command(_table))
for _study in STUDIES.values():
    # An ensemble with a path network is part of `paths`.
    if _study.name in (*OWN_COMMANDS, "path-ensemble"):
        continue
    app.command(_study.name, help=_study.measure.__doc__)(study_command(_study))


app.command()(sparsify)


@app.command()
@cli.command(threads=False)
def datasets(records: Records = RECORDS) -> cli.Output:
    """Statistics of the data sets that are available, against the published ones."""
    counts = {}
    for graph in GRAPHS:
        # A download that fails may take a minute.
        cli.note(f"Counting {graph}")
        try:
            counts[graph] = kg.load_graph(graph).counts
        except kg.DualkgError as error:
            cli.note(f"{graph} is not available: {error}")
    write_text(records / DATASETS, json.dumps({"results": counts}, indent=1) + "\n")
    update_pages(records)
    return show([tables.datasets_table(counts)])


@app.command()
@cli.command()
def sparsity_curve(
    run: cli.RunPath,
    shares: Annotated[
        str | None, Option(help="Shares of zeros, separated by commas (default: 0 to 0.95).")
    ] = None,
    rotate: Annotated[
        float | None, Option(help="RESCAL only: first rotate the axes for this share of zeros.")
    ] = None,
    split: cli.SplitName = "test",
    device: cli.Device = None,
) -> cli.Output:
    """Evaluate a run with increasing shares of its entity table set to zero."""
    wanted = sparsity.SHARES if shares is None else cli.parse_numbers("shares", shares)
    opened = open_run(run, device=device)
    model = opened.model if rotate is None else sparsity.rotated(opened.model, share=rotate)
    points = sparsity.sparsity_curve(model, opened.graph, shares=wanted, split=split)
    yield cli.Result([point.as_dict() for point in points])
    metrics = kg.evaluation.metrics.columns()
    rows = []
    for point in points:
        size = point.storage.entity_tables["CSR"]
        row = [f"{point.share:.1%}", f"{point.threshold:.4g}", *point.metrics.row()[: len(metrics)]]
        rows.append([*row, f"{size.numbers_saved:.1%}", f"{size.bytes_saved:.1%}"])
    cli.print_table(["zeros", "threshold", *metrics, "numbers saved", "bytes saved"], rows)


@app.command()
@cli.command()
def nuclear_norm(
    run: cli.RunPath,
    plain: Annotated[float, Option(help="λ1, the weight of ‖h‖² and ‖t‖².")] = 1.0,
    mapped: Annotated[float, Option(help="λ2, the weight of ‖hR‖² and ‖tRᵀ‖².")] = 1.0,
) -> cli.Output:
    """Bound the nuclear 2-norm of a run by DURA (Theorem 1)."""
    bounds = bound_before_and_after(kg.load_run(run).model, plain=plain, mapped=mapped)
    yield cli.Result({name: bound.as_dict() for name, bound in bounds.items()})
    rows = []
    for key, title in BOUNDS.items():
        rows.append([title, *(f"{getattr(bound, key):.6g}" for bound in bounds.values())])
    cli.print_table(["", *bounds], rows)


@app.command()
@cli.command(threads=False)
def hyperparameters() -> cli.Output:
    """Hyper-parameters of the paper and of the recipes."""
    return show([tables.hyperparameters_table()])


@app.command()
def record(
    runs: Annotated[
        list[Path],
        Argument(metavar="RUN...", help="Finished runs of one recipe.", show_default=False),
    ],
    name: Annotated[
        str, Option(help="Folder of the record, such as umls/complex-dura.", show_default=False)
    ],
    records: Records = RECORDS,
    shared_device: Annotated[bool, SHARED_DEVICE] = False,
) -> None:
    """Record finished runs, and update the results pages."""
    cli.note_saved(record_runs(runs, records / name, shared_device=shared_device).folder)
    update_pages(records)


@app.command()
def results(
    records: Records = RECORDS,
    redraw: Annotated[
        bool, Option("--redraw", help="Also draw figures again, but for those that need runs.")
    ] = False,
) -> None:
    """Update RESULTS.md, and the tables of README.md and docs/, from the records."""
    if redraw:
        for study in STUDIES.values():
            for path in study.saved(records):
                study.redraw(path)
                if study.needs_runs(path):
                    cli.note(
                        f"{path.with_suffix('')} is not drawn again: it needs trained runs. With "
                        f"these: python -m paper {study.name}"
                    )
    update_pages(records)


@app.command()
def trials(
    file: Annotated[
        Path, Argument(metavar="FILE", help='A JSON list of {"name": …, "recipe": {…}}.')
    ],
    out: Annotated[Path, Option(help="File for the results, as JSON.", show_default=False)],
    only: Annotated[str, Option(help="Only trials whose name contains this.")] = "",
    seconds: Annotated[float, Option(help="Start no trial after this time.")] = float("inf"),
    device: cli.Device = None,
) -> None:
    """Train recipes and rank the validation split along the way; test is not used."""
    started = time.monotonic()
    results = []
    graphs: dict[str, kg.Graph] = {}
    for trial in read_trials(file, only=only):
        name = trial["name"]
        recipe = trial["recipe"]
        if time.monotonic() - started > seconds:
            print(f"{name}: not started.", flush=True)
            continue
        try:
            graph_name = recipe["data"]["graph"]
            if graph_name not in graphs:
                graph = kg.load_graph(graph_name)
                graphs[graph_name] = replace(graph, test=graph.test[:0])
            result = train_trial(recipe, graphs[graph_name], device=device)
        except InterruptedRunError:
            print(f"{name}: interrupted; the trials after it were not started.", flush=True)
            return
        except kg.DualkgError as error:
            print(f"{name}: {error}", flush=True)
            continue
        print(
            f"{name}: {result['seconds']} s, {result['engine']}, {result['valid_mrr']}", flush=True
        )
        results.append(json.dumps({"name": name, **result}, ensure_ascii=False))
        # The file is written after every trial, so that a crash loses only the trial it is in.
        write_text(out, "[\n" + ",\n".join(results) + "\n]\n")


def read_trials(file: Path, *, only: str) -> list[dict[str, Any]]:
    """The trials of a JSON file whose names contain `only`."""
    try:
        trials = json.loads(file.read_text(encoding="utf-8"))
        return [trial for trial in trials if only in trial["name"]]
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{file} is not a JSON list of names and recipes: {error}.") from None


def train_trial(settings: dict[str, Any], graph: kg.Graph, *, device: str | None) -> dict[str, Any]:
    """Train a recipe; validation MRR by epoch, and the MRR of a sample of train.

    Ranks are filtered by train and valid.
    """
    recipe = recipe_from(settings, source="a trial")
    epochs_between = max(1, math.ceil(recipe.training.epochs / VALIDATIONS))
    validated = recipe.with_changes(
        {"validation.every": epochs_between, "validation.keep": "last", "validation.patience": 0}
    )
    trainer = Trainer.of_recipe(validated, graph, device=choose_device(device))
    trainer.run()
    history = trainer.progress.history
    validations = [entry for entry in history if "valid_mrr" in entry]

    sample_size = min(TRAIN_SAMPLE, len(graph.train))
    sample = np.random.default_rng(0).choice(len(graph.train), sample_size, replace=False)
    sampled = replace(graph, valid=graph.train[sample])
    report = kg.evaluate(trainer.model, sampled, split="valid", known=kg.KnownAnswers.of(graph))
    return {
        "recipe": recipe.model_dump(exclude_none=True),
        "engine": str(trainer.engine),
        "seconds": round(sum(entry["seconds"] for entry in history), 1),
        "valid_mrr": {entry["epoch"]: round(entry["valid_mrr"], 5) for entry in validations},
        "train_mrr": round(report.mrr, 4),
    }


def show(shown: Sequence[Table]) -> cli.Output:
    yield cli.Result([table.as_dict() for table in shown])
    for table in shown:
        cli.stdout.print(f"\n[bold]{escape(table.title)}[/bold]")
        cli.print_table(table.columns, table.rows, left=table.num_left)
        for line in table.notes:
            cli.stdout.print(f"[dim]{escape(line)}[/dim]")


def update_pages(records: Path) -> None:
    pages = PAGES if records.resolve() == RECORDS else {}
    write_pages(records, STUDIES.values(), pages)
    cli.note(f"Updated {records / 'RESULTS.md'}.")


if __name__ == "__main__":
    main(app)
