"""The API of plans: what would happen, asked and answered. Nothing changes.

Instants are seconds from the question (`in_s`), as the played time has no date.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType, field

from common.encoding import Message, Part
from common.model import JobSeconds, JobSpec, NonNegativeInt


class PlanKind(StrEnum):
    """The change in question."""

    JOB = "job"  # this job is submitted, or one that waits starts without any change
    DRAIN = "drain"  # an operator drains a node
    LOAN = "loan"  # a node is lent, or what a service has to spare
    RECALL = "recall"  # an operator recalls a service, or all
    TENANT = "tenant"  # a tenant has another guarantee
    POLICY = "policy"  # another policy decides
    QUEUE = "queue"  # nothing changes: when the jobs that wait start


class Plan(Message, frozen=True, kw_only=True, tag="plan"):
    """What a change would lead to now and later; it changes nothing.

    target: a node of `drain`; a node or a service of `loan`; a service of `recall`, empty for all;
        a tenant; a policy, perhaps with knobs; the id, number or name of a waiting job, for `job`
        without a spec.
    guarantee_gpus: of `tenant`.
    deadline_s, in_s: of `drain`, as in `Operate`; without `in_s` it begins at once.
    horizon_s: how far ahead is played at most.
    limit_s: how long the playing may take.
    in_full: the answer has `number` too, which a caller of an older version refuses. A coordinator
        of an older version refuses the request then.
    """

    kind: PlanKind
    target: str = ""
    spec: JobSpec | None = None
    guarantee_gpus: NonNegativeInt | None = None
    deadline_s: JobSeconds | None = None
    horizon_s: JobSeconds = 86_400.0
    limit_s: Annotated[float, Meta(gt=0, le=60)] = 5.0
    in_s: JobSeconds | UnsetType = UNSET
    in_full: bool | UnsetType = UNSET


class PlanStep(Part, frozen=True, kw_only=True):
    """One decision, or the stop of a job that follows from an order.

    action: start, grow, shrink, stop, suspend, resume, migrate, reject, lend, recall or recommend.
    subject: the job or the node.
    whose: name and tenant of the job, or the service of the node.
    """

    in_s: float
    action: str
    subject: str
    whose: str = ""
    what: str = ""
    reason: str = ""


class PlanEnd(Part, frozen=True, kw_only=True):
    """A job whose end is awaited, and the source of the estimate."""

    job_id: str
    name: str
    tenant: str
    in_s: float
    source: str


class PlanStart(Part, frozen=True, kw_only=True):
    """The start of the job in question.

    in_s: None: not within the played time.
    gpus, nodes: of its first placement.
    after: jobs that end before it and leave GPUs, the latest ones.
    waits_for: why it does not start now, as `explain job` says it.
    unknown: why no start is predicted; empty where one is, or where it lies beyond the played time.
    """

    in_s: float | None = None
    gpus: int = 0
    nodes: tuple[str, ...] = ()
    after: tuple[PlanEnd, ...] = ()
    waits_for: tuple[str, ...] = ()
    unknown: str = ""


class PlanTurn(Part, frozen=True, kw_only=True):
    """The expected start of a job that waits, or of the first task of an array that does.

    job_id: of the job or the array.
    gpus, nodes: of that start.
    """

    job_id: str
    name: str
    tenant: str
    in_s: float
    gpus: int = 0
    nodes: tuple[str, ...] = ()


class PlanEffect(Part, frozen=True, kw_only=True):
    """A job that the change stops, shrinks, delays or brings forward.

    what: preempted, shrinks, starts later, starts earlier or does not start.
    in_s: when it is stopped or shrunk, or when it starts with the change.
    lost_gpu_s: work since its last verified save, which a preemption throws away at most.
    later_s: how much later it starts; below zero, how much earlier.
    again_in_s: when a preempted job starts again; None: not within the played time.
    """

    job_id: str
    name: str
    tenant: str
    what: str
    in_s: float | None = None
    lost_gpu_s: float = 0.0
    later_s: float = 0.0
    again_in_s: float | None = None


class PlanMove(Part, frozen=True, kw_only=True):
    """A node that is lent, comes home or becomes empty by the change.

    to: `on loan`, `serving` or `empty`.
    in_s: None: not within the played time.
    stages_s: its stages; their sum is `in_s` where the node moves at once.
    source: where the lengths of the stages come from.
    deadline_s: the promise, for a way home.
    """

    node: str
    service: str = ""
    to: str
    in_s: float | None = None
    stages_s: dict[str, float] = field(default_factory=dict[str, float])
    source: str = ""
    deadline_s: float | None = None


class Planned(Message, frozen=True, kw_only=True, tag="planned"):
    """Answer to `Plan`: only what differs from the same time without the change.

    now: what the next pass would decide.
    later: what differs after that, first things first.
    start: of kind `job`.
    turns: of kind `queue`, the first starts in their order; `turns_cut` counts those left out.
    number: of kind `job`, the number that a submission now would get; only `in_full`.
    warnings: why the job could never run on this fleet.
    refused: why the change itself would be refused; empty: it would not.
    played_s: how far ahead was played, in both runs.
    took_s: how long that took.
    assumptions: what the playing rests on.
    """

    kind: PlanKind
    target: str = ""
    now: tuple[PlanStep, ...] = ()
    later: tuple[PlanStep, ...] = ()
    start: PlanStart | None = None
    effects: tuple[PlanEffect, ...] = ()
    moves: tuple[PlanMove, ...] = ()
    warnings: tuple[str, ...] = ()
    refused: str = ""
    played_s: float = 0.0
    took_s: float = 0.0
    assumptions: tuple[str, ...] = ()
    turns: tuple[PlanTurn, ...] | UnsetType = UNSET
    turns_cut: int | UnsetType = UNSET
    number: int | UnsetType = UNSET

    @property
    def has_changes(self) -> bool:
        """Whether anything would be decided that is not decided without the change."""
        is_new = self.kind == PlanKind.JOB and not self.target
        starts = is_new and self.start is not None and self.start.in_s is not None
        return bool(starts or self.now or self.later or self.effects or self.moves)
