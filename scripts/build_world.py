"""Build the bundled graph `world`: python scripts/build_world.py

Needs the extra `world`. The same versions of its packages give the same files, byte for byte.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from dualkg.data.graph import SPLITS, Triples
from dualkg.data.splits import split_triples
from world import cldr, public_holidays
from world.geonames import GeoNames
from world.names import Entity, Fact, unique_names
from world.source_page import Triple, source_page

FOLDER = Path(__file__).parent.parent / "src" / "dualkg" / "data" / "world"
SHARES = (0.85, 0.075, 0.075)
SEED = 0
# Entities of these kinds with a single fact are dropped as noise; other kinds, such as currencies,
# are not.
MUST_RECUR = {"language", "time zone"}


def main() -> None:
    facts = drop_loose_ends(gather())
    triples = name_facts(facts)
    splits = split(triples)
    FOLDER.mkdir(exist_ok=True)
    for name, rows in splits.items():
        text = "".join("\t".join(row) + "\n" for row in rows)
        (FOLDER / f"{name}.tsv").write_text(text, encoding="utf-8", newline="\n")
    (FOLDER / "SOURCE.md").write_text(source_page(splits), encoding="utf-8", newline="\n")
    print(", ".join(f"{len(rows):,} {name}" for name, rows in splits.items()))


def gather() -> set[Fact]:
    """The facts of all sources, each once."""
    geonames = GeoNames(cldr.ENGLISH.territories)
    return {
        *geonames.facts(),
        *cldr.facts(geonames.countries),
        *cldr.time_zones((city.entity, city.time_zone) for city in geonames.cities),
        *public_holidays.facts(geonames.countries),
    }


def drop_loose_ends(facts: set[Fact]) -> set[Fact]:
    """Drop facts about entities that occur nowhere else, until none is left."""
    while True:
        uses = Counter(entity for head, _, tail in facts for entity in (head, tail))
        remaining = set()
        for head, relation, tail in facts:
            if not _is_loose(head, uses) and not _is_loose(tail, uses):
                remaining.add((head, relation, tail))
        if len(remaining) == len(facts):
            return remaining
        facts = remaining


def _is_loose(entity: Entity, uses: Counter[Entity]) -> bool:
    return entity.kind in MUST_RECUR and uses[entity] == 1


def name_facts(facts: set[Fact]) -> list[Triple]:
    names = unique_names(entity for head, _, tail in facts for entity in (head, tail))
    return sorted((names[head], relation, names[tail]) for head, relation, tail in facts)


def split(triples: list[Triple]) -> dict[str, list[Triple]]:
    """Train, valid and test by name, sorted."""
    entities = sorted({name for head, _, tail in triples for name in (head, tail)})
    relations = sorted({relation for _, relation, _ in triples})
    entity_ids = {name: number for number, name in enumerate(entities)}
    relation_ids = {name: number for number, name in enumerate(relations)}
    rows = [
        (entity_ids[head], relation_ids[relation], entity_ids[tail])
        for head, relation, tail in triples
    ]
    ids: Triples = np.array(rows, dtype=np.int32)
    splits = {}
    for name, part in zip(SPLITS, split_triples(ids, SHARES, seed=SEED), strict=True):
        splits[name] = [
            (entities[head], relations[relation], entities[tail]) for head, relation, tail in part
        ]
    return splits


if __name__ == "__main__":
    main()
