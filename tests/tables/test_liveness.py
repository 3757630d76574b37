"""Processes wait for those that live, however long these work, and end if another one is dead."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dualkg.errors import DualkgError, RequestError
from dualkg.tables.liveness import Liveness, OtherProcessFailed, Pace
from dualkg.tables.processes import Processes
from tests.processes import FORKS, Started, group_environment, until

QUICK = Pace(beat=0.02, silence=0.5, farewell=0.2)
CPU = torch.device("cpu")


class Refusal(RequestError):
    """In the place of any refusal."""


# -- meetings ----------------------------------------------------------------


def in_threads(
    functions: Sequence[Callable[[Liveness], Any]], hosts: Sequence[str] | None = None
) -> list[Any]:
    """What each of some processes, which are threads here, returns or raises."""
    store = dist.HashStore()
    count = len(functions)
    found: list[Any] = [None] * count

    def member(index: int) -> None:
        host = hosts[index] if hosts else None
        try:
            found[index] = functions[index](Liveness(store, index, count, host=host))
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=member, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize(
    "fails", [[False], [True], [False, False], [False, True, False], [True, False, True]]
)
def test_all_fail_if_one_fails_and_one_of_those_that_fail_reports(fails: list[bool]) -> None:
    def member(liveness: Liveness) -> int:
        def work() -> int:
            if fails[liveness.index]:
                raise Refusal
            return liveness.index

        assert liveness.call(lambda: "before") == "before"
        return liveness.call(work)

    found = in_threads([member] * len(fails))
    if not any(fails):
        assert found == list(range(len(fails)))
        return
    for error, failed in zip(found, fails, strict=True):
        assert type(error) in ((Refusal, OtherProcessFailed) if failed else (OtherProcessFailed,))
    assert sum(not error.silent for error in found) == 1


@pytest.mark.parametrize("hosts", ["a", "ab", "aabb", "abcab"])
def test_one_process_per_machine_has_its_turn_before_the_others(hosts: str) -> None:
    order: list[int] = []

    def member(liveness: Liveness) -> None:
        group = Processes(liveness.index, liveness.count, CPU, liveness=liveness)
        group.in_turn(lambda: order.append(liveness.index))

    assert in_threads([member] * len(hosts), hosts) == [None] * len(hosts)
    assert sorted(order) == list(range(len(hosts)))
    assert order[0] == 0
    for index, host in enumerate(hosts):
        assert order.index(hosts.index(host)) <= order.index(index)


def test_one_process_waits_for_nobody() -> None:
    group = Processes(0, 1, CPU)
    assert group.in_turn(lambda: 1) == group.together(lambda: 1) == group.on_first(lambda: 1) == 1


def wait_longer_than_a_collective(index: int, count: int, meeting: str) -> None:
    store = dist.FileStore(meeting, count)
    limit = timedelta(seconds=1)
    dist.init_process_group("gloo", store=store, rank=index, world_size=count, timeout=limit)
    group = Processes(index, count, CPU, liveness=Liveness(store, index, count))
    group.in_turn(lambda: time.sleep(3 * limit.total_seconds() if index == 0 else 0))
    dist.destroy_process_group()


def test_a_process_that_reads_is_waited_for_longer_than_a_collective(tmp_path: Path) -> None:
    members = [
        FORKS.Process(
            target=wait_longer_than_a_collective, args=(index, 2, str(tmp_path / "meeting"))
        )
        for index in range(2)
    ]
    for member in members:
        member.start()
    for member in members:
        member.join()
    assert [member.exitcode for member in members] == [0, 0]


# -- signs of life -----------------------------------------------------------


class Ended:
    """What ends a process, in its place."""

    def __init__(self) -> None:
        self.errors: list[DualkgError] = []
        self.happened = threading.Event()

    def __call__(self, error: DualkgError) -> None:
        self.errors.append(error)
        self.happened.set()


@contextmanager
def beating(count: int) -> Iterator[tuple[list[Liveness], list[Ended]]]:
    """Some processes, which are threads here."""
    store = dist.HashStore()
    ends = [Ended() for _ in range(count)]
    members = [
        Liveness(store, index, count, pace=QUICK, host=f"host-{index}", end=ends[index])
        for index in range(count)
    ]
    for member in members:
        member.start()
    until(lambda: all(member._known_hosts for member in members))
    try:
        yield members, ends
    finally:
        for member in members:
            member.stop()


def test_a_silent_process_ends_the_one_that_watches_it() -> None:
    with beating(3) as (members, ends):
        members[2]._is_over.set()  # no more signs, and no word
        until(ends[1].happened.is_set)
        assert "Process 2 on host-2 has shown no sign of life for 0.5 s" in str(ends[1].errors[0])
        assert not ends[0].errors


def test_a_failure_ends_all_others_soon() -> None:
    with beating(3) as (members, ends):
        members[1].stop(failed=True)
        for end in (ends[0], ends[2]):
            until(end.happened.is_set)
            assert str(end.errors[0]) == "Process 1 on host-1 has failed; see its message."
        assert not ends[1].errors


def test_a_process_that_has_left_is_not_waited_for() -> None:
    with beating(3) as (members, ends):
        members[2].stop()
        before = int(members[0]._store.add("signs/1", 0))
        # Twice the silence, counted in signs of life.
        enough = before + 2 * int(QUICK.silence / QUICK.beat)
        until(lambda: members[0]._store.add("signs/1", 0) > enough)
        assert not any(end.errors for end in ends)


class SilentStore(dist.HashStore):  # type: ignore[misc]
    """The store of a process that has died: nobody can connect to it."""

    def clone(self) -> dist.Store:
        raise RuntimeError("no connection")


def test_a_store_that_was_never_reached_is_that_of_process_0() -> None:
    end = Ended()
    Liveness(SilentStore(), 1, 2, pace=QUICK, end=end).start()
    until(end.happened.is_set)
    assert "Process 0 on an unknown host has shown no sign of life" in str(end.errors[0])


def test_time_in_which_a_process_is_stopped_does_not_count() -> None:
    """The machine of all processes was suspended for an hour: nobody is silent."""
    with beating(1) as (members, ends):
        clock = time.monotonic
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: clock() + 3600)
            signs = int(members[0]._store.add("signs/0", 0))
            until(lambda: members[0]._store.add("signs/0", 0) > signs + 3, seconds=7200)
        assert not ends[0].errors


CODE = """
import sys, time
from dualkg.errors import DualkgError
from dualkg.training.distributed import processes

def read():
    if group.first:
        print("reading", flush=True)
        time.sleep(1000)

try:
    with processes("cpu") as group:
        print("joined", flush=True)
        group.in_turn(read)
except DualkgError as error:
    sys.exit(str(error))
"""


def test_others_end_when_process_0_is_killed_while_it_reads() -> None:
    """The store ends with process 0 where no launcher has it, as torchrun has."""
    environment = group_environment(2)
    members = [Started(CODE, environment=environment | {"RANK": str(index)}) for index in range(2)]
    with members[0] as first, members[1] as second:
        assert second.stdout.readline() == "joined\n"
        assert first.stdout.readline() == "joined\n"
        assert first.stdout.readline() == "reading\n"
        first.kill()
        finished = second.finish()
    assert finished.code == 1
    assert "Process 1 of 2 has lost the others" in finished.err


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
