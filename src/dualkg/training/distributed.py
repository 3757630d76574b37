"""Training in several processes under `torchrun`: the process group, its checkpoints and the run.

Every process takes each batch whole, has the rows of its shard of the entity tables, and the same
relations. Process 0 alone writes the run folder, shows progress and calls callbacks; checkpoints
and weights are written by all.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]

from dualkg.data.graph import Graph
from dualkg.errors import DivergedError, DualkgError, InvalidValue, RequestError
from dualkg.files import file_record, locked, read_text, remove, sync
from dualkg.models.base import Model
from dualkg.models.partial import in_processes
from dualkg.tables.base import TABLE_NAMES, DeviceTables
from dualkg.tables.checkpoints import (
    CheckpointFolder,
    checkpoint_failures,
    checkpoint_writer,
    load_checkpoint,
    shard_file,
)
from dualkg.tables.files import is_divided, read_own_rows
from dualkg.tables.liveness import Liveness, Pace
from dualkg.tables.processes import Processes
from dualkg.tables.shard import Shard
from dualkg.training.agreement import check_agreement, check_shared, training_facts
from dualkg.training.api import choose_device, finish
from dualkg.training.callbacks import Callback, Callbacks, find_callbacks, saved_trackers
from dualkg.training.checkpoint import (
    CheckpointStore,
    Groups,
    Progress,
    load_tensors,
    load_weights,
    save_tensors,
)
from dualkg.training.errors import InterruptedRunError
from dualkg.training.launcher import num_processes
from dualkg.training.recipe import Recipe, checksum, load_recipe
from dualkg.training.run import TrainedRun
from dualkg.training.run_folder import RunFolder
from dualkg.training.trainer import OnProgress, Trainer, check_recipe

T = TypeVar("T")
OnStart = Callable[[str], None]
MEETING_TIME = timedelta(minutes=10)  # in which all processes have to start, or a collective to end
SILENCE = "DUALKG_SILENCE"
MIN_SILENCE = 5.0  # seconds
WRITING_TIME = timedelta(hours=1)  # in which the slowest disk has to have a checkpoint
MAX_REASON = 300  # characters of a reason that a library gives
ENGINE = "the engine"  # which the kind of a GPU may decide


@contextmanager
def processes(device: str | torch.device | None = None) -> Iterator[Processes]:
    """Join the process group that the environment describes; a single process has none."""
    count = num_processes()
    if count == 1:
        yield Processes(0, 1, choose_device(device))
        return
    pace = pace_of_environment()
    group, store = _join_group(int(os.environ["RANK"]), count, device)
    liveness: Liveness | None = None
    has_failed = True
    try:
        liveness = Liveness(store, group.index, group.count, pace=pace)
        liveness.start()
        yield replace(group, liveness=liveness)
        has_failed = False
    except (InterruptedRunError, DivergedError) as error:
        # All processes raise it at once, and the first reports it.
        has_failed = False
        error.silent = not group.first
        raise
    except GeneratorExit:
        has_failed = False  # Nobody asks for more.
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise DualkgError(
            f"Process {group.index} of {group.count} has lost the others: {_reason(error)} If one "
            "of them was killed, resume the run from its last checkpoint with: torchrun … -m "
            "dualkg resume RUN"
        ) from None
    finally:
        if liveness is not None:
            liveness.stop(failed=has_failed)
        dist.destroy_process_group()


def _join_group(
    index: int, count: int, device: str | torch.device | None
) -> tuple[Processes, Store]:
    """This process in the group of all, which have met at the store."""
    # A collective of NCCL that fails ends the process, also where this was not set.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    chosen = choose_device(device)
    backend = "gloo"
    shares_gpu = False
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    num_sharing = num_here
    if chosen.type == "cuda":
        num_gpus = torch.cuda.device_count()
        num_sharing = math.ceil(num_here / num_gpus)
        # NCCL does not support two processes on one GPU.
        shares_gpu = num_here > num_gpus
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % num_gpus)
        torch.cuda.set_device(chosen)
        backend = f"cpu:gloo,cuda:{'gloo' if shares_gpu else 'nccl'}"
    try:
        meeting = dist.rendezvous("env://", timeout=MEETING_TIME)  # type: ignore[attr-defined]
        store, index, count = next(meeting)
        dist.init_process_group(
            backend, store=store, rank=index, world_size=count, timeout=MEETING_TIME
        )
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        minutes = MEETING_TIME.total_seconds() / 60
        raise DualkgError(
            f"Process {index} of {count} did not meet the others at {address} "
            f"(it waits up to {minutes:.0f} minutes): {_reason(error)}"
        ) from None
    group = Processes(
        index,
        count,
        chosen,
        capturable=not shares_gpu,
        num_sharing=num_sharing,
    )
    return group, store


def pace_of_environment() -> Pace:
    """How long a silent process is waited for: a minute, or `DUALKG_SILENCE` seconds."""
    text = os.environ.get(SILENCE)
    if not text:
        return Pace()
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not MIN_SILENCE <= seconds < math.inf:
        expected = f"a number of seconds, at least {MIN_SILENCE:g}"
        raise InvalidValue(SILENCE, expected=expected, found=text)
    return Pace(beat=min(Pace().beat, seconds / 10), silence=seconds)


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0][:MAX_REASON]


def group_lock(group: Processes, path: Path) -> AbstractContextManager[Any]:
    """The lock of a run folder, which process 0 holds for all."""
    return locked(path if group.first else None)


def group_shard(group: Processes, graph: Graph) -> Shard:
    """The rows of the entity tables that this process has."""
    return Shard(len(graph.entities), group.index, group.count)


# -- checkpoints --------------------------------------------------------------


def start(function: Callable[[], T], *, in_thread: bool) -> Future[T]:
    """The future result of a function, in a thread or at once.

    The end of the process does not wait for the thread, as it would for those of a pool.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    if in_thread:
        Thread(target=run, name="checkpoint", daemon=True).start()
    else:
        run()
    return future


class _Writing(NamedTuple):
    """A checkpoint that is being written."""

    checkpoint: CheckpointFolder
    folder: Path
    about: dict[str, Any]
    shard: Future[_Shard]  # of this process


class _Shard(NamedTuple):
    """The file that a process has written, if it had something to write."""

    record: dict[str, Any] | None
    seconds: float


class FolderStore(CheckpointStore):
    """Checkpoints that all processes write, each its own rows, while training goes on.

    What is written is copied first. The number of processes may change between a checkpoint and
    the next start: batches, initial weights and negatives do not depend on it.
    """

    def __init__(self, group: Processes, shard: Shard, parameters: Sequence[str]) -> None:
        self.group = group
        self.shard = shard
        self.parameters = list(parameters)
        self._writing: _Writing | None = None

    @cached_property
    def _writers(self) -> dist.ProcessGroup | None:
        """The processes, for collectives of threads that write while others train."""
        if self.group.count == 1:
            return None
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=WRITING_TIME)
        return group

    def module(self, model: Model) -> nn.Module:
        return model.named

    def write(self, groups: Groups, path: Path, about: dict[str, Any]) -> None:
        started = time.monotonic()
        tensors: dict[str, Tensor] = {}
        for group, members in groups.items():
            for name, value in members.items():
                tensors[f"{group}/{name}"] = value.detach().to("cpu", copy=True)
        divided = [key for key, value in tensors.items() if self._is_divided(key, value.shape)]
        checkpoint = CheckpointFolder(path, self.group)
        folder = checkpoint.next_folder()
        write = checkpoint_writer(tensors, folder, self.shard, divided=divided, group=self._writers)
        own = shard_file(folder, self.group.index)

        def write_file() -> _Shard:
            self._write(write, own)
            record = None
            if own.exists():
                sync(own)
                record = file_record(own)
            return _Shard(record, time.monotonic() - started)

        future = start(write_file, in_thread=self.group.count > 1)
        self._writing = _Writing(checkpoint, folder, about, future)

    def _write(self, write: Callable[[], None], file: Path) -> None:
        """Write a file; the error of another process is that process's to report."""
        try:
            write()
        except BaseException as error:
            failures = checkpoint_failures(error)
            if failures is None:
                raise
            failure = failures.get(self.group.index)
            if isinstance(failure, OSError) and failure.filename is None:
                failure.filename = str(file)
            if failure is not None:
                raise failure from None

    @property
    def is_writing(self) -> bool:
        return self._writing is not None

    @property
    def is_written(self) -> bool:
        return self._writing is None or self._writing.shard.done()

    def finish(self) -> float:
        if self._writing is None:
            return 0.0
        checkpoint, folder, about, future = self._writing
        self._writing = None
        shard = self.group.together(future.result)
        records = checkpoint.gather_records(folder, shard.record)
        self.group.on_first(partial(checkpoint.point_to, folder, about, records))
        return shard.seconds

    def read(self, path: Path) -> tuple[Groups, dict[str, Any]]:
        checkpoint = CheckpointFolder(path, self.group)
        about = checkpoint.about()
        if about["when"] == "start":
            return {}, about
        checkpoint.check(about)
        folder = path / str(about["folder"])
        groups: Groups = {}
        tensors = load_checkpoint(folder, self.shard, is_divided=self._is_divided)
        for key, value in tensors.items():
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = value
        return groups, about

    def _is_divided(self, key: str, shape: Sequence[int]) -> bool:
        """Whether a tensor of a checkpoint has a row for every entity."""
        group, _, name = key.partition("/")
        if group == "optimizer":
            # The state of an optimizer is named by the number of its parameter.
            name = self.parameters[int(name.partition(".")[0])]
        return name in TABLE_NAMES and len(shape) > 0


def start_checkpoints(folder: RunFolder, group: Processes) -> None:
    """Before the first step there is nothing but the recipe."""
    about = {
        "optimizer": None,
        "progress": asdict(Progress()),
        "recipe": checksum(read_text(folder.recipe)),
    }
    CheckpointFolder(folder.checkpoint_folder, group).start(about)


# -- runs ---------------------------------------------------------------------


def build_trainer(
    recipe: Recipe, graph: Graph, group: Processes, *, initialize: bool = True, **options: Any
) -> Trainer:
    """A trainer of the rows of this process; without `initialize`, of zeros.

    A path network has no rows: its processes share the queries of a batch.
    """
    shard = group_shard(group, graph)
    tables = DeviceTables(
        shard, device=group.device, initialize=initialize, capturable=group.capturable
    )
    built = recipe.model.build(graph.shape, seed=recipe.training.seed, tables=tables)
    model = in_processes(built, group).to(group.device)
    names = [name for name, _ in model.named.named_parameters()]
    store = FolderStore(group, shard, names)
    shown = options if group.first else {}
    regularizer = recipe.regularizer.build()
    return Trainer(model, graph, recipe, regularizer, group=group, store=store, **shown)


def expectation(trainer: Trainer) -> str:
    """What each process does of a training, as a sentence."""
    tables = trainer.model.tables
    num_rows = -(-tables.num_entities // tables.shard.num_processes)
    part = f"has {num_rows:,} of {tables.num_entities:,} entities"
    if trainer.model.reads_graph:
        batch_size = trainer.num_own_examples(len(trainer.examples))
        part = f"takes {batch_size:,} queries of a batch"
    return f"Each process {part}."


def train_in_processes(
    recipe: Recipe,
    graph: Graph,
    group: Processes,
    *,
    out: Path,
    overwrite: bool = False,
    resume_unfinished: bool = False,
    on_progress: OnProgress | None = None,
    callbacks: Sequence[Callback] = (),
    on_start: OnStart | None = None,
) -> TrainedRun:
    """Train a recipe in the processes of a group, each of which calls this.

    After a restart of any of them by a launcher, or with `resume_unfinished`, a run that was
    interrupted is resumed. `on_start` gets a sentence in process 0 before the first step: the part
    of the training that each process has.
    """
    check_agreement(group, training_facts(recipe, graph, group.device))
    folder = RunFolder(out)
    was_restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    with group_lock(group, out):
        check_shared(group, out)
        is_unfinished = folder.checkpoint_folder.exists() and not folder.report.exists()
        # A machine that comes back is new to its launcher, and the others were restarted.
        may_resume = group.any(was_restarted or resume_unfinished)
        if group.any(is_unfinished) and may_resume:
            return _resume(
                folder,
                group,
                on_start,
                callbacks=callbacks or None,
                trust_code=False,
                on_progress=on_progress,
            )
        group.on_first(lambda: folder.check_free(overwrite=overwrite))
        called = find_callbacks(callbacks)
        options: dict[str, Any] = {"on_progress": on_progress, "callbacks": called}
        trainer = group.together(partial(build_trainer, recipe, graph, group, **options))
        check_agreement(group, {ENGINE: trainer.describe_engine()})

        def create() -> None:
            engine = trainer.describe_engine()
            with folder.create(
                recipe, graph, group.device, engine=engine, overwrite=overwrite
            ) as fresh:
                start_checkpoints(fresh, group)

        group.on_first(create)
        return _finish(trainer, folder, on_start)


def resume_in_processes(
    path: Path,
    *,
    device: str | torch.device | None = None,
    on_progress: OnProgress | None = None,
    callbacks: Callbacks = None,
    trust_code: bool = False,
    on_start: OnStart | None = None,
) -> TrainedRun:
    """Resume a run of several processes in any number of processes, one included.

    Without `callbacks`, those of process 0 are the trackers that the run was started with.
    """
    folder = RunFolder(path)
    with processes(device) as group, group_lock(group, folder.path):
        group.on_first(folder.check_is_run)
        check_shared(group, folder.path)
        return _resume(
            folder,
            group,
            on_start,
            callbacks=callbacks,
            trust_code=trust_code,
            on_progress=on_progress,
        )


def _resume(
    folder: RunFolder,
    group: Processes,
    on_start: OnStart | None,
    *,
    callbacks: Callbacks,
    trust_code: bool,
    on_progress: OnProgress | None,
) -> TrainedRun:
    group.on_first(lambda: _check_resumable(folder, group))
    recipe = load_recipe(folder.recipe, trust_code=trust_code)
    graph = group.together(folder.load_graph)
    check_agreement(group, training_facts(recipe, graph, group.device))
    if callbacks is None:
        callbacks = saved_trackers(folder.path)
    called = find_callbacks(callbacks) if group.first else []
    about = CheckpointFolder(folder.checkpoint_folder, group).about()
    check_recipe(folder.recipe, about, checkpoint=folder.checkpoint_folder)
    build = partial(
        build_trainer,
        recipe,
        graph,
        group,
        # A checkpoint after the start has the weights.
        initialize=about["when"] == "start",
        on_progress=on_progress,
        callbacks=called,
    )
    trainer = group.together(build)
    check_agreement(group, {ENGINE: trainer.describe_engine()})
    trainer.restore(folder.checkpoint_folder, recipe=folder.recipe)
    return _finish(trainer, folder, on_start)


def load_in_processes(
    path: str | Path, group: Processes, *, trust_code: bool = False
) -> TrainedRun:
    """A finished run of which each process has its rows, so that none holds the whole model.

    All processes have to do the same with it.
    """
    folder = RunFolder(path)
    group.on_first(partial(_check_divisible, folder))
    recipe = load_recipe(folder.recipe, trust_code=trust_code)
    graph = group.together(folder.load_graph)
    identity = folder.identity()
    check_agreement(group, {"the run": identity, "the device": group.device.type})
    shard = group_shard(group, graph)
    tables = DeviceTables(shard, device=group.device, initialize=False, capturable=group.capturable)
    built = recipe.model.build(graph.shape, seed=recipe.training.seed, tables=tables)
    built.read_graph(graph)
    if built.reads_graph:
        folder.load_weights(built, graph)
    else:
        files = folder.weight_files() if not folder.weights.exists() else [folder.weights]
        weights = group.together(partial(read_own_rows, files, shard))
        load_weights(built, weights, source=folder.path)
    model = in_processes(built, group).to(group.device).eval()
    return TrainedRun(model, graph, recipe, folder=folder.path, identity=identity)


def _check_divisible(folder: RunFolder) -> None:
    """Refuse what several processes cannot open, and damaged files."""
    folder.check_is_run()
    if folder.ensemble.exists() or folder.sparsity.exists():
        what = "is an ensemble" if folder.ensemble.exists() else "was sparsified"
        raise RequestError(
            f"The run {folder.path} {what}, and several processes open runs of one model with "
            "dense tables. Open it in one process, without torchrun."
        )
    folder.check_finished()
    folder.check_files()


def _check_resumable(folder: RunFolder, group: Processes) -> None:
    if folder.finished:
        folder.remove_checkpoint()
        if folder.damage():
            raise RequestError(
                f"The run {folder.path} is finished, and some of its files are damaged. Evaluate "
                f"it again without torchrun: dualkg resume {folder.path}"
            )
        raise RequestError(
            f"The run {folder.path} is finished. To train longer, start a new run with more epochs."
        )
    if folder.checkpoint.exists() and load_tensors(folder.checkpoint)[1].get("when") == "start":
        # The run was only prepared, by one process.
        start_checkpoints(folder, group)
        remove(folder.checkpoint)
    if not folder.checkpoint_folder.exists():
        raise RequestError(
            f"The run {folder.path} was started in one process. Resume it without torchrun: "
            f"dualkg resume {folder.path}"
        )


def _finish(trainer: Trainer, folder: RunFolder, on_start: OnStart | None) -> TrainedRun:
    """Say what the run needs, train to the end, rank, and write the results."""
    sentence = expectation(trainer)
    if on_start is not None and trainer.group.first:
        on_start(sentence)
    run = finish(
        trainer, folder, folder.checkpoint_folder, save=partial(_save_results, trainer, folder)
    )
    if run.model.reads_graph:
        run.model.share_with(None)  # what is predicted from now on is not shared
    return run


def _save_results(trainer: Trainer, folder: RunFolder, run: TrainedRun) -> None:
    """All processes write their rows, and the first also all that is not divided."""
    group = trainer.group
    if trainer.model.tables.has_all_entities:
        group.on_first(partial(folder.finish, run))
        return
    weights = trainer.model.whole.state_dict()
    own = {name: table for name, table in weights.items() if is_divided(name) or group.first}
    path = folder.weights_of_process(group.index, group.count)
    save_tensors({"model": own}, path, about=trainer.about("end"))
    group.on_first(partial(folder.finish_in_parts, run, group.count))
