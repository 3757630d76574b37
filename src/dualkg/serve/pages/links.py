"""Addresses of pages."""

from __future__ import annotations

from urllib.parse import quote, urlencode

from dualkg.serve.pages.markup import LONGEST_SHOWN, Attribute, Markup, shortened, shown, tag
from dualkg.serve.routes.choices import Asked
from dualkg.serve.shapes.things import Thing


def address(path: str, whom: Asked, **choices: str | int | float | None) -> str:
    """A page with some choices; the run is named where it is not the one that is asked anyway."""
    given = {key: value for key, value in choices.items() if value is not None}
    if whom.run.name != whom.service.runs.names[0]:
        given["run"] = whom.run.name
    return f"{path}?{urlencode(given)}" if given else path


def entity_address(name: str, whom: Asked) -> str:
    """`/entity/NAME`; names that an address would change or mistake are asked for as `/entity?name=NAME`.

    Browsers take `.` and `..` for folders, and what ends in .json is another page.
    """
    if name in ("", ".", "..") or name.endswith(".json"):
        return address("/entity", whom, name=name)
    return address(f"/entity/{quote(name, safe='')}", whom)


def entity_link(entity: Thing, whom: Asked, **attributes: Attribute) -> Markup:
    """An entity by its label, as a link to its page."""
    whole = shown(entity.label) if len(entity.label) > LONGEST_SHOWN else None
    attributes = {"class_": "name", "dir": "auto", "title": whole, **attributes}
    return tag("a", shortened(entity.label), href=entity_address(entity.name, whom), **attributes)


def said(thing: Thing) -> Markup:
    """A label as text of its own direction, without a link."""
    return tag("bdi", shortened(thing.label), class_="name")


def relation_said(relation: Thing) -> Markup:
    """A relation as people say it: `spoken_language` is spoken language."""
    return tag("bdi", spoken(relation.label), class_="relation")


def spoken(label: str) -> str:
    return shortened(label.strip("_").replace("_", " ") or label)
