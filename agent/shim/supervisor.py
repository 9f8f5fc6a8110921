"""The loop of a shim: orders, messages of the job, deadlines, the worker's end.

Standard library only and without `typing`, because a shim must stay under 12 MB.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal

from agent.shim import (
    files as shim_files,
)
from agent.shim import (
    out_of_memory,
)
from agent.shim import (
    pause as shim_pause,
)
from agent.shim import (
    sockets as shim_sockets,
)
from agent.shim import (
    stop as shim_stop,
)
from agent.shim.checkpoint_probe import Probe
from agent.shim.status import Status, read_checkpoint, read_number, read_progress
from agent.shim.worker_process import Worker

BASELINE_WAIT_S = 1.0
"""How long a request waits to learn how old the last checkpoint is."""
VERIFY_WAIT_S = 2.0
"""How long the end of a worker waits for the check of its last checkpoint."""
STATUS_PERIOD_S = 0.5
LOG_PERIOD_S = 5.0
KILL_PERIOD_S = 0.05
OUTSIDE_REASON = "preempt"
"""The name of a stop that no agent ordered: against the job's will, and it may save."""


def supervise(directory: str) -> int:
    """Run the worker of a directory to its end; 0 also when another shim has it or had it."""
    os.chdir(directory)  # sockets are bound by relative names, which always fit
    lock_fd = shim_files.take_lock(shim_files.LOCK_FILE)
    if lock_fd is None or os.path.exists(shim_files.STATUS_FILE):
        return 0
    spec = shim_files.read_json(shim_files.SPEC_FILE)
    if spec is None:
        os.write(2, f"{directory}/{shim_files.SPEC_FILE}: missing or no JSON object\n".encode())
        return 1
    Supervisor(directory, spec).run()
    return 0


def _leave_to_the_loop(number: int, frame: object) -> None:
    """Only wake the loop.

    The pipe carries the signal's number, and acting here could cut into any line.
    """


class Supervisor:
    """All state of one shim; `run` returns when nothing of the worker is left."""

    def __init__(self, directory: str, spec: dict[str, object]) -> None:
        self._spec = spec
        self._grace_s = read_number(spec.get("grace_s")) or 0.0
        self._stop_after_s = read_number(spec.get("stop_after_s"))
        self._checkpoint_root = str(spec.get("checkpoint_path") or "")
        self._log_max_bytes = int(read_number(spec.get("log_max_bytes")) or 64 << 20)
        self._worker_count = int(read_number(spec.get("worker_count")) or 0)
        self._told_count = self._worker_count
        self._stop: shim_stop.StopProtocol | None = None
        self._pause = shim_pause.PauseProtocol()
        self._baseline: Probe | None = None
        self._baseline_ns: int | None = None
        self._hold_request_until_s = 0.0
        self._verifying: Probe | None = None
        self._unverified: tuple[int, str] | None = None
        self._exit_due_at_s = 0.0
        now_s = shim_files.boot_time_s()
        self._contact_at_s = min(now_s, read_number(spec.get("contact_at_s")) or now_s)
        self._log_at_s = self._status_at_s = self._kill_at_s = now_s
        self._poll = select.poll()
        self._wake_fd = self._watch_signals()
        self._control = shim_sockets.bind_control(shim_files.CONTROL_SOCKET)
        self._job = shim_sockets.JobSocket(directory)
        self._log_fd = shim_files.open_log(shim_files.LOG_FILE)
        for fd in (self._wake_fd, self._control.fileno(), self._job.listener.fileno()):
            self._poll.register(fd, select.POLLIN)
        if self._checkpoint_root:
            self._look_at_baseline()
        self._oom_kills = out_of_memory.oom_kills()
        self._worker = self._start_worker()
        self._status = Status(spec, self._worker.pid, self._worker.start_ticks)
        self._status.write(is_durable=True)
        self._status.make_spare()

    def _watch_signals(self) -> int:
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGCHLD, signal.SIGTERM):  # the loop reads them from the pipe
            signal.signal(number, _leave_to_the_loop)
        return read_fd

    def _start_worker(self) -> Worker:
        argv = self._spec.get("argv")
        env = shim_files.as_object(self._spec.get("env")) or {}
        texts = {name: str(value) for name, value in env.items()}
        texts["ARYL_CONTROL_SOCKET"] = self._job.path
        words = [str(word) for word in argv] if isinstance(argv, list) else []  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        mark = self._spec.get("mark")
        workdir = str(self._spec.get("workdir") or "/")
        return Worker(words, texts, workdir, self._log_fd, mark if isinstance(mark, int) else None)

    # --- the loop -------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the worker and all its remains are gone."""
        while not self._has_ended():
            wait_s = max(0.0, self._due_at_s() - shim_files.boot_time_s())
            ready = [fd for fd, _ in self._poll.poll(min(wait_s, 3600.0) * 1000 + 1)]
            # Orders last: a stop uses the hellos before it, and an earlier save is no answer.
            for fd in sorted(ready, key={self._wake_fd, self._control.fileno()}.__contains__):
                self._on_ready(fd)
            self._on_time(shim_files.boot_time_s())
        self._job.close()
        with contextlib.suppress(OSError):
            os.unlink(shim_files.CONTROL_SOCKET)
        with contextlib.suppress(OSError):  # it may have written a lot since the last look
            shim_files.cut_log(shim_files.LOG_FILE, self._log_max_bytes)
        # The very last act: a reader of it may remove the directory.
        code, error = self._worker.exit_code, self._worker.error
        killed = out_of_memory.why_killed(code, self._oom_kills, out_of_memory.oom_kills())
        self._status.end(code, error or killed)

    def _has_ended(self) -> bool:
        if self._worker.exit_code is None:
            return False
        now_s = shim_files.boot_time_s()
        self._exit_due_at_s = self._exit_due_at_s or now_s + VERIFY_WAIT_S
        self._kill_at_s = now_s + KILL_PERIOD_S
        self._drain()
        probes = self._probe_pids()
        left = self._worker.kill_all(probes)
        is_looking = self._verifying is not None and now_s < self._exit_due_at_s
        if left or is_looking:
            return False
        self._worker.reap()
        return bool(probes) or self._worker.is_childless()

    def _drain(self) -> None:
        """Read the job's last messages; it may have left right after them."""
        self._on_ready(self._job.listener.fileno())
        for fd in list(self._job.clients):
            while fd in self._job.clients and self._hear(fd):
                pass

    def _probe_pids(self) -> set[int]:
        return {probe.pid for probe in (self._baseline, self._verifying) if probe is not None}

    def _due_at_s(self) -> float:
        due_at_s = [self._log_at_s]
        if self._worker.exit_code is not None:
            due_at_s.append(self._kill_at_s)
        if self._status.is_stale:
            due_at_s.append(self._status_at_s)
        due_at_s.append(self._pause.due_at_s())
        if self._stop is not None:
            due_at_s.append(max(self._stop.due_at_s(), self._held_until_s()))
        elif self._stop_after_s is not None:
            due_at_s.append(self._contact_at_s + self._stop_after_s)
        return min(due_at_s)

    def _held_until_s(self) -> float:
        return self._hold_request_until_s if self._baseline is not None else 0.0

    def _on_ready(self, fd: int) -> None:
        if fd == self._wake_fd:
            with contextlib.suppress(BlockingIOError):
                if signal.SIGTERM in os.read(self._wake_fd, 4096):  # the machine shuts down
                    self._begin_stop(OUTSIDE_REASON, self._grace_s, is_shutdown=True)
            self._worker.reap()
        elif fd == self._control.fileno():
            for datagram in shim_sockets.receive_all(self._control):
                self._on_order(shim_sockets.parse(datagram))
        elif fd == self._job.listener.fileno():
            for client_fd in self._job.accept_all():
                self._poll.register(client_fd, select.POLLIN)
                self._hear(client_fd)
        elif self._baseline is not None and fd == self._baseline.fd:
            with contextlib.suppress(BlockingIOError):  # the number was another's in this round
                self._on_baseline(self._baseline)
        elif self._verifying is not None and fd == self._verifying.fd:
            with contextlib.suppress(BlockingIOError):
                self._on_verified(self._verifying)
        elif fd in self._job.clients:
            self._hear(fd)

    def _on_time(self, now_s: float) -> None:
        self._do_pause(self._pause.due(now_s))
        if self._stop is not None and now_s >= self._held_until_s():
            for action in self._stop.due(now_s):
                self._act(action)
            self._status.stopping(self._stop)
        elif (
            self._stop is None
            and self._stop_after_s is not None
            and now_s >= self._contact_at_s + self._stop_after_s
        ):
            why = f"no contact to the coordinator for {self._stop_after_s:g} s (stop_after_s)"
            self._status.note(why)
            self._begin_stop(OUTSIDE_REASON, self._grace_s)
        if now_s >= self._log_at_s:
            self._log_at_s = now_s + LOG_PERIOD_S
            with contextlib.suppress(OSError):  # a log that stays too long costs less than its job
                shim_files.cap_log(
                    self._log_fd, shim_files.LOG_FILE, shim_files.OLD_LOG_FILE, self._log_max_bytes
                )
        if self._status.is_stale and now_s >= self._status_at_s:
            self._status_at_s = now_s + STATUS_PERIOD_S
            self._status.write(is_durable=self._status.is_phase_new)

    # --- orders of the agent --------------------------------------------------------------

    def _on_order(self, order: dict[str, object] | None) -> None:
        op = (order or {}).get("op")
        count = read_number((order or {}).get("worker_count"))
        grace_s = read_number((order or {}).get("grace_s"))
        if op == "stop" and grace_s is not None:
            self._begin_stop(str((order or {}).get("reason")), grace_s)
        elif op == "resize" and count is not None and count >= 0:
            self._worker_count = int(count)
            self._tell_count()
        elif op == "suspend" and self._stop is None:
            answers = self._job.suspends
            self._do_pause(self._pause.suspend(shim_files.boot_time_s(), answers=answers))
        elif op == "resume" and self._stop is None:
            self._do_pause(self._pause.resume())
        elif op in ("suspend", "resume"):
            pass  # it is ending, and leaves its GPUs for good
        elif op == "say":  # its files are gone
            self._status.is_stale, self._status_at_s = True, shim_files.boot_time_s()
        elif op == "ping":
            self._on_ping(read_number((order or {}).get("contact_at_s")))
        else:
            self._status.count_garbage(1)

    def _on_ping(self, contact_at_s: float | None) -> None:
        """Take a ping: the agent sent a report at this instant and the coordinator answered it.

        Only this postpones `stop_after_s`; no other order does, nor a live agent. The coordinator
        counts silence from the last report. It would give the job to other nodes while an agent
        behind a cut cable kept this worker.
        """
        if contact_at_s is not None:
            now_s = shim_files.boot_time_s()
            self._contact_at_s = max(self._contact_at_s, min(now_s, contact_at_s))

    def _do_pause(self, actions: list[str]) -> None:
        """Carry out the protocol's actions, and record on disk whether the worker computes."""
        for action in actions:
            if action == shim_pause.DO_ASK:
                self._say({"type": "suspend"})
            elif action == shim_pause.DO_TELL_RESUME:
                self._say({"type": "resume"})
            else:
                is_freeze = action == shim_pause.DO_FREEZE
                self._worker.freeze(self._probe_pids(), is_frozen=is_freeze)
        if self._status.paused(self._pause.is_suspended) and self._stop is None:
            self._status_at_s = shim_files.boot_time_s()

    def _tell_count(self) -> None:
        if self._worker_count != self._told_count and self._job.is_connected:
            self._told_count = self._worker_count
            self._say({"type": "resize", "worker_count": self._worker_count})
        self._status.resized(self._worker_count)

    def _begin_stop(self, reason: str, grace_s: float, *, is_shutdown: bool = False) -> None:
        """Begin the stop.

        is_shutdown: the shim got a signal, and its worker may have got one too. The worker's death
        by a signal is then part of that stop, and no failure of its job.
        """
        now_s = shim_files.boot_time_s()
        if self._stop is not None:
            self._stop.shorten(grace_s, now_s)
            return
        exit_code = self._worker.seen_exit_code()
        if exit_code is not None and not (is_shutdown and exit_code < 0):
            return  # its end is its own: the order did not reach it
        if self._pause.is_frozen:
            self._do_pause(self._pause.resume())  # a frozen process could neither save nor leave
        self._stop = shim_stop.StopProtocol(
            reason, grace_s, now_s, is_connected=self._job.is_connected
        )
        self._status_at_s = now_s
        is_asked = self._job.is_connected and exit_code is None
        if is_asked and self._checkpoint_root and self._verifying is None:
            self._hold_request_until_s = now_s + min(BASELINE_WAIT_S, grace_s / 4)
            self._look_at_baseline()

    def _act(self, action: str) -> None:
        stop = self._stop
        if stop is None:
            return
        if action == shim_stop.DO_REQUEST:
            left_s = max(0.0, stop.deadline_s - shim_files.boot_time_s())
            self._say({"type": "checkpoint_request", "reason": stop.reason, "grace_s": left_s})
        elif action == shim_stop.DO_STOP:
            self._say({"type": "stop", "reason": stop.reason})
        elif action == shim_stop.DO_SIGNAL:
            name = str(self._spec.get("signal") or "SIGTERM")
            self._worker.signal_main(getattr(signal, name, signal.SIGTERM))
        elif action == shim_stop.DO_KILL:
            self._worker.kill_all(self._probe_pids())

    # --- the job --------------------------------------------------------------------------

    def _say(self, message: dict[str, object]) -> None:
        for fd in self._job.broadcast(message):
            self._drop(fd)
        for fd, client in self._job.clients.items():
            if client.is_behind:
                self._poll.modify(fd, select.POLLIN | select.POLLOUT)

    def _drop(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._job.drop(fd)
        if self._stop is not None and not self._job.is_connected:
            self._stop.on_disconnected(shim_files.boot_time_s())

    def _hear(self, fd: int) -> bool:
        """Read from one connection; True if there may be more."""
        client = self._job.clients[fd]
        lines, too_long, is_there = client.receive()
        self._status.count_garbage(too_long)
        for line in lines:
            message = shim_sockets.parse(line)
            if message is None or not self._on_message(client, message):
                self._status.count_garbage(1)
        if self._job.clients.get(fd) is not client:
            return False  # an answer to it found it gone; the number may be another's by now
        if not is_there or not client.flush():
            self._drop(fd)
        elif not client.is_behind:
            self._poll.modify(fd, select.POLLIN)
        return bool(lines)

    def _on_message(self, client: shim_sockets.JobClient, message: dict[str, object]) -> bool:
        """Handle a message; True if it is valid."""
        kind = message.get("type")
        if kind == "hello":
            client.has_greeted = True
            client.suspends = message.get("suspends") is True
            self._tell_count()
            if self._stop is not None:
                self._stop.on_connected(shim_files.boot_time_s())
            return True
        if kind == "progress":
            progress = read_progress(message)
            if progress is not None:
                self._status.progressed(progress)
            return progress is not None
        if kind == "suspended":
            self._pause.on_suspended()
            self._do_pause([])
            return True
        return kind == "checkpoint" and self._on_checkpoint(message)

    def _on_checkpoint(self, message: dict[str, object]) -> bool:
        stage, now_s, stop = message.get("stage"), shim_files.boot_time_s(), self._stop
        if stage == shim_stop.SAVED:
            saved = read_checkpoint(message)
            if saved is None:
                return False
            self._status.saved(*saved, is_verified=False)
            self._verify(*saved)
            if stop is not None:
                stop.on_saved(now_s)
        elif stage == shim_stop.WORKING:
            if stop is not None:
                stop.on_working(now_s)
        elif stage == shim_stop.RELEASED:
            if stop is not None:
                stop.on_released(now_s)
        else:
            return False
        return True

    # --- checkpoints ----------------------------------------------------------------------

    def _probe(self, path: str, *, is_settling: bool, root: str = "") -> Probe | None:
        """Begin a look; None where no process or descriptor is left for it.

        The limits of a unit are for the job and its shim together, and the job may fill them. A
        save without a look stays unverified; a shim that ended would take the worker along.
        """
        try:
            probe = Probe(path, is_settling=is_settling, root=root)
        except OSError:
            return None
        self._poll.register(probe.fd, select.POLLIN)
        return probe

    def _look_at_baseline(self) -> None:
        if self._baseline is None:
            self._baseline = self._probe(self._checkpoint_root, is_settling=False)

    def _on_baseline(self, probe: Probe) -> None:
        self._baseline_ns = max(self._baseline_ns or 0, probe.answer()[0])
        self._baseline = None
        self._close(probe)

    def _verify(self, step: int, path: str) -> None:
        """Check that a save exists, is complete, and is newer than the one before the request.

        Only below the configured path: elsewhere the earlier state is unknown.
        """
        if not self._checkpoint_root:
            return
        workdir = str(self._spec.get("workdir") or "/")
        if self._verifying is not None:
            self._close(self._verifying)
        self._unverified = (step, path)
        self._verifying = self._probe(
            os.path.join(workdir, path), is_settling=True, root=self._checkpoint_root
        )
        if self._verifying is None:
            self._status.note("a save was not looked at: no process or descriptor was left for it")

    def _on_verified(self, probe: Probe) -> None:
        newest_ns, is_complete = probe.answer()
        known_ns = self._baseline_ns if self._baseline is None else None
        is_newer = known_ns is not None and newest_ns > known_ns
        if self._unverified is not None and is_complete and is_newer:
            self._status.saved(*self._unverified, is_verified=True)
            if self._stop is None:
                self._baseline_ns = newest_ns
        self._verifying = self._unverified = None
        self._close(probe)

    def _close(self, probe: Probe) -> None:
        self._poll.unregister(probe.fd)
        probe.close()
