import math

import pytest
import torch

import dualkg as kg
from dualkg.data.graph import GraphShape
from dualkg.errors import InvalidValue
from dualkg.losses.softmax import BoundOneVsAll, Dropout, Dropouts, frequency_weights
from dualkg.tables.scores import cross_entropy
from tests.conftest import graph_of
from tests.raising import refused


def test_frequency_weights_count_heads_and_tails_of_train_once():
    graph = graph_of([(0, 0, 1), (0, 0, 2), (1, 0, 0)], num_entities=4)
    weights = frequency_weights(
        graph.train, 4, 0.9
    )  # entity 0 stands 3 times, 1 twice, 2 once, 3 never
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.9 * 2 / 3 + 0.1, 0.9 / 3 + 0.1, 0.1]))


@pytest.mark.parametrize(
    ("share", "expected"),
    [(-0.1, "greater than or equal to 0"), (1.5, "less than or equal to 1")],
)
def test_a_frequency_weight_outside_0_and_1_is_refused(share, expected):
    with refused(InvalidValue, setting="loss.frequency_weight", expected=expected, found=share):
        kg.OneVsAll(frequency_weight=share)


def test_weighted_cross_entropy_divides_by_the_summed_weights():
    scores = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]])
    targets = torch.tensor([0, 1])
    weights = torch.tensor([1.0, 0.25])
    # −log(1/4) with weight 1, −log(1/2) with weight 1/4
    expected = (math.log(4) + 0.25 * math.log(2)) / 1.25
    assert cross_entropy(scores, targets, weights).item() == pytest.approx(expected)


def test_without_reciprocals_heads_are_predicted_too():
    model = kg.ComplEx(kg.GraphShape(5, 2), dim=3, reciprocal=False, init_scale=1.0)
    batch = torch.tensor([[0, 1, 2], [3, 0, 1]])
    h, r, t = batch.T
    tails = torch.nn.functional.cross_entropy(model.score_tails(h, r), t)
    heads = torch.nn.functional.cross_entropy(model.score_heads(r, t), h)
    torch.testing.assert_close(BoundOneVsAll()(model, model.factors(h, r, t)), (tails + heads) / 2)


@pytest.mark.parametrize("dual", [None, "tail", "head"])
def test_relation_prediction_is_over_all_relation_ids(dual):
    model = kg.RESCAL(kg.GraphShape(5, 2), dim=3, init_scale=1.0)
    scored = kg.Dual(model, dual) if dual else model
    batch = torch.tensor([[0, 1, 2], [3, 3, 1]])
    h, r, t = batch.T
    unbatched = torch.stack([scored.score(h, torch.full_like(h, id), t) for id in range(4)], dim=1)
    extra = torch.nn.functional.cross_entropy(unbatched, r)
    plain = BoundOneVsAll()(scored, scored.factors(h, r, t))
    torch.testing.assert_close(
        BoundOneVsAll(relation_weight=0.5)(scored, scored.factors(h, r, t)), plain + 0.5 * extra
    )


def test_a_dual_predicts_relations_with_the_norm_of_the_mapped_head():
    """Two relations with the same primal score but longer images must not score the same under the
    dual.
    """
    model = kg.DistMult(kg.GraphShape(2, 2), dim=2, reciprocal=False)
    model.load_state_dict(
        {
            "entities": torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
            "relations": torch.tensor([[1.0, 0.0], [1.0, 5.0]]),
        }
    )
    ids = torch.tensor([0]), torch.tensor([1])
    assert model.score_relations(*ids).tolist() == [[1.0, 1.0]]
    assert kg.Dual(model).score_relations(*ids).tolist() == [[0.0, -25.0]]


def test_a_negative_relation_weight_is_refused():
    with refused(
        InvalidValue,
        setting="loss.relation_weight",
        expected="greater than or equal to 0",
        found=-1,
    ):
        kg.OneVsAll(relation_weight=-1)


def test_dropout_sets_its_share_to_zero_and_preserves_the_mean():
    model = kg.CP(GraphShape(50, 3), dim=400)
    random = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, high, (300,), generator=random) for high in (50, 6, 50)]
    f = model.factors(*ids)
    mask = Dropout(0.25, seed=1).mask(f, f.mapped_head)
    assert mask.unique().tolist() == pytest.approx([0, 4 / 3])
    assert float((mask == 0).double().mean()) == pytest.approx(0.25, abs=0.005)
    assert float(mask.double().mean()) == pytest.approx(1, abs=0.01)
    of_rows = (mask == 0).double().mean(1)
    of_columns = (mask == 0).double().mean(0)
    assert of_rows.max() < 0.4  # four and a half deviations of 400, of 300 rows
    assert of_columns.max() < 0.4


def test_dropout_masks_differ_by_seed_position_triple_and_side():
    model = kg.CP(GraphShape(50, 3), dim=64)
    f = model.factors(
        torch.tensor([1, 1, 2, 1]), torch.tensor([0, 0, 0, 0]), torch.tensor([5, 5, 5, 6])
    )
    like = f.mapped_head
    mask = Dropout(0.5).mask(f, like)
    assert torch.equal(mask, Dropout(0.5).mask(f, like))
    rows = [tuple(row.tolist()) for row in mask]
    assert len(set(rows)) == 4
    for other in (Dropout(0.5, seed=1).mask(f, like), Dropout(0.5).mask(f, like, backward=True)):
        assert not torch.equal(mask, other)
    more = Dropout(0.5).mask(model.factors(f.heads[:2], f.relations[:2], f.tails[:2]), like[:2])
    assert torch.equal(more, mask[:2])  # whatever stands behind it in the batch


def test_dropped_coordinates_are_not_scored():
    """All but one of two coordinates dropped, by hand: scores are of the one that is left, twice as
    large.
    """
    model = kg.CP(GraphShape(3, 1), dim=2, init_scale=1.0)
    f = model.factors(torch.tensor([0]), torch.tensor([0]), torch.tensor([2]))
    dropouts = Dropouts(mapped=0.5)
    mask = dropouts.mapped.mask(f, f.mapped_head)
    by_hand = cross_entropy((f.mapped_head * mask) @ model.tail_table.T, f.tails)
    torch.testing.assert_close(BoundOneVsAll(dropouts=dropouts)(model, f), by_hand)
    assert Dropouts()(f) is f


@pytest.mark.parametrize("reciprocal", [True, False])
def test_head_dropout_is_applied_before_the_map(reciprocal):
    """By masks of their own: what is dropped of an image is not what was dropped of its head."""
    model = kg.RESCAL(GraphShape(5, 2), dim=64, reciprocal=reciprocal, init_scale=1.0).double()
    f = model.factors(torch.tensor([0, 3]), torch.tensor([0, 1]), torch.tensor([2, 4]))
    dropouts = Dropouts(mapped=0.25, given=0.5, seed=2)
    head = dropouts.given.mask(f, f.head)
    image = dropouts.mapped.mask(f, f.mapped_head)
    assert not torch.equal(head == 0, Dropouts(mapped=0.5, seed=2).mapped.mask(f, f.head) == 0)
    tails = (model.map_head(f.head * head, f.relations) * image) @ model.tail_table.T
    expected = cross_entropy(tails, f.tails)
    if not reciprocal:
        tail, back = (
            one.mask(f, f.tail, backward=True) for one in (dropouts.given, dropouts.mapped)
        )
        heads = (model.map_tail(f.tail * tail, f.relations) * back) @ model.head_table.T
        expected = (expected + cross_entropy(heads, f.heads)) / 2
    torch.testing.assert_close(BoundOneVsAll(dropouts=dropouts)(model, f), expected)


def test_answers_of_a_query_share_the_dropout_mask():
    model = kg.CP(GraphShape(5, 2), dim=16, init_scale=1.0)
    f = model.factors(torch.tensor([1, 1, 1]), torch.tensor([0, 0, 1]), torch.tensor([2, 3, 4]))
    dropped = Dropouts(mapped=0.5, given=0.5)(f, grouped_by_query=True)
    assert torch.equal(dropped.head[0], dropped.head[1])
    assert torch.equal(dropped.mapped_head[0], dropped.mapped_head[1])
    assert not torch.equal(dropped.head[0], dropped.head[2])


@pytest.mark.parametrize("key", ["dropout", "head_dropout"])
@pytest.mark.parametrize("loss", [kg.OneVsAll, kg.KvsAll])
def test_dropout_of_everything_is_refused(loss, key):
    with refused(InvalidValue, setting=f"loss.{key}", expected="less than 1", found=1.0):
        loss(**{key: 1.0})


def test_label_smoothing_by_hand():
    """Chances 1/4 and 3/4; of the answer, the first, a tenth is spread over both, so that it keeps
    0.95.
    """
    scores = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]])
    targets = torch.tensor([0, 1])
    first = 0.95 * math.log(4) + 0.05 * math.log(4 / 3)
    assert cross_entropy(scores, targets, smoothing=0.1).item() == pytest.approx(
        (first + math.log(2)) / 2
    )
    weights = torch.tensor([1.0, 0.25])  # of the answers; those of the others do not enter
    expected = (first + 0.25 * math.log(2)) / 1.25
    assert cross_entropy(scores, targets, weights, smoothing=0.1).item() == pytest.approx(expected)


@pytest.mark.parametrize("reciprocal", [True, False])
def test_labels_of_entities_are_smoothed_and_those_of_relations_are_not(reciprocal):
    model = kg.ComplEx(kg.GraphShape(5, 2), dim=3, reciprocal=reciprocal, init_scale=1.0)
    h, r, t = torch.tensor([[0, 1, 2], [3, 0, 1]]).T
    smoothed = torch.nn.functional.cross_entropy(model.score_tails(h, r), t, label_smoothing=0.3)
    if not reciprocal:
        heads = torch.nn.functional.cross_entropy(model.score_heads(r, t), h, label_smoothing=0.3)
        smoothed = (smoothed + heads) / 2
    expected = smoothed + 0.5 * torch.nn.functional.cross_entropy(model.score_relations(h, t), r)
    loss = BoundOneVsAll(relation_weight=0.5, label_smoothing=0.3)
    torch.testing.assert_close(loss(model, model.factors(h, r, t)), expected)


@pytest.mark.parametrize(
    ("share", "expected"), [(-0.1, "greater than or equal to 0"), (1.0, "less than 1")]
)
def test_label_smoothing_of_1_or_below_0_is_refused(share, expected):
    with refused(InvalidValue, setting="loss.label_smoothing", expected=expected, found=share):
        kg.OneVsAll(label_smoothing=share)


@pytest.mark.parametrize("reciprocal", [True, False])
def test_other_known_answers_are_no_candidates(reciprocal):
    """Entity 0 has the tails 1 and 2; entity 2 has the heads 0 and 1."""
    graph = graph_of([(0, 0, 1), (0, 0, 2), (1, 0, 2)], num_entities=4)
    model = kg.ComplEx(graph.shape, dim=3, reciprocal=reciprocal, init_scale=1.0)
    loss = kg.OneVsAll(exclude_known=True).bind(model, graph, batch_size=2, seed=0)
    head, relation, tail = torch.tensor([[0], [0], [2]])
    by_tail = model.score_tails(head, relation)[0]
    expected = by_tail[[0, 2, 3]].logsumexp(0) - by_tail[2]
    if not reciprocal:
        by_head = model.score_heads(relation, tail)[0]
        of_heads = by_head[[0, 2, 3]].logsumexp(0) - by_head[0]
        expected = (expected + of_heads) / 2
    torch.testing.assert_close(loss(model, model.factors(head, relation, tail)), expected)


def test_excluded_answers_cannot_be_smoothed_labels():
    with pytest.raises(kg.RequestError):
        kg.OneVsAll(exclude_known=True, label_smoothing=0.1)
    assert kg.OneVsAll(exclude_known=True).fast_step_obstacle == "loss.exclude_known"
