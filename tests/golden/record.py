"""Record golden.json: `make golden`, or `python -m tests.golden.record --out FILE`.

For each training of `cases.py` the record has a few numbers: the mean loss of every epoch, the norm
of every table, the MRR on validation and test triples, and the scores of some test triples. They
agree on every machine within a tolerance: `RTOL` (relative), and `MRR_ATOL` (absolute) for the MRR,
since a rank jumps where two scores are nearly equal. Some trainings amplify rounding errors. The
recorder measures that by training again from weights that differ in their last digits, and records
larger `tolerances` for their losses, norms or scores.

Beside the numbers is a hash of all weights and ranks. Hashes are compared only if processor,
libraries and the number of threads are those of the record. Both the record and that comparison are
made in a process of their own with the trainings in the same order, since PyTorch may round
products differently after bfloat16 ones.

Settings that cannot be combined are recorded as refused.

Path networks are trained in float64 by the plain form of their kernels. Their numbers agree within
`NETWORK_RTOL` on every machine, and with those of the compiled form.
"""

import argparse
import hashlib
import json
import math
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import adapter
from .cases import DEFAULTS, FAST, Settings, cases, depends_on_processor, network_cases

GOLDEN = Path(__file__).with_name("golden.json")

RTOL = 1e-3
ATOL = 1e-5
NETWORK_RTOL = 1e-6
MRR_ATOL = 0.02
SENSITIVE_MRR_ATOL = 0.2  # of trainings with tolerances of their own

NUM_SCORES = 4
NUM_DIGITS = 9  # of recorded numbers
NUM_THREADS = 1  # with more, sums are taken in another order
PACKAGES = ("torch", "numpy", "numba", "llvmlite", "scipy", "faiss-cpu", "safetensors")

NUM_PERTURBATIONS = 2
PERTURBATION = 3e-7  # of initial weights; the rounding error of float32 is 6e-8
SAFETY = 10  # how much more other rounding may change a training than a perturbation did

Record = dict[str, Any]


@cache
def golden() -> Record:
    record: Record = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return record


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- the machine -------------------------------------------------------------


def machine() -> Record:
    """What results depend on beside the code: processor, libraries and number of threads."""
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": NUM_THREADS,
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _processor() -> str:
    """The model of the processor and a hash of its features."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())

    # Linux names processors on x86; on ARM it has the numbers of implementer and part.
    names = ("model name", "cpu implementer", "cpu part", "cpu variant", "cpu revision")
    named = [f"{name}: {fields[name]}" for name in names if name in fields]
    features = fields.get("features", fields.get("flags", ""))
    return ", ".join([*named, f"features: {_sha256([features.encode()])}"])


def _version(package: str) -> str | None:
    if package == "torch":
        return str(torch.__version__)  # with the kind of its build
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# -- what is recorded --------------------------------------------------------


def training_record(settings: Settings, graph: Any, *, perturb: bool = False) -> Record:
    """Numbers and hash of one training; with `perturb`, also the tolerance that it needs."""
    settings = DEFAULTS | settings
    try:
        run = adapter.train(settings, graph)
    except adapter.Refused:
        return {"refused": True}
    record = {"numbers": _numbers(run), "sha256": _training_hash(run)}
    if not perturb or depends_on_processor(settings):
        return record
    if tolerances := _tolerances(settings, graph, record["numbers"]):
        record["tolerances"] = tolerances
    return record


def network_record(settings: Settings, graph: Any, *, compiled: bool = False) -> Record:
    """Numbers of the training of a path network in float64, in the plain or the compiled form."""
    settings = DEFAULTS | settings | (FAST if compiled else {})
    run = adapter.train(settings, graph, callback=adapter.Float64())
    return {"numbers": _numbers(run)}


def _numbers(run: Any) -> Record:
    norms = {}
    for name, table in adapter.weight_tables(run).items():
        norms[name] = _short(float(np.linalg.norm(table.astype(np.float64))))
    numbers: Record = {
        "losses": [_short(loss) for loss in adapter.losses_by_epoch(run)],
        "norms": norms,
        "scores": [_short(score) for score in adapter.scores(run, NUM_SCORES)],
        "mrr": [_short(adapter.mrr(run, split)) for split in ("valid", "test")],
    }
    if validation := adapter.validation_mrrs(run):
        numbers["mrr"] += [_short(value) for value in validation]
    return numbers


def _training_hash(run: Any) -> str:
    parts = []
    for name, table in adapter.weight_tables(run).items():
        parts += [name.encode(), np.ascontiguousarray(table).tobytes()]
    for split in ("valid", "test"):
        for name, ranks in adapter.ranks(run, split).items():
            parts += [name.encode(), np.ascontiguousarray(ranks, dtype=np.int64).tobytes()]
    parts.append(repr(adapter.losses_by_epoch(run)).encode())
    return _sha256(parts)


def _tolerances(settings: Settings, graph: Any, numbers: Record) -> Record:
    """Relative tolerances above `RTOL` of losses, norms and scores, from perturbed trainings."""
    largest = dict.fromkeys(("losses", "norms", "scores"), 0.0)
    for seed in range(NUM_PERTURBATIONS):
        perturbation = adapter.Perturbation(seed, PERTURBATION)
        run = adapter.train(settings, graph, callback=perturbation)
        perturbed = dict(flattened(_numbers(run)))
        for path, number in flattened(numbers):
            group = path.partition(".")[0]
            if group in largest:
                difference = abs(perturbed[path] - number) / (abs(number) + ATOL / RTOL)
                largest[group] = max(largest[group], difference)
    return {
        group: _rounded_up(SAFETY * difference)
        for group, difference in largest.items()
        if SAFETY * difference > RTOL
    }


def flattened(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries and lists, by paths such as `norms.entities`."""
    if isinstance(values, Mapping):
        items: Iterable[tuple[Any, Any]] = values.items()
    elif isinstance(values, list):
        items = enumerate(values)
    else:
        yield path, values
        return
    for key, value in items:
        yield from flattened(value, f"{path}.{key}" if path else str(key))


def _sha256(parts: Iterable[bytes]) -> str:
    """The first 64 bits of the hash: enough to notice a change."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def _short(number: float) -> float:
    return float(f"{number:.{NUM_DIGITS}g}")


def _rounded_up(number: float) -> float:
    """The number with one digit, so that a repeated record differs little."""
    exponent = math.floor(math.log10(number))
    return float(f"{math.ceil(number / 10**exponent)}e{exponent}")


# -- comparison --------------------------------------------------------------


def differences(expected: Record, computed: Record, *, rtol: float = RTOL) -> list[str]:
    """Where the numbers of a training differ from the record by more than the tolerance."""
    if expected.get("refused") or computed.get("refused"):
        if expected.get("refused") == computed.get("refused"):
            return []
        return [f"refused: {expected.get('refused')} in the record, {computed.get('refused')} now"]
    tolerances = expected.get("tolerances", {})
    found = []
    computed_numbers = dict(flattened(computed["numbers"]))
    for path, number in flattened(expected["numbers"]):
        if path not in computed_numbers:
            found.append(f"{path}: {number} in the record, missing now")
            continue
        group = path.partition(".")[0]
        relative = tolerances.get(group, rtol)
        absolute = relative * ATOL / RTOL
        if group == "mrr":
            absolute = SENSITIVE_MRR_ATOL if tolerances else MRR_ATOL
        if not math.isclose(number, computed_numbers[path], rel_tol=relative, abs_tol=absolute):
            found.append(f"{path}: {number} in the record, {computed_numbers[path]} now")
    return found


# -- the command -------------------------------------------------------------


def record_all(*, perturb: bool) -> Record:
    graph = adapter.small_graph()
    trainings = {}
    settings_by_id = cases()
    for number, (id, settings) in enumerate(settings_by_id.items(), start=1):
        trainings[id] = training_record(settings, graph, perturb=perturb)
        if number % 50 == 0:
            print(f"{number} of {len(settings_by_id)} trainings", file=sys.stderr)
    networks = {id: network_record(settings, graph) for id, settings in network_cases().items()}
    return {
        "machine": machine(),
        "trainings": trainings,
        "bootstrap": adapter.bootstrap(num_samples=1000, seed=0),
        "networks": networks,
    }


def as_text(record: Record) -> str:
    """JSON with one training, or one part of the world run, a line."""
    sections = []
    for section, values in record.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        sections.append(f" {json.dumps(section)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record", description=__doc__)
    parser.add_argument("--out", type=Path, default=GOLDEN, help="the file to write")
    parser.add_argument(
        "--no-tolerances",
        action="store_true",
        help="train once, without measuring how rounding errors grow",
    )
    arguments = parser.parse_args()
    with one_thread():
        record = record_all(perturb=not arguments.no_tolerances)
    arguments.out.write_text(as_text(record), encoding="utf-8")
    refused = sum("refused" in training for training in record["trainings"].values())
    print(f"{arguments.out}: {len(record['trainings'])} trainings, {refused} of them refused")


if __name__ == "__main__":
    main()
