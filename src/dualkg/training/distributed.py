"""Training in several processes under `torchrun`: the process group, the trainer, its checkpoints
and the run.

Every process takes each batch whole, has the rows of its shard of the entity tables, and the same
relations. Process 0 alone writes the run folder, shows progress and calls callbacks; checkpoints
and weights are written by all.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from dualkg.data.graph import Graph
from dualkg.errors import DivergedError, DualkgError, RequestError
from dualkg.files import locked, read_json, sync, write_json
from dualkg.losses.base import BoundLoss
from dualkg.losses.negative_sampling import BoundSampledLoss
from dualkg.losses.softmax import BoundKvsAll, BoundOneVsAll, BoundSampledSoftmax
from dualkg.models.base import only_rows, skip_initialization
from dualkg.models.sharded import TABLES, Shard, ShardedModel
from dualkg.regularizers import Regularizer
from dualkg.training.api import choose_device, finish
from dualkg.training.callbacks import Callback, find_callbacks, saved_trackers
from dualkg.training.checkpoint import Progress, is_split, load_tensors, save_tensors
from dualkg.training.engines import CudaGraphStep, ReferenceStep, Step
from dualkg.training.fused import FusedStep, ShardedTables
from dualkg.training.memory import estimate_step, gib
from dualkg.training.recipe import Recipe, load_recipe
from dualkg.training.run import Run, RunFolder
from dualkg.training.trainer import (
    STEPS_BETWEEN_CHECKS,
    Groups,
    InterruptedRunError,
    OnProgress,
    Trainer,
)

T = TypeVar("T")
OnStart = Callable[[str], None]
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MEETING_TIME = timedelta(minutes=10)  # in which all processes have to start, or to answer


class OtherProcessError(DualkgError):
    """Process 0 has refused, and has said why."""

    silent = True


def num_processes() -> int:
    """The number of processes that a launcher such as `torchrun` has started, 1 without one."""
    present = [name for name in VARIABLES if os.environ.get(name)]
    if (os.environ.get("WORLD_SIZE") or "1", os.environ.get("RANK") or "0") == ("1", "0"):
        return 1
    if missing := [name for name in VARIABLES if name not in present]:
        raise RequestError(
            f"{present[0]} is set, as by torchrun, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not. Start the processes with: torchrun "
            f"--nproc-per-node N -m dualkg …, or unset {', '.join(present)}."
        )
    try:
        rank, size = (int(os.environ[name]) for name in VARIABLES[:2])
    except ValueError:
        rank = -1
        size = 0
    if not 0 <= rank < size:
        found = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES[:2])
        raise RequestError(f"RANK is a number from 0 to WORLD_SIZE − 1; found {found}.")
    return size


@dataclass(frozen=True)
class Processes:
    """This process among those that train one model."""

    rank: int
    world_size: int
    device: torch.device
    capturable: bool = (
        True  # whether a CUDA graph can contain the collectives, which is so with NCCL
    )

    @property
    def first(self) -> bool:
        return self.rank == 0

    def first_then_all(self, function: Callable[[], T]) -> T:
        """Call a function in process 0 and then, unless that fails, in the others."""
        found = self.on_first(function)
        return function() if found is None else found

    def on_first(self, function: Callable[[], T]) -> T | None:
        """Call a function in process 0 alone when all are here; the others wait, and fail if it
        fails.
        """
        self.largest(0)
        found = None
        failure = None
        try:
            found = function() if self.first else None
        except BaseException as error:
            failure = error
        if self.largest(failure is not None)[0] and not self.first:
            raise OtherProcessError("Process 0 has refused.")
        if failure is not None:
            raise failure
        return found

    def largest(self, *values: float) -> list[float]:
        """The largest of each value over all processes."""
        found = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def lock(self, path: Path) -> Any:
        """The lock of a run folder, which process 0 holds for all."""
        return locked(path) if self.first else nullcontext()

    def shard(self, graph: Graph) -> Shard:
        return Shard(len(graph.entities), self.rank, self.world_size)


@contextmanager
def processes(device: str | torch.device | None = None) -> Iterator[Processes]:
    """Join the process group that the environment describes; a single process has none."""
    size = num_processes()
    if size == 1:
        yield Processes(0, 1, choose_device(device))
        return
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = choose_device(device)
    backend = "gloo"
    shared = False
    if chosen.type == "cuda":
        count = torch.cuda.device_count()
        shared = (
            int(os.environ.get("LOCAL_WORLD_SIZE", size)) > count
        )  # which NCCL does not support
        chosen = torch.device("cuda", local_rank % count)
        torch.cuda.set_device(chosen)
        backend = f"cpu:gloo,cuda:{'gloo' if shared else 'nccl'}"
    try:
        dist.init_process_group(backend, timeout=MEETING_TIME)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).splitlines()[0][:300]
        raise DualkgError(
            f"Process {rank} of {size} did not meet the others at {where} within "
            f"{MEETING_TIME.total_seconds() / 60:.0f} minutes: {reason}"
        ) from None
    try:
        yield Processes(rank, size, chosen, capturable=not shared)
    except (InterruptedRunError, DivergedError) as error:  # of all processes at once
        error.silent = rank > 0
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise DualkgError(
            f"Process {rank} of {size} has lost the others: {str(error).splitlines()[0][:300]} If "
            "one of them was killed, resume the run from its last checkpoint with: torchrun … -m "
            "dualkg resume RUN"
        ) from None
    finally:
        dist.destroy_process_group()


class DistributedTrainer(Trainer):
    """`Trainer` of a model whose entity tables are split over processes. The number of processes
    may change between a checkpoint and the next start: batches, initial weights and negatives do
    not depend on it.
    """

    model: ShardedModel

    def __init__(
        self,
        model: ShardedModel,
        graph: Graph,
        recipe: Recipe,
        regularizer: Regularizer,
        group: Processes,
        **options: Any,
    ) -> None:
        self.group = group
        if regularizer.reads_whole_tables and not regularizer.sums_over_rows:
            name = type(regularizer).__name__
            advice = "Use DURA, or one process."
            raise RequestError(
                f"{name} reads whole tables, and each process has a part of them. {advice}"
            )
        super().__init__(model, graph, recipe, regularizer, **(options if group.first else {}))

    @classmethod
    def build(
        cls, recipe: Recipe, graph: Graph, group: Processes, **options: Any
    ) -> DistributedTrainer:
        """A trainer of the shard of this process."""
        shard = group.shard(graph)
        with only_rows(shard, device=group.device):
            model = ShardedModel(recipe.model.build(graph.shape, seed=recipe.training.seed), shard)
        return cls(
            model.to(group.device), graph, recipe, recipe.regularizer.build(), group, **options
        )

    def _build_step(self, loss: BoundLoss) -> Step:
        shard = self.model.shard
        parts = (self.regularizer, self.optimizer)
        if self.engine.step == "kernels":
            from dualkg.training.gpu_step import ShardedBf16Step  # which imports Triton

            step = ShardedBf16Step(self.model.model, loss, *parts, shard=shard)
            return CudaGraphStep(step) if self.group.capturable else step
        if self.engine.fast and not self.regularizer.reads_whole_tables:
            bf16 = self.engine.precision == "bf16"
            tables = partial(ShardedTables, shard=shard)
            return FusedStep(self.model, loss, *parts, bf16=bf16, tables=tables)  # type: ignore[arg-type]
        return ShardedReferenceStep(
            self.model, sharded_loss(loss, shard), *parts, self.engine.step == "sparse"
        )

    def expectation(self) -> str:
        """What a process will need, as a sentence: the most of all processes. Time is estimated,
        memory bounded.
        """
        recipe = self.recipe
        shard = self.model.shard
        here = self.need.of(min(recipe.training.batch_size, len(self.examples)))
        seconds, memory = self.group.largest(estimate_step(recipe, self.model, self.engine), here)
        left = (recipe.training.epochs - self.progress.epoch) * self.num_steps * seconds
        return (
            f"Each process has {shard.part:,} of {shard.num_entities:,} entities, and needs at "
            f"most {gib(memory)} for training in addition to the model. A step takes about "
            f"{seconds:.2g} s, all epochs about {timedelta(seconds=math.ceil(left))}."
        )

    def describe_engine(self) -> str:
        return f"{self.engine}, {self.group.world_size} process{'es' if self.group.world_size > 1 else ''}"

    # -- what all agree on ----------------------------------------------------

    def _checkpoint_due(self) -> bool:
        """Process 0 decides when a checkpoint is due; any process may have been told to stop."""
        if self.progress.step % STEPS_BETWEEN_CHECKS[self.model.device.type]:
            return False
        return self._anywhere(
            self.stop.requested or (self.group.first and super()._checkpoint_due())
        )

    def _anywhere(self, flag: bool) -> bool:
        return bool(self.group.largest(flag)[0])

    def _end_epoch(self) -> None:
        # The sums of a GPU may be added up in another order by each process.
        if self.group.world_size > 1 and self.model.device.type == "cuda":
            for name, value in self.model.embedding.state_dict().items():
                if name not in TABLES:
                    dist.broadcast(value, src=0)
        super()._end_epoch()

    # -- checkpoints ----------------------------------------------------------

    @property
    def _prefix(self) -> str:
        """Of the names of tables, which in a checkpoint are those of the embedding that the model
        wraps.
        """
        return next(
            f"{name}." for name, part in self.model.named_modules() if part is self.model.embedding
        )

    def _write(self, groups: Groups, path: Path, about: dict[str, Any]) -> None:
        """Write with `torch.distributed.checkpoint`, then the pointer to it; the checkpoint before
        is kept.
        """
        from torch.distributed.checkpoint import (
            hf_storage,
            state_dict_saver,
        )  # which takes a second

        self._check_weights()
        checkpoint = ShardedCheckpoint(path, self.group)
        by_rows = _by_rows(self.model.shard)
        state = dict[str, Any]()
        for group, tensors in groups.items():
            for name, value in tensors.items():
                key = f"{group}/{name.removeprefix(self._prefix)}"
                part = value.detach().cpu()
                state[key] = by_rows(part) if self._is_split(key, part.shape) else part
        folder = checkpoint.next_folder()
        writer = hf_storage.HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
        with warnings.catch_warnings(action="ignore"):  # that there is no process group
            state_dict_saver.save(state, storage_writer=writer, no_dist=self.group.world_size == 1)
        self.group.on_first(partial(checkpoint.point_to, folder, about))

    def _read(self, path: Path) -> tuple[Groups, dict[str, Any]]:
        """The last checkpoint, written by any number of processes; of tables that are split, the
        rows of this one.
        """
        from torch.distributed.checkpoint import hf_storage, state_dict_loader
        from torch.distributed.checkpoint.api import CheckpointException

        about = ShardedCheckpoint(path, self.group).about()
        shard = self.model.shard
        state = dict[str, Any]()
        if about["when"] == "start":
            return {}, about
        folder = path / str(about["folder"])
        by_rows = _by_rows(shard)
        groups = Groups()
        reader = hf_storage.HuggingFaceStorageReader(str(folder))
        try:
            for key, facts in reader.read_metadata().state_dict_metadata.items():
                shape = tuple(facts.size)
                dtype = facts.properties.dtype  # type: ignore[union-attr]
                split = self._is_split(key, shape)
                part = torch.zeros((shard.size, *shape[1:]) if split else shape, dtype=dtype)
                state[key] = by_rows(part) if split else part
            with warnings.catch_warnings(action="ignore"):
                state_dict_loader.load(
                    state, storage_reader=reader, no_dist=self.group.world_size == 1
                )
        except (OSError, ValueError, KeyError, SafetensorError, CheckpointException) as error:
            raise RequestError(
                f"The checkpoint {folder} cannot be read: {str(error).splitlines()[0][:300]}"
            ) from None
        for key, value in state.items():
            group, _, name = key.partition("/")
            own = name if group == "optimizer" else f"{self._prefix}{name}"
            groups.setdefault(group, {})[own] = (
                value.to_local() if hasattr(value, "to_local") else value
            )
        return groups, about

    def save_results(self, run: Run, folder: RunFolder) -> None:
        """All processes write their rows, and the first also all that is not split."""
        rank = self.group.rank
        world_size = self.group.world_size
        tables = self.model.model.state_dict()
        kept = {name: table for name, table in tables.items() if is_split(name) or rank == 0}
        save_tensors(
            {"model": kept}, folder.weight_shard(rank, world_size), about=self.about("end")
        )
        self.group.on_first(partial(folder.finish_sharded, run, world_size))

    def _is_split(self, key: str, shape: Sequence[int]) -> bool:
        """Whether a tensor of a checkpoint, by its name and shape, has a row for every entity."""
        group, _, name = key.partition("/")
        if group == "optimizer":
            name = [name for name, _ in self.model.embedding.named_parameters()][
                int(name.partition(".")[0])
            ]
        return name in TABLES and len(shape) > 0


class ShardedCheckpoint:
    """A folder with the last checkpoints, `pointer` naming the last that is complete."""

    def __init__(self, path: Path, group: Processes) -> None:
        self.path = path
        self.group = group
        self.pointer = path / "latest.json"

    def about(self) -> dict[str, Any]:
        return dict(read_json(self.pointer, dict[str, Any], checksum=True))

    def start(self) -> None:
        """Before the first step there is nothing but the recipe."""
        self.path.mkdir(exist_ok=True)
        write_json(
            self.pointer, {"when": "start", "optimizer": None, "progress": asdict(Progress())}
        )

    def _folders(self) -> list[Path]:
        self.path.mkdir(exist_ok=True)
        return [found for found in self.path.iterdir() if found.name.isdigit()]

    def next_folder(self) -> Path:
        """The folder of the next checkpoint, on which all processes agree."""
        last = (
            max((int(found.name) for found in self._folders()), default=0)
            if self.group.first
            else 0
        )
        return self.path / f"{int(self.group.largest(last + 1)[0]):06d}"

    def point_to(self, folder: Path, about: dict[str, Any]) -> None:
        for file in (*folder.iterdir(), folder):
            sync(file)
        before = self.about().get("folder") if self.pointer.exists() else None
        write_json(self.pointer, {**about, "folder": folder.name})
        for old in self._folders():
            if old.name not in (folder.name, before):
                shutil.rmtree(old)


def _by_rows(shard: Shard) -> Callable[[Tensor], Any]:
    """A function that makes rows of this process a part of the whole table; a single process has
    all of them.
    """
    if shard.world_size == 1:
        return lambda part: part
    from torch.distributed import tensor
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (shard.world_size,))

    def distributed(part: Tensor) -> Any:
        shape = torch.Size((shard.num_entities, *part.shape[1:]))
        options = {
            "shape": shape,
            "stride": torch.empty(shape, device="meta").stride(),
            "run_check": False,
        }
        return tensor.DTensor.from_local(part.contiguous(), mesh, [tensor.Shard(0)], **options)

    return distributed


# -- losses and the reference step on split tables: the number of processes changes the order of some sums alone -------


def sharded_loss(loss: BoundLoss, shard: Shard) -> BoundLoss:
    """The same loss for a `ShardedModel`. Losses of sampled negatives need no change: each owner
    scores its own.
    """
    if type(loss) is BoundOneVsAll or type(loss) is BoundKvsAll:
        return replace(loss, shard=shard)
    if isinstance(loss, (BoundSampledLoss, BoundSampledSoftmax)):
        return loss
    raise RequestError(
        f"{type(loss).__name__} is a loss that cannot be trained on several processes."
    )


@dataclass
class ShardedReferenceStep(ReferenceStep):
    """`ReferenceStep` of a `ShardedModel`: every process has the same objective, and the gradient
    of its own rows.
    """

    model: ShardedModel

    def objective(self, batch: Tensor) -> Tensor:
        if not (self.regularizer.weight and self.regularizer.reads_whole_tables):
            return super().objective(batch)
        factors = self.model.factors(*batch.unbind(-1))
        loss = self.loss(self.model, factors)
        with self.model.local(factors) as here:
            return loss + self.model.shard.sum_of_all(self.regularizer(here))

    def gradients(self, batch: Tensor) -> Tensor:
        objective = super().gradients(batch)
        self.model.add_local_gradients(
            bool(self.regularizer.weight) and self.regularizer.reads_whole_tables
        )
        return objective


# -- runs --------------------------------------------------------------------


def train_in_processes(
    recipe: Recipe,
    graph: Graph,
    group: Processes,
    *,
    out: Path,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
    callbacks: Sequence[Callback] = (),
    on_start: OnStart | None = None,
) -> Run:
    """Train a recipe in the processes of a group, each calling this. After a restart by the
    launcher, resume.

    `on_start` gets a sentence in process 0 before the first step: the memory and the time that each
    process needs.
    """
    folder = RunFolder(out)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    with group.lock(out):
        unfinished = group.largest(
            folder.sharded_checkpoint.exists() and not folder.report.exists()
        )[0]
        if restarted and unfinished:
            return _resume(
                folder,
                group,
                on_start,
                callbacks=callbacks,
                trust_code=False,
                on_progress=on_progress,
            )
        group.on_first(lambda: folder.check_free(overwrite=overwrite))
        called = find_callbacks(callbacks)
        trainer = DistributedTrainer.build(
            recipe, graph, group, on_progress=on_progress, callbacks=called
        )

        def create() -> None:
            engine = trainer.describe_engine()
            with folder.create(
                recipe, graph, group.device, engine=engine, overwrite=overwrite
            ) as fresh:
                ShardedCheckpoint(fresh.sharded_checkpoint, group).start()

        group.on_first(create)
        return _finish(trainer, folder, on_start)


def resume_in_processes(
    path: Path,
    *,
    device: str | torch.device | None = None,
    on_progress: OnProgress | None = None,
    trust_code: bool = False,
    on_start: OnStart | None = None,
) -> Run:
    """Resume a run of several processes in any number of processes, one included."""
    folder = RunFolder(path)
    with processes(device) as group, group.lock(folder.path):
        group.on_first(folder.check_is_run)
        return _resume(folder, group, on_start, trust_code=trust_code, on_progress=on_progress)


def _resume(
    folder: RunFolder,
    group: Processes,
    on_start: OnStart | None,
    *,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Run:
    def check() -> None:
        if folder.finished:
            folder.remove_checkpoint()
            damaged = f"Some of its files are damaged. Evaluate it again without torchrun: dualkg resume {folder.path}"
            again = (
                damaged if folder.damage() else "To train longer, start a new run with more epochs."
            )
            raise RequestError(f"The run {folder.path} is finished. {again}")
        if folder.checkpoint.exists() and load_tensors(folder.checkpoint)[1].get("when") == "start":
            ShardedCheckpoint(
                folder.sharded_checkpoint, group
            ).start()  # of a run that was only prepared
            folder.checkpoint.unlink()
        if not folder.sharded_checkpoint.exists():
            advice = f"Resume it without torchrun: dualkg resume {folder.path}"
            raise RequestError(f"The run {folder.path} was started in one process. {advice}")

    group.on_first(check)
    recipe = load_recipe(folder.recipe, trust_code=options.pop("trust_code"))
    graph = folder.load_graph()
    called = find_callbacks(callbacks or saved_trackers(folder.path)) if group.first else []
    started = ShardedCheckpoint(folder.sharded_checkpoint, group).about()["when"] != "start"
    with skip_initialization() if started else nullcontext():  # the checkpoint has the weights
        trainer = DistributedTrainer.build(recipe, graph, group, callbacks=called, **options)
    trainer.restore(folder.sharded_checkpoint)
    return _finish(trainer, folder, on_start)


def _finish(trainer: DistributedTrainer, folder: RunFolder, on_start: OnStart | None) -> Run:
    """Say what the run needs, train to the end, rank, and write the results."""
    expectation = trainer.expectation()
    if on_start is not None and trainer.group.first:
        on_start(expectation)
    return finish(trainer, folder, folder.sharded_checkpoint)
