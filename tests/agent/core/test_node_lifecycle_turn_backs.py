"""A node of a service and a process of nobody's on its GPUs: on its way to a loan, and home."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from agent.core.gpu_handover import to_server
from agent.core.state import Facts, HookKind, Memory
from agent.settings import ServerSettings
from common.messages import GpuHealth, GpuProcess, Trespass
from common.model import GpuUuid, LeaseId, NodeRole, TurnBack
from tests.agent.agent_house import AgentHouse
from tests.agent.bench import SERVER, Bench, key, lease, order, page, two_gpus
from tests.agent.core.test_node_lifecycle_gpu_faults import draining, lent, renewed

R, H = NodeRole, HookKind
FREE_S = 20.0
"""`device_free_timeout_s` here."""


def stranger(bench: Bench, gpu: int = 1, pid: int = 4711) -> None:
    """A process of nobody's comes."""
    bench.pids[gpu], bench.strangers = pid, (gpu,)


def gone(bench: Bench) -> None:
    """Nobody is on a GPU any more."""
    bench.pids, bench.strangers, bench.others = {}, (), ()


def bench() -> Bench:
    """A node of a service."""
    return Bench(device_free_timeout_s=FREE_S)


def test_a_stranger_beside_the_server_is_told() -> None:
    """In words and as a fact, while it is there."""
    house = bench()
    house.serve()
    stranger(house)
    house.step()
    assert [(found.pid, found.gpu_uuid) for found in house.life.trespasses] == [(4711, "GPU-1")]
    assert "trespass: process 4711 on GPU-1" in house.life.detail
    gone(house)
    house.step()
    assert house.life.trespasses == ()


def test_no_server_is_stopped_beside_a_stranger() -> None:
    """Seen before that, the drain turns back: the node gets its requests again, and says why."""
    house = bench()
    draining(house)
    house.page = page(running=1)
    renewed(house, 3)
    stranger(house)
    house.page = page()
    renewed(house, 3)
    assert (house.role(), house.memory.lease) == (R.SERVING, None)
    assert house.hooks == [H.UNROUTE, H.ROUTE]
    why = "GPU GPU-1 is used by process 4711, which is not the server's"
    assert house.memory.turned_back == TurnBack(lease_id=LeaseId("l1-1"), reason=why)


def test_a_stranger_that_outlives_the_server_sends_the_node_home_at_once() -> None:
    """Nobody knows when it ends: the server is started again beside it, without any wait."""
    house = bench()
    draining(house)
    while H.STOP not in house.hooks:
        renewed(house, 1)
    stranger(house)
    renewed(house, 4)
    assert house.role() == R.SERVING
    assert house.hooks == [H.UNROUTE, H.STOP, H.START, H.ROUTE]
    assert house.memory.turned_back is not None
    assert "process 4711" in house.memory.turned_back.reason


def test_who_outlives_a_server_that_nobody_could_tell_from_others_is_waited_for_once() -> None:
    """It may be the server's own, and end; after `device_free_timeout_s` it is a stranger, and the
    server is started at once. So it is as long as it is there, also for an agent that restarts."""
    house = bench()
    draining(house)
    house.pids[1], house.others = 4711, (1,)
    while H.STOP not in house.hooks:
        renewed(house, 1)
    renewed(house, int(FREE_S))
    assert (house.role(), house.memory.left_behind) == (R.DRAINING, [])
    renewed(house, 5)
    assert (house.role(), house.memory.left_behind) == (R.SERVING, [4711])
    assert house.memory.turned_back is not None
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(house.memory), type=Memory)
    assert saved.left_behind == [4711]
    house.sick[0] = GpuHealth.UNRESPONSIVE
    house.pids = {}
    house.others = ()
    house.step()
    assert house.memory.left_behind == [4711], "who is there, such a GPU does not tell"
    house.sick = {}
    house.step()
    assert house.memory.left_behind == []


@pytest.mark.parametrize("memory_bytes", [0, 900])
def test_a_stranger_that_came_during_the_loan_keeps_no_node_from_coming_home(
    memory_bytes: int,
) -> None:
    """Whatever memory is in use on its GPU may be its own; the server is started beside it."""
    house = bench()
    lent(house)
    house.memory_used_bytes[1] = memory_bytes
    stranger(house)
    house.want(R.SERVING)
    house.steps(4)
    assert house.hooks == [H.START, H.ROUTE]
    assert house.role() == R.SERVING
    assert house.memory.turned_back is None, "it was asked back"


def test_a_stranger_on_one_gpu_excuses_no_other_process() -> None:
    """One that may be a worker's, which ends, keeps the server out on the same GPU and on others;
    after `device_free_timeout_s` it has had its time."""
    house = bench()
    lent(house)
    stranger(house, 1)
    house.pids[0], house.others = 12, (0, 1)
    house.want(R.SERVING)
    house.steps(int(FREE_S))
    assert house.role() == R.VACATING
    house.steps(4)
    assert house.role() == R.SERVING
    assert house.memory.left_behind == [12, 4711], "so that it is learnt once"


def test_who_keeps_the_server_out_is_named_and_not_the_stranger_beside_him() -> None:
    """Whoever looks for the one that is waited for must not find the other."""
    [gpu, _] = two_gpus({0: 4711})
    both = msgspec.structs.replace(gpu, processes=(*(gpu.processes or ()), GpuProcess(pid=12)))
    facts = Facts(now_s=2.0, gpus=(both,), sampled_at_s=1.0)
    beside = frozenset({4711})
    said = to_server(facts, since_s=0.0, free_memory_ratio=0.05, beside=beside)
    assert said == "GPU GPU-0 is used by process 12"
    assert to_server(facts, since_s=0.0, free_memory_ratio=0.05, beside=beside | {12}) == ""


def test_memory_that_nobody_holds_still_keeps_the_server_out() -> None:
    """A driver that lost it does not give it to a server either; quarantine, as ever."""
    house = bench()
    lent(house)
    house.memory_used_bytes[0] = 900
    house.want(R.SERVING)
    house.steps(int(FREE_S) + 3)
    assert house.role() == R.QUARANTINED


def test_a_stranger_does_not_excuse_a_worker() -> None:
    """Its node waits for the worker, as long as that may take."""
    house = bench()
    lent(house)
    house.want(R.ON_LOAN, order(), lease=lease())
    house.step()
    house.runs(key())
    stranger(house)
    house.want(R.SERVING, order())
    house.steps(5)
    assert house.role() == R.VACATING
    house.ends(key())
    house.steps(5)
    assert house.role() == R.SERVING


@pytest.mark.parametrize("how", ["asked", "refused", "ran out"])
def test_a_drain_that_the_coordinator_or_the_ttl_ended_did_not_turn_back(how: str) -> None:
    """Whatever else is the matter by then: that came first."""
    house = bench()
    draining(house)
    house.page = page(running=1)
    renewed(house, 2)
    if how == "asked":
        house.want(R.SERVING)
    elif how == "refused":
        house.life.refused(LeaseId("l1-1"), "no")
    else:
        house.now_s += 100.0
    stranger(house)
    house.steps(3)
    assert (house.role(), house.memory.turned_back) == (R.SERVING, None)


def test_that_a_node_turned_back_is_told_until_the_next_lease() -> None:
    """Of that one it would be false."""
    house = bench()
    draining(house)
    stranger(house)
    renewed(house, 3)
    assert house.memory.turned_back is not None
    gone(house)
    house.want(R.ON_LOAN, lease=lease("l1-2"))
    assert house.memory.turned_back is None


def test_quarantine_does_not_end_beside_anybody() -> None:
    """There the node is of no use to its service anyhow, and who it is should be looked at."""
    house = bench()
    house.serve()
    house.want(R.QUARANTINED)
    house.is_healthy = False
    stranger(house)
    house.step()
    house.want(R.SERVING)
    house.steps(100)
    assert house.role() == R.QUARANTINED
    assert "GPU-1 is used by process 4711" in house.life.detail


# --- the whole agent --------------------------------------------------------------------------


class World:
    """A machine on which a test says who is not the server's."""

    def __init__(self) -> None:
        self.beside: set[int] | None = set()
        """None: it cannot tell."""

    def free_port(self) -> int:
        return 4711

    def listening_ports(self) -> frozenset[int]:
        return frozenset()

    def strangers(self, pids: Iterable[int], owners: Iterable[int]) -> set[int]:
        return set(pids)

    def beside_server(self, pids: Iterable[int], server: ServerSettings) -> set[int] | None:
        return None if self.beside is None else self.beside & set(pids)

    def owner(self, pid: int) -> str:
        return f"uid 7: p{pid}"


async def test_an_agent_reports_who_is_beside_its_server_and_that_it_turned_back() -> None:
    """What its coordinator decides by."""
    world = World()
    async with AgentHouse(inference=True, world=world) as house:
        await house.until(lambda: bool(house.reports) and house.report.role == R.SERVING)
        house.machine.pids, world.beside = {0: 20, 1: 30}, {30}
        await house.until(lambda: len(house.report.trespasses) > 0)
        found = Trespass(pid=30, gpu_uuid=GpuUuid("GPU-1"), owner="uid 7: p30")
        assert house.report.trespasses == (found,)
        assert not any(report.turned_back for report in house.reports)
        await house.want(R.ON_LOAN, lease=lease())
        await house.until(lambda: house.report.turned_back is not None)
        why = "GPU GPU-1 is used by process 30, which is not the server's"
        assert house.report.turned_back == TurnBack(lease_id=LeaseId("l1-1"), reason=why)
        assert "stop" not in house.machine.commands


async def test_the_first_report_of_an_agent_that_restarts_names_the_strangers_of_before() -> None:
    """Its coordinator would lend the node by one that names none."""
    world = World()
    async with AgentHouse(inference=True, world=world) as house:
        await house.until(lambda: bool(house.reports) and house.report.role == R.SERVING)
        house.machine.pids, world.beside = {0: 20, 1: 30}, {30}
        await house.until(lambda: len(house.report.trespasses) > 0)
    async with AgentHouse(inference=True, world=world, before=house) as again:
        await again.until(lambda: bool(again.reports))
        assert again.reports[0].role == R.SERVING
        assert [found.pid for found in again.reports[0].trespasses] == [30]


async def test_an_agent_reports_that_its_servers_units_are_not_where_it_runs() -> None:
    """As long as it is so."""
    world = World()
    server = msgspec.structs.replace(SERVER, units=("vlm.service",))
    async with AgentHouse(inference=True, world=world, server=server) as house:
        await house.until(lambda: bool(house.reports) and house.report.role == R.SERVING)
        house.machine.pids, world.beside = {0: 20}, None
        said = "server.units: no process on a GPU is in vlm.service"
        await house.until(lambda: said in house.report.detail)
        world.beside = set()
        await house.until(lambda: said not in house.report.detail)


async def test_an_agent_stops_no_server_while_it_waits_to_see_who_stays() -> None:
    """For as long as its settings say; nobody is told as a stranger yet."""
    world = World()
    async with AgentHouse(inference=True, world=world, stranger_after_s=1000.0) as house:
        await house.until(lambda: bool(house.reports) and house.report.role == R.SERVING)
        house.machine.commands.clear()
        house.machine.pids, world.beside = {0: 20, 1: 30}, {30}
        await house.want(R.ON_LOAN, lease=lease())
        await house.until(lambda: "whether process 30 stays" in house.report.detail)
        await house.clock.advance(10.0)
        assert (house.machine.commands, house.report.trespasses) == (["unroute"], ())
        house.machine.pids = {0: 20}
        await house.until(lambda: "stop" in house.machine.commands)
