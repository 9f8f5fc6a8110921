"""Replay: a journal's events through the engine again, on simulated time.

Nothing is simulated here: nodes, jobs and passes are those of the journal.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from msgspec import Struct

from coordinator.engine.engine import Engine
from coordinator.engine.record import Record, decision_bytes
from coordinator.engine.state.accounting import Figures, figures
from coordinator.engine.state.events import Event
from coordinator.engine.state.settings import EngineSettings
from coordinator.policies.contract.decisions import Decision
from coordinator.sim.run.loop import Loop


class Difference(Struct, frozen=True, kw_only=True):
    """A record whose events bring other decisions now than they did then."""

    sequence: int
    at_s: float
    """Instant of its last event, Unix time."""
    recorded: tuple[Decision, ...]
    decided: tuple[Decision, ...]


class Replayed(Struct, frozen=True, kw_only=True):
    """The result of a replay; the same code and policy have no differences."""

    records: int
    events: int
    decisions: tuple[Decision, ...]
    differences: tuple[Difference, ...]
    figures: Figures


class Replay:
    """Takes records one after the other, as they stand in the journal.

    Args:
        engine: where the first record finds the cluster; by default there was nothing before it,
            and the records themselves say by which settings was decided.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine or Engine(EngineSettings())
        self.loop = Loop()
        self._decided: list[Decision] = []
        self._all: list[Decision] = []
        self._differences: list[Difference] = []
        self._records = 0
        self._events = 0

    def take(self, sequence: int, record: Record) -> None:
        """Let a record's events happen at their instants, and compare the decisions."""
        self._decided = []
        for entry in record.entries:
            self.loop.at(entry.now_s, partial(self._handle, entry.event))
        self.loop.run()
        self._records += 1
        self._events += len(record.entries)
        decided = tuple(self._decided)
        self._all += decided
        if decision_bytes(decided) != decision_bytes(record.decisions):
            self._differences.append(
                Difference(
                    sequence=sequence,
                    at_s=self.loop.now_s,
                    recorded=record.decisions,
                    decided=decided,
                )
            )

    def _handle(self, event: Event) -> None:
        # Commands go nowhere: the nodes' reactions are in the journal too.
        self._decided += self.engine.handle(event, now_s=self.loop.now_s).decisions

    def result(self) -> Replayed:
        """The result of the records so far."""
        return Replayed(
            records=self._records,
            events=self._events,
            decisions=tuple(self._all),
            differences=tuple(self._differences),
            figures=figures(self.engine.state),
        )


def replay(records: Iterable[tuple[int, Record]], engine: Engine | None = None) -> Replayed:
    """Run (sequence, record) pairs through an engine."""
    run = Replay(engine)
    for sequence, record in records:
        run.take(sequence, record)
    return run.result()
