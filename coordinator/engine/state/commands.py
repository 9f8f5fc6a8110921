"""Commands that the engine returns to its driver."""

from __future__ import annotations

from msgspec import Struct

from common.model import NodeName
from coordinator.policies.contract.decisions import Decision


class PushDesired(Struct, frozen=True, tag="push_desired"):
    """Send a node its desired state, until its report shows that generation.

    `Engine.desired` gives the state at the time of sending: of several orders the last is enough. A
    driver with a journal asks for it before the engine takes facts that are not journaled yet.
    """

    node: NodeName


class AskLedger(Struct, frozen=True, tag="ask_ledger"):
    """A node holds workers that the state does not know: ask it for their specs."""

    node: NodeName


Command = PushDesired | AskLedger


class Refused(Struct, frozen=True, kw_only=True):
    """A decision that no longer fitted when it was committed, and why."""

    decision: Decision
    why: str


class Outcome(Struct, frozen=True, kw_only=True):
    """The answer to one event.

    wake_at_s: the engine wants a pass at this instant at the latest; None: no wake-up.
    """

    commands: tuple[Command, ...] = ()
    decisions: tuple[Decision, ...] = ()
    refused: tuple[Refused, ...] = ()
    needs_pass: bool = False
    needs_loan_pass: bool = False
    wake_at_s: float | None = None
