"""`serve`: runs asked over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from dualkg.cli import options, output


def serve(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folders of runs.", show_default=False)],
    host: Annotated[str, typer.Option(help="Where to be reached; other machines need --token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any that is free.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(envvar="DUALKG_TOKEN", help="What requests must send: Authorization: Bearer TOKEN."),
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    get: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Answer this one request, such as /entity/France.json.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="The time limit of a request.")] = 30.0,
    log: Annotated[bool, typer.Option("--log", help="A line of JSON for each request, on stderr.")] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="Take no decisions on new facts.")] = False,
    device: options.Device = None,
    threads: options.Threads = None,
) -> None:
    """Answer questions about runs over HTTP; the first run is asked where a request names none."""
    from dualkg.serve.app import application
    from dualkg.serve.limits import Limits
    from dualkg.serve.server import bind, check_reach
    from dualkg.serve.server import serve as start
    from dualkg.serve.state import ServedRuns

    options.set_threads(threads)
    check_reach(host, token)
    limits = Limits(seconds=seconds)
    if get is not None:
        print_reply(runs, get, token=token, device=device)
        return
    with bind(host, port) as listening:
        served = ServedRuns.load(runs, device=device)
        for run in served:
            if run.predictor.calibration is None:
                how = f"dualkg calibrate {escape(str(run.run.folder))}"
                output.err.print(f"{escape(run.name)} has no probabilities yet: {how}", soft_wrap=True)
        app = application(served, limits=limits, token=token, log=log, read_only=read_only)
        start(app, listening, limits=limits, tell=_tell, open_browser=open_browser)
    output.err.print("Stopped.")


def print_reply(runs: list[Path], address: str, *, token: str | None, device: str | None) -> None:
    """The body on stdout; where the request was wrong, its sentence, and the exit code of a wrong request."""
    from dualkg.serve.app import application
    from dualkg.serve.limits import Limits
    from dualkg.serve.server import request_once
    from dualkg.serve.state import ServedRuns

    patient = Limits(seconds=24 * 3600.0, long_seconds=24 * 3600.0)
    app = application(ServedRuns.load(runs, device=device), limits=patient, token=token)
    reply = request_once(app, address, token=token)
    text = reply.body.decode("utf-8")
    print(text, end="" if text.endswith("\n") else "\n")
    if reply.status >= 400:
        sys.exit(2 if reply.status < 500 else 1)


def _tell(address: str) -> None:
    print(address, flush=True)
    output.err.print("Ctrl-C stops it.")
