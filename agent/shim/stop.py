"""Stops one worker in stages: request, working, saved, released, signal, kill. Pure.

The shim passes in what happened and carries out the actions returned. Standard library only and
without `typing`, because a shim must stay under 12 MB.
"""

from __future__ import annotations

ANSWER_S = 5.0
"""How long a connected job may stay silent after a request before it gets its signal."""
RELEASE_S = 5.0
"""How long a job that has saved may take to leave before it gets its signal."""
SAVING_REASONS = frozenset({"preempt", "release", "time_limit"})
"""Reasons for which unsaved work is worth saving; with the others the worker's work is over."""

REQUESTED, WORKING, SAVED, RELEASED = "requested", "working", "saved", "released"
SIGNALLED, KILLED = "signalled", "killed"

DO_REQUEST, DO_STOP, DO_SIGNAL, DO_KILL = "request", "stop", "signal", "kill"


class StopProtocol:
    """Grace as a protocol (docs/job-contract.md): ask, wait while the job works, then insist.

    A job that reports it is working is never signalled, because the signal could end the very save
    that the grace is for (pytorch#68258); only the end of the grace ends it. A job that is not
    connected, or stays silent, gets its configured signal. All instants are seconds since boot.
    """

    def __init__(self, reason: str, grace_s: float, now_s: float, *, is_connected: bool) -> None:
        self.reason = reason
        self.started_at_s = now_s
        self.deadline_s = now_s + grace_s
        self.stage = ""
        self.stages: dict[str, float] = {}
        """Seconds from the order to stop until each stage was first reached."""
        self._todo: list[str] = []
        self._signal_at_s: float | None = now_s
        if is_connected and reason in SAVING_REASONS:
            self._todo.append(DO_REQUEST)
            self._signal_at_s = now_s + min(ANSWER_S, grace_s / 2)
        elif is_connected:
            self._todo.append(DO_STOP)

    def shorten(self, grace_s: float, now_s: float) -> None:
        """Take another order to stop.

        The earlier deadline holds, so that orders may be repeated.
        """
        self.deadline_s = min(self.deadline_s, now_s + grace_s)

    def on_connected(self, now_s: float) -> None:
        """A job that connects during its grace gets the request as well.

        Its signal has been sent.
        """
        if self.stage == SIGNALLED and self.reason in SAVING_REASONS:
            self._todo.append(DO_REQUEST)

    def on_disconnected(self, now_s: float) -> None:
        """The job hung up: it leaves by itself soon, or it gets its signal."""
        if self._signal_at_s is None and not self._is_signalled:
            self._signal_at_s = now_s + ANSWER_S

    def on_working(self, now_s: float) -> None:
        """The job saves; it is left alone until the end of its grace."""
        if self.stage in ("", REQUESTED, SIGNALLED):
            self._reach(WORKING, now_s)
            if not self._is_signalled:
                self._signal_at_s = None

    def on_saved(self, now_s: float) -> None:
        """The job has saved: it gets the request to leave, and a signal if it does not."""
        if self.stage in (RELEASED, KILLED):
            return
        self._reach(SAVED, now_s)
        if not self._is_signalled:
            self._todo.append(DO_STOP)
            self._signal_at_s = now_s + RELEASE_S

    def on_released(self, now_s: float) -> None:
        """The job has freed its GPUs, whether it saved or not."""
        if self.stage == KILLED:
            return
        self._reach(RELEASED, now_s)
        if not self._is_signalled:
            self._signal_at_s = now_s + RELEASE_S

    def due_at_s(self) -> float:
        """When `due` next has an action."""
        if self._todo:
            return self.started_at_s
        if KILLED in self.stages:
            return float("inf")
        if self._signal_at_s is None or self._is_signalled:
            return self.deadline_s
        return min(self._signal_at_s, self.deadline_s)

    def due(self, now_s: float) -> list[str]:
        """The actions due now, in order, each returned once."""
        actions, self._todo = self._todo, []
        if DO_REQUEST in actions and not self.stage:
            self._reach(REQUESTED, now_s)
        signal_at_s = self._signal_at_s
        if signal_at_s is not None and now_s >= signal_at_s and not self._is_signalled:
            self.stages.setdefault(SIGNALLED, now_s - self.started_at_s)
            if self.stage in ("", REQUESTED):
                self.stage = SIGNALLED
            actions.append(DO_SIGNAL)
        if now_s >= self.deadline_s and KILLED not in self.stages:
            self._reach(KILLED, now_s)
            actions.append(DO_KILL)
        return actions

    @property
    def _is_signalled(self) -> bool:
        return SIGNALLED in self.stages

    def _reach(self, stage: str, now_s: float) -> None:
        self.stage = stage
        self.stages.setdefault(stage, now_s - self.started_at_s)
