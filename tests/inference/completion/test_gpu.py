"""On a GPU the list is that of every triple."""

import pytest

from dualkg.inference import completion
from dualkg.inference.completion import complete
from tests.inference.completion.brute_force import (
    MODELS,
    complete_brute_force,
    random_calibration,
    random_graph,
)
from tests.inference.completion.test_completion import assert_same

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("scores_at_once", [1, 30, 10_000])
@pytest.mark.parametrize("name", MODELS)
def test_the_list_is_that_of_every_triple(name, scores_at_once, monkeypatch):
    monkeypatch.setitem(completion.MAX_SCORES, "cuda", scores_at_once)
    graph = random_graph(0)
    calibration = random_calibration(0)
    model = MODELS[name](graph.shape)
    for top in (1, 7, 10_000):
        choices = {"top": top, "calibration": calibration}
        expected = complete_brute_force(model.cpu(), graph, **choices)
        assert_same(complete(model.cuda(), graph, **choices), expected)
