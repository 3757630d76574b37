"""What the processes of a training have to agree on, compared before anything is trained."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from dualkg.data.graph import Graph
from dualkg.errors import RequestError
from dualkg.files import Token, written_token
from dualkg.tables.processes import Processes
from dualkg.training.environment import installed_version
from dualkg.training.recipe import Recipe

Facts = dict[str, str]  # what a process starts with, as text that is compared
CHECKSUM = "the checksum of names and triples in their order"
VISIBLE_SECONDS = 10.0  # in which a network file system shows a new file to all machines
POLL_SECONDS = 0.1


def check_agreement(group: Processes, facts: Facts) -> None:
    """Refuse in all processes to train, if they differ in a fact. The first reports it.

    Processes send a hash of their facts, and the facts themselves only if the hashes differ.
    """
    if group.count == 1:
        return
    text = json.dumps(facts, sort_keys=True)
    if len(set(group.gather(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    all_facts: list[Facts] = [json.loads(other) for other in group.gather(json.dumps(facts))]
    hosts = group.gather(socket.gethostname())
    error = RequestError(disagreement(all_facts, hosts))
    error.silent = not group.first
    raise error


def disagreement(all_facts: list[Facts], hosts: list[str]) -> str:
    """A sentence on the first fact in which a process differs from process 0."""
    first = all_facts[0]
    # A dictionary keeps the order, and has every fact once.
    names = dict.fromkeys(name for facts in all_facts for name in facts)
    name, other = next(
        (name, process)
        for name in names
        for process, facts in enumerate(all_facts)
        if facts.get(name) != first.get(name)
    )
    return (
        f"The processes disagree on {name}: it is {first.get(name, 'not set')} in process 0 on "
        f"{hosts[0]}, and {all_facts[other].get(name, 'not set')} in process {other} on "
        f"{hosts[other]}. Start all of them with the same recipe, data and version; nothing was "
        "trained or written."
    )


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
    unseen = [f"process {index} on {host}" for index, host in enumerate(answers) if host]
    if unseen:
        first_host = group.gather(socket.gethostname())[0]
        more = f" and {len(unseen) - 1} more" if len(unseen) > 1 else ""
        error = RequestError(
            f"The run folder {path} is not the same for all processes: what process 0 writes "
            f"there on {first_host} is not seen by {unseen[0]}{more}. Name a folder that all "
            "machines share, under the same path, with `out`; nothing was trained."
        )
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

    The checksum of a graph depends on the order of its triples, as batches do.
    """
    facts = {
        "the version of dualkg": str(installed_version("dualkg")),
        "the version of PyTorch": torch.__version__,
        "the type of device": device.type,
        "the type of numbers": str(torch.get_default_dtype()),
    }
    facts |= dict(_settings(recipe.model_dump()))
    facts[CHECKSUM] = graph.fingerprint or graph.with_fingerprint().fingerprint
    return facts


def _settings(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The settings of a recipe by their dotted keys in backquotes, as JSON."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        elif value is not None:
            # An object may have its address in its text, which differs between processes.
            text = json.dumps(value, default=lambda other: type(other).__qualname__)
            yield f"`{prefix}{key}`", text
