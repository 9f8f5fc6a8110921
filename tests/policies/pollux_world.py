"""Jobs on nodes over several rounds of Pollux. Tests nothing."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, JobState, Preemptibility
from coordinator.policies.contract.decisions import (
    Decision,
    Placement,
    Preempt,
    Resize,
    Start,
)
from coordinator.policies.contract.free_gpus import present_workers
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, WorkerView
from coordinator.policies.registry import policy
from tests.builders import NOW_S, make_job_view, make_node_view, make_snapshot, make_worker_view
from tests.draws import pick, whole

FAST = "pollux:generations=4:population=8:rest_rounds=0"
ROUND_S = 60.0
GPUS = 4


class World:
    """Jobs on nodes of four GPUs, to which decisions are applied at once. It judges nothing."""

    def __init__(self, nodes: int, jobs: Iterable[JobView], name: str = FAST) -> None:
        self.nodes = [f"n{number}" for number in range(nodes)]
        self.jobs = {job.job_id: job for job in jobs}
        self.hidden: set[JobId] = set()
        self.memory = b""
        self.now_s = NOW_S
        self._policy = policy(name)

    def __getitem__(self, name: str) -> JobView:
        return self.jobs[JobId(name)]

    def snapshot(self) -> ClusterSnapshot:
        """Without those hidden, of which only names are told."""
        seen = [self.jobs[name] for name in sorted(self.jobs) if name not in self.hidden]
        workers = [worker for job in seen for worker in job.placed]
        nodes = [
            make_node_view(
                name, gpus=GPUS, workers=[worker for worker in workers if worker.node == name]
            )
            for name in self.nodes
        ]
        made = make_snapshot(nodes=nodes, jobs=seen, now_s=self.now_s)
        return replace(made, unseen=frozenset(self.hidden & self.jobs.keys()))

    def next_round(self) -> tuple[Decision, ...]:
        """What it decides, carried out; the same from the same bytes."""
        snapshot = self.snapshot()
        made = self._policy.allocate(snapshot, self.memory)
        assert made == self._policy.allocate(snapshot, self.memory)
        for decision in made.decisions:
            self._apply(decision)
        self.memory = made.memory
        self.now_s += ROUND_S
        return made.decisions

    def _apply(self, decision: Decision) -> None:
        match decision:
            case Start():
                job = self.jobs[decision.job_id]
                started = replace(
                    job,
                    state=JobState.RUNNING,
                    gpu_type="H100",
                    attempt=job.attempt + 1,
                    first_started_at_s=job.first_started_at_s or self.now_s,
                    is_resizable=job.is_elastic,
                    placed=added(job, decision.placements, ()),
                )
                self.jobs[decision.job_id] = started
            case Resize():
                job = self.jobs[decision.job_id]
                stay = [
                    each for each in job.placed if each.worker_index not in decision.removed_workers
                ]
                self.jobs[decision.job_id] = replace(job, placed=added(job, decision.added, stay))
            case _:
                assert isinstance(decision, Preempt)
                self.stop(decision.job_id)

    def stop(self, name: str) -> None:
        """A job waits again."""
        job = self[name]
        self.jobs[job.job_id] = replace(
            job, state=JobState.PENDING, gpu_type=None, placed=(), is_resizable=False
        )

    def pass_between(self) -> None:
        """Half a round after the last one, it looks at what there is and decides nothing."""
        self.now_s -= ROUND_S / 2
        assert self.next_round() == ()
        self.now_s -= ROUND_S / 2

    def counts(self) -> dict[str, int]:
        """Workers of each job."""
        return {name: present_workers(job) for name, job in self.jobs.items()}

    def clashes(self) -> list[str]:
        """Nodes with workers of two jobs over several nodes."""
        wide = [
            nodes for job in self.jobs.values()
            if len(nodes := {worker.node for worker in job.placed}) > 1
        ]  # fmt: skip
        return [name for name in self.nodes if sum(name in nodes for nodes in wide) > 1]


def added(
    job: JobView, placements: Iterable[Placement], stay: Iterable[WorkerView]
) -> tuple[WorkerView, ...]:
    """Workers that stay, then those that come: the base gang first, as it has the first indices."""
    workers = list(stay)
    for placement in sorted(placements, key=lambda each: each.is_flexible):
        for _ in range(placement.worker_count):
            index = max((each.worker_index for each in workers), default=-1) + 1
            workers.append(
                make_worker_view(
                    job.job_id,
                    index,
                    placement.node,
                    gpus=job.gpus_per_worker,
                    is_flexible=placement.is_flexible,
                )
            )
    return tuple(workers)


def waiting(name: str, least: int, most: int, *, gpus: int = 1) -> JobView:
    """A job that came ten minutes ago."""
    return make_job_view(
        name, workers=(least, most), gpus_per_worker=gpus, submitted_at_s=NOW_S - 600.0
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Nodes and jobs of any sizes; a few of them may not be stopped."""
    jobs: list[JobView] = []
    for number in range(draw(whole(2, 6))):
        least = draw(whole(1, 7))
        job = waiting(
            f"j{number}", least, least + draw(pick(0, 0, 2, 5, 9)), gpus=draw(pick(1, 1, 2))
        )
        is_rigid = draw(whole(0, 5)) == 0
        preemptibility = Preemptibility.NON if is_rigid else Preemptibility.FULL
        jobs.append(replace(job, preemptibility=preemptibility))
    return World(draw(whole(2, 5)), jobs)
