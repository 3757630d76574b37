"""Write RESULTS.md and its pictures from saved measurements: `python benchmarks/report.py`.

`--merge DIR` first takes over results that were measured on another machine and written there with
`--out DIR`.
"""

import argparse
import json
from pathlib import Path

import completion
import inductive
import measurement
import search
import serving
import startup
import tables
import tuning
from tables import Results

HERE = Path(__file__).parent
# Topics whose benchmark writes its own section: by the name of the results, the title and the
# benchmark.
OWN_SECTIONS = {
    "search": ("Search", search),
    "completion": ("Graph completion", completion),
    "inductive": ("Inductive entities", inductive),
    "startup": ("Start-up time", startup),
    "serving": ("Serving", serving),
    "tuning": ("Tuning of hyper-parameters", tuning),
}
TOPICS = ["ceilings", "training", "ranking", "scaling", *OWN_SECTIONS]


def load_all(folder: Path = measurement.RESULTS) -> dict[str, Results]:
    """All results by topic, device and job, and published times of other code."""
    found = {topic: measurement.load(topic, folder) for topic in [*TOPICS, "loading"]}
    return found | {"published": json.loads((HERE / "published.json").read_text(encoding="utf-8"))}


def page(found: dict[str, Results]) -> str:
    """RESULTS.md, from nothing but saved results."""
    lines = [
        "# Speed and memory",
        "",
        "Made by `make bench` from the saved [results](results); do not edit.",
        "[How it is measured, and why it scales as it does](../docs/scaling.md). Times exclude "
        "warm-up.",
        "",
    ]
    sections = {"training": "Training", "ranking": "Ranking", "scaling": "Scaling"}
    for topic, title in sections.items():
        for device, jobs in sorted(
            found[topic].items(), key=lambda item: (not tables.is_gpu(item[1]), item[0])
        ):
            training = tables.gpu_training if tables.is_gpu(jobs) else tables.cpu_training
            body = {"training": training, "ranking": tables.ranking, "scaling": tables.growth}[
                topic
            ]
            lines += [f"## {title}: {device}", ""]
            if topic == "training":
                lines += [
                    f"![seconds per epoch]({tables.picture(topic, device, found[topic])}.svg)",
                    "",
                ]
            lines += [
                *body(device, found),
                *tables.measured_on(record for _, record in tables.in_order(jobs)),
            ]
    for topic, (title, benchmark) in OWN_SECTIONS.items():
        for device, jobs in sorted(found[topic].items()):
            lines += [f"## {title}: {device}", "", *benchmark.lines(jobs)]
            lines += tables.measured_on(record for _, record in tables.in_order(jobs))
    if found["ceilings"]:
        lines += ["## The machines", "", *tables.ceilings(found)]
    if found["loading"]:
        lines += ["## Reading ten million triples", "", *tables.reading(found["loading"])]
    return "\n".join(lines)


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
    found = load_all(choices.results)
    choices.out.mkdir(parents=True, exist_ok=True)
    (choices.out / "RESULTS.md").write_text(page(found), encoding="utf-8")
    if not choices.text_only:
        import figures

        figures.draw_all(found, choices.out)


if __name__ == "__main__":
    main()
