"""The kinds of faults that the nemesis knows, and a schedule of them from a seed. Pure.

Must not know processes: `tests.live.nemesis` carries a schedule out.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from enum import StrEnum

from msgspec import Struct


class FaultKind(StrEnum):
    """What the nemesis does; `RULES` has a sentence on each."""

    AGENT_KILL = "agent_kill"
    AGENT_STOP = "agent_stop"
    AGENT_AWAY = "agent_away"
    AGENT_CUT = "agent_cut"
    AGENT_BLACKHOLE = "agent_blackhole"
    AGENT_SLOW = "agent_slow"
    LEDGER_TORN = "ledger_torn"
    DISK_FULL = "disk_full"
    NVML_HANG = "nvml_hang"
    NVML_HANG_AT_START = "nvml_hang_at_start"
    READER_KILL = "reader_kill"
    READER_STOP = "reader_stop"
    SHIM_KILL = "shim_kill"
    SHIM_STOP = "shim_stop"
    STATUS_TORN = "status_torn"
    WORKER_KILL = "worker_kill"
    WORKER_STOP = "worker_stop"
    SERVER_KILL = "server_kill"
    LEADER_KILL = "leader_kill"
    LEADER_AWAY = "leader_away"
    LEADER_STOP = "leader_stop"
    LEADER_CUT = "leader_cut"
    LEADER_BLACKHOLE = "leader_blackhole"
    LEADER_SLOW = "leader_slow"
    STANDBY_KILL = "standby_kill"
    STANDBY_STOP = "standby_stop"
    HANDOVER = "handover"
    NATS_KILL = "nats_kill"
    NATS_AWAY = "nats_away"
    NATS_STOP = "nats_stop"
    JOURNAL_FLIP = "journal_flip"
    DRAIN = "drain"
    CORDON = "cordon"
    RECALL = "recall"
    REVOKE = "revoke"
    CANCEL = "cancel"
    LOAD_HIGH = "load_high"


K = FaultKind


class Rule(Struct, frozen=True, kw_only=True):
    """How often a kind is drawn, and for how long it lasts.

    for_s: shortest and longest time until the nemesis heals it; both 0: nothing is left to heal.
    is_default: whether a schedule has it unless it is left out by name.
    """

    text: str
    weight: float = 1.0
    for_s: tuple[float, float] = (0.0, 0.0)
    is_default: bool = True


RULES: dict[FaultKind, Rule] = {
    K.AGENT_KILL: Rule(text="SIGKILL of an agent", weight=2),
    K.AGENT_STOP: Rule(text="SIGSTOP of an agent, SIGCONT later", weight=2, for_s=(1, 9)),
    K.AGENT_AWAY: Rule(text="SIGKILL of an agent, started again later", weight=2, for_s=(2, 14)),
    K.AGENT_CUT: Rule(text="an agent's connection to NATS is refused", weight=2, for_s=(1, 14)),
    K.AGENT_BLACKHOLE: Rule(
        text="nothing passes between an agent and NATS, no connection is closed",
        weight=2,
        for_s=(1, 14),
    ),
    K.AGENT_SLOW: Rule(
        text="each message between an agent and NATS is late by up to 1 s", for_s=(2, 14)
    ),
    K.LEDGER_TORN: Rule(text="SIGKILL of an agent in the middle of a write of its ledger"),
    K.DISK_FULL: Rule(text="a node's state directory is full", weight=2, for_s=(1, 14)),
    K.NVML_HANG: Rule(text="NVML of a node does not answer", for_s=(1, 25)),
    K.NVML_HANG_AT_START: Rule(
        text="NVML of a node does not answer while its agent starts again", for_s=(1, 25)
    ),
    K.READER_KILL: Rule(text="SIGKILL of the process that reads NVML"),
    K.READER_STOP: Rule(text="SIGSTOP of the process that reads NVML", for_s=(1, 9)),
    K.SHIM_KILL: Rule(text="SIGKILL of a worker's shim"),
    K.SHIM_STOP: Rule(text="SIGSTOP of a worker's shim, SIGCONT later", for_s=(1, 6)),
    K.STATUS_TORN: Rule(text="SIGKILL of a shim in the middle of a write of its status"),
    K.WORKER_KILL: Rule(text="SIGKILL of a worker"),
    K.WORKER_STOP: Rule(text="SIGSTOP of a worker, SIGCONT later", for_s=(1, 9)),
    K.SERVER_KILL: Rule(text="SIGKILL of an inference server", weight=1),
    K.LEADER_KILL: Rule(text="SIGKILL of the leader, started again at once", weight=2),
    K.LEADER_AWAY: Rule(text="SIGKILL of the leader, started again later", weight=2, for_s=(6, 14)),
    K.LEADER_STOP: Rule(text="SIGSTOP of the leader, SIGCONT later", weight=2, for_s=(1, 9)),
    K.LEADER_CUT: Rule(text="the leader's connection to NATS is refused", for_s=(1, 9)),
    K.LEADER_BLACKHOLE: Rule(
        text="nothing passes between the leader and NATS, no connection is closed", for_s=(1, 9)
    ),
    K.LEADER_SLOW: Rule(
        text="each message between the leader and NATS is late by up to 1 s", for_s=(1, 9)
    ),
    K.STANDBY_KILL: Rule(text="SIGKILL of the standby"),
    K.STANDBY_STOP: Rule(text="SIGSTOP of the standby, SIGCONT later", for_s=(1, 9)),
    K.HANDOVER: Rule(text="planned stop (SIGTERM) of the leader", weight=2),
    K.NATS_KILL: Rule(text="SIGKILL of nats-server, started again at once"),
    K.NATS_AWAY: Rule(text="SIGKILL of nats-server, started again later", for_s=(1, 12)),
    K.NATS_STOP: Rule(text="SIGSTOP of nats-server, SIGCONT later", for_s=(1, 9)),
    K.JOURNAL_FLIP: Rule(
        text="one bit of the journal's newest records is wrong on nats-server's disk",
        is_default=False,
    ),
    K.DRAIN: Rule(text="a person drains a training node, uncordons it later", for_s=(2, 9)),
    K.CORDON: Rule(text="a person cordons a node, uncordons it later", for_s=(2, 9)),
    K.RECALL: Rule(text="a person recalls a service's nodes, ends it later", for_s=(2, 12)),
    K.REVOKE: Rule(text="a person revokes a loan", weight=2),
    K.CANCEL: Rule(text="a person cancels a job"),
    K.LOAD_HIGH: Rule(
        text="a service's load rises to its peak for a while", weight=3, for_s=(6, 14)
    ),
}

DEFAULT_KINDS = tuple(kind for kind in K if RULES[kind].is_default)
OWN_END = frozenset({K.SHIM_KILL, K.STATUS_TORN, K.WORKER_KILL})
"""Faults of a worker itself: they end the attempt that they hit, and no other. A worker or a shim
that is stopped for a while continues."""
NATS_GONE = frozenset({K.NATS_KILL, K.NATS_AWAY, K.NATS_STOP, K.JOURNAL_FLIP})
UNREACHED = frozenset({K.AGENT_CUT, K.AGENT_BLACKHOLE, K.AGENT_STOP, K.AGENT_AWAY})
"""No renewal of a lease reaches the agent while one of these lasts."""
LEADER_GONE = frozenset({K.LEADER_KILL, K.LEADER_AWAY})
OF_COORDINATORS = frozenset(
    {
        K.LEADER_KILL,
        K.LEADER_AWAY,
        K.LEADER_STOP,
        K.LEADER_CUT,
        K.LEADER_BLACKHOLE,
        K.LEADER_SLOW,
        K.STANDBY_KILL,
        K.STANDBY_STOP,
        K.HANDOVER,
    }
)


class Planned(Struct, frozen=True, kw_only=True):
    """One fault that is to come.

    at_s: after the schedule's begin. pick: chooses among the targets that there are then.
    """

    at_s: float
    kind: FaultKind
    pick: int
    for_s: float = 0.0


def draw(
    seed: int,
    *,
    duration_s: float,
    mean_pause_s: float,
    kinds: Collection[FaultKind] = DEFAULT_KINDS,
) -> tuple[Planned, ...]:
    """A schedule: the same seed gives the same one.

    Faults come as a Poisson process, so several are often on at a time. The first ones are of
    different kinds, in a drawn order, until each kind was there once.
    """
    rng = random.Random(seed)
    known = sorted(kinds)
    weights = [RULES[kind].weight for kind in known]
    first = rng.sample(known, len(known))
    planned: list[Planned] = []
    at_s = rng.expovariate(1 / mean_pause_s)
    while at_s < duration_s:
        kind = first.pop() if first else rng.choices(known, weights)[0]
        shortest_s, longest_s = RULES[kind].for_s
        planned.append(
            Planned(
                at_s=round(at_s, 3),
                kind=kind,
                pick=rng.randrange(1 << 30),
                for_s=round(rng.uniform(shortest_s, longest_s), 3),
            )
        )
        at_s += rng.expovariate(1 / mean_pause_s)
    return tuple(planned)
