"""Responses per second and 99th percentile latency under load, with and without micro-batching.

`wrk` requests the tails of the distinct queries of the graph over 64 connections, in random order.
The same run, trained briefly, is served by the same routes in a fresh process; only micro-batching
differs. In the mode "repeated", 1,000 queries are repeated, whose predictions a server keeps. A
probability needs the scores of all entities in both directions; with micro-batching their sums are
cached. `--run` serves another run.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np

import measurement

MODES = ("micro-batching", "unbatched", "repeated")
REPEATED = 1000  # queries of the mode "repeated"
CONNECTIONS = 64
SECONDS = 30
WARM_UP = 5
STEPS = 20  # training steps; the quality of the predictions does not matter here
SCRIPT = """
local lines, place = {}, 0
for line in io.lines(os.getenv("REQUESTS")) do lines[#lines + 1] = line end
function init(args) math.randomseed(7); place = math.random(#lines) end
function request() place = place % #lines + 1; return wrk.format("GET", lines[place]) end
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    '\\nFOUND {"requests": %d, "microseconds": %d, "refused": %d, "broken": %d, ' ..
    '"p50_ms": %f, "p99_ms": %f, "max_ms": %f}\\n',
    summary.requests, summary.duration, e.status, e.connect + e.read + e.write + e.timeout,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000, latency.max / 1000))
end
"""


@dataclass(frozen=True)
class Job:
    """A run to serve, and the queries to send."""

    graph: str
    dim: int
    k: int
    probabilities: bool

    @property
    def name(self) -> str:
        name = f"{self.graph} ComplEx dim {self.dim}, {self.k} tails"
        return f"{name}, probabilities" if self.probabilities else name


JOBS = [
    Job("WN18RR", 200, 10, probabilities=False),
    Job("WN18RR", 200, 10, probabilities=True),
]
QUICK_JOBS = [
    Job("world", 16, 10, probabilities=False),
    Job("world", 16, 10, probabilities=True),
]


# -- the server, in a process of its own -------------------------------------


def make_run(job: Job, folder: Path) -> None:
    """Train briefly and save the run, with a calibration if probabilities are served."""
    import dualkg as kg
    import epochs
    from dualkg.inference.probability import calibration_for
    from dualkg.training.run import TrainedRun

    graph = kg.load_graph(job.graph)
    kind = epochs.Job(job.graph, "ComplEx", job.dim, 500)
    recipe = epochs.recipe_for(kind, engine="auto", precision="float32", epochs=2)
    trainer, _ = epochs.train_epochs(recipe, epochs.part_of(graph, STEPS * kind.batch // 2), "cpu")
    TrainedRun(trainer.model, graph, recipe).save(folder)
    if job.probabilities:
        calibration_for(kg.load_run(folder))


def serve(run: str, *, mode: str, probabilities: bool) -> None:
    """Serve a run until stdin ends; the address goes to stdout."""
    import threading

    from dualkg.serve.app import application
    from dualkg.serve.served import ServedRuns
    from dualkg.serve.server import address_of, bind, freeze_memory, server_for
    from dualkg.serve.service import Limits

    served = ServedRuns.load([Path(run)], device="cpu")
    if not probabilities:
        served.get(None).predictor.calibration = None
    app = application(served, micro_batching=mode != "unbatched")
    listening = bind("127.0.0.1", 0)
    server = server_for(app, limits=Limits())
    freeze_memory()
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    print(address_of(listening), flush=True)
    sys.stdin.read()
    print(json.dumps({"peak_mib": measurement.peak_mib()}), flush=True)


@contextmanager
def server(run: Path, job: Job, mode: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a server in its own process, and the process."""
    task = {"run": str(run), "mode": mode, "probabilities": job.probabilities}
    words = [sys.executable, __file__, "--task", json.dumps(task)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


# -- the load ----------------------------------------------------------------


def requests(job: Job, run: Path, mode: str) -> list[str]:
    """The URLs that request the tails of the distinct queries, in random order."""
    from dualkg.training.run_folder import RunFolder

    graph = RunFolder(run).load_graph()
    triples = np.concatenate([graph.train, graph.valid, graph.test])
    queries = np.unique(triples[:, :2], axis=0)
    order = np.random.default_rng(0).permutation(len(queries))
    if mode == "repeated":
        order = order[:REPEATED]
    addresses = []
    for head, relation in queries[order].tolist():
        parameters = {
            "head": graph.entities[head],
            "relation": graph.relations[relation],
            "k": job.k,
        }
        addresses.append(f"/api/tails?{urlencode(parameters)}")
    return addresses


def load(address: str, file: Path, script: Path, *, seconds: int) -> dict[str, Any]:
    """Run `wrk` and read its result."""
    words = [
        "wrk",
        "-t1",
        f"-c{CONNECTIONS}",
        f"-d{seconds}s",
        "--timeout",
        "60s",
        "-s",
        str(script),
        address,
    ]
    environment = os.environ | {"REQUESTS": str(file)}
    process = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    report = re.search(r"^FOUND (.+)$", process.stdout, re.M)
    if not report:
        return {"failed": (process.stderr or process.stdout).strip()[:300]}
    result: dict[str, Any] = json.loads(report[1])
    seconds_taken = result.pop("microseconds") / 1e6
    result["responses_per_second"] = result["requests"] / seconds_taken
    return result


def measure(job: Job, run: Path, mode: str, *, seconds: int, folder: Path) -> dict[str, Any]:
    file = folder / "requests.txt"
    script = folder / "load.lua"
    file.write_text("\n".join(requests(job, run, mode)), encoding="utf-8")
    script.write_text(SCRIPT, encoding="utf-8")
    with server(run, job, mode) as (address, process):
        if not address:
            return {"failed": "the server did not start"}
        load(address, file, script, seconds=min(WARM_UP, seconds))
        result = load(address, file, script, seconds=seconds)
        result["batches"] = queries_per_batch(address)
        # The server ends when its stdin ends, and then prints its peak memory.
        output, _ = process.communicate("")
        return {**result, **json.loads(output.splitlines()[-1])}


def queries_per_batch(address: str) -> float | None:
    """Mean number of queries in a batch; None without micro-batching."""
    from urllib.request import urlopen

    with urlopen(f"{address}/metrics") as reply:
        text = reply.read().decode()
    counts = dict(re.findall(r"^dualkg_(batches|queries)_total (\d+)", text, re.M))
    num_batches = int(counts["batches"])
    return int(counts["queries"]) / num_batches if num_batches else None


# -- the page and the command ------------------------------------------------


def lines(jobs: dict[str, Any]) -> list[str]:
    """The section of RESULTS.md."""
    import tables

    rows = []
    for name, record in tables.in_order(jobs):
        unbatched = record["measured"].get("unbatched", {}).get("responses_per_second")
        for mode, result in record["measured"].items():
            if "responses_per_second" not in result:
                rows.append([name, mode, result["failed"], "–", "–", "–", "–", "–"])
                continue
            rate = result["responses_per_second"]
            rows.append(
                [
                    name,
                    mode,
                    tables.short(rate),
                    tables.times(tables.ratio(rate, unbatched)),
                    tables.short(result["p50_ms"]),
                    tables.short(result["p99_ms"]),
                    f"{result['refused'] + result['broken']:,}",
                    tables.short(result["batches"]),
                ]
            )
    titles = [
        "job",
        "mode",
        "responses per second",
        "of unbatched",
        "p50, ms",
        "p99, ms",
        "errors",
        "queries per batch",
    ]
    return [
        *tables.table(titles, rows, words=2),
        f"`wrk`, {CONNECTIONS} connections, {SECONDS} s after {WARM_UP} s of warm-up; server and "
        'load share the machine. Each query is a different one; in the mode "repeated", '
        f"{REPEATED:,} queries come again and again.",
        "",
    ]


def main() -> None:
    options = measurement.parser(__doc__)
    options.add_argument(
        "--run", type=Path, help="serve this run; probabilities need a calibrated one"
    )
    choices = options.parse_args()
    if choices.task:
        serve(**choices.task)
        return
    jobs_by_name = {job.name: job for job in (QUICK_JOBS if choices.quick else JOBS)}
    chosen = measurement.wanted(list(jobs_by_name), choices.only)
    if choices.list:
        print(*chosen, sep="\n")
        return
    if shutil.which("wrk") is None:
        sys.exit("wrk generates the load and is not installed: apt install wrk.")
    on = measurement.describe("cpu", commit=choices.commit)
    on["fastapi"] = measurement.version("fastapi")
    seconds = 2 if choices.quick else SECONDS
    for name in chosen:
        job = jobs_by_name[name]
        measured = {}
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            run = choices.run or folder / "run"
            if not choices.run:
                make_run(job, run)
            for mode in MODES:
                measured[mode] = measure(job, run, mode, seconds=seconds, folder=folder)
                measurement.log(f"{name}, {mode}: {json.dumps(measured[mode])}")
        record = {"job": asdict(job), "measured": measured}
        measurement.save("serving", name, record, on=on, folder=measurement.folder_of(choices))


if __name__ == "__main__":
    main()
