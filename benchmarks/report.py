"""Write RESULTS.md and its pictures from saved measurements: `python benchmarks/report.py`.

`--merge DIR` first takes over results that were measured on another machine and written there with
`--out DIR`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import completion
import host_memory
import measurement
import serving
import startup
import tables
from tables import Results

HERE = Path(__file__).parent
# Topics whose benchmark writes its own section: the name of the results, the title, the benchmark.
OWN_SECTIONS = {
    "completion": ("Graph completion", completion),
    "host_memory": ("Entity tables in host memory", host_memory),
    "startup": ("Start-up time", startup),
    "serving": ("Serving", serving),
}
TOPICS = ["ceilings", "training", "ranking", "scaling", *OWN_SECTIONS]


def load_all(folder: Path = measurement.RESULTS) -> dict[str, Results]:
    """All results by topic, device and job, and published times of other code."""
    results = {topic: measurement.load(topic, folder) for topic in [*TOPICS, "loading"]}
    results["published"] = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
    return results


def page(results: dict[str, Results]) -> str:
    """RESULTS.md, from nothing but saved results."""
    lines = [
        "# Speed and memory",
        "",
        "Made by `make bench` from the saved [results](results); do not edit.",
        "[How it is measured, and why it scales as it does](../docs/scaling.md). Times exclude "
        "warm-up.",
        "",
    ]
    for device, jobs in gpus_first(results["training"]):
        picture = tables.picture("training", device, results["training"])
        training = tables.gpu_training if tables.is_gpu(jobs) else tables.cpu_training
        lines += [f"## Training: {device}", "", f"![seconds per epoch]({picture}.svg)", ""]
        lines += [*training(device, results), *tables.measured_on(jobs)]
    for device, jobs in gpus_first(results["ranking"]):
        lines += [f"## Ranking: {device}", ""]
        lines += [*tables.ranking(device, results), *tables.measured_on(jobs)]
    for device, jobs in gpus_first(results["scaling"]):
        lines += [f"## Scaling: {device}", ""]
        lines += [*tables.growth(device, results), *tables.measured_on(jobs)]
    for topic, (title, benchmark) in OWN_SECTIONS.items():
        for device, jobs in sorted(results[topic].items()):
            lines += [f"## {title}: {device}", ""]
            lines += [*benchmark.lines(jobs), *tables.measured_on(jobs)]
    if results["ceilings"]:
        lines += ["## The machines", "", *tables.ceilings(results)]
    if results["loading"]:
        lines += ["## Reading ten million triples", "", *tables.reading(results["loading"])]
    return "\n".join(lines)


def gpus_first(results: Results) -> list[tuple[str, dict[str, Any]]]:
    """Devices and their jobs, GPUs before CPUs, by name."""

    def order(item: tuple[str, dict[str, Any]]) -> tuple[bool, str]:
        device, jobs = item
        return not tables.is_gpu(jobs), device

    return sorted(results.items(), key=order)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, default=measurement.RESULTS, help="the folder of the JSON results"
    )
    parser.add_argument(
        "--merge",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="results to take over",
    )
    parser.add_argument(
        "--out", type=Path, default=HERE, help="the folder of RESULTS.md and its pictures"
    )
    parser.add_argument(
        "--text-only",
        action="store_true",
        help="leave the pictures, which need matplotlib, as they are",
    )
    choices = parser.parse_args()
    for folder in choices.merge:
        measurement.merge(TOPICS, folder, choices.results)
    results = load_all(choices.results)
    choices.out.mkdir(parents=True, exist_ok=True)
    (choices.out / "RESULTS.md").write_text(page(results), encoding="utf-8")
    if not choices.text_only:
        import figures

        figures.draw_all(results, choices.out)


if __name__ == "__main__":
    main()
