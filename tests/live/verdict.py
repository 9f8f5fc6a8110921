"""Which promises a recorded run kept. A pure function of the recording.

Workers' files, servers' answers and clients' notes decide. A coordinator's word counts for two
things only: the state of a job, and the instant at which a node was called home.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import pairwise

from msgspec import Struct

from tests.live import faults
from tests.live.faults import FaultKind
from tests.live.recording import Down, Fault, Job, Recording, Worker

FINAL = ("succeeded", "failed", "cancelled")
AFTER_S = 1.0
"""A node that is called home by an order that arrives while it still serves goes down so soon."""
SETTLED_S = 5.0
"""A takeover is measured where nothing else was wrong for so long before."""


class Broken(StrEnum):
    """How a promise can be broken."""

    LOST = "lost"
    UNENDED = "unended"
    RUN_TWICE = "run twice"
    DONE_AGAIN = "done again"
    GPU_TWICE = "GPU given twice"
    HEALTHY_ENDED = "healthy job ended"
    NODE_LATE = "node late"
    TAKEOVER_LATE = "takeover late"


class Violation(Struct, frozen=True, kw_only=True):
    """One broken promise, in words."""

    kind: Broken
    subject: str
    at_s: float
    text: str


class Return(Struct, frozen=True, kw_only=True):
    """A node's way home, as its server and the router saw it.

    took_s: None where the recording ends before. stalled_s: what the machine lost meanwhile.
    """

    node: str
    from_s: float
    due_s: float
    by: str
    took_s: float | None
    stalled_s: float


class Takeover(Struct, frozen=True, kw_only=True):
    """From a fault of the leader until the next one answered."""

    fault: int
    kind: FaultKind
    at_s: float
    took_s: float
    stalled_s: float


class Verdict(Struct, frozen=True, kw_only=True):
    """Figures and violations. late_by_stall: nodes that were late by less than the machine lost."""

    violations: tuple[Violation, ...]
    returns: tuple[Return, ...]
    takeovers: tuple[Takeover, ...]
    late_by_stall: int
    attempts: int
    ends: dict[str, int]
    """Attempts that ended before their work was done, by why they might."""

    def count(self, kind: Broken) -> int:
        """How many violations of a kind there are."""
        return sum(violation.kind == kind for violation in self.violations)


def judge(recording: Recording) -> Verdict:
    """Look at a whole run."""
    returns = tuple(_returns(recording))
    takeovers = tuple(_takeovers(recording))
    ends: dict[str, int] = defaultdict(int)
    violations = [
        *_lost(recording),
        *_run_twice(recording),
        *_gpu_twice(recording),
        *_gpu_beside_server(recording),
        *_healthy_ended(recording, ends),
    ]
    late, late_by_stall = _late(recording, returns)
    violations += late
    violations += _late_takeovers(recording, takeovers)
    attempts = {(worker.job, worker.attempt) for worker in recording.workers}
    return Verdict(
        violations=tuple(sorted(violations, key=lambda violation: violation.at_s)),
        returns=returns,
        takeovers=takeovers,
        late_by_stall=late_by_stall,
        attempts=len(attempts),
        ends=dict(sorted(ends.items())),
    )


# --- jobs -----------------------------------------------------------------------------------


def _lost(recording: Recording) -> Iterator[Violation]:
    """An acknowledged job stays known, ends as it should, and is not called done too soon."""
    finished = {w.job for w in recording.workers if w.is_finished}
    cancelled = {f.job for f in recording.faults if f.kind == FaultKind.CANCEL}
    for job in recording.jobs:
        kind, text = _fate(job, job.job in finished, job.job in cancelled)
        if kind is not None:
            yield Violation(kind=kind, subject=job.job, at_s=job.acknowledged_at_s, text=text)


def _fate(job: Job, is_finished: bool, is_cancelled: bool) -> tuple[Broken | None, str]:
    if not job.state:
        return Broken.LOST, f"{job.name} was acknowledged and is not known"
    if job.state == "failed" or (job.state == "cancelled" and not is_cancelled):
        return Broken.LOST, f"{job.name} is {job.state}, by no fault of its own: {job.error}"
    if job.state == "succeeded" and not is_finished:
        return Broken.LOST, f"{job.name} is called succeeded, and no worker of it has finished"
    if job.must_end and job.state not in FINAL:
        return Broken.UNENDED, f"{job.name} is {job.state} at the end, long after the last fault"
    return None, ""


def _by_job(recording: Recording) -> dict[str, dict[int, list[Worker]]]:
    found: dict[str, dict[int, list[Worker]]] = defaultdict(lambda: defaultdict(list))
    for worker in recording.workers:
        found[worker.job][worker.attempt].append(worker)
    return found


def _run_twice(recording: Recording) -> Iterator[Violation]:
    """A worker begins once, an attempt after the end of the last one, and none after the work."""
    own_ends = {(f.job, f.attempt) for f in recording.faults if f.kind in faults.OWN_END}
    for job, attempts in sorted(_by_job(recording).items()):
        for attempt, workers in sorted(attempts.items()):
            by_index: dict[int, list[Worker]] = defaultdict(list)
            for worker in workers:
                by_index[worker.index].append(worker)
            for index, same in by_index.items():
                if len(same) > 1:
                    where = ", ".join(f"pid {w.pid} on {w.node} from {w.first_s:.1f}" for w in same)
                    text = f"worker {index} of attempt {attempt} is there twice: {where}"
                    yield _twice(job, same[1].first_s, text)
        for (old, before), (new, after) in pairwise(sorted(attempts.items())):
            end_s = max(worker.last_s for worker in before)
            begin_s = min(worker.first_s for worker in after)
            if begin_s < end_s:
                text = f"attempt {new} begins {end_s - begin_s:.1f} s before attempt {old} ends"
                yield _twice(job, begin_s, text)
            has_finished = all(w.is_finished for w in before if not w.is_flexible)
            has_finished &= any(w.index == 0 for w in before)
            if has_finished and (job, old) not in own_ends:
                text = f"attempt {new} begins after {old} has done the work"
                yield Violation(kind=Broken.DONE_AGAIN, subject=job, at_s=begin_s, text=text)


def _twice(job: str, at_s: float, text: str) -> Violation:
    return Violation(kind=Broken.RUN_TWICE, subject=job, at_s=at_s, text=text)


def _gpu_twice(recording: Recording) -> Iterator[Violation]:
    """A GPU is used by one worker at a time."""
    by_gpu: dict[str, list[Worker]] = defaultdict(list)
    for worker in recording.workers:
        for gpu in worker.gpus:
            by_gpu[gpu].append(worker)
    for gpu, workers in sorted(by_gpu.items()):
        latest: Worker | None = None
        for worker in sorted(workers, key=lambda worker: worker.first_s):
            if latest is not None and worker.first_s < latest.last_s:
                text = f"{worker.key} begins on {worker.node} while {latest.key} is there"
                yield Violation(kind=Broken.GPU_TWICE, subject=gpu, at_s=worker.first_s, text=text)
            if latest is None or worker.last_s > latest.last_s:
                latest = worker


def _gpu_beside_server(recording: Recording) -> Iterator[Violation]:
    """No worker computes on a node whose server answers."""
    for worker in recording.workers:
        for up in recording.ups:
            begin_s, end_s = max(worker.first_s, up.begin_s), min(worker.last_s, up.end_s)
            if up.node == worker.node and begin_s < end_s:
                text = f"{worker.key} and the server of {up.node} run together"
                yield Violation(kind=Broken.GPU_TWICE, subject=up.node, at_s=begin_s, text=text)
                break


def _healthy_ended(recording: Recording, ends: dict[str, int]) -> Iterator[Violation]:
    """An attempt whose base ran ends by its work, its own fault, a person, or a loan's end."""
    for job, attempts in sorted(_by_job(recording).items()):
        for attempt, workers in sorted(attempts.items()):
            base = [worker for worker in workers if not worker.is_flexible]
            if not _has_run(base) or _goes_on(recording, base):
                continue
            why = _why_ended(recording, job, attempt, base)
            if why:
                ends[why] += 1
                continue
            end_s = min(worker.last_s for worker in base)
            nodes = ", ".join(sorted({worker.node for worker in base}))
            near = ", ".join(
                f"{fault.kind} {fault.target}"
                for fault in recording.faults
                if fault.at_s - 1 <= end_s <= fault.end_s + 20
            )
            text = f"attempt {attempt} on {nodes} ended at {end_s:.1f}; faults about then: {near}"
            yield Violation(kind=Broken.HEALTHY_ENDED, subject=job, at_s=end_s, text=text)


def _has_run(base: Sequence[Worker]) -> bool:
    """Whether the gang was complete at a time; else it is a start that did not succeed."""
    if not base or len({worker.index for worker in base}) < base[0].workers_min:
        return False
    return max(worker.first_s for worker in base) < min(worker.last_s for worker in base)


def _goes_on(recording: Recording, base: Sequence[Worker]) -> bool:
    return all(worker.is_finished or worker.name in recording.alive for worker in base)


def _why_ended(recording: Recording, job: str, attempt: int, base: Sequence[Worker]) -> str:
    """Why an attempt might end; empty: for no reason that anybody may give."""
    end_s = min(worker.last_s for worker in base if not worker.is_finished)
    nodes = {worker.node for worker in base}
    for fault in recording.faults:
        if fault.at_s > end_s + 1:
            continue
        is_recent = end_s <= fault.end_s + recording.limits.reclaim_deadline_s
        is_hit = fault.kind in faults.OWN_END and (fault.job, fault.attempt) == (job, attempt)
        if is_hit and is_recent:
            return "fault of its own"
        if fault.kind == FaultKind.CANCEL and fault.job == job:
            return "cancelled"
        if fault.kind == FaultKind.DRAIN and fault.target in nodes and is_recent:
            return "drained"
    if any(w.is_finished and w.index == 0 for w in base):
        return "worker 0 had finished"
    if any(_went_home(recording, node, end_s) for node in nodes):
        return "node went home"
    return ""


def _went_home(recording: Recording, node: str, end_s: float) -> bool:
    """Whether a lent node served again soon after a worker there ended."""
    by_s = end_s + recording.limits.reclaim_deadline_s
    for down in recording.downs:
        if down.node == node and down.begin_s <= end_s:
            is_home = down.end_s is not None and end_s <= down.end_s + 1 and down.end_s <= by_s
            if is_home or (down.end_s is None and recording.end_s < by_s):
                return True
    return False


# --- nodes ----------------------------------------------------------------------------------


def _returns(recording: Recording) -> Iterator[Return]:
    """The ways home that were promised, one for each time that a node did not serve."""
    seen: dict[tuple[str, float], Return] = {}
    for node, from_s, by in _calls(recording):
        for down in recording.downs:
            end_s = math.inf if down.end_s is None else down.end_s
            if down.node != node or end_s <= from_s or down.begin_s > from_s + AFTER_S:
                continue
            found = _way_home(recording, down, max(from_s, down.begin_s), by)
            key = (node, down.begin_s)
            if key not in seen or found.due_s < seen[key].due_s:  # the first call counts
                seen[key] = found
    yield from sorted(seen.values(), key=lambda found: found.from_s)


def _way_home(recording: Recording, down: Down, from_s: float, by: str) -> Return:
    limits = recording.limits
    end_s = recording.end_s if down.end_s is None else down.end_s
    due_s = from_s + limits.reclaim_deadline_s
    for fault in recording.faults:
        is_kill = fault.kind == FaultKind.SERVER_KILL and fault.target == down.node
        if is_kill and from_s <= fault.at_s <= end_s:  # its warm-up begins again
            due_s = max(due_s, fault.at_s + limits.restart_s)
    return Return(
        node=down.node,
        from_s=from_s,
        due_s=due_s,
        by=by,
        took_s=None if down.end_s is None else down.end_s - from_s,
        stalled_s=stalled_s(recording, from_s, end_s),
    )


def _calls(recording: Recording) -> Iterator[tuple[str, float, str]]:
    """When a node had to begin its way home: an order, or the last instant of a renewal."""
    for order in recording.orders:
        yield order.node, order.at_s, order.by
    nodes = sorted({down.node for down in recording.downs})
    for node in nodes:
        for begin_s, end_s in _unreached(recording, node):
            if end_s - begin_s > recording.limits.lease_ttl_s + AFTER_S:
                yield node, begin_s, "no renewal"


def _unreached(recording: Recording, node: str) -> list[tuple[float, float]]:
    """Times in which no renewal reached a node; those that overlap are one.

    One nats-server of several is missed by nothing for long.
    """
    gone = faults.NATS_GONE if recording.nats_servers == 1 else frozenset[FaultKind]()
    spans = sorted(
        (fault.at_s, fault.end_s)
        for fault in recording.faults
        if fault.kind in gone or (fault.kind in faults.UNREACHED and fault.target == node)
    )
    joined: list[tuple[float, float]] = []
    for begin_s, end_s in spans:
        if joined and begin_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end_s))
        else:
            joined.append((begin_s, end_s))
    return joined


def _late(recording: Recording, returns: Sequence[Return]) -> tuple[list[Violation], int]:
    violations: list[Violation] = []
    by_stall = 0
    for found in returns:
        home_s = recording.end_s if found.took_s is None else found.from_s + found.took_s
        late_s = home_s - found.due_s
        if late_s <= 0:
            continue
        if late_s <= found.stalled_s:
            by_stall += 1
            continue
        ends = "is not home at the end" if found.took_s is None else f"took {found.took_s:.1f} s"
        near = ", ".join(
            f"{fault.kind} {fault.target}"
            for fault in recording.faults
            if fault.end_s >= found.from_s - 10 and fault.at_s <= home_s
        )
        text = (
            f"called by {found.by}, {ends}: {late_s:.1f} s late, of which the machine lost "
            f"{found.stalled_s:.1f} s; faults meanwhile: {near}"
        )
        violations.append(
            Violation(kind=Broken.NODE_LATE, subject=found.node, at_s=found.from_s, text=text)
        )
    return violations, by_stall


def stalled_s(recording: Recording, begin_s: float, end_s: float) -> float:
    """What the machine itself lost in a time."""
    return sum(lost_s for at_s, lost_s in recording.stalls if begin_s <= at_s <= end_s)


# --- takeovers ------------------------------------------------------------------------------


def _takeovers(recording: Recording) -> Iterator[Takeover]:
    """Those that nothing else was in the way of: NATS and the other coordinator were well."""
    for fault in recording.faults:
        if fault.kind not in faults.LEADER_GONE and fault.kind != FaultKind.HANDOVER:
            continue
        before = [lead for lead in recording.leads if lead.at_s <= fault.at_s]
        after = [lead for lead in recording.leads if lead.at_s > fault.at_s]
        if not before or not after:
            continue
        until_s = min(after[0].at_s, fault.at_s + recording.limits.takeover_s)
        if not _is_disturbed(recording.faults, fault, until_s):
            yield Takeover(
                fault=fault.number,
                kind=fault.kind,
                at_s=fault.at_s,
                took_s=after[0].at_s - fault.at_s,
                stalled_s=stalled_s(recording, fault.at_s, after[0].at_s),
            )


def _is_disturbed(injected: Sequence[Fault], fault: Fault, until_s: float) -> bool:
    return any(
        other.number != fault.number
        and (other.kind in faults.NATS_GONE or other.kind in faults.OF_COORDINATORS)
        and other.at_s <= until_s
        and other.end_s >= fault.at_s - SETTLED_S
        for other in injected
    )


def _late_takeovers(recording: Recording, takeovers: Sequence[Takeover]) -> Iterator[Violation]:
    limit_s = recording.limits.takeover_s
    for takeover in takeovers:
        if takeover.took_s > limit_s + takeover.stalled_s:
            text = f"{takeover.kind}: the next leader answered after {takeover.took_s:.1f} s"
            yield Violation(
                kind=Broken.TAKEOVER_LATE,
                subject=str(takeover.fault),
                at_s=takeover.at_s,
                text=text,
            )
