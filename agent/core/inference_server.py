"""A node's inference server in the life cycle: commands, health, and whether it is idle. Pure."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from agent.core.state import Action, EndHook, Facts, HookKind, RunHook
from common.messages import CommandReport, InferenceReport

RETRY_S = 1.0
AGAIN_BEFORE_S = 5.0
"""A command that brings the server back gets another try this long before its node must serve."""
SLOW_S = 5.0
"""A command that runs for longer is reported before it has ended."""
PROBES_MISSED_WHEN_DOWN = 3
"""This many health checks in a row must fail before a server counts as down."""
SAMPLES_AT_REST = 2
"""This many samples in a row show that a server is idle."""


class ServerCommands:
    """The commands that move a server, one at a time; each role of the node starts them afresh."""

    def __init__(self, now_s: float) -> None:
        self._running: HookKind | None = None
        self._began_at_s = now_s
        self._is_ending = False
        self._was_late: set[HookKind] = set()
        """Commands that were ended in this role for being late."""
        self._role_count = self._running_role_count = 0
        self._done_at_s: dict[HookKind, float] = {}
        self._retry_at_s = now_s
        self.error = ""
        """Error of the latest command of this role."""
        self._failed: HookKind | None = None
        """The command that `error` is about."""
        self.left = ""
        """Processes left of a command that was ended and did not end; they may yet move the server.
        Reported until a command of its kind succeeds, whatever role the node has then."""
        self._left_of: HookKind | None = None

    @property
    def is_idle(self) -> bool:
        """True if no command runs."""
        return self._running is None

    def done_at_s(self, kind: HookKind) -> float | None:
        """When a command succeeded in this role; None: not yet."""
        return self._done_at_s.get(kind)

    def new_role(self, now_s: float) -> None:
        """Enter a new role: results from the previous role prove nothing in this one."""
        self._role_count += 1
        self._done_at_s, self.error, self._retry_at_s = {}, "", now_s
        self._was_late = set()

    def run(self, kind: HookKind, now_s: float) -> list[Action]:
        """Start a command, unless one runs or the last failure is too recent."""
        if self._running is not None or now_s < self._retry_at_s:
            return []
        self._running, self._running_role_count = kind, self._role_count
        self._began_at_s, self._is_ending = now_s, False
        if kind != self._failed:
            self.error = ""
        return [RunHook(kind)]

    def slow(self, now_s: float) -> str:
        """A text that does not change for a command that runs long; empty when there is none."""
        found = self.report(now_s)
        if found is UNSET:
            return ""
        return f"the {found.name} command runs for more than {SLOW_S:g} s"

    def report(self, now_s: float) -> CommandReport | UnsetType:
        """The command that runs long, and for how long; unset when there is none."""
        running_s = now_s - self._began_at_s
        if self._running is None or running_s <= SLOW_S:
            return UNSET
        return CommandReport(name=self._running, running_s=running_s)

    def end_drain(
        self, now_s: float, *, stop_limit_s: float, until_s: float | None
    ) -> list[Action]:
        """End the rest of a drain, because the coordinator wants the node back.

        Each command is ended once. A command that unroutes the server is ended at once, because the
        next step reverses it. A command that stops the server has its time, so that the server does
        not start while it ends: `stop_limit_s` seconds from its start, and no longer than
        `until_s`, where the order gives a deadline. `end_late` covers the commands that reverse the
        drain.
        """
        if self._running == HookKind.UNROUTE:
            end_at_s = now_s
        elif self._running == HookKind.STOP:
            end_at_s = self._began_at_s + stop_limit_s
            end_at_s = end_at_s if until_s is None else min(end_at_s, until_s)
        else:
            return self.end_late(now_s, until_s=until_s)
        if self._is_ending or now_s < end_at_s:
            return []
        self._is_ending = True
        return [EndHook(self._running)]

    def end_late(self, now_s: float, *, until_s: float | None) -> list[Action]:
        """End a start or route command that may hang, when the node must serve by `until_s`.

        It is ended while there is time for another try, once in a role: after half of the time that
        it had, or all but `AGAIN_BEFORE_S`, whichever is longer. A command that always takes this
        long can still succeed: its second try has its own time limit and no other.
        """
        kind = self._running
        if kind is None or kind not in (HookKind.START, HookKind.ROUTE) or until_s is None:
            return []
        had_s = until_s - self._began_at_s
        if had_s <= 0 or now_s < until_s - min(AGAIN_BEFORE_S, had_s / 2):
            return []
        if self._is_ending or kind in self._was_late:
            return []
        self._is_ending = True
        self._was_late.add(kind)
        return [EndHook(kind)]

    def answered(self, kind: HookKind, *, error: str, left: str, now_s: float) -> None:
        """Record that the running command has ended, except for the processes in `left`.

        A command of an earlier role does not count: the present role issues its own.
        """
        self._running = None
        if left:
            self.left, self._left_of = f"{kind} command: {left}", kind
        elif not error and kind == self._left_of:
            self.left = ""
        if self._running_role_count != self._role_count:
            return
        if error:
            self.error, self._failed = f"{kind} command: {error}", kind
            self._retry_at_s = now_s if self._is_ending else now_s + RETRY_S
        else:
            self.error = ""
            self._done_at_s[kind] = now_s


class Health:
    """Health of a server that should serve: decides whether it is down.

    One missed check may only mean a busy server, and declaring it down costs its service a node.
    """

    def __init__(self) -> None:
        self._missed = 0
        self._missed_at_s: float | None = None

    @property
    def is_down(self) -> bool:
        """True if the server missed several checks in a row."""
        return self._missed >= PROBES_MISSED_WHEN_DOWN

    def saw(self, facts: Facts, *, since_s: float) -> bool:
        """True if the server missed the newest check.

        Each check counts once, and none before `since_s`.
        """
        is_missed = facts.sampled_at_s > since_s and not facts.is_healthy
        if not is_missed:
            self._missed = 0
        elif facts.sampled_at_s != self._missed_at_s:
            self._missed, self._missed_at_s = self._missed + 1, facts.sampled_at_s
        return is_missed


class Idleness:
    """Detects that a server without new requests is idle: two samples in a row show no request.

    Idle means: nothing running, nothing waiting, and an unchanged success counter. An unreadable
    page, a late health check beside it, or a page with a dropped value does not prove idleness: a
    server that stalls still has its requests. For a server that is gone, the sample itself reports
    no requests.
    """

    def __init__(self) -> None:
        self._page: InferenceReport | None = None
        self._sampled_at_s = -1.0
        self._samples = 0
        self._unread_since_s: float | None = None
        self.why = ""
        """The current wait, as text."""

    def saw(self, facts: Facts, *, since_s: float) -> bool:
        """True if the server is idle; a sample counts once, and none from before `since_s`."""
        if facts.sampled_at_s <= max(since_s, self._sampled_at_s):
            return False
        self._sampled_at_s = facts.sampled_at_s
        page, last = facts.inference, self._page
        if page is None or not facts.is_page_whole:
            if self._unread_since_s is None:
                self._unread_since_s = facts.sampled_at_s
            self._samples = 0
            how = "cannot be read" if page is None else "has values that are no counts"
            self.why = f"waits for the server's metrics page, which {how}"
            return False
        self._page, self._unread_since_s = page, None
        in_flight = page.running_count + page.waiting_count
        is_still = last is not None and last.success_total == page.success_total
        is_quiet = in_flight == 0 and (is_still or self._samples == 0)
        self.why = f"waits for {in_flight:g} requests" if in_flight else ""
        self._samples = self._samples + 1 if is_quiet else 0
        return self._samples >= SAMPLES_AT_REST

    def given_up(self, facts: Facts, *, limit_s: float) -> str:
        """Why the drain ends without an idle server: its page was unreadable for too long.

        Usually empty. Without a page the server may still have requests, so it may not be stopped.
        """
        since_s = self._unread_since_s
        if since_s is None or facts.now_s - since_s < limit_s:
            return ""
        error = facts.page_error or "no sample has it"
        return f"the server's metrics page could not be read for {limit_s:g} s: {error}"
