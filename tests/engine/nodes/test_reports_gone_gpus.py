"""GPUs that their node does not report any more: nobody new gets them, and no job is blamed."""

from __future__ import annotations

import pytest

from common.messages import WorkerPhase
from common.model import GpuUuid, JobState, NodeName, NodeRole, Pool
from coordinator.engine.jobs.gpu_sharing import why_not_on
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import JobCancelRequested
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Placement
from tests.harness.cluster.engine import state
from tests.harness.cluster.scripted_nodes import GPUS, N, Reporting, facts

GONE = GPUS[1]
LEFT = GPUS[:1]


def running(cell: Reporting, name: str, *, gpus: int) -> JobEntry:
    """A job that runs."""
    job = cell.submit(name, gpus=gpus)
    cell.run(job)
    assert state(job) == JobState.RUNNING
    return job


def test_a_job_is_not_put_on_a_gpu_that_did_not_come_back_from_a_reboot() -> None:
    """The reboot is its node's fault, and it waits for a place that is there."""
    cell = Reporting(Pool.TRAINING)
    job = running(cell, "j", gpus=2)
    outcome = cell.reboot(Pool.TRAINING, NodeRole.TRAINING, gpus=LEFT)
    assert outcome.needs_pass
    assert cell.passes().decisions == ()
    assert (state(job), job.counts.node_faults, job.counts.own_faults) == (JobState.PENDING, 1, 0)
    assert [slot.uuid for slot in cell.node.gpus] == list(LEFT)
    assert f"GPU {GONE} is gone" in cell.told()


def test_what_a_gone_gpu_leaves_behind_is_no_free_gpu() -> None:
    """Its holder runs to its end by its own account; then the GPU is forgotten at once."""
    cell = Reporting(Pool.TRAINING)
    job = running(cell, "j", gpus=2)
    cell.gpus = LEFT
    cell.report()
    assert state(job) == JobState.RUNNING
    assert [slot.is_gone for slot in cell.node.gpus] == [False, True]
    cell.workers = facts(job.workers.values(), WorkerPhase.EXITED)
    cell.report()
    assert state(job) == JobState.SUCCEEDED
    assert [slot.uuid for slot in cell.node.gpus] == list(LEFT)
    too_large, fits = cell.submit("large"), cell.submit("small", gpus=1)
    cell.passes()
    assert (state(too_large), state(fits)) == (JobState.PENDING, JobState.STARTING)


def test_a_gone_gpu_whose_holder_is_leaving_is_promised_to_nobody() -> None:
    """A GPU that is being vacated counts as free for the next job, but not one that is gone."""
    cell = Reporting(Pool.TRAINING)
    job = running(cell, "j", gpus=2)
    cell.gpus = LEFT
    cell.report()
    cell.handle(JobCancelRequested(job_id=job.job_id, by="t/u"))
    [view] = cell.engine.snapshot().nodes
    assert view.free_gpus == 1


def test_a_gpu_that_comes_back_is_the_one_that_it_was() -> None:
    """Its holder has it still, and each change is told once."""
    cell = Reporting(Pool.TRAINING)
    job = running(cell, "j", gpus=2)
    for cell.gpus in (LEFT, LEFT, GPUS, GPUS):
        cell.report()
    assert [slot.is_gone for slot in cell.node.gpus] == [False, False]
    assert {slot.holder for slot in cell.node.gpus} == {w.key for w in job.workers.values()}
    assert [cell.told().count(f"GPU {GONE} is {what}") for what in ("gone", "there")] == [1, 1]


@pytest.mark.parametrize(
    ("gpus", "faults"), [(LEFT, (1, 0)), (GPUS, (0, 1))], ids=["its GPU is gone", "all are there"]
)
def test_a_refusal_for_want_of_a_gpu_is_its_nodes_fault(
    gpus: tuple[str, ...], faults: tuple[int, int]
) -> None:
    """Whatever words the agent finds for it; any other refusal is the job's own."""
    cell = Reporting(Pool.TRAINING)
    job = cell.submit("j")
    cell.passes()
    cell.gpus = gpus
    cell.workers = facts(job.workers.values(), WorkerPhase.REFUSED, error="it cannot be")
    cell.report()
    assert (job.counts.node_faults, job.counts.own_faults) == faults
    assert state(job) == (JobState.PENDING if gpus == LEFT else JobState.FAILED)


def test_nobody_is_packed_onto_a_gone_gpu() -> None:
    """A placement that names it is refused."""
    cell = Reporting(Pool.TRAINING)
    running(cell, "j", gpus=2)
    cell.gpus = LEFT
    cell.report()
    other = cell.submit("other", gpus=1)
    context = Context(cell.engine.state, cell.engine.settings, cell.now_s)
    named = Placement(node=NodeName(N), worker_count=1, gpu_uuids=(GpuUuid(GONE),))
    assert why_not_on(context, other, named, 1) == f"GPU {GONE} is gone from n"
