"""Write docs/cli.md from the --help of the commands.

python scripts/cli_page.py            # write the page
python scripts/cli_page.py --check    # fail if the page is out of date
"""

import argparse
import os
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
WIDTH = "100"
OPENING = """# The command line

Generated from `--help` of the commands by `python scripts/cli_page.py`; do not edit.

Results go to stdout, progress and notes to stderr. `--json` prints the same results as JSON.
The exit status is 0 on success, 1 if the run failed, 2 if the request was wrong, and 130 after
Ctrl-C; Ctrl-C is how `serve` is ended, which then exits with 0.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if the page is out of date"
    )
    check = parser.parse_args().check
    page = cli_page()
    if not check:
        PAGE.write_text(page, encoding="utf-8", newline="\n")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        sys.exit("docs/cli.md is out of date. Run: python scripts/cli_page.py")


def cli_page() -> str:
    """The page: the program's help, then that of each command in the order it lists them."""
    _fix_terminal()
    import typer

    from dualkg.cli.main import app

    sections = [OPENING, _section("dualkg", [])]
    for name, command in typer.main.get_command(app).commands.items():
        if not command.hidden:
            sections.append(_section(f"dualkg {name}", [name]))
    return "\n".join(sections)


def _fix_terminal() -> None:
    """Set 100 columns, no colour and no terminal.

    Typer reads these variables when it is imported.
    """
    os.environ |= {"TERMINAL_WIDTH": WIDTH, "COLUMNS": WIDTH, "TERM": "dumb", "NO_COLOR": "1"}
    os.environ["_TYPER_FORCE_DISABLE_TERMINAL"] = "1"


def _section(title: str, words: list[str]) -> str:
    from typer.testing import CliRunner

    from dualkg.cli.main import app

    result = CliRunner().invoke(app, [*words, "--help"], prog_name="dualkg")
    if result.exit_code:
        sys.exit(f"{title} --help ended with {result.exit_code}: {result.output}")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    text = "\n".join(line.rstrip() for line in plain.strip("\n").splitlines())
    return f"## {title}\n\n```text\n{text.strip()}\n```\n"


if __name__ == "__main__":
    main()
