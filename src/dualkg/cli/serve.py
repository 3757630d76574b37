"""`serve`: query runs over HTTP and in a browser."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from dualkg.cli import common as cli


@cli.command(json=False)
def serve(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Folders of trained runs.", show_default=False)],
    host: Annotated[str, Option(help="Address to listen on; a public one needs --token.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
    token: Annotated[str | None, Option(envvar="DUALKG_TOKEN", help="Bearer token that requests must send.")] = None,
    open_browser: Annotated[bool, Option("--open", help="Open a browser.")] = False,
    get: Annotated[str | None, Option(metavar="PATH", help="Print the response for this path and exit.")] = None,
    timeout: Annotated[float, Option(help="Time limit of a request in seconds.")] = 30.0,
    access_log: Annotated[bool, Option("--access-log", help="Log each request as JSON on stderr.")] = False,
    read_only: Annotated[bool, Option("--read-only", help="Accept no decisions on predicted facts.")] = False,
    device: cli.Device = None,
) -> None:
    """Serve runs over HTTP: pages for a browser and a JSON API. The first run is the default."""
    from dualkg.serve.app import application
    from dualkg.serve.limits import Limits
    from dualkg.serve.server import bind, check_access, request_once
    from dualkg.serve.server import serve as start
    from dualkg.serve.service import ServedRuns

    check_access(host, token)
    limits = Limits(seconds=timeout)
    if get is not None:
        unlimited = Limits(seconds=24 * 3600.0, stream_seconds=24 * 3600.0)
        app = application(ServedRuns.load(runs, device=device), limits=unlimited, token=token)
        reply = request_once(app, get, token=token)
        text = reply.body.decode("utf-8")
        print(text, end="" if text.endswith("\n") else "\n")
        if reply.status >= 400:
            sys.exit(2 if reply.status < 500 else 1)
        return
    with bind(host, port) as listening:
        served = ServedRuns.load(runs, device=device)
        for run in served:
            if run.predictor.calibration is None:
                cli.note(f"{run.name} has no probabilities yet: dualkg calibrate {run.run.folder}", style=None)
        app = application(served, limits=limits, token=token, log=access_log, read_only=read_only)
        start(app, listening, limits=limits, on_start=_print_address, open_browser=open_browser)
    cli.note("Stopped.", style=None)


def _print_address(address: str) -> None:
    print(address, flush=True)
    cli.note("Press Ctrl-C to stop.", style=None)
