"""Shards of a checkpoint as files."""

import torch

from dualkg.tables.files import checkpoint_failures, start_checkpoint
from dualkg.tables.shard import Shard


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
