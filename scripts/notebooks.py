"""Make the notebooks of docs/tutorials/ from its pages, and run them.

python scripts/notebooks.py              # make all, and run those whose code has changed
python scripts/notebooks.py own-graph    # make and run one
python scripts/notebooks.py --check      # fail if the cells of a notebook are not those of its page
"""

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
BLOCK = re.compile(r"^```(\w+)((?: [\w-]+)*)\n(.*?)^```$", re.M | re.S)
SECONDS_OF_A_CELL = 900
# What commands print should not depend on the terminal of whoever runs this.
ENVIRONMENT = {"NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb", "PYTHONWARNINGS": "ignore"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="names of tutorials (default: all)")
    parser.add_argument("--check", action="store_true", help="write and run nothing")
    arguments = parser.parse_args()
    pages = [FOLDER / f"{name}.md" for name in arguments.names] or tutorials()
    if arguments.check:
        stale = [page.stem for page in pages if not is_current(page)]
        if stale:
            sys.exit(f"Out of date: {', '.join(stale)}. Run: python scripts/notebooks.py")
        return
    for page in pages:
        notebook = notebook_of(page)
        if arguments.names or not keep_outputs(notebook, page.with_suffix(".ipynb")):
            print(f"running {page.stem}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                execute(notebook, Path(folder))
        nbformat.write(notebook, page.with_suffix(".ipynb"))


def tutorials() -> list[Path]:
    return [page for page in sorted(FOLDER.glob("*.md")) if page.stem != "index"]


def notebook_of(page: Path) -> Any:
    """The notebook of a page: text, and a cell for each block of Python and of commands."""
    text = page.read_text(encoding="utf-8")
    cells = []
    position = 0
    for block in BLOCK.finditer(text):
        cell = cell_of(block)
        if cell is None:
            continue
        cells.append(new_markdown_cell(text[position : block.start()].strip()))
        cells.append(cell)
        position = block.end()
    cells.append(new_markdown_cell(text[position:].strip()))
    cells = [cell for cell in cells if cell["source"]]
    for number, cell in enumerate(cells):
        cell["id"] = f"{page.stem}-{number}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def cell_of(block: re.Match[str]) -> Any:
    """A cell of Python, or of commands; nothing for a block that is only shown."""
    language, options, text = block.groups()
    if "no-run" in options:
        return None
    if language == "python":
        return new_code_cell(text.rstrip())
    if language == "console":
        commands = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
        return new_code_cell("%%bash\n" + "\n".join(commands))
    return None


def is_current(page: Path) -> bool:
    saved = page.with_suffix(".ipynb")
    if not saved.exists():
        return False
    return sources(nbformat.read(saved, as_version=4)) == sources(notebook_of(page))


def keep_outputs(notebook: Any, saved: Path) -> bool:
    """Take the outputs of a saved notebook if its code is the same; whether that was so."""
    if not saved.exists():
        return False
    earlier = code_cells(nbformat.read(saved, as_version=4))
    cells = code_cells(notebook)
    if [cell["source"] for cell in earlier] != [cell["source"] for cell in cells]:
        return False
    if not any(cell["outputs"] for cell in earlier):
        return False
    for cell, other in zip(cells, earlier, strict=True):
        cell["outputs"] = other["outputs"]
    return True


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def sources(notebook: Any) -> list[tuple[str, str]]:
    return [(cell["cell_type"], cell["source"]) for cell in notebook["cells"]]


def execute(notebook: Any, folder: Path) -> None:
    """Run the cells in a folder, and keep what they print on stdout.

    Log lines and progress are on stderr, and depend on the machine.
    """
    os.environ |= ENVIRONMENT
    client = NotebookClient(
        notebook,
        timeout=SECONDS_OF_A_CELL,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)
        if cell["cell_type"] == "code":
            text = printed(cell["outputs"])
            cell["outputs"] = [new_output("stream", name="stdout", text=text)] if text else []


def printed(outputs: list[Any]) -> str:
    """What a cell printed on stdout, without the codes of a terminal and spaces at line ends."""
    text = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return (
        "\n".join(line.rstrip() for line in plain.strip("\n").split("\n")) + "\n" if plain else ""
    )


if __name__ == "__main__":
    main()
