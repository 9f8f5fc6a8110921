"""Nodes on which nothing starts: their GPUs keep no job waiting for others, and jobs on them
count."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from common.model import JobId, JobState, NodeName, NodeRole, Pool
from coordinator.engine.state.events import OperatorAction, OperatorAsked
from coordinator.engine.state.settings import EngineSettings, TenantSettings
from coordinator.policies.contract.decisions import Decision, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.registry import policy
from coordinator.sim.run.cluster import NodeSpec
from coordinator.sim.run.outages import Crash
from coordinator.sim.run.simulation import Simulation, Submission
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_spec,
    make_worker_view,
)
from tests.policies.families import FAMILIES
from tests.tables import each_row

STRICT = ("fifo", "yarn", "yarn-capacity", "yarn-fair", "mesos", "gandiva-lyra")


ABSENT: dict[str, dict[str, Any]] = {
    "lost": {"role": NodeRole.LOST},
    "quarantined": {"role": NodeRole.QUARANTINED},
    "cordoned": {"is_drained_by_operator": True},
    "closed": {"takes_nothing": True},
}


def whole_nodes(job_id: str, *, workers: int, waited_s: float) -> JobView:
    """A job that waits for so many nodes of eight GPUs."""
    return make_job_view(
        job_id,
        workers=(workers, workers),
        gpus_per_worker=8,
        remaining_work_s=600.0 * workers,
        submitted_at_s=NOW_S - waited_s,
    )


JOBS = (whole_nodes("gang", workers=3, waited_s=60.0), whole_nodes("small", workers=1, waited_s=9))


def cell(third: NodeView, *others: JobView) -> ClusterSnapshot:
    """Two free nodes and a third one; a gang of three that came first, and a job of one."""
    nodes = [make_node_view("n1"), make_node_view("n2"), third]
    return make_snapshot(nodes=nodes, jobs=[*JOBS, *others])


def absent(why: str) -> NodeView:
    """A node on which nothing may start, and nobody knows until when."""
    return replace(make_node_view("n3"), is_schedulable=False, **ABSENT[why])


def starts(name: str, snapshot: ClusterSnapshot) -> list[str]:
    """Who starts, and nobody is stopped."""
    memory, made = b"", policy(name)
    for _ in range(4):  # offers are refused and made anew
        allocation = made.allocate(snapshot, memory)
        found: list[str] = [each.job_id for each in allocation.decisions if isinstance(each, Start)]
        if found:
            return found
        memory, snapshot = allocation.memory, replace(snapshot, now_s=snapshot.now_s + 1.0)
    return []


@each_row("name", STRICT)
@each_row("why", ABSENT)
def test_a_gang_that_only_an_absent_node_could_complete_blocks_nobody(name: str, why: str) -> None:
    """Two whole nodes would idle for as long as the third is away."""
    assert starts(name, cell(absent(why))) == ["small"]


@each_row("name", [name for name in STRICT if name != "mesos"])
def test_a_gang_that_waits_for_a_busy_node_still_blocks(name: str) -> None:
    """That one comes free by itself: strict is strict. Mesos' framework keeps its offers for it."""
    worker = make_worker_view("busy", 0, "n3", gpus=8)
    busy = make_job_view(
        "busy", state=JobState.RUNNING, gpus_per_worker=8, remaining_work_s=60.0, placed=[worker]
    )
    assert starts(name, cell(make_node_view("n3", workers=[worker]), busy)) == []


@each_row("name", STRICT)
def test_it_says_that_it_waits_for_an_absent_node(name: str) -> None:
    """With the node's name; and that nobody waits behind it."""
    holds = policy(name).pending_reasons(cell(absent("lost")), b"")
    (said,) = ("; ".join(hold.blockers) for hold in holds if hold.job_id == "gang")
    assert "waits for absent nodes, and does not block the jobs behind it: without n3" in said
    assert "can never run here" not in said


def test_it_names_no_absent_node_that_could_not_hold_a_worker() -> None:
    """Neither one that is too small, nor one that the job may not use."""
    away = absent("lost")
    small = replace(away, name=NodeName("n4"), gpus=4)
    other = replace(away, name=NodeName("n5"))
    gang = job_with(JOBS[0], nodes_excluded=(other.name,), nodes_avoided=(other.name,))
    nodes = [make_node_view("n1"), make_node_view("n2"), away, small, other]
    holds = policy("fifo").pending_reasons(make_snapshot(nodes=nodes, jobs=[gang]), b"")
    (said,) = ("; ".join(hold.blockers) for hold in holds)
    assert "waits for absent nodes" in said
    assert "without n3 (" in said


@each_row("name", STRICT)
def test_with_the_node_back_the_gang_goes_first(name: str) -> None:
    """It kept its place in the line."""
    assert starts(name, cell(make_node_view("n3")))[0] == "gang"


CUT_S = 200.0


SOON_S = 720.0
"""All of `n1` is free from about 660 s; some policies look at it once a minute."""


TENANTS = (TenantSettings(name="x", guarantee_gpus=2), TenantSettings(name="y", guarantee_gpus=4))


class Cut(Simulation):
    """`n0` is full of a long gang when it is cut off; 1 of the 4 GPUs of `n1` is free until 660 s,
    and `late`, a job of one GPU, comes at 260 s."""

    def __init__(self, policy: str, tenants: tuple[TenantSettings, ...]) -> None:
        nodes = [
            NodeSpec(name=NodeName(name), home_pool=Pool.TRAINING, gpu_type="V100", gpus=4)
            for name in ("n0", "n1")
        ]
        super().__init__(EngineSettings(policy=policy, tenants=tenants), nodes, check=True)
        self.starts: dict[str, float] = {}
        self.hear = self._heard
        self.asks("long", "x", 0.0, 4, 20000.0)
        self.asks("short", "y", 60.0, 3, 600.0)
        self.asks("late", "y", 260.0, 1, 600.0)

    def asks(self, name: str, tenant: str, at_s: float, workers: int, runs_s: float) -> None:
        """A rigid job of one GPU a worker."""
        spec = make_spec(name, workers=(workers, workers), expected_runtime_s=runs_s)
        work_s = workers * runs_s
        job = Submission(at_s=at_s, job_id=JobId(name), spec=spec, work_s=work_s, tenant=tenant)
        self.submit([job])

    def _heard(self, decisions: Sequence[Decision]) -> None:
        for each in decisions:
            if isinstance(each, Start):
                self.starts.setdefault(str(each.job_id), self.loop.now_s)


@each_row("tenants", [(), TENANTS], ids=["alone", "tenants"])
@each_row("is_lost", [True, False], ids=["lost", "cordoned"])
@each_row("policy", FAMILIES)
def test_a_job_starts_on_a_healthy_node_whatever_runs_on_one_that_takes_nobody(
    policy: str, is_lost: bool, tenants: tuple[TenantSettings, ...]
) -> None:
    """What a gang holds on a node that is lost or cordoned is not taken from other nodes."""
    played = Cut(policy, tenants)
    if is_lost:
        played.crash([Crash(node=NodeName("n0"), at_s=CUT_S, down_s=4000.0)])
    else:
        cordon = OperatorAsked(
            action=OperatorAction.CORDON, by="op", target="n0", reason="looked at"
        )
        played.loop.at(CUT_S, partial(played.handle, cordon))
    played.begin()
    played.loop.run(3000.0)
    assert played.starts["late"] <= SOON_S
