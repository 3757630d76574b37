"""Tables in host memory: the weights, sums and ranks of tables on the device that computes."""

import ctypes
import gc

import pytest
import torch
from torch import Tensor

import dualkg as kg
from dualkg.errors import InvalidValue
from dualkg.evaluation.ranking import rank
from dualkg.models import MODELS
from dualkg.tables import host
from dualkg.tables.base import local_tables
from dualkg.tables.host import HostTables
from dualkg.training.api import TrainingOptions, start_training
from dualkg.training.engines import Engine
from dualkg.training.errors import InterruptedRunError
from dualkg.training.optimizers import build_optimizer
from dualkg.training.run_folder import RunFolder
from dualkg.training.steps import build_step
from dualkg.training.trainer import Trainer
from dualkg.training.updates import optimizer_tensors
from tests.conftest import graph_of
from tests.raising import refused

CPU = torch.device("cpu")
NUM_ENTITIES = 50
SETTINGS = {
    "loss.name": "SampledSoftmax",
    "loss.num_negatives": 6,
    "model.dim": 4,
    "model.init_scale": 0.3,
    "regularizer.name": "DURA",
    "regularizer.weight": 0.05,
    "training.batch_size": 10,
    "training.epochs": 2,
    "training.engine": "reference",
}


def graph_with_frequent_entities(
    num_triples: int = 120, num_entities: int = NUM_ENTITIES
) -> kg.Graph:
    """A graph in which neighbouring batches share entities."""
    triples = [(i * i % 17, i % 3, i * 7 % NUM_ENTITIES) for i in range(num_triples)]
    held_out = [(i % 17, i % 3, (i * 11 + 1) % NUM_ENTITIES) for i in range(20)]
    return graph_of(triples, valid=held_out[:10], test=held_out[10:], num_entities=num_entities)


def recipe_of(**changes: object) -> kg.Recipe:
    return kg.Recipe().with_changes(
        SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    )


def trainer_on(tables: object, recipe: kg.Recipe, dtype: torch.dtype = torch.float64) -> Trainer:
    graph = graph_with_frequent_entities()
    model = recipe.model.build(graph.shape, seed=recipe.training.seed, tables=tables).to(dtype)
    return Trainer(model, graph, recipe, recipe.regularizer.build())


def ordinary_trainer(recipe: kg.Recipe, dtype: torch.dtype = torch.float64) -> Trainer:
    """A trainer that takes the same step with tables on the device."""
    trainer = trainer_on(local_tables(NUM_ENTITIES), recipe, dtype)
    if recipe.training.engine != "reference":
        assert trainer.engine.step == "fused"
        return trainer
    # The trainer would take dense gradients of so few entities.
    trainer.engine = Engine("reference", "float32", CPU, sparse=True)
    model = trainer.model
    trainer.optimizer = build_optimizer(
        recipe.optimizer, model.parameters(), entity_tables=model.entity_tables, one_pass=True
    )
    loss = recipe.loss.bind(
        model, trainer.graph, batch_size=recipe.training.batch_size, seed=recipe.training.seed
    )
    trainer.step = build_step(trainer.engine, model, loss, trainer.regularizer, trainer.optimizer)
    return trainer


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of the weights and of the state of the optimizer."""
    state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    sums = optimizer_tensors(trainer.optimizer)
    return state | {name: value.clone() for name, value in sums.items()}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


LOSSES = {
    "shared": {},
    "own": {
        "loss.shared": False,
        "loss.distribution": "log-uniform",
        "loss.frequency_weight": 0.5,
        "loss.relation_weight": 0.5,
    },
    "uniform negatives": {"loss": {"name": "NegativeSampling", "num_negatives": 4}},
    "in-batch": {"loss": {"name": "MarginRanking", "sampler": "in-batch"}},
    "corrupted heads": {
        "loss": {"name": "NegativeSampling", "num_negatives": 3, "corruption": "bernoulli"},
        "model.reciprocal": False,
    },
    "both sides": {"model.reciprocal": False},
    "sums of rows": {"optimizer.sums": "rows"},
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_two_epochs_give_the_bits_of_tables_on_the_device(loss, dtype):
    changes = dict(LOSSES[loss])
    settings = {**SETTINGS, **changes}
    if "loss" in settings:
        settings = {key: value for key, value in settings.items() if not key.startswith("loss.")}
        for key, value in settings.pop("loss").items():
            settings[f"loss.{key}"] = value
    recipe = kg.Recipe().with_changes(settings)
    expected = ordinary_trainer(recipe, dtype)
    found = trainer_on(HostTables(NUM_ENTITIES), recipe, dtype)
    assert_same_bits(state_of(found), state_of(expected))
    expected.run()
    found.run()
    assert_same_bits(state_of(found), state_of(expected))
    assert found.engine.sparse
    for key in ("epoch", "loss"):
        values = [[epoch[key] for epoch in run.progress.history] for run in (found, expected)]
        assert values[0] == values[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__name": "CP", "loss__relation_weight": 0.5},
        {"model__name": "RESCAL", "optimizer__sums": "rows"},
        {"model__reciprocal": False, "loss__distribution": "log-uniform"},
        {"model__dual": "tail", "regularizer__name": "none", "regularizer__weight": 0.0},
        {"training__order": "queries"},
    ],
    ids=["ComplEx", "CP", "RESCAL", "both sides", "dual", "grouped by query"],
)
def test_fast_steps_give_the_bits_of_tables_on_the_device(changes, dtype):
    recipe = recipe_of(training__engine="fast", **changes)
    expected = ordinary_trainer(recipe, dtype)
    found = trainer_on(HostTables(NUM_ENTITIES), recipe, dtype)
    assert found.engine.step == "fused"
    expected.run()
    found.run()
    assert_same_bits(state_of(found), state_of(expected))


# -- the order of reads and writes ---------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "in_flight"),
    [(0, 1), (3, 4), (3, 6)],
)
def test_rows_of_several_batches_have_all_updates(ahead, in_flight):
    recipe = recipe_of(training__batch_size=6, training__epochs=1)
    expected = ordinary_trainer(recipe)
    found = trainer_on(HostTables(NUM_ENTITIES, ahead=ahead, in_flight=in_flight), recipe)
    expected.run()
    found.run()
    assert_same_bits(state_of(found), state_of(expected))


def test_rows_are_read_ahead_and_written_later():
    """With batches 0 to 8 and two read ahead, step 0 is taken after batch 2 was read."""
    recipe = recipe_of(training__batch_size=30, training__epochs=1)
    tables = HostTables(NUM_ENTITIES, ahead=2, in_flight=4)
    trainer = trainer_on(tables, recipe)
    step = trainer.step
    planned = []
    taken = 0
    for batch in tables.ahead(trainer.batches(0)):
        if taken:  # the first step decides how large the buffers are
            planned.append(len(step._planned))
        step(batch, 0.1)
        taken += 1
    assert taken == 8
    assert planned == [3, 3, 3, 3, 3, 2, 1]


def test_a_batch_that_does_not_fit_the_buffers_gets_larger_ones():
    recipe = recipe_of(training__batch_size=4)
    expected = ordinary_trainer(recipe)
    found = trainer_on(HostTables(NUM_ENTITIES), recipe)
    batches = [*expected.batches(0), *(batch.repeat(1, 1) for batch in expected.examples.split(40))]
    for batch in batches:
        expected.step(batch, 0.1)
    for batch in found.model.tables.ahead(iter(batches)):
        found.step(batch, 0.1)
    assert_same_bits(state_of(found), state_of(expected))


def test_changes_between_epochs_are_not_lost():
    """A callback may change weights at the end of an epoch, as an average does."""
    recipe = recipe_of(training__batch_size=4, optimizer__average_from=0.2, training__epochs=4)
    expected = ordinary_trainer(recipe)
    found = trainer_on(HostTables(NUM_ENTITIES), recipe)
    for trainer in (expected, found):
        trainer.callbacks = [HalvesWeights(trainer)]
        trainer.run()
    assert_same_bits(state_of(found), state_of(expected))


class HalvesWeights(kg.Callback):
    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_epoch(self, epoch, metrics):
        with torch.no_grad():
            self.trainer.model.entities.mul_(0.5)


def test_steps_without_reading_ahead():
    """As those by which the speed of a machine is measured."""
    recipe = recipe_of()
    expected = ordinary_trainer(recipe)
    found = trainer_on(HostTables(NUM_ENTITIES), recipe)
    for trainer in (expected, found):
        for batch in trainer.batches(0):
            trainer.step(batch, 0.1)
        trainer.model.tables.complete_updates()
    assert_same_bits(state_of(found), state_of(expected))


def test_a_batch_that_is_left_behind_changes_nothing():
    recipe = recipe_of(training__batch_size=4)
    expected = ordinary_trainer(recipe)
    found = trainer_on(HostTables(NUM_ENTITIES), recipe)
    for trainer in (expected, found):
        for epoch in (0, 1, 0):
            batches = trainer.model.tables.ahead(trainer.batches(epoch))
            for number, batch in enumerate(batches):
                if number == 9:
                    break
                trainer.step(batch, 0.1)
            if trainer is found:
                batches.close()
    assert_same_bits(state_of(found), state_of(expected))


def test_buffers_follow_in_flight():
    with refused(InvalidValue, setting="in_flight", found=3):
        HostTables(9, ahead=3, in_flight=3)


# -- checkpoints, resuming and saved runs ---------------------------------------


def test_a_run_that_is_stopped_in_an_epoch_resumes_with_tables_anywhere(tmp_path):
    recipe = recipe_of(training__batch_size=7, training__epochs=3)
    expected = ordinary_trainer(recipe)
    expected.run()

    stopped = trainer_on(HostTables(NUM_ENTITIES), recipe)
    stopped.checkpoint_path = tmp_path / "checkpoint.safetensors"

    def stop(event):
        stopped.stop.requested = (event.epoch, event.step) == (2, 5)

    stopped.on_progress = stop
    with pytest.raises(InterruptedRunError):
        stopped.run()
    on_host = trainer_on(HostTables(NUM_ENTITIES), recipe)
    on_device = ordinary_trainer(recipe)
    for trainer in (on_host, on_device):
        trainer.restore(stopped.checkpoint_path)
        assert (trainer.progress.epoch, trainer.progress.step) == (1, 5)
        trainer.run()
        assert_same_bits(state_of(trainer), state_of(expected))


@pytest.mark.parametrize(
    "model", ["ComplEx", *(pytest.param(name, marks=pytest.mark.slow) for name in ("CP", "RESCAL"))]
)
def test_a_run_folder_is_that_of_tables_on_the_device(model, tmp_path):
    graph = graph_with_frequent_entities()
    changes = {"model.name": model, "training.checkpoint_seconds": 0.0, "validation.every": 1}
    saved = {}
    for place in ("device", "host"):
        recipe = recipe_of(**changes, training__engine="reference", training__entity_tables=place)
        folder = RunFolder(tmp_path / place)
        run = start_training(recipe, graph, TrainingOptions(device=CPU, out=folder.path))
        assert not run.model.tables.on_host
        saved[place] = kg.load_run(folder.path)
        assert saved[place].report.mrr == run.report.mrr
        tails = run.predictor().tails("e1", "r0", k=3)
        assert tails == saved[place].predictor().tails("e1", "r0", k=3)
    torch.testing.assert_close(
        saved["host"].model.state_dict(), saved["device"].model.state_dict(), rtol=1e-4, atol=1e-6
    )


# -- rankings ---------------------------------------------------------------------

RANKED = {
    "ComplEx": {},
    "CP": {},
    "RESCAL": {},
    "TransE": {},
    "RotatE": {},
    "ComplEx without reciprocal relations": {"reciprocal": False},
    "dual of ComplEx": {"dual": "tail"},
    "dual of CP of heads": {"dual": "head", "reciprocal": False},
}


@pytest.mark.parametrize("name", RANKED)
@pytest.mark.parametrize("ranked_rows", [7, NUM_ENTITIES])
def test_ranks_in_blocks_of_rows_are_those_of_all_at_once(name, ranked_rows):
    graph = graph_with_frequent_entities()
    settings = {f"model.{key}": value for key, value in RANKED[name].items()}
    kind = next(word for word in name.split() if word in MODELS)
    settings |= {"model.name": kind, "model.dim": 4, "model.init_scale": 0.3}
    recipe = kg.Recipe().with_changes(settings)
    ranks = []
    for tables in (local_tables(NUM_ENTITIES), HostTables(NUM_ENTITIES, ranked_rows=ranked_rows)):
        model = recipe.model.build(graph.shape, seed=0, tables=tables).double()
        ranks.append(rank(model, graph, block_elements=60))
    assert (ranks[0].optimistic == ranks[1].optimistic).all()
    assert (ranks[0].pessimistic == ranks[1].pessimistic).all()


class BlocksSeen(HostTables):
    def __init__(self, num_entities: int, **options: int) -> None:
        super().__init__(num_entities, **options)
        self.seen: list[slice] = []

    def block(self, table: Tensor, rows: slice, device: torch.device) -> Tensor:
        self.seen.append(rows)
        return super().block(table, rows, device)


def test_a_ranking_reads_one_block_of_rows_at_a_time():
    graph = graph_with_frequent_entities()
    tables = BlocksSeen(NUM_ENTITIES, ranked_rows=8)
    model = kg.ComplEx.with_tables(tables, graph.shape, dim=4)
    rank(model, graph)
    assert {rows.stop - rows.start for rows in tables.seen} == {8, 2}


def test_models_are_moved_without_their_entity_tables():
    tables = HostTables(9)
    model = kg.Dual(kg.ComplEx.with_tables(tables, kg.GraphShape(9, 2), dim=2), "tail")
    model.to("meta")
    assert model.device.type == "meta"
    assert model.embedding.entities.device.type == "cpu"
    model = kg.ComplEx.with_tables(tables, kg.GraphShape(9, 2), dim=2).double()
    assert model.entities.dtype == model.relations.dtype == torch.float64


# -- pinned memory -------------------------------------------------------------------

GPU = torch.device("cuda")


class FakeDriver:
    """Keeps the addresses that are pinned, and refuses some."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.addresses: set[int] = set()
        self.cuMemHostRegister_v2 = self.register
        self.cuMemHostUnregister = self.unregister

    def register(self, address: ctypes.c_void_p, num_bytes: ctypes.c_size_t, flags: int) -> int:
        assert address.value not in self.addresses
        assert flags == 3
        if not self.status:
            self.addresses.add(address.value)
            self.num_bytes = num_bytes.value
        return self.status

    def unregister(self, address: ctypes.c_void_p) -> None:
        self.addresses.remove(address.value)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(host, "_driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return fake


def test_steps_on_one_table_share_its_pinned_memory(driver):
    table = torch.nn.Parameter(torch.zeros(7, 3))
    first = host.pin(table, GPU)
    second = host.pin(table.detach(), GPU)
    assert first is second
    assert driver.addresses == {table.data_ptr()}
    assert driver.num_bytes == 7 * 3 * 4

    del first
    gc.collect()
    assert driver.addresses == {table.data_ptr()}
    del second
    gc.collect()
    assert not driver.addresses
    assert host.pin(table, GPU) is not None


@pytest.mark.parametrize(
    ("table", "device"), [(torch.zeros(0, 3), GPU), (torch.zeros(2, 3), torch.device("cpu"))]
)
def test_nothing_is_pinned_without_rows_or_without_a_gpu(driver, table, device):
    assert host.pin(table, device) is None
    assert not driver.addresses


# -- on a GPU -----------------------------------------------------------------------

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


def gpu_trainer(
    place: str, dtype: torch.dtype, num_entities: int = NUM_ENTITIES, **changes: object
) -> Trainer:
    recipe = recipe_of(
        training__engine="auto", training__entity_tables=place, model__dim=64, **changes
    )
    graph = graph_with_frequent_entities(num_entities=num_entities)
    device = torch.device("cuda")
    tables = HostTables(num_entities) if place == "host" else local_tables(num_entities)
    model = recipe.model.build(graph.shape, seed=0, tables=tables).to(dtype).to(device)
    assert model.entities.device.type == ("cpu" if place == "host" else "cuda")
    return Trainer(model, graph, recipe, recipe.regularizer.build())


@pytest.mark.parametrize("batch_size", [4, 10, 37])
@pytest.mark.parametrize("sums", ["elements", "rows"])
@pytest.mark.parametrize("model", ["ComplEx", "CP", "RESCAL"])
@pytest.mark.gpu
@NEEDS_GPU
def test_kernels_on_a_gpu_give_the_weights_of_tables_there(model, sums, batch_size):
    """Eager steps first, then one CUDA graph; the last batch of an epoch is shorter.

    Gradients are summed in any order on a GPU, so that two equal trainings differ by rounding,
    which the first steps of Adagrad enlarge where a gradient is close to 0.
    """
    changes = {"model__name": model, "optimizer__sums": sums, "training__batch_size": batch_size}
    states = []
    for place in ("device", "host"):
        trainer = gpu_trainer(place, torch.float32, **changes)
        assert (trainer.engine.step, trainer.engine.precision) == ("kernels", "bf16")
        trainer.run()
        state = state_of(trainer)
        states.append({name: value.cpu() for name, value in state.items()})
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sums", ["elements", "rows"])
@pytest.mark.gpu
@NEEDS_GPU
def test_a_gpu_reads_and_writes_tables_that_are_pinned_in_place(sums):
    """Tables of this size have pages of their own."""
    states = []
    for place in ("device", "host"):
        trainer = gpu_trainer(place, torch.float32, num_entities=40_000, optimizer__sums=sums)
        if place == "host":
            assert trainer.step.copies[0].pinned is not None
        trainer.run()
        states.append({name: value.cpu() for name, value in state_of(trainer).items()})
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", ["SampledSoftmax", "NegativeSampling"])
@pytest.mark.gpu
@NEEDS_GPU
def test_sparse_steps_on_a_gpu_equal_those_of_a_cpu(loss):
    recipe = recipe_of(loss__name=loss, training__entity_tables="host")
    states = []
    for device in ("cpu", "cuda"):
        tables = HostTables(NUM_ENTITIES)
        graph = graph_with_frequent_entities()
        model = recipe.model.build(graph.shape, seed=0, tables=tables).double().to(device)
        trainer = Trainer(model, graph, recipe, recipe.regularizer.build())
        assert trainer.engine.sparse
        trainer.run()
        states.append({name: value.cpu() for name, value in state_of(trainer).items()})
    torch.testing.assert_close(states[1], states[0], rtol=1e-9, atol=1e-12)


@pytest.mark.gpu
@NEEDS_GPU
def test_a_run_on_a_gpu_ranks_in_blocks_and_ends_on_the_cpu(tmp_path):
    graph = graph_with_frequent_entities()
    recipe = recipe_of(training__entity_tables="host", training__engine="auto", validation__every=1)
    folder = RunFolder(tmp_path / "run")
    run = start_training(recipe, graph, TrainingOptions(device="cuda", out=folder.path))
    assert run.model.device.type == "cpu"
    again = rank(run.model, graph)
    assert abs(again.mean - run.report.ranks.mean).max() <= 1
    assert "entity tables in host memory" in folder.saved_environment["engine"]
    tables = HostTables(NUM_ENTITIES, ranked_rows=7)
    copy = recipe.model.build(graph.shape, seed=0, tables=tables)
    copy.load_state_dict(run.model.state_dict())
    blocks = rank(copy.to("cuda"), graph)
    assert abs(blocks.mean - again.mean).max() <= 1
