"""The status file that a shim writes about its worker; text of the job is cut to fit.

Standard library only and without `typing`, because a shim must stay under 12 MB.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time

from agent.shim import files as shim_files
from agent.shim import stop as shim_stop

VERSION = 1
RUNNING, SUSPENDED, STOPPING, EXITED = "running", "suspended", "stopping", "exited"
MAX_STEP = 2**53
MAX_PATH_BYTES = 4096
MAX_TEXT_CHARS = 1000
"""Limit of a text for people; a job names its command, and any process may write to its control
socket."""


def read_number(value: object) -> float | None:
    """A finite number; None for anything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= MAX_STEP and math.isfinite(value) else None


def _read_step(value: object) -> int | None:
    number = read_number(value)
    return int(number) if number is not None and number >= 0 and number == int(number) else None


def read_progress(message: dict[str, object]) -> dict[str, object] | None:
    """Steps, and total steps and loss where the job knows them; None when they are invalid.

    A loss that is not finite is left out and the steps are kept: training that diverges still
    advances.
    """
    step = _read_step(message.get("step"))
    if step is None:
        return None
    total = _read_step(message.get("total_steps"))
    if total is None and message.get("total_steps") is not None:
        return None
    return {"step": step, "total_steps": total, "loss": read_number(message.get("loss"))}


def read_checkpoint(message: dict[str, object]) -> tuple[int, str] | None:
    """Step and path of a save; None when they are invalid."""
    step, path = _read_step(message.get("step")), message.get("path")
    if step is None or not isinstance(path, str) or not path or "\0" in path:
        return None
    try:
        return (step, path) if len(path.encode()) <= MAX_PATH_BYTES else None
    except UnicodeEncodeError:  # half a surrogate pair: JSON may hold it, no file may be named so
        return None


class Status:
    """The content of status.json; `write` puts it on disk, all other methods only change it."""

    def __init__(self, spec: dict[str, object], pid: int, start_ticks: int) -> None:
        self.is_stale = self.is_phase_new = False
        self._value: dict[str, object] = {
            "v": VERSION,
            "key": spec.get("key"),
            "phase": RUNNING,
            "pid": pid,
            "start_ticks": start_ticks,
            "shim_pid": os.getpid(),
            "shim_start_ticks": shim_files.start_ticks(os.getpid()),
            "boot_id": shim_files.boot_id(),
            "started_wall_s": time.time(),
            "started_boot_s": shim_files.boot_time_s(),
            "ended_boot_s": None,
            "worker_count": spec.get("worker_count"),
            "exit_code": None,
            "exit_signal": None,
            "error": "",
            "detail": "",
            "progress": None,
            "checkpoint": None,
            "checkpoint_boot_s": None,
            "stop_reason": None,
            "stop_stage": "",
            "stop_boot_s": None,
            "stop_stages_s": {},
            "garbage_count": 0,
        }

    def write(self, *, is_durable: bool) -> None:
        """Write the status to disk; if the disk refuses it now, a later call tries again.

        If no status is on disk, the order file gives its space: this process has read it, and a
        worker without any status is killed.
        """
        self._value["updated_boot_s"] = shim_files.boot_time_s()
        status = shim_files.STATUS_FILE
        try:
            try:
                shim_files.write_json(status, self._value, is_durable=is_durable)
            except OSError as error:
                if os.path.lexists(status) or not shim_files.is_disk_error(error):
                    raise
                shim_files.write_spare(shim_files.SPEC_FILE, status, self._value)
        except OSError as error:
            with contextlib.suppress(OSError):  # its log is on the same disk
                os.write(2, f"{shim_files.STATUS_FILE}: {error}\n".encode())
            self.is_stale = True
        else:
            self.is_stale = self.is_phase_new = False

    def make_spare(self) -> None:
        """Reserve space for the last status, whatever fills the disk until then."""
        with contextlib.suppress(OSError):
            shim_files.make_spare(shim_files.SPARE_FILE)

    def _set(self, **changes: object) -> None:
        for name, value in changes.items():
            if self._value[name] != value:
                self._value[name] = value
                self.is_stale = True

    def stopping(self, stop: shim_stop.StopProtocol) -> None:
        """Record the progress of the stop."""
        is_new = self._value["phase"] != STOPPING or self._value["stop_stage"] != stop.stage
        self.is_phase_new = self.is_phase_new or is_new
        self._set(
            phase=STOPPING,
            stop_reason=stop.reason[:MAX_TEXT_CHARS],
            stop_stage=stop.stage,
            stop_boot_s=stop.started_at_s,
            stop_stages_s={stage: round(after_s, 3) for stage, after_s in stop.stages.items()},
        )

    def paused(self, is_suspended: bool) -> bool:
        """Record whether the worker computes; true if that changed.

        A worker that stops does neither.
        """
        phase = SUSPENDED if is_suspended else RUNNING
        if self._value["phase"] not in (RUNNING, SUSPENDED) or self._value["phase"] == phase:
            return False
        self.is_phase_new = True
        self._set(phase=phase)
        return True

    def progressed(self, progress: dict[str, object]) -> None:
        """Record the progress that the job reports."""
        self._set(progress=progress)

    def saved(self, step: int, path: str, *, is_verified: bool) -> None:
        """Record a save that the job reported, or that was seen; its time is that of the report."""
        self.is_phase_new = True
        if not is_verified:
            self._set(checkpoint_boot_s=shim_files.boot_time_s())
        self._set(checkpoint={"step": step, "path": path, "is_verified": is_verified})

    def resized(self, worker_count: int) -> None:
        """How many workers the gang has now."""
        self._set(worker_count=worker_count)

    def count_garbage(self, count: int) -> None:
        """Count invalid messages since the start."""
        garbage_count = self._value["garbage_count"]
        self._set(garbage_count=count + (garbage_count if isinstance(garbage_count, int) else 0))

    def note(self, detail: str) -> None:
        """Add a note for people that is no error of the worker."""
        self._set(detail=detail)

    def end(self, exit_code: int | None, error: str) -> None:
        """Write the last status.

        It insists until the disk takes it, because no later process can write it. A lent node must
        not wait for it, because it has to go home. So space is reserved for it.
        """
        number = -exit_code if exit_code is not None and exit_code < 0 else None
        name = signal.Signals(number).name if number in set(signal.Signals) else None
        self._set(
            phase=EXITED,
            exit_code=exit_code,
            exit_signal=name if number is None or name else f"SIG{number}",
            error=error[:MAX_TEXT_CHARS],
            ended_boot_s=shim_files.boot_time_s(),
        )
        while not self._has_said_it():
            time.sleep(1.0)
        with contextlib.suppress(OSError):
            os.unlink(shim_files.SPARE_FILE)

    def _has_said_it(self) -> bool:
        """True if the disk took the last status.

        It goes into a new file, into the space of one that is no longer needed, or over the earlier
        status.
        """
        self._value["updated_boot_s"] = shim_files.boot_time_s()
        status, spares = shim_files.STATUS_FILE, (shim_files.SPARE_FILE, shim_files.SPEC_FILE)
        with contextlib.suppress(OSError):
            shim_files.write_anyhow(status, self._value, *spares, is_durable=True)
            return True
        with contextlib.suppress(OSError):
            shim_files.overwrite(status, self._value)
            return True
        return False
