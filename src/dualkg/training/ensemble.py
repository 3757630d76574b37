"""An ensemble: several runs on one graph as one run, with weights fitted on the validation
split.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers, with_reciprocals
from dualkg.data.graph import SPLITS, Graph
from dualkg.errors import DivergedError, InvalidValue, RequestError
from dualkg.evaluation.ranking import BLOCK_ELEMENTS, eval_mode, full_precision
from dualkg.files import file_record, locks, read_json, recover, write_text
from dualkg.models.ensemble import EnsembleModel
from dualkg.training.run import Run, RunFolder, load_single_run

Weights = Sequence[float] | Literal["equal"]


class Ensemble(Run):
    """Several runs on one graph as one run, accepted wherever a run is.

    Its score is the weighted sum of the scores of its `members`, which ranks as the sum of their
    log-softmax does. Without `weights` they are fitted on the validation split; "equal" is 1 for
    each. Runs are given as such or by their folders; an ensemble among them stands for its members.
    Models are moved to the device of the first. Folders may name classes that are not part of
    dualkg with `trust_code`.
    """

    model: EnsembleModel
    members: list[Run]
    fit: dict[str, Any]  # how the weights were fitted; empty if they were given

    def __init__(
        self,
        runs: Sequence[Run | str | Path],
        *,
        weights: Weights | None = None,
        trust_code: bool = False,
    ) -> None:
        if isinstance(runs, (str, Path, Run)) or not isinstance(runs, Iterable):
            raise RequestError(
                "kg.Ensemble takes a list of runs. kg.load_run(folder) loads a folder of several "
                "seeds."
            )
        runs = list(runs)
        if wrong := [type(one).__name__ for one in runs if not isinstance(one, (Run, str, Path))]:
            expected = "An ensemble is made of runs or of their folders"
            raise RequestError(f"{expected}; got {wrong[0]}. kg.train returns a run.")
        loaded = [
            one if isinstance(one, Run) else load_run(one, trust_code=trust_code) for one in runs
        ]
        members = [
            member
            for one in loaded
            for member in (one.members if isinstance(one, Ensemble) else [one])
        ]
        if not members:
            raise RequestError("An ensemble has at least one run; none was given.")
        self.members = members
        self.fit = {}
        graph = members[0].graph
        for name, member in zip(self.names, members, strict=True):
            _check_same_graph((self.names[0], graph), (name, member.graph))
            member.model.to(members[0].model.device)
        if isinstance(weights, str) and weights != "equal":
            raise RequestError(
                f'weights are numbers, "equal", or None to fit them on validation; got "{weights}".'
            )
        model = EnsembleModel(
            [one.model for one in members], weights=None if isinstance(weights, str) else weights
        )
        super().__init__(model.eval(), graph, members[0].recipe)
        if weights is None and len(graph.valid):
            self.fit_weights()

    @property
    def names(self) -> list[str]:
        """The names of the members' folders, or their paths if a name repeats; of a run without a
        folder, its model.
        """
        names = [
            run.folder.resolve().name if run.folder else run.model_name for run in self.members
        ]
        if len(set(names)) == len(names):
            return names
        return [
            str(run.folder or f"{number} {run.model_name}")
            for number, run in enumerate(self.members, start=1)
        ]

    @property
    def model_name(self) -> str:
        return self.model.name

    @property
    def settings(self) -> dict[str, Any]:
        return {"ensemble": dict(zip(self.names, self.model.weights, strict=True))}

    @property
    def settings_text(self) -> str:
        recipes = zip(self.names, self.model.weights, self.members, strict=True)
        return "\n".join(
            f"# {name}, weight {weight:g}\n{run.settings_text}" for name, weight, run in recipes
        )

    def fit_weights(self) -> tuple[float, ...]:
        """Set the weights that have the best MRR on the validation split, and return them.

        A folder that the ensemble was loaded from keeps the old weights: save it to another one.
        """
        if not len(self.graph.valid):
            raise RequestError(
                f"{self.graph.name} has no validation triples to fit weights on. Give weights "
                "instead."
            )
        self.model.weights, self.fit = fit_weights(self.model, self.graph)
        self.reports = {}
        self.folder = None
        return self.model.weights

    @locks("path")
    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Evaluate the ensemble and save it: graph, weights, reports, and references to the folders
        of its members.
        """
        folder = RunFolder(path)
        folder.check_free(overwrite=overwrite)
        home = folder.path.resolve()
        members = []
        for name, member, weight in zip(self.names, self.members, self.model.weights, strict=True):
            if member.folder is None:
                raise RequestError(
                    f"The run {name} of the ensemble has no folder. Save it first: "
                    "run.save(folder)."
                )
            if member.folder.resolve() == home:
                raise RequestError(
                    f"{path} is one of the runs of the ensemble. Name another folder with --out."
                )
            about = {
                "run": os.path.relpath(member.folder.resolve(), home),
                "model": member.model_name,
            }
            members.append({**about, "sha256": _checksum(member.folder), "weight": weight})
        for split in SPLITS[1:]:
            self.report_on(split)
        with folder.create(None, self.graph, self.model.device, overwrite=overwrite) as fresh:
            write_text(
                fresh.ensemble,
                json.dumps({"members": members, "fit": self.fit}, indent=1, ensure_ascii=False),
            )
            fresh.save_reports(self)
        self.folder = folder.path
        return folder.path

    @classmethod
    def load(cls, path: str | Path, *, trust_code: bool = False) -> Ensemble:
        """A saved ensemble, or the runs `seed-*` in a folder with equal weights."""
        folder = RunFolder(path)
        if not folder.ensemble.exists():
            made = cls(
                [file.parent for file in folder.seeds()], weights="equal", trust_code=trust_code
            )
            made.folder = folder.path
            return made
        saved = read_json(folder.ensemble)
        again = "Make the ensemble again: dualkg ensemble RUN RUN --out FOLDER"
        try:
            members = [
                (folder.path.resolve() / one["run"], one["sha256"]) for one in saved["members"]
            ]
            weights = [float(one["weight"]) for one in saved["members"]]
            fit = dict(saved["fit"])
        except (KeyError, TypeError, ValueError) as error:
            reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
            raise RequestError(f"{folder.ensemble} is damaged: {reason}. {again}") from None
        folders = [RunFolder(os.path.normpath(place)) for place, _ in members]
        for member, (_, checksum) in zip(folders, members, strict=True):
            if not member.finished:
                raise RequestError(
                    f"The ensemble {folder.path} needs the run {member.path}, which is not there. "
                    f"Move it back. {again}"
                )
            if _checksum(member.path) != checksum:
                raise RequestError(
                    f"The weights of {member.path} are not those that the ensemble {folder.path} "
                    f"was made of. {again}"
                )
        made = cls([member.path for member in folders], weights=weights, trust_code=trust_code)
        made.fit = fit
        made.folder = folder.path
        for run in made.members:
            run.graph = made.graph  # one copy in memory
        return made


def load_run(path: str | Path, *, trust_code: bool = False) -> Run:
    """Load a finished run, an ensemble, or a folder of several seeds.

    Several seeds are an ensemble with equal weights. A class that is not part of dualkg is imported
    only with `trust_code`.
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


def _checksum(folder: Path) -> str:
    """Of the weights of a run; of those in several files, one after the other."""
    run = RunFolder(folder)
    return " ".join(
        str(file_record(path)["sha256"]) for path in run.weight_files() or [run.weights]
    )


def _check_same_graph(one: tuple[str, Graph], other: tuple[str, Graph]) -> None:
    """Refuse runs whose ids or splits differ, by content: a graph in memory may have no
    fingerprint.
    """
    (name, a), (other_name, b) = one, other
    same_names = a.entities.names.equals(b.entities.names) and a.relations.names.equals(
        b.relations.names
    )
    if a is b or (
        same_names and all(np.array_equal(a.split(split), b.split(split)) for split in SPLITS)
    ):
        return
    which = f"{name} on {a.name} and {other_name} on {b.name}"
    if a.name == b.name:
        which = f"{name} and {other_name} on different triples or splits of {a.name}"
    raise RequestError(
        f"The runs of an ensemble are trained on one graph; these were trained {which}."
    )


MAX_SCORES = {"cpu": 2**26, "cuda": 2**28}  # of all members, in memory
MAX_CANDIDATES = 2**16  # entities per query; drawn at random if there are more
EXCLUDED = -1e15  # the margin of known answers; its square is finite in float32
MIN_GAIN = 1e-4  # of MRR: a smaller one is no reason to change the weights
MIN_ERRORS = 1.0  # standard errors by which held-out queries must confirm fitted shares
STEPS = (0.2, 0.1, 0.05, 0.025)  # of a member's share


def fit_weights(model: EnsembleModel, graph: Graph) -> tuple[list[float], dict[str, Any]]:
    """Weights with the best MRR on validation queries, filtered by train and valid, and the MRR of
    all members.

    Scores of each member are scaled to the temperature with the best likelihood. Shares of the
    members are fitted twice more, on each half of the triples. Where the other half does not
    confirm them by `MIN_ERRORS` standard errors of their gain over equal shares, they follow noise,
    and the shares are equal. Test triples are not used.
    """
    margins, halves = _margins(model, graph)
    scales = torch.tensor([_temperature(one) for one in margins], device=margins.device)
    scaled = margins.mul_(scales[:, None, None])
    shares = _fit_shares(scaled, 1 / scales)
    equal = torch.full_like(scales, 1 / len(scaled))
    gains = []
    for half in (halves, ~halves):
        fitted = _fit_shares(scaled[:, half], 1 / scales)
        gains.append(
            _reciprocal_ranks(fitted, scaled[:, ~half]) - _reciprocal_ranks(equal, scaled[:, ~half])
        )
    gain = torch.cat(gains)
    confirmed = (
        len(gain) > 1 and float(gain.mean()) > MIN_ERRORS * float(gain.std()) / len(gain) ** 0.5
    )
    shares = shares if confirmed else equal
    weights = [float(f"{weight:.4g}") for weight in (shares * scales).tolist()]
    about = {"split": "valid", "num_queries": margins.shape[1], "equal_shares": not confirmed}
    found = [_mrr(one, scaled) for one in torch.eye(len(scaled), device=scaled.device)]
    return weights, {
        **about,
        "mrr": round(_mrr(shares, scaled), 6),
        "mrr_of_members": [round(one, 6) for one in found],
    }


def _fit_shares(scaled: Tensor, inverse_scales: Tensor) -> Tensor:
    """Shares of the members with the best MRR, found by moving shares between pairs of members
    while it grows.

    They are no worse than any member alone, equal shares, or the unweighted sum of scores, up to
    `MIN_GAIN`.
    """
    alone = torch.eye(len(scaled), device=scaled.device)
    unweighted = inverse_scales / inverse_scales.sum()
    shares, best = _best([torch.full_like(unweighted, 1 / len(scaled)), unweighted, *alone], scaled)
    for step in STEPS:
        improved = True
        while improved:
            moved = [
                shares + min(step, float(shares[giver])) * (alone[taker] - alone[giver])
                for giver, taker in permutations(range(len(scaled)), 2)
                if shares[giver] > 0
            ]
            shares, after = _best([shares, *moved], scaled)
            improved = after > best
            best = after
    return torch.where(shares < 1e-6, 0.0, shares)  # of rounding


def _best(candidates: list[Tensor], scaled: Tensor) -> tuple[Tensor, float]:
    """The shares with the largest MRR; it must be better by `MIN_GAIN` than those before it."""
    best = candidates[0]
    value = _mrr(candidates[0], scaled)
    for one in candidates[1:]:
        if (other := _mrr(one, scaled)) > value + MIN_GAIN:
            best = one
            value = other
    return best, value


@torch.no_grad()
def _margins(model: EnsembleModel, graph: Graph) -> tuple[Tensor, Tensor]:
    """Scores of candidates minus the score of the answer, `(num_members, num_queries, 1 +
    num_candidates)`.

    Queries are of the validation split in both directions, or as many of them as fit in memory. The
    first column is the answer itself; known answers are `EXCLUDED`. The second tensor,
    `(num_queries,)`, is a random half of the triples.
    """
    random = np.random.default_rng(0)
    device = model.device
    num_entities, num_relations = graph.shape
    columns = np.arange(num_entities)
    if num_entities > MAX_CANDIDATES:
        columns = np.sort(random.choice(num_entities, MAX_CANDIDATES, replace=False))
    queries = with_reciprocals(graph.valid, num_relations)
    most = max(1, MAX_SCORES[device.type] // (len(model.members) * len(columns)))
    halves = np.tile(
        random.permutation(len(graph.valid)) % 2 == 0, 2
    )  # both queries of a triple in one half
    if len(queries) > most:
        chosen = np.sort(random.choice(len(queries), most, replace=False))
        queries = queries[chosen]
        halves = halves[chosen]
    known = KnownAnswers.of(graph, ("train", "valid"))
    kept = torch.from_numpy(columns).to(device)
    margins = torch.zeros(len(model.members), len(queries), 1 + len(columns), device=device)
    num_forward = int((queries[:, 1] < num_relations).sum())
    size = max(1, BLOCK_ELEMENTS // num_entities)
    starts = [*range(0, num_forward, size), *range(num_forward, len(queries), size)]
    with full_precision(), eval_mode(model):
        for start, stop in zip(starts, [*starts[1:], len(queries)], strict=True):
            block = queries[start:stop]
            given, relations, answers = torch.from_numpy(block).long().to(device).unbind(1)
            places = tuple(
                torch.from_numpy(ids).to(device) for ids in known(block[:, 0], block[:, 1])
            )
            for member, found in zip(model.members, margins, strict=True):
                if start < num_forward:
                    scores = member.predict_tails(given, relations)
                else:
                    scores = member.predict_heads(relations - num_relations, given)
                if not bool(scores.isfinite().all()):
                    raise DivergedError(
                        "A run of the ensemble scores NaN or infinity, so its training has "
                        "diverged."
                    )
                scores = scores - scores.gather(1, answers[:, None])
                scores[places] = EXCLUDED
                found[start:stop, 1:] = scores[:, kept]
    return margins, torch.from_numpy(halves).to(device)


def _temperature(margins: Tensor) -> float:
    """The factor of scores with the best likelihood of the answers, by bisection between 2⁻¹⁰ and
    2¹⁰.
    """
    low = -10.0
    high = 10.0
    for _ in range(12):
        middle = (low + high) / 2
        slope = (
            ((2**middle * margins).softmax(-1) * margins).sum(-1).mean()
        )  # of the loss, which is convex
        low, high = (middle, high) if slope < 0 else (low, middle)
    return float(2 ** ((low + high) / 2))


def _reciprocal_ranks(shares: Tensor, scaled: Tensor) -> Tensor:
    """Of realistic ranks; the answer is one of the ties."""
    margins = torch.tensordot(shares, scaled, dims=1)
    ranks: Tensor = (margins > 0).sum(-1) + (1 + (margins == 0).sum(-1)) / 2
    return ranks.reciprocal()


def _mrr(shares: Tensor, scaled: Tensor) -> float:
    return float(_reciprocal_ranks(shares, scaled).mean())
