"""What the processes of a training have to agree on, compared before anything is trained."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualkg.data.graph import Graph
from dualkg.errors import PYTHON, RequestError, Words
from dualkg.files import Token, written_token
from dualkg.tables.processes import Processes
from dualkg.training.environment import installed_version
from dualkg.training.recipe import Recipe

Facts = dict[str, str]  # what a process starts with, as text that is compared
CHECKSUM = "the checksum of names and triples in their order"
VISIBLE_SECONDS = 10.0  # in which a network file system shows a new file to all machines
POLL_SECONDS = 0.1
MAX_MORE = 3  # further differences that a message names


class Disagreement(NamedTuple):
    """A fact on which processes differ; `values` are those of all, None where there is none."""

    what: str
    values: tuple[str | None, ...]


class ProcessesDisagree(RequestError):
    """Processes were started with other recipes, data, versions or devices than process 0.

    `differences` are in the order of importance, and `hosts` are those of all processes.
    """

    def __init__(self, differences: Sequence[Disagreement], hosts: Sequence[str]) -> None:
        super().__init__()
        self.differences = list(differences)
        self.hosts = list(hosts)

    def message(self, words: Words = PYTHON) -> str:
        first, *more = self.differences
        expected = first.values[0]
        others = [index for index, value in enumerate(first.values) if value != expected]
        other = others[0]
        num_more = len(others) - 1
        and_more = f" and {num_more} more" if num_more else ""
        also = ""
        if more:
            names = ", ".join(difference.what for difference in more[:MAX_MORE])
            also = f" They also differ in {names}{', …' if len(more) > MAX_MORE else ''}."
        return (
            f"The processes disagree on {first.what}: it is {_shown(expected)} in process 0 on "
            f"{self.hosts[0]}, and {_shown(first.values[other])} in process {other} on "
            f"{self.hosts[other]}{and_more}.{also} Start all of them with the same recipe, data "
            "and version; nothing was trained or written."
        )


class FolderNotShared(RequestError):
    """Some processes do not see the run folder of process 0; `hosts` are theirs, by index."""

    def __init__(self, path: Path, hosts: Mapping[int, str], *, first_host: str) -> None:
        super().__init__()
        self.path = path
        self.hosts = dict(hosts)
        self.first_host = first_host

    def message(self, words: Words = PYTHON) -> str:
        first_processes: dict[str, int] = {}
        for index, host in self.hosts.items():
            first_processes.setdefault(host, index)
        places = [f"process {index} on {host}" for host, index in first_processes.items()]
        named = ", ".join(places[:MAX_MORE])
        num_more = len(places) - MAX_MORE
        more = f", and on {num_more} more machine{'s' * (num_more > 1)}" if num_more > 0 else ""
        return (
            f"The run folder {self.path} is not the same for all processes: what process 0 writes "
            f"there on {self.first_host} is not seen by {named}{more}. Name a folder that all "
            f"machines share, under the same path, with {words.option('out')}; nothing was trained."
        )


def _shown(value: str | None) -> str:
    return "not set" if value is None else value


def find_differences(facts: Sequence[Mapping[str, str]]) -> list[Disagreement]:
    """The facts that are not the same in all processes, in the order of process 0."""
    # A dictionary keeps the order, and has every fact once.
    names = dict.fromkeys(name for of_process in facts for name in of_process)
    differences = []
    for name in names:
        values = tuple(of_process.get(name) for of_process in facts)
        if len(set(values)) > 1:
            differences.append(Disagreement(name, values))
    return differences


def check_agreement(group: Processes, facts: Facts) -> None:
    """Refuse in all processes to train, if they differ in a fact. The first reports it."""
    if group.count == 1:
        return
    gathered = [json.loads(text) for text in group.gather(json.dumps(facts))]
    differences = find_differences(gathered)
    if differences:
        error = ProcessesDisagree(differences, group.gather(socket.gethostname()))
        error.silent = not group.first
        raise error


def check_shared(group: Processes, path: Path, *, patience: float = VISIBLE_SECONDS) -> None:
    """Refuse in all processes a run folder that some of them do not see. The first reports it.

    Process 0 writes a random text, which all look for. `patience` is how many seconds they do.
    """
    if group.count == 1:
        return
    with ExitStack() as stack:
        own = group.on_first(lambda: stack.enter_context(written_token(path)))
        token = Token(*json.loads(group.gather(json.dumps(own))[0]))
        is_seen = _is_seen_within(patience, token, path)
        # The token stays until all have looked for it.
        answers = group.gather("" if is_seen else socket.gethostname())
    hosts = {index: host for index, host in enumerate(answers) if host}
    if hosts:
        first_host = group.gather(socket.gethostname())[0]
        error = FolderNotShared(path, hosts, first_host=first_host)
        error.silent = not group.first
        raise error


def _is_seen_within(seconds: float, token: Token, path: Path) -> bool:
    deadline = time.monotonic() + seconds
    while not token.is_seen(path):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def training_facts(recipe: Recipe, graph: Graph, device: torch.device) -> Facts:
    """What processes have to agree on before a training: versions, device, recipe and graph.

    Every setting of the recipe is a fact of its own, in a canonical form. The checksum of a graph
    depends on the order of its triples, as batches do.
    """
    facts = {
        "the version of dualkg": str(installed_version("dualkg")),
        "the version of PyTorch": torch.__version__,
        "the type of device": device.type,
        "the type of numbers": str(torch.get_default_dtype()),
    }
    facts |= dict(_settings(recipe.model_dump()))
    for name, count in graph.counts.items():
        what = name if name in ("entities", "relations") else f"{name} triples"
        facts[f"the number of {what}"] = f"{count:,}"
    facts[CHECKSUM] = graph.fingerprint or graph.with_fingerprint().fingerprint
    return facts


def _settings(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The settings of a recipe by their dotted keys, as JSON."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        elif value is not None:
            # An object may have its address in its text, which differs between processes.
            text = json.dumps(value, default=lambda other: type(other).__qualname__)
            yield f"{prefix}{key}", text
