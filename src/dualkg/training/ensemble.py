"""An ensemble: several runs on one graph as one run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, final

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from dualkg.data.filters import KnownAnswers, with_reciprocals
from dualkg.data.graph import SPLITS, Graph
from dualkg.errors import DamagedFile, DivergedError, InvalidValue, PathExists, RequestError
from dualkg.evaluation.ranking import eval_mode, full_precision, sample_triples
from dualkg.files import exists, locked, read_json, recover, write_text
from dualkg.models.ensemble import EnsembleModel, no_embeddings
from dualkg.training.run import Run, TrainedRun, load_single_run
from dualkg.training.run_folder import RunFolder, hash_of

Weights = Sequence[float] | Literal["equal"]

MAKE_AGAIN = "Make the ensemble again from its runs, and save it."
MIN_GAIN = 1e-4  # of MRR, by which a member has to be better: the last digit that is shown
EXCLUDED = -1e15  # the margin of known answers; its square is finite in float32
MAX_SCORES = 2**24  # scores of a member by which it is scaled, 64 MB


@dataclass(frozen=True)
class Reference:
    """A member in the file of an ensemble; `run` is its folder from that of the ensemble."""

    run: str
    model: str
    sha256: str
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class SavedEnsemble:
    """The file of an ensemble; `fit` says how weights were fitted, and is empty if not."""

    members: list[Reference]
    fit: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> SavedEnsemble:
        """Read and check the file."""
        try:
            saved: SavedEnsemble = read_json(path, cls)
        except DamagedFile as error:
            raise DamagedFile(path, error.reason, advice=MAKE_AGAIN) from None
        if not any(member.weight for member in saved.members):
            reason = "members: one of them should have a weight above 0"
            raise DamagedFile(path, reason, advice=MAKE_AGAIN)
        return saved

    def folders(self, home: Path) -> list[RunFolder]:
        """The folders of the members of an ensemble that is saved in `home`."""
        home = home.resolve()
        return [RunFolder(os.path.normpath(home / member.run)) for member in self.members]


@dataclass(frozen=True)
class BetterMember:
    """A member of an ensemble whose validation MRR is above the MRR of the ensemble."""

    run: str
    mrr: float
    ensemble_mrr: float

    def __str__(self) -> str:
        return (
            f"The run {self.run} alone has a better validation MRR, {self.mrr:.4f} against "
            f"{self.ensemble_mrr:.4f}: use it instead."
        )


@final
class Ensemble(Run):
    """Several runs on one graph as one run, accepted wherever a run is.

    Its score is the weighted sum of the scores of its `members`, which ranks as the weighted sum of
    their log-softmax does. Without `weights` members have equal shares, after their scores are
    scaled to the temperature with the best likelihood of the validation triples; "equal" is the
    weight 1 for each. Runs are given as such or by their folders; an ensemble among them stands for
    its members. Models are moved to the device of the first. Folders may name classes that are not
    part of dualkg with `trust_code`.

    Args:
        runs: Runs or their folders.
        weights: Weights of the members, "equal", or equal shares of scaled scores if left out.
        trust_code: Whether recipes in the folders may name classes that are not part of dualkg.

    Examples:
        >>> ensemble = kg.Ensemble(["runs/world", run], weights="equal")
        >>> len(ensemble.members)
        2
    """

    model: EnsembleModel
    members: list[TrainedRun]
    fit: dict[str, Any]  # how the weights were fitted; empty if they were given

    def __init__(
        self,
        runs: Sequence[Run | str | Path],
        *,
        weights: Weights | None = None,
        trust_code: bool = False,
    ) -> None:
        self.members = _members(runs, trust_code=trust_code)
        self.fit = {}
        first = self.members[0]
        for name, member in zip(self.names, self.members, strict=True):
            _check_same_graph((self.names[0], first.graph), (name, member.graph))
            member.model.to(first.model.device)

        if isinstance(weights, str):
            if weights != "equal":
                raise InvalidValue(
                    "weights",
                    expected='numbers, "equal", or None to scale scores on validation',
                    found=weights,
                )
            model = EnsembleModel([member.model for member in self.members])
        else:
            model = EnsembleModel([member.model for member in self.members], weights=weights)
        self.model = model.eval()
        self.graph = first.graph
        self.recipe = None
        self.reports = {}
        self.folder = None
        self.identity: str | None = None
        if weights is None and len(first.graph.valid):
            self.fit_weights()

    @property
    def better_member(self) -> BetterMember | None:
        """The best member, if its validation MRR is above the MRR of the ensemble.

        Reports on the validation split are compared, and evaluated now if they are missing. A
        difference of at most `MIN_GAIN` does not count.
        """
        if not len(self.graph.valid):
            return None
        mrr = self.report_on("valid").mrr
        of_members = [member.report_on("valid").mrr for member in self.members]
        best = max(range(len(of_members)), key=of_members.__getitem__)
        if of_members[best] <= mrr + MIN_GAIN:
            return None
        return BetterMember(self.names[best], of_members[best], mrr)

    @property
    def names(self) -> list[str]:
        """The names of the members' folders, or their paths if a name repeats.

        A run without a folder has the name of its model.
        """
        names = []
        paths = []
        for number, member in enumerate(self.members, start=1):
            folder = member.folder
            names.append(folder.resolve().name if folder else member.model_name)
            paths.append(str(folder or f"{number} {member.model_name}"))
        if len(set(names)) == len(names):
            return names
        return paths

    @property
    def model_name(self) -> str:
        return self.model.name

    @property
    def settings(self) -> dict[str, Any]:
        return {"ensemble": dict(zip(self.names, self.model.weights, strict=True))}

    @property
    def settings_text(self) -> str:
        parts = []
        for name, weight, member in zip(self.names, self.model.weights, self.members, strict=True):
            parts.append(f"# {name}, weight {weight:g}\n{member.settings_text}")
        return "\n".join(parts)

    def fit_weights(self) -> tuple[float, ...]:
        """Set weights that scale the scores of all members alike, and return them.

        A folder that the ensemble was loaded from keeps the old weights: save it to another one.
        """
        if not len(self.graph.valid):
            raise RequestError(
                f"{self.graph.name} has no validation triples to fit weights on. Give `weights` "
                "instead."
            )
        self.model.weights, self.fit = fit_scales(self.model, self.graph)
        self.reports = {}
        self.folder = None
        self.identity = None
        return self.model.weights

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Evaluate the ensemble and save it: graph, weights and reports.

        Its members are saved as references to their folders.
        """
        folder = RunFolder(path)
        with locked(path):
            folder.check_free(overwrite=overwrite)
            members = self._references(folder.path.resolve())
            for split in SPLITS[1:]:
                self.report_on(split)
            saved = {"members": members, "fit": self.fit}
            with folder.create(
                None, self.graph, self.model.device, overwrite=overwrite
            ) as new_folder:
                write_text(new_folder.ensemble, json.dumps(saved, indent=1, ensure_ascii=False))
                new_folder.save_reports(self)
        self.folder = folder.path
        return folder.path

    def _references(self, home: Path) -> list[dict[str, Any]]:
        """The path of each member from the folder `home`, its model, checksum and weight."""
        references = []
        for name, member, weight in zip(self.names, self.members, self.model.weights, strict=True):
            if member.folder is None:
                raise RequestError(
                    f"The run {name} of the ensemble has no folder. Save it first: "
                    "run.save(folder)."
                )
            member_folder = member.folder.resolve()
            if member_folder == home:
                raise PathExists(home, what="one of the runs of the ensemble", overwritable=False)
            references.append(
                {
                    "run": os.path.relpath(member_folder, home),
                    "model": member.model_name,
                    "sha256": RunFolder(member.folder).weights_checksum(),
                    "weight": weight,
                }
            )
        return references

    @classmethod
    def load(cls, path: str | Path, *, trust_code: bool = False) -> Ensemble:
        """A saved ensemble, or the runs `seed-*` in a folder with equal weights."""
        folder = RunFolder(path)
        if not folder.ensemble.exists():
            seeds = [file.parent for file in folder.seeds()]
            ensemble = cls(seeds, weights="equal", trust_code=trust_code)
            ensemble.folder = folder.path
            identities = {}
            for seed, run in zip(seeds, ensemble.members, strict=True):
                identities[seed.name] = run.identity
            ensemble.identity = hash_of(identities)
            return ensemble

        saved = SavedEnsemble.read(folder.ensemble)
        members = saved.folders(folder.path)
        for member, reference in zip(members, saved.members, strict=True):
            # A member is no ensemble: the members of one are saved in its place.
            if not member.finished or member.ensemble.exists():
                raise RequestError(
                    f"The ensemble {folder.path} needs the run {member.path}, which is not there. "
                    f"Move it back. {MAKE_AGAIN}"
                )
            if member.weights_checksum() != reference.sha256:
                raise RequestError(
                    f"The weights of {member.path} are not those that the ensemble {folder.path} "
                    f"was made of. {MAKE_AGAIN}"
                )
        identity = None
        if exists(folder.report):
            folder.check_files()
            identity = folder.identity()
        ensemble = cls(
            [member.path for member in members],
            weights=[reference.weight for reference in saved.members],
            trust_code=trust_code,
        )
        ensemble.fit = saved.fit
        ensemble.folder = folder.path
        ensemble.identity = identity
        for run in ensemble.members:
            run.graph = ensemble.graph  # one copy in memory
        return ensemble


def _members(runs: Sequence[Run | str | Path], *, trust_code: bool) -> list[TrainedRun]:
    """The runs of an ensemble; folders are loaded, and ensembles stand for their members."""
    if isinstance(runs, (str, Path, Run)) or not isinstance(runs, Iterable):
        raise RequestError(
            "kg.Ensemble takes a list of runs. kg.load_run(folder) loads a folder of several seeds."
        )
    members: list[TrainedRun] = []
    for given in runs:
        if not isinstance(given, (Run, str, Path)):
            raise RequestError(
                "An ensemble is made of runs or of their folders; got "
                f"{type(given).__name__}. kg.train returns a run."
            )
        run = given if isinstance(given, Run) else load_run(given, trust_code=trust_code)
        if isinstance(run, Ensemble):
            members += run.members
        elif isinstance(run, TrainedRun):
            members.append(run)
    if not members:
        raise RequestError("An ensemble has at least one run; none was given.")
    return members


def load_run(path: str | Path, *, trust_code: bool = False) -> Run:
    """Load a finished run, an ensemble, or a folder of several seeds.

    Several seeds are an ensemble with equal weights. A class that is not part of dualkg is imported
    only with `trust_code`.

    Args:
        path: Folder of a run, an ensemble, or of several seeds.
        trust_code: Whether classes that the recipe names may be imported.

    Returns:
        The run.

    Examples:
        >>> kg.load_run("runs/world").model_name
        'ComplEx'
    """
    if isinstance(path, Run):
        raise InvalidValue(
            "path", expected="the folder of a run", found=path, advice="Use the run as it is."
        )
    folder = RunFolder(path)
    recover(folder.path)
    if folder.ensemble.exists() or folder.seeds():
        return Ensemble.load(path, trust_code=trust_code)
    return load_single_run(path, trust_code=trust_code)


def load_trained_run(path: str | Path) -> TrainedRun:
    """Load a finished run, and refuse an ensemble, whose weights are those of its members."""
    run = load_run(path)
    if not isinstance(run, TrainedRun):
        raise no_embeddings(run.model_name)
    return run


# -- scales ------------------------------------------------------------------


@torch.no_grad()
def fit_scales(model: EnsembleModel, graph: Graph) -> tuple[list[float], dict[str, Any]]:
    """The factor of each member's scores with the best likelihood of validation answers.

    Also returns how many queries were used: those of the validation split, or a sample that has at
    most `MAX_SCORES` scores. Known answers in train and valid are left out.
    """
    num_entities, num_relations = graph.shape
    triples = sample_triples(graph.valid, max(2, MAX_SCORES // num_entities), seed=0)
    queries = with_reciprocals(triples, num_relations)
    known = KnownAnswers.of(graph, ("train", "valid"))(queries[:, 0], queries[:, 1])
    is_known = torch.from_numpy(np.stack(known)).to(model.device)
    heads, relations, tails = torch.from_numpy(triples).long().to(model.device).unbind(1)
    answers = torch.cat([tails, heads])[:, None]
    scales = []
    with full_precision(), eval_mode(model):
        for member in model.members:
            of_tails = member.predict_tails(heads, relations)
            of_heads = member.predict_heads(relations, tails)
            scores = torch.cat([of_tails, of_heads])
            if not bool(scores.isfinite().all()):
                raise DivergedError(
                    "A run of the ensemble scores NaN or infinity, so its training has diverged."
                )
            margins = scores - scores.gather(1, answers)
            margins[tuple(is_known)] = EXCLUDED
            margins.scatter_(1, answers, 0.0)
            scales.append(float(f"{_temperature(margins):.4g}"))
    return scales, {"split": "valid", "num_queries": len(queries)}


def _temperature(margins: Tensor) -> float:
    """The factor of scores with the best likelihood of the answers.

    It is found by bisection between 2⁻¹⁰ and 2¹⁰, since the loss is convex.
    """
    low = -10.0
    high = 10.0
    for _ in range(12):
        middle = (low + high) / 2
        probabilities = (2**middle * margins).softmax(-1)
        slope = (probabilities * margins).sum(-1).mean()
        if slope < 0:
            low = middle
        else:
            high = middle
    return float(2 ** ((low + high) / 2))


# -- loading -----------------------------------------------------------------


NamedGraph = tuple[str, Graph]  # of a run, with the name of the run


def _check_same_graph(first: NamedGraph, second: NamedGraph) -> None:
    """Refuse runs whose ids or splits differ.

    Contents are compared, since a graph in memory may have no fingerprint.
    """
    name_a, a = first
    name_b, b = second
    if a is b or _same_contents(a, b):
        return
    trained = f"{name_a} on {a.name} and {name_b} on {b.name}"
    if a.name == b.name:
        trained = f"{name_a} and {name_b} on different triples or splits of {a.name}"
    raise RequestError(
        f"The runs of an ensemble are trained on one graph; these were trained {trained}."
    )


def _same_contents(a: Graph, b: Graph) -> bool:
    same_entities = a.entities.names.equals(b.entities.names)
    same_relations = a.relations.names.equals(b.relations.names)
    if not (same_entities and same_relations):
        return False
    return all(np.array_equal(a.split(split), b.split(split)) for split in SPLITS)
