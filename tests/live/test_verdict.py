"""The verdict on recordings made by hand: each broken promise is seen, and no kept one is called
broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.live.faults import FaultKind
from tests.live.recording import (
    Down,
    Fault,
    Job,
    Lead,
    Limits,
    Order,
    Recording,
    Up,
    Worker,
    load,
    save,
    worker_of,
)
from tests.live.stall_watch import ROUND_S, lost_s
from tests.live.summary import most_at_a_time, summary_of
from tests.live.verdict import Broken, Verdict, judge

K = FaultKind
LIMITS = Limits(lease_ttl_s=6.0, reclaim_deadline_s=20.0, takeover_s=10.0)
END_S = 1000.0
change = msgspec.structs.replace


def fault(kind: FaultKind, at_s: float, *, for_s: float | None = None, **values: Any) -> Fault:
    """A fault at an instant."""
    healed_at_s = None if for_s is None else at_s + for_s
    given: dict[str, Any] = {"number": 1, "target": "", "healed_at_s": healed_at_s}
    return Fault(kind=kind, at_s=at_s, **{**given, **values})


def worker(first_s: float, last_s: float, *, index: int = 0, **values: Any) -> Worker:
    """Worker 0 of the first attempt of job `a`, which did its work."""
    given: dict[str, Any] = {
        "job": "a",
        "attempt": 1,
        "pid": int(first_s * 10) + index,
        "node": "train-1",
        "gpus": ("g1",),
        "is_flexible": False,
        "workers_min": 1,
        "is_finished": True,
    }
    return Worker(first_s=first_s, last_s=last_s, index=index, **{**given, **values})


DONE = worker(100, 200)
CUT_OFF = worker(100, 150, is_finished=False)
AGAIN = worker(160, 220, attempt=2)
JOB = Job(job="a", name="job-a", acknowledged_at_s=90, must_end=True, state="succeeded")


def recording(*workers: Worker, **values: Any) -> Recording:
    """A run in which job `a` succeeded, unless something else is given."""
    given: dict[str, Any] = {"workers": workers or (DONE,), "jobs": (JOB,)}
    return Recording(seed=1, begin_s=0.0, end_s=END_S, limits=LIMITS, **{**given, **values})


def home(end_s: float | None, **values: Any) -> Recording:
    """Node infer-1 is down from second 300 on, and is called home at 310."""
    order = Order(node="infer-1", at_s=310, by="recall")
    down = Down(node="infer-1", begin_s=300, end_s=end_s)
    return recording(**{"orders": (order,), "downs": (down,), **values})


def takeover(took_s: float, *others: Fault) -> Recording:
    """The leader is killed at second 500."""
    leads = (Lead(epoch=1, at_s=1), Lead(epoch=2, at_s=500 + took_s))
    return recording(faults=(fault(K.LEADER_KILL, 500, number=9), *others), leads=leads)


def kinds(verdict: Verdict) -> list[Broken]:
    """What was broken."""
    return [violation.kind for violation in verdict.violations]


BROKEN: dict[str, tuple[Broken, Callable[[], Recording]]] = {
    "a job that is not known": (
        Broken.LOST,
        lambda: recording(jobs=(change(JOB, state=""),)),
    ),
    "a job that failed": (Broken.LOST, lambda: recording(jobs=(change(JOB, state="failed"),))),
    "a job that was cancelled by none": (
        Broken.LOST,
        lambda: recording(jobs=(change(JOB, state="cancelled"),)),
    ),
    "a success that no worker knows of": (
        Broken.LOST,
        lambda: recording(jobs=(change(JOB, job="b"),)),
    ),
    "a short job that still waits": (
        Broken.UNENDED,
        lambda: recording(jobs=(change(JOB, state="pending"),)),
    ),
    "two attempts at a time": (
        Broken.RUN_TWICE,
        lambda: recording(
            CUT_OFF,
            change(AGAIN, first_s=149, gpus=("g2",)),
            faults=(fault(K.WORKER_KILL, 149, job="a", attempt=1),),
        ),
    ),
    "a worker that began twice": (
        Broken.RUN_TWICE,
        lambda: recording(worker(100, 150), worker(160, 200)),
    ),
    "an attempt after the work was done": (
        Broken.DONE_AGAIN,
        lambda: recording(DONE, change(AGAIN, first_s=201)),
    ),
    "a GPU with two jobs": (
        Broken.GPU_TWICE,
        lambda: recording(DONE, worker(150, 180, job="b", gpus=("g0", "g1"))),
    ),
    "a worker beside a server": (
        Broken.GPU_TWICE,
        lambda: recording(
            change(DONE, node="infer-1"), ups=(Up(node="infer-1", begin_s=10, end_s=101),)
        ),
    ),
    "an end without a cause": (Broken.HEALTHY_ENDED, lambda: recording(CUT_OFF, AGAIN)),
    "an end by a dead agent": (
        Broken.HEALTHY_ENDED,
        lambda: recording(CUT_OFF, AGAIN, faults=(fault(K.AGENT_KILL, 149, target="train-1"),)),
    ),
    "an end by a stop that was taken back": (
        Broken.HEALTHY_ENDED,
        lambda: recording(
            CUT_OFF,
            AGAIN,
            faults=(fault(K.WORKER_STOP, 140, for_s=5, job="a", attempt=1),),
        ),
    ),
    "an end long after its fault": (
        Broken.HEALTHY_ENDED,
        lambda: recording(CUT_OFF, AGAIN, faults=(fault(K.SHIM_KILL, 101, job="a", attempt=1),)),
    ),
    "an end by the fault of another job": (
        Broken.HEALTHY_ENDED,
        lambda: recording(CUT_OFF, AGAIN, faults=(fault(K.WORKER_KILL, 149, job="b", attempt=1),)),
    ),
    "an end on a lent node that stays away": (
        Broken.HEALTHY_ENDED,
        lambda: recording(
            change(CUT_OFF, node="infer-1"),
            AGAIN,
            downs=(Down(node="infer-1", begin_s=90, end_s=300),),
        ),
    ),
    "a node that is late": (Broken.NODE_LATE, lambda: home(331)),
    "a node that never comes": (Broken.NODE_LATE, lambda: home(None)),
    "a node that no renewal reaches": (
        Broken.NODE_LATE,
        lambda: home(331, orders=(), faults=(fault(K.AGENT_CUT, 310, for_s=12, target="infer-1"),)),
    ),
    "a node without NATS": (
        Broken.NODE_LATE,
        lambda: home(331, orders=(), faults=(fault(K.NATS_AWAY, 310, for_s=12),)),
    ),
    "a node that was later than its machine": (
        Broken.NODE_LATE,
        lambda: home(331, stalls=((315.0, 0.9),)),
    ),
    "a takeover that is late": (Broken.TAKEOVER_LATE, lambda: takeover(11)),
}

KEPT: dict[str, Callable[[], Recording]] = {
    "all is well": recording,
    "a long job goes on": lambda: recording(
        change(CUT_OFF, last_s=END_S, pid=7),
        alive=frozenset({"a.1.0.7"}),
        jobs=(change(JOB, state="running", must_end=False),),
    ),
    "its own fault": lambda: recording(
        CUT_OFF, AGAIN, faults=(fault(K.SHIM_KILL, 149, job="a", attempt=1),)
    ),
    "a cancelled job": lambda: recording(
        CUT_OFF, faults=(fault(K.CANCEL, 149, job="a"),), jobs=(change(JOB, state="cancelled"),)
    ),
    "a drained node": lambda: recording(
        CUT_OFF, AGAIN, faults=(fault(K.DRAIN, 140, for_s=5, target="train-1"),)
    ),
    "a lent node that goes home": lambda: recording(
        change(CUT_OFF, node="infer-1"),
        AGAIN,
        downs=(Down(node="infer-1", begin_s=90, end_s=160),),
    ),
    "a gang that was never complete": lambda: recording(
        change(CUT_OFF, workers_min=2), change(AGAIN, workers_min=1)
    ),
    "a flexible worker that leaves": lambda: recording(
        DONE, worker(120, 150, index=1, gpus=("g2",), is_finished=False, is_flexible=True)
    ),
    "a GPU that changes hands": lambda: recording(DONE, worker(200, 210, job="b")),
    "a node in time": lambda: home(329),
    "a node that is down without an order": lambda: home(900, orders=()),
    "a node that lacks NATS for less than a lease": lambda: home(
        900, orders=(), faults=(fault(K.NATS_AWAY, 310, for_s=5),)
    ),
    "a node whose server was killed on its way": lambda: home(
        340, faults=(fault(K.SERVER_KILL, 325, target="infer-1"),)
    ),
    "a takeover in time": lambda: takeover(9),
    "a takeover without NATS": lambda: takeover(30, fault(K.NATS_STOP, 495, for_s=20)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_seen(name: str) -> None:
    """Each way to break a promise gives one violation of its kind, and no other."""
    kind, make = BROKEN[name]
    assert kinds(judge(make())) == [kind]


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_promise_is_not_called_broken(name: str) -> None:
    """What may happen to a job, a node or a leader is no violation."""
    assert judge(KEPT[name]()).violations == ()


def test_every_kind_of_violation_has_a_recording() -> None:
    """No kind of violation goes untested."""
    assert {kind for kind, _ in BROKEN.values()} == set(Broken)


def test_a_node_that_is_late_by_its_machine_is_told_apart() -> None:
    """A return that was late by less than the machine lost meanwhile is counted, and not hidden."""
    verdict = judge(home(331, stalls=((315.0, 0.8), (320.0, 0.4))))
    assert (verdict.violations, verdict.late_by_stall) == ((), 1)
    assert verdict.returns[0].took_s == 21


def test_the_first_call_home_counts() -> None:
    """A second order for the same way home gives no more time."""
    later = Order(node="infer-1", at_s=320, by="again")
    found = home(331)
    verdict = judge(change(found, orders=(later, *found.orders)))
    assert kinds(verdict) == [Broken.NODE_LATE]
    assert len(verdict.returns) == 1


def test_a_worker_is_read_from_what_it_wrote() -> None:
    """Its last whole line counts; a process that wrote none never was."""
    begin = (
        '{"at_s": 1.5, "what": "begin", "job": "a", "attempt": 2, "index": 0, "pid": 9,'
        ' "node": "n", "gpus": ["g"], "is_flexible": false, "workers_min": 1}'
    )
    asked = '{"at_s": 3.0, "what": "asked", "reason": "preempt"}'
    end = '{"at_s": 4.0, "what": "end", "status": 0, "is_finished": true}'
    found = worker_of([begin, '{"at_s": 2.0, "what": "beat"}', asked, end])
    assert found is not None
    assert (found.first_s, found.asked_s, found.last_s, found.is_finished) == (1.5, 3.0, 4.0, True)
    torn = worker_of([begin, asked, end[:20]])
    assert torn is not None
    assert (torn.last_s, torn.is_finished) == (3.0, False)
    assert worker_of([begin[:30]]) is None


def test_a_round_loses_what_it_was_late_and_what_it_shared() -> None:
    """A late timer and a slow computation count; noise does not."""
    assert lost_s(slept_s=ROUND_S + 0.04, computed_s=0.0015, fastest_s=0.001) == 0.0
    assert lost_s(slept_s=ROUND_S + 0.3, computed_s=0.001, fastest_s=0.001) == pytest.approx(0.3)
    shared = lost_s(slept_s=ROUND_S, computed_s=0.004, fastest_s=0.001)
    assert shared == pytest.approx(0.75 * ROUND_S)


def test_a_summary_has_the_figures_of_a_run(tmp_path: Path) -> None:
    """A recording that was kept gives the same summary when it is read again."""

    found = takeover(4, fault(K.NATS_STOP, 700, for_s=20), fault(K.AGENT_CUT, 710, for_s=1))
    path = tmp_path / "recording.json"
    save(found, path)
    again = load(path)
    assert again == found
    summary = summary_of(again, judge(again), date="2026-01-01", python="3.11", cores=2)
    assert (summary.faults, summary.longest_overlap) == (3, 2)
    assert (summary.takeovers.count, summary.takeovers.worst_s) == (1, 4.0)
    assert sum(summary.broken.values()) == 0
    assert "3 faults" in summary.text()


def test_spans_that_touch_do_not_overlap() -> None:
    """An instant of no length counts as one."""
    assert most_at_a_time([(0, 1), (2, 3)]) == 1
    assert most_at_a_time([(0, 2), (1, 3), (1, 1)]) == 3
