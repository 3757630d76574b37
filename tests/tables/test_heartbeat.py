"""A process that is silent, or has failed, ends the others; one that has left does not."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from dualkg.errors import DualkgError
from dualkg.tables.barrier import Pace, ProcessSilent
from dualkg.tables.heartbeat import Heartbeat, ProcessFailed
from tests.processes import LIMIT, Started, group_environment, until
from tests.raising import check_error

QUICK = Pace(beat=0.02, silence=0.5, farewell=0.2)


class Ended:
    """What ends a process, in its place."""

    def __init__(self) -> None:
        self.errors: list[DualkgError] = []
        self.happened = threading.Event()

    def __call__(self, error: DualkgError) -> None:
        self.errors.append(error)
        self.happened.set()


@contextmanager
def beating(count: int) -> Iterator[tuple[list[Heartbeat], list[Ended]]]:
    """Heartbeats of some processes, which are threads here."""
    store = dist.HashStore()
    ends = [Ended() for _ in range(count)]
    hearts = [
        Heartbeat(store, index, count, pace=QUICK, host=f"host-{index}", end=ends[index])
        for index in range(count)
    ]
    for heart in hearts:
        heart.start()
    until(lambda: all(heart._store.check([f"host/{heart.index}"]) for heart in hearts))
    try:
        yield hearts, ends
    finally:
        for heart in hearts:
            heart.stop()


def stop_as_by_a_signal(heart: Heartbeat) -> None:
    """No more signs, and no word."""
    heart._is_over.set()
    for thread in heart._threads:
        thread.join()


def test_a_silent_process_ends_the_one_that_watches_it() -> None:
    with beating(3) as (hearts, ends):
        until(lambda: all(len(heart._hosts) == len({0, heart.watched}) for heart in hearts))
        stop_as_by_a_signal(hearts[2])
        until(ends[1].happened.is_set)
        check_error(ends[1].errors[0], ProcessSilent, index=2, host="host-2", seconds=0.5)
        assert not ends[0].errors


def test_a_failure_ends_all_others_soon() -> None:
    with beating(3) as (hearts, ends):
        hearts[1].stop(failed=True)
        for end in (ends[0], ends[2]):
            until(end.happened.is_set)
            check_error(end.errors[0], ProcessFailed, index=1, host="host-1")
        assert not ends[1].errors


def test_a_process_that_has_left_is_not_waited_for() -> None:
    with beating(3) as (hearts, ends):
        hearts[2].stop()
        before = int(hearts[0]._store.add("signs/1", 0))
        # Twice the silence, counted in signs of life.
        enough = before + 2 * int(QUICK.silence / QUICK.beat)
        until(lambda: hearts[0]._store.add("signs/1", 0) > enough)
        assert not any(end.errors for end in ends)


def test_process_0_leaves_last_as_the_store_ends_with_it() -> None:
    with beating(2) as (hearts, _):
        leaving = threading.Thread(target=hearts[0].stop)
        hearts[0].pace = Pace(beat=QUICK.beat, silence=QUICK.silence, farewell=60.0)
        leaving.start()
        until(lambda: hearts[1]._store.check(["left/0"]))
        assert leaving.is_alive()
        hearts[1].stop()
        leaving.join(timeout=60)
        assert not leaving.is_alive()


def test_a_store_that_does_not_answer_is_that_of_process_0() -> None:
    with beating(2) as (hearts, ends):
        until(lambda: 0 in hearts[1]._hosts)

        def unreachable(*arguments: object) -> None:
            raise RuntimeError("no connection")

        hearts[1]._store = type("Gone", (), {"add": unreachable, "set": unreachable})()
        until(ends[1].happened.is_set)
        check_error(ends[1].errors[0], ProcessSilent, index=0, host="host-0")


class SilentStore(dist.Store):  # type: ignore[misc]
    """The store of a process that has died: whoever wants to connect tries again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.gives_up = threading.Event()

    def clone(self) -> dist.Store:
        self.gives_up.wait(LIMIT)
        raise RuntimeError("no connection")


def test_a_store_that_was_never_reached_is_that_of_process_0() -> None:
    """Also while the connection is tried, and after it has failed."""
    for gives_up in (False, True):
        end = Ended()
        store = SilentStore()
        if gives_up:
            store.gives_up.set()
        heart = Heartbeat(store, 1, 2, pace=QUICK, host="host-1", end=end)
        heart.start()
        until(end.happened.is_set)
        check_error(end.errors[0], ProcessSilent, index=0, host="an unknown host", seconds=0.5)
        store.gives_up.set()


WAITS_FOR_A_DEATH = """
import os
import torch
import torch.distributed as dist
from dualkg.cli import main

join = dist.init_process_group

def join_and_wait(*arguments, **choices):
    join(*arguments, **choices)
    if os.environ["RANK"] == "0":
        # Process 1 may still read from the store of process 0 when this one has joined.
        dist.recv(torch.zeros(1), 1)
        os.kill(os.getpid(), 9)
    dist.send(torch.zeros(1), 0)
    # The connection to process 0 is closed when it has died.
    try:
        dist.recv(torch.zeros(1), 0)
    except RuntimeError:
        pass

dist.init_process_group = join_and_wait
main()
"""


def test_the_death_of_process_0_right_after_the_meeting_is_noticed(tmp_path: Path) -> None:
    """Not after the ten minutes in which a new connection to its store is tried."""
    environment = group_environment(2)
    words = ("train", "world", "--out", tmp_path / "run")
    with (
        Started(WAITS_FOR_A_DEATH, *words, environment=environment | {"RANK": "0"}),
        Started(WAITS_FOR_A_DEATH, *words, environment=environment | {"RANK": "1"}) as second,
    ):
        ended = second.finish()
    assert ended.code == 1, ended.err
    assert "Process 1 of 2 has lost the others" in ended.err
    assert "Traceback" not in ended.err


def test_time_in_which_a_process_is_stopped_does_not_count() -> None:
    """The machine of all processes was suspended for an hour: nobody is silent."""
    with beating(1) as (hearts, _):
        heart = hearts[0]
        # The watch adds no more than two of its pauses at once.
        assert heart._error(0.0) is None
    heart._quiet = QUICK.silence - 0.01
    assert heart._error(0.0) is None
    heart._quiet = QUICK.silence + 0.01
    assert heart._error(0.0) is not None
