"""How something is reproduced, and where what comes of it is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualkg.data.graph import Graph
from dualkg.data.loading import load_graph
from dualkg.files import write_text
from dualkg.training.api import OnProgress, choose_device
from dualkg.training.run import Run, environment, load_run
from paper.plan import Row, graph_named
from paper.sheets import Sheet
from paper.start import trained_run

if TYPE_CHECKING:
    from dualkg.analysis.figures import Drawing


PUBLISHED_GRAPHS = ("WN18RR", "FB15k-237")


@dataclass(frozen=True)
class Setting:
    """On which graph, with how many seeds and rows, on what device; folders of results and runs; and context to tell."""

    dataset: str | None
    seeds: int
    records: Path
    runs: Path
    rows: tuple[str, ...] = ()  # all, where none is named
    device: str | None = None
    beside_others: bool = False  # whether other work shares the device
    tell: Callable[[str], None] = lambda text: None
    on_progress: OnProgress | None = None

    @property
    def graphs(self) -> tuple[str, ...]:
        return (graph_named(self.dataset),) if self.dataset else PUBLISHED_GRAPHS

    def graph(self, usual: str) -> Graph:
        """The graph of a figure: the one asked for, or the paper's."""
        return load_graph(graph_named(self.dataset or usual))

    def trained(self, row: Row, graph: Graph, seed: int) -> Run:
        """A run of a row with its weights, on the device; trained first where it is missing."""
        self.tell(f"{row.name} on {graph.name}, seed {seed}.")
        path = trained_run(
            row, graph.name, graph, seed=seed, runs=self.runs, device=self.device, on_progress=self.on_progress
        )
        run = load_run(path)
        run.model.to(choose_device(self.device))
        return run

    def keep(
        self, name: str, sheet: Sheet, facts: Any, drawing: Drawing | None = None, *, graph: Graph | None = None
    ) -> Sheet:
        """Write what was found as `figures/NAME.json`, its page as `.md`, and its picture as `.png` and `.svg`.

        What is of one graph has that graph in its name, and beside it the environment that it was found in.
        """
        name = f"{name}-{graph.name.lower()}" if graph else name
        made = environment(choose_device(self.device), fingerprint=graph.fingerprint) if graph else {}
        path = self.records / "figures" / name
        parts = [sheet.as_markdown()]
        if drawing is not None:
            drawing.save(path)
            parts += [f"![{sheet.title}](figures/{name}.png)", drawing.caption]
        write_text(
            path.with_suffix(".json"),
            json.dumps({"environment": made, "found": facts}, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        )
        write_text(path.with_suffix(".md"), "\n\n".join(parts) + "\n")
        return sheet
