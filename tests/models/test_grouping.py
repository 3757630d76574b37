"""Products of a batch grouped by relation."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dualkg.models.matrix import RelationGroups, multiply_groups, multiply_padded


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_the_padded_product_equals_the_products_of_the_groups(relations):
    """And so are their gradients."""
    groups = RelationGroups(torch.tensor(relations))
    random = torch.Generator().manual_seed(len(relations))
    vectors = torch.randn(
        len(relations), 3, generator=random, dtype=torch.float64, requires_grad=True
    )
    matrices = torch.randn(
        len(groups.sizes), 3, 3, generator=random, dtype=torch.float64, requires_grad=True
    )
    upstream = torch.randn(vectors.shape, generator=random, dtype=torch.float64)
    found = []
    for form in (multiply_groups, multiply_padded):
        product = form(matrices, groups, vectors)
        found.append([product, *torch.autograd.grad(product, [vectors, matrices], upstream)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_padded_positions_by_hand():
    """Relations 5, 2, 5, 2, 2 make the groups of 2 and 5; padded to four, the second begins at
    4.
    """
    groups = RelationGroups(torch.tensor([5, 2, 5, 2, 2]))
    assert groups.sizes == [3, 2]
    assert groups.padded_positions(4).tolist() == [4, 0, 5, 1, 2]
