"""When checkpoints are written, and what happens while several processes write one."""

import shutil
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import dualkg as kg
from dualkg.files import read_json
from dualkg.tables.checkpoints import CheckpointFolder
from dualkg.tables.liveness import OtherProcessFailed
from dualkg.tables.processes import Processes
from dualkg.training import distributed
from dualkg.training.checkpoint import CheckpointSchedule
from dualkg.training.distributed import build_trainer
from dualkg.training.recipe import Recipe
from dualkg.training.shutdown import shutdown_warning
from dualkg.training.trainer import Trainer
from tests.training.test_distributed import CHANGES, in_processes


@pytest.mark.parametrize(
    ("least", "cost", "interval"),
    [(60, 0, 60), (60, 3, 60), (60, 4, 80), (60, 45, 900), (0.2, 0.1, 2), (0, 45, 0)],
)
def test_a_checkpoint_is_at_most_a_twentieth_of_the_time(
    least: float, cost: float, interval: float
) -> None:
    schedule = CheckpointSchedule(least, saved_at=1000)
    assert not schedule.is_due(1000 + least - 0.01)
    assert schedule.is_due(1000 + least)
    schedule.saved(2000, cost=cost)
    assert schedule.interval == interval
    assert not schedule.is_due(2000 + interval - 0.01)
    assert schedule.is_due(2000 + interval)


def test_a_checkpoint_that_takes_longer_than_a_shutdown_is_said() -> None:
    of_torchrun = {"TORCHELASTIC_RUN_ID": "1"}
    assert shutdown_warning(29, of_torchrun) == ""
    assert shutdown_warning(45, {}) == ""
    assert shutdown_warning(45, of_torchrun | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}) == ""
    assert shutdown_warning(45, of_torchrun) == (
        "A checkpoint takes 45 s, and torchrun kills processes 30 s after it has told them to end: "
        "a run that is stopped would resume from the checkpoint before. Set "
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=90 for torchrun, and give its job as long."
    )


def trainer_of(group: Processes, path: Path) -> Trainer:
    recipe = Recipe().with_changes({**CHANGES, "training.checkpoint_seconds": 0})
    trainer = build_trainer(recipe, kg.load_graph("world"), group)
    trainer.checkpoint_path = path
    return trainer


def last_folder(path: Path) -> Any:
    return read_json(path / "latest.json", checksum=True)["folder"]


def save_while_training(group: Processes, path: Path) -> None:
    """A checkpoint of two processes is written while both take steps, by a slow disk of one."""
    trainer = trainer_of(group, path)
    batches = list(trainer.batches(0))
    trainer.save(path)
    saved = {name: value.clone() for name, value in trainer.weights.state_dict().items()}
    is_allowed = threading.Event()
    record = distributed.file_record

    def slow_record(file: Path) -> Any:
        if not group.first:
            is_allowed.wait()
        return record(file)

    with patch.object(distributed, "file_record", slow_record):
        trainer.save(path, wait=False)
        for number, batch in enumerate(batches[:3]):
            trainer.step(batch, 0.1)
            trainer.progress.step = number + 1
            # A checkpoint is due at any time, and the one before is not written yet.
            assert not trainer._checkpoint_due()
        assert trainer.store.is_writing
        assert last_folder(path) == "000001"
        is_allowed.set()
        trainer._finish_save()
    assert last_folder(path) == "000002"
    assert not all(
        torch.equal(value, saved[name]) for name, value in trainer.weights.state_dict().items()
    )
    again = trainer_of(group, path)
    again.restore(path)
    assert again.progress.step == 0
    for name, value in again.weights.state_dict().items():
        assert torch.equal(value, saved[name])
    # The end waits for what is being written, and for the last checkpoint.
    trainer.save(path, wait=False)
    trainer.stop.requested = group.first
    assert trainer._checkpoint_due()
    with pytest.raises(kg.DualkgError, match="all work saved"):
        trainer._pause()
    assert last_folder(path) == "000004"
    again.restore(path)
    assert again.progress.step == 3
    fail_in_one_process(group, trainer, path)


def fail_in_one_process(group: Processes, trainer: Trainer, path: Path) -> None:
    """The disk of one process is full: that is its error, and the checkpoint before remains."""
    record = distributed.file_record

    def failing_record(file: Path) -> Any:
        if not group.first:
            raise OSError(28, "No space left on device")
        return record(file)

    with (
        patch.object(distributed, "file_record", failing_record),
        pytest.raises(OtherProcessFailed if group.first else OSError),
    ):
        trainer.save(path)
    assert last_folder(path) == "000004"
    CheckpointFolder(path, group).check(CheckpointFolder(path, group).about())
    # What was started is no obstacle to the next one.
    trainer.save(path)
    assert last_folder(path) == "000006"

    # The folder of a shard cannot be written.
    group.on_first(lambda: (path / "000007").write_text("no folder"))
    with (
        patch.object(CheckpointFolder, "next_folder", lambda self: path / "000007"),
        pytest.raises(OSError, match="000007"),
    ):
        trainer.save(path)
    assert last_folder(path) == "000006"


def test_training_goes_on_while_two_processes_write(tmp_path: Path) -> None:
    in_processes(2, save_while_training, tmp_path / "checkpoint", folder=tmp_path)
    shutil.rmtree(tmp_path / "checkpoint")
