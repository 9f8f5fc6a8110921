"""Fields of a node that belong together, as `NodeEntry` has them."""

from __future__ import annotations

from msgspec import Struct, field

from common.model import GpuUuid, LeaseId, NodeRole, StopReason, WorkerKey


class Contact(Struct, kw_only=True):
    """What the reports of a node say of the contact with it."""

    is_heard: bool = False
    """Reported since this leader started; it is not ordered anything before."""
    heard_at_s: float = 0.0
    silent_since_s: float | None = None
    """When its last report came, or when this leader began if that was later; only while LOST."""
    epoch: int = 0
    """The epoch and the generation of the desired state that it reported last."""
    generation: int = 0


class DesiredEntry(Struct, kw_only=True):
    """What a node is ordered to be; its workers are ordered by their jobs."""

    role: NodeRole
    generation: int = 0
    """It grows with each desired state."""
    validation: int = 0
    """The latest order to leave quarantine: its second, or one more than the one before; so it is
    new to an agent even where a journal was lost. 0: none.
    """


class Homecoming(Struct, kw_only=True):
    """The way home of a node from its latest loan."""

    lease_id: LeaseId | None = None
    """That loan, also while it is out; None once the node is home."""
    is_awaited: bool = False
    """To be taken back when its jobs have ended; see `ClusterState.awaited`."""
    reclaim_at_s: float | None = None
    """By when it must serve again; None without an order to come home."""
    stage_durations_s: dict[str, float] = field(default_factory=dict[str, float])
    """The stages of its latest return, as it reported last."""


class NodeLabels(Struct, kw_only=True, omit_defaults=True):
    """Labels of a node. What an operator set wins over what its agent reports."""

    reported: dict[str, str] = field(default_factory=dict[str, str])
    ordered: dict[str, str | None] = field(default_factory=dict[str, str | None])
    """By an operator; None takes away what the agent reports."""

    @property
    def now(self) -> dict[str, str]:
        """The labels that count."""
        if not self.ordered:
            return self.reported  # as of nearly all
        both = {**self.reported, **self.ordered}
        return {key: value for key, value in both.items() if value is not None}


class Cordon(Struct, kw_only=True):
    """An operator's order that a node takes nothing new; see `nodes.maintenance`."""

    is_cordoned: bool = False
    is_draining: bool = False
    is_closing: bool = False
    """Its maintenance window is so near that no loan of it is made and its service counts it as
    gone; see `nodes.windows`."""
    reason: str = ""


class HungStart(Struct, frozen=True):
    """A worker that its node could not start because storage did not answer: which, and when."""

    directory: str
    at_s: float


class FailedStarts(Struct, kw_only=True):
    """Starts of workers that failed on a node by its own fault; see `nodes.start_failures`."""

    refused: int = 0
    """Number that it refused in a row."""
    last: WorkerKey | None = None
    """The latest of them, or of those below."""
    hung: list[HungStart] = field(default_factory=list[HungStart])
    """The latest starts since then that failed because a job's storage did not respond."""
    closed_reason: str = ""
    """Why nothing new may begin on it until `ClusterState.closed_until_s`: it refused too many."""


class LeftReservation(Struct, frozen=True, kw_only=True):
    """A worker that its job gave up before it was ordered to run; its node may hold its GPUs.

    generation: of the node's desired state that first ordered it to stop; see
        `jobs.gang_reservations`.
    """

    key: WorkerKey
    gpu_uuids: tuple[GpuUuid, ...]
    reason: StopReason
    generation: int


class LedgerEntry(Struct, kw_only=True):
    """What a node's ledger holds beside the workers that jobs have there."""

    error: str = ""
    """Why nothing new may begin on it: it could not be written down there, or two agents answer for
    it."""
    unknown_workers: list[WorkerKey] = field(default_factory=list[WorkerKey])
    """Held there but not known here; nothing is placed on the node until its ledger was read."""
    stores: list[WorkerKey] = field(default_factory=list[WorkerKey])
    """Rendezvous stores that it holds or was ordered; no GPU names them."""
    stale_stops: list[WorkerKey] = field(default_factory=list[WorkerKey])
    left_reservations: list[LeftReservation] = field(default_factory=list[LeftReservation])
    acknowledged: list[WorkerKey] = field(default_factory=list[WorkerKey])
