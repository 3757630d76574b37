"""Public holidays from the package holidays."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import date

import holidays

from world.names import Entity, Fact

# A holiday in each of these years is annual, not a coronation, an election or a day of mourning.
YEARS = (2023, 2024, 2025)
FEWEST_COUNTRIES = 4
NO_FEAST = re.compile(r"day off|public holiday|substitute|bridge|bank holiday|^special", re.I)
SAME = {
    "Catholic Christmas Day": "Christmas Day",
    "Coptic Christmas Day": "Orthodox Christmas",
    "Day After Christmas": "Boxing Day",
    "Easter": "Easter Sunday",
    "Catholic Easter": "Easter Sunday",
    "Catholic Easter Sunday": "Easter Sunday",
    "Easter Saturday": "Holy Saturday",
    "Heroes' Day": "National Heroes' Day",
    "Islamic New Year Day": "Islamic New Year",
    "Orthodox Christmas Day": "Orthodox Christmas",
    "Orthodox Easter Sunday": "Orthodox Easter",
    "National Heroes Day": "National Heroes' Day",
    "National Independence Day": "Independence Day",
    "Spring Festival": "Chinese New Year",
    "Whit Monday": "Pentecost Monday",
    "Whit Sunday": "Pentecost",
}
ON_THEIR_DAY = {
    (5, 1): ("labo|worker|may day", "International Workers' Day"),
    (3, 8): ("women", "International Women's Day"),
}


def facts(countries: Mapping[str, Entity]) -> Iterator[Fact]:
    """Which country celebrates which holiday, for holidays that several countries share."""
    celebrating: dict[str, list[Entity]] = defaultdict(list)
    supported = holidays.list_supported_countries(include_aliases=False)
    for code, country in countries.items():
        if code in supported:
            for name in _yearly_holidays(code):
                celebrating[name].append(country)
    for name, those in sorted(celebrating.items()):
        if len(those) >= FEWEST_COUNTRIES:
            yield from ((country, "celebrates", Entity("holiday", name)) for country in those)


def _yearly_holidays(code: str) -> set[str]:
    names_by_year = [_names(code, year) for year in YEARS]
    return set.intersection(*names_by_year)


def _names(code: str, year: int) -> set[str]:
    languages = holidays.country_holidays(code).supported_languages
    # American English first: most calendars have it, and its spellings then agree.
    english = max(
        (name for name in languages if name.startswith("en")), key="en_US".__eq__, default=None
    )
    if languages and not english:
        return set()
    calendar = holidays.country_holidays(code, years=year, language=english, observed=False)
    plain_names = set()
    for day, names in calendar.items():
        for name in names.split("; "):
            if not NO_FEAST.search(name):
                plain_names.add(_plain_name(name, day))
    return plain_names


def _plain_name(name: str, day: date) -> str:
    """One spelling for one feast: 'Eid al-Fitr Holiday (estimated)' is Eid al-Fitr."""
    name = re.sub(r" \((estimated|observed)[^)]*\)| Holidays?$", "", name).strip()
    name = re.sub(r" Holidays?$", "", name)
    pattern, shared = ON_THEIR_DAY.get((day.month, day.day), ("$^", ""))
    if re.search(pattern, name, re.I):
        return shared
    return SAME.get(name, name)
