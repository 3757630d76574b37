"""Two machines on one: network namespaces with addresses, host names and folders of their own."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

import dualkg as kg
from dualkg.files import read_json
from dualkg.training.run import RunFolder
from tests.processes import Started, group_environment, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SILENCE = 5
RECIPE = """
[data]
graph = "world"
[model]
dim = 8
[training]
epochs = {epochs}
batch_size = 400
checkpoint_seconds = 0  # with a limit, a busy machine would save seldom
"""


class Node(NamedTuple):
    """A machine; `own` is where its own folder is seen by its processes, as by those of others."""

    name: str
    address: str
    folder: Path
    own: Path

    def start(self, *command: object, output: Path) -> subprocess.Popen[str]:
        """Start a command in the namespaces of this machine."""
        prepare = f'hostname {self.name} && mount --bind {self.folder} {self.own} && exec "$@"'
        words = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", prepare, "sh"]
        sources = str(Path(kg.__file__).parents[1])
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([sources, os.environ.get("PYTHONPATH", "")]),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": "cable",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "DUALKG_SILENCE": str(SILENCE),
            "DUALKG_CACHE": str(self.own / "cache"),
        }
        with output.open("w") as file:
            return subprocess.Popen(
                [*words, *map(str, command)],
                cwd=self.folder.parent,
                env=environment,
                text=True,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def torchrun(
        self, *words: object, nodes: "tuple[Node, Node]", output: Path, restarts: int = 0
    ) -> subprocess.Popen[str]:
        is_host = "true" if self is nodes[0] else "false"
        return self.start(
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", 2),
            *("--nproc-per-node", 1, "--max-restarts", restarts, "--local-addr", self.address),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{nodes[0].address}:29500"),
            *("--rdzv-id", "test", "--rdzv-conf", f"is_host={is_host},read_timeout=20"),
            *("-m", "dualkg", *words),
            output=output,
        )


def cable(node: Node, state: str) -> None:
    """Plug the cable of a machine in or out."""
    _run("ip", "netns", "exec", node.name, "ip", "link", "set", "cable", state)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, root and iproute2")
    own = tmp_path / "own"
    own.mkdir()
    suffix = str(os.getpid())[-5:]
    found = []
    for number, letter in enumerate("ab"):
        folder = tmp_path / f"disk-{letter}"
        folder.mkdir()
        found.append(Node(f"node-{letter}-{suffix}", f"10.77.0.{number + 1}", folder, own))
    first, second = found
    try:
        for node in found:
            _run("ip", "netns", "add", node.name)
        _run(
            *f"ip link add cable netns {first.name} type veth peer cable".split(),
            "netns",
            second.name,
        )
        for node in found:
            within = ("ip", "-n", node.name)
            _run(*within, "addr", "add", f"{node.address}/24", "dev", "cable")
            _run(*within, "link", "set", "cable", "up")
            _run(*within, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        _remove(found)
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    yield first, second
    _remove(found)


def kill_all(node: Node) -> None:
    """As by a power failure of a machine."""
    pids = subprocess.run(
        ["ip", "netns", "pids", node.name], capture_output=True, text=True, check=False
    ).stdout.split()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _remove(nodes: list[Node]) -> None:
    for node in nodes:
        kill_all(node)
        subprocess.run(["ip", "netns", "del", node.name], capture_output=True, check=False)


def write_recipe(tmp_path: Path, epochs: int) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(epochs=epochs))
    return path


def number_of_checkpoints(run: Path) -> int:
    pointer = RunFolder(run).checkpoint_folder / "latest.json"
    if not pointer.exists():
        return 0
    return int(read_json(pointer, dict, checksum=True).get("folder", 0))


def test_two_machines_train_one_model(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    """And refuse a folder of the run that they do not share."""
    recipe = write_recipe(tmp_path, epochs=2)
    outputs = [tmp_path / f"output-{node.name}" for node in nodes]

    def train(out: Path) -> list[int]:
        started = [
            node.torchrun("train", recipe, "--out", out, nodes=nodes, output=output)
            for node, output in zip(nodes, outputs, strict=True)
        ]
        return [process.wait() for process in started]

    statuses = train(nodes[0].own / "run")
    text = "\n".join(output.read_text() for output in outputs)
    assert all(statuses), text
    assert nodes[1].name in text
    assert "is not the same for all processes" in text, text

    statuses = train(tmp_path / "run")
    text = "\n".join(output.read_text() for output in outputs)
    assert statuses == [0, 0], text
    assert text.count("world test") == 1
    assert len(kg.load_run(tmp_path / "run").history) == 2


def test_a_cut_cable_ends_both_and_the_run_is_resumed(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, epochs=2000)
    run = tmp_path / "run"
    outputs = [tmp_path / f"output-{node.name}" for node in nodes]
    started = [
        node.torchrun("train", recipe, "--out", run, "--resume", nodes=nodes, output=output)
        for node, output in zip(nodes, outputs, strict=True)
    ]
    until(lambda: number_of_checkpoints(run) >= 2 or any(p.poll() for p in started))
    cable(nodes[1], "down")
    assert started[0].wait() != 0
    # The launcher of the other machine looks for the first one for minutes; its process has ended.
    sentence = f"has shown no sign of life for {SILENCE} s"
    until(lambda: sentence in outputs[1].read_text())
    kill_all(nodes[1])
    started[1].wait()
    text = outputs[0].read_text()
    assert sentence in text or "has lost the others" in text, text

    cable(nodes[1], "up")
    before = number_of_checkpoints(run)
    started = [
        node.torchrun("train", recipe, "--out", run, "--resume", nodes=nodes, output=output)
        for node, output in zip(nodes, outputs, strict=True)
    ]
    until(lambda: number_of_checkpoints(run) > before or any(p.poll() for p in started))
    assert number_of_checkpoints(run) > before, [output.read_text() for output in outputs]
    for process in started:
        process.terminate()
    for process in started:
        process.wait()


def test_a_machine_that_comes_back_trains_on(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    """The other one has waited for it."""
    recipe = write_recipe(tmp_path, epochs=2000)
    run = tmp_path / "run"
    outputs = [tmp_path / f"output-{node.name}" for node in nodes]

    def start(number: int) -> subprocess.Popen[str]:
        return nodes[number].torchrun(
            "train", recipe, "--out", run, nodes=nodes, output=outputs[number], restarts=5
        )

    started = [start(0), start(1)]
    until(lambda: number_of_checkpoints(run) >= 2 or any(p.poll() for p in started))
    os.killpg(started[1].pid, signal.SIGKILL)
    kill_all(nodes[1])
    started[1].wait()
    before = number_of_checkpoints(run)
    started[1] = start(1)
    until(lambda: number_of_checkpoints(run) > before or any(p.poll() for p in started))
    texts = [output.read_text() for output in outputs]
    assert number_of_checkpoints(run) > before, texts
    for process in started:
        process.terminate()
    for process in started:
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_peer_that_stops_in_the_middle_of_a_step_ends_the_others(
    tmp_path: Path, number: signal.Signals
) -> None:
    recipe = write_recipe(tmp_path, epochs=100_000)
    run = tmp_path / "run"
    environment = group_environment(2) | {"DUALKG_SILENCE": str(SILENCE)}
    code = "from dualkg.cli import main; main()"
    words = ("train", recipe, "--out", run)
    with (
        Started(code, *words, environment=environment | {"RANK": "0"}) as first,
        Started(code, *words, environment=environment | {"RANK": "1"}) as second,
    ):
        until(lambda: number_of_checkpoints(run) >= 1 or not first.running)
        second.signal(number)
        ended = first.finish()
    assert ended.code == 1, ended.err
    if number == signal.SIGSTOP:
        assert "Process 1 on" in ended.err
        assert f"has shown no sign of life for {SILENCE} s" in ended.err
    else:
        assert "has lost the others" in ended.err or "no sign of life" in ended.err
    assert "Traceback" not in ended.err
