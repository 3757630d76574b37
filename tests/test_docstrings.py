"""The docstrings of public names: each has an example, and the examples do what they say."""

import doctest
import inspect
import re

import pytest
import torch

import dualkg as kg

FLAGS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
# Instances, whose class has the docstring. Their pages list what is registered.
REGISTRIES = {"LOSSES", "MODELS", "REGULARIZERS"}
NAMES = sorted(set(kg.__all__) - REGISTRIES)


def takes_arguments(public) -> bool:
    if not inspect.isclass(public):
        return True
    return not issubclass(public, BaseException) and bool(inspect.signature(public).parameters)


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


@pytest.mark.parametrize("name", [name for name in NAMES if takes_arguments(getattr(kg, name))])
def test_the_documented_arguments_are_those_of_the_signature(name):
    """Those of a class may be documented by a public class that it inherits them from."""
    public = getattr(kg, name)
    sources = public.__mro__ if inspect.isclass(public) else [public]
    documented: set[str] = set()
    for source in sources:
        if getattr(source, "__name__", None) in kg.__all__:
            documented |= documented_arguments(source)
    parameters = set(inspect.signature(public).parameters)
    assert parameters <= documented
    assert documented_arguments(public) <= parameters


def documented_arguments(public) -> set[str]:
    text = inspect.getdoc(public)
    section = re.search(r"^(?:Args|Attributes):\n((?: .*\n)+)", text, re.M)
    return set(re.findall(r"^    (\w+):", section[1], re.M)) if section else set()


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isfunction(getattr(kg, name))])
def test_a_function_says_what_it_returns(name):
    assert "Returns:\n" in inspect.getdoc(getattr(kg, name))
