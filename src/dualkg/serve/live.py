"""`dualkg train --serve`: a server in a thread shows the training of this process."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dualkg.serve.app import application
from dualkg.serve.limits import Limits
from dualkg.serve.server import address_of, bind, server_for
from dualkg.serve.service import ServedRuns
from dualkg.serve.training_process import Reporter, calibrate_result


class LiveServer:
    """Shows the training of the run in a folder, and serves the run when it is finished.

    As a context, it ends with the block.
    """

    def __init__(self, folder: Path, *, port: int, device: str | None = None) -> None:
        self._socket = bind("127.0.0.1", port)
        limits = Limits()
        app = application(ServedRuns([], in_training=[folder]), limits=limits, device=device)
        self._trainings = app.state.service.trainings
        self.training = self._trainings.show(folder)
        self._server = server_for(app, limits=limits)
        # uvicorn leaves signals to the main thread, which trains.
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )

    @property
    def address(self) -> str:
        return address_of(self._socket)

    @property
    def is_started(self) -> bool:
        return self._server.started

    def __enter__(self) -> "LiveServer":
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def reporter(self) -> Callable[[Any], None]:
        """A subscriber of the events of the training."""
        return Reporter(lambda **line: self.training.receive(line))

    def serve_result(self) -> None:
        """Calibrate and serve the run of the training, which has ended."""
        calibrate_result(self.training.folder, lambda **line: self.training.receive(line))
        self._trainings.load(self.training)

    def wait(self) -> None:
        """Serve until Ctrl-C or SIGTERM."""
        previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            self._thread.join()
        except KeyboardInterrupt:
            return
        finally:
            signal.signal(signal.SIGTERM, previous_handler)
