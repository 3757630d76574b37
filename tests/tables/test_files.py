"""Shards of a checkpoint as files."""

import torch

from dualkg.errors import FolderMoved
from dualkg.files import locked
from dualkg.tables.files import checkpoint_failures, shard_file, start_checkpoint
from dualkg.tables.shard import Shard
from tests.raising import refused


def test_a_folder_that_cannot_be_written_is_a_failure_of_the_process_alone(tmp_path):
    """PyTorch raises what is no Exception, which would end a command with a traceback."""
    (tmp_path / "file").touch()
    tensors = {"entities": torch.zeros(4, 2)}
    written = start_checkpoint(
        tensors, tmp_path / "file" / "000001", Shard(4), divided=["entities"], group=None
    )
    failures = checkpoint_failures(written.exception())
    assert list(failures) == [0]
    assert isinstance(failures[0], OSError)


def test_a_checkpoint_below_a_folder_that_was_moved_is_not_begun_again(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    shard = Shard(1)
    with refused(FolderMoved, path=run), locked(run):
        folder = run / "checkpoint" / "000001"
        tensors = {"model/relations": torch.ones(2)}
        start_checkpoint(tensors, folder, shard, divided=[], group=None).result()
        assert [file.name for file in folder.iterdir()] == [shard_file(folder, 0).name]
        run.rename(tmp_path / "moved")
        folder = folder.with_name("000002")
        written = start_checkpoint(tensors, folder, shard, divided=[], group=None)
        failures = checkpoint_failures(written.exception())
        assert isinstance(failures[0], FolderMoved)
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]
