"""Scores of queries in blocks."""

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.inference.scoring import score_blocks

THREE_QUERIES = 3 * 30  # scores of a block of three queries for thirty entities


@pytest.mark.parametrize("reciprocal", [True, False])
def test_blocks_of_both_directions_are_scored_like_single_queries(small_graph, reciprocal):
    model = kg.ComplEx(small_graph.shape, dim=4, reciprocal=reciprocal, init_scale=0.5).eval()
    entities = np.arange(10)
    # From 4 on, a relation id stands for the heads of relation − 4.
    relations = np.array([0, 5, 1, 2, 3, 4, 6, 7, 0, 1])
    blocks = list(score_blocks(model, entities, relations, max_scores=THREE_QUERIES))
    assert [(block.start, block.stop) for block, _ in blocks] == [(0, 3), (3, 6), (6, 9), (9, 10)]

    scores = torch.cat([block_scores for _, block_scores in blocks])
    for entity, relation, query_scores in zip(entities, relations, scores, strict=True):
        given = torch.tensor([entity])
        relation_id = torch.tensor([relation % 4])
        with torch.no_grad():
            if relation < 4:
                expected = model.predict_tails(given, relation_id)
            else:
                expected = model.predict_heads(relation_id, given)
        torch.testing.assert_close(query_scores, expected[0])
