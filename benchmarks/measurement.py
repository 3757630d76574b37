"""What every benchmark shares: the machine, fresh processes, peak memory and saved results.

`python benchmarks/measurement.py` measures the ceilings that the others are held against: matrix
products and copies.
"""

import argparse
import datetime
import gc
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PEERS = HERE.parent / ".venv-bench" / "bin" / "python"
BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")  # what x86 and Arm processors call it


# -- the command line --------------------------------------------------------


def parser(about: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    options = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, default=RESULTS, help="the folder of the JSON results")
    options.add_argument(
        "--only", action="append", metavar="JOB", help="jobs whose name contains this; repeatable"
    )
    options.add_argument(
        "--quick",
        action="store_true",
        help="only a few steps, as a test; results go to another folder",
    )
    options.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if available")
    options.add_argument("--commit", help="the measured commit, if git cannot find it")
    options.add_argument(
        "--peers",
        type=Path,
        default=PEERS,
        help="the Python that has PyKEEN; by default .venv-bench's",
    )
    options.add_argument("--list", action="store_true", help="only print the names of the jobs")
    options.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    return options


def folder_of(choices: argparse.Namespace) -> Path:
    """The folder of the results; quick ones have another folder by default."""
    if choices.quick and choices.out == RESULTS:
        return Path(tempfile.gettempdir()) / "dualkg-quick"
    return Path(choices.out)


def wanted(names: list[str], only: list[str] | None) -> list[str]:
    """The names that contain one of the given texts; all if none is given."""
    if not only:
        return names
    chosen = [name for name in names if any(part.lower() in name.lower() for part in only)]
    if not chosen:
        sys.exit(f"No job has a name with {', '.join(only)}. There are: {'; '.join(names)}.")
    return chosen


def pick_device(device: str | None) -> str:
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- the machine -------------------------------------------------------------


def describe(device: str, *, commit: str | None = None) -> dict[str, Any]:
    """What a number depends on: device, versions, date and commit."""
    import torch

    cpu = cpu_model()
    cores = num_cores()
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    load_of_last_minute, _, _ = os.getloadavg()
    return {
        "cpu": cpu,
        "cores": cores,
        "bf16": [flag for flag in BF16_FLAGS if flag in cpu_flags()],
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": version("triton"),
        "numba": version("numba"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "load": round(load_of_last_minute, 1),  # other load makes times longer
        "commit": commit or git_commit(),
        "device": gpu or f"{cores} cores of {cpu}",
    }


def num_cores() -> int | None:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def has_bf16(device: str) -> bool:
    """Whether the processor multiplies in bfloat16; otherwise it is much slower than float32."""
    return device == "cuda" or not cpu_flags().isdisjoint(BF16_FLAGS)


def cpu_flags() -> set[str]:
    """The features of the processor; empty if the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    flags: set[str] = set()
    for line in lines:
        if line.startswith(("flags", "Features")):
            flags.update(line.partition(":")[2].split())
    return flags


def cpu_model() -> str:
    """The name of the processor; some systems only have a number."""
    try:
        listed = subprocess.run(["lscpu"], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        listed = ""
    for line in listed.splitlines():
        key, _, value = line.partition(":")
        if key == "Model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def git_commit(folder: Path = HERE) -> str | None:
    """The commit of a tree, by default this one, marked where files differ from it."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        result = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


# -- memory and time ---------------------------------------------------------


def peak_mib(device: str = "cpu") -> float:
    """The most memory that was held: by this process on a CPU, by PyTorch's tensors on a GPU."""
    if device == "cuda":
        import torch

        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    peak = resident_mib("VmHWM")
    if peak is None:
        # Linux counts in KiB, macOS in bytes.
        units_per_mib = 2**20 if sys.platform == "darwin" else 2**10
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units_per_mib
    return round(peak, 1)


def resident_mib(field: str = "VmRSS") -> float | None:
    """A field of Linux's account of this process, in MiB.

    Its peak, unlike that of `getrusage`, is never that of the parent process.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 2**10
    return None


def forget_peak(device: str) -> None:
    """Begin to count a GPU's peak again; a CPU's is that of the process."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def wait_for(device: str) -> None:
    """Wait for a GPU to finish, so that times are complete."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], device: str, *, least: float = 0.5) -> float:
    """Seconds that a call takes, the best of several rounds, after one that is not counted."""
    work()
    wait_for(device)
    times: list[float] = []
    while len(times) < 3 or (sum(times) < least and len(times) < 50):
        started = time.perf_counter()
        work()
        wait_for(device)
        times.append(time.perf_counter() - started)
    return min(times)


def in_fresh_process(
    script: Path, task: dict[str, Any], *, python: str | Path = sys.executable
) -> dict[str, Any]:
    """Run a task in a fresh process, which has its own peak memory.

    A failure is returned as a result.
    """
    words = [str(python), str(script), "--task", json.dumps(task)]
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    try:
        result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        log(process.stderr)
        lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
        return {"failed": lines[-1][:300] if lines else f"ended with {process.returncode}"}
    return result


# -- results -----------------------------------------------------------------


def load(topic: str, folder: Path = RESULTS) -> dict[str, Any]:
    """All results of a topic: by device, then by job."""
    path = folder / f"{topic}.json"
    if not path.exists():
        return {}
    return dict(json.loads(path.read_text(encoding="utf-8")))


def save(topic: str, job: str, record: dict[str, Any], *, on: dict[str, Any], folder: Path) -> None:
    """Save a result next to those of other jobs and machines."""
    results = load(topic, folder)
    results.setdefault(on["device"], {})[job] = {**record, "on": on}
    _write(topic, results, folder)


def merge(topics: list[str], source: Path, folder: Path = RESULTS) -> None:
    """Take over results that were measured elsewhere."""
    for topic in topics:
        results = load(topic, folder)
        for device, jobs in load(topic, source).items():
            results.setdefault(device, {}).update(jobs)
        if results:
            _write(topic, results, folder)


def _write(topic: str, results: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, sort_keys=True)
    (folder / f"{topic}.json").write_text(f"{text}\n", encoding="utf-8")


def run(
    topic: str,
    choices: argparse.Namespace,
    *,
    jobs: dict[str, list[Any]],
    tasks: dict[str, Callable[..., dict[str, Any]]],
    measure: Callable[[Any, str], Iterable[dict[str, Any]]],
) -> None:
    """Run a benchmark: one task of a fresh process, or all jobs of a device, saving each record."""
    if choices.task:
        arguments = dict(choices.task)
        task = tasks[arguments.pop("what")]
        print(json.dumps(task(**arguments)))
        return
    device = pick_device(choices.device)
    jobs_by_name = {job.name: job for job in jobs[device]}
    chosen = wanted(list(jobs_by_name), choices.only)
    if choices.list:
        print(*chosen, sep="\n")
        return
    on = describe(device, commit=choices.commit)
    for name in chosen:
        for record in measure(jobs_by_name[name], device):
            save(topic, name, record, on=on, folder=folder_of(choices))


# -- ceilings ----------------------------------------------------------------


def measure_ceilings(device: str, *, quick: bool) -> dict[str, float]:
    """Operations a second of large matrix products, and bytes a second of a large copy.

    The bytes of a copy are those read and those written.
    """
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    size = 8192 if device == "cuda" else 2048
    length = 2**30 if device == "cuda" else 2**27
    if quick:
        size //= 4
        length //= 8
    dtypes = {"float32": torch.float32}
    if has_bf16(device):
        dtypes["bf16"] = torch.bfloat16

    ceilings = {}
    for name, dtype in dtypes.items():
        left = torch.randn(size, size, device=device).to(dtype)
        right = torch.randn(size, size, device=device).to(dtype)
        multiply = partial(torch.mm, left, right, out=torch.empty_like(left))
        ceilings[f"{name}_operations_per_second"] = 2 * size**3 / seconds_of(multiply, device)
    source = torch.ones(length, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), device)
    ceilings["copied_bytes_per_second"] = 2 * source.numel() * source.element_size() / seconds
    return ceilings


def main() -> None:
    choices = parser(__doc__).parse_args()
    if choices.task:
        print(json.dumps(measure_ceilings(**choices.task)))
        return
    device = pick_device(choices.device)
    on = describe(device, commit=choices.commit)
    ceilings = in_fresh_process(Path(__file__), {"device": device, "quick": choices.quick})
    log(f"{on['device']}: {json.dumps(ceilings)}")
    save("ceilings", "all", ceilings, on=on, folder=folder_of(choices))


if __name__ == "__main__":
    main()
