"""Memory that a run needs, predicted before it starts."""

import gc
import itertools
import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.data.graph import GraphShape
from dualkg.evaluation.ranking import BLOCK_ELEMENTS
from dualkg.tables import Processes
from dualkg.training import memory
from dualkg.training.costs import measure_step
from dualkg.training.distributed import build_trainer, time_of_step
from dualkg.training.engines import Engine
from dualkg.training.memory import Need, predict
from dualkg.training.recipe import Recipe
from dualkg.training.trainer import Trainer
from dualkg.training.updates import optimizer_tensors
from tests.conftest import graph_of
from tests.processes import run_python

CPU = torch.device("cpu")


def fused(
    model: kg.Model, recipe: kg.Recipe | None = None, regularizer: kg.Regularizer | None = None
) -> Need:
    engine = Engine("fused", "float32", CPU)
    return predict(
        recipe or kg.Recipe(), model, regularizer or kg.NoRegularizer(), engine, num_examples=5
    )


def sampled(model: kg.Model, num_examples: int = 8, **changes) -> Need:
    chosen = {
        "loss.name": "MarginRanking",
        "loss.num_negatives": 5,
        "model.reciprocal": model.reciprocal,
    }
    if changes.get("loss.sampler") == "in-batch":
        del chosen["loss.num_negatives"]
    recipe = kg.Recipe().with_changes({**chosen, **changes})
    return predict(
        recipe,
        model,
        kg.NoRegularizer(),
        Engine("autograd", "float32", CPU),
        num_examples=num_examples,
    )


def test_the_need_of_a_fused_run_by_hand():
    """Ten entities of 6 numbers, 4 relation ids: gradients and Adagrad's sums of 84 numbers, twice
    the larger table.
    """
    need = fused(kg.ComplEx(kg.GraphShape(10, 2), dim=3))
    assert need.fixed == (2 * 84 + 2 * 60) * 4 + 5 * memory.EXAMPLE_BYTES + BLOCK_ELEMENTS * 6
    assert (need.scores, need.per_example) == (10 * 4, memory.VECTORS * 6 * 4)


def test_keeping_the_best_weights_needs_them_twice():
    model = kg.ComplEx(kg.GraphShape(10, 2), dim=3)
    best = kg.Recipe().with_changes({"validation.every": 1, "validation.keep": "best"})
    assert fused(model, best).fixed - fused(model).fixed == 84 * 4


def test_a_regularizer_that_reads_whole_tables_needs_copies_of_the_largest():
    model = kg.ComplEx(kg.GraphShape(10, 2), dim=3)
    assert fused(model, regularizer=kg.UnweightedDURA(0.1)).fixed - fused(model).fixed == 4 * 60 * 4


def test_a_model_with_matrices_needs_those_of_a_batch():
    """Two relations of 9 numbers that a batch of 2 forms; stored by RESCAL, mixed by TuckER."""
    recipe = kg.Recipe().with_changes({"training.batch_size": 2})
    for kind in (kg.RESCAL, kg.TuckER):
        small, large = (
            fused(kind(kg.GraphShape(10, 2), dim=3), one) for one in (recipe, kg.Recipe())
        )
        assert large.fixed - small.fixed == memory.MATRIX_COPIES * 2 * 9 * 4


def test_the_need_of_a_sampled_loss_by_hand():
    """For each of 5 negatives 14 numbers and 3 copies of 6 coordinates; 16 numbers where a batch
    shares them.
    """
    model = kg.ComplEx(kg.GraphShape(10, 2), dim=3)
    assert sampled(model).scores == 5 * (14 + 3 * 6) * 4
    assert sampled(model, **{"loss.sampler": "shared"}).scores == 5 * 16 * 4
    others = {"loss.sampler": "in-batch", "training.batch_size": 7}
    assert sampled(model, **others).scores == 7 * 16 * 4
    assert sampled(model, num_examples=3, **others).scores == 3 * 16 * 4


@pytest.mark.parametrize(("name", "arrays"), [("TransE", 3), ("HAKE", 8)])
def test_shared_negatives_of_distance_models_share_their_vectors(name, arrays):
    model = getattr(kg, name)(kg.GraphShape(10, 2), dim=3, reciprocal=False)
    for corruption, num in (("uniform", 5), ("both", 10)):
        need = sampled(model, **{"loss.sampler": "shared", "loss.corruption": corruption})
        assert need.scores == num * (10 + 2 * arrays) * 4


@pytest.mark.parametrize("side", ["tail", "head"])
def test_a_dual_has_a_vector_for_each_negative_of_each_triple(side):
    model = kg.Dual(kg.ComplEx(kg.GraphShape(10, 2), dim=3), side)
    assert sampled(model, **{"loss.sampler": "shared"}).scores == 5 * (14 + 8 * 6) * 4


def test_sparse_gradients_need_the_rows_of_a_batch_only():
    """A head and a tail of each example, and five negatives, of 6 numbers; 24 numbers of relations,
    and Adagrad's sums of all.
    """
    model = kg.ComplEx(kg.GraphShape(1000, 2), dim=3)
    rest = 3 * memory.EXAMPLE_BYTES + BLOCK_ELEMENTS * 6
    for sums, numbers in (("elements", 6000), ("rows", 1000)):
        changes = {"loss.name": "SampledSoftmax", "loss.num_negatives": 5, "optimizer.sums": sums}
        recipe = kg.Recipe().with_changes({**changes, "training.batch_size": 3})
        need = predict(
            recipe, model, kg.DURA(0.1), Engine("sparse", "float32", CPU), num_examples=3
        )
        negatives = memory.SPARSE_COPIES * 5 * 6
        assert need.fixed == (numbers + 24 + 24 + 2 * 24 + negatives) * 4 + rest
        assert need.per_example == (memory.VECTORS + memory.SPARSE_COPIES * 2) * 6 * 4


def trained(graph: kg.Graph, batch_size: int) -> Trainer:
    recipe = kg.Recipe().with_changes(
        {"training.batch_size": batch_size, "training.precision": "float32"}
    )
    return Trainer(kg.ComplEx(graph.shape, dim=4), graph, recipe, kg.DURA(0.1))


def test_the_number_of_devices_that_would_hold_a_run():
    """Of 50 entities and 6 relation ids, 50/56 of 1,000 bytes and all scores are split, and 117.1
    bytes are not.
    """
    model = kg.ComplEx(GraphShape(50, 3), dim=4)
    need = memory.Need(fixed=1000.0, per_example=1.0, scores=10.0, at_once=100)
    assert need.of(10) == 1110
    assert memory._devices_that_fit(need, model, 10, 400.0) == 4  # 992.9 / (400 − 117.1) = 3.5
    assert memory._devices_that_fit(need, model, 10, 120.0) is None


def test_a_run_that_does_not_fit_names_the_largest_batch_that_does(monkeypatch):
    graph = graph_of([(i % 50, i % 3, (7 * i) % 50) for i in range(2000)])
    examples = 2 * len(graph.train)
    recipe = kg.Recipe()
    model = kg.ComplEx(graph.shape, dim=4)
    engine = Engine("fused", "float32", CPU)
    need = predict(recipe, model, kg.DURA(0.1), engine, num_examples=examples)
    monkeypatch.setattr(memory, "available_memory", lambda device, **_: need.of(777) + 1)
    assert trained(graph, 777).num_steps == math.ceil(examples / 777)
    with pytest.raises(memory.NotEnoughMemory) as refused:
        trained(graph, 778)
    assert (refused.value.batch_size, refused.value.largest_batch) == (778, 777)
    assert "A batch of up to 777 fits: use training.batch_size = 777." in str(refused.value)
    monkeypatch.setattr(memory, "available_memory", lambda device, **_: need.of(0))
    with pytest.raises(memory.NotEnoughMemory) as refused:
        trained(graph, 1)
    assert refused.value.largest_batch < 1
    assert "Not even a batch of 1 fits: choose a smaller dim" in str(refused.value)


@pytest.mark.parametrize("step", ["sparse", "kernels"])
def test_rows_of_a_sampled_loss_are_those_of_a_batch(step):
    """What a batch of one size needs is the same, whatever the size of the recipe is."""
    shape = GraphShape(50, 3)
    model = kg.ComplEx(shape, dim=4)
    engine = Engine(step, "float32", CPU)
    needs = []
    for batch_size in (2, 10, 900):
        changes = {"loss.name": "SampledSoftmax", "loss.num_negatives": 20}
        recipe = kg.Recipe().with_changes({**changes, "training.batch_size": batch_size})
        needs.append(predict(recipe, model, kg.DURA(0.1), engine, num_examples=1000))
    assert needs[0].fixed == needs[1].fixed == needs[2].fixed
    assert needs[0].per_example == needs[1].per_example == needs[2].per_example


def test_a_batch_larger_than_the_graph_needs_no_more_than_the_graph(monkeypatch):
    graph = graph_of([(0, 0, 1), (1, 0, 2)])
    recipe = kg.Recipe()
    model = kg.ComplEx(graph.shape, dim=4)
    engine = Engine("fused", "float32", CPU)
    need = predict(recipe, model, kg.DURA(0.1), engine, num_examples=4)
    monkeypatch.setattr(memory, "available_memory", lambda device, **_: need.of(4))
    assert trained(graph, 10**9).num_steps == 1


def test_free_memory_is_read_from_linux_and_containers(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    assert memory._free_on_machine(tmp_path / "meminfo") == 2**21
    assert memory._free_on_machine(tmp_path / "missing") == math.inf
    assert memory._free_in_group(tmp_path) == math.inf
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert memory._free_in_group(tmp_path) == math.inf
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 40\ninactive_file 50\nactive_file 10\n")
    assert memory._free_in_group(tmp_path) == 960
    assert memory.available_memory(CPU) > 0


MEASURE = """
import re, sys, torch, dualkg as kg
from dualkg.training.trainer import Trainer
from dualkg.training.updates import optimizer_tensors
from dualkg.training.memory import BLOCK_ELEMENTS, predict
from tests.conftest import graph_of
torch.set_num_threads(1)
engine, changes = sys.argv[1], dict(word.split("=") for word in sys.argv[2:])
if "model.reciprocal" in changes:
    changes["model.reciprocal"] = changes["model.reciprocal"] != "false"
graph = graph_of([(i % 9, 0, i) for i in range(20000)])
def measure(size):
    training = {"training.batch_size": size, "training.engine": engine}
    recipe = kg.Recipe().with_changes(training | changes)
    model = getattr(kg, recipe.model.name)(graph.shape, dim=40, reciprocal=recipe.model.reciprocal)
    regularizer = kg.DURA(0.1) if recipe.model.name == "ComplEx" else kg.NoRegularizer()
    trainer = Trainer(model, graph, recipe, regularizer)
    for _, batch in zip(range(2), trainer.batches(0)):
        trainer.step(batch, 0.1)
    num_examples = len(trainer.examples)
    need = predict(recipe, model, regularizer, trainer.engine, num_examples=num_examples)
    peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
    return int(peak) * 1024, need.of(size)
(small, predicted_small), (large, predicted_large) = measure(100), measure(2500)
print(large - small, predicted_large - predicted_small)
"""


def growth(*words: str) -> list[float]:
    """The growth of the peak between two batch sizes, so that libraries do not count: measured and
    predicted.
    """
    done = run_python(MEASURE, *words)
    assert done.code == 0, done.err
    return [float(number) for number in done.out.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        ("fast", []),
        pytest.param("reference", [], marks=pytest.mark.slow),
        pytest.param(
            "reference", ["loss.name=KvsAll", "loss.head_dropout=0.2"], marks=pytest.mark.slow
        ),
    ],
)
def test_a_batch_takes_no_more_than_was_predicted(engine, changes):
    grown, predicted = growth(engine, *changes)
    assert grown <= 1.1 * predicted <= 3 * grown


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("negatives", "num", "more"),
    [
        pytest.param("uniform", 64, [], marks=pytest.mark.slow),
        pytest.param("shared", 1000, [], marks=pytest.mark.slow),
        pytest.param("shared", 1000, ["model.name=SE"], marks=pytest.mark.slow),
        pytest.param("shared", 1000, ["model.name=HAKE"], marks=pytest.mark.slow),
        pytest.param(
            "shared",
            1000,
            ["model.name=MuRP", "model.reciprocal=false", "loss.corruption=both"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_batch_with_negatives_takes_no_more_than_was_predicted(negatives, num, more):
    chosen = [
        "loss.name=NegativeSampling",
        f"loss.sampler={negatives}",
        f"loss.num_negatives={num}",
    ]
    grown, predicted = growth("reference", *chosen, *more)
    assert grown <= predicted <= 3 * grown


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("engine", ["autograd", "fused", "kernels", "kernels, sampled"])
@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("name", ["CP", "ComplEx", "RESCAL"])
def test_a_run_on_a_gpu_takes_no_more_than_was_predicted(name, reciprocal, engine):
    graph = graph_of([(i % 9, i % 5, i) for i in range(40000)])
    engine, _, sampled = engine.partition(", ")
    precision = "bf16" if engine == "kernels" else "float32"
    chosen = {
        "training.engine": "reference" if engine == "autograd" else "fast",
        "training.precision": precision,
    }
    if sampled:
        chosen |= {"loss.name": "SampledSoftmax", "loss.num_negatives": 2000}
    recipe = kg.Recipe().with_changes({**chosen, "training.batch_size": 3000})
    model = getattr(kg, name)(graph.shape, dim=100, reciprocal=reciprocal).cuda()
    gc.collect()  # what an earlier test has used
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(model, graph, recipe, kg.DURA(0.1))
    assert trainer.engine.step == engine
    for _, batch in zip(range(5), trainer.batches(0), strict=False):
        trainer.step(batch, 0.1)
    taken = torch.cuda.max_memory_allocated() - before
    predicted = predict(
        recipe, model, trainer.regularizer, trainer.engine, num_examples=len(trainer.examples)
    )
    spare = memory.LIBRARY_BYTES + BLOCK_ELEMENTS * 6
    assert taken <= predicted.of(3000)
    assert predicted.of(3000) <= 3 * taken + spare


@given(
    st.integers(0, 10**6),
    st.integers(1, 1000),
    st.integers(1, 1000),
    st.integers(1, 500),
    st.integers(0, 10**6),
)
def test_the_largest_batch_is_the_last_that_fits(fixed, per_example, scores, at_once, more):
    need = Need(fixed, per_example, scores, at_once)
    available = fixed + more
    largest = need.largest_batch(available)
    assert largest < 1 or need.of(largest) <= available
    assert need.of(max(largest, 0) + 1) > available


def test_processes_share_the_memory_of_a_machine() -> None:
    whole = memory.available_memory(torch.device("cpu"))
    part = memory.available_memory(torch.device("cpu"), num_sharing=4)
    assert 0 < part < whole / 2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss.name": "SampledSoftmax", "loss.num_negatives": 20},
        {"optimizer.name": "Adam", "training.engine": "reference"},
        {"model.name": "TuckER", "regularizer.name": "none", "model.options.batch_norm": True},
    ],
)
def test_steps_that_are_timed_leave_no_trace(changes):
    """Weights, optimizer and batch normalization are those of a training that was not timed."""
    graph = kg.load_graph("world")
    settings = {"data.graph": "world", "model.dim": 4, "training.batch_size": 3000, **changes}
    recipe = Recipe().with_changes(settings)
    timed, other = (Trainer.of_recipe(recipe, graph, device=CPU) for _ in range(2))
    with timed.undoing():
        assert measure_step(timed) > 0
        assert different_tensors(timed, other)
    assert not different_tensors(timed, other)
    for trainer in (timed, other):
        for batch in trainer.batches(0):
            trainer.step(batch, 0.1)
    assert not different_tensors(timed, other)


def different_tensors(trainer: Trainer, other: Trainer) -> set[str]:
    """The names of weights and of the state of the optimizer that differ in a bit."""
    states = [
        dict(each.model.state_dict()) | optimizer_tensors(each.optimizer)
        for each in (trainer, other)
    ]
    in_both = states[0].keys() & states[1].keys()
    differ = {name for name in in_both if not torch.equal(states[0][name], states[1][name])}
    return differ | (states[0].keys() ^ states[1].keys())


def test_the_seconds_of_a_step_are_those_of_the_clock():
    """Each look at the clock takes 3 s: 2 looks a measurement, the last of one step."""
    trainer = trained(graph_of([(i % 50, i % 3, (7 * i) % 50) for i in range(2000)]), 100)
    looks = itertools.count(step=3)
    num_steps = []
    trainer.step = lambda batch, rate: num_steps.append(len(batch))
    assert measure_step(trainer, clock=lambda: next(looks)) == 3.0
    assert num_steps == [100] * 4
    # Steps of .1 s: as many as take a second.
    looks = itertools.count()
    num_steps.clear()
    assert measure_step(trainer, clock=lambda: next(looks) / 10) == pytest.approx(0.01)
    assert len(num_steps) == 2 + 1 + 10


def test_steps_are_only_taken_where_that_is_cheap_and_can_be_undone():
    """Otherwise their time is that of the formula: for large tables, and a loss of one's own."""
    graph = kg.load_graph("world")
    group = Processes(0, 1, CPU)
    recipe = Recipe().with_changes({"data.graph": "world", "model.dim": 4})
    trainer = build_trainer(recipe, graph, group)
    taken = []
    step = trainer.step

    def count(batch, rate):
        taken.append(len(batch))
        return step(batch, rate)

    trainer.step = count
    assert time_of_step(trainer, max_bytes=0) > 0
    assert not taken
    assert time_of_step(trainer) > 0
    assert taken
    assert trainer.step is not count  # Renewed, as it may have copies of the weights.


def test_a_checkpoint_of_several_processes_is_part_of_the_need() -> None:
    graph = kg.load_graph("world")
    recipe = Recipe().with_changes({"data.graph": "world", "model.dim": 4})
    group = Processes(0, 1, torch.device("cpu"))
    alone = Trainer.of_recipe(recipe, graph, device=group.device)
    trainer = build_trainer(recipe, graph, group)
    copies = memory.checkpoint_copies(recipe, trainer.model, 2)
    state = 2 * sum(table.nbytes for table in trainer.model.parameters())
    assert copies == memory.CHECKPOINT_BYTES + 2 * state
    assert trainer.need.fixed == alone.need.fixed + copies
