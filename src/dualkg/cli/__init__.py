"""The command line: one short function a command; answers on stdout, progress on stderr, no
arithmetic.
"""

from dualkg.cli.main import app, main

__all__ = ["app", "main"]
