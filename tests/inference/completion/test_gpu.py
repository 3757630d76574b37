"""On a GPU the list is that of every triple."""

import pytest

from dualkg.inference.completion import CompletionSettings, complete
from tests.inference.completion.brute_force import (
    MODELS,
    complete_brute_force,
    random_calibration,
    random_graph,
)
from tests.inference.completion.test_completion import assert_same

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("max_scores", [1, 30, 10_000])
@pytest.mark.parametrize("name", MODELS)
def test_the_list_is_that_of_every_triple(name, max_scores):
    settings = CompletionSettings(max_scores=max_scores)
    graph = random_graph(0)
    model = MODELS[name](graph.shape)
    for top in (1, 7, 10_000):
        options = {"top": top, "calibration": random_calibration(0)}
        expected = complete_brute_force(model.cpu(), graph, **options)
        completion = complete(model.cuda(), graph, settings=settings, **options)
        assert_same(completion, expected)
