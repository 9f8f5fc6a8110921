"""The spec of a job that is rebuilt from ledgers, and the nodes that it may use then."""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import asdict, replace

from common.model import (
    CheckpointSpec,
    GpuRequest,
    JobChange,
    JobId,
    JobSpec,
    JobState,
    NodeName,
    Preemptibility,
    PrerunSpec,
    RendezvousSpec,
    RetrySpec,
    WorkerRange,
)
from common.profile import JobProfile
from coordinator.engine.state.events import JobChanged
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Placement, Resize
from coordinator.sim.run.simulation import Submission
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import EngineHarness, start, state

FULL = JobSpec(
    name="full",
    command=("train", "--all"),
    workers=WorkerRange(min=1, max=3),
    gpus_per_worker=8,
    workdir="/work",
    env={"A": "b"},
    cpus_per_worker=2,
    memory_bytes_per_worker=1,
    gpu=GpuRequest(types=("H100", "A100"), worker_multiplier={"A100": 2}),
    priority=7,
    preemptibility=Preemptibility.SEMI,
    expected_runtime_s=5e5,
    deadline_s=9e5,
    time_limit_s=8e5,
    stop_after_s=7e3,
    stall_timeout_s=6e3,
    checkpoint=CheckpointSpec(path="/saves", grace_s=5.0, signal="SIGUSR1"),
    retry=RetrySpec(max_restarts=3, on_exit_codes=(4,), reset_after_s=60.0),
    rendezvous=RendezvousSpec(command=("store",)),
    app="search",
    profile=JobProfile(model="m"),
    require=("rack",),
    exclude=("old",),
    require_nodes=("t0", "t1", "t2"),
    exclude_nodes=("t3",),
)
"""A job whose user states each field but those of `UNSTATED`."""
UNSTATED = {"depends_on", "is_held", "array", "prerun", "launcher"}
"""The first three matter before a start alone. A pre-run is a gang of another shape, and torchrun
would replace the store."""


def cell() -> EngineHarness:
    """Three nodes of rack r7, by their own labels, which outlive the journal."""
    harness = EngineHarness(training=3, inference=0)
    for node in harness.sim.nodes.values():
        node.learn(labels={"rack": "r7"})
    harness.settle()
    return harness


def submit(harness: EngineHarness, spec: JobSpec) -> JobEntry:
    """The job waits."""
    now_s = harness.sim.loop.now_s
    harness.sim.submit([Submission(at_s=now_s, job_id=JobId("j"), spec=spec, work_s=1e6)])
    harness.settle()
    return harness.engine.state.jobs[JobId("j")]


def rebuilt(harness: EngineHarness) -> JobEntry:
    """The job after the loss of the journal."""
    harness.lose_journal()
    job = harness.engine.state.jobs[JobId("j")]
    assert (state(job), job.is_recovered) == (JobState.RUNNING, True)
    return job


def barred(harness: EngineHarness, job: JobEntry) -> set[NodeName]:
    """The nodes that policies see it leave alone."""
    assert harness.engine.check() == []
    [seen] = [seen for seen in harness.engine.snapshot().jobs if seen.job_id == job.job_id]
    return set(seen.nodes.avoided)


def test_a_rebuilt_job_has_each_field_that_its_user_stated() -> None:
    """The order of a worker carries the whole request, and the ledger gives it back."""
    plain = asdict(make_spec("plain"))
    stated = {name for name, value in asdict(FULL).items() if value != plain[name]}
    assert stated == set(plain) - UNSTATED, "a new field of a job needs a value in FULL"
    harness = cell()
    before = submit(harness, FULL)
    harness.start(before, "t0")
    harness.wait(5.0)
    after = rebuilt(harness)
    assert after is not before
    assert after.spec == FULL
    assert (after.tenant, after.user) == (before.tenant, before.user)
    assert (after.number, after.submitted_at_s) == (before.number, before.submitted_at_s)


def test_a_rebuilt_job_starts_and_grows_on_nodes_that_its_user_allows_alone() -> None:
    """A change of its selection while it ran counts as well."""
    harness = cell()
    job = submit(
        harness, replace(make_spec(workers=(1, 3), gpus_per_worker=8), exclude_nodes=("t1",))
    )
    harness.start(job, "t0")
    harness.wait(5.0)
    change = JobChange(exclude_nodes=("t2",))
    harness.sim.handle(JobChanged(job_id=job.job_id, by="a/u", change=change))
    harness.wait(5.0)
    job = rebuilt(harness)
    assert barred(harness, job) == {"t2"}
    added = (Placement(node=NodeName("t2"), worker_count=1, is_flexible=True),)
    grow = Resize(job_id=job.job_id, added=added, reason="room")
    assert harness.refusals(grow) == ["the job excludes t2"]
    harness.sim.nodes[NodeName("t0")].crash()
    harness.sim.nodes[NodeName("t0")].boot()
    harness.wait(60.0)
    assert state(job) == JobState.PENDING
    assert harness.refusals(start(job, "t2")) == ["the job excludes t2"]


def test_a_rebuilt_pre_run_keeps_the_selection_for_its_gang() -> None:
    """The gang starts after the loss, on nodes that the user allows."""
    harness = cell()
    spec = make_spec(workers=(2, 2), gpus_per_worker=8, prerun=PrerunSpec(time_s=1e4))
    job = submit(harness, replace(spec, require_nodes=("t0", "t1")))
    assert job.spec.prerun.gang is not None
    harness.start(job, "t0")
    harness.wait(5.0)
    job = rebuilt(harness)
    assert job.spec.prerun.gang is not None
    assert barred(harness, job) == {"t2"}


def test_an_order_has_a_selection_only_of_a_job_that_has_one() -> None:
    """An agent of an older version takes the orders of all other jobs."""
    harness = cell()
    job = submit(harness, make_spec())
    harness.start(job, "t0")
    [order] = harness.engine.desired(NodeName("t0")).workers
    asked = (order.spec.require, order.spec.exclude)
    assert (*asked, order.spec.require_nodes, order.spec.exclude_nodes) == (UNSET,) * 4
