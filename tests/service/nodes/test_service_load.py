"""The load of a service is what arrives, whatever becomes of pages, reports and leaders."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import CollectorReport, InferenceReport, NodeReport
from common.model import NodeName, NodeRole, Pool, ServiceName
from coordinator.engine.state.events import Event, LoadMeasured, LoadUnknown, NodeSilent
from coordinator.service.coordinator import Coordinator
from coordinator.service.nodes.report_folding import Folder
from coordinator.service.nodes.service_load import LastKnown, Loads
from tests.harness.cluster.coordinator import CHAT, Cell, on_loan
from tests.tables import each_row

PERIOD_S = 10.0
LOST_AFTER_S = 15.0
LATE = "no whole answer within 2 s"


class Fleet:
    """Nodes with counters that grow at a steady rate, and a folder that hears of them."""

    def __init__(self, *rates: float, lost_after_s: float = LOST_AFTER_S) -> None:
        self.rates = {NodeName(f"i{number}"): rate for number, rate in enumerate(rates)}
        self.folder = Folder(
            lost_after_s=lost_after_s, load_period_s=PERIOD_S, progress_period_s=PERIOD_S
        )
        self.standby = Loads(PERIOD_S)
        """Hears what `hear` lets in, and makes no sample."""
        self.boot_ids = dict.fromkeys(self.rates, "b")
        self.now_s = 1000.0
        self.begun_at_s = dict.fromkeys(self.rates, 0.0)
        """When each server started; its counter is 0 then."""
        self.folder.due(now_s=self.now_s)

    def report(
        self,
        node: NodeName,
        *,
        error: str = "",
        role: NodeRole = NodeRole.SERVING,
        ago_s: float = 0,
    ) -> NodeReport:
        """What a node says, or said some time ago."""
        at_s = self.now_s - ago_s
        served = self.rates[node] * (at_s - self.begun_at_s[node])
        is_read = not error and role != NodeRole.ON_LOAN
        return NodeReport(
            node=node,
            boot_id=self.boot_ids[node],
            sequence=round(at_s * 1000),
            home_pool=Pool.INFERENCE,
            role=role,
            epoch=1,
            generation=1,
            service=CHAT,
            instance="one",
            period_s=1.0,
            inference=InferenceReport(running_count=0, waiting_count=0, success_total=served)
            if is_read
            else None,
            collectors=(
                CollectorReport(
                    name="inference", is_success=not error, duration_s=0.0, error=error
                ),
            ),
        )

    def hear(self, node: NodeName, *, error: str = "", ago_s: float = 0.0) -> None:
        """A report of a node comes in."""
        report = self.report(node, error=error, ago_s=ago_s)
        self.folder.fold(report, now_s=self.now_s)
        self.standby.note(report, now_s=self.now_s)

    def second(self, **errors: str) -> list[Event]:
        """One second with a report of each node; `errors` are of pages that cannot be read."""
        self.now_s += 1.0
        for node in self.rates:
            self.hear(node, error=errors.get(node, ""))
        return self.due()

    def seconds(self, count: int, **errors: str) -> list[Event]:
        """So many of them."""
        return [event for _ in range(count) for event in self.second(**errors)]

    def due(self) -> list[Event]:
        """What the folder says of loads now."""
        events = self.folder.due(now_s=self.now_s)
        return [one for one in events if isinstance(one, LoadMeasured | LoadUnknown)]


def samples(events: list[Event]) -> list[LoadMeasured]:
    """The loads among some events."""
    return [event for event in events if isinstance(event, LoadMeasured)]


def unknowns(events: list[Event]) -> list[LoadUnknown]:
    """What became unknown or known again."""
    return [event for event in events if isinstance(event, LoadUnknown)]


@each_row(
    ("pages", "load"),
    [
        ([(10.0, 0.0), (30.0, 0.0)], 2.0),
        ([(10.0, 0.0), (30.0, 4.0)], 2.4),
        ([(10.0, 8.0), (30.0, 0.0)], 1.2),
        ([(10.0, 8.0), (10.0, 0.0)], 0.0),
    ],
    ids=["completed", "and still in flight", "arrived before", "never negative"],
)
def test_load_is_what_arrived(pages: list[tuple[float, float]], load: float) -> None:
    """Arrivals = completions + change of what is in flight, per second between two pages."""
    fleet = Fleet(0.0)
    node = NodeName("i0")
    for total, in_flight in pages:
        page = InferenceReport(running_count=in_flight, waiting_count=0.0, success_total=total)
        report = msgspec.structs.replace(fleet.report(node), inference=page)
        fleet.folder.fold(report, now_s=fleet.now_s)
        fleet.due()
        fleet.now_s += PERIOD_S
    [event] = samples(fleet.due())
    assert event.service == CHAT
    assert event.load == pytest.approx(load)


HOW = st.sampled_from(["read", "unread", "skipped", "late"])


@pytest.mark.slow
@given(
    rates=st.lists(st.sampled_from([0.0, 1.0, 7.5]), min_size=1, max_size=3),
    hows=st.lists(st.lists(HOW, min_size=3, max_size=3), max_size=60),
)
@settings(max_examples=60, deadline=None)
def test_a_steady_load_is_told_as_it_is_whatever_is_not_read_or_not_heard(
    rates: list[float], hows: list[list[str]]
) -> None:
    """Pages that cannot be read, reports that are skipped and reports that come late in one heap
    neither lower nor raise the load once it is known."""
    fleet = Fleet(*rates, lost_after_s=1e6)
    fleet.seconds(30)
    held: dict[NodeName, list[NodeReport]] = {node: [] for node in fleet.rates}
    for row in hows:
        fleet.now_s += 1.0
        for how, node in zip(row, fleet.rates, strict=False):
            if how == "late":
                held[node].append(fleet.report(node))
            if how in ("late", "skipped"):
                continue
            for report in held[node]:
                fleet.folder.fold(report, now_s=fleet.now_s)
            held[node].clear()
            fleet.hear(node, error=LATE if how == "unread" else "")
        for sample in samples(fleet.due()):
            assert sample.load == pytest.approx(sum(rates))


@pytest.mark.slow
@given(restarts=st.lists(st.booleans(), max_size=60))
@settings(max_examples=40, deadline=None)
def test_a_server_that_restarts_makes_no_negative_and_no_huge_load(restarts: list[bool]) -> None:
    """Its counter falls to zero at any second: the load is what it was, or its last known rate."""
    fleet = Fleet(4.0)
    fleet.seconds(30)
    for is_restarted in restarts:
        if is_restarted:
            fleet.begun_at_s[NodeName("i0")] = fleet.now_s + 0.5
        for sample in samples(fleet.second()):
            assert sample.load == pytest.approx(4.0)


def test_a_counter_that_lost_a_part_of_itself_is_no_load() -> None:
    """A model was unloaded with its label set: what the others count is not what arrived."""
    fleet = Fleet(4.0)
    fleet.seconds(30)
    fleet.begun_at_s[NodeName("i0")] = 100.0  # 400 fewer, of some 4,000
    assert [one.load for one in samples(fleet.seconds(20))] == pytest.approx([4.0, 4.0])


def test_what_a_standby_heard_is_no_sample_of_the_leader_that_it_becomes() -> None:
    """After 38 s as a standby the first sample of 1 request a second is 1, not 38."""
    fleet = Fleet(1.0)
    for _ in range(38):
        fleet.now_s += 1.0
        fleet.hear(NodeName("i0"))
    fleet.folder.loads.lead({}, now_s=fleet.now_s)
    assert [one.load for one in samples(fleet.seconds(25))] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("is_due_first", [True, False])
def test_a_pause_is_no_load_and_no_silence_of_pages(is_due_first: bool) -> None:
    """A process that was stopped for a minute then reads all reports at once, or first looks."""
    fleet = Fleet(3.0)
    fleet.folder.listened(now_s=fleet.now_s, period_s=1.0)
    for _ in range(30):
        fleet.second()
        fleet.folder.listened(now_s=fleet.now_s, period_s=1.0)
    fleet.now_s += 60.0
    fleet.folder.listened(now_s=fleet.now_s, period_s=1.0)
    events = fleet.due() if is_due_first else []
    for ago_s in range(59, -1, -1):
        fleet.hear(NodeName("i0"), ago_s=float(ago_s))
    events += fleet.due() + fleet.seconds(25)
    assert [one.load for one in samples(events)] == pytest.approx([3.0] * len(samples(events)))
    assert unknowns(events) == []


@pytest.mark.parametrize("is_first", [True, False])
def test_a_report_that_waited_through_a_pause_is_no_silence_of_its_node(is_first: bool) -> None:
    """Time in which nobody listened counts for nothing, whether or not the node was heard before;
    time in which somebody listened counts in full."""
    fleet, node = Fleet(3.0), NodeName("i0")
    folder = fleet.folder
    if not is_first:
        fleet.hear(node)
    folder.listened(now_s=fleet.now_s, period_s=1.0)
    arrived_s, waited = fleet.now_s + 0.5, fleet.report(node, error=LATE, ago_s=-0.5)
    fleet.now_s += 30.0
    assert folder.listened(now_s=fleet.now_s, period_s=1.0) == 29.0
    folder.fold(waited, now_s=arrived_s)
    assert folder.silent_s(node, now_s=fleet.now_s) <= 1.0
    events = folder.due(now_s=fleet.now_s)
    assert not [one for one in events if isinstance(one, NodeSilent | LoadUnknown)]
    for _ in range(int(LOST_AFTER_S) + 1):
        fleet.now_s += 1.0
        assert folder.listened(now_s=fleet.now_s, period_s=1.0) == 0.0
    [silence] = [one for one in folder.due(now_s=fleet.now_s) if isinstance(one, NodeSilent)]
    assert LOST_AFTER_S < silence.silent_s <= LOST_AFTER_S + 2.0


def test_a_page_that_cannot_be_read_is_told_once_with_the_last_load_and_once_when_it_can() -> None:
    """Not each second, and not for a page that is late now and then."""
    fleet = Fleet(5.0, 2.0)
    fleet.seconds(30)
    for _ in range(20):
        assert not unknowns(fleet.second(i0=LATE) + fleet.second())
    [told] = unknowns(fleet.seconds(60, i0=LATE))
    assert (told.node, told.why, told.is_read) == ("i0", LATE, False)
    assert told.last_load == pytest.approx(5.0)
    assert told.unknown_s >= PERIOD_S
    [told] = unknowns(fleet.seconds(30))
    assert (told.node, told.why, told.is_read) == ("i0", "", True)


def test_a_load_that_came_while_no_page_was_read_is_told_as_it_is_now() -> None:
    """The mean over that time is the load of no moment: nothing may be lent on it."""
    fleet = Fleet(0.0, 0.0)
    unread = dict.fromkeys(fleet.rates, LATE)
    fleet.seconds(30)
    fleet.seconds(50, **unread)
    for node in fleet.rates:
        fleet.rates[node], fleet.begun_at_s[node] = 9.0, fleet.now_s
    fleet.seconds(20, **unread)
    events = fleet.seconds(35)
    first, second = unknowns(events)
    assert (first.is_read, second.is_read) == (True, True)
    known = [one.load for one in samples(events) if one.is_known]
    assert known == pytest.approx([18.0] * 3)
    assert events.index(second) < events.index(next(one for one in samples(events) if one.is_known))


def test_one_page_is_a_measurement_and_none_is_not() -> None:
    """A sample with known and held parts is one; of held parts alone it says so."""
    fleet = Fleet(5.0, 2.0)
    fleet.seconds(30)
    partly = samples(fleet.seconds(30, i0=LATE))
    assert [one.load for one in partly] == pytest.approx([7.0] * 3)
    assert all(one.is_known for one in partly)
    wholly = samples(fleet.seconds(30, i0=LATE, i1=LATE))
    assert [one.load for one in wholly[1:]] == pytest.approx([7.0] * 2)
    assert not any(one.is_known for one in wholly[1:])


def test_a_node_that_was_never_read_counts_as_the_mean_of_the_others() -> None:
    """Nothing is known of it: it is not idle."""
    fleet = Fleet(5.0, 3.0, 99.0)
    loads = [one.load for one in samples(fleet.seconds(40, i2=LATE))]
    assert loads[1:] == pytest.approx([12.0] * len(loads[1:]))


def test_a_node_whose_first_page_has_just_come_counts_as_the_mean_of_the_others() -> None:
    """Until it is measured: its load is unknown, and not none."""
    for read_alone_s in range(10):
        for unread_s in range(12, 60):
            fleet = Fleet(10.0)
            fleet.seconds(30 + read_alone_s)
            late = NodeName("i1")
            fleet.rates[late], fleet.begun_at_s[late] = 10.0, fleet.now_s
            fleet.boot_ids[late] = "b"
            fleet.seconds(unread_s, i1=LATE)
            loads = [one.load for one in samples(fleet.seconds(30))]
            assert loads == pytest.approx([20.0] * len(loads))


def test_a_node_that_leaves_takes_its_requests_into_no_other_window() -> None:
    """What arrived before it was lent is of the window in which it left, and of no later one."""
    fleet = Fleet(4.0, 4.0)
    fleet.seconds(25)
    gone = NodeName("i1")
    fleet.now_s += 1.0
    fleet.folder.fold(fleet.report(gone, role=NodeRole.ON_LOAN), now_s=fleet.now_s)
    del fleet.rates[gone]
    first, *others = samples(fleet.seconds(30))
    assert 4.0 < first.load < 8.0
    assert [one.load for one in others] == pytest.approx([4.0] * len(others))


def test_a_service_whose_nodes_all_fell_silent_has_no_known_load() -> None:
    """Silence is no rest: the load is not measured as zero."""
    fleet = Fleet(4.0)
    fleet.seconds(30)
    fleet.now_s += 30.0
    assert [one.is_known for one in samples(fleet.due())] == [False]
    fleet.folder.remove_node(NodeName("i0"))
    fleet.now_s += 30.0
    assert samples(fleet.due()) == []


class Table:
    """What the journal knows of nodes whose load is unknown, kept as the engine keeps it."""

    def __init__(self) -> None:
        self.known: dict[NodeName, LastKnown] = {}

    def take(self, events: list[Event], *, now_s: float) -> None:
        """Let events in."""
        for told in unknowns(events):
            if not told.why:
                self.known.pop(told.node, None)
            elif told.node not in self.known:
                self.known[told.node] = LastKnown(
                    service=ServiceName(CHAT),
                    load=told.last_load,
                    at_s=now_s - told.unknown_s,
                    why=told.why,
                )

    @property
    def load(self) -> float:
        """The last known loads together."""
        return sum(one.load or 0.0 for one in self.known.values())


def takeover(fleet: Fleet, table: Table, *, hears: bool) -> None:
    """A standby that heard the same pages, or a coordinator that starts, becomes the leader."""
    loads = fleet.standby if hears else Loads(PERIOD_S)
    loads.lead(table.known, now_s=fleet.now_s)
    fleet.folder.loads, fleet.standby = loads, Loads(PERIOD_S)


PAGES = st.lists(
    st.tuples(st.tuples(*[st.sampled_from(["read", "unread", "skipped"])] * 3), st.integers(1, 25)),
    min_size=1,
    max_size=5,
)
"""How pages of three nodes are for so many seconds."""


@pytest.mark.slow
@given(
    rates=st.tuples(*[st.sampled_from([0.0, 1.0, 7.5])] * 3),
    before=PAGES,
    after=PAGES,
    hears=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_a_takeover_lowers_no_unknown_load_and_sets_no_clock_of_it_back(
    rates: tuple[float, ...],
    before: list[tuple[tuple[str, ...], int]],
    after: list[tuple[tuple[str, ...], int]],
    hears: bool,
) -> None:
    """Whatever pages are read before and after it: a sample holds the last known load of each node
    whose load is unknown, since its last page. After a standby that heard all, it is the load."""
    fleet, table = Fleet(*rates, lost_after_s=1e6), Table()
    fleet.seconds(30)
    page_at_s = dict.fromkeys(fleet.rates, fleet.now_s)

    def live(pages: list[tuple[tuple[str, ...], int]], *, is_whole: bool) -> None:
        for row in [row for row, count in pages for _ in range(count)]:
            fleet.now_s += 1.0
            for how, node in zip(row, fleet.rates, strict=True):
                if how != "skipped":
                    fleet.hear(node, error=LATE if how == "unread" else "")
                if how == "read":
                    page_at_s[node] = fleet.now_s
            events = fleet.due()
            table.take(events, now_s=fleet.now_s)
            for sample in samples(events):
                assert sample.load >= table.load * (1 - 1e-9)
                if is_whole:
                    assert sample.load == pytest.approx(sum(rates))
            for node, one in table.known.items():
                assert one.at_s <= page_at_s[node]

    live(before, is_whole=True)
    takeover(fleet, table, hears=hears)
    if not hears:  # it cannot know since when a page was not read that no journal speaks of
        page_at_s.update({node: float("inf") for node in fleet.rates if node not in table.known})
    live(after, is_whole=hears)


def test_a_node_that_a_new_leader_has_not_heard_yet_has_not_stopped_to_serve() -> None:
    """Its last known load holds, and its load is known again only after a page or another role."""
    fleet, table = Fleet(9.0, 1.0), Table()
    table.take(fleet.seconds(30) + fleet.seconds(30, i0=LATE), now_s=fleet.now_s)
    node, other = fleet.rates
    assert list(table.known) == [node]
    takeover(fleet, table, hears=False)
    events: list[Event] = []
    for _ in range(12):
        fleet.now_s += 1.0
        fleet.hear(other)
        events += fleet.due()
    assert unknowns(events) == []
    assert [one.load for one in samples(events)] == pytest.approx([10.0])
    for _ in range(12):
        fleet.now_s += 1.0
        fleet.folder.fold(fleet.report(node, role=NodeRole.ON_LOAN), now_s=fleet.now_s)
        fleet.hear(other)
        events += fleet.due()
    assert [(one.node, one.is_read) for one in unknowns(events)] == [(node, False)]
    assert samples(events)[-1].load == pytest.approx(1.0)


def test_a_boot_of_a_node_whose_load_is_unknown_lowers_nothing() -> None:
    """No page of the new boot is read either: the last known load holds."""
    fleet = Fleet(9.0, 1.0)
    fleet.seconds(30)
    fleet.seconds(30, i0=LATE)
    fleet.boot_ids[NodeName("i0")] = "another"
    events = fleet.seconds(30, i0=LATE)
    assert unknowns(events) == []
    assert [one.load for one in samples(events)] == pytest.approx([10.0] * 3)


def test_a_new_leader_tells_what_is_read_again_and_what_is_not() -> None:
    """What the leader before it had told as unknown, and what became so while it stood by."""
    fleet = Fleet(4.0, 4.0)
    for _ in range(30):
        fleet.now_s += 1.0
        fleet.hear(NodeName("i0"))
        fleet.hear(NodeName("i1"), error=LATE)
    table = Table()
    table.take([LoadUnknown(node=NodeName("i0"), why=LATE, last_load=4.0)], now_s=fleet.now_s)
    fleet.folder.loads.lead(table.known, now_s=fleet.now_s)
    told = unknowns(fleet.seconds(25, i1=LATE))
    assert [(one.node, bool(one.why)) for one in told] == [("i0", False), ("i1", True)]
    assert told[1].unknown_s >= 30.0


# --- a whole coordinator ----------------------------------------------------------------------


def loads(cell: Cell) -> list[LoadMeasured]:
    """All that the journal holds."""
    events = [entry.event for _, record in cell.journal() for entry in record.entries]
    return samples(events)


def lent_count(coordinator: Coordinator) -> int:
    """Nodes with a lease."""
    return sum(node.lease is not None for node in coordinator.engine.state.nodes.values())


@pytest.mark.slow
async def test_a_takeover_invents_no_load_and_calls_no_node_home() -> None:
    """A standby hears its nodes for a minute; after the takeover the load is what it was."""
    async with Cell(inference=3) as cell:
        for name in ("i0", "i1", "i2"):
            cell.agents[name].load_per_s = 1.0
        await cell.lead("one")
        standby = cell.launch("two").coordinator
        await on_loan(cell, cell.leaders[0].coordinator)
        await cell.clock.advance(60.0)
        lent = lent_count(cell.leaders[0].coordinator)
        assert lent
        await cell.leaders[0].crash()
        await cell.until(lambda: standby.is_leading)
        before = len(loads(cell))
        await cell.clock.advance(20.0)
        serving = 3.0 - lent
        found = [one.load for one in loads(cell)[before:]]
        assert found
        assert found == pytest.approx([serving] * len(found))
        assert (lent_count(standby), standby.engine.state.counters.reclaims) == (lent, 0)


@pytest.mark.slow
async def test_a_leader_that_starts_takes_the_unknown_loads_from_the_journal() -> None:
    """It stood by for no second: the last known load of a node holds, since the same instant."""
    async with Cell(inference=3) as cell:
        first = await cell.lead("one")
        for name, load_per_s in (("i0", 9.0), ("i1", 1.0), ("i2", 1.0)):
            cell.agents[name].load_per_s = load_per_s
        await cell.clock.advance(30.0)
        cell.agents["i0"].page_error = LATE
        await cell.until(lambda: bool(first.engine.state.unknown_loads))
        [known] = first.engine.state.unknown_loads.values()
        assert known.load == pytest.approx(9.0)
        await cell.leaders[0].crash()
        before = len(loads(cell))
        second = cell.launch("two").coordinator
        await cell.until(lambda: second.is_leading)
        await cell.clock.advance(30.0)
        found = [one.load for one in loads(cell)[before:]]
        assert found
        assert min(found) >= 9.0
        [again] = second.engine.state.unknown_loads.values()
        assert (again.since_s, again.load) == (known.since_s, known.load)


@pytest.mark.slow
async def test_nothing_is_lent_of_a_service_whose_pages_cannot_be_read() -> None:
    """Its lent node comes home after `unknown_load_s`, and the reason says why."""
    async with Cell(inference=3) as cell:
        coordinator = await cell.lead()
        for name in ("i0", "i1", "i2"):
            cell.agents[name].load_per_s = 1.0
        await on_loan(cell, coordinator)
        state = coordinator.engine.state
        [loan] = state.loans.values()
        for agent in cell.agents.values():
            agent.page_error = LATE
        await cell.until(lambda: bool(state.services[ServiceName(CHAT)].unknown_since_s))
        await cell.until(lambda: loan.returned_at_s is not None)
        assert "unknown" in loan.reclaim_reason
        assert LATE in loan.reclaim_reason
        assert len(state.loans) == 1


@pytest.mark.parametrize("is_known_again", [False, True])
def test_a_change_that_the_engine_did_not_get_comes_again(is_known_again: bool) -> None:
    """Both ways: the node became unknown, or its page is read again."""
    fleet = Fleet(2.0, 3.0)
    fleet.seconds(20)
    before = unknowns(fleet.seconds(30, i0=LATE))
    if is_known_again:
        before = unknowns(fleet.seconds(20))
    (lost,) = before
    fleet.folder.loads.tell_again(lost)
    (again,) = unknowns(fleet.seconds(20, **({} if is_known_again else {"i0": LATE})))
    assert (again.node, bool(again.why), again.is_read) == (lost.node, bool(lost.why), lost.is_read)


def test_a_node_that_left_before_its_unknown_load_was_told_again_is_none() -> None:
    """The engine did not get the first event, and needs no second one."""
    fleet = Fleet(2.0, 3.0)
    fleet.seconds(20)
    (lost,) = unknowns(fleet.seconds(30, i0=LATE))
    gone = NodeName("i0")
    fleet.now_s += 1.0
    fleet.folder.fold(fleet.report(gone, role=NodeRole.ON_LOAN), now_s=fleet.now_s)
    del fleet.rates[gone]
    fleet.folder.loads.tell_again(lost)
    assert unknowns(fleet.seconds(20)) == []
