"""Entities by kind, and one plain English name for each."""

import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

# If two entities have the same name, the one whose kind comes first here keeps it.
KINDS = (
    "country",
    "region",
    "capital",
    "city",
    "language",
    "script",
    "currency",
    "money",
    "time zone",
    "holiday",
    "weekday",
)


class Entity(NamedTuple):
    """An entity; `country` distinguishes cities of the same name."""

    kind: str
    name: str
    country: str = ""


Fact = tuple[Entity, str, Entity]


def fold(name: str) -> str:
    """The letters and digits of a name without accents or case: 'São Tomé' is 'saotome'."""
    return "".join(letter for letter in without_accents(name).casefold() if letter.isalnum())


def without_accents(name: str) -> str:
    letters = unicodedata.normalize("NFKD", name.translate(str.maketrans("łŁøØđĐı", "lLoOdDi")))
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


def easy_to_type(name: str) -> str:
    """Straight apostrophes and plain dashes, 'and' for '&': what a keyboard has a key for."""
    return name.translate(str.maketrans("’‘ʼʻ`–", "'''''-")).replace(" & ", " and ").strip()


def unique_names(entities: Iterable[Entity]) -> dict[Entity, str]:
    """Name each entity, adding '(city)', '(Venezuela)' and so on only where a name is ambiguous."""
    sharing: dict[str, list[Entity]] = defaultdict(list)
    for entity in sorted(set(entities)):
        sharing[without_accents(entity.name).casefold()].append(entity)
    names: dict[Entity, str] = {}
    for group in sharing.values():
        group.sort(key=lambda entity: KINDS.index(entity.kind))
        kinds = [entity.kind for entity in group]
        for entity in group:
            keeps_it = entity.kind == kinds[0] and kinds.count(entity.kind) == 1
            addition = "" if keeps_it else f" ({_what_tells_apart(entity, group)})"
            names[entity] = easy_to_type(entity.name) + addition
    if len(set(names.values())) < len(names):
        raise ValueError("Two entities came out with one name; unique_names needs another rule.")
    return names


def _what_tells_apart(entity: Entity, group: list[Entity]) -> str:
    if entity.kind not in ("capital", "city"):
        return entity.kind
    others_are_cities = any(other.kind in ("capital", "city") for other in group if other != entity)
    return entity.country if others_are_cities else "city"
