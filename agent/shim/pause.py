"""Suspends and resumes one worker: first by a request on its socket, else by freezing it. Pure.

The shim passes in what happened and carries out the actions returned. Standard library only and
without `typing`, because a shim must stay under 12 MB.
"""

from __future__ import annotations

ANSWER_S = 5.0
"""How long a job that suspends by itself may take before it is frozen all the same."""

DO_ASK, DO_TELL_RESUME, DO_FREEZE, DO_THAW = "ask", "tell_resume", "freeze", "thaw"


class PauseProtocol:
    """A job with `suspends` in its hello frees its device memory and answers.

    Any other job is stopped by SIGSTOP, which frees the GPU's time and not its memory
    (docs/job-contract.md). Orders may be repeated. All instants are seconds since boot.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self.is_frozen = False
        self._is_asked = False
        self._has_answered = False
        self._answer_until_s = float("inf")

    @property
    def is_suspended(self) -> bool:
        """True if the worker does not compute now."""
        return self.is_wanted and (self.is_frozen or self._has_answered)

    def suspend(self, now_s: float, *, answers: bool) -> list[str]:
        """An order to suspend; `answers`: the job is connected and suspends by itself."""
        if self.is_wanted:
            return []
        self.is_wanted = True
        if not answers:
            self.is_frozen = True
            return [DO_FREEZE]
        self._is_asked, self._answer_until_s = True, now_s + ANSWER_S
        return [DO_ASK]

    def on_suspended(self) -> None:
        """The job reports that it has freed its GPUs; a late report does no harm."""
        if self._is_asked:
            self._has_answered, self._answer_until_s = True, float("inf")

    def resume(self) -> list[str]:
        """An order to resume, or to stop: a frozen process could not even save."""
        actions = [DO_THAW] if self.is_frozen else []
        if self._is_asked:
            actions.append(DO_TELL_RESUME)
        self.is_wanted = self.is_frozen = self._is_asked = self._has_answered = False
        self._answer_until_s = float("inf")
        return actions

    def due_at_s(self) -> float:
        """When `due` next has an action."""
        return self._answer_until_s

    def due(self, now_s: float) -> list[str]:
        """A job that does not answer is frozen."""
        if now_s < self._answer_until_s:
            return []
        self._answer_until_s = float("inf")
        self.is_frozen = True
        return [DO_FREEZE]
