"""The docstrings of public names: each has an example, and the examples do what they say."""

import doctest
import inspect

import pytest
import torch

import dualkg as kg

FLAGS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
# Instances, whose class has the docstring. Their pages list what is registered.
REGISTRIES = {"LOSSES", "MODELS", "REGULARIZERS"}
NAMES = sorted(set(kg.__all__) - REGISTRIES)


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """What docs/api/index.md says that the examples have."""
    folder = tmp_path_factory.mktemp("examples")
    graph = kg.load_graph("world")
    run = kg.train(
        kg.ComplEx(graph.shape, dim=8), graph, epochs=1, batch_size=1000, out=folder / "runs/world"
    )
    return folder, {"kg": kg, "torch": torch, "graph": graph, "run": run}


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_public_name_runs(name, names, monkeypatch):
    folder, given = names
    text = inspect.getdoc(getattr(kg, name))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(kg, "train", in_little_work(kg.train))
    example = doctest.DocTestParser().get_doctest(text, dict(given), name, name, 0)
    assert example.examples, f"{name} has no example"
    report = []
    doctest.DocTestRunner(optionflags=FLAGS).run(example, out=report.append)
    assert not report, "".join(report)


def in_little_work(train):
    """`kg.train` with few steps, and with a small model where only its name is given."""

    def little(model, graph, **choices):
        if isinstance(model, str):
            model = kg.MODELS[model](graph.shape, dim=8)
        return train(model, graph, **{"batch_size": 1000, **choices})

    return little


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isfunction(getattr(kg, name))])
def test_a_documented_argument_is_one_of_the_function(name):
    function = getattr(kg, name)
    text = inspect.getdoc(function)
    section = text.partition("Args:\n")[2].partition("\n\n")[0]
    listed = [line.strip().partition(":")[0] for line in section.splitlines() if line[4] != " "]
    assert set(listed) <= set(inspect.signature(function).parameters)
