"""The decisions that reclaim the chosen nodes, each with its reason and cost."""

from __future__ import annotations

from collections.abc import Callable
from math import fsum

from common.model import JobId, JobState, NodeName, NodeRole
from coordinator.policies.aryl.reclaim.choose_nodes import Choice
from coordinator.policies.aryl.reclaim.greedy import node_preemption_cost
from coordinator.policies.aryl.reclaim.occupancy import Occupancy
from coordinator.policies.contract.decisions import Decision, Preempt, Reclaim, Resize
from coordinator.policies.contract.snapshot import ServiceView, WorkerView
from coordinator.policies.contract.text import unsaved

Price = Callable[[JobId], float]
"""GPU-seconds that stopping a job is predicted to lose."""


def carry_out(
    occupancy: Occupancy,
    service: ServiceView,
    choice: Choice,
    because: str,
    *,
    price: Price | None = None,
) -> tuple[Decision, ...]:
    """The decisions of a choice: release flexible workers, preempt victims, take the nodes back.

    `occupancy` is brought up to date. because: why the service wants nodes, with numbers.
    price: None predicts the work that is lost alone.
    """
    is_priced = price is not None
    price = price or occupancy.lost_gpu_s
    if choice.note:
        because = f"{because}; {choice.note}"
    released = _release(occupancy, choice)
    preempts: list[Decision] = []
    bill: dict[NodeName, list[JobId]] = {name: [] for name in choice.nodes}
    for job_id in choice.victims:
        lost_gpu_s = price(job_id)
        cost = f"expected to cost {lost_gpu_s:.0f} GPU-s" if is_priced else unsaved(lost_gpu_s)
        nodes = [name for name in choice.nodes if job_id in occupancy.base_jobs(name)]
        bill[nodes[0]].append(job_id)  # each victim is counted once, as its Preempt says
        preempts.append(
            Preempt(
                job_id=job_id,
                predicted_cost_gpu_s=lost_gpu_s,
                beneficiary=service.name,
                node=nodes[0],
                reason=f"its base gang is on {', '.join(nodes)}, which {service.name} takes back: "
                f"{because}; {cost}",
            )
        )
    reclaims: list[Decision] = []
    for name in choice.nodes:
        lost_gpu_s = fsum(price(job_id) for job_id in bill[name])
        freed = sum(1 for workers in released.values() for w in workers if w.node == name)
        reclaims.append(
            Reclaim(
                node=name,
                service=service.name,
                deadline_s=service.reclaim_deadline_s,
                predicted_preemptions=len(bill[name]),
                predicted_cost_gpu_s=lost_gpu_s,
                released_workers=freed,
                wait_s=_wait_s(occupancy, name, choice),
                reason=f"{because}; {_state_of(occupancy, name, freed, choice, price)}",
            )
        )
    resizes = _resizes(occupancy, service, released)
    for job_id in choice.victims:
        occupancy.remove_job(job_id)
    return (*resizes, *preempts, *reclaims)


def _release(occupancy: Occupancy, choice: Choice) -> dict[JobId, list[WorkerView]]:
    released: dict[JobId, list[WorkerView]] = {}
    for name in choice.nodes:
        for worker in occupancy.flexible_workers(name):
            if worker.job_id not in choice.victims:
                occupancy.remove_worker(worker)
                released.setdefault(worker.job_id, []).append(worker)
    return released


def _resizes(
    occupancy: Occupancy, service: ServiceView, released: dict[JobId, list[WorkerView]]
) -> list[Decision]:
    """One per job that runs; the engine itself releases those of a gang that is still starting."""
    decisions: list[Decision] = []
    for job_id in sorted(released):
        job = occupancy.jobs.get(job_id)
        if job is None or job.state not in (JobState.RUNNING, JobState.RESIZING):
            continue
        nodes = sorted({worker.node for worker in released[job_id]})
        count = len(released[job_id])
        decisions.append(
            Resize(
                job_id=job_id,
                removed_workers=tuple(sorted(w.worker_index for w in released[job_id])),
                reason=f"{count} flexible workers leave {', '.join(nodes)}, which "
                f"{service.name} takes back; nothing is preempted for it",
            )
        )
    return decisions


def _wait_s(occupancy: Occupancy, name: NodeName, choice: Choice) -> float:
    """How long the node waits for jobs to end by themselves."""
    awaited = dict(choice.awaited)
    return max((awaited.get(job_id, 0.0) for job_id in occupancy.base_jobs(name)), default=0.0)


def _state_of(
    occupancy: Occupancy, name: NodeName, freed: int, choice: Choice, price: Price
) -> str:
    if occupancy.nodes[name].role == NodeRole.DRAINING:
        return "loan not begun"
    said: list[str] = []
    base = occupancy.base_jobs(name)
    stopped = [job_id for job_id in base if job_id in choice.victims]
    if stopped:
        cost = node_preemption_cost(occupancy, name)
        said.append(f"preempts {', '.join(stopped)} (preemption cost of the node {cost:.2f})")
    ending = [job_id for job_id in base if job_id not in choice.victims]
    if ending:
        saved_gpu_s = fsum(price(job_id) for job_id in ending)
        wait_s = _wait_s(occupancy, name, choice)
        said.append(
            f"waits up to {wait_s:.0f} s for {', '.join(ending)} to end: nothing lost, where "
            f"stopping would lose {saved_gpu_s:.0f} GPU-s"
        )
    if freed:
        said.append(f"only {freed} flexible workers there" if not said else f"{freed} flexible go")
    return "; ".join(said) or "idle"
