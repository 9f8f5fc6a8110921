"""The load of each service, from the counters on its nodes' metrics pages. Pure.

Arrivals = completions + change of the requests in flight (conservation of requests). A rate is a
difference of two pages over the time between them on the node's own clock, which also numbers the
node's reports. Reports that were skipped, or that came late and all at once, therefore do not
change the load.

An unreadable page proves nothing, and least of all that no request arrives: the last known rate of
its node holds until the node is measured again, stops serving or is silent for too long. The mean
over a time without pages is the load of no moment, so a node whose load is unknown counts from its
next page on, and is known again with the first rate since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from common.messages import InferenceReport, NodeReport
from common.model import NodeName, NodeRole, ServiceName
from coordinator.engine.state.events import Event, LoadMeasured, LoadUnknown

COLLECTOR = "inference"
"""The collector of an agent that reads the page."""
CLOCK_S = 1e-3
"""A report is numbered by its node's boot clock, in milliseconds."""
PERIOD_S = 1.0
"""Between two reports of an agent that does not state it: the default of its settings."""
MISSED = 3
"""This many reports without a page make a load unknown, and no fewer than a load period has."""
LEAST_OF_PERIOD = 0.5
"""A rate covers at least this part of a load period: one arrival between two pages in quick
succession is no load."""


class LastKnown(Struct, frozen=True, kw_only=True):
    """The last knowledge of a node whose load was reported as unknown.

    load: its last known one; None: it never had one.
    at_s: when its last page came, on the listener's clock.
    is_serving: it served when its load was last known, and is not lost.
    """

    service: ServiceName
    load: float | None
    at_s: float
    why: str
    is_serving: bool = True


class _Counted(Struct, kw_only=True):
    """One node that serves or drains.

    clock_s, mark_s: instants of its last page, and of the page that `arrived` counts from, on the
        node's own clock. None: no page of it was read.
    is_new: it has no page from before this window, so that the window may be longer than the time
        that it counts.
    was_unread: it served for a while before its first page, or between two.
    rate: the last known one; None: none yet.
    page_at_s: when its last page came, on the listener's clock; of a node without any page, when it
        first reported to serve.
    why: why its newest report has no page; empty where it has.
    """

    service: ServiceName
    boot_id: str
    is_serving: bool
    page_at_s: float
    fresh_s: float
    why: str = ""
    success_total: float = 0.0
    in_flight: float = 0.0
    clock_s: float | None = None
    mark_s: float | None = None
    arrived: float = 0.0
    is_new: bool = True
    was_unread: bool = False
    rate: float | None = None

    def read(self, page: InferenceReport, clock_s: float) -> None:
        """Count arrivals since the page before; a server that restarted counts from there on.

        Arrivals during its restart are unknown: the rest of the window, or the last known rate,
        stands for them.
        """
        in_flight = page.running_count + page.waiting_count
        if self.mark_s is None or page.success_total < self.success_total:
            self.is_new = self.is_new and self.mark_s is None
            self.mark_s, self.arrived = clock_s, 0.0
        else:
            self.arrived += page.success_total - self.success_total + in_flight - self.in_flight
        self.success_total, self.in_flight, self.clock_s = page.success_total, in_flight, clock_s

    def begin_again(self) -> None:
        """Count from the next page on, as the load is unknown until then."""
        self.mark_s, self.is_new, self.was_unread = None, False, True

    @property
    def covered_s(self) -> float:
        """The time in which `arrived` counts; 0 without two pages."""
        if self.clock_s is None or self.mark_s is None:
            return 0.0
        return self.clock_s - self.mark_s

    def close(self, window_s: float, least_s: float) -> float | None:
        """The node's part of the load of a window that ends now; None: its last known rate
        holds.
        """
        covered_s = self.covered_s
        is_enough = covered_s >= least_s
        is_new = self.is_new and self.rate is None
        if not is_enough and self.is_serving and not is_new:
            return None  # arrivals since the mark are of the next window
        arrived = max(0.0, self.arrived)
        if covered_s <= 0:
            return None
        is_part = is_new or not self.is_serving
        found = arrived / (max(covered_s, window_s) if is_part else covered_s)
        if is_enough:
            self.rate = arrived / covered_s
        self.restart()
        return found

    def keep_up(self, least_s: float) -> None:
        """Renew the last known rate where no window is closed: a standby makes no samples."""
        if self.covered_s >= least_s:
            self.rate = max(0.0, self.arrived) / self.covered_s
            self.restart()

    def restart(self) -> None:
        """Count from the last page on."""
        self.mark_s, self.arrived, self.is_new = self.clock_s, 0.0, self.clock_s is None


class Loads:
    """Remembers the counters of each node, and makes one sample per service and period."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._service_of: dict[NodeName, ServiceName] = {}
        """For each node that names one, whatever its role."""
        self._counted: dict[NodeName, _Counted] = {}
        self._left: dict[ServiceName, float] = {}
        """Arrivals in this window at nodes that no longer serve."""
        self._since_s: dict[ServiceName, float] = {}
        self._unknown: dict[NodeName, LastKnown] = {}
        """Nodes whose load was reported as unknown."""
        self._over: set[NodeName] = set()
        """Those of them that reported another role or another service, or were removed. A node that
        a new leader has not heard yet is none of these."""
        self._makes_samples = False

    def note(self, report: NodeReport, *, now_s: float) -> None:
        """A node's newest report."""
        node = NodeName(report.node)
        if report.service is None:
            self.remove(node)
            return
        service = self._service_of[node] = ServiceName(report.service)
        is_serving = report.role == NodeRole.SERVING
        counted = self._counted.get(node)
        if counted is not None and not (
            counted.service == service
            and counted.boot_id == report.boot_id
            and (is_serving or report.role == NodeRole.DRAINING)
        ):
            self._leave(node)
            counted = None
        last = self._unknown.get(node)
        if last is not None:
            if not is_serving or last.service != service:
                self._over.add(node)
            else:
                self._over.discard(node)
        if not (is_serving or report.role == NodeRole.DRAINING):
            return
        if counted is None:
            held = None if node in self._over else last
            counted = self._counted[node] = _Counted(
                service=service,
                boot_id=report.boot_id,
                is_serving=is_serving,
                page_at_s=now_s if held is None else held.at_s,
                fresh_s=self._period_s,
                rate=None if held is None else held.load,
            )
        counted.is_serving = is_serving
        counted.fresh_s = max(self._period_s, MISSED * report.period_s)
        is_unread = bool(counted.why) or node in self._unknown
        counted.why = "" if report.inference is not None else _why_unread(report)
        if report.inference is not None:
            if is_unread and now_s - counted.page_at_s >= counted.fresh_s:
                counted.begin_again()
            counted.page_at_s = now_s
            counted.read(report.inference, report.sequence * CLOCK_S)
            if not self._makes_samples:
                counted.keep_up(self._period_s)

    def remove(self, node: NodeName) -> None:
        """Remove a node that no longer belongs to a service."""
        self._leave(node)
        self._service_of.pop(node, None)
        if node in self._unknown:
            self._over.add(node)

    def _leave(self, node: NodeName) -> None:
        counted = self._counted.pop(node, None)
        if counted is not None and counted.arrived > 0:
            left = self._left.get(counted.service, 0.0)
            self._left[counted.service] = left + counted.arrived

    def lead(self, unknown: Mapping[NodeName, LastKnown], *, now_s: float) -> None:
        """Begin a new lead: earlier arrivals are no sample of its own, and earlier rates hold.

        unknown: nodes whose load was last reported as unknown, by an earlier leader.
        """
        for counted in self._counted.values():
            if counted.rate is None:
                counted.keep_up(LEAST_OF_PERIOD * self._period_s)
            counted.restart()
        self._left.clear()
        self._since_s = dict.fromkeys(self._service_of.values(), now_s)
        self._unknown = dict(unknown)
        self._over = {node for node, last in unknown.items() if self._is_over(node, last)}
        for node, last in unknown.items():
            if node not in self._over:
                self._hold(node, last)

    def _is_over(self, node: NodeName, last: LastKnown) -> bool:
        counted = self._counted.get(node)
        if counted is None:
            return node in self._service_of  # it reported, in another role
        return counted.service != last.service or not counted.is_serving

    def _hold(self, node: NodeName, last: LastKnown) -> None:
        """Let the last known load of a node hold, also before its first report."""
        counted = self._counted.get(node)
        if counted is not None:
            if counted.why:
                counted.page_at_s = min(counted.page_at_s, last.at_s)
            if last.load is not None and (counted.why or counted.rate is None):
                counted.rate = last.load
        elif last.is_serving:
            self._counted[node] = _Counted(
                service=last.service,
                boot_id="",  # another service than that of its first report, which takes its place
                is_serving=True,
                page_at_s=last.at_s,
                fresh_s=self._period_s,
                why=last.why,
                rate=last.load,
            )

    def missed(self, missed_s: float, *, now_s: float) -> None:
        """Record a pause in which no report could arrive: no page is late for that."""
        for counted in self._counted.values():
            counted.page_at_s = min(now_s, counted.page_at_s + missed_s)

    def tell_again(self, event: LoadUnknown) -> None:
        """Repeat an event that the engine did not get with the next samples."""
        node = event.node
        if event.why:
            self._unknown.pop(node, None)
            self._over.discard(node)
            return
        service = self._service_of.get(node, ServiceName(""))
        self._unknown[node] = LastKnown(service=service, load=None, at_s=0.0, why="")
        if not event.is_read:
            self._over.add(node)

    def due(self, *, now_s: float, is_silent: Callable[[NodeName], bool]) -> list[Event]:
        """The samples that are due, each after the nodes that became unknown or known."""
        self._makes_samples = True
        over: dict[ServiceName, float] = {}
        for service in sorted(set(self._service_of.values())):
            window_s = now_s - self._since_s.setdefault(service, now_s)
            if window_s >= self._period_s:
                over[service] = window_s
        if not over:
            return []
        members: dict[ServiceName, list[NodeName]] = {service: [] for service in over}
        serving: set[ServiceName] = set()
        for node in sorted(self._counted):
            counted = self._counted[node]
            if counted.is_serving:
                serving.add(counted.service)
            if counted.service in members and not is_silent(node):
                members[counted.service].append(node)
        events: list[Event] = self._gone()
        for service, window_s in over.items():
            events += self._unknowns(members[service], now_s)
            load, is_measured = self._close(service, members[service], window_s)
            is_known = is_measured or service not in serving
            events.append(LoadMeasured(service=service, load=load, is_known=is_known))
            self._since_s[service] = now_s
        return events

    def _gone(self) -> list[Event]:
        """Nodes that no longer serve, so that their load is no longer unknown."""
        gone = sorted(self._over)
        for node in gone:
            del self._unknown[node]
        self._over.clear()
        return [LoadUnknown(node=node) for node in gone]

    def _unknowns(self, members: list[NodeName], now_s: float) -> list[Event]:
        events: list[Event] = []
        for node in members:
            counted = self._counted[node]
            since_s = now_s - counted.page_at_s
            if node in self._unknown:
                if not counted.why and counted.covered_s >= LEAST_OF_PERIOD * self._period_s:
                    del self._unknown[node]
                    events.append(LoadUnknown(node=node, is_read=True))
            elif counted.why and counted.is_serving and since_s >= counted.fresh_s:
                self._unknown[node] = LastKnown(
                    service=counted.service,
                    load=counted.rate,
                    at_s=counted.page_at_s,
                    why=counted.why,
                )
                events.append(
                    LoadUnknown(
                        node=node, why=counted.why, unknown_s=since_s, last_load=counted.rate
                    )
                )
        return events

    def _close(
        self, service: ServiceName, members: list[NodeName], window_s: float
    ) -> tuple[float, bool]:
        """The sum over the nodes, and whether any serving one was measured in this window.

        A node that could never be read counts as much as the mean of the others.
        """
        left = self._left.pop(service, 0.0) / window_s
        rates: list[float] = []
        unread_count, is_measured = 0, False
        for node in members:
            counted = self._counted[node]
            part = counted.close(window_s, LEAST_OF_PERIOD * self._period_s)
            if not counted.is_serving:
                left += part or 0.0  # it is out of its routing: no rate holds
            elif part is not None:
                is_measured = True
                rates.append(part)
            elif counted.rate is not None:
                rates.append(counted.rate)
            elif counted.why or counted.was_unread:
                unread_count += 1
        load = sum(rates)
        if rates:
            load += unread_count * load / len(rates)
        return left + load, is_measured


def _why_unread(report: NodeReport) -> str:
    """Why a report has no page, in its agent's words."""
    failed = (one for one in report.collectors if one.name == COLLECTOR and not one.is_success)
    found = next(failed, None)
    return found.error if found is not None and found.error else "its agent reports no page"
