"""Keep finished runs as a record, and make the pages again: records/RESULTS.md, and the table in README.md.

python scripts/record.py runs/umls-complex-dura --name umls/complex-dura
python scripts/record.py                          # only make the pages again
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dualkg.files import write_text
from paper.pages import readme_table, results_page, with_table
from paper.records import record

HOUSE = Path(__file__).parents[1]
ROOT = HOUSE / "records"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of finished runs of one recipe")
    parser.add_argument("--name", help="the record's folder under records/")
    choices = parser.parse_args()
    if choices.runs:
        if not choices.name:
            parser.error("--name is needed with runs")
        print(record(choices.runs, ROOT / choices.name).folder)
    write_text(ROOT / "RESULTS.md", results_page(ROOT))
    readme = HOUSE / "README.md"
    write_text(readme, with_table(readme.read_text(encoding="utf-8"), readme_table(ROOT)))


if __name__ == "__main__":
    main()
