"""What `explain` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from dualkg.cli import options, show

if TYPE_CHECKING:
    from dualkg.answers.explanation import Explanation


def explain(
    run: options.RunPath,
    head: Annotated[str, typer.Option(help="The head's name.")],
    relation: Annotated[str, typer.Option(help="The relation's name.")],
    tail: Annotated[str, typer.Option(help="The tail's name.")],
    top: Annotated[int, typer.Option(min=1, help="How many reasons.")] = 5,
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Tell which training triples support an answer, and which entities alike have the same."""
    from dualkg.answers.explanation import explain as find_reasons

    options.set_threads(threads)
    loaded = options.load_on(run, device)
    model = loaded.model
    found = find_reasons(model, loaded.graph, (head, relation, tail), k=top, recipe=loaded.recipe)
    if as_json:
        show.print_json(found.as_dict())
    else:
        print_explanation(found)


def print_explanation(found: Explanation) -> None:
    first, *others = found.sentences()
    show.out.print(Text(first, style="bold"), soft_wrap=True)  # no markup: a name may hold anything
    for sentence in others:
        show.out.print(Text(sentence), soft_wrap=True)
