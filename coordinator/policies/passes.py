"""One pass by rules: who starts where, how large, and what is lent or taken back. Knows no names.

A bundle's rules choose among the same parts: order (queueing), size (scaling), place (placement),
loan (loaning, forecast) and reclaim (reclaiming). Must not know the engine.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from common.model import JobId, Mode, NodeName
from coordinator.policies.blockers import Hold, holds
from coordinator.policies.decisions import (
    Decision,
    Loan,
    Placement,
    Recommend,
    Resize,
    Start,
)
from coordinator.policies.keeping import why_kept
from coordinator.policies.loaning import Balance, Demand, balance, choose_loans, numbers
from coordinator.policies.placement import Room, merge, placed_count
from coordinator.policies.queueing import (
    Admitted,
    Gang,
    OrderKey,
    admit,
    fastest_s,
    waiting,
)
from coordinator.policies.reclaiming import Occupancy, carry_out, choose_nodes, lent_nodes
from coordinator.policies.scaling import (
    RESIZE_COST_S,
    Share,
    give_back,
    share_flexible,
    shares_of,
    work_on,
)
from coordinator.policies.snapshot import ClusterSnapshot, ServiceView, Shadow


class Allocation(Struct, frozen=True, kw_only=True):
    """What one scheduling pass decided, and what the policy wants to remember.

    wake_at_s: the next pass is wanted at this instant at the latest, for something that only time
        changes; None has no wish.
    """

    decisions: tuple[Decision, ...]
    memory: bytes = b""
    wake_at_s: float | None = None


class Rules(Struct, frozen=True, kw_only=True):
    """What a bundle is made of.

    order: key of the waiting jobs. is_strict: the first that does not fit blocks
    the rest that want the same GPU types.
    is_scaling: flexible workers are given and taken. is_loaning: spare nodes are lent.
    resize_cost_s: running time that each flexible worker more or less must save (a rendezvous).
    elastic_base_prefers_loan: the paper's placing of elastic base demand, see `placement`.
    lend_only_on_demand: lend no node that no job could use; the paper lends whatever is spare.
    """

    order: OrderKey
    is_strict: bool = False
    is_scaling: bool = False
    is_loaning: bool = False
    resize_cost_s: float = RESIZE_COST_S
    elastic_base_prefers_loan: bool = False
    lend_only_on_demand: bool = True


# --- who starts, how large, where -----------------------------------------------------------


def allocate(rules: Rules, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """One scheduling pass: base demand in order, then flexible demand on what is left.

    Decisions come in the order in which they can be carried out: flexible workers go, gangs
    start on the room, others grow. A frozen cell gets none.
    """
    if snapshot.is_frozen:
        return Allocation(decisions=(), memory=memory)
    room, shares, admitted = _admitted(rules, snapshot)
    new = {
        gang.job.job_id: Share(gang.job, gang.gpu_type, now_s=snapshot.now_s, is_new=True)
        for gang in admitted.gangs
        if rules.is_scaling and gang.job.is_elastic
    }
    resting = [share for share in shares.values() if _rests_until_s(snapshot, share) is not None]
    ready = [share for share in shares.values() if _rests_until_s(snapshot, share) is None]
    share_flexible(room, [*ready, *new.values()], resize_cost_s=rules.resize_cost_s)
    give_back(room, shares.values())
    gone, grown = _resizes(rules, shares, admitted)
    starts = _starts(admitted, new)
    wakes = [_rests_until_s(snapshot, share) for share in resting]
    return Allocation(
        decisions=(*gone, *starts, *grown),
        memory=memory,
        wake_at_s=min((wake for wake in wakes if wake is not None), default=None),
    )


def _admitted(rules: Rules, snapshot: ClusterSnapshot) -> tuple[Room, dict[JobId, Share], Admitted]:
    """Phase 1: who starts, and the room and the shares after it."""
    room = Room(
        snapshot,
        elastic_base_prefers_loan=rules.elastic_base_prefers_loan,
        has_flexible=rules.is_scaling,
    )
    shares = shares_of(room.index.resizable, now_s=snapshot.now_s) if rules.is_scaling else {}
    return room, shares, admit(room, rules.order, shares, is_strict=rules.is_strict)


def hold(rules: Rules, snapshot: ClusterSnapshot) -> tuple[Hold, ...]:
    """Why each job that waits would not start in a pass now."""
    room, _, admitted = _admitted(rules, snapshot)
    started = {gang.job.job_id for gang in admitted.gangs}
    left = [job for job in waiting(snapshot, rules.order) if job.job_id not in started]
    return tuple(holds(snapshot, room, left, is_strict=rules.is_strict))


def _rests_until_s(snapshot: ClusterSnapshot, share: Share) -> float | None:
    """When the job's cooldown after its last resize ends; None when it has."""
    last_s = share.job.last_resized_at_s
    if last_s is None or last_s + snapshot.resize_cooldown_s <= snapshot.now_s:
        return None
    return last_s + snapshot.resize_cooldown_s


def _resizes(
    rules: Rules, shares: dict[JobId, Share], admitted: Admitted
) -> tuple[list[Decision], list[Decision]]:
    """Shrinking and growing jobs apart; one decision per job."""
    beneficiaries: dict[tuple[JobId, int], JobId] = {
        (worker.job_id, worker.worker_index): gang.job.job_id
        for gang in admitted.gangs
        for worker in gang.evicted
    }
    gone: list[Decision] = []
    grown: list[Decision] = []
    for job_id in sorted(shares):
        share = shares[job_id]
        if not share.removed and not share.added:
            continue
        stalled_gpus = len(share.job.placed) * share.job.gpus_per_worker
        decision = Resize(
            job_id=job_id,
            added=tuple(share.added),
            removed_workers=tuple(sorted(worker.worker_index for worker in share.removed)),
            predicted_cost_gpu_s=rules.resize_cost_s * stalled_gpus,
            reason=_why_resized(share, beneficiaries),
        )
        (gone if share.removed else grown).append(decision)
    return gone, grown


def _why_resized(share: Share, beneficiaries: dict[tuple[JobId, int], JobId]) -> str:
    base = share.job.workers_on(share.gpu_type).min
    before_s = share.work_s / (base + share.current)
    after_s = share.work_s / (base + share.count)
    change = f"{base + share.current} to {base + share.count} workers, "
    times = f"{before_s:.0f} s left become {after_s:.0f} s"
    if share.added:
        return f"grows from {change}{times}: the most time saved for the GPUs that are free"
    keys = [(worker.job_id, worker.worker_index) for worker in share.removed]
    jobs = sorted({beneficiaries[key] for key in keys if key in beneficiaries})
    if jobs:
        return f"shrinks from {change}{times}: room for the base gang of {', '.join(jobs)}"
    return f"shrinks from {change}{times}: other jobs save more time with these GPUs"


def _starts(admitted: Admitted, new: dict[JobId, Share]) -> list[Decision]:
    starts: list[Decision] = []
    for gang in admitted.gangs:
        share = new.get(gang.job.job_id)
        placements = merge([*gang.placements, *(share.added if share else ())])
        starts.append(_start(gang, placements))
    return starts


def _start(gang: Gang, placements: tuple[Placement, ...]) -> Start:
    job, count = gang.job, placed_count(placements)
    nodes = sorted({placement.node for placement in placements})
    gpus = count * job.gpus_per_worker
    room = ", flexible workers make room" if gang.evicted else ""
    return Start(
        job_id=job.job_id,
        gpu_type=gang.gpu_type,
        placements=placements,
        estimated_runtime_s=work_on(job, gang.gpu_type, job.as_of_s) / count,
        estimate_source=job.estimate_source,
        reason=f"its turn (at least {fastest_s(job):.0f} s by {job.estimate_source}, priority "
        f"{job.priority}): {gpus} GPUs of type {gang.gpu_type} on {len(nodes)} nodes{room}",
    )


# --- what is lent and what comes home -------------------------------------------------------


def lend(rules: Rules, snapshot: ClusterSnapshot) -> tuple[Decision, ...]:
    """One loan pass: per service either loans or reclaims.

    In mode recommend each loan is proposed for an operator to approve; in mode observe both loans
    and reclaims are followed as if they had been made. What a service has really lent comes home
    as in mode act. A recalled service gets all its nodes back, in every mode
    and also in a frozen cell. A bundle without loans lends nothing, but takes back in time what
    another one has lent.
    """
    occupancy = Occupancy(snapshot)
    demand = Demand(snapshot, is_scaling=rules.is_scaling) if rules.lend_only_on_demand else None
    decisions: list[Decision] = []
    for service in snapshot.services:
        if service.is_recalled:
            lent = lent_nodes(snapshot, service.name)
            choice = choose_nodes(occupancy, lent, len(lent))
            decisions += carry_out(occupancy, service, choice, f"{service.name} was recalled")
        elif not snapshot.is_frozen:
            decisions += _balance_service(rules, snapshot, service, occupancy, demand)
    return tuple(decisions)


def _balance_service(
    rules: Rules,
    snapshot: ClusterSnapshot,
    service: ServiceView,
    occupancy: Occupancy,
    demand: Demand | None,
) -> tuple[Decision, ...]:
    have = balance(snapshot, service)
    because = numbers(service, have)
    if service.mode == Mode.OBSERVE:
        watched = _watched(rules, snapshot, service, have, demand)
    else:
        watched = ()
    if have.shortfall:
        # In every mode: what is lent was lent in mode act, and the promise outlives the mode.
        choice = choose_nodes(occupancy, lent_nodes(snapshot, service.name), have.shortfall)
        return (*carry_out(occupancy, service, choice, because), *watched)
    if not rules.is_loaning or service.mode == Mode.OBSERVE:
        return watched
    is_acting = service.mode == Mode.ACT
    mine = demand if demand is None or is_acting else demand.copy()
    names = choose_loans(snapshot, service, have, mine)
    if is_acting:
        return tuple(Loan(node=name, service=service.name, reason=because) for name in names)
    return tuple(
        Recommend(action="lend", node=name, service=service.name, reason=because) for name in names
    )


def _watched(
    rules: Rules,
    snapshot: ClusterSnapshot,
    service: ServiceView,
    have: Balance,
    demand: Demand | None,
) -> tuple[Decision, ...]:
    """What would be lent or taken back if all that was watched so far had been done."""
    lent = [node for node in have.ready if node.shadow == Shadow.LENT]
    have = replace(
        have,
        ready=tuple(node for node in have.ready if node.shadow == Shadow.NONE),
        coming=(*have.coming, *(node for node in have.ready if node.shadow == Shadow.COMING)),
    )
    because = numbers(service, have)
    if have.shortfall:
        action, names = "reclaim", tuple(node.name for node in lent[: have.shortfall])
    elif rules.is_loaning:
        mine = None if demand is None else demand.copy()
        if mine is not None:
            for node in lent:
                mine.take(node)
        action, names = "lend", choose_loans(snapshot, service, have, mine)
    else:
        return ()
    return tuple(
        Recommend(action=action, node=name, service=service.name, reason=because) for name in names
    )


def keep(rules: Rules, snapshot: ClusterSnapshot, name: NodeName) -> tuple[str, ...]:
    """Why a node that serves is not lent."""
    demand = Demand(snapshot, is_scaling=rules.is_scaling) if rules.lend_only_on_demand else None
    lent_next = [d.node for d in lend(rules, snapshot) if isinstance(d, Loan)]
    return why_kept(snapshot, name, is_loaning=rules.is_loaning, demand=demand, lent_next=lent_next)
