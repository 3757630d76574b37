"""What the reader of a list of facts has filtered it by: facets, and the switch for unusual types.

Scripts filter the rows of pages, and files of the same rows are filtered here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Query
from pydantic import Field

from dualkg.serve.service import RequestContext
from dualkg.serve.templating import facet_values

MAX_CHOSEN = 100  # values of all facets
MAX_VALUE_LENGTH = 300  # characters, of a facet and its value
UNDECIDED = "undecided"
Value = Annotated[str, Field(max_length=MAX_VALUE_LENGTH)]


@dataclass(frozen=True)
class ListFilter:
    """The chosen values of each facet, and whether facts of an unusual type are left out."""

    chosen: Mapping[str, set[str]]
    hide_unusual: bool = False

    def admits(self, context: RequestContext, fact: Any, *, decided_by: str | None = None) -> bool:
        """Whether a fact has one of the chosen values of each facet."""
        if self.hide_unusual and is_unusual(fact):
            return False
        if not self.chosen:
            return True
        values = facet_values(context, fact, decided_by=decided_by)
        values["Verdict"] = [fact.verdict or UNDECIDED]
        return all(chosen & set(values.get(facet, ())) for facet, chosen in self.chosen.items())


NO_FILTER = ListFilter({})


def is_unusual(fact: Any) -> bool:
    """Whether the head or the tail of a new fact is of an unusual type."""
    return "unusual" in (getattr(fact, "head_type", None), getattr(fact, "tail_type", None))


async def list_filter(
    facet: Annotated[
        list[Value], Query(max_length=MAX_CHOSEN, description="FACET:VALUE; repeatable.")
    ] = [],  # noqa: B006
    hide_unusual: Annotated[
        bool, Query(description="Leave out facts of an unusual type from the list.")
    ] = False,
) -> ListFilter:
    chosen: dict[str, set[str]] = {}
    for text in facet:
        name, _, value = text.partition(":")
        chosen.setdefault(name, set()).add(value)
    return ListFilter(chosen, hide_unusual)


Filtered = Annotated[ListFilter, Depends(list_filter)]
