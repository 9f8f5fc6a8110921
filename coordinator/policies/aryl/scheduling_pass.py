"""One scheduling pass by rules: which jobs start and where, their sizes, loans and reclaims.

A policy's rules choose among the same parts: `order`, `scaling`, `placement`, `lending` and
`reclaim`.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from common.model import JobId, Mode, NodeName, NonNegativeFloat, NonNegativeInt, Ratio
from coordinator.policies.aryl.aged_claims import Claims
from coordinator.policies.aryl.blockers import holds
from coordinator.policies.aryl.decisions import resizes, starts
from coordinator.policies.aryl.elastic_jobs import Share, Shares, shares_of, that_may_grow
from coordinator.policies.aryl.lending.balance import Balance, balance, by_quantile, numbers
from coordinator.policies.aryl.lending.covering import Unmet
from coordinator.policies.aryl.lending.demand import Demand, choose_loans
from coordinator.policies.aryl.lending.loan_lifetime import Lifetimes
from coordinator.policies.aryl.lending.not_lent_reasons import why_kept
from coordinator.policies.aryl.order import Gang, OrderKey, admit, waiting
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.aryl.queue_weight import line_weight
from coordinator.policies.aryl.reclaim.preemption_cost import CostModel
from coordinator.policies.aryl.reclaim.rules import ReclaimRule, TakeBack
from coordinator.policies.aryl.reservations import Reservations, kept
from coordinator.policies.aryl.scaling import RESIZE_COST_S, give_back, share_flexible
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
from coordinator.policies.contract.snapshot import ClusterSnapshot, ServiceView, Shadow
from coordinator.policies.knobs import Needs, off
from coordinator.policies.tenants.infeasible import Hosts, hosts_of


class Rules(Struct, frozen=True, kw_only=True):
    """The rules of a bundle; all but the order are knobs, see `registry`.

    order: sort key of the waiting jobs.
    is_strict: the first job that does not fit blocks the rest that want the same GPU types, unless
        the cell could never run it.
    is_scaling: give flexible workers to elastic jobs, and take them away.
    is_loaning: lend spare nodes.
    resize_cost_s: running time in seconds that each added or removed flexible worker must save
        (the cost of a rendezvous).
    grows_when_idle: give no flexible workers while a job waits.
    elastic_base_prefers_loan: place base workers of elastic jobs on lent nodes first, as in the
        paper; false: on training nodes while they fit there, as a reclaim preempts only jobs with
        a base worker on a lent node.
    lend_only_on_demand: lend only nodes that a job could use; the paper lends every spare node.
    separates_groups: place base and flexible workers on different lent nodes; the paper's naive
        placement does not (table 6).
    waits_for_loan: run jobs that could use a lent GPU type only on lent nodes, as opportunistic
        guests of the inference cluster (section 7.1), until they are preempted; a job that is
        longer than any loan never ends there.
    reclaim: rule that chooses which lent nodes return.
    reclaim_cost: cost of a preemption in that choice.
    waits_for_finish: a reclaim waits for jobs that end by themselves within the deadline.
    separates_at_home: place base and flexible workers on different training nodes as well.
    claim_ratio: a job that does not fit keeps nodes free for itself for this share of the time it
        has waited; 0: never.
    claim_stretch: a job keeps nodes free only after it has waited this many times its shortest
        running time.
    claims_most: number of jobs that may keep nodes of one GPU type free at a time.
    reservation_after_s: reserve GPUs for a gang that has waited this long without a fit, which
        bounds its wait (EASY backfilling, see `reservations`); None: never.
    trusts_profiles: take a job's speed at each size from its profile. False, or without a profile:
        speed is proportional to the worker count, as in the paper. The order of jobs is the
        paper's either way: by the running time with the most workers, at proportional speed.
    queue_weight: weight of the time that a flexible worker saves waiting jobs, against the time
        that it saves its own job. A second of the job then counts 1 + queue_weight x n x g / G: n
        jobs wait for its GPU type, its base gang has g GPUs, the type has G. 0: none, as in the
        paper.
    lifetime_quantile: place base workers on a lent node only if its loan outlives the job at this
        quantile of the load, where the daily load is known; None: on any lent node with room.
    near_quantile: quantile for a job that would fit on training nodes but for a claim or flexible
        workers; None: lifetime_quantile.
    lifetime_odds: use a higher quantile for a job that has less to gain from a loan than to lose.
        A job that fits on training nodes then never uses a loan of unknown length, whatever
        near_quantile is.
    lifetime_saves: a job that saves checkpoints may use lent nodes that return before it ends.
    lend_quantile: lend and reclaim by this quantile of the load; None: by its last value, slope
        and day before.
    """

    order: OrderKey
    is_strict: bool = False
    is_scaling: bool = False
    is_loaning: bool = False
    resize_cost_s: NonNegativeFloat = RESIZE_COST_S
    grows_when_idle: bool = False
    elastic_base_prefers_loan: bool = False
    lend_only_on_demand: bool = True
    separates_groups: bool = True
    waits_for_loan: bool = False
    reclaim: ReclaimRule = ReclaimRule.COST
    reclaim_cost: CostModel = CostModel.JOBS
    waits_for_finish: bool = False
    separates_at_home: bool = False
    claim_ratio: NonNegativeFloat = 0.0
    claim_stretch: NonNegativeFloat = 30.0
    claims_most: NonNegativeInt = 1
    reservation_after_s: NonNegativeFloat | None = None
    trusts_profiles: bool = True
    queue_weight: NonNegativeFloat = 0.0
    lifetime_quantile: Ratio | None = None
    lifetime_odds: bool = False
    near_quantile: Ratio | None = None
    lifetime_saves: bool = False
    lend_quantile: Ratio | None = None


_SCALING = (off("is_scaling", False),)
_LOANING = (off("is_loaning", False),)
_PRICED = (off("reclaim", ReclaimRule.RANDOM, ReclaimRule.FEWEST_JOBS),)
_CLAIMING = (off("claim_ratio", 0.0),)
_CLAIMANTS = (off("claims_most", 0),)
_LIFETIMES = (off("lifetime_quantile", None),)

NEEDS: Needs = {
    "resize_cost_s": (_SCALING,),
    "grows_when_idle": (_SCALING,),
    "queue_weight": (_SCALING,),
    "elastic_base_prefers_loan": (_LOANING,),
    "lend_only_on_demand": (_LOANING,),
    "separates_groups": (
        (*_LOANING, off("separates_at_home", False)),
        (*_SCALING, off("elastic_base_prefers_loan", False)),
    ),
    "separates_at_home": (_SCALING, (off("separates_groups", False),)),
    "reclaim": (_LOANING,),
    "reclaim_cost": (_LOANING, _PRICED),
    "waits_for_finish": (_LOANING, _PRICED),
    "claim_ratio": (_CLAIMANTS,),
    "claim_stretch": (_CLAIMING, _CLAIMANTS),
    "claims_most": (_CLAIMING,),
    "lifetime_quantile": (_LOANING,),
    "lifetime_odds": (_LOANING, _LIFETIMES),
    "near_quantile": (_LOANING, _LIFETIMES),
    "lifetime_saves": (_LOANING, _LIFETIMES),
    "lend_quantile": (_LOANING,),
}
"""Which part uses which knob: those that decide nothing while others are off.

What another policy has lent comes home under any one, by what the loan knobs are by default there.
`waits_for_loan` stands by itself: without loans its guests wait for ever.
"""


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
    jobs = index.resizable if rules.is_scaling else ()
    if index.lines or (jobs and index.growable):  # otherwise no job wants anything, which is common
        room, shares, new, gangs = _settled(rules, snapshot, memory)
        memory = _memory_after(room, memory)
        # breaks the reference cycle: both would stay until the garbage collector runs
        room.bars.clear()
        gone, grown = resizes(shares, gangs, resize_cost_s=rules.resize_cost_s)
        decisions = (*gone, *starts(gangs, new, trusts_profiles=rules.trusts_profiles), *grown)
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
    new = {
        gang.job.job_id: shares.of_new(gang.job, gang.gpu_type)
        for gang in gangs
        if rules.is_scaling and gang.job.is_elastic
    }
    ready = that_may_grow(snapshot, shares, room.index.growable, new.values())
    for gang in gangs:
        if gang.spans_types and gang.job.job_id in new:
            new[gang.job.job_id].spans_types = True
    is_idle = sum(map(len, room.index.lines)) <= len(gangs)
    growing = [*ready, *new.values()] if is_idle or not rules.grows_when_idle else []
    share_flexible(room, growing, resize_cost_s=rules.resize_cost_s)
    give_back(room, shares.made.values(), resize_cost_s=rules.resize_cost_s)
    grow_spanning(room, growing, resize_cost_s=rules.resize_cost_s)
    return room, shares, new, gangs


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
        resize_cost_s=rules.resize_cost_s,
        trusts_profiles=rules.trusts_profiles,
    )


def _demand(rules: Rules, snapshot: ClusterSnapshot) -> Demand | None:
    if not rules.lend_only_on_demand:
        return None
    return Demand(snapshot, lambda: _unmet(rules, snapshot), is_scaling=rules.is_scaling)


def _admitted(
    rules: Rules, snapshot: ClusterSnapshot, memory: bytes
) -> tuple[PlacementState, Shares, list[Gang]]:
    """Phase 1: the starts, and the room and the shares after it."""
    room = PlacementState(
        snapshot,
        elastic_base_prefers_loan=rules.elastic_base_prefers_loan,
        has_flexible=rules.is_scaling,
        separates_groups=rules.separates_groups,
        waits_for_loan=rules.waits_for_loan,
        separates_at_home=rules.separates_at_home,
    )
    running = room.index.resizable if rules.is_scaling else ()
    weigh = line_weight(room, rules.queue_weight)
    shares = shares_of(
        running,
        now_s=snapshot.now_s,
        held=room.index.held,
        weigh=weigh,
        trusts_profiles=rules.trusts_profiles,
    )
    if rules.lifetime_quantile is not None:
        room.bars.append(
            Lifetimes(
                snapshot,
                room,
                q=rules.lifetime_quantile,
                weighs_odds=rules.lifetime_odds,
                near_q=rules.near_quantile,
                lend_q=rules.lend_quantile,
                counts_saves=rules.lifetime_saves,
            )
        )
    claims = None
    if rules.claim_ratio:
        claims = Claims(
            snapshot,
            ratio=rules.claim_ratio,
            stretch=rules.claim_stretch,
            most=rules.claims_most,
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
    return hosts_of(snapshot, lends=rules.is_loaning) if rules.is_strict else None


def hold(rules: Rules, snapshot: ClusterSnapshot, memory: bytes = b"") -> tuple[PendingReason, ...]:
    """Why each job that waits would not start in a pass now."""
    room, _, gangs = _admitted(rules, snapshot, memory)
    started = {gang.job.job_id for gang in gangs}
    left = [job for job in waiting(snapshot, rules.order) if job.job_id not in started]
    return tuple(holds(snapshot, room, left, strict=_strict(rules, snapshot)))


def tell(rules: Rules, snapshot: ClusterSnapshot, memory: bytes, job_id: JobId) -> tuple[str, ...]:
    """Why a running elastic job has no more workers than it has; nothing of any other job."""
    job = next((job for job in snapshot.jobs if job.job_id == job_id), None)
    if job is None or not rules.is_scaling or not job.is_resizable or snapshot.is_frozen:
        return ()
    room, shares, _new, gangs = _settled(rules, snapshot, memory)
    waits = sum(map(len, room.index.lines)) > len(gangs)
    cost_s, is_barred = rules.resize_cost_s, rules.grows_when_idle and waits
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
    snapshot = by_quantile(snapshot, rules.lend_quantile)
    take_back = TakeBack(
        snapshot, rules.reclaim, rules.reclaim_cost, waits_for_finish=rules.waits_for_finish
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
    if not rules.is_loaning or service.mode == Mode.OBSERVE or snapshot.is_frozen:
        return watched
    names = choose_loans(snapshot, service, have, demand)
    if service.mode == Mode.ACT:
        return tuple(Loan(node=name, service=service.name, reason=because) for name in names)
    return tuple(
        Recommend(action=Advice.LEND, node=name, service=service.name, reason=because)
        for name in names
    )


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
        ready=tuple(node for node in have.ready if node.shadow == Shadow.NONE),
        coming=(*have.coming, *(node for node in have.ready if node.shadow == Shadow.COMING)),
    )
    because = numbers(service, have)
    if have.shortfall:
        action, names = Advice.RECLAIM, tuple(node.name for node in lent[: have.shortfall])
    elif rules.is_loaning:
        action, names = Advice.LEND, choose_loans(snapshot, service, have, demand)
    else:
        return ()
    return tuple(
        Recommend(action=action, node=name, service=service.name, reason=because) for name in names
    )


def keep(rules: Rules, snapshot: ClusterSnapshot, name: NodeName) -> tuple[str, ...]:
    """Why a node that serves is not lent."""
    snapshot = by_quantile(snapshot, rules.lend_quantile)
    demand = _demand(rules, snapshot)
    decided = lend(rules, snapshot)
    return why_kept(
        snapshot,
        name,
        is_loaning=rules.is_loaning,
        demand=demand,
        lent_next=[d.node for d in decided if isinstance(d, Loan)],
        proposed=[d.node for d in decided if isinstance(d, Recommend) and d.action == Advice.LEND],
    )
