"""The job's end of the control socket (docs/job-contract.md), on the standard library alone.

Copy it beside a training script. Without Aryl around it there is no socket, and all of this does
nothing but take SIGTERM for a wish to leave.
"""

import contextlib
import json
import os
import signal
import socket
import threading


class Control:
    """Says how far the job is, and hears when it has to leave."""

    def __init__(self) -> None:
        self.reason = ""
        """Why this worker has to leave: `release` means this worker alone; empty means stay."""
        self._socket: socket.socket | None = None
        path = os.environ.get("ARYL_CONTROL_SOCKET")
        if path:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.connect(path)
            threading.Thread(target=self._listen, daemon=True).start()
            self.say(type="hello")
        signal.signal(signal.SIGTERM, self._on_signal)

    def progress(self, step: int, total_steps: int, loss: float) -> None:
        """How far the job is; one worker says it."""
        self.say(type="progress", step=step, total_steps=total_steps, loss=loss)

    def working(self, eta_s: float) -> None:
        """The request to leave was heard, and a save is under way."""
        self.say(type="checkpoint", stage="working", eta_s=eta_s)

    def saved(self, step: int, path: str) -> None:
        """A save is complete."""
        self.say(type="checkpoint", stage="saved", step=step, path=path)

    def released(self) -> None:
        """This worker holds no GPU any more and is about to exit."""
        self.say(type="checkpoint", stage="released")

    def say(self, **message: object) -> None:
        """One line of JSON; a shim that is gone does not end the job."""
        with contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(OSError):
            for line in self._socket.makefile():
                message = json.loads(line)
                if message["type"] in ("checkpoint_request", "stop"):
                    self.reason = message["reason"]

    def _on_signal(self, number: int, frame: object) -> None:
        self.reason = self.reason or "signal"
