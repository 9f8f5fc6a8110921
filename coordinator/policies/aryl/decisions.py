"""The decisions of a scheduling pass, each with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.model import JobId
from coordinator.policies.aryl.elastic_jobs import Share, Shares
from coordinator.policies.aryl.gang_admission import Gang
from coordinator.policies.aryl.size_reasons import at_best, is_faster_with_fewer
from coordinator.policies.contract.decisions import (
    Decision,
    Placement,
    Resize,
    Start,
    merge,
    placed_count,
)
from coordinator.policies.contract.estimates import fastest_s, rate_on, work_on
from coordinator.policies.contract.text import counted


def resizes(
    shares: Shares, gangs: Iterable[Gang], *, resize_cost_s: float
) -> tuple[list[Decision], list[Decision]]:
    """Shrinking and growing jobs apart; one decision per job."""
    beneficiaries: dict[tuple[JobId, int], JobId] = {
        (worker.job_id, worker.worker_index): gang.job.job_id
        for gang in gangs
        for worker in gang.evicted
    }
    gone: list[Decision] = []
    grown: list[Decision] = []
    for _, share in sorted(shares.made.items()):
        if not share.removed and not share.added:
            continue
        stalled_gpus = len(share.job.placed) * share.job.gpus_per_worker
        measured_s = share.job.resizes.cost_s
        decision = Resize(
            job_id=share.job.job_id,
            added=tuple(share.added),
            removed_workers=tuple(sorted(worker.worker_index for worker in share.removed)),
            predicted_cost_gpu_s=stalled_gpus
            * (resize_cost_s if measured_s is None else measured_s),
            reason=_why_resized(share, beneficiaries),
        )
        (gone if share.removed else grown).append(decision)
    return gone, grown


def _why_resized(share: Share, beneficiaries: dict[tuple[JobId, int], JobId]) -> str:
    base = share.job.workers_on(share.gpu_type).min
    before_s = share.left_s(share.current, spans_types=share.job.spans_types)
    after_s = share.left_s(share.count, spans_types=share.spans_types)
    change = f"{base + share.current} to {base + share.count} workers, "
    times = f"{before_s:.0f} s left become {after_s:.0f} s"
    if share.added:
        grows = f"grows from {change}{times}: the most time saved for the GPUs that are free"
        return f"{grows}{_then(at_best(share))}"
    keys = [(worker.job_id, worker.worker_index) for worker in share.removed]
    jobs = sorted({beneficiaries[key] for key in keys if key in beneficiaries})
    if jobs:
        return f"shrinks from {change}{times}: room for the base gang of {', '.join(jobs)}"
    if is_faster_with_fewer(share):
        return f"shrinks from {change}{times}: by its profile it is faster with fewer workers"
    return f"shrinks from {change}{times}: other jobs save more time with these GPUs"


def _then(sentence: str) -> str:
    return f"; it {sentence}" if sentence else ""


def starts(
    gangs: Iterable[Gang], new: Mapping[JobId, Share], *, trusts_profiles: bool = True
) -> list[Decision]:
    """One decision per gang that starts, with the flexible workers that it starts with."""
    found: list[Decision] = []
    for gang in gangs:
        share = new.get(gang.job.job_id)
        placements = merge([*gang.placements, *(share.added if share else ())])
        found.append(_start(gang, placements, share, trusts_profiles=trusts_profiles))
    return found


def _start(
    gang: Gang, placements: tuple[Placement, ...], share: Share | None, *, trusts_profiles: bool
) -> Start:
    job, count = gang.job, placed_count(placements)
    spans_types = gang.spans_types or (share is not None and share.spans_types)
    nodes = sorted({placement.node for placement in placements})
    ratio = job.gpu.heterogeneous_speed_ratio if spans_types else 1.0
    what = f"{counted(count * job.gpus_per_worker, 'GPU')} of type {gang.gpu_type}"
    if spans_types:
        what = f"{what}, or what stands for them on other types,"
    room = ", flexible workers make room" if gang.evicted else ""
    best = _then(at_best(share)) if share is not None else ""
    rate = rate_on(job, gang.gpu_type, count, trusts_profiles=trusts_profiles)
    least_s = fastest_s(job, trusts_profiles=trusts_profiles)
    return Start(
        job_id=job.job_id,
        gpu_type=gang.gpu_type,
        placements=placements,
        estimated_runtime_s=work_on(job, gang.gpu_type, job.as_of_s) / (rate * ratio),
        estimate_source=job.estimate.source,
        reason=f"its turn (at least {least_s:.0f} s by {job.estimate.source}, priority "
        f"{job.priority}): {what} on {counted(len(nodes), 'node')}{room}{best}",
    )
