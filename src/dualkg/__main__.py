"""`python -m dualkg` is the command `dualkg`."""

from dualkg.cli.main import main

main()
