"""Whose silence it is: a job tells no progress only where reports of all its nodes show that."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import NodeReport, WorkerPhase, WorkerReport
from common.model import Checkpoint, JobId, NodeName, Progress, WorkerKey
from coordinator.engine.jobs.stalls import Watch
from coordinator.engine.state.events import ProgressReported, ProgressStopped
from coordinator.service.nodes.report_folding import Folder
from tests.service.wire import example

JOB = JobId("j")
NODES = (NodeName("t0"), NodeName("t1"))
KEYS = (WorkerKey(JOB, 1, 0), WorkerKey(JOB, 1, 1))
LOST_AFTER_S = 15.0
AFTER_S = 100.0
WATCHED = {JOB: Watch(1, AFTER_S, tuple(zip(KEYS, NODES, strict=True)))}


BASE = msgspec.convert({**example(NodeReport), "workers": []}, NodeReport)


class Wire:
    """Two nodes that report each second, the first with a worker that tells its steps."""

    def __init__(self) -> None:
        self.folder = Folder(lost_after_s=LOST_AFTER_S, load_period_s=1e9, progress_period_s=10.0)
        self.now_s = 0.0
        self.step = 1
        self.checkpoint: Checkpoint | None = None
        self.phase = WorkerPhase.RUNNING
        self.ledger_error = ""
        self._sequence = 0

    def report(self, *places: int) -> None:
        """These nodes report."""
        for place in places:
            self._sequence += 1
            worker = WorkerReport(
                key=KEYS[place],
                phase=self.phase,
                gpu_uuids=(),
                progress=Progress(step=self.step) if place == 0 else None,
                checkpoint=self.checkpoint if place == 0 else None,
            )
            found = msgspec.structs.replace(
                BASE,
                node=NODES[place],
                sequence=self._sequence,
                ledger_error=self.ledger_error if place == 0 else "",
                workers=(worker,),
            )
            self.folder.fold(found, now_s=self.now_s)

    def passes(self, seconds: float, *places: int) -> None:
        """Time passes, in which these nodes report each second."""
        for _ in range(round(seconds)):
            self.now_s += 1.0
            self.report(*places)

    def stopped(self) -> list[ProgressStopped]:
        return self.folder.stopped(WATCHED, now_s=self.now_s)


def test_a_job_whose_nodes_all_show_the_same_step_tells_no_progress() -> None:
    """It is said once for each silence that is watched for."""
    wire = Wire()
    wire.passes(AFTER_S, 0, 1)
    assert wire.stopped() == []
    wire.passes(1, 0, 1)
    assert wire.stopped() == [ProgressStopped(job_id=JOB, attempt=1, quiet_s=AFTER_S)]
    wire.passes(1, 0, 1)
    assert wire.stopped() == []
    wire.folder.forget_progress(JOB)
    assert [event.quiet_s for event in wire.stopped()] == [AFTER_S + 1.0]
    later = {JOB: WATCHED[JOB]._replace(after_s=2 * AFTER_S)}
    wire.passes(AFTER_S, 0, 1)
    assert [event.quiet_s for event in wire.folder.stopped(later, now_s=wire.now_s)] == [201.0]


@pytest.mark.parametrize("heard", [(), (0,), (1,)])
def test_a_node_that_is_not_heard_says_nothing_of_its_job(heard: tuple[int, ...]) -> None:
    """An agent or a network that is away is no silence of the job, whichever node it is."""
    wire = Wire()
    wire.passes(50, 0, 1)
    wire.passes(10 * AFTER_S, *heard)
    assert wire.stopped() == []


def test_what_a_node_shows_after_an_outage_counts() -> None:
    """The same step before and after says that there was none between; another step ends it."""
    wire = Wire()
    wire.passes(50, 0, 1)
    wire.now_s += 500.0
    wire.passes(1, 0, 1)
    assert [event.quiet_s for event in wire.stopped()] == [550.0]
    wire.folder.forget_progress(JOB)
    wire.step += 1
    wire.passes(1, 0, 1)
    assert wire.stopped() == []


@pytest.mark.slow
@given(steps=st.lists(st.booleans(), min_size=1, max_size=4))
def test_a_job_that_tells_something_in_time_is_never_silent(steps: list[bool]) -> None:
    """A step or a save, whichever it is, within what is watched for."""
    wire = Wire()
    for is_step in steps:
        wire.passes(AFTER_S, 0, 1)
        assert wire.stopped() == []
        if is_step:
            wire.step += 1
        else:
            saved = wire.checkpoint.step if wire.checkpoint else 0
            wire.checkpoint = Checkpoint(step=saved + 1, path="/c")


@pytest.mark.parametrize("what", ["full disk", "stopping", "not listening"])
def test_silence_that_has_another_cause_does_not_count(what: str) -> None:
    """A full disk keeps the words of a shim; a worker that stops tells none; time in which this
    coordinator did not listen, as the machine slept, is nobody's silence."""
    wire = Wire()
    wire.folder.listened(now_s=0.0, period_s=1.0)
    wire.passes(50, 0, 1)
    if what == "full disk":
        wire.ledger_error = "no space left on device"
        wire.passes(AFTER_S, 0, 1)
    elif what == "stopping":
        wire.phase = WorkerPhase.STOPPING
        wire.passes(10 * AFTER_S, 0, 1)
    else:
        wire.now_s += 10 * AFTER_S
        wire.folder.listened(now_s=wire.now_s, period_s=1.0)
        wire.passes(1, 0, 1)
    assert wire.stopped() == []


def test_progress_enters_with_the_age_at_which_it_was_first_heard() -> None:
    """It waits for its period, and the engine learns when the step was done."""
    wire = Wire()
    wire.passes(12, 0, 1)
    [first] = wire.folder.due(now_s=wire.now_s)
    assert isinstance(first, ProgressReported)
    assert first.told_ago_s == 11.0
    wire.step += 1
    wire.passes(7, 0, 1)
    assert wire.folder.due(now_s=wire.now_s) == []
    wire.passes(3, 0, 1)
    [second] = wire.folder.due(now_s=wire.now_s)
    assert isinstance(second, ProgressReported)
    assert (second.progress, second.told_ago_s) == (Progress(step=2), 9.0)
