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
from tests.agent.core.test_node_lifecycle_gpu_faults import draining, lent, renewed
from tests.harness.node.agent import AgentHarness
from tests.harness.node.life import SERVER, LifeHarness, key, lease, order, page, two_gpus

R, H = NodeRole, HookKind
FREE_S = 20.0
"""`device_free_timeout_s` here."""


def stranger(life_harness: LifeHarness, gpu: int = 1, pid: int = 4711) -> None:
    """A process of nobody's comes."""
    life_harness.pids[gpu], life_harness.strangers = pid, (gpu,)


def gone(life_harness: LifeHarness) -> None:
    """Nobody is on a GPU any more."""
    life_harness.pids, life_harness.strangers, life_harness.others = {}, (), ()


def life_harness() -> LifeHarness:
    """A node of a service."""
    return LifeHarness(device_free_timeout_s=FREE_S)


def test_a_stranger_beside_the_server_is_told() -> None:
    """In words and as a fact, while it is there."""
    harness = life_harness()
    harness.serve()
    stranger(harness)
    harness.step()
    assert [(found.pid, found.gpu_uuid) for found in harness.life.trespasses] == [(4711, "GPU-1")]
    assert "trespass: process 4711 on GPU-1" in harness.life.detail
    gone(harness)
    harness.step()
    assert harness.life.trespasses == ()


def test_no_server_is_stopped_beside_a_stranger() -> None:
    """Seen before that, the drain turns back: the node gets its requests again, and says why."""
    harness = life_harness()
    draining(harness)
    harness.page = page(running=1)
    renewed(harness, 3)
    stranger(harness)
    harness.page = page()
    renewed(harness, 3)
    assert (harness.role(), harness.memory.lease) == (R.SERVING, None)
    assert harness.hooks == [H.UNROUTE, H.ROUTE]
    why = "GPU GPU-1 is used by process 4711, which is not the server's"
    assert harness.memory.turned_back == TurnBack(lease_id=LeaseId("l1-1"), reason=why)


def test_a_stranger_that_outlives_the_server_sends_the_node_home_at_once() -> None:
    """Nobody knows when it ends: the server is started again beside it, without any wait."""
    harness = life_harness()
    draining(harness)
    while H.STOP not in harness.hooks:
        renewed(harness, 1)
    stranger(harness)
    renewed(harness, 4)
    assert harness.role() == R.SERVING
    assert harness.hooks == [H.UNROUTE, H.STOP, H.START, H.ROUTE]
    assert harness.memory.turned_back is not None
    assert "process 4711" in harness.memory.turned_back.reason


def test_who_outlives_a_server_that_nobody_could_tell_from_others_is_waited_for_once() -> None:
    """It may be the server's own, and end; after `device_free_timeout_s` it is a stranger, and the
    server is started at once. So it is as long as it is there, also for an agent that restarts."""
    harness = life_harness()
    draining(harness)
    harness.pids[1], harness.others = 4711, (1,)
    while H.STOP not in harness.hooks:
        renewed(harness, 1)
    renewed(harness, int(FREE_S))
    assert (harness.role(), harness.memory.left_behind) == (R.DRAINING, [])
    renewed(harness, 5)
    assert (harness.role(), harness.memory.left_behind) == (R.SERVING, [4711])
    assert harness.memory.turned_back is not None
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(harness.memory), type=Memory)
    assert saved.left_behind == [4711]
    harness.sick[0] = GpuHealth.UNRESPONSIVE
    harness.pids = {}
    harness.others = ()
    harness.step()
    assert harness.memory.left_behind == [4711], "who is there, such a GPU does not tell"
    harness.sick = {}
    harness.step()
    assert harness.memory.left_behind == []


@pytest.mark.parametrize("memory_bytes", [0, 900])
def test_a_stranger_that_came_during_the_loan_keeps_no_node_from_coming_home(
    memory_bytes: int,
) -> None:
    """Whatever memory is in use on its GPU may be its own; the server is started beside it."""
    harness = life_harness()
    lent(harness)
    harness.memory_used_bytes[1] = memory_bytes
    stranger(harness)
    harness.want(R.SERVING)
    harness.steps(4)
    assert harness.hooks == [H.START, H.ROUTE]
    assert harness.role() == R.SERVING
    assert harness.memory.turned_back is None, "it was asked back"


def test_a_stranger_on_one_gpu_excuses_no_other_process() -> None:
    """One that may be a worker's, which ends, keeps the server out on the same GPU and on others;
    after `device_free_timeout_s` it has had its time."""
    harness = life_harness()
    lent(harness)
    stranger(harness, 1)
    harness.pids[0], harness.others = 12, (0, 1)
    harness.want(R.SERVING)
    harness.steps(int(FREE_S))
    assert harness.role() == R.VACATING
    harness.steps(4)
    assert harness.role() == R.SERVING
    assert harness.memory.left_behind == [12, 4711], "so that it is learnt once"


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
    harness = life_harness()
    lent(harness)
    harness.memory_used_bytes[0] = 900
    harness.want(R.SERVING)
    harness.steps(int(FREE_S) + 3)
    assert harness.role() == R.QUARANTINED


def test_a_stranger_does_not_excuse_a_worker() -> None:
    """Its node waits for the worker, as long as that may take."""
    harness = life_harness()
    lent(harness)
    harness.want(R.ON_LOAN, order(), lease=lease())
    harness.step()
    harness.runs(key())
    stranger(harness)
    harness.want(R.SERVING, order())
    harness.steps(5)
    assert harness.role() == R.VACATING
    harness.ends(key())
    harness.steps(5)
    assert harness.role() == R.SERVING


@pytest.mark.parametrize("how", ["asked", "refused", "ran out"])
def test_a_drain_that_the_coordinator_or_the_ttl_ended_did_not_turn_back(how: str) -> None:
    """Whatever else is the matter by then: that came first."""
    harness = life_harness()
    draining(harness)
    harness.page = page(running=1)
    renewed(harness, 2)
    if how == "asked":
        harness.want(R.SERVING)
    elif how == "refused":
        harness.life.refused(LeaseId("l1-1"), "no")
    else:
        harness.now_s += 100.0
    stranger(harness)
    harness.steps(3)
    assert (harness.role(), harness.memory.turned_back) == (R.SERVING, None)


def test_that_a_node_turned_back_is_told_until_the_next_lease() -> None:
    """Of that one it would be false."""
    harness = life_harness()
    draining(harness)
    stranger(harness)
    renewed(harness, 3)
    assert harness.memory.turned_back is not None
    gone(harness)
    harness.want(R.ON_LOAN, lease=lease("l1-2"))
    assert harness.memory.turned_back is None


def test_quarantine_does_not_end_beside_anybody() -> None:
    """There the node is of no use to its service anyhow, and who it is should be looked at."""
    harness = life_harness()
    harness.serve()
    harness.want(R.QUARANTINED)
    harness.is_healthy = False
    stranger(harness)
    harness.step()
    harness.want(R.SERVING)
    harness.steps(100)
    assert harness.role() == R.QUARANTINED
    assert "GPU-1 is used by process 4711" in harness.life.detail


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
    async with AgentHarness(inference=True, world=world) as harness:
        await harness.until(lambda: bool(harness.reports) and harness.report.role == R.SERVING)
        harness.machine.pids, world.beside = {0: 20, 1: 30}, {30}
        await harness.until(lambda: len(harness.report.trespasses) > 0)
        found = Trespass(pid=30, gpu_uuid=GpuUuid("GPU-1"), owner="uid 7: p30")
        assert harness.report.trespasses == (found,)
        assert not any(report.turned_back for report in harness.reports)
        await harness.want(R.ON_LOAN, lease=lease())
        await harness.until(lambda: harness.report.turned_back is not None)
        why = "GPU GPU-1 is used by process 30, which is not the server's"
        assert harness.report.turned_back == TurnBack(lease_id=LeaseId("l1-1"), reason=why)
        assert "stop" not in harness.machine.commands


async def test_the_first_report_of_an_agent_that_restarts_names_the_strangers_of_before() -> None:
    """Its coordinator would lend the node by one that names none."""
    world = World()
    async with AgentHarness(inference=True, world=world) as harness:
        await harness.until(lambda: bool(harness.reports) and harness.report.role == R.SERVING)
        harness.machine.pids, world.beside = {0: 20, 1: 30}, {30}
        await harness.until(lambda: len(harness.report.trespasses) > 0)
    async with AgentHarness(inference=True, world=world, before=harness) as again:
        await again.until(lambda: bool(again.reports))
        assert again.reports[0].role == R.SERVING
        assert [found.pid for found in again.reports[0].trespasses] == [30]


async def test_an_agent_reports_that_its_servers_units_are_not_where_it_runs() -> None:
    """As long as it is so."""
    world = World()
    server = msgspec.structs.replace(SERVER, units=("vlm.service",))
    async with AgentHarness(inference=True, world=world, server=server) as harness:
        await harness.until(lambda: bool(harness.reports) and harness.report.role == R.SERVING)
        harness.machine.pids, world.beside = {0: 20}, None
        said = "server.units: no process on a GPU is in vlm.service"
        await harness.until(lambda: said in harness.report.detail)
        world.beside = set()
        await harness.until(lambda: said not in harness.report.detail)


async def test_an_agent_stops_no_server_while_it_waits_to_see_who_stays() -> None:
    """For as long as its settings say; nobody is told as a stranger yet."""
    world = World()
    async with AgentHarness(inference=True, world=world, stranger_after_s=1000.0) as harness:
        await harness.until(lambda: bool(harness.reports) and harness.report.role == R.SERVING)
        harness.machine.commands.clear()
        harness.machine.pids, world.beside = {0: 20, 1: 30}, {30}
        await harness.want(R.ON_LOAN, lease=lease())
        await harness.until(lambda: "whether process 30 stays" in harness.report.detail)
        await harness.clock.advance(10.0)
        assert (harness.machine.commands, harness.report.trespasses) == (["unroute"], ())
        harness.machine.pids = {0: 20}
        await harness.until(lambda: "stop" in harness.machine.commands)
