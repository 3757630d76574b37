"""`python -m dualkg` is the command `dualkg`."""

from __future__ import annotations

from dualkg.cli.main import main

main()
