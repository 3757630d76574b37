"""The reference step: losses of a user's own that return no scalar with a gradient."""

import re

import pytest
import torch

import dualkg as kg


def own_loss(function):
    """A loss whose bound function is given."""

    class Own(kg.Loss):
        def bind(self, model, graph, *, batch_size, seed, grouped_by_query=False):
            return function

    return Own()


def per_triple(model, f):
    return -model.triple_scores(f)


def of_one_element(model, f):
    return per_triple(model, f).mean().reshape(1)


def without_gradient(model, f):
    return per_triple(model, f).detach().mean()


def a_number(model, f):
    return per_triple(model, f).mean().item()


def nothing(model, f):
    per_triple(model, f).mean()


def of_integers(model, f):
    return f.heads.sum()


def complex_scalar(model, f):
    return per_triple(model, f).mean().to(torch.complex64)


@pytest.mark.parametrize(
    ("function", "found", "advice"),
    [
        (per_triple, "a tensor of shape (50,)", "Return its mean: losses.mean()."),
        (of_one_element, "a tensor of shape (1,)", "Return its mean: losses.mean()."),
        (a_number, "an object of type float", "Compute it with operations of PyTorch."),
        (nothing, "None", "Its function may lack a return statement."),
        (complex_scalar, "a tensor of type complex64", "Return a real number."),
        (
            without_gradient,
            "a tensor without a gradient",
            "Compute it from the scores of the model, without detach, item, NumPy or "
            "torch.no_grad().",
        ),
        (
            of_integers,
            "a tensor without a gradient",
            "Compute it from the scores of the model, without detach, item, NumPy or "
            "torch.no_grad().",
        ),
    ],
)
@pytest.mark.parametrize("regularizer", [kg.NoRegularizer(), kg.DURA(0.1)])
def test_a_loss_that_cannot_be_minimized_is_refused(
    small_graph, function, found, advice, regularizer
):
    """Also where the regularizer has a gradient, or is a number that could be added."""
    model = kg.DistMult(small_graph.shape, dim=2)
    with pytest.raises(kg.RequestError, match=re.escape(f"{found} was returned. {advice}")):
        kg.train(
            model,
            small_graph,
            loss=own_loss(function),
            regularizer=regularizer,
            epochs=1,
            batch_size=50,
        )


def test_bind_returns_a_function(small_graph):
    for returned, found in ((None, "None"), (torch.zeros(()), "an object of type Tensor")):
        with pytest.raises(
            kg.RequestError, match=f"function of the model .*; {found} was returned"
        ):
            kg.train("DistMult", small_graph, loss=own_loss(returned), epochs=1)


def test_a_scalar_with_a_gradient_is_minimized(small_graph):
    loss = own_loss(lambda model, f: per_triple(model, f).square().mean())
    run = kg.train(kg.DistMult(small_graph.shape, dim=2), small_graph, loss=loss, epochs=1)
    assert len(run.history) == 1
