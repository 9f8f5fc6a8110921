"""How workers end, what a job keeps of failures and of waiting, what a GPU had, how time is told:
data only.
"""

from __future__ import annotations

from msgspec import Struct, field

from common.failures import Failure
from common.faults import NODE_FAULT
from common.model import GpuUuid, NodeName, StopReason


class Ending(Struct, frozen=True, kw_only=True):
    """How a worker ended.

    ended_at_s: when, as its node says; None: when that was heard.
    said_reason: its node stopped it by itself, for this. failure: why it failed by itself, as its
    log says; None where nothing is known.
    refused: what the job names that its node refused it for, as `workdir`; empty: it did not.
    has_begun: it was not refused, for whatever reason.
    """

    ended_at_s: float | None = None
    exit_code: int | None = None
    error: str = ""
    said_reason: StopReason | None = None
    is_node_fault: bool = False
    failure: Failure | None = None
    refused: str = ""
    has_begun: bool = True

    @property
    def whose(self) -> str:
        """Which budget pays for it, in words."""
        return NODE_FAULT if self.is_node_fault else "own fault"

    @property
    def in_words(self) -> str:
        """Its error for people, with whose fault it is where its node knows that; of what a job
        names and one node only misses the words say enough."""
        if not self.is_node_fault or self.refused:
            return self.error
        return f"{NODE_FAULT}: {self.error}" if self.error else NODE_FAULT


class HungStart(Struct, frozen=True):
    """A worker that its node could not start because storage did not answer: which, and when."""

    directory: str
    at_s: float


class TrespassStory(Struct, kw_only=True):
    """What was told of processes of nobody's on one GPU that belong together; see `trespassing`.

    owner: their user and program, as the first of them had it. pids: the latest of them.
    left_at_s: when none was there any more; None: one is.
    untold_count: those that came since the one that was told.
    """

    gpu_uuid: GpuUuid
    owner: str
    pids: list[int]
    left_at_s: float | None = None
    untold_count: int = 0


class GpuOut(Struct, frozen=True, kw_only=True):
    """Why nothing new begins on a GPU, and who ends that; see `gpu_faults`.

    what: the fault, such as `XID 79`. is_node: nor on its node. needs_repair: it stays out when its
    node boots anew. is_drivers: as long as its driver asks for a recovery.
    """

    since_s: float
    what: str
    meaning: str
    owner: str
    next_step: str
    is_node: bool = False
    needs_repair: bool = False
    is_drivers: bool = False


class Suspicion(Struct, frozen=True):
    """A program had a fault of its own on a GPU, for the last time then."""

    program: str
    at_s: float


class GpuCondition(Struct, kw_only=True):
    """What is known of the faults of one GPU.

    counts: how often each was told, as in `GpuFaultFact`. held_back: it would be out, but for the
    breaker.
    """

    counts: dict[str, int] = field(default_factory=dict[str, int])
    suspicions: list[Suspicion] = field(default_factory=list[Suspicion])
    out: GpuOut | None = None
    held_back: GpuOut | None = None
    is_asked: bool = False
    """Its driver asked for a recovery when it was heard last."""


class Avoided(Struct, frozen=True):
    """Until when a job leaves a node alone. is_own_fault: it failed there by its own fault, and
    does not grow there however long it runs elsewhere."""

    until_s: float
    is_own_fault: bool = False


class RetryEntry(Struct, kw_only=True, omit_defaults=True):
    """What the failures of a job say of its next try; see `retrying`.

    failure: why its latest own fault came, as its node says. attempt: in which attempt that was.
    counts: its own faults so far, by reason.
    is_charged: the latest one counts on the job's budget.
    in_a_row: so many own faults since an attempt ran well; the pause grows with it.
    forgiven: so many charged ones count on the budget no more, by `retry.reset_after_s`.
    peer_left_at_s: when a flexible worker last left while its gang went on.
    at_s: it is not tried again before; None: at once.
    is_prerun_over: its pre-run went well and is being stopped; see `prerun`.
    prerun_attempts: so many of its attempts were pre-runs, once it is a gang.
    avoided: nodes that it leaves alone, each for a time of its own; see `avoiding`.
    no_loan_until_s: nodes could not start it, maybe for its own storage: before this no further
        node is lent for it. None: as for any other.
    old_avoid_nodes, old_avoid_until_s: the same as older versions saved it, one time for all.
    failed_on: the nodes that ended its latest attempt; empty: none did, or nobody noted it.
    node_faults: its latest so many faults were its nodes', in a row; 0: the latest was its own.
    refused_by: since it ran last, the first node that refused it for each thing that it names.
    refused_attempt: the latest attempt whose end that is, while it counts as a node's fault.
    """

    failure: Failure | None = None
    attempt: int = 0
    counts: dict[str, int] = field(default_factory=dict[str, int])
    is_charged: bool = False
    in_a_row: int = 0
    forgiven: int = 0
    peer_left_at_s: float | None = None
    at_s: float | None = None
    avoided: dict[NodeName, Avoided] = field(default_factory=dict[NodeName, Avoided])
    no_loan_until_s: float | None = None
    old_avoid_nodes: list[NodeName] = field(default_factory=list[NodeName], name="avoid_nodes")
    old_avoid_until_s: float = field(default=0.0, name="avoid_until_s")
    is_prerun_over: bool = False
    prerun_attempts: int = 0
    node_faults: int = 0
    refused_by: dict[str, NodeName] = field(default_factory=dict[str, NodeName])
    refused_attempt: int = 0
    failed_on: list[NodeName] = field(default_factory=list[NodeName])

    def __post_init__(self) -> None:
        """Read what an older version saved."""
        known = Avoided(self.old_avoid_until_s, is_own_fault=not self.node_faults)
        self.avoided.update((name, known) for name in self.old_avoid_nodes)
        self.old_avoid_nodes, self.old_avoid_until_s = [], 0.0

    @property
    def avoid_nodes(self) -> list[NodeName]:
        """The nodes that it leaves alone now, by name."""
        return sorted(self.avoided)


class ClockMark(Struct, frozen=True):
    """How engine time stands to the clock of the machine that leads.

    boot_id: which boot of which machine. ahead_s: engine time less its boot clock.
    """

    boot_id: str
    ahead_s: float


class WaitEntry(Struct, kw_only=True):
    """What a job has waited for, in seconds by kind, as its policy said; see `waiting`.

    kind: of its present waiting, counted from `since_s` on; empty while nothing is said.
    """

    kind: str = ""
    since_s: float = 0.0
    spent_s: dict[str, float] = field(default_factory=dict[str, float])
