"""A run: a trained model with its graph, recipe and reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from dualkg import files
from dualkg.data.graph import SPLITS, Graph, Split
from dualkg.errors import (
    RequestError,
)
from dualkg.evaluation.report import Report, build_report, evaluate
from dualkg.models.base import Model
from dualkg.tables.base import local_tables
from dualkg.training import checkpoint
from dualkg.training.recipe import Recipe, load_recipe
from dualkg.training.run_folder import RunFolder


class Run(ABC):
    """A model on a graph with its results: a `TrainedRun`, or an `Ensemble` of several.

    Examples:
        >>> kg.load_run("runs/world").report_on("valid").metrics.num_queries == 2 * len(graph.valid)
        True
    """

    model: Model
    graph: Graph
    recipe: Recipe | None  # an ensemble has none: each of its members has one
    reports: dict[str, Report]
    folder: Path | None
    identity: str | None  # `RunFolder.identity` when it was loaded or saved

    def __repr__(self) -> str:
        has_mrr = "test" in self.reports and len(self.graph.test)
        mrr = f", test MRR {self.reports['test'].mrr:.4f}" if has_mrr else ""
        folder = f", {str(self.folder)!r}" if self.folder else ""
        return f"{type(self).__name__}({self.model_name} on {self.graph.name}{mrr}{folder})"

    @property
    @abstractmethod
    def model_name(self) -> str:
        """The name of the model."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What it was made with, for JSON."""

    @property
    @abstractmethod
    def settings_text(self) -> str:
        """What it was made with, for people."""

    @abstractmethod
    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Save what is not saved in a folder yet."""

    @property
    def report(self) -> Report:
        """The report on the test split."""
        return self.report_on("test")

    def report_on(self, split: Split) -> Report:
        """The report on a split: from training, from saved ranks, or evaluated now."""
        if split not in self.reports:
            self.reports[split] = self._saved_report(split) or evaluate(
                self.model, self.graph, split=split
            )
        return self.reports[split]

    def _saved_report(self, split: Split) -> Report | None:
        if self.folder is None:
            return None
        folder = RunFolder(self.folder)
        if not folder.ranks(split).exists():
            return None
        ranks = folder.load_ranks(split, self.graph.shape)
        return build_report(ranks, self.graph, split=split)

    @property
    def is_current(self) -> bool:
        """Whether the folder still holds this run: it may have been moved or replaced since."""
        if self.folder is None:
            return False
        identity = RunFolder(self.folder).known_identity()
        return identity is not None and self.identity in (None, identity)

    def predictor(self, **options: Any) -> Any:
        """A `Predictor` of this run, with probabilities if its folder has a calibration.

        The options are those of `Predictor.of`.
        """
        from dualkg.inference.predictor import Predictor  # of a package that depends on this one

        return Predictor.of(self, **options)


@final
@dataclass(repr=False)
class TrainedRun(Run):
    """A trained model with its graph, recipe and results.

    Attributes:
        model: The trained model.
        graph: The graph.
        recipe: All settings.
        history: Loss and seconds of each epoch.
        reports: Reports on valid and test.
        folder: Folder of the run, if it is saved.
        costs: Seconds and peak memory.
        sparsity: What `sparsify` set to zero.
        extension: What was added to an extended run.
        identity: Hash of recipe, graph and weights.

    Examples:
        >>> isinstance(run, kg.TrainedRun), run.recipe.model.name
        (True, 'ComplEx')
    """

    model: Model
    graph: Graph
    recipe: Recipe
    history: list[dict[str, Any]] = field(default_factory=list)
    reports: dict[str, Report] = field(default_factory=dict)
    folder: Path | None = None
    costs: dict[str, float | None] | None = None  # seconds of training and ranking, peak memory
    sparsity: dict[str, Any] | None = None  # how it was made sparse; `tables` are stored as CSR
    extension: dict[str, Any] | None = None  # the entities that were added after training
    identity: str | None = None

    @property
    def model_name(self) -> str:
        """The name of the class of the model."""
        return type(self.model.named).__name__

    @property
    def settings(self) -> dict[str, Any]:
        """The recipe as tables, for JSON."""
        return self.recipe.model_dump(mode="json")

    @property
    def settings_text(self) -> str:
        return self.recipe.as_toml()

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Save a run that has no folder, such as one of imported embeddings."""
        folder = RunFolder(path)
        with files.locked(path):
            folder.check_free(overwrite=overwrite)
            with folder.create(
                self.recipe, self.graph, self.model.device, overwrite=overwrite
            ) as fresh:
                fresh.finish(self)
        self.folder = folder.path
        return folder.path


def gather(path: str | Path, *, trust_code: bool = False) -> TrainedRun:
    """Write the weights of several processes into one file.

    After a kill, the index that is left says to go on.
    """
    folder = RunFolder(path)
    with files.locked(path):
        folder.check_is_run()
        if not folder.weights_index.exists():
            raise RequestError(
                f"The weights of {path} are in one file already, or the run is not finished."
            )
        run = load_single_run(path, trust_code=trust_code)
        folder.join_weights(run.graph)
        for split in SPLITS:
            if folder.ranks(split).exists():
                run.report_on(split)
        # The report decides which weights are read, those in one file or those in several.
        folder.save_reports(run)
        folder.remove_weight_files()
    return run


def load_single_run(path: str | Path, *, trust_code: bool = False) -> TrainedRun:
    """Load a finished run that is no ensemble; `load_run` loads both.

    A class that is not part of dualkg is imported only with `trust_code`.
    """
    folder = RunFolder(path)
    folder.check_is_run()
    folder.check_finished()
    identity = folder.identity()
    folder.check_files()
    recipe = load_recipe(folder.recipe, trust_code=trust_code)
    graph = folder.load_graph()
    tables = local_tables(len(graph.entities), initialize=False)
    model = recipe.model.build(graph.shape, seed=recipe.training.seed, tables=tables)
    model.read_graph(graph)
    folder.load_weights(model, graph)
    history = folder.read(folder.history, default=[])
    return TrainedRun(
        model.eval(),
        graph,
        recipe,
        checkpoint.check_history(history, source=folder.history),
        folder=folder.path,
        costs=folder.read(folder.costs, dict[str, float | None]),
        sparsity=folder.read(folder.sparsity, dict[str, Any]),
        identity=identity,
    )
