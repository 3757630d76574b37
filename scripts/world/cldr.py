"""Languages, scripts, currencies, regions, weeks and time zones from the Unicode CLDR.

Names and time zones come with the package babel; the tables by territory are the CLDR's own
`supplementalData.xml`, which babel reads but does not keep and the package language_data carries.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from xml.etree import ElementTree

from babel import Locale
from babel.core import get_global

from world.names import Entity, Fact

ENGLISH = Locale("en")
OFFICIAL = {"official", "de_facto_official"}
SMALLEST_SHARE_OF_SPEAKERS = 1.0
# CLDR's names for these only make sense next to the word Chinese.
SCRIPTS = {"Hans": "Simplified Chinese", "Hant": "Traditional Chinese"}
WEEKDAYS = {"mon": "Monday", "fri": "Friday", "sat": "Saturday", "sun": "Sunday"}
# The continents of GeoNames, so that both sources speak of one Africa. The Americas are two of
# them.
WORLD = "001"
AMERICAS = "019"
EUROPEAN_UNION = "EU"
CONTINENTS = ("002", "003", "005", "009", "142", "150")


def facts(countries: Mapping[str, Entity]) -> Iterator[Fact]:
    """Every fact about the given countries by code, and about their languages and currencies."""
    text = (files("language_data") / "data" / "supplementalData.xml").read_text(encoding="utf-8")
    tables = ElementTree.fromstring(text)
    yield from _languages(countries)
    yield from _scripts(tables)
    yield from _regions(tables, countries)
    yield from _weeks(tables, countries)
    yield from _currencies(tables, countries)
    zones = get_global("territory_zones")
    yield from time_zones(
        (country, zone) for code, country in countries.items() for zone in zones.get(code, ())
    )


def time_zones(places: Iterable[tuple[Entity, str]]) -> Iterator[Fact]:
    """The zone of each place, 'Europe/Paris' as 'Central European Time'; a few have no such
    name.
    """
    canonical: Mapping[str, str] = get_global("zone_aliases")
    # CLDR files some zones under their old names: Kolkata's under Calcutta.
    meta_zones = {
        canonical.get(zone, zone): meta for zone, meta in get_global("meta_zones").items()
    }
    for place, zone in places:
        names = ENGLISH.meta_zones.get(meta_zones.get(canonical.get(zone, zone)), {}).get(
            "long", {}
        )
        name = names.get("generic") or names.get("standard")
        if name:
            yield place, "time_zone", Entity("time zone", name)


def _language(code: str) -> Entity | None:
    """The language of a code such as 'sr' or 'sr_Latn': the script makes no other language of
    it.
    """
    name = ENGLISH.languages.get(code.split("_")[0])
    return Entity("language", name) if name else None


def _languages(countries: Mapping[str, Entity]) -> Iterator[Fact]:
    for code, country in countries.items():
        for language_code, about in get_global("territory_languages").get(code, {}).items():
            language = _language(language_code)
            is_official = about["official_status"] in OFFICIAL
            if language and is_official:
                yield country, "official_language", language
            if language and (
                is_official or about["population_percent"] >= SMALLEST_SHARE_OF_SPEAKERS
            ):
                yield country, "spoken_language", language


def _scripts(tables: ElementTree.Element) -> Iterator[Fact]:
    for row in tables.iterfind("languageData/language[@scripts]"):
        language = _language(row.attrib["type"])
        if language and row.get("alt") != "secondary":
            for code in row.attrib["scripts"].split():
                name = SCRIPTS.get(code) or ENGLISH.scripts.get(code)
                if name:
                    yield language, "written_in", Entity("script", f"{name} script")


def _regions(tables: ElementTree.Element, countries: Mapping[str, Entity]) -> Iterator[Fact]:
    """Country in region and region in larger region; a country's continent is left to GeoNames."""
    for row in tables.iterfind("territoryContainment/group"):
        container = row.attrib["type"]
        is_region = container.isdigit() and container not in (WORLD, AMERICAS)
        if row.get("status") == "deprecated" or not (is_region or container == EUROPEAN_UNION):
            continue
        region = Entity("region", ENGLISH.territories[container])
        for code in row.attrib["contains"].split():
            if code in countries and container not in CONTINENTS:
                yield countries[code], "part_of", region
            elif code.isdigit():
                yield Entity("region", ENGLISH.territories[code]), "part_of", region


def _weeks(tables: ElementTree.Element, countries: Mapping[str, Entity]) -> Iterator[Fact]:
    for row in tables.iterfind("weekData/firstDay"):
        if row.get("alt") != "variant":
            weekday = Entity("weekday", WEEKDAYS[row.attrib["day"]])
            for code in row.attrib["territories"].split():
                if code in countries:
                    yield countries[code], "first_day_of_week", weekday


def _currencies(tables: ElementTree.Element, countries: Mapping[str, Entity]) -> Iterator[Fact]:
    """Currencies in use; former ones that more than one country has used; and what kind of money
    each is.
    """
    now: set[tuple[str, str]] = set()
    before: set[tuple[str, str]] = set()
    for region in tables.iterfind("currencyData/region"):
        for row in region.iterfind("currency"):
            if region.attrib["iso3166"] in countries and row.get("tender") != "false":
                (before if "to" in row.attrib else now).add(
                    (region.attrib["iso3166"], row.attrib["iso4217"])
                )
    users = Counter(currency for _, currency in now | before)
    before = {(code, currency) for code, currency in before - now if users[currency] > 1}
    for relation, pairs in (("currency", now), ("former_currency", before)):
        yield from (
            (countries[code], relation, _currency(currency)) for code, currency in sorted(pairs)
        )
    yield from _kinds_of_money(_currency(currency) for _, currency in sorted(now | before))


def _currency(code: str) -> Entity:
    return Entity("currency", ENGLISH.currencies[code])


def _kinds_of_money(currencies: Iterable[Entity]) -> Iterator[Fact]:
    """The last word of a currency's name, where others share it: the US Dollar is a dollar."""
    kinds = {
        currency: re.sub(r" \(.*\)$", "", currency.name).split()[-1].lower()
        for currency in currencies
    }
    shared = Counter(kinds.values())
    for currency, kind in kinds.items():
        if shared[kind] > 1:
            yield currency, "kind_of", Entity("money", kind)
