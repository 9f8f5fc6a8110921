"""The rules of a policy made of Aryl's parts. A part that a policy is without has no rules.

All but the order are knobs, see `knobs`.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import field

from common.model import NonNegativeFloat, NonNegativeInt, Ratio
from coordinator.policies.aryl.reclaim.preemption_cost import CostModel
from coordinator.policies.aryl.reclaim.rules import ReclaimRule
from coordinator.policies.aryl.scaling import RESIZE_COST_S
from coordinator.policies.aryl.shortest_first import OrderKey
from coordinator.policies.knobs import Group, Idle, KnobSet


class Scaling(Group, frozen=True, kw_only=True):
    """How flexible workers are given and taken.

    resize_cost_s: running time in seconds that each added or removed flexible worker must save
        (the cost of a rendezvous).
    grows_when_idle: give no flexible workers while a job waits.
    separates_at_home: place base and flexible workers on different training nodes as well.
    queue_weight: weight of the time that a flexible worker saves waiting jobs, against the time
        that it saves its own job. A second of the job then counts 1 + queue_weight x n x g / G: n
        jobs wait for its GPU type, its base gang has g GPUs, the type has G. 0: none, as in the
        paper.
    """

    resize_cost_s: NonNegativeFloat = RESIZE_COST_S
    grows_when_idle: bool = False
    separates_at_home: bool = False
    queue_weight: NonNegativeFloat = 0.0


class Lifetime(Group, frozen=True, kw_only=True):
    """Which jobs may use a loan, by how long it will last.

    quantile: place base workers on a lent node only if its loan outlives the job at this
        quantile of the load, where the daily load is known; None: on any lent node with room.
    odds: use a higher quantile for a job that has less to gain from a loan than to lose.
        A job that fits on training nodes then never uses a loan of unknown length, whatever
        near_quantile is.
    near_quantile: quantile for a job that would fit on training nodes but for a claim or flexible
        workers; None: lifetime_quantile.
    saves: a job that saves checkpoints may use lent nodes that return before it ends.
    """

    OFF: ClassVar[object] = None

    quantile: Ratio = field(name="lifetime_quantile")
    odds: bool = field(name="lifetime_odds", default=False)
    near_quantile: Ratio | None = None
    saves: bool = field(name="lifetime_saves", default=False)


class Lending(Group, frozen=True, kw_only=True):
    """Which nodes are lent, which jobs use them, and how they return.

    elastic_base_prefers_loan: place base workers of elastic jobs on lent nodes first, as in the
        paper; false: on training nodes while they fit there, as a reclaim preempts only jobs with
        a base worker on a lent node.
    only_on_demand: lend only nodes that a job could use; the paper lends every spare node.
    separates_groups: place base and flexible workers on different lent nodes; the paper's naive
        placement does not (table 6).
    reclaim: rule that chooses which lent nodes return.
    reclaim_cost: cost of a preemption in that choice.
    waits_for_finish: a reclaim waits for jobs that end by themselves within the deadline.
    quantile: lend and reclaim by this quantile of the load; None: by its last value, slope
        and day before.
    """

    elastic_base_prefers_loan: bool = False
    only_on_demand: bool = field(name="lend_only_on_demand", default=True)
    separates_groups: bool = True
    reclaim: ReclaimRule = ReclaimRule.COST
    reclaim_cost: CostModel = CostModel.JOBS
    waits_for_finish: bool = False
    quantile: Ratio | None = field(name="lend_quantile", default=None)
    lifetime: Lifetime | None = field(name="lifetime_quantile", default=None)

    def idle(self) -> Idle:
        """Only some reclaim rules weigh preemptions."""
        if self.reclaim in (ReclaimRule.RANDOM, ReclaimRule.FEWEST_JOBS):
            return dict.fromkeys(("reclaim_cost", "waits_for_finish"), ("reclaim",))
        return {}


class Claiming(Group, frozen=True, kw_only=True):
    """Which jobs keep nodes free for themselves, see `aged_claims`.

    ratio: a job that does not fit keeps nodes free for itself for this share of the time it
        has waited; 0: never.
    stretch: a job keeps nodes free only after it has waited this many times its shortest
        running time.
    most: number of jobs that may keep nodes of one GPU type free at a time.
    """

    OFF: ClassVar[object] = 0.0

    ratio: NonNegativeFloat = field(name="claim_ratio")
    stretch: NonNegativeFloat = field(name="claim_stretch", default=30.0)
    most: NonNegativeInt = field(name="claims_most", default=1)

    def idle(self) -> Idle:
        """No job claims where none may."""
        return (
            {} if self.most else dict.fromkeys(("claim_ratio", "claim_stretch"), ("claims_most",))
        )


class Rules(KnobSet, frozen=True, kw_only=True):
    """The rules of a bundle.

    order: sort key of the waiting jobs.
    is_strict: the first job that does not fit blocks the rest that want the same GPU types, unless
        the cell could never run it.
    scaling: give flexible workers to elastic jobs, and take them away.
    lending: lend spare nodes.
    waits_for_loan: run jobs that could use a lent GPU type only on lent nodes, as opportunistic
        guests of the inference cluster (section 7.1), until they are preempted; a job that is
        longer than any loan never ends there. Without lending its guests wait for ever.
    reservation_after_s: reserve GPUs for a gang that has waited this long without a fit, which
        bounds its wait (EASY backfilling, see `reservations`); None: never.
    trusts_profiles: take a job's speed at each size from its profile. False, or without a profile:
        speed is proportional to the worker count, as in the paper. The order of jobs is the
        paper's either way: by the running time with the most workers, at proportional speed.
    """

    order: OrderKey
    is_strict: bool = False
    scaling: Scaling | None = field(name="is_scaling", default=None)
    lending: Lending | None = field(name="is_loaning", default=None)
    waits_for_loan: bool = False
    claiming: Claiming | None = field(name="claim_ratio", default=None)
    reservation_after_s: NonNegativeFloat | None = None
    trusts_profiles: bool = True

    def idle(self) -> Idle:
        """Base and flexible workers are set apart only where there are both."""
        if self.lending is None:
            return {}
        if self.scaling is None and not self.lending.elastic_base_prefers_loan:
            return {"separates_groups": ("is_scaling", "elastic_base_prefers_loan")}
        if self.scaling is not None and not self.lending.separates_groups:
            return {"separates_at_home": ("separates_groups",)}
        return {}

    @property
    def loans(self) -> Lending:
        """The rules for lent nodes: also of a policy that lends none, as it takes back in time what
        another policy has lent."""
        return self.lending or Lending()
