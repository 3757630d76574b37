"""A path network in several processes, which share the queries of a batch."""

from itertools import islice
from pathlib import Path

import pytest
import torch

import dualkg as kg
from dualkg.tables.processes import Processes
from dualkg.training.api import default_recipe
from dualkg.training.distributed import build_trainer, expectation, train_in_processes
from dualkg.training.recipe import Data, Recipe
from dualkg.training.trainer import Trainer
from tests.training.test_distributed import graph_of, in_processes

GRAPH = graph_of(9)
CPU = torch.device("cpu")


def recipe_of() -> Recipe:
    changes = {
        "model.name": "PathNetwork",
        "model.dim": 16,
        "model.options.steps": 3,
        "model.options.edge_dropout": 0.3,
        # Adam would amplify the rounding of gradients that are 0, such as that of `score_bias`.
        "optimizer.name": "SGD",
        "optimizer.learning_rate": 0.1,
        "training.batch_size": 13,
        "training.epochs": 2,
        "training.engine": "reference",
    }
    return default_recipe(Data(graph="random"), GRAPH, changes)


def states(trainer: Trainer, num_steps: int) -> list[dict[str, torch.Tensor]]:
    """Loss, gradients and parameters after each of some steps."""
    found = []
    for batch in islice(trainer.batches(0), num_steps):
        loss = trainer.step(batch, 0.01)
        state = {"loss": loss}
        for name, table in trainer.model.named_parameters():
            state[f"gradient of {name}"] = table.grad.clone()
            state[name] = table.detach().clone()
        found.append(state)
    # A batch of one triple leaves all processes but one without a query.
    trainer.step(batch[:1], 0.01)
    found.append({name: table.detach() for name, table in trainer.model.named_parameters()})
    return found


def compare_states(group: Processes, recipe: Recipe, path: Path) -> None:
    trainer = build_trainer(recipe, GRAPH, group)
    trainer.model.double()
    found = states(trainer, 3)
    for own, expected in zip(found, torch.load(path), strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(own[name], value, rtol=1e-9, atol=1e-12, msg=name)
    scores = trainer.model.score_tails(torch.arange(3), torch.arange(3))
    assert scores.shape == (3, len(GRAPH.entities))
    assert "queries of a batch" in expectation(trainer)
    trainer.save(path.parent / "checkpoint")


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_processes_take_the_steps_of_one(count: int, tmp_path: Path) -> None:
    recipe = recipe_of()
    whole = Trainer.of_recipe(recipe, GRAPH, device=CPU)
    whole.model.double()
    torch.save(states(whole, 3), tmp_path / "expected.pt")
    in_processes(count, compare_states, recipe, tmp_path / "expected.pt", folder=tmp_path)
    resumed = build_trainer(recipe, GRAPH, Processes(0, 1, CPU))
    resumed.model.double()
    resumed.restore(tmp_path / "checkpoint")
    for name, table in whole.model.named_parameters():
        restored = resumed.model.get_parameter(name)
        torch.testing.assert_close(restored, table, rtol=1e-9, atol=1e-12, msg=name)
    resumed.step(next(resumed.batches(0)), 0.01)


def train_run(group: Processes, recipe: Recipe, out: Path) -> None:
    run = train_in_processes(recipe, GRAPH, group, out=out)
    if group.first:
        # Nothing waits for other processes any more.
        run.predictor().tails("e0", "r0", k=2)


def test_a_run_of_two_processes_is_one_file_of_weights(tmp_path: Path) -> None:
    recipe = recipe_of()
    alone = kg.train_recipe(recipe, graph=GRAPH, out=tmp_path / "alone", device="cpu")
    in_processes(2, train_run, recipe, tmp_path / "run", folder=tmp_path)
    run = kg.load_run(tmp_path / "run")
    assert (tmp_path / "run" / "weights.safetensors").exists()
    assert not (tmp_path / "run" / "checkpoint").exists()
    assert "2 processes" in (tmp_path / "run" / "environment.json").read_text()
    for name, table in alone.model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], table, rtol=1e-4, atol=1e-5)
    assert run.history[-1]["loss"] == pytest.approx(alone.history[-1]["loss"], rel=1e-4)
    assert run.report.mrr == pytest.approx(alone.report.mrr, abs=0.01)
