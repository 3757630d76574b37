"""Types of entities from a relation or a file."""

import pytest

from dualkg.data.entity_types import EntityTypes
from dualkg.errors import DataError, UnknownName
from tests.conftest import graph_of
from tests.raising import refused

KIND, NEAR = range(2)


@pytest.fixture(scope="module")
def graph():
    return graph_of([(0, KIND, 3), (1, KIND, 3), (1, KIND, 4), (2, NEAR, 0)], num_entities=5)


def pairs(types):
    return [
        (entity, types.names[type])
        for entity, type in zip(types.entities.tolist(), types.types.tolist(), strict=True)
    ]


def test_types_are_the_tails_of_a_relation(graph):
    types = EntityTypes.of_relation(graph, "r0")
    assert pairs(types) == [(0, "e3"), (1, "e3"), (1, "e4")]
    assert types.num_entities == 2
    with refused(UnknownName, name="r7"):
        EntityTypes.of_relation(graph, "r7")


def test_types_are_read_from_a_file(graph, tmp_path):
    path = tmp_path / "types.tsv"
    path.write_text("e2\tcity\ne0\tstate\nelsewhere\tcity\ne2\tport\ne2\tcity\n", encoding="utf-8")
    types = EntityTypes.read(path, graph)
    assert pairs(types) == [(0, "state"), (2, "city"), (2, "port")]
    restored = EntityTypes.from_dict(types.as_dict(), 5)
    assert (pairs(restored), restored.source) == (pairs(types), "types.tsv")


def test_a_file_without_entities_of_the_graph_is_refused(graph, tmp_path):
    path = tmp_path / "types.tsv"
    path.write_text("elsewhere\tcity\n", encoding="utf-8")
    with pytest.raises(DataError):
        EntityTypes.read(path, graph)


@pytest.mark.parametrize("change", [{"entities": [0, 9]}, {"types": [0, 5]}, {"types": [0]}])
def test_saved_types_that_do_not_fit_are_refused(change):
    saved = {"source": "file", "names": ["city"], "entities": [0, 1], "types": [0, 0], **change}
    with pytest.raises(ValueError, match="its types are not"):
        EntityTypes.from_dict(saved, 5)
