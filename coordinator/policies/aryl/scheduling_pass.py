"""The scheduling pass and the loan pass of a policy that is made of `Rules`, and their reasons.

`allocate` starts jobs (`gang_admission`, by an order of `shortest_first`) and sizes them
(`scaling`). `lend` makes and ends loans (`lending`, `reclaim`). The rules choose what each does.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from common.model import JobId, Mode, NodeName
from coordinator.policies.aryl.aged_claims import Claims
from coordinator.policies.aryl.blockers import holds
from coordinator.policies.aryl.decisions import resizes, starts
from coordinator.policies.aryl.elastic_jobs import Share, Shares, shares_of, that_may_grow
from coordinator.policies.aryl.gang_admission import Gang, admit
from coordinator.policies.aryl.lending.balance import Balance, balance, by_quantile, numbers
from coordinator.policies.aryl.lending.covering import Unmet
from coordinator.policies.aryl.lending.demand import Demand, choose_loans
from coordinator.policies.aryl.lending.loan_lifetime import Lifetimes
from coordinator.policies.aryl.lending.not_lent_reasons import why_kept
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.aryl.queue_weight import queue_weight
from coordinator.policies.aryl.reclaim.rules import TakeBack
from coordinator.policies.aryl.reservations import Reservations, kept
from coordinator.policies.aryl.rules import Rules, Scaling
from coordinator.policies.aryl.scaling import give_back, share_flexible
from coordinator.policies.aryl.shortest_first import waiting
from coordinator.policies.aryl.size_reasons import why_not_larger
from coordinator.policies.aryl.spanning import find_spanning, grow_spanning
from coordinator.policies.contract.cooldown import resizable_at_s
from coordinator.policies.contract.decisions import (
    Advice,
    Allocation,
    Decision,
    Loan,
    PendingReason,
    Recommend,
    earliest,
)
from coordinator.policies.contract.index import index_of
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    NodeView,
    ServiceView,
    Shadow,
)
from coordinator.policies.tenants.infeasible import Hosts, hosts_of

# --- who starts, how large, where -----------------------------------------------------------


def allocate(rules: Rules, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """One scheduling pass: base demand in order, then flexible demand on the remaining GPUs.

    Decisions come in the order in which they can be carried out: flexible workers leave, gangs
    start on the room, others grow. A frozen cell gets none.
    """
    if snapshot.is_frozen:
        return Allocation(decisions=(), memory=memory)
    index = snapshot.index or index_of(snapshot.nodes, snapshot.jobs)
    snapshot = replace(snapshot, index=index)
    decisions: tuple[Decision, ...] = ()
    jobs = () if rules.scaling is None else index.resizable
    if index.lines or (jobs and index.growable):  # otherwise no job wants anything, which is common
        room, shares, new, gangs = _settled(rules, snapshot, memory)
        memory = _memory_after(room, memory)
        # breaks the reference cycle: both would stay until the garbage collector runs
        room.bars.clear()
        decisions = tuple(starts(gangs, new, trusts_profiles=rules.trusts_profiles))
        if rules.scaling is not None:
            cost_s = rules.scaling.resize_cost_s
            gone, grown = resizes(shares, gangs, resize_cost_s=cost_s)
            decisions = (*gone, *decisions, *grown)
    elif rules.reservation_after_s is not None:
        memory = kept(memory, snapshot)
    wake_at_s = earliest(*[resizable_at_s(snapshot, job) for job in jobs])
    return Allocation(decisions=decisions, memory=memory, wake_at_s=wake_at_s)


def _memory_after(room: PlacementState, memory: bytes) -> bytes:
    """The memory after a pass: the reservations, if the rules make any."""
    found = (bar.memory for bar in room.bars if isinstance(bar, Reservations))
    return next(found, memory)


def _settled(
    rules: Rules, snapshot: ClusterSnapshot, memory: bytes
) -> tuple[PlacementState, Shares, dict[JobId, Share], list[Gang]]:
    """Both phases: the room after them, the shares of running and of new jobs, and the starts."""
    room, shares, gangs = _admitted(rules, snapshot, memory)
    new = {} if rules.scaling is None else _scaled(rules.scaling, snapshot, room, shares, gangs)
    return room, shares, new, gangs


def _scaled(
    scaling: Scaling,
    snapshot: ClusterSnapshot,
    room: PlacementState,
    shares: Shares,
    gangs: Sequence[Gang],
) -> dict[JobId, Share]:
    """Phase 2: flexible workers for running and new jobs. The room and the shares change.

    Returns:
        The shares of the new jobs.
    """
    new: dict[JobId, Share] = {}
    for gang in gangs:
        if gang.job.is_elastic:
            new[gang.job.job_id] = share = shares.of_new(gang.job, gang.gpu_type)
            share.spans_types = share.spans_types or gang.spans_types
    ready = that_may_grow(snapshot, shares, room.index.growable, new.values())
    is_barred = scaling.grows_when_idle and _leaves_waiting(room, gangs)
    growing = [] if is_barred else [*ready, *new.values()]
    share_flexible(room, growing, resize_cost_s=scaling.resize_cost_s)
    give_back(room, shares.made.values(), resize_cost_s=scaling.resize_cost_s)
    grow_spanning(room, growing, resize_cost_s=scaling.resize_cost_s)
    return new


def _leaves_waiting(room: PlacementState, gangs: Sequence[Gang]) -> bool:
    return sum(map(len, room.index.lines)) > len(gangs)


def _unmet(rules: Rules, snapshot: ClusterSnapshot) -> Unmet:
    """The demand that a scheduling pass now would leave unmet.

    It does not get the present reservations: as many GPUs are reserved again, maybe on other nodes.
    """
    room, shares, new, gangs = _settled(rules, snapshot, b"")
    started = {gang.job.job_id for gang in gangs}
    held = (
        job
        for job in waiting(snapshot, rules.order)
        if job.job_id not in started and all(bar.may_use_loans(job) for bar in room.bars)
    )
    return Unmet(
        room=room,
        held=tuple(held),
        shares=(*shares.values(), *new.values()),
        strict=_strict(rules, snapshot),
        resize_cost_s=0.0 if rules.scaling is None else rules.scaling.resize_cost_s,
        trusts_profiles=rules.trusts_profiles,
    )


def _demand(rules: Rules, snapshot: ClusterSnapshot) -> Demand | None:
    if not rules.loans.only_on_demand:
        return None
    is_scaling = rules.scaling is not None
    return Demand(snapshot, lambda: _unmet(rules, snapshot), is_scaling=is_scaling)


def _admitted(
    rules: Rules, snapshot: ClusterSnapshot, memory: bytes
) -> tuple[PlacementState, Shares, list[Gang]]:
    """Phase 1: the starts, and the room and the shares after it."""
    scaling, loans, lifetime = rules.scaling, rules.loans, rules.loans.lifetime
    room = PlacementState(
        snapshot,
        elastic_base_prefers_loan=loans.elastic_base_prefers_loan,
        has_flexible=scaling is not None,
        separates_groups=loans.separates_groups,
        waits_for_loan=rules.waits_for_loan,
        separates_at_home=scaling is not None and scaling.separates_at_home,
    )
    shares = shares_of(
        () if scaling is None else room.index.resizable,
        now_s=snapshot.now_s,
        held=room.index.held,
        weigh=None if scaling is None else queue_weight(room, scaling.queue_weight),
        trusts_profiles=rules.trusts_profiles,
    )
    if lifetime is not None:
        room.bars.append(
            Lifetimes(
                snapshot,
                room,
                q=lifetime.quantile,
                weighs_odds=lifetime.odds,
                near_q=lifetime.near_quantile,
                lend_q=loans.quantile,
                counts_saves=lifetime.saves,
            )
        )
    claims = None
    if (claiming := rules.claiming) is not None:
        claims = Claims(
            snapshot,
            ratio=claiming.ratio,
            stretch=claiming.stretch,
            most=claiming.most,
            trusts_profiles=rules.trusts_profiles,
        )
    reservations = None
    if rules.reservation_after_s is not None:
        reservations = Reservations(
            snapshot,
            room,
            after_s=rules.reservation_after_s,
            memory=memory,
            trusts_profiles=rules.trusts_profiles,
        )
    gangs = admit(
        room,
        rules.order,
        shares,
        strict=_strict(rules, snapshot),
        find_last=find_spanning,
        claims=claims,
        reservations=reservations,
    )
    return room, shares, gangs


def _strict(rules: Rules, snapshot: ClusterSnapshot) -> Hosts | None:
    return hosts_of(snapshot, lends=rules.lending is not None) if rules.is_strict else None


def pending_reasons(
    rules: Rules, snapshot: ClusterSnapshot, memory: bytes
) -> tuple[PendingReason, ...]:
    """Why each job that waits would not start in a pass now."""
    room, _, gangs = _admitted(rules, snapshot, memory)
    started = {gang.job.job_id for gang in gangs}
    left = [job for job in waiting(snapshot, rules.order) if job.job_id not in started]
    return tuple(holds(snapshot, room, left, strict=_strict(rules, snapshot)))


def size_reasons(
    rules: Rules, snapshot: ClusterSnapshot, memory: bytes, job_id: JobId
) -> tuple[str, ...]:
    """Why a running elastic job has no more workers than it has; nothing of any other job."""
    job = next((job for job in snapshot.jobs if job.job_id == job_id), None)
    scaling = rules.scaling
    if job is None or scaling is None or not job.is_resizable or snapshot.is_frozen:
        return ()
    room, shares, _new, gangs = _settled(rules, snapshot, memory)
    is_barred = scaling.grows_when_idle and _leaves_waiting(room, gangs)
    cost_s = scaling.resize_cost_s
    return why_not_larger(snapshot, shares[job_id], resize_cost_s=cost_s, is_barred=is_barred)


#   --- lending and reclaiming -----------------------------------------------------------------


def lend(rules: Rules, snapshot: ClusterSnapshot) -> tuple[Decision, ...]:
    """One loan pass: per service either loans or reclaims.

    In mode recommend each loan is proposed for an operator to approve; in mode observe both loans
    and reclaims are followed as if they had been made. What a service has really lent comes home
    as in mode act. A recalled service gets all its nodes back, in every mode. A bundle without
    loans lends nothing, but takes back in time what another one has lent.

    A frozen cell lends nothing and notes nothing, but a service gets back what its load needs, as
    in any other (docs/decisions/0019-a-freeze-gives-back.md): its promise comes before an
    operator's wish for quiet, and leases that are renewed would keep its nodes away for as long as
    the freeze lasts.
    """
    loans = rules.loans
    snapshot = by_quantile(snapshot, loans.quantile)
    take_back = TakeBack(
        snapshot, loans.reclaim, loans.reclaim_cost, waits_for_finish=loans.waits_for_finish
    )
    demand = _demand(rules, snapshot)
    decisions: list[Decision] = []
    for service in snapshot.services:
        if service.is_recalled:
            decisions += take_back.all_of(service)
        else:
            decisions += _balance_service(rules, snapshot, service, take_back, demand)
    return tuple(decisions)


def _balance_service(
    rules: Rules,
    snapshot: ClusterSnapshot,
    service: ServiceView,
    take_back: TakeBack,
    demand: Demand | None,
) -> tuple[Decision, ...]:
    have = balance(snapshot, service)
    because = numbers(service, have)
    if service.mode == Mode.OBSERVE and not snapshot.is_frozen:
        watched = _watched(rules, snapshot, service, have, demand)
    else:
        watched = ()
    if have.shortfall:
        # In every mode: the loan was made in mode act, and the promise outlives the mode.
        return (*take_back(service, have.shortfall, because), *watched)
    if rules.lending is None or service.mode == Mode.OBSERVE or snapshot.is_frozen:
        return watched
    names = choose_loans(snapshot, service, have, demand)
    if service.mode == Mode.ACT:
        return tuple(Loan(node=name, service=service.name, reason=because) for name in names)
    return tuple(
        Recommend(action=Advice.LEND, node=name, service=service.name, reason=because)
        for name in names
    )


def _really_there(nodes: Sequence[NodeView]) -> tuple[NodeView, ...]:
    """Without those that would be lent or on their way home."""
    return tuple(node for node in nodes if node.shadow == Shadow.NONE)


def _watched(
    rules: Rules,
    snapshot: ClusterSnapshot,
    service: ServiceView,
    have: Balance,
    demand: Demand | None,
) -> tuple[Decision, ...]:
    """The loans and returns that would follow if all shadow loans so far had been made."""
    lent = [node for node in have.ready if node.shadow == Shadow.LENT]
    have = replace(
        have,
        ready=_really_there(have.ready),
        longest_serving=_really_there(have.longest_serving),
        coming=(*have.coming, *(node for node in have.ready if node.shadow == Shadow.COMING)),
    )
    because = numbers(service, have)
    if have.shortfall:
        action, names = Advice.RECLAIM, tuple(node.name for node in lent[: have.shortfall])
    elif rules.lending is not None:
        action, names = Advice.LEND, choose_loans(snapshot, service, have, demand)
    else:
        return ()
    return tuple(
        Recommend(action=action, node=name, service=service.name, reason=because) for name in names
    )


def not_lent_reasons(rules: Rules, snapshot: ClusterSnapshot, name: NodeName) -> tuple[str, ...]:
    """Why a node that serves is not lent."""
    snapshot = by_quantile(snapshot, rules.loans.quantile)
    demand = _demand(rules, snapshot)
    decided = lend(rules, snapshot)
    return why_kept(
        snapshot,
        name,
        is_loaning=rules.lending is not None,
        demand=demand,
        lent_next=[d.node for d in decided if isinstance(d, Loan)],
        proposed=[d.node for d in decided if isinstance(d, Recommend) and d.action == Advice.LEND],
    )
