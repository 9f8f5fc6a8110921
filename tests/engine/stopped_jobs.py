"""Jobs that are stopped against their will, and what they and their nodes say of it."""

from __future__ import annotations

from typing import Any

import pytest

from common.messages import WorkerPhase
from common.model import Checkpoint, JobState, NodeName, Progress
from coordinator.engine.state.events import (
    NodeReported,
    NodeSilent,
    OperatorAction,
    OperatorAsked,
    ProgressReported,
    WorkerFact,
)
from coordinator.engine.state.tables import JobEntry, LoanEntry
from coordinator.policies.contract.decisions import Loan, Preempt, Reclaim
from coordinator.sim.run.cluster import Delays
from tests.harness.cluster.engine import CHAT, EngineHarness, state

STOP_S = 3.0
SLOW = Delays(drain_s=5.0, stop_s=STOP_S, device_free_s=1.0, warm_up_s=10.0)
RAN_S = 10.0
WHOLE = RAN_S * 8
"""GPU-seconds of one node's worker from its start to the order."""
GRACE = STOP_S * 8
"""And of one that ignores the request to save, from the order to its end."""


def lend(harness: EngineHarness, *nodes: str) -> None:
    """Lend nodes and wait until the loans have begun."""
    loans = [Loan(node=NodeName(node), service=CHAT, reason="idle") for node in nodes]
    harness.decide(*loans, lend=True)
    harness.wait(6.0)


def running(harness: EngineHarness, *nodes: str, path: str | None = None) -> JobEntry:
    """A gang that has run for `RAN_S` on whole nodes."""
    job = harness.submit(workers=(len(nodes), len(nodes)), work_s=1e6, path=path)
    harness.start(job, *nodes)
    harness.wait(RAN_S)
    return job


def stop(harness: EngineHarness, job: JobEntry, node: str | None = None) -> None:
    """Order a preemption; with a lent node, for its sake."""
    name = None if node is None else NodeName(node)
    harness.decide(Preempt(job_id=job.job_id, node=name, reason="test"), lend=node is not None)


def call_home(harness: EngineHarness, *nodes: str) -> None:
    """Order reclaims."""
    reclaims = [
        Reclaim(node=NodeName(node), service=CHAT, deadline_s=60.0, reason="load rose")
        for node in nodes
    ]
    harness.decide(*reclaims, lend=True)


def says(
    harness: EngineHarness,
    job: JobEntry,
    step: int,
    *,
    attempt: int = 1,
    is_verified: bool = True,
    at_step: int | None = None,
    total_steps: int | None = None,
    saved_ago_s: float = 0.0,
) -> None:
    """The job says that it saved a step, and at which it is by now."""
    harness.sim.handle(
        ProgressReported(
            job_id=job.job_id,
            attempt=attempt,
            progress=Progress(step=at_step or step, total_steps=total_steps),
            checkpoint=Checkpoint(step=step, path="/c", is_verified=is_verified),
            saved_ago_s=saved_ago_s,
        )
    )


def gone_report(harness: EngineHarness, job: JobEntry, name: str, **said: Any) -> NodeReported:
    """A node's report that its worker of a job is gone, with what it says of it; also of one that
    was given up for lost."""
    node = harness.node(name)
    there = [(worker.node, worker.key) for worker in job.workers.values()]
    there += [(ended.node, ended.key) for ended in job.ended.workers.values()]
    [key] = [key for place, key in there if place == name]
    return NodeReported(
        node=node.name,
        boot_id=node.boot_id,
        home_pool=node.home_pool,
        role=node.role,
        epoch=node.contact.epoch,
        generation=node.desired.generation,
        gpus=(),
        workers=(WorkerFact(key=key, phase=WorkerPhase.EXITED, **said),),
    )


def loan_of(harness: EngineHarness, node: str) -> LoanEntry:
    """The latest loan of a node."""
    return [loan for loan in harness.engine.state.loans.values() if loan.node == node][-1]


def lost(harness: EngineHarness, job: JobEntry) -> float:
    """What the job lost, where the cell says the same."""
    assert harness.engine.state.counters.preemption_cost_gpu_s == pytest.approx(job.lost_gpu_s)
    return job.lost_gpu_s


def given_up(harness: EngineHarness) -> JobEntry:
    """A preempted job on the lent i0, which died before it said what became of its worker."""
    lend(harness, "i0")
    job = running(harness, "i0")
    harness.sim.nodes[NodeName("i0")].crash()
    stop(harness, job, "i0")
    harness.sim.handle(NodeSilent(node=NodeName("i0"), silent_s=20.0))
    dead = OperatorAsked(action=OperatorAction.CONFIRM_DEAD, by="ops/me", target="i0")
    harness.sim.handle(dead)
    assert (state(job), lost(harness, job)) == (JobState.PENDING, WHOLE)
    return job
