"""Sparse gradients: the updates of dense ones, by reading and writing only the rows of a batch."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dualkg as kg
from dualkg.training.engines import choose_engine
from dualkg.training.errors import InterruptedRunError
from dualkg.training.optimizers import Optimizer, build_optimizer
from dualkg.training.steps import ReferenceStep
from dualkg.training.trainer import Trainer
from dualkg.training.updates import (
    OnePassAdagrad,
    optimizer_tensors,
    restore_optimizer,
    sum_rows,
)
from tests.conftest import graph_of
from tests.families import BILINEAR, EMBEDDINGS

NUM_ENTITIES = 40
READ = 25  # of which batches read the first ones
LOSSES = {
    "shared": kg.SampledSoftmax(num_negatives=6, relation_weight=0.5),
    "own": kg.SampledSoftmax(
        num_negatives=3, shared=False, distribution="log-uniform", frequency_weight=0.5
    ),
    "logistic": kg.NegativeSampling(sampler="shared", num_negatives=5),
    "margin": kg.MarginRanking(sampler="in-batch"),
}


def train_graph(num_triples: int = 60) -> kg.Graph:
    return graph_of(
        [(i * 7 % READ, i % 3, i * i % READ) for i in range(num_triples)], num_entities=NUM_ENTITIES
    )


def weights_after(
    kind: type[kg.Model],
    *,
    sparse: bool,
    loss: kg.Loss,
    reciprocal: bool,
    sums: str = "elements",
    steps: int = 3,
) -> dict[str, torch.Tensor]:
    """The float64 weights after some steps on batches in which entities occur several times."""
    graph = train_graph()
    model = kind(graph.shape, dim=4, reciprocal=reciprocal, init_scale=0.3).double()
    regularizer = (
        kg.DURA(0.05, plain=0.5, mapped=1.5) if kind in BILINEAR.values() else kg.NoRegularizer()
    )
    choice = Optimizer(sums=sums)
    optimizer = build_optimizer(
        choice, model.parameters(), entity_tables=model.entity_tables, one_pass=True
    )
    bound = loss.bind(model, graph, batch_size=12, seed=3)
    step = ReferenceStep(model, bound, regularizer, optimizer, sparse=sparse)
    drawn = torch.Generator().manual_seed(5)
    for _ in range(steps):
        ids = [
            torch.randint(size, (12,), generator=drawn)
            for size in (READ, model.num_relation_ids, READ)
        ]
        step(torch.stack(ids, -1), 0.1)
        assert model.entities.grad is not None
        assert model.entities.grad.is_sparse == sparse
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("name", BILINEAR)
def test_sparse_steps_equal_dense_steps_of_bilinear_models_with_dura(name, reciprocal):
    for loss in LOSSES.values():
        chosen = {"loss": loss, "reciprocal": reciprocal}
        dense, sparse = (
            weights_after(BILINEAR[name], sparse=sparse, **chosen) for sparse in (False, True)
        )
        torch.testing.assert_close(sparse, dense, rtol=1e-12, atol=1e-12)


OTHERS = [name for name in EMBEDDINGS if name not in (*BILINEAR, "TransE", "MuRP")]


@pytest.mark.parametrize(
    "name", ["TransE", "MuRP", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_sparse_steps_equal_dense_steps_of_distance_models(name):
    for loss in (LOSSES["shared"], LOSSES["logistic"]):
        dense, sparse = (
            weights_after(EMBEDDINGS[name], sparse=is_sparse, loss=loss, reciprocal=False, steps=3)
            for is_sparse in (False, True)
        )
        torch.testing.assert_close(sparse, dense, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["CP", "ComplEx", "RESCAL"])
def test_sums_of_rows_are_the_same_with_sparse_and_dense_gradients(name):
    chosen = {"loss": LOSSES["shared"], "reciprocal": True, "sums": "rows"}
    dense, sparse = (
        weights_after(BILINEAR[name], sparse=sparse, **chosen) for sparse in (False, True)
    )
    torch.testing.assert_close(sparse, dense, rtol=1e-12, atol=1e-12)
    of_elements = weights_after(BILINEAR[name], sparse=True, **{**chosen, "sums": "elements"})
    assert not torch.allclose(sparse["entities"], of_elements["entities"], rtol=1e-3)


def test_sums_of_rows_by_hand():
    """Row 0 has the gradients (3, 1) and (1, 3) in one batch: their sum (4, 4) has the mean square
    16.
    """
    table = torch.nn.Parameter(torch.zeros(3, 2))
    matrix = torch.nn.Parameter(torch.zeros(2, 2))
    stepper = build_optimizer(
        Optimizer(sums="rows", learning_rate=0.5), [table, matrix], entity_tables=[table]
    )
    rows = torch.nn.functional.embedding(torch.tensor([0, 2, 0]), table, sparse=True)
    (rows * torch.tensor([[3.0, 1.0], [0.0, 2.0], [1.0, 3.0]])).sum().backward()
    stepper.step()
    root = 2**0.5  # row 2: (0, 2) has the mean square 2
    torch.testing.assert_close(
        table.detach(), torch.tensor([[-0.5, -0.5], [0.0, 0.0], [0.0, -1.0 / root]])
    )
    assert stepper.state[table]["sum"].tolist() == [[16.0], [0.0], [2.0]]
    assert stepper.state[matrix]["sum"].shape == (2, 2)


def test_gradients_of_one_row_are_summed():
    distinct, summed = sum_rows(
        torch.tensor([5, 2, 5]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]])
    )
    assert distinct.tolist() == [2, 5]
    assert summed.tolist() == [[3.0, 4.0], [11.0, 22.0]]


class LargestTensor(TorchDispatchMode):
    """The number of rows of the largest tensor that operations create; views and in-place updates
    create none.
    """

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.rows = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        found = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                known = tensor.untyped_storage().data_ptr() in self.known
                self.rows = max(self.rows, 0 if known or not tensor.dim() else len(tensor))
        return found


@pytest.mark.parametrize("sums", ["elements", "rows"])
@pytest.mark.parametrize("name", ["ComplEx", "CP", "MuRP"])
def test_a_step_creates_no_tensor_with_a_row_for_each_entity(name, sums):
    graph = graph_of([(i, 0, i + 1) for i in range(50)], num_entities=5000)
    changes = {"loss.name": "SampledSoftmax", "loss.num_negatives": 20, "training.batch_size": 10}
    recipe = kg.Recipe().with_changes(
        {**changes, "model.name": name, "model.dim": 4, "optimizer.sums": sums}
    )
    trainer = Trainer.of_recipe(recipe, graph, device=torch.device("cpu"))
    assert trainer.engine.step == ("reference" if name == "MuRP" else "fused")
    optimizer = trainer.optimizer
    assert isinstance(optimizer, OnePassAdagrad)
    sizes = {
        sum_.shape
        for sum_ in (
            optimizer.state[table]["sum"] for table in trainer.model.embedding.entity_tables
        )
    }
    assert sizes == {trainer.model.embedding.entities.shape if sums == "elements" else (5000, 1)}
    known = [*trainer.model.parameters(), *(state["sum"] for state in optimizer.state.values())]
    with LargestTensor(*known) as largest:
        trainer.step(next(trainer.batches(0)), 0.1)
    # The scores of ten triples and twenty negatives are one buffer.
    assert 20 <= largest.rows <= 200


def test_sparse_gradients_are_chosen_where_a_batch_reads_few_of_many_entities():
    def step(
        num_entities: int, regularizer: kg.Regularizer | None = None, **changes: object
    ) -> tuple[str, bool]:
        chosen = {
            "loss.name": "SampledSoftmax",
            "loss.num_negatives": 10,
            "training.batch_size": 5,
            **changes,
        }
        recipe = kg.Recipe().with_changes(
            {name.replace("__", "."): value for name, value in chosen.items()}
        )
        model = kg.ComplEx(kg.GraphShape(num_entities, 2), dim=2)
        engine = choose_engine(recipe, model, regularizer or kg.DURA(0.1))
        return engine.step, engine.sparse

    shared = {"loss__name": "NegativeSampling", "loss__sampler": "shared"}
    # Four times the rows of ten heads, ten tails and ten negatives.
    assert step(120, **shared) == ("reference", True)
    assert step(119, **shared) == ("reference", False)
    assert step(10) == ("fused", False)
    assert step(1000) == ("fused", False)
    assert step(1000, loss__shared=False) == ("reference", True)
    assert step(400, loss__shared=False) == ("reference", False)
    assert step(1000, kg.UnweightedDURA(0.1)) == ("reference", False)
    assert step(1000, optimizer__name="Adam") == ("reference", False)
    assert step(1000, training__engine="reference") == ("reference", False)


def test_sums_of_rows_with_the_fast_engine(small_graph):
    """A full softmax updates every row; its products are then float32, and the sums are smaller."""
    recipe = kg.Recipe().with_changes(
        {"optimizer.sums": "rows", "model.dim": 4, "training.epochs": 3}
    )
    trainer = Trainer.of_recipe(recipe, small_graph, device=torch.device("cpu"))
    assert (trainer.engine.step, trainer.engine.precision) == ("fused", "float32")
    trainer.run()
    assert trainer.optimizer.state[trainer.model.embedding.entities]["sum"].shape == (
        small_graph.shape.num_entities,
        1,
    )
    losses = [entry["loss"] for entry in trainer.progress.history]
    assert losses[-1] < losses[0]
    with pytest.raises(kg.RequestError, match=r"single elements; `optimizer\.sums` is rows"):
        Trainer.of_recipe(
            recipe.with_changes({"training.precision": "bf16"}),
            small_graph,
            device=torch.device("cpu"),
        )


def test_other_optimizers_have_no_sums():
    with pytest.raises(kg.RequestError, match="is a setting of Adagrad, and optimizer.name is"):
        Optimizer(name="Adam", sums="rows")


@pytest.mark.parametrize("sums", ["elements", "rows"])
def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path, sums):
    changes = {
        "loss.name": "SampledSoftmax",
        "loss.num_negatives": 4,
        "training.batch_size": 2,
        "training.epochs": 2,
    }
    recipe = kg.Recipe().with_changes({**changes, "optimizer.sums": sums, "model.dim": 3})
    graph = train_graph(10)

    def trainer() -> Trainer:
        return Trainer.of_recipe(recipe, graph, device=torch.device("cpu"))

    whole = trainer()
    assert whole.engine.step == "fused"
    whole.run()
    stopped = trainer()
    stopped.checkpoint_path = tmp_path / "checkpoint.safetensors"

    def stop(event):
        stopped.stop.requested = event.epoch == 2 and event.step == 3

    stopped.on_progress = stop
    with pytest.raises(InterruptedRunError):
        stopped.run()
    resumed = trainer()
    resumed.restore(stopped.checkpoint_path)
    resumed.run()
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_sums_of_another_kind_are_not_loaded():
    table = torch.nn.Parameter(torch.zeros(3, 2))
    rows, elements = (
        build_optimizer(Optimizer(sums=sums), [table], entity_tables=[table], one_pass=True)
        for sums in ("rows", "elements")
    )
    for one, other in ((rows, elements), (elements, rows)):
        with pytest.raises(ValueError, match=r"0\.sum is of another table"):
            restore_optimizer(one, optimizer_tensors(other))
