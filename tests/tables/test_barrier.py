"""Processes wait for those that live, however long these work, and not for those that are dead."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dualkg.errors import DualkgError, RequestError
from dualkg.tables.barrier import Barrier, OtherProcessFailed, Pace, ProcessSilent
from dualkg.tables.processes import Processes
from tests.processes import FORKS, Started, group_environment
from tests.raising import check_error, refused

QUICK = Pace(beat=0.05, silence=1.0, arrival=1.0, farewell=5.0)


class Refusal(RequestError):
    """In the place of any refusal."""


def in_threads(
    functions: Sequence[Callable[[Barrier], Any]], hosts: Sequence[str] | None = None
) -> list[Any]:
    """What each of some barriers returns or raises; they meet in one store."""
    store = dist.HashStore()
    count = len(functions)
    found: list[Any] = [None] * count

    def member(index: int) -> None:
        host = hosts[index] if hosts else None
        barrier = Barrier(store, index, count, pace=Pace(beat=0.05), host=host)
        try:
            found[index] = functions[index](barrier)
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=member, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@given(st.lists(st.booleans(), min_size=1, max_size=4), st.integers(0, 2))
@settings(max_examples=25, deadline=None)
def test_all_fail_if_one_fails_and_one_of_those_that_fail_reports(
    fails: list[bool], num_before: int
) -> None:
    def member(barrier: Barrier) -> int:
        def work() -> int:
            if fails[barrier.index]:
                raise Refusal
            return barrier.index

        for _ in range(num_before):
            assert barrier.call(lambda: "before") == "before"
        return barrier.call(work)

    found = in_threads([member] * len(fails))
    if not any(fails):
        assert found == list(range(len(fails)))
        return
    for error, failed in zip(found, fails, strict=True):
        assert type(error) in ((Refusal, OtherProcessFailed) if failed else (OtherProcessFailed,))
    assert sum(not error.silent for error in found) == 1


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=5))
@settings(max_examples=25, deadline=None)
def test_one_process_per_machine_has_its_turn_before_the_others(hosts: list[str]) -> None:
    order: list[int] = []

    def member(barrier: Barrier) -> None:
        barrier.call(lambda: order.append(barrier.index), after=barrier.turn_after)

    assert in_threads([member] * len(hosts), hosts) == [None] * len(hosts)
    assert sorted(order) == list(range(len(hosts)))
    assert order[0] == 0
    for index, host in enumerate(hosts):
        assert order.index(hosts.index(host)) <= order.index(index)


def test_one_process_needs_no_barrier() -> None:
    group = Processes(0, 1, torch.device("cpu"))
    assert group.in_turn(lambda: 1) == group.together(lambda: 1) == group.on_first(lambda: 1) == 1


# -- processes ---------------------------------------------------------------


def start(
    count: int, function: Callable[..., None], folder: Path, *arguments: Any
) -> list[int | None]:
    """Call a function in some processes, and return how they ended."""
    meeting = str(folder / "meeting")
    members = [
        FORKS.Process(target=function, args=(index, count, meeting, *arguments))
        for index in range(count)
    ]
    for member in members:
        member.start()
    for member in members:
        member.join()
    return [member.exitcode for member in members]


def wait_longer_than_a_collective(index: int, count: int, meeting: str) -> None:
    store = dist.FileStore(meeting, count)
    limit = timedelta(seconds=1)
    dist.init_process_group("gloo", store=store, rank=index, world_size=count, timeout=limit)
    barrier = Barrier(store, index, count, pace=Pace(beat=0.1))
    group = Processes(index, count, torch.device("cpu"), barrier=barrier)

    def read() -> float:
        started = time.monotonic()
        time.sleep(4 * limit.total_seconds() if index == 0 else 0)
        return started

    started = group.in_turn(read)
    assert time.monotonic() - started >= 0
    dist.destroy_process_group()


def test_a_process_that_reads_is_waited_for_longer_than_a_collective(tmp_path: Path) -> None:
    assert start(2, wait_longer_than_a_collective, tmp_path) == [0, 0]


def read_and_die(index: int, count: int, meeting: str) -> None:
    barrier = Barrier(dist.FileStore(meeting, count), index, count, pace=QUICK)

    def read() -> None:
        if index == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        barrier.call(read, after=barrier.turn_after)
    except DualkgError as error:
        is_silent = isinstance(error, OtherProcessFailed)
        if not is_silent:
            check_error(error, ProcessSilent, index=0, host=socket.gethostname(), seconds=1.0)
        os._exit(3)


def test_a_process_that_died_is_not_waited_for(tmp_path: Path) -> None:
    assert start(3, read_and_die, tmp_path) == [-signal.SIGKILL, 3, 3]


def test_a_process_that_does_not_arrive_is_named() -> None:
    store = dist.HashStore()
    Barrier(store, 1, 2, host="b")
    barrier = Barrier(store, 0, 2, pace=QUICK._replace(farewell=0.0))
    with refused(ProcessSilent, index=1, host="b", seconds=1.0) as silent:
        barrier.call(lambda: None)
    assert str(silent.value) == (
        "Process 1 on b has shown no sign of life for 1 s: it was killed, or its machine cannot be "
        "reached. Start all processes again."
    )


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
