"""What a run of the nemesis leaves: facts of workers, servers, clients and the nemesis itself.

All instants are of this machine's boot clock. Must not judge: `tests.live.verdict` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from tests.live.faults import FaultKind


class Limits(Struct, frozen=True, kw_only=True):
    """What was promised in the cell, by its settings."""

    lease_ttl_s: float
    reclaim_deadline_s: float
    takeover_s: float = 10.0
    """From the death of a leader until another one answers."""
    handover_s: float = 1.0
    """The same of a planned stop."""
    restart_s: float = 20.0
    """What a server that is killed needs to serve again: its supervisor's wait and its warm-up."""


class Worker(Struct, frozen=True, kw_only=True):
    """One process of a job, by the file that it wrote.

    first_s, last_s: its first and last sign of life. is_finished: it says that its work is done.
    asked_s: when it was asked to leave first.
    """

    job: str
    attempt: int
    index: int
    pid: int
    node: str
    gpus: tuple[str, ...]
    is_flexible: bool
    workers_min: int
    first_s: float
    last_s: float
    is_finished: bool = False
    asked_s: float | None = None
    status: int | None = None

    @property
    def key(self) -> tuple[str, int, int]:
        """Which worker of which attempt it is."""
        return (self.job, self.attempt, self.index)

    @property
    def name(self) -> str:
        """Which process it is."""
        return f"{self.job}.{self.attempt}.{self.index}.{self.pid}"


class Fault(Struct, frozen=True, kw_only=True):
    """One fault as it was injected.

    target: a node, a unit, a job or empty. worker: whom it hit, if it was a worker's own.
    healed_at_s: None where nothing is left to heal.
    """

    number: int
    kind: FaultKind
    target: str
    at_s: float
    healed_at_s: float | None = None
    job: str = ""
    attempt: int = 0

    @property
    def end_s(self) -> float:
        """When it was over."""
        return self.at_s if self.healed_at_s is None else self.healed_at_s


class Job(Struct, frozen=True, kw_only=True):
    """A submission that was acknowledged, and what became of it.

    must_end: it is short, and has to succeed before the run is over. state: by the last word of a
    coordinator; empty: none knows it.
    """

    job: str
    name: str
    acknowledged_at_s: float
    must_end: bool
    state: str = ""
    error: str = ""


class Order(Struct, frozen=True, kw_only=True):
    """A node was called home: by a person, or by a coordinator as its list of loans says."""

    node: str
    at_s: float
    by: str


class Down(Struct, frozen=True, kw_only=True):
    """A node did not serve: its server did not answer, or the router did not send to it.

    is_server: its server did not answer either. end_s: None, if that never ended.
    """

    node: str
    begin_s: float
    end_s: float | None


class Up(Struct, frozen=True, kw_only=True):
    """A node's server answered its health check all this time."""

    node: str
    begin_s: float
    end_s: float


class Lead(Struct, frozen=True, kw_only=True):
    """The first answer of a leader with this epoch."""

    epoch: int
    at_s: float


class Recording(Struct, frozen=True, kw_only=True):
    """All of a run.

    begin_s, end_s: of the whole recording; the faults end some time before. alive: the names of the
    workers that ran at its end. stalls: instants and seconds that the machine itself lost.
    skipped: faults that found no target, by kind. planned_s, mean_pause_s: of the schedule.
    """

    seed: int
    begin_s: float
    end_s: float
    limits: Limits
    nats_servers: int = 1
    planned_s: float = 0.0
    mean_pause_s: float = 0.0
    faults: tuple[Fault, ...] = ()
    skipped: dict[str, int] = {}
    jobs: tuple[Job, ...] = ()
    workers: tuple[Worker, ...] = ()
    alive: frozenset[str] = frozenset()
    orders: tuple[Order, ...] = ()
    downs: tuple[Down, ...] = ()
    ups: tuple[Up, ...] = ()
    leads: tuple[Lead, ...] = ()
    stalls: tuple[tuple[float, float], ...] = ()
    requests_answered: int = 0
    requests_refused: int = 0
    said_late: tuple[str, ...] = ()
    """Loans that Aryl itself calls late, in words."""


def save(recording: Recording, path: Path) -> None:
    """As JSON."""
    path.write_bytes(msgspec.json.encode(recording))


def load(path: Path) -> Recording:
    """What `save` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Recording)


def read_workers(directory: Path) -> Iterator[Worker]:
    """The workers whose files lie in a directory; one that wrote no whole line never was."""
    for path in sorted(directory.iterdir()):
        worker = worker_of(path.read_text().splitlines())
        if worker is not None:
            yield worker


def worker_of(lines: Iterable[str]) -> Worker | None:
    """A worker by the lines that it wrote; the last one may be torn."""
    values: dict[str, object] = {}
    last_s = 0.0
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError:
            break
        last_s = said.pop("at_s")
        what = said.pop("what")
        if what == "begin":
            values = {**said, "first_s": last_s}
        elif what == "asked":
            values.setdefault("asked_s", last_s)
        elif what == "end":
            values |= said
    return msgspec.convert({**values, "last_s": last_s}, Worker) if values else None


def read_stalls(path: Path) -> tuple[tuple[float, float], ...]:
    """What `stall_watch` wrote."""
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.split() for line in lines)
    return tuple((float(pair[0]), float(pair[1])) for pair in pairs if len(pair) == 2)
