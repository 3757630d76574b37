"""What recipes, models, losses, regularizers and trainings refuse: the class and the sentence."""

import dataclasses
import re
import tomllib

import pytest
import torch

import dualkg as kg
from dualkg.errors import InvalidValue, UnknownName
from dualkg.training.recipe import Recipe, load_recipe, parse_changes, recipe_from

SHAPE = kg.GraphShape(3, 2)


class Local(kg.Regularizer):
    """A class that no other process can import, because of its name."""

    __qualname__ = "made.<locals>.Local"

    def per_triple(self, f):
        return f.head.square().sum(-1)


def built(**changes) -> object:
    recipe = Recipe().with_changes(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    return recipe.model.build(SHAPE, seed=0), recipe.regularizer.build()


RECIPES = [
    ("[training]\nepoch = 5", "training.epoch is not a setting of recipes. Did you mean 'epochs'?"),
    ("[trainning]\nepochs = 5", "Did you mean 'training'?"),
    ("[training]\nzzz = 5", "There are: epochs, batch_size"),
    ("[training]\nepochs = 'ten'", "training.epochs should be a valid integer"),
    ("[training]\nepochs = 0", "should be greater than or equal to 1; 0 was given"),
    ("[optimizer]\nschedule = 'step'", "'constant', 'linear' or 'cosine'"),
    ("[optimizer]\nname = 'Adam'\nsums = 'rows'", "optimizer.sums is a setting of Adagrad"),
    ("[loss]\nfrequency_weight = 2", "less than or equal to 1"),
    ("[loss]\nname = 'sampled'", "Did you mean 'SampledSoftmax'"),
    ("[loss]\npower = 1", "loss.power is not a setting of OneVsAll"),
    (
        "[loss]\nmargin = 9",
        "margin is a setting of NegativeSampling and MarginRanking",
    ),
    (
        "[loss]\nname = 'MarginRanking'\nsampler = 'in-batch'\nnum_negatives = 9",
        "loss.num_negatives has no effect",
    ),
    ("[loss]\nname = 'MarginRanking'\ncorruption = 'both'", "only tails are corrupted"),
    (
        "[loss]\nname = 'MarginRanking'\n[training]\nbatch_size = 1",
        "training.batch_size should be at least 2",
    ),
    ("[loss]\nname = 'KvsAll'\n[model]\nreciprocal = false", "model.reciprocal should be true"),
    ("[loss]\nname = 'KvsAll'\n[training]\norder = 'queries'", "leave training.order out"),
    (
        "[loss]\nname = 'KvsAll'\n[regularizer]\nname = 'DURA'\nweight = 0.1",
        "regularizer.name should be 'none'",
    ),
    ("[validation]\npatience = 3", "every should be at least 1"),
    ("[validation]\nfinal = 'sample'", "queries should be its size"),
    (
        "[optimizer]\naverage_from = 0.5\n[validation]\nevery = 1\nkeep = 'best'",
        "the run keeps the mean of weights",
    ),
]


@pytest.mark.parametrize(("toml", "sentence"), RECIPES)
def test_wrong_recipes(toml, sentence):
    with pytest.raises(kg.RequestError, match=f"recipe.toml: .*{re.escape(sentence)}"):
        recipe_from(tomllib.loads(toml), source="recipe.toml")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("[training\nepochs = 5", "is not TOML"), (None, "cannot be read: No such file")],
)
def test_files_that_are_no_recipes(tmp_path, text, sentence):
    path = tmp_path / "recipe.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(kg.RequestError, match=sentence):
        load_recipe(path)


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda: load_recipe("umls/complex-dur"), kg.RequestError, "Did you mean 'umls/complex-"),
        (lambda: parse_changes(["epochs=5"]), kg.RequestError, "Did you mean 'training.epochs=5'"),
        (lambda: parse_changes(["training.epochs"]), kg.RequestError, "section.key=value"),
        (lambda: built(training__epoch=5), kg.RequestError, "Did you mean 'epochs'"),
        (lambda: built(model__name="Complx"), UnknownName, "Did you mean 'ComplEx'"),
        (lambda: built(model__name="nowhere.at:all"), kg.RequestError, "No module named"),
        (
            lambda: built(model__name="dualkg.models:MODELS"),
            kg.RequestError,
            "should be a subclass",
        ),
        (
            lambda: built(model__options={"depth": 3}),
            kg.RequestError,
            "cannot be made from [model]",
        ),
        (lambda: built(regularizer__name="dur"), UnknownName, "Did you mean 'DURA'"),
        (lambda: built(regularizer__name="DURA"), kg.RequestError, "set `regularizer.weight`"),
        (
            lambda: built(regularizer__name="N3", regularizer__weight=1, regularizer__plain=1),
            kg.RequestError,
            "those are DURA's",
        ),
        (lambda: kg.ComplEx("WN18RR", dim=2), kg.RequestError, "kg.load_graph('WN18RR')"),
        (lambda: kg.ComplEx(3, dim=2), kg.RequestError, "<class 'int'> was given"),
        (lambda: kg.ComplEx(SHAPE, dim=10**12), kg.RequestError, "Choose a smaller `model.dim`"),
        (lambda: kg.Optimizer(lr=0.1), kg.RequestError, "Did you mean 'learning_rate'"),
        (lambda: kg.Validation(patience=2), kg.RequestError, "every should be at least 1"),
    ],
)
def test_wrong_names_and_values(call, kind, sentence):
    with pytest.raises(kind, match=re.escape(sentence)):
        call()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda graph, model: kg.train(graph, model), "The model comes first, then the graph"),
        (lambda graph, model: kg.train(model, graph, regularizer=0.05), "float 0.05 was given"),
        (lambda graph, model: kg.train(model, graph, loss=kg.OneVsAll), "the class OneVsAll"),
        (lambda graph, model: kg.train(model, graph, validation=True), "bool True was given"),
        (lambda graph, model: kg.train("ComplX", graph), "Did you mean 'ComplEx'"),
        (lambda graph, model: kg.train(model, graph, optimizer="adamw"), "Did you mean 'Adam'"),
        (lambda graph, model: kg.train(model, graph, epochs=0), "train: training.epochs should"),
        (lambda graph, model: kg.train(model, graph, seed=-1), "train: training.seed should be"),
        (lambda graph, model: kg.fit(graph, changes="x"), "`changes` should be a mapping"),
        (lambda graph, model: kg.fit(graph, model=model), "kg.train(model, graph) trains an"),
        (
            lambda graph, model: kg.train(model, dataclasses.replace(graph, train=graph.train[:0])),
            "has no training triples",
        ),
        (
            lambda graph, model: kg.train(
                model,
                dataclasses.replace(graph, valid=graph.valid[:0]),
                validation=kg.Validation(every=1),
            ),
            "`validation.every` should be 0",
        ),
        (
            lambda graph, model: kg.train(
                kg.HAKE(graph, dim=2), graph, loss=kg.OneVsAll(head_dropout=0.1)
            ),
            "Set `loss.head_dropout` to 0",
        ),
        (
            lambda graph, model: kg.train(model, graph, regularizer=Local(0.1), out="run"),
            "define it at the top level of a module",
        ),
    ],
)
def test_wrong_trainings(small_graph, call, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kg.RequestError, match=re.escape(sentence)):
        call(small_graph, kg.ComplEx(small_graph, dim=2))
    assert not (tmp_path / "run").exists()


def test_a_device_that_is_not_there(small_graph):
    with pytest.raises(InvalidValue, match="cpu, cuda or cuda:1"):
        kg.train("CP", small_graph, device="gpu9")
    if not torch.cuda.is_available():
        with pytest.raises(kg.RequestError, match="PyTorch finds no such GPU here"):
            kg.train("CP", small_graph, device="cuda")
