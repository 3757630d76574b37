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
    places = []
    for code, country in countries.items():
        places += [(country, zone) for zone in zones.get(code, ())]
    yield from time_zones(places)


def time_zones(places: Iterable[tuple[Entity, str]]) -> Iterator[Fact]:
    """The time zone of each place: 'Europe/Paris' is 'Central European Time'.

    A few zones have no such name, and are left out.
    """
    aliases: Mapping[str, str] = get_global("zone_aliases")
    # CLDR lists some zones under their old names: that of Kolkata under Calcutta.
    meta_zones = {aliases.get(zone, zone): meta for zone, meta in get_global("meta_zones").items()}
    for place, zone in places:
        meta_zone = meta_zones.get(aliases.get(zone, zone))
        names = ENGLISH.meta_zones.get(meta_zone, {}).get("long", {})
        name = names.get("generic") or names.get("standard")
        if name:
            yield place, "time_zone", Entity("time zone", name)


def _language(code: str) -> Entity | None:
    """The language of a code such as 'sr' or 'sr_Latn', which differ only in the script."""
    name = ENGLISH.languages.get(code.split("_")[0])
    return Entity("language", name) if name else None


def _languages(countries: Mapping[str, Entity]) -> Iterator[Fact]:
    for code, country in countries.items():
        for language_code, about in get_global("territory_languages").get(code, {}).items():
            language = _language(language_code)
            if language is None:
                continue
            is_official = about["official_status"] in OFFICIAL
            is_spoken = about["population_percent"] >= SMALLEST_SHARE_OF_SPEAKERS
            if is_official:
                yield country, "official_language", language
            if is_official or is_spoken:
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
    """Currencies in use, former ones of several countries, and the kind of money of each."""
    current: set[tuple[str, str]] = set()
    former: set[tuple[str, str]] = set()
    for region in tables.iterfind("currencyData/region"):
        code = region.attrib["iso3166"]
        if code not in countries:
            continue
        for row in region.iterfind("currency"):
            if row.get("tender") == "false":
                continue
            is_former = "to" in row.attrib
            pairs = former if is_former else current
            pairs.add((code, row.attrib["iso4217"]))

    users = Counter(currency for _, currency in current | former)
    former = {(code, currency) for code, currency in former - current if users[currency] > 1}
    for code, currency in sorted(current):
        yield countries[code], "currency", _currency(currency)
    for code, currency in sorted(former):
        yield countries[code], "former_currency", _currency(currency)
    yield from _kinds_of_money(_currency(currency) for _, currency in sorted(current | former))


def _currency(code: str) -> Entity:
    return Entity("currency", ENGLISH.currencies[code])


def _kinds_of_money(currencies: Iterable[Entity]) -> Iterator[Fact]:
    """The last word of a currency's name, where others share it: the US Dollar is a dollar."""
    kinds = {}
    for currency in currencies:
        name = re.sub(r" \(.*\)$", "", currency.name)
        kinds[currency] = name.split()[-1].lower()
    uses = Counter(kinds.values())
    for currency, kind in kinds.items():
        if uses[kind] > 1:
            yield currency, "kind_of", Entity("money", kind)
