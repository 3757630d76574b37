"""Training: that it learns, stops, keeps the best, diverges loudly, and resumes to the very same
weights.
"""

import os
import signal

import pytest
import torch

import dualkg as kg
from dualkg.data import graph as data_graph
from dualkg.training import trainer
from dualkg.training.errors import InterruptedRunError
from dualkg.training.optimizers import Optimizer
from dualkg.training.recipe import Recipe, Training, Validation
from dualkg.training.run_folder import RunFolder
from dualkg.training.shutdown import GracefulShutdown
from dualkg.training.trainer import (
    STEPS_OF_WARM_UP,
    ProgressEvent,
    Trainer,
    WarmUp,
    flush_denormals,
)
from tests.families import BILINEAR


def weights(run: kg.Run) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("optimizer", ["Adagrad", "Adam", "SGD"])
def test_the_loss_decreases(small_graph, optimizer):
    rate = {"Adagrad": 0.1, "Adam": 0.01, "SGD": 5.0}[optimizer]
    model = kg.ComplEx(small_graph.shape, dim=8, init_scale=0.1)
    chosen = {
        "optimizer": Optimizer(name=optimizer, learning_rate=rate),
        "regularizer": kg.NoRegularizer(),
    }
    run = kg.train(model, small_graph, epochs=15, batch_size=32, **chosen)
    assert run.history[-1]["loss"] < 0.95 * run.history[0]["loss"]


@pytest.mark.parametrize(
    "regularizer",
    [
        kg.DURA(0.1),
        kg.UnweightedDURA(0.1),
        kg.Frobenius(0.1),
        kg.BasicDURA(0.1),
        kg.RegP1(0.1),
        kg.N3(0.1),
    ],
)
def test_regularizers_shrink_the_weights(small_graph, regularizer):
    def norm(chosen):
        model = kg.ComplEx(small_graph.shape, dim=8, init_scale=0.1)
        kg.train(model, small_graph, regularizer=chosen, epochs=5, batch_size=64)
        return sum(parameter.square().sum().item() for parameter in model.parameters())

    assert norm(regularizer) < norm(None)


@pytest.mark.parametrize("name", BILINEAR)
def test_the_dual_can_be_trained(small_graph, name):
    model = kg.Dual(BILINEAR[name](small_graph.shape, dim=8, init_scale=0.1), "tail")
    run = kg.train(model, small_graph, regularizer=kg.DURA(0.01), epochs=5, batch_size=64)
    assert run.history[-1]["loss"] < run.history[0]["loss"]
    assert run.recipe.model.dual == "tail"


def test_every_example_is_seen_once_an_epoch_in_a_new_order(small_graph):
    trainer = Trainer(
        kg.CP(small_graph.shape, dim=2),
        small_graph,
        Recipe(training=Training(batch_size=7)),
        kg.NoRegularizer(),
    )
    epochs = [torch.cat(list(trainer.batches(epoch))) for epoch in (0, 1, 0)]
    assert len(epochs[0]) == 2 * len(small_graph.train)
    assert (
        sorted(epochs[0].tolist())
        == sorted(trainer.examples.tolist())
        == sorted(epochs[1].tolist())
    )
    assert not torch.equal(epochs[0], epochs[1])
    assert torch.equal(epochs[0], epochs[2])


def test_an_epoch_may_have_fewer_batches_in_each_epoch_others(small_graph):
    data = {"graph": "small"}
    recipe = Recipe(data=data, training=Training(batch_size=7, batches_per_epoch=3, epochs=2))
    model = kg.ComplEx(small_graph.shape, dim=4)
    few = Trainer(model, small_graph, recipe, kg.NoRegularizer())
    whole = Trainer(
        model,
        small_graph,
        recipe.with_changes({"training.batches_per_epoch": None}),
        kg.NoRegularizer(),
    )
    assert few.num_steps == 3
    epochs = [list(few.batches(epoch)) for epoch in range(2)]
    for epoch, batches in enumerate(epochs):
        of_whole = list(whole.batches(epoch))[:3]
        assert all(torch.equal(*pair) for pair in zip(batches, of_whole, strict=True))
    assert not torch.equal(epochs[0][0], epochs[1][0])
    few.run()
    assert [entry["epoch"] for entry in few.progress.history] == [1, 2]
    # More batches than there are change nothing.
    many = recipe.with_changes({"training.batches_per_epoch": 10**6})
    assert Trainer(model, small_graph, many, kg.NoRegularizer()).num_steps == whole.num_steps


def test_runs_are_reproducible_by_seed(small_graph):
    one, same, other = (
        kg.train(kg.CP(small_graph.shape, dim=4), small_graph, epochs=2, batch_size=16, seed=seed)
        for seed in (0, 0, 1)
    )
    assert_same(weights(one), weights(same))
    assert not torch.equal(one.model.entities, other.model.entities)


def test_early_stopping_keeps_the_best_weights(small_graph):
    """A random graph can only be learnt by heart, so validation gets worse and training stops
    early.
    """
    model = kg.ComplEx(small_graph.shape, dim=32)
    run = kg.train(
        model,
        small_graph,
        epochs=200,
        batch_size=32,
        validation=Validation(every=1, patience=3, keep="best"),
    )
    seen = [entry["valid_mrr"] for entry in run.history]
    assert len(seen) < 200
    assert max(seen) == max(seen[:-3])
    assert run.reports["valid"].mrr == max(seen)


def test_validation_of_a_sample_is_exact_after_training(small_graph, tmp_path):
    validation = Validation(every=1, queries=10, keep="best")
    events = []
    run = kg.train(
        kg.CP(small_graph.shape, dim=4),
        small_graph,
        epochs=3,
        validation=validation,
        out=tmp_path / "run",
        on_progress=events.append,
    )
    seen = [entry["valid_mrr"] for entry in run.history]
    assert [entry["valid_queries"] for entry in run.history] == [10, 10, 10]
    assert "(sample)" in events[-1].text
    sample = kg.evaluate(run.model, small_graph, split="valid", queries=10)
    assert sample.mrr == max(seen)
    assert run.reports["valid"].metrics.num_queries == 40
    assert run.reports["valid"].sample == ""
    # The sample does not depend on the seed of training.
    other = kg.train(
        kg.CP(small_graph.shape, dim=4),
        small_graph,
        epochs=1,
        seed=5,
        validation=Validation(queries=10, final="sample"),
        out=tmp_path / "other",
    )
    triples = other.reports["valid"].ranks.triples
    assert triples.tolist() == sample.ranks.triples.tolist()
    for report in (other.report, kg.load_run(tmp_path / "other").report):
        assert report.sample == "a sample of 5 of 20 triples"


def test_the_final_weights_are_the_mean_of_the_last_epochs(small_graph):
    """From the second half of six epochs: the ends of the fourth, fifth and sixth."""
    recipe = Recipe(
        training=Training(batch_size=16, epochs=6), optimizer=Optimizer(average_from=0.5)
    )
    trainer = Trainer(kg.CP(small_graph.shape, dim=4), small_graph, recipe, kg.NoRegularizer())
    seen = []
    end = trainer._end_epoch

    def end_and_look() -> None:
        end()
        seen.append({name: value.clone() for name, value in trainer.model.state_dict().items()})

    trainer._end_epoch = end_and_look
    trainer.run()
    assert trainer.progress.averaged == 3
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, torch.stack([one[name] for one in seen[3:]]).mean(0))
        assert not torch.equal(value, seen[-1][name])


def test_the_mean_is_validated(small_graph):
    run = kg.train(
        kg.CP(small_graph.shape, dim=4),
        small_graph,
        epochs=6,
        batch_size=16,
        optimizer=Optimizer(average_from=0.5),
        validation=Validation(every=1),
    )
    assert run.history[-1]["valid_mrr"] == run.reports["valid"].mrr


def stop_after(steps: int):
    """A callback that presses Ctrl-C at a certain step."""
    seen = 0

    def on_progress(event: ProgressEvent) -> None:
        nonlocal seen
        seen += 1
        if seen == steps:
            os.kill(os.getpid(), signal.SIGINT)

    return on_progress


def test_a_second_term_is_the_same_request_and_ctrl_c_interrupts():
    """Slurm tells all processes of a job to end, and torchrun tells its own again."""
    shutdown = GracefulShutdown()
    with shutdown.listening():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert shutdown.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("optimizer", "final", "steps"),
    [
        *(("Adagrad", "best", steps) for steps in (1, 16, 47)),
        *(("Adagrad", "mean", steps) for steps in (7, 30)),
        ("Adam", "best", 30),
        *(pytest.param("Adagrad", "best", steps, marks=pytest.mark.slow) for steps in (7, 30)),
        *(pytest.param("Adagrad", "mean", steps, marks=pytest.mark.slow) for steps in (1, 16, 47)),
        *(pytest.param("Adam", "best", steps, marks=pytest.mark.slow) for steps in (1, 7, 16, 47)),
    ],
)
def test_an_interrupted_run_resumes_to_the_same_weights(
    small_graph, tmp_path, steps, optimizer, final
):
    choices = {
        "epochs": 3,
        "batch_size": 32,
        "optimizer": Optimizer(
            name=optimizer, schedule="linear", average_from=0.3 if final == "mean" else 1.0
        ),
        "regularizer": kg.DURA(0.05),
        "validation": Validation(every=1, keep="best" if final == "best" else "last"),
    }
    whole = kg.train(kg.ComplEx(small_graph.shape, dim=8), small_graph, **choices)
    folder = tmp_path / "run"
    with pytest.raises(InterruptedRunError, match="of 3, all work saved. Resume with: dualkg"):
        kg.train(
            kg.ComplEx(small_graph.shape, dim=8),
            small_graph,
            out=folder,
            on_progress=stop_after(steps),
            **choices,
        )
    assert RunFolder(folder).checkpoint.exists()
    resumed = kg.resume(folder)
    assert_same(weights(whole), weights(resumed))
    assert [entry["loss"] for entry in whole.history] == pytest.approx(
        [entry["loss"] for entry in resumed.history]
    )
    assert not RunFolder(folder).checkpoint.exists()
    assert_same(weights(whole), weights(kg.load_run(folder)))


def test_divergence_is_reported_with_advice_and_leaves_the_last_checkpoint(small_graph, tmp_path):
    folder = tmp_path / "run"
    recipe = Recipe(
        training=Training(epochs=50, batch_size=32, checkpoint_seconds=0),
        optimizer=Optimizer(name="SGD", learning_rate=1e6),
    ).with_changes({"model.dim": 8})
    with pytest.raises(kg.DivergedError, match="`optimizer.learning_rate = 100000`"):
        kg.train_recipe(recipe, graph=small_graph, out=folder)
    checkpoint = RunFolder(folder).checkpoint
    if checkpoint.exists():
        from dualkg.training.checkpoint import load_tensors

        groups, _ = load_tensors(checkpoint)
        assert all(torch.isfinite(value).all() for value in groups["model"].values())


class Timer:
    """A clock that a step of one second moves on."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def step(self, batch: torch.Tensor, learning_rate: float) -> torch.Tensor:
        self.seconds += 1
        return batch.sum()


def test_only_the_first_steps_are_warm_up(monkeypatch):
    timer = Timer()
    warm_up = WarmUp(torch.device("cpu"))
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: timer.seconds)
    started = warm_up.clock()
    for _ in range(STEPS_OF_WARM_UP["cpu"] + 3):
        warm_up.take(timer.step, torch.zeros(4), 0.1)
    assert warm_up.seconds == STEPS_OF_WARM_UP["cpu"]
    assert warm_up.clock() - started == 3
    for _ in range(3):  # a last, short batch: its first may compile something
        warm_up.take(timer.step, torch.zeros(3), 0.1)
    warm_up.take(timer.step, torch.zeros(4), 0.1)
    assert warm_up.seconds == STEPS_OF_WARM_UP["cpu"] + 1
    assert warm_up.clock() - started == 6


def test_warm_up_passes_batch_and_learning_rate_to_the_step():
    warm_up = WarmUp(torch.device("cpu"))
    seen = []
    step = lambda batch, rate: seen.append((len(batch), rate)) or batch.sum()  # noqa: E731
    assert [float(warm_up.take(step, torch.ones(2), 0.5)) for _ in range(8)] == [2.0] * 8
    assert seen == [(2, 0.5)] * 8


def test_costs_are_saved_with_the_run(tmp_path):
    recipe = kg.Recipe().with_changes({"training.epochs": 2, "model.dim": 4})
    made = kg.train_recipe(recipe, out=tmp_path / "run")
    costs = kg.load_run(tmp_path / "run").costs
    assert costs == made.costs
    assert costs is not None
    assert set(costs) == {"warm_up_seconds", "training_seconds", "ranking_seconds", "peak_mib"}
    assert all(value > 0 for value in costs.values())
    assert costs["training_seconds"] == pytest.approx(
        sum(entry["seconds"] for entry in made.history), abs=1e-3
    )


def test_a_run_without_saved_costs_can_be_loaded(tmp_path):
    kg.train_recipe(
        kg.Recipe().with_changes({"training.epochs": 1, "model.dim": 2}), out=tmp_path / "run"
    )
    RunFolder(tmp_path / "run").costs.unlink()
    assert kg.load_run(tmp_path / "run").costs is None


def halved() -> float:
    """Half of the smallest number that is not tiny."""
    return float(torch.tensor([2.0**-126]) * 0.5)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot")
def test_denormals_are_flushed_only_in_the_context():
    assert halved() > 0
    with flush_denormals():
        assert halved() == 0
        with flush_denormals():
            assert halved() == 0
        assert halved() == 0
    assert halved() > 0


@pytest.fixture
def large_graph(small_graph, monkeypatch):
    """The small graph, treated as a large one."""
    monkeypatch.setattr(data_graph, "LARGE_TRIPLES", 0)
    assert small_graph.is_large
    return small_graph.with_fingerprint()


@pytest.mark.parametrize("reciprocal", [True, False])
def test_a_large_graph_is_trained_saved_and_loaded(large_graph, tmp_path, reciprocal):
    model = kg.ComplEx(large_graph.shape, dim=8, init_scale=0.1, reciprocal=reciprocal)
    run = kg.train(
        model,
        large_graph,
        epochs=10,
        batch_size=32,
        validation=Validation(every=5),
        out=tmp_path / "run",
    )
    assert run.history[-1]["loss"] < 0.97 * run.history[0]["loss"]
    loaded = kg.load_run(tmp_path / "run")
    assert loaded.graph.fingerprint == large_graph.fingerprint
    assert_same(weights(loaded), weights(run))
    assert (
        len(loaded.predictor().tails(loaded.graph.entities[0], loaded.graph.relations[0], k=3)) == 3
    )


def test_examples_of_a_large_graph_are_not_copied(large_graph):
    of_triples = {"training": {"batch_size": 16}, "model": {"name": "ComplEx", "dim": 4}}
    made = Trainer.of_recipe(
        Recipe.model_validate(of_triples), large_graph, device=torch.device("cpu")
    )
    assert isinstance(made.examples, trainer.ComputedExamples)
    rows = torch.cat(list(made.batches(0))).tolist()
    assert sorted(rows) == sorted(trainer.with_reciprocals(large_graph.train, 4).tolist())


@pytest.mark.parametrize(
    "loss", [kg.KvsAll(), kg.NegativeSampling(num_negatives=3, subsampling=True)]
)
def test_examples_of_a_large_graph_are_the_same(small_graph, loss, monkeypatch):
    """In one batch, because the order of its examples is another one."""
    recipe = Recipe.model_validate(
        {"training": {"batch_size": 10_000}, "model": {"name": "ComplEx", "dim": 4}}
    )
    recipe = recipe.model_copy(update={"loss": loss})
    plain = Trainer.of_recipe(recipe, small_graph, device=torch.device("cpu"))
    monkeypatch.setattr(data_graph, "LARGE_TRIPLES", 0)
    large = Trainer.of_recipe(recipe, small_graph, device=torch.device("cpu"))
    assert isinstance(large.examples, trainer.ComputedExamples)
    (one,), (other,) = plain.batches(0), large.batches(0)
    width = 2 if isinstance(loss, kg.KvsAll) else 3
    assert sorted(one[:, :width].tolist()) == sorted(other[:, :width].tolist())
    losses = float(plain.step(one, 0.1)), float(large.step(other, 0.1))
    if isinstance(loss, kg.KvsAll):  # negatives depend on the order
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        for table, same in zip(plain.model.parameters(), large.model.parameters(), strict=True):
            assert torch.allclose(table, same, atol=1e-5)
