"""`train`, `resume`, `check` and `tune`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

import dualkg as kg
from dualkg.cli import common as cli
from dualkg.errors import DualkgError, RequestError, did_you_mean
from dualkg.files import locked, write_text

SOURCE = (
    "Recipe file (.toml), file or folder of triples, name of a recipe (see dualkg recipes) or of "
    "a graph (see dualkg datasets). A file or folder takes precedence over a name."
)
# Settings with defaults of their own where no recipe is given.
GRAPH_DEFAULTS = (
    "regularizer.name",
    "optimizer.learning_rate",
    "optimizer.schedule",
    "training.batch_size",
)
STORAGE = "URL of a shared database, or journal:FILE in a shared folder (default: OUT/study.db)."
LAUNCHER = "Start each trial by a command: 'torchrun --standalone --nproc-per-node 2 -m dualkg'."
TUNE = "Time for tuning, such as 90s, 10m or 1.5h (default: at most three times the final training, or 2m)."


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
    out: Annotated[Path | None, Option(help="Folder of the run (default: runs/NAME).")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing run.")] = False,
    engine: Annotated[
        Literal["reference", "fast"] | None, Option(help="Default: fast if supported.")
    ] = None,
    tune: Annotated[str | None, Option("--tune", metavar="TIME", help=TUNE)] = None,
    no_tune: Annotated[
        bool, Option("--no-tune", help="Train with default hyperparameters, without tuning.")
    ] = False,
    track: cli.Track = None,
    device: cli.Device = None,
) -> cli.Output | None:
    """Train a model, evaluate it, and save it as a run.

    The hyperparameters of a graph are first tuned on its validation split. A recipe is trained as
    it is.
    """
    options = dict(locals())
    from dualkg.training.distributed import num_processes

    settings = {key: options[option[2:].replace("-", "_")] for key, option in cli.SETTINGS.items()}
    settings |= {
        f"data.{key}": options[key] for key in ("split", "labels", "delimiter", "max_size")
    }
    settings["data.columns"] = cli.parse_columns(columns)
    given = {key: value for key, value in settings.items() if value is not None}
    given |= kg.training.recipe.parse_changes(changes or [])
    if num_processes() > 1:
        return _train_in_processes(options, given)
    recipe, graph, name, is_recipe = load_source(source, given)
    out = out or Path("runs") / name
    for sentence in graph.notes.sentences():
        cli.note(str(sentence))
    for sentence in [] if graph.is_mapped else graph.inspect().warnings():
        cli.note(f"{sentence} See: dualkg inspect {shlex.quote(graph.source)}", style="yellow")
    arguments: dict[str, Any] = {
        "graph": graph,
        "device": device,
        "overwrite": overwrite,
        "callbacks": track,
    }
    if tune and no_tune:
        raise RequestError("--tune and --no-tune exclude each other.")
    if tune or not (no_tune or is_recipe):
        if len(graph.valid):
            automatic = kg.tuning.automatic
            chosen = kg.training.api.choose_device(device)
            start = (
                recipe
                if is_recipe
                else automatic.starting_recipe(recipe.data, graph, chosen, given)
            )
            seconds = automatic.parse_budget(tune) if tune else None
            tuner = automatic.AutomaticTuner(
                start, graph, device=chosen, fixed=tuple(given), seconds=seconds
            )
            return _tune_and_train(tuner, seeds, out=out, overwrite=overwrite, callbacks=track)
        cli.note(
            f"{graph.name} has no validation triples to tune on, so the default hyperparameters "
            "are used."
        )
    cli.note(describe(recipe, graph))
    if seeds > 1:
        return _train_seeds(recipe, seeds, out=out, **arguments)
    with cli.training_progress(f"{graph.name} {recipe.model.name}", out) as on_progress:
        run = kg.train_recipe(recipe, out=out, on_progress=on_progress, **arguments)
    return _trained(run)


def _train_in_processes(options: dict[str, Any], given: dict[str, Any]) -> cli.Output | None:
    """Train under torchrun by the options of `train`; process 0 returns the result."""
    from dualkg.training.distributed import processes, train_in_processes

    def load() -> tuple[kg.Recipe, kg.Graph, str]:
        recipe, graph, name, is_recipe = load_source(options["source"], given)
        if (
            options["seeds"] > 1
            or options["tune"] is not None
            or not (options["no_tune"] or is_recipe)
        ):
            raise RequestError(
                "Several processes train one recipe, with one seed and without tuning. Use "
                "--no-tune or a recipe file, such as that of a run that one process has tuned."
            )
        return recipe, graph, name

    with processes(options["device"]) as group:
        if not group.first:
            cli.silence()
        recipe, graph, name = group.first_then_all(load)
        folder = options["out"] or Path("runs") / name
        cli.note(f"{describe(recipe, graph)} Processes: {group.count}.")
        callbacks = kg.training.callbacks.find_callbacks(options["track"]) if group.first else []
        with cli.training_progress(f"{graph.name} {recipe.model.name}", folder) as on_progress:
            more: dict[str, Any] = {
                "overwrite": options["overwrite"],
                "on_progress": on_progress,
                "on_start": cli.note,
            }
            run = train_in_processes(recipe, graph, group, out=folder, callbacks=callbacks, **more)
        return _trained(run) if group.first else None


@cli.command()
def resume(
    run: cli.RunPath, device: cli.Device = None, threads: cli.Threads = None
) -> cli.Output | None:
    """Resume a run that was interrupted or killed."""
    from dualkg.training.distributed import num_processes, resume_in_processes

    if num_processes() > 1:
        first = os.environ["RANK"] == "0"
        if not first:
            cli.silence()
        with cli.training_progress(run.name, run) as on_progress:
            trained = resume_in_processes(
                run, device=device, on_progress=on_progress, on_start=cli.note
            )
        return _trained(trained) if first else None
    folder = kg.training.RunFolder(run)
    if folder.seeds() or (folder.tuning.exists() and not folder.recipe.exists()):
        raise RequestError(
            f"{run} has several seeds. Type the same dualkg train command again: finished seeds "
            "are not repeated."
        )
    folder.check_is_run()
    cli.set_threads(
        threads or folder.saved_environment.get("threads")
    )  # as before, for the same weights bit for bit
    with cli.training_progress(run.name, run) as on_progress:
        return _trained(
            kg.resume(run, device=device, on_tuning=on_progress, on_progress=on_progress)
        )


@cli.command(threads=False)
def gather(run: cli.RunPath) -> cli.Output:
    """Join the weight files of a run of several processes."""
    kg.training.run.gather(run)
    weights = kg.training.RunFolder(run).weights
    yield cli.Result({"weights": str(weights)})
    cli.note_saved(weights)


@cli.command(threads=False, trust_code=False)
def check(run: cli.RunPath) -> cli.Output:
    """Check every file of a run by its checksum, and say what can be saved; exit status 1 if one is
    damaged.
    """
    from dualkg.inference.integrity import check_run

    checks = check_run(run)
    ok = all(one.ok for one in checks)
    yield cli.Result({"ok": ok, "runs": [one.as_dict() for one in checks]}, status=0 if ok else 1)
    for one in checks:
        rows = [[file.file, file.state, file.reason] for file in one.files]
        cli.print_table(
            [one.run, "state", ""], rows, left=3, bold=[i for i, row in enumerate(rows) if row[2]]
        )
        for sentence in one.advice:
            cli.stdout.print(f"\n{sentence}", soft_wrap=True, markup=False)
        if one.written_by:
            cli.note(f"{one.run} is being written by {one.written_by}.")
        if one.temporary:
            killed = "Temporary files of killed processes, removed by the next training or calibration here"
            cli.note(f"{killed}: {', '.join(one.temporary)}.")
        if not one.finished:
            cli.note(f"The run {one.run} is not finished.")
    cli.note("All files are good." if ok else "Files are damaged.", style=None)


def load_source(source: str, changes: dict[str, Any]) -> tuple[kg.Recipe, kg.Graph, str, bool]:
    """The recipe and the graph that SOURCE stands for, the name of its run, and whether SOURCE is a
    recipe.
    """
    path = Path(source)
    name = None
    if not path.exists() and path.suffix != ".toml":
        shipped = {name.casefold(): name for name in kg.list_recipes()}
        name = shipped.get(source.casefold())
        if name is None and "/" in source and (hint := did_you_mean(source, shipped)):
            raise RequestError(f"There is no file, folder or recipe '{source}'.{hint}")
    if name or path.suffix == ".toml":
        recipe = kg.load_recipe(name or path, changes=changes)
        folder = (
            path.resolve().parent
        )  # recipes/umls/complex-dura.toml is named umls-complex-dura, as if shipped
        name = name or (
            f"{folder.name}/{path.stem}" if folder.parent.name == "recipes" else path.stem
        )
        graph = kg.training.api.load_recipe_graph(recipe)
        if defaults := _other_defaults(recipe, graph):
            here, there = (", ".join(texts) for texts in zip(*defaults, strict=True))
            cli.note(f"{source} leaves out {here}. Without a recipe the default is {there}.")
        return recipe, graph, name.replace("/", "-"), True
    data = {key: value for key, value in changes.items() if key.startswith("data.")}
    if "data.graph" in data:
        raise RequestError(
            f"data.graph cannot be set, because the graph is {source}. Name the other graph "
            "instead."
        )
    base = kg.Recipe().with_changes({**data, "data.graph": source})
    graph = kg.training.api.load_recipe_graph(base)
    return (
        kg.training.api.default_recipe(base.data, graph, changes),
        graph,
        kg.data.loading.stem(path),
        False,
    )


def _other_defaults(recipe: kg.Recipe, graph: kg.Graph) -> list[tuple[str, str]]:
    """Settings that a recipe leaves to its defaults, with their values, and the other values
    without a recipe.
    """
    names = {"model.name": recipe.model.name, "optimizer.name": recipe.optimizer.name}
    names["loss.name"] = kg.training.classes.name_of(recipe.loss, kg.losses.LOSSES)
    usual = kg.training.api.default_recipe(recipe.data, graph, names)
    found = []
    for key in GRAPH_DEFAULTS:
        section, _, name = key.partition(".")
        here = recipe.value_of(key)
        there = usual.value_of(key)
        if name not in getattr(recipe, section).model_fields_set and here != there:
            found.append((f"{key} ({here})", str(there)))
    return found


def _tune_and_train(
    tuner: kg.tuning.automatic.AutomaticTuner,
    seeds: int,
    *,
    out: Path,
    overwrite: bool,
    callbacks: Any,
) -> cli.Output:
    """Tune once, and train the chosen recipe with one or several seeds."""
    graph = tuner.graph
    model = tuner.start.model
    path = out / "tuning.json"
    options: dict[str, Any] = {"out": out, "overwrite": overwrite, "callbacks": callbacks}
    name = f"{graph.name} {model.name}"
    epochs = tuner.start.training.epochs
    of_graph = f"the {len(graph.train):,} triples of {graph.name}"
    announce = (
        f"Tuning {model.name} (dim {model.dim}) on {of_graph}, then training for {epochs} epochs."
    )
    if seeds == 1:
        with cli.training_progress(name, out, announce=announce) as tuner.on_progress:
            return _trained(
                kg.tuning.automatic.tune_and_train(tuner, on_progress=tuner.on_progress, **options)
            )
    if path.exists() and not overwrite:
        saved = tuner.load(path, graph, tuner.device)
        if (saved.start, saved.fixed, saved.seconds) != (tuner.start, tuner.fixed, tuner.seconds):
            raise RequestError(
                f"{path} is of another search. Use --overwrite, or another folder with --out."
            )
        tuner = saved
    tuner.path = path
    tuner.command = _this_command()
    with locked(out):
        with cli.training_progress(name, out, announce=announce) as tuner.on_progress:
            recipe = tuner.run()
        cli.note(tuner.summary())
        return _train_seeds(recipe, seeds, graph=graph, device=tuner.device, **options)


def _this_command() -> str:
    return shlex.join(["dualkg", *sys.argv[1:]])


def describe(recipe: kg.Recipe, graph: kg.Graph) -> str:
    """What is about to be trained, in a line."""
    model = recipe.model
    regularizer = recipe.regularizer
    training = recipe.training
    dual = "" if model.dual == "none" else f", dual of the {model.dual} side"
    weight = (
        "" if regularizer.weight is None else f" {regularizer.weight:g}"
    )  # which is refused later
    penalty = "no regularizer" if regularizer.name == "none" else f"{regularizer.name}{weight}"
    return (
        f"Training {model.name} (dim {model.dim}{dual}) with {penalty} on the "
        f"{len(graph.train):,} triples of {graph.name}: {training.epochs} "
        f"epoch{'s' * (training.epochs > 1)}, batch size {training.batch_size}."
    )


def _trained(run: kg.Run) -> cli.Output:
    """The reports of a run, and a query to try."""
    reports = {split: report.as_dict() for split, report in run.reports.items()}
    yield cli.Result({"run": str(run.folder), "reports": reports})
    head, relation, _ = (run.graph.test if len(run.graph.test) else run.graph.train)[0].tolist()
    cli.print_run(run, "--head", head, relation)


def _train_seeds(
    recipe: kg.Recipe, seeds: int, *, out: Path, graph: kg.Graph, **arguments: Any
) -> cli.Output:
    with cli.training_progress(f"{graph.name} {recipe.model.name}") as on_progress:
        reports = kg.training.api.train_seeds(
            recipe, seeds, out=out, graph=graph, on_progress=on_progress, **arguments
        )
    if not len(graph.test):
        raise RequestError(
            f"{graph.name} has no test triples to report on; the runs are saved in {out}."
        )
    return _trained_seeds(
        {seed: report["test"]["metrics"] for seed, report in reports.items()}, out, graph.name
    )


def _trained_seeds(tests: dict[int, dict[str, Any]], out: Path, graph: str) -> cli.Output:
    """The metrics of each seed; mean and standard deviation are written to summary.json."""
    columns = kg.evaluation.metrics.columns()
    spread = kg.training.api.spread
    spreads = {
        key: spread([metrics[key] for metrics in tests.values()]) for key in columns.values()
    }
    summary: dict[str, Any] = {"graph": graph, "split": "test", "seeds": list(tests)}
    summary |= {key: {"mean": mean, "sd": sd} for key, (mean, sd) in spreads.items()}
    write_text(out / "summary.json", json.dumps(summary, indent=1))
    yield cli.Result({"run": str(out), **summary})
    rows = [[str(seed), *(metrics[key] for key in spreads)] for seed, metrics in tests.items()]
    total = ["mean ± sd", *(f"{mean:.4f} ± {sd:.4f}" for mean, sd in spreads.values())]
    cli.print_table(["seed", *columns], [*rows, total], bold=[len(rows)])
    cli.note_saved(
        out, next_command=["evaluate", str(out)], purpose="Evaluate the ensemble of the seeds:"
    )


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
    jobs: Annotated[int, Option(min=1, help="Number of trials to run in parallel.")] = 1,
    launcher: Annotated[str | None, Option(metavar="COMMAND", help=LAUNCHER)] = None,
    device: cli.Device = None,
) -> cli.Output:
    """Search for the recipe with the best validation MRR; run again, it resumes."""
    search = kg.tuning.load_space(space)
    folder = out or search.folder
    cli.note(
        f"{search.num_trials:,} trials ({search.settings.method}) of {search.base.model.name} on "
        f"{search.base.data.graph}, saved in {folder}."
    )
    try:
        with cli.progress_bar(search.name) as update:

            def on_progress(event: kg.tuning.TuningProgress) -> None:
                text = "" if event.best is None else f"best valid MRR {event.best:.4f}"
                if event.training:
                    text += f"  epoch {event.training.epoch}/{event.training.epochs}  loss {event.training.loss:.3f}"
                update(event.num_done, event.num_trials, text)

            options: dict[str, Any] = {
                "device": device,
                "storage": storage,
                "jobs": jobs,
                "on_progress": on_progress,
            }
            result = kg.search(search, out=folder, launcher=shlex.split(launcher or ""), **options)
    except kg.training.InterruptedRunError as error:
        raise kg.training.InterruptedRunError(f"{error} Resume with: {_this_command()}") from None
    if result.best is None:
        reason = next((trial.error for trial in result.trials if trial.error), "all were pruned")
        raise DualkgError(
            f"No trial finished; see {folder / 'trials.csv'}. The first error: {reason}"
        )
    data = result.as_dict()
    yield cli.Result({"folder": str(folder), **data})
    names = list(result.space.dimensions)
    ends = [
        name.rpartition(".")[2] for name in names
    ]  # regularizer.weight is shown as weight if that is unique
    columns = [end if ends.count(end) == 1 else name for name, end in zip(names, ends, strict=True)]
    rows = []
    for trial in result.ranked[:10]:
        values = map(trial.params.get, names)
        texts = (f"{value:g}" if type(value) in (int, float) else str(value) for value in values)
        rows.append([str(trial.number), trial.mrr, *texts])
    cli.print_table(["trial", "valid MRR", *columns], rows)
    cli.stdout.print()
    if result.importance is None:
        cli.stdout.print(
            "[dim]Hyperparameter importances need 8 finished trials with different values.[/dim]"
        )
    else:
        shares = [[name, f"{share:.2f}"] for name, share in result.importance.items()]
        cli.print_table(["hyperparameter", "importance"], shares)
    counts = (
        f"{data['finished']} trials finished, {data['pruned']} pruned, {data['failed']} failed."
    )
    cli.note(f"\n{counts}", style=None)
    cli.note_saved(
        folder, next_command=["train", str(folder / "best.toml")], purpose="Train the best recipe:"
    )
