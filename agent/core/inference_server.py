"""A node's inference server as the life cycle sees it: commands, health, and whether it is idle.
Pure.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from agent.core.state import Action, EndHook, Facts, HookKind, RunHook
from common.messages import CommandReport, InferenceReport

RETRY_S = 1.0
AGAIN_BEFORE_S = 5.0
"""A command that brings the server back has another try so long before its node must serve."""
SLOW_S = 5.0
"""A command that runs for longer is told of before it has ended."""
PROBES_MISSED_WHEN_DOWN = 3
"""So many health checks in a row must fail before a server counts as down."""
SAMPLES_AT_REST = 2
"""So many samples in a row show that a server has come to rest."""


class ServerCommands:
    """The commands that move a server, one at a time; each role of the node begins them anew."""

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
        """Of the latest one of this role, in words."""
        self._failed: HookKind | None = None
        """Which one `error` is of."""
        self.left = ""
        """Who is left of one that was ended and did not end, in words; it may yet move the server.
        Told until one of its kind succeeds, whatever role the node has then."""
        self._left_of: HookKind | None = None

    @property
    def is_idle(self) -> bool:
        """Whether none runs."""
        return self._running is None

    def done_at_s(self, kind: HookKind) -> float | None:
        """When it succeeded in this role; None: not yet."""
        return self._done_at_s.get(kind)

    def new_role(self, now_s: float) -> None:
        """What was done in the one before proves nothing in this one."""
        self._role_count += 1
        self._done_at_s, self.error, self._retry_at_s = {}, "", now_s
        self._was_late = set()

    def run(self, kind: HookKind, now_s: float) -> list[Action]:
        """Start a command, unless one runs or the last failure is too fresh."""
        if self._running is not None or now_s < self._retry_at_s:
            return []
        self._running, self._running_role_count = kind, self._role_count
        self._began_at_s, self._is_ending = now_s, False
        if kind != self._failed:
            self.error = ""
        return [RunHook(kind)]

    def slow(self, now_s: float) -> str:
        """That one runs for long, in words that do not change; empty where none does."""
        found = self.report(now_s)
        if found is UNSET:
            return ""
        return f"the {found.name} command runs for more than {SLOW_S:g} s"

    def report(self, now_s: float) -> CommandReport | UnsetType:
        """The one that runs for long, and for how long; unset where none does."""
        running_s = now_s - self._began_at_s
        if self._running is None or running_s <= SLOW_S:
            return UNSET
        return CommandReport(name=self._running, running_s=running_s)

    def end_drain(
        self, now_s: float, *, stop_limit_s: float, until_s: float | None
    ) -> list[Action]:
        """The node is wanted back: what is left of a drain is not waited for; ended once.

        What takes the server out of its routing is ended at once, as it is undone next. What stops
        it has its time, so that it is not started while it ends: `stop_limit_s` seconds from its
        beginning, and no longer than until `until_s`, where whoever wants the node said when.
        Of what undoes the drain, see `end_late`.
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
        """The node must serve by `until_s`, and the command that brings it there hangs, perhaps.

        It is ended while there is time for another try, once in a role: half of the time that it
        had, or all but `AGAIN_BEFORE_S`, whichever is longer. One that takes as long each time is
        not kept from ever ending well: its second try has its own time limit and no other.
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
        """The one that runs has ended, but for who is left of it; one of a role that is over counts
        for nothing: the present one asks for itself."""
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
    """Whether a server that should serve is down.

    One missed check may be a server that is busy; to be counted out costs its service a node.
    """

    def __init__(self) -> None:
        self._missed = 0
        self._missed_at_s: float | None = None

    @property
    def is_down(self) -> bool:
        """Whether it missed several checks in a row."""
        return self._missed >= PROBES_MISSED_WHEN_DOWN

    def saw(self, facts: Facts, *, since_s: float) -> bool:
        """Whether it missed the newest check; each counts once, and none from before `since_s`."""
        is_missed = facts.sampled_at_s > since_s and not facts.is_healthy
        if not is_missed:
            self._missed = 0
        elif facts.sampled_at_s != self._missed_at_s:
            self._missed, self._missed_at_s = self._missed + 1, facts.sampled_at_s
        return is_missed


class Idleness:
    """Whether a server that gets no new requests has come to rest: nothing running, nothing
    waiting, the success counter still, two samples in a row.

    A page that cannot be read shows no rest, nor does a late health check beside it: a server that
    stalls has its requests still. No more does a page of which a value was dropped. Of a server
    that is gone the sample itself says that it has none.
    """

    def __init__(self) -> None:
        self._page: InferenceReport | None = None
        self._sampled_at_s = -1.0
        self._samples = 0
        self._unread_since_s: float | None = None
        self.why = ""
        """What it waits for, in words."""

    def saw(self, facts: Facts, *, since_s: float) -> bool:
        """Whether it is at rest; a sample counts once, and not from before `since_s`."""
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
        """Why the drain is to end without rest: the page was not read for too long; mostly empty.

        Whether the server still has requests nobody knows then, so that it may not be stopped.
        """
        since_s = self._unread_since_s
        if since_s is None or facts.now_s - since_s < limit_s:
            return ""
        error = facts.page_error or "no sample has it"
        return f"the server's metrics page could not be read for {limit_s:g} s: {error}"
