"""Commands that the engine returns to its driver."""

from __future__ import annotations

from msgspec import Struct

from common.model import NodeName
from coordinator.policies.contract.decisions import Decision


class PushDesired(Struct, frozen=True, tag="push_desired"):
    """Send a node its desired state, until its report shows that generation.

    `Engine.desired` says what it is when it leaves: of several orders the last is enough. A driver
    that keeps a journal asks before the engine takes what is not in it yet.
    """

    node: NodeName


class AskLedger(Struct, frozen=True, tag="ask_ledger"):
    """A node holds workers that nobody here knows: ask it for their specs."""

    node: NodeName


Command = PushDesired | AskLedger


class Refused(Struct, frozen=True, kw_only=True):
    """A decision that no longer fitted when it was committed, and why."""

    decision: Decision
    why: str


class Outcome(Struct, frozen=True, kw_only=True):
    """The answer to one event.

    wake_at_s: the engine wants a pass at this instant at the latest; None has no wish.
    """

    commands: tuple[Command, ...] = ()
    decisions: tuple[Decision, ...] = ()
    refused: tuple[Refused, ...] = ()
    needs_pass: bool = False
    needs_loan_pass: bool = False
    wake_at_s: float | None = None
