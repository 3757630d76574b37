"""The same jobs by PyKEEN, in an environment of its own; started by training.py and ranking.py.

It needs nothing of dualkg: its input is a file of arrays, and its answer is JSON.
"""

import contextlib
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import measurement


class EnoughError(Exception):
    """Raised from inside PyKEEN's loop when enough batches were timed."""


# -- running tasks -----------------------------------------------------------


def run_task(task: dict[str, Any], python: Path) -> dict[str, Any]:
    """Run a task with the Python that has PyKEEN; report if there is none."""
    if not python.exists():
        return {"failed": "PyKEEN is not installed"}
    return measurement.in_fresh_process(Path(__file__), task, python=python)


def write_arrays(path: Path, graph: Any, model: Any = None) -> Path:
    """Write a graph as arrays of ids, and the tables of a ComplEx model."""
    arrays = {
        "train": graph.train,
        "valid": graph.valid,
        "test": graph.test,
        "shape": np.array(graph.shape),
    }
    if model is not None:
        arrays["entities"] = model.head_table.detach().cpu().numpy()
        arrays["relations"] = model.relations.detach().cpu().numpy()
    np.savez(path, **arrays)
    return path


# -- the tasks ---------------------------------------------------------------


def make_model(arrays: Any, *, dim: int, device: str) -> tuple[Any, Any]:
    """ComplEx and the triples it is trained on.

    It has no regularizer, which leaves PyKEEN the least to do.
    """
    import torch
    from pykeen.losses import CrossEntropyLoss
    from pykeen.models import ComplEx
    from pykeen.triples import CoreTriplesFactory

    num_entities, num_relations = arrays["shape"].tolist()
    factory = CoreTriplesFactory(
        torch.from_numpy(arrays["train"].astype(np.int64)),
        num_entities=num_entities,
        num_relations=num_relations,
        create_inverse_triples=True,
    )
    model = ComplEx(
        triples_factory=factory,
        embedding_dim=dim,
        loss=CrossEntropyLoss(),
        regularizer=None,
        random_seed=0,
    )
    return model.to(device), factory


def measure_training(
    arrays: Any, *, dim: int, batch: int, steps: int, warm_up: int, device: str
) -> dict[str, Any]:
    """Seconds per epoch, from the median of some batches.

    PyKEEN's loop is over distinct (head, relation) pairs.
    """
    import torch
    from pykeen.training import LCWATrainingLoop
    from pykeen.training.callbacks import TrainingCallback

    clock: list[float] = []

    class Clock(TrainingCallback):
        def post_batch(self, epoch: int, batch: Any, **kwargs: Any) -> None:
            measurement.wait_for(device)
            clock.append(time.perf_counter())
            if len(clock) > warm_up + steps:
                raise EnoughError

    # Without this, numbers close to zero make a step take ten times as long on some CPUs.
    torch.set_flush_denormal(True)
    model, factory = make_model(arrays, dim=dim, device=device)
    loop = LCWATrainingLoop(
        model=model,
        triples_factory=factory,
        optimizer=torch.optim.Adagrad(model.get_grad_params(), lr=0.1),
    )
    started = time.perf_counter()
    with contextlib.suppress(EnoughError):
        loop.train(factory, num_epochs=1, batch_size=batch, use_tqdm=False, callbacks=Clock())
    both_directions = factory._add_inverse_triples_if_necessary(factory.mapped_triples)
    num_queries = len(np.unique(both_directions[:, :2].numpy(), axis=0))
    times = [after - before for before, after in itertools.pairwise(clock)][warm_up:]
    num_steps = math.ceil(num_queries / batch)
    return {
        "seconds_per_epoch": statistics.median(times) * num_steps,
        "steps_per_epoch": num_steps,
        "steps_measured": len(times),
        "warm_up_seconds": clock[warm_up] - started,
    }


def measure_ranking(
    arrays: Any, *, split: str, batch: int | None, device: str, num_triples: int | None
) -> dict[str, Any]:
    """Seconds of PyKEEN's evaluator with our weights, filtered, both directions."""
    import torch
    from pykeen.evaluation import RankBasedEvaluator

    model, _ = make_model(arrays, dim=arrays["entities"].shape[1] // 2, device=device)
    num_relations = int(arrays["shape"][1])
    our_relations = arrays["relations"]
    # PyKEEN numbers a relation and its inverse 2r and 2r + 1; ours are r and r + num_relations.
    their_relations = np.empty_like(our_relations)
    their_relations[0::2] = our_relations[:num_relations]
    their_relations[1::2] = our_relations[num_relations:]
    put_complex(model.entity_representations[0], arrays["entities"])
    put_complex(model.relation_representations[0], their_relations)

    splits = {
        name: torch.from_numpy(arrays[name].astype(np.int64)) for name in ("train", "valid", "test")
    }
    evaluator = RankBasedEvaluator(filtered=True)
    started = time.perf_counter()
    results = evaluator.evaluate(
        model,
        splits[split][:num_triples],
        additional_filter_triples=list(splits.values()),
        batch_size=batch,
        use_tqdm=False,
    )
    measurement.wait_for(device)
    return {
        "seconds": time.perf_counter() - started,
        "mrr": results.get_metric("both.realistic.inverse_harmonic_mean_rank"),
    }


def put_complex(representation: Any, table: np.ndarray) -> None:
    """Write our rows, all real parts and then all imaginary ones, as PyKEEN's pairs."""
    import torch

    real, imaginary = np.split(table, 2, axis=1)
    pairs = torch.from_numpy(np.stack([real, imaginary], axis=-1))
    weight = representation._embeddings.weight
    with torch.no_grad():
        weight.copy_(pairs.reshape(weight.shape))


def main() -> None:
    choices = measurement.parser(__doc__).parse_args()
    if not choices.task:
        sys.exit("This is started by training.py and ranking.py, with a --task.")
    arguments = dict(choices.task)
    tasks = {"train": measure_training, "rank": measure_ranking}
    task = tasks[arguments.pop("what")]
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("PYSTOW_HOME", folder)  # where PyKEEN would keep data sets
        arrays = dict(np.load(arguments.pop("arrays")))
        result = task(arrays, **arguments)
    peak = measurement.peak_mib(arguments["device"])
    print(json.dumps({**result, "peak_mib": peak, "version": measurement.version("pykeen")}))


if __name__ == "__main__":
    main()
