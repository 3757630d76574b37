"""`train`, `resume`, `check` and `tune`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

import dualkg as kg
from dualkg.cli import common as cli
from dualkg.cli.training_display import TrainingDisplay, ask_to_start
from dualkg.cli.words import DATA_SETTINGS, SETTINGS
from dualkg.errors import DualkgError, RequestError

SOURCE = (
    "Recipe file (.toml), file or folder of triples, name of a recipe or of a graph (see dualkg "
    "datasets). A file or folder takes precedence over a name."
)
STORAGE = "URL of a database that several machines share (default: the file OUT/study.db)."
TUNE = (
    "Time after which tuning ends, such as 90s, 10m or 1.5h (default: the work of the final "
    "training, three times that on a GPU)."
)
DECISIONS = (
    "Run with decisions, or a file of them: accepted facts are trained on, rejected ones are "
    "negatives."
)
NUM_TRIALS = 10  # trials that the table of a search lists


@cli.command()
def train(
    source: Annotated[str, Argument(metavar="SOURCE", help=SOURCE)],
    model: Annotated[
        str | None, Option(help="Model, such as ComplEx or RotatE, or package.module:Class.")
    ] = None,
    loss: Annotated[
        str | None,
        Option(help="Loss: OneVsAll, KvsAll, SampledSoftmax, NegativeSampling or MarginRanking."),
    ] = None,
    regularizer: Annotated[
        str | None, Option(help="Regularizer: none, DURA, N3, Frobenius, RegP1, ….")
    ] = None,
    weight: Annotated[float | None, Option(help="Weight λ of the regularizer.")] = None,
    dim: Annotated[int | None, Option(help="Embedding dimension.")] = None,
    epochs: Annotated[int | None, Option(help="Number of epochs.")] = None,
    batch_size: Annotated[int | None, Option(help="Triples per step.")] = None,
    optimizer: Annotated[str | None, Option(help="Optimizer: Adagrad, Adam or SGD.")] = None,
    lr: Annotated[float | None, Option(help="Learning rate.")] = None,
    patience: Annotated[
        int | None, Option(help="Stop after N validations (epochs) without a better MRR.")
    ] = None,
    validation_queries: Annotated[
        int | None, Option(help="Rank a sample of N queries of valid in each validation.")
    ] = None,
    seed: Annotated[
        int | None, Option(help="Random seed of the initial weights and the batches.")
    ] = None,
    seeds: Annotated[
        int, Option(min=1, help="Train with this many seeds and report mean ± sd.")
    ] = 1,
    changes: Annotated[
        list[str] | None, Option("--set", help="Change the recipe: training.batch_size=1000.")
    ] = None,
    split: Annotated[
        str | None, Option(help="Split of a single file (default: 80/10/10 percent).")
    ] = None,
    columns: cli.Columns = None,
    delimiter: cli.Delimiter = None,
    labels: Annotated[
        str | None, Option(help="File with a readable label for each entity name.")
    ] = None,
    max_size: cli.MaxSize = None,
    with_decisions: Annotated[str | None, Option(metavar="RUN", help=DECISIONS)] = None,
    out: Annotated[Path | None, Option(help="Folder of the run (default: runs/NAME).")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing run.")] = False,
    resume_run: Annotated[
        bool, Option("--resume", help="Resume the run in the folder if it was interrupted.")
    ] = False,
    engine: Annotated[
        Literal["reference", "fast"] | None, Option(help="Default: fast if supported.")
    ] = None,
    tune: Annotated[str | None, Option("--tune", metavar="TIME", help=TUNE)] = None,
    no_tune: Annotated[
        bool, Option("--no-tune", help="Train with default hyperparameters, without tuning.")
    ] = False,
    track: cli.Track = None,
    device: cli.Device = None,
    serve: Annotated[
        bool, Option("--serve", help="Show curves in a browser, and serve the run at the end.")
    ] = False,
    port: Annotated[
        int, Option(min=0, max=65535, help="Port of --serve; 0 picks a free one.")
    ] = 8000,
    yes: Annotated[
        bool, Option("--yes", "-y", help="Do not ask before more than 30 minutes of work.")
    ] = False,
) -> cli.Output | None:
    """Train a model, evaluate it, and save it as a run.

    The hyperparameters of a graph are first tuned on its validation split. A recipe is trained as
    it is.
    """
    # The values of all options by name, before there are other variables.
    options = dict(locals())
    if tune and no_tune:
        raise RequestError("--tune and --no-tune exclude each other.")
    if resume_run and overwrite:
        raise RequestError("--resume and --overwrite exclude each other.")
    if serve and seeds > 1:
        raise RequestError("--serve shows one training, and --seeds starts several.")
    is_first = kg.workflows.is_first_process()
    if not is_first:
        cli.silence()
    arguments: dict[str, Any] = {
        "changes": _recipe_changes(options),
        "tune": False if no_tune else tune,
        "device": device,
        "out": out or Path("runs") / kg.workflows.run_name(source),
        "overwrite": overwrite,
        "callbacks": track,
    }
    display = TrainingDisplay(ask=None if yes else ask_to_start)
    if serve and is_first:
        arguments |= {"source": source, "resume_unfinished": resume_run}
        return _train_and_serve(display, port=port, **arguments)
    with display:
        if seeds > 1:
            results = kg.workflows.train_source_seeds(source, seeds, on_event=display, **arguments)
            return _print_seeds(results)
        run = kg.workflows.train_source(
            source, on_event=display, resume_unfinished=resume_run, **arguments
        )
    return _print_trained(run) if is_first else None


def _train_and_serve(display: TrainingDisplay, *, port: int, **arguments: Any) -> cli.Output:
    """Train while a server shows the curves; it serves the run until Ctrl-C."""
    from dualkg.serve.server import LiveServer

    with LiveServer(arguments["out"], port=port, device=arguments["device"]) as server:
        report = server.reporter()

        def on_event(event: Any) -> None:
            display(event)
            report(event)

        cli.note(f"{server.address} shows the training.", style=None)
        with display:
            run = kg.workflows.train_source(on_event=on_event, **arguments)
        yield from _print_trained(run)
        server.serve_result()
        cli.note(f"{server.address} serves {run.folder}. Press Ctrl-C to stop.", style=None)
        server.wait()


def _recipe_changes(options: dict[str, Any]) -> dict[str, Any]:
    """The settings of a recipe that options of `train` change; --set comes last."""
    settings = {}
    for key, option in {**SETTINGS, **DATA_SETTINGS}.items():
        value = options[option.removeprefix("--").replace("-", "_")]
        if value is not None:
            settings[key] = value
    columns = cli.parse_columns(options["columns"])
    if columns is not None:
        settings["data.columns"] = columns
    return {**settings, **kg.training.recipe.parse_changes(options["changes"] or [])}


@cli.command()
def resume(
    run: cli.RunPath, device: cli.Device = None, threads: cli.Threads = None
) -> cli.Output | None:
    """Resume a run that was interrupted or killed."""
    is_first = kg.workflows.is_first_process()
    if not is_first:
        cli.silence()
    folder = kg.training.RunFolder(run)
    # The same number of threads as before gives the same weights, bit for bit.
    cli.set_threads(threads or folder.saved_environment.get("threads"))
    with TrainingDisplay(run.name) as display:
        resumed = kg.resume(run, device=device, on_event=display)
    return _print_trained(resumed) if is_first else None


def _print_trained(run: kg.Run) -> cli.Output:
    """The reports of a run, and a query to try."""
    reports = {split: report.as_dict() for split, report in run.reports.items()}
    yield cli.Result({"run": str(run.folder), "reports": reports})
    triples = run.graph.test if len(run.graph.test) else run.graph.train
    head, relation, _ = triples[0].tolist()
    cli.print_run(run, "--head", head, relation)


def _print_seeds(results: kg.workflows.SeedResults) -> cli.Output:
    """The metrics of each seed, their mean and standard deviation."""
    summary = results.summary()
    yield cli.Result({"run": str(results.folder), **summary})
    columns = kg.evaluation.metrics.columns()
    rows: list[list[Any]] = []
    for seed, metrics in results.metrics().items():
        rows.append([str(seed), *(metrics[key] for key in columns.values())])
    total = ["mean ± sd"]
    for key in columns.values():
        total.append(f"{summary[key]['mean']:.4f} ± {summary[key]['sd']:.4f}")
    cli.print_table(["seed", *columns], [*rows, total], bold=[len(rows)])
    cli.note_saved(
        results.folder,
        next_command=["evaluate", str(results.folder)],
        purpose="Evaluate the ensemble of the seeds:",
    )


@cli.command(threads=False, trust_code=False)
def check(run: cli.RunPath) -> cli.Output:
    """Check every file of a run by its checksum.

    The exit status is 1 if a file is damaged.
    """
    from dualkg.inference.integrity import check_run

    checks = check_run(run)
    ok = all(of_run.ok for of_run in checks)
    data = {"ok": ok, "runs": [of_run.as_dict() for of_run in checks]}
    yield cli.Result(data, status=0 if ok else 1)
    for of_run in checks:
        rows = [[file.file, file.state, file.reason] for file in of_run.files]
        damaged = [number for number, file in enumerate(of_run.files) if file.reason]
        cli.print_table([of_run.run, "state", ""], rows, left=3, bold=damaged)
        if of_run.written_by:
            cli.note(f"{of_run.run} is being written by {of_run.written_by}.")
        if not of_run.finished:
            cli.note(f"The run {of_run.run} is not finished.")
    cli.note("All files are good." if ok else "Files are damaged.", style=None)


@cli.command()
def tune(
    space: Annotated[
        Path,
        Argument(metavar="SPACE", help="Search space (.toml): a recipe and the values to try."),
    ],
    out: Annotated[
        Path | None, Option(help="Folder of the search (default: runs/tune-NAME).")
    ] = None,
    storage: Annotated[str | None, Option(help=STORAGE)] = None,
    device: cli.Device = None,
) -> cli.Output:
    """Search for the recipe with the best validation MRR; run again, it resumes.

    Several processes that run the same command share the trials.
    """
    search = kg.tuning.load_space(space)
    folder = out or search.folder
    cli.note(
        f"{search.num_trials:,} trials ({search.settings.method}) of {search.base.model.name} on "
        f"{search.base.data.graph}, saved in {folder}."
    )
    with cli.progress_bar(search.name) as update:

        def on_progress(event: kg.tuning.TuningProgress) -> None:
            update(event.num_parts_done, event.num_trials, event.text, event.time_left)

        try:
            result = kg.search(
                search,
                out=folder,
                device=device,
                storage=storage,
                on_progress=on_progress,
            )
        except kg.training.InterruptedRunError as error:
            command = shlex.join(["dualkg", *sys.argv[1:]])
            raise kg.training.InterruptedRunError(f"{error} Resume with: {command}") from None

    if result.best is None:
        errors = [trial.error for trial in result.trials if trial.error]
        reason = errors[0] if errors else "all were pruned"
        raise DualkgError(
            f"No trial finished; see {folder / 'trials.csv'}. The first error: {reason}"
        )
    data = result.as_dict()
    yield cli.Result({"folder": str(folder), **data})
    _print_trials(result)
    cli.note(
        f"\n{data['finished']} trials finished, {data['pruned']} pruned, {data['failed']} failed.",
        style=None,
    )
    cli.note_saved(
        folder, next_command=["train", str(folder / "best.toml")], purpose="Train the best recipe:"
    )


def _print_trials(result: kg.tuning.TuningResult) -> None:
    """The best trials of a search, and the importance of its hyperparameters."""
    names = list(result.space.dimensions)
    rows = []
    for trial in result.ranked[:NUM_TRIALS]:
        values = [_parameter_text(trial.params.get(name)) for name in names]
        rows.append([str(trial.number), trial.mrr, *values])
    cli.print_table(["trial", "valid MRR", *_short_names(names)], rows)
    cli.stdout.print()
    if result.importance is None:
        cli.stdout.print(
            "[dim]Hyperparameter importances need 8 finished trials with different values.[/dim]"
        )
    else:
        shares = [[name, f"{share:.2f}"] for name, share in result.importance.items()]
        cli.print_table(["hyperparameter", "importance"], shares)


def _short_names(names: list[str]) -> list[str]:
    """`weight` for `regularizer.weight`, if that is unique."""
    ends = [name.rpartition(".")[2] for name in names]
    return [end if ends.count(end) == 1 else name for name, end in zip(names, ends, strict=True)]


def _parameter_text(value: object) -> str:
    is_number = type(value) in (int, float)
    return f"{value:g}" if is_number else str(value)
