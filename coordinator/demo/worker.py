"""The demo's training job: no GPU, but a real process that speaks the whole job contract.

The contract is environment, signals, files and one socket. This file proves it: it imports nothing
of Aryl and runs on the standard library alone (`python -I -S worker.py`).

Worker 0 leads: it counts steps, at a speed proportional to the worker count, and saves. The others
follow the leader's state file, on storage that all nodes share, and end when it has ended.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import cast

FOLLOW_PERIOD_S = 0.5
PROGRESS_PERIOD_S = 1.0
DEFAULT_GRACE_S = 30.0
LEADER_SILENT_S = 60.0
"""A follower that sees no sign of its leader this long fails; far above any pause of a node."""

EXIT_OWN_FAULT = 3
EXIT_LEADER_GONE = 4
EXIT_TERMINATED = 128 + signal.SIGTERM
STATUS_BY_STATE = {"finished": 0, "stopped": 0, "released": 0, "failed": EXIT_OWN_FAULT}
"""A follower's exit status, by its leader's end."""


class Control:
    """The job's end of the control socket; without one it stays silent."""

    def __init__(self, path: str | None) -> None:
        self._buffer = b""
        self._socket: socket.socket | None = None
        if path:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.connect(path)
            self.send({"type": "hello"})

    def fileno(self) -> int | None:
        """The descriptor to wait on, or None without a socket."""
        return self._socket.fileno() if self._socket else None

    def send(self, message: Mapping[str, object]) -> None:
        """One line; a shim that is gone does not end the job."""
        if self._socket is None:
            return
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._close()

    def receive(self) -> list[dict[str, object]]:
        """The complete lines available now; lines that are no JSON object are dropped."""
        if self._socket is None:
            return []
        try:
            data = self._socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._close()
            return []
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [message for message in map(_message, lines) if message is not None]

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def _message(line: bytes) -> dict[str, object] | None:
    try:
        message: object = json.loads(line)
    except ValueError:
        return None
    return cast("dict[str, object]", message) if isinstance(message, dict) else None


def _write(path: str, values: Mapping[str, object], *, is_durable: bool) -> None:
    """Replace a shared file in one step; a durable one outlives a crash of the machine."""
    scratch = f"{path}.{os.getpid()}"
    with open(scratch, "w", encoding="utf-8") as file:  # noqa: PTH123 - pathlib costs start-up time
        json.dump(values, file)
        if is_durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(scratch, path)  # noqa: PTH105 - as above


def _read(path: str) -> dict[str, object]:
    """A shared file's values; empty when it is missing."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - as above
            return _message(file.read()) or {}
    except FileNotFoundError:
        return {}


class Pace:
    """Steps as a function of time: piecewise linear, and still while a save is written."""

    def __init__(self, *, step: int, step_s: float, workers_min: int, now_s: float) -> None:
        self._base = float(step)
        self._since_s = now_s
        self._rate_per_s = 0.0
        self._step_s = step_s
        self._workers_min = workers_min

    def set_workers(self, worker_count: int, now_s: float) -> None:
        """Go on with this many workers from now; 0 pauses."""
        self._base = self._position(now_s)
        self._since_s = now_s
        self._rate_per_s = worker_count / self._workers_min / self._step_s

    def step(self, now_s: float) -> int:
        """Whole steps done; a step that is due within a microsecond counts."""
        return math.floor(self._position(now_s) + 1e-6)

    def until_s(self, step: int, now_s: float) -> float:
        """Seconds until that step is done; infinite while pausing."""
        missing = step - self._position(now_s)
        if missing <= 0:
            return 0.0
        return missing / self._rate_per_s if self._rate_per_s else math.inf

    def _position(self, now_s: float) -> float:
        return self._base + (now_s - self._since_s) * self._rate_per_s


class Worker:
    """The shared part of leader and follower.

    Identity, files, the socket, and requests to leave.
    """

    def __init__(self, options: argparse.Namespace, environment: Mapping[str, str]) -> None:
        self.options = options
        self.attempt = environment.get("ARYL_ATTEMPT", "1")
        self.worker_count = int(environment.get("ARYL_WORKER_COUNT", "1"))
        self.workers_min = int(environment.get("ARYL_WORKERS_MIN") or self.worker_count)
        self.is_flexible = environment.get("ARYL_IS_FLEXIBLE", "") in ("1", "true")
        directory = environment.get("ARYL_CHECKPOINT_PATH") or None
        self.checkpoint_path = os.path.join(directory, "checkpoint.json") if directory else None  # noqa: PTH118 - as above
        self.state_path = (
            os.path.join(directory, f"attempt-{self.attempt}.json") if directory else None  # noqa: PTH118 - as above
        )
        if directory:
            os.makedirs(directory, exist_ok=True)  # noqa: PTH103 - as above
        self.grace_s = float(environment.get("ARYL_GRACE_SECONDS") or DEFAULT_GRACE_S)
        self.request: str | None = None
        self.requested_at_s = math.inf
        self._has_said_working = False
        self.is_told_to_stop = False
        self.is_terminated = False
        self._signal_pipe, self._signal_end = os.pipe()
        os.set_blocking(self._signal_pipe, False)
        os.set_blocking(self._signal_end, False)
        signal.set_wakeup_fd(self._signal_end)
        signal.signal(signal.SIGTERM, self._terminated)
        self.control = Control(environment.get("ARYL_CONTROL_SOCKET"))

    def _terminated(self, number: int, frame: object) -> None:
        """SIGTERM is the request of a supervisor that does not speak on the socket."""
        self.is_terminated = True
        self._ask("terminate")

    def _ask(self, reason: str) -> None:
        """Record the first request only: a later signal is the shim insisting."""
        if self.request is None:
            self.request, self.requested_at_s = reason, time.monotonic()

    def say_working(self, eta_s: float) -> None:
        """Report working, once per request: a job that works on its leaving is not signalled."""
        if self.request is not None and not self._has_said_working:
            self._has_said_working = True
            self.control.send({"type": "checkpoint", "stage": "working", "eta_s": eta_s})

    def wait(self, delay_s: float) -> None:
        """Sleep until a message, a signal or the end of `delay_s`; then record any request."""
        socket_number = self.control.fileno()
        sources = [self._signal_pipe] + ([] if socket_number is None else [socket_number])
        ready, _, _ = select.select(sources, [], [], max(0.0, delay_s))
        if self._signal_pipe in ready:
            os.read(self._signal_pipe, 1024)
        if socket_number in ready:
            for message in self.control.receive():
                self._note(message)

    def _note(self, message: dict[str, object]) -> None:
        kind = message.get("type")
        if kind == "checkpoint_request":
            self._ask(str(message.get("reason", "preempt")))
        elif kind == "stop":
            self.is_told_to_stop = True
        elif kind == "resize":
            count = message.get("worker_count")
            if isinstance(count, int) and count > 0:
                self.worker_count = count

    def leave(self) -> int:
        """Report that the worker frees its GPUs.

        The exit status gives a plain supervisor the reason.
        """
        self.control.send({"type": "checkpoint", "stage": "released"})
        return EXIT_TERMINATED if self.is_terminated else 0


class Leader(Worker):
    """Worker 0: counts, saves, reports."""

    def __init__(self, options: argparse.Namespace, environment: Mapping[str, str]) -> None:
        super().__init__(options, environment)
        self.total_steps = max(1, math.ceil(options.work_s / options.step_s))
        self.first_step = self._saved_step()
        now_s = time.monotonic()
        self.pace = Pace(
            step=self.first_step,
            step_s=options.step_s,
            workers_min=self.workers_min,
            now_s=now_s,
        )
        self.saved_at_s = now_s
        self._paced_for: int | None = None

    def _saved_step(self) -> int:
        """The step of the last attempt's checkpoint; 0 without a whole checkpoint."""
        saved = _read(self.checkpoint_path).get("step", 0) if self.checkpoint_path else 0
        return min(saved, self.total_steps) if isinstance(saved, int) and saved > 0 else 0

    def run(self) -> int:
        """Train to the end, or until a request to leave; the exit status."""
        try:
            return self._train()
        except OSError as error:
            # Shared storage that fails fails the job, and its followers with it.
            sys.stderr.write(f"worker 0: {error}\n")
            return EXIT_OWN_FAULT

    def _train(self) -> int:
        reported_at_s = -math.inf
        while True:
            now_s = time.monotonic()
            if self._paced_for != self.worker_count:
                self._paced_for = self.worker_count
                self.pace.set_workers(self.worker_count, now_s)
            step = min(self.pace.step(now_s), self.total_steps)
            if now_s - reported_at_s >= PROGRESS_PERIOD_S:
                self._report(step, "running")
                reported_at_s = now_s
            if (status := self._end(step)) is not None:
                return status
            if self._is_save_due(now_s):
                self._save(step)
                continue
            self.wait(self._idle_s(now_s, reported_at_s))

    def _end(self, step: int) -> int | None:
        """The exit status when this is the end, or None."""
        if self.is_told_to_stop:
            self._share(step, "stopped")
            return 0
        failing = self.options.fail_at_step
        if failing is not None and self.first_step < failing <= step:
            self._share(step, "failed")
            sys.stderr.write(f"worker 0: failed at step {step}, as requested\n")
            return EXIT_OWN_FAULT
        if step >= self.total_steps:
            self._report(step, "finished")
            return 0
        if self.request is not None:
            # A save that was under way at the request is as good as another one.
            if self.can_save and self.saved_at_s < self.requested_at_s:
                self._save(step)
            self._share(step, "released")
            return self.leave()
        return None

    @property
    def can_save(self) -> bool:
        """True if there is a place to save to and nothing forbids it."""
        return self.checkpoint_path is not None and not self.options.no_checkpoint

    def _is_save_due(self, now_s: float) -> bool:
        return self.can_save and 0 < self.options.save_every_s <= now_s - self.saved_at_s

    def _idle_s(self, now_s: float, reported_at_s: float) -> float:
        target = self.total_steps
        failing = self.options.fail_at_step
        if failing is not None and self.first_step < failing:
            target = min(target, failing)
        next_s = min(self.pace.until_s(target, now_s), reported_at_s + PROGRESS_PERIOD_S - now_s)
        if self.can_save and self.options.save_every_s > 0:
            next_s = min(next_s, self.saved_at_s + self.options.save_every_s - now_s)
        return next_s

    def _save(self, step: int) -> None:
        """Write the checkpoint; training pauses, as it does in a synchronous save."""
        path = self.checkpoint_path
        assert path is not None
        self.pace.set_workers(0, time.monotonic())
        self._paced_for = None
        done_at_s = time.monotonic() + self.options.save_s
        self.say_working(self.options.save_s)
        while (left_s := done_at_s - time.monotonic()) > 0 and not self.is_told_to_stop:
            self.wait(left_s)
            self.say_working(max(0.0, done_at_s - time.monotonic()))
        if self.is_told_to_stop:
            return
        saved = {"step": step, "total_steps": self.total_steps, "attempt": int(self.attempt)}
        _write(path, saved, is_durable=True)
        self.saved_at_s = time.monotonic()
        self.control.send({"type": "checkpoint", "stage": "saved", "step": step, "path": path})

    def _report(self, step: int, state: str) -> None:
        # A power law, the usual shape of a training loss; only its falling matters.
        loss = 1.8 + 6.0 * (step + 1) ** -0.35
        self.control.send(
            {
                "type": "progress",
                "step": step,
                "total_steps": self.total_steps,
                "loss": round(loss, 4),
            }
        )
        self._share(step, state)

    def _share(self, step: int, state: str) -> None:
        """Write the state that followers read; also the leader's sign of life."""
        path = self.state_path
        # A gang of one that never was larger has no reader.
        if path and (self.worker_count > 1 or os.path.exists(path)):  # noqa: PTH110 - as above
            _write(path, {"step": step, "state": state}, is_durable=False)


class Follower(Worker):
    """Any other worker: follows the leader's count, ends when the leader has ended."""

    def run(self) -> int:
        """Follow until the leader's end, a release or a stop; the exit status."""
        if self.state_path is None:
            sys.stderr.write("a follower needs ARYL_CHECKPOINT_PATH to see its leader\n")
            return EXIT_LEADER_GONE
        seen: dict[str, object] = {}
        seen_at_s = time.monotonic()
        while not self.is_told_to_stop:
            if self.request is not None and self._may_leave_alone():
                return self.leave()
            self.say_working(self.options.save_s)
            now = _read(self.state_path)
            if now != seen:
                seen, seen_at_s = now, time.monotonic()
            state = str(seen.get("state", ""))
            if state in STATUS_BY_STATE:
                return self.leave() if self.request else STATUS_BY_STATE[state]
            if time.monotonic() - seen_at_s > LEADER_SILENT_S:
                sys.stderr.write(f"no sign of worker 0 for {LEADER_SILENT_S:.0f} s\n")
                return EXIT_LEADER_GONE
            self.wait(FOLLOW_PERIOD_S)
        return 0

    def _may_leave_alone(self) -> bool:
        """A flexible worker holds nothing; the others wait until the leader has saved."""
        if self.is_flexible or self.request == "release" or self.options.no_checkpoint:
            return True
        return time.monotonic() - self.requested_at_s > self.grace_s


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="worker.py", description="The demo's training job.")
    parser.add_argument(
        "--work-s", type=float, required=True, help="running time with the fewest workers"
    )
    parser.add_argument(
        "--step-s", type=float, default=0.5, help="time of one step with the fewest workers"
    )
    parser.add_argument("--save-s", type=float, default=0.5, help="time that a save takes")
    parser.add_argument("--save-every-s", type=float, default=15.0, help="0: only when asked")
    parser.add_argument("--no-checkpoint", action="store_true", help="never save")
    parser.add_argument("--fail-at-step", type=int, default=None, help="exit 3 at that step")
    options = parser.parse_args(arguments)
    if options.step_s <= 0 or options.work_s < 0 or options.save_s < 0:
        parser.error("--step-s must be above 0, --work-s and --save-s not below")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """One worker of one attempt, by its environment."""
    options = options_of(arguments)
    is_leader = int(os.environ.get("ARYL_WORKER_INDEX", "0")) == 0
    kind = Leader if is_leader else Follower
    return kind(options, os.environ).run()


if __name__ == "__main__":
    sys.exit(main())
