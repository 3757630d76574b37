import pytest
import torch

from dualkg.errors import RequestError
from dualkg.training.optimizers import (
    Adagrad,
    build_optimizer,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
)
from dualkg.training.recipe import Optimizer
from tests.processes import run_python


@pytest.mark.parametrize(
    ("schedule", "decay_from", "rates"),
    [
        ("constant", 0.0, {0.0: 0.2, 0.5: 0.2, 1.0: 0.2}),
        ("linear", 0.0, {0.0: 0.2, 0.5: 0.1, 1.0: 0.0}),
        ("linear", 0.5, {0.0: 0.2, 0.5: 0.2, 0.75: 0.1, 1.0: 0.0}),
        ("cosine", 0.0, {0.0: 0.2, 0.5: 0.1, 1.0: 0.0}),
        ("cosine", 0.5, {0.25: 0.2, 0.75: 0.1}),
    ],
)
def test_learning_rate_schedules(schedule, decay_from, rates):
    choice = Optimizer(learning_rate=0.2, schedule=schedule, decay_from=decay_from)
    for progress, rate in rates.items():
        assert learning_rate(choice, progress) == pytest.approx(rate)


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("name", ["Adagrad", "Adam", "SGD"])
def test_a_restored_optimizer_takes_the_same_steps(name, one_pass):
    def step(parameter, optimizer):
        optimizer.zero_grad()
        parameter.pow(4).sum().backward()
        optimizer.step()

    one = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    first = build_optimizer(Optimizer(name=name, learning_rate=0.1), [one], one_pass=one_pass)
    step(one, first)
    other = torch.nn.Parameter(one.detach().clone())
    second = build_optimizer(Optimizer(name=name, learning_rate=0.1), [other], one_pass=one_pass)
    restore_optimizer(
        second, {key: value.clone() for key, value in optimizer_tensors(first).items()}
    )
    for _ in range(3):
        step(one, first)
        step(other, second)
    assert torch.equal(one, other)


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("name", ["Adagrad", "Adam"])
def test_epsilon_is_added_to_the_denominator(name, one_pass):
    """Either divides its first gradient g by |g| + epsilon: 3 / (3 + 1) and .003 / 1.003."""
    table = torch.nn.Parameter(torch.zeros(2))
    stepper = build_optimizer(
        Optimizer(name=name, learning_rate=0.1, epsilon=1.0), [table], one_pass=one_pass
    )
    (table * torch.tensor([3.0, 0.003])).sum().backward()
    stepper.step()
    torch.testing.assert_close(table.detach(), torch.tensor([-0.075, -0.0003 / 1.003]))


def test_sgd_has_no_epsilon():
    with pytest.raises(
        RequestError, match="epsilon is for Adagrad and Adam, and optimizer.name is 'SGD'"
    ):
        Optimizer(name="SGD", epsilon=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adagrad_in_one_pass_equals_pytorch_with_the_same_state(dtype):
    tables = [
        torch.nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=dtype)) for _ in range(2)
    ]
    steppers = [
        build_optimizer(Optimizer(learning_rate=0.1), [table], one_pass=one_pass)
        for table, one_pass in zip(tables, (True, False), strict=True)
    ]
    assert type(steppers[0]) is Adagrad
    for number in range(5):
        for table, stepper in zip(tables, steppers, strict=True):
            stepper.zero_grad()
            (number * table).pow(4).sum().backward()
            stepper.step()
    torch.testing.assert_close(*tables, rtol=1e-6, atol=1e-7)
    ours, theirs = (optimizer_tensors(stepper) for stepper in steppers)
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(ours["0.sum"], theirs["0.sum"])


def test_training_does_not_import_the_pytorch_compiler(tmp_path):
    """Its optimizers do, which takes a second and 70 MiB."""
    (tmp_path / "small.tsv").write_text("".join(f"e{i}\tnext\te{i + 1}\n" for i in range(60)))
    code = (
        "import sys, dualkg as kg; g = kg.load_graph(sys.argv[1]);"
        "kg.train(kg.ComplEx(g.shape, dim=2), g, epochs=1, regularizer=kg.DURA(0.1));"
        "print('torch._dynamo' in sys.modules)"
    )
    assert run_python(code, tmp_path / "small.tsv").out.strip() == "False"
