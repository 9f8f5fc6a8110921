"""What a reclaim costs that waited for jobs: nothing where they end, and their stops where not."""

from __future__ import annotations

import pytest

from common.model import NodeName
from coordinator.policies.contract.decisions import Decision, Loan, Preempt, Reclaim
from coordinator.sim.report.reclaims import Toll, TollKeeper
from coordinator.sim.run.cluster import Delays
from tests.harness.cluster.engine import CHAT, EngineHarness

QUICK = Delays(stop_s=3.0, device_free_s=1.0, warm_up_s=10.0)
LENT = tuple(NodeName(f"i{index}") for index in range(3))


def waits(*names: str, wait_s: float = 30.0) -> list[Decision]:
    """Reclaims of nodes that wait for their jobs, for half a minute."""
    return [
        Reclaim(node=NodeName(name), service=CHAT, deadline_s=60.0, reason="load", wait_s=wait_s)
        for name in names
    ]


class Toller:
    """A harness whose three inference nodes are lent, and who counts what becomes of that."""

    def __init__(self) -> None:
        self.harness = EngineHarness(inference=3, delays=QUICK)
        keeper = TollKeeper(self.harness.engine)
        self.harness.sim.watch, self.harness.sim.hear = lambda now_s: keeper.look(), keeper.hear
        self.harness.decide(*(Loan(node=name, service=CHAT, reason="") for name in LENT), lend=True)
        self.harness.wait(1.0)
        self.keeper = keeper

    def run(self, *nodes: str, work_s: float = 9000.0, flexible: tuple[str, ...] = ()) -> str:
        """A gang that has begun on these nodes; its name."""
        name = "-".join(nodes)
        widths = (len(nodes), len(nodes) + len(flexible))
        self.harness.start(
            self.harness.submit(name, workers=widths, work_s=work_s), *nodes, flexible=flexible
        )
        self.harness.wait(1.0)
        return name


@pytest.mark.parametrize(
    ("waited_for", "toll"),
    [
        (("i0",), Toll(gentle_ratio=0.0, collateral_ratio=1.0)),
        (("i0", "i1"), Toll(gentle_ratio=0.0, collateral_ratio=0.0)),
        (("i0", "i2"), Toll(gentle_ratio=0.5, collateral_ratio=0.5)),
    ],
)
def test_whom_a_wait_in_vain_stops_is_counted_when_it_is_over(
    waited_for: tuple[str, ...], toll: Toll
) -> None:
    """A gang on `i0` and `i1`: gentle until then; the nodes of its base are not, its others are
    collateral, and who takes a node on which nothing runs harms nobody."""
    cell = Toller()
    cell.run("i0", "i1")
    cell.harness.decide(*waits(*waited_for), lend=True)
    cell.harness.wait(29.0)
    assert cell.keeper.toll() == Toll(gentle_ratio=1.0, collateral_ratio=0.0)
    cell.harness.wait(30.0)
    assert cell.keeper.toll() == toll
    cell.harness.wait(600.0)
    assert cell.keeper.toll() == toll


def test_a_wait_that_a_job_ends_in_is_gentle() -> None:
    """Nobody was stopped for the node, so that nothing was left elsewhere either."""
    cell = Toller()
    cell.run("i0", "i1", work_s=40.0)
    cell.harness.decide(*waits("i0"), lend=True)
    cell.harness.wait(600.0)
    assert cell.harness.engine.state.counters.preemptions == 0
    assert cell.keeper.toll() == Toll(gentle_ratio=1.0, collateral_ratio=0.0)


def test_a_node_that_is_called_again_while_it_waits_is_one_node() -> None:
    """Taken back at once after all, with the job that it waited for: one node, not gently."""
    cell = Toller()
    job = cell.harness.engine.state.jobs
    name = cell.run("i0", "i1")
    [entry] = [each for each in job.values() if each.job_id == name]
    cell.harness.decide(*waits("i0"), lend=True)
    cell.harness.wait(5.0)
    stop = Preempt(job_id=entry.job_id, node=NodeName("i0"), beneficiary=CHAT, reason="load")
    now = Reclaim(node=NodeName("i0"), service=CHAT, deadline_s=60.0, reason="load")
    cell.harness.decide(stop, now, lend=True)
    cell.harness.wait(600.0)
    assert entry.counts.preemptions == 1
    assert cell.keeper.toll() == Toll(gentle_ratio=0.0, collateral_ratio=1.0)


def test_a_node_with_workers_that_a_victim_can_do_without_is_taken_gently() -> None:
    """Of a job with its base on `i0` and growth on `i1` the reclaim of `i1` alone stops nobody,
    whatever the one of `i0` does to the job."""
    cell = Toller()
    name = cell.run("i0", flexible=("i1",))
    [entry] = [each for each in cell.harness.engine.state.jobs.values() if each.job_id == name]
    assert len(entry.workers) == 2
    both = (
        Reclaim(node=NodeName(node), service=CHAT, deadline_s=60.0, reason="load")
        for node in ("i0", "i1")
    )
    stop = Preempt(job_id=entry.job_id, node=NodeName("i0"), beneficiary=CHAT, reason="load")
    cell.harness.decide(stop, *both, lend=True)
    assert cell.keeper.toll() == Toll(gentle_ratio=0.5, collateral_ratio=0.0)


@pytest.mark.parametrize(("first_s", "second_s"), [(20.0, 30.0), (30.0, 20.0)])
def test_waits_of_different_length_for_one_gang_are_in_vain_together(
    first_s: float, second_s: float
) -> None:
    """The gang is stopped when the shorter one is over: both of its nodes are taken back with it,
    so that neither is gentle and nothing of it was elsewhere."""
    cell = Toller()
    cell.run("i0", "i1")
    both = (*waits("i0", wait_s=first_s), *waits("i1", wait_s=second_s))
    cell.harness.decide(*both, lend=True)
    for _ in range(6):
        cell.harness.wait(10.0)
    assert cell.harness.engine.state.counters.preemptions == 1
    assert cell.keeper.toll() == Toll(gentle_ratio=0.0, collateral_ratio=0.0)
    cell.harness.wait(600.0)
    assert cell.keeper.toll() == Toll(gentle_ratio=0.0, collateral_ratio=0.0)


@pytest.mark.parametrize(
    ("awaited", "toll"),
    [
        ("i1", Toll(gentle_ratio=0.0, collateral_ratio=0.0)),
        ("i2", Toll(gentle_ratio=0.5, collateral_ratio=0.5)),
    ],
)
def test_a_gang_that_is_stopped_beside_a_wait_ends_that_wait_if_it_is_on_that_node(
    awaited: str, toll: Toll
) -> None:
    """A gang on `i0` and `i1`, stopped for `i0`: of a node that waits already it takes its workers
    with it, and one that waits for another job stays gentle."""
    cell = Toller()
    name = cell.run("i0", "i1")
    cell.run("i2", work_s=20.0)
    [entry] = [each for each in cell.harness.engine.state.jobs.values() if each.job_id == name]
    cell.harness.decide(*waits(awaited), lend=True)
    cell.harness.wait(5.0)
    stop = Preempt(job_id=entry.job_id, node=NodeName("i0"), beneficiary=CHAT, reason="load")
    now = Reclaim(node=NodeName("i0"), service=CHAT, deadline_s=60.0, reason="load")
    cell.harness.decide(stop, now, lend=True)
    assert cell.keeper.toll() == toll
    cell.harness.wait(600.0)
    assert cell.keeper.toll() == toll


def test_a_node_that_two_jobs_are_stopped_on_one_after_the_other_is_one_node() -> None:
    """A gang on half of `i0` and of `i1`, another job on the rest of `i1`: when the longer wait is
    in vain as well, `i1` has been counted."""
    cell = Toller()
    gang = cell.harness.submit("gang", workers=(2, 2), gpus_per_worker=4, work_s=9000.0)
    other = cell.harness.submit("other", gpus_per_worker=4, work_s=9000.0)
    cell.harness.start(gang, "i0", "i1")
    cell.harness.start(other, "i1")
    cell.harness.wait(1.0)
    both = (*waits("i0", wait_s=20.0), *waits("i1", wait_s=30.0))
    cell.harness.decide(*both, lend=True)
    cell.harness.wait(600.0)
    assert cell.harness.engine.state.counters.preemptions == 2
    assert cell.keeper.toll() == Toll(gentle_ratio=0.0, collateral_ratio=0.0)
