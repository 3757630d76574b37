"""`python -m dualkg` is the command `dualkg`."""

from dualkg.cli import main

main()
