"""The board: the cluster as Gandiva sees it in one pass, with holders, computing jobs and grants.

Heights and affinities are those of Gandiva (OSDI'18, section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from common.model import GpuUuid, JobId, JobState, NodeName, Preemptibility
from coordinator.policies.contract.decisions import Decision, Placement
from coordinator.policies.contract.free_gpus import FreeGpus, barred_gpus, consolidated, fill
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.tenants.queues import submission

COMPUTING_STATES = frozenset({JobState.STARTING, JobState.RUNNING, JobState.RESIZING})
SEATED_STATES = COMPUTING_STATES | {JobState.SUSPENDED}

Seat = frozenset[GpuUuid]
"""The GPUs of one gang; several gangs may have the same, and take turns."""
Place = tuple[str, tuple[Placement, ...]]
"""GPU type and nodes."""


class Board:
    """Rules read it and give GPUs away on it; each job is decided on once a pass.

    gpus: per job and node, the GPUs of its workers that stay.
    has: jobs per GPU. computes: those of them that compute, or will once their gang is ready.
    """

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self.snapshot = snapshot
        self.now_s = snapshot.now_s
        self.floor = FreeGpus(snapshot)
        self.jobs = {job.job_id: job for job in snapshot.jobs}
        self.gpus: dict[JobId, dict[NodeName, tuple[GpuUuid, ...]]] = {}
        self.has: dict[GpuUuid, list[JobId]] = {}
        self.computes: dict[GpuUuid, set[JobId]] = {}
        self.decided: set[JobId] = set()
        self.decisions: list[Decision] = []
        self._gangs: dict[NodeName, dict[int, int]] = {name: {} for name in self.floor.nodes}
        self._in: dict[tuple[JobState, ...], list[JobView]] = {}
        self._seats: dict[JobId, Seat] = {}
        for job in snapshot.jobs:
            if job.state in SEATED_STATES:
                self._seat(job)

    def _seat(self, job: JobView) -> None:
        mine = self.gpus[job.job_id] = {}
        for worker in job.placed:
            if worker.is_leaving:
                continue
            mine[worker.node] = (*mine.get(worker.node, ()), *worker.gpu_uuids)
            self._note(worker.node, gang_of(job), worker.gpus)
            for uuid in worker.gpu_uuids:
                self.has.setdefault(uuid, []).append(job.job_id)
                if job.state != JobState.SUSPENDED:
                    self.computes.setdefault(uuid, set()).add(job.job_id)

    def _note(self, node: NodeName, gang: int, gpus: int) -> None:
        if node in self._gangs:
            self._gangs[node][gang] = self._gangs[node].get(gang, 0) + gpus

    #   --- the present state ------------------------------------------------------------------

    def of(self, *states: JobState) -> list[JobView]:
        """Jobs in one of the states, by id, that were not decided on yet."""
        jobs = self._in.get(states)
        if jobs is None:
            jobs = self._in[states] = [job for job in self.snapshot.jobs if job.state in states]
        return [job for job in jobs if job.job_id not in self.decided]

    def seat(self, job: JobView) -> Seat:
        """All GPUs of a gang, as it stood when the pass began."""
        seat = self._seats.get(job.job_id)
        if seat is None:
            mine = self.gpus.get(job.job_id, {})
            seat = self._seats[job.job_id] = frozenset(chain.from_iterable(mine.values()))
        return seat

    def rivals(self, seat: Iterable[GpuUuid]) -> set[JobId]:
        """The jobs that compute on GPUs now."""
        return {job_id for uuid in seat for job_id in self.computes.get(uuid, ())}

    def depth(self, seat: Seat) -> int:
        """How many jobs have the fullest of some GPUs."""
        return max((len(self.has.get(uuid, ())) for uuid in seat), default=0)

    def affinity(self, node: NodeName) -> int:
        """Gang size of the jobs of a node, of most of its GPUs where they differ; 0 if none."""
        gangs = self._gangs[node]
        return max(gangs, key=lambda gang: (gangs[gang], gang)) if gangs else 0

    def height(self, node: NodeName) -> float:
        """GPUs asked of a node over GPUs that it has: M / N (section 4.1).

        The paper rounds it up and then tests that it is below 1, which only an empty node's is;
        what it means is that a GPU is free.
        """
        return sum(self._gangs[node].values()) / self.floor.nodes[node].gpus

    #   --- giving GPUs away -------------------------------------------------------------------

    def decide(self, job: JobView, *decisions: Decision) -> None:
        """A job's decisions of this pass."""
        self.decided.add(job.job_id)
        self.decisions += decisions

    def suspended(self, job: JobView) -> None:
        """It computes no more."""
        for uuid in self.seat(job):
            self.computes.get(uuid, set()).discard(job.job_id)

    def computing(self, job: JobView, seat: Iterable[GpuUuid]) -> None:
        """It computes on these GPUs."""
        for uuid in seat:
            self.computes.setdefault(uuid, set()).add(job.job_id)
            if job.job_id not in self.has.setdefault(uuid, []):
                self.has[uuid].append(job.job_id)

    def take(self, job: JobView, place: Place) -> None:
        """GPUs are given to a gang, free ones or seats."""
        gpu_type, placements = place
        gang = job.base_gpus_on(gpu_type)
        free = [placement for placement in placements if not placement.gpu_uuids]
        self.floor.take(free, job.gpus_per_worker)
        for placement in placements:
            self._note(placement.node, gang, placement.worker_count * job.gpus_per_worker)
            self.computing(job, placement.gpu_uuids)

    # --- where a gang fits --------------------------------------------------------------------

    def find(self, job: JobView, gpu_types: Sequence[str] = ()) -> Place | None:
        """Free GPUs for a base gang: steps 1 to 3 of algorithm 1 (section 4.1).

        gpu_types: of these; none: of all that the job accepts.
        """
        for gpu_type in gpu_types or job.gpu.types or self.floor.gpu_types:
            self.floor.avoided = job.nodes.avoided
            count = job.workers_on(gpu_type).min
            placements = self._alike(job, gpu_type, count)
            placements = placements or consolidated(self.floor, job, gpu_type, count)
            if sum(placement.worker_count for placement in placements) == count:
                return gpu_type, placements
        return None

    def _alike(self, job: JobView, gpu_type: str, count: int) -> tuple[Placement, ...]:
        """On nodes of its own gang size, the least loaded first, else on empty ones."""
        gang = count * job.gpus_per_worker
        rooms = self.floor.rooms(gpu_type, job.gpus_per_worker)
        for affinity in (gang, 0):
            same = [name for name in rooms if self.affinity(name) == affinity]
            whole = [name for name in same if rooms[name] >= count]
            if whole:
                best = min(whole, key=lambda name: (self.height(name), name))
                return (Placement(node=best, worker_count=count),)
            if all(self.floor.nodes[name].gpus < gang for name in self.floor.nodes):
                placed = fill(rooms, sorted(same, key=lambda name: (-rooms[name], name)), count)
                if sum(placement.worker_count for placement in placed) == count:
                    return placed
        return ()

    def may_share(self, job: JobView, host: JobView) -> bool:
        """Whether two jobs may have the same GPUs: where tenants have rules, only one tenant's."""
        return not self.snapshot.tenants or job.tenant == host.tenant

    def may_come(self, job: JobView, host: JobView) -> bool:
        """True if a waiting job may compute on another's GPUs until its turn is over.

        The turn of a job that never gives way is all of its time: the holder of these GPUs would
        wait for its end, and must stand behind it.
        """
        if gives_way(job):
            return True
        there = {job_id for uuid in self.seat(host) for job_id in self.has[uuid]}
        return all(submission(self.jobs[job_id]) > submission(job) for job_id in there)

    def on_seat(self, job: JobView, host: JobView) -> Place | None:
        """The GPUs of another gang for this one; None if its workers do not go there.

        They do not where one of these GPUs stays barred.
        """
        gpu_type = host.gpu_type
        if barred_gpus(host):
            return None
        if gpu_type is None or not (job.accepts(gpu_type) and self.may_share(job, host)):
            return None
        mine = self.gpus[host.job_id]
        if any(
            name not in self.floor.nodes
            or name in job.nodes.avoided
            or len(uuids) % job.gpus_per_worker
            for name, uuids in mine.items()
        ):
            return None
        count = sum(len(uuids) for uuids in mine.values()) // job.gpus_per_worker
        if count != job.workers_on(gpu_type).min:
            return None
        return gpu_type, tuple(
            Placement(
                node=name, worker_count=len(uuids) // job.gpus_per_worker, gpu_uuids=uuids
            )
            for name, uuids in sorted(mine.items())
        )  # fmt: skip


def gang_of(job: JobView) -> int:
    """GPUs of the base gang of a job that has a place."""
    return job.base_gpus_on(job.gpu_type or "")


def gives_way(job: JobView) -> bool:
    """Whether its turns end: it agreed to be stopped."""
    return job.preemptibility == Preemptibility.FULL


def is_willing(job: JobView) -> bool:
    """Whether a job may be suspended or moved: it runs, or could, and agreed to be stopped."""
    runs = job.state in (JobState.RUNNING, JobState.SUSPENDED)
    return runs and gives_way(job)


def node_count(placements: Iterable[Placement]) -> int:
    """Nodes of a gang."""
    return len({placement.node for placement in placements})
