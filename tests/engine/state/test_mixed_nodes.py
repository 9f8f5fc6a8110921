"""A node with GPUs of several types is placed by GPU and type, and MIG instances by their type."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import WorkerPhase
from common.model import GpuRequest, GpuUuid, JobId, JobState, NodeName, NodeRole, Pool, ServiceName
from coordinator.engine.engine import Engine
from coordinator.engine.state.events import (
    GpuFact,
    JobSubmitted,
    LeaderStarted,
    NodeReported,
    OperatorAction,
    OperatorAsked,
    PassDue,
)
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Placement, Start
from coordinator.service.api.explain_job import reasons as explain_job
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import state
from tests.harness.cluster.scripted_nodes import facts, journalled

L4, A100, MIG = "NVIDIA L4", "NVIDIA A100", "NVIDIA A100 MIG 1g.10gb"
POLICIES = ("aryl", "fifo", "foresight", "tiresias", "pollux", "drf", "tetris", "themis", "yarn")


class Mixed:
    """A cell whose nodes have GPUs of these types, in this order."""

    def __init__(self, *nodes: tuple[str, ...], policy: str = "aryl") -> None:
        self.engine = Engine(EngineSettings(policy=policy, min_runtime_s=0.0))
        self.now_s = 0.0
        self.nodes = {NodeName(f"n{at}"): kinds for at, kinds in enumerate(nodes)}
        self.handle(LeaderStarted(epoch=1, holder="t"))
        for name in self.nodes:
            self.report(name)

    def handle(self, event: LeaderStarted | NodeReported | JobSubmitted | OperatorAsked) -> None:
        """One event, a second after the one before it."""
        self.now_s += 1.0
        self.engine.handle(journalled(event), now_s=self.now_s)
        assert self.engine.check() == []

    def report(self, name: NodeName, phase: WorkerPhase | None = None) -> None:
        """A node says what it has, and of its workers that they are so."""
        known = self.engine.state.nodes.get(name)
        mine = [
            worker
            for job in self.engine.state.live()
            for worker in job.workers.values()
            if worker.node == name
        ]
        self.handle(
            NodeReported(
                node=name,
                boot_id="b",
                home_pool=Pool.TRAINING,
                role=NodeRole.TRAINING,
                epoch=1,
                generation=known.desired.generation if known else 0,
                gpus=tuple(
                    GpuFact(GpuUuid(f"{name}-{at}"), kind)
                    for at, kind in enumerate(self.nodes[name])
                ),
                workers=facts(mine, phase) if phase else (),
                cpus=64,
                memory_bytes=1 << 40,
            )
        )

    def submit(
        self, name: str, *types: str, gpus: int = 1, workers: tuple[int, int] = (1, 1)
    ) -> JobEntry:
        """A job that asks for these types, and a pass."""
        spec = make_spec(name, workers=workers, gpus_per_worker=gpus, gpu=GpuRequest(types=types))
        self.handle(JobSubmitted(job_id=JobId(name), spec=spec, tenant="t", user="u"))
        self.passes()
        return self.engine.state.jobs[JobId(name)]

    def passes(self) -> None:
        """A scheduling pass."""
        self.now_s += 100.0
        self.engine.handle(PassDue(), now_s=self.now_s)
        assert self.engine.check() == []

    def kinds_of(self, job: JobEntry) -> list[set[str]]:
        """The GPU types of each of its workers."""
        kinds = {
            f"{name}-{at}": kind
            for name, types in self.nodes.items()
            for at, kind in enumerate(types)
        }
        return [{kinds[uuid] for uuid in worker.gpu_uuids} for worker in job.workers.values()]


def test_a_job_gets_gpus_of_its_type_and_no_others() -> None:
    """One L4 beside three A100: four L4 can never be, though one of them is the first GPU; two A100
    and then an L4 are, and the fourth job waits for the third A100 to be enough."""
    cell = Mixed((L4, A100, A100, A100))
    four = cell.submit("four", L4, gpus=4)
    assert four.state == JobState.PENDING
    assert any("no node of type NVIDIA L4" in line for line in explain_job(cell.engine, four))
    assert cell.kinds_of(cell.submit("a", A100, gpus=2)) == [{A100}]
    assert cell.kinds_of(cell.submit("b", L4)) == [{L4}]
    two = cell.submit("c", A100, gpus=2)
    assert two.state == JobState.PENDING
    assert "1 free" in " ".join(explain_job(cell.engine, two))


def test_a_gang_runs_on_a_mixed_node_and_ends_there() -> None:
    """Its workers are known by the node's own name, and their GPUs come back when they end."""
    cell = Mixed((A100, L4, A100, L4), (A100, A100))
    job = cell.submit("j", L4, workers=(2, 2))
    assert cell.kinds_of(job) == [{L4}, {L4}]
    assert {worker.node for worker in job.workers.values()} == {"n0"}
    for phase in (WorkerPhase.READY, WorkerPhase.RUNNING):
        cell.report(NodeName("n0"), phase)
    assert state(job) == JobState.RUNNING
    cell.report(NodeName("n0"), WorkerPhase.EXITED)
    assert state(job) == JobState.SUCCEEDED
    assert cell.kinds_of(cell.submit("k", L4, workers=(2, 2))) == [{L4}, {L4}]


def test_a_cordon_closes_every_part_of_a_node() -> None:
    """What is said of a node is said of all its GPUs, whatever their types."""
    cell = Mixed((A100, A100, L4))
    cell.handle(OperatorAsked(action=OperatorAction.CORDON, by="ops/ada", target="n0"))
    for kind in (A100, L4):
        assert cell.submit(kind[-2:], kind).state == JobState.PENDING


def test_a_placement_on_gpus_of_another_type_is_refused() -> None:
    """A policy that is wrong about a part changes nothing."""
    cell = Mixed((A100, A100, L4))
    job = cell.submit("j", "none")
    for name, why in (("n0/NVIDIA L4", "has NVIDIA L4"), ("n0/H100", "takes no workers")):
        decision = Start(
            job_id=job.job_id,
            gpu_type=A100,
            placements=(Placement(node=NodeName(name), worker_count=1),),
            estimated_runtime_s=1.0,
            estimate_source="t",
            reason="t",
        )
        [refused] = cell.engine.carry_out([decision], now_s=cell.now_s).refused
        assert why in refused.why


def test_an_mig_instance_is_given_to_whoever_names_it_alone() -> None:
    """A job to which any GPU is right has whole ones: it waits beside free instances, and says so;
    one that asks for the instance has it, and so it is with more than one on a worker."""
    cell = Mixed((MIG, MIG, MIG, A100))
    assert cell.kinds_of(cell.submit("any")) == [{A100}]
    second = cell.submit("more")
    assert second.state == JobState.PENDING
    assert not any("MIG" in line for line in explain_job(cell.engine, second))
    assert cell.kinds_of(cell.submit("slice", MIG, gpus=1)) == [{MIG}]
    assert cell.kinds_of(cell.submit("slices", MIG, gpus=2)) == [{MIG}]


def test_where_there_are_instances_alone_a_job_of_any_gpu_waits_for_a_whole_one() -> None:
    """And says that there is none; nothing places it."""
    cell = Mixed((MIG, MIG))
    job = cell.submit("any")
    assert job.state == JobState.PENDING
    assert any("a whole GPU" in line for line in explain_job(cell.engine, job))
    decision = Start(
        job_id=job.job_id,
        gpu_type=MIG,
        placements=(Placement(node=NodeName("n0"), worker_count=1),),
        estimated_runtime_s=1.0,
        estimate_source="t",
        reason="t",
    )
    [refused] = cell.engine.carry_out([decision], now_s=cell.now_s).refused
    assert f"did not ask for {MIG}" in refused.why


node_kinds = st.lists(st.sampled_from([L4, A100, MIG]), min_size=1, max_size=6).map(tuple)
asked = st.sampled_from([(), (L4,), (A100,), (MIG,), (A100, L4), (MIG, A100)])


@pytest.mark.slow
@given(
    policy=st.sampled_from(POLICIES),
    nodes=st.lists(node_kinds, min_size=1, max_size=3),
    jobs=st.lists(st.tuples(asked, st.integers(1, 3), st.integers(1, 3)), max_size=6),
)
def test_no_policy_gives_a_worker_gpus_that_its_job_did_not_ask_for(
    policy: str, nodes: list[tuple[str, ...]], jobs: list[tuple[tuple[str, ...], int, int]]
) -> None:
    """Each worker has GPUs of one type, one that its job accepts, whatever else is on its node."""
    cell = Mixed(*nodes, policy=policy)
    entries = [
        cell.submit(f"j{at}", *types, gpus=gpus, workers=(1, workers))
        for at, (types, gpus, workers) in enumerate(jobs)
    ]
    for _ in range(2):
        for name in cell.nodes:
            cell.report(name, WorkerPhase.READY)
            cell.report(name, WorkerPhase.RUNNING)
        cell.passes()
    for job in entries:
        kinds = cell.kinds_of(job)
        assert all(len(found) == 1 for found in kinds)
        assert all(job.spec.accepts(kind) for found in kinds for kind in found)


def test_of_a_node_that_serves_only_the_first_type_is_lent() -> None:
    """Its server runs on all of its GPUs, so that it is one node to its service."""
    service = ServiceSettings(name="chat", capacity_per_node=10.0)
    engine = Engine(EngineSettings(services=(service,)))
    engine.handle(LeaderStarted(epoch=1, holder="t"), now_s=0.0)
    event = NodeReported(
        node=NodeName("i"),
        boot_id="b",
        home_pool=Pool.INFERENCE,
        role=NodeRole.SERVING,
        epoch=1,
        generation=0,
        service=ServiceName("chat"),
        gpus=tuple(GpuFact(GpuUuid(f"g{at}"), k) for at, k in enumerate((L4, A100, A100))),
    )
    engine.handle(event, now_s=1.0)
    [view] = engine.snapshot().nodes
    assert (view.name, view.gpu_type, view.gpus, view.free_gpus) == ("i", A100, 2, 2)
