"""Keep finished runs as a record, and make records/RESULTS.md anew.

python scripts/record.py runs/umls-complex-dura --name umls/complex-dura
python scripts/record.py                          # only make the pages anew
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dualkg.files import write_text
from dualkg.reproduce.records import record, results_page

ROOT = Path(__file__).parents[1] / "records"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of finished runs of one recipe")
    parser.add_argument("--name", help="the record's folder under records/")
    choices = parser.parse_args()
    if choices.runs:
        if not choices.name:
            parser.error("--name is needed with runs")
        print(record(choices.runs, ROOT / choices.name))
    write_text(ROOT / "RESULTS.md", results_page(ROOT))


if __name__ == "__main__":
    main()
