"""What only absent nodes could hold keeps no line waiting, and says what it waits for."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from common.model import JobState, NodeName, NodeRole
from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.registry import policy
from tests.builders import (
    NOW_S,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
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
    gang = replace(JOBS[0], excluded_nodes=(other.name,), avoid_nodes=(other.name,))
    nodes = [make_node_view("n1"), make_node_view("n2"), away, small, other]
    holds = policy("fifo").pending_reasons(make_snapshot(nodes=nodes, jobs=[gang]), b"")
    (said,) = ("; ".join(hold.blockers) for hold in holds)
    assert "waits for absent nodes" in said
    assert "without n3 (" in said


@each_row("name", STRICT)
def test_with_the_node_back_the_gang_goes_first(name: str) -> None:
    """It kept its place in the line."""
    assert starts(name, cell(make_node_view("n3")))[0] == "gang"
