"""How long ago things happened, on their way from a report into the engine: an age is no news."""

from __future__ import annotations

import msgspec

from common.messages import NodeReport, WorkerPhase, WorkerReport
from common.model import Checkpoint, JobId, NodeName, Progress, WorkerKey
from coordinator.engine.state.events import NodeReported, ProgressReported
from coordinator.service.nodes.report_folding import Folder
from tests.service.wire import example

NODE = NodeName("t0")
PROGRESS_PERIOD_S = 10.0
SAVED = Checkpoint(step=5, path="/c", is_verified=True)


def make_folder() -> Folder:
    """Nobody is lost."""
    return Folder(lost_after_s=1e9, load_period_s=1e9, progress_period_s=PROGRESS_PERIOD_S)


def worker(phase: WorkerPhase, *, saved_ago_s: float, ended_ago_s: float = 0.0) -> WorkerReport:
    """What a node says of a worker that has saved."""
    return WorkerReport(
        key=WorkerKey(JobId("j"), 1, 0),
        phase=phase,
        gpu_uuids=(),
        progress=Progress(step=7),
        checkpoint=SAVED,
        saved_ago_s=saved_ago_s,
        ended_ago_s=ended_ago_s,
    )


def report(sequence: int, *workers: WorkerReport) -> NodeReport:
    """A node's report."""
    plain = {**example(NodeReport), "node": NODE, "sequence": sequence, "workers": []}
    return msgspec.structs.replace(msgspec.convert(plain, NodeReport), workers=workers)


def ages(facts: NodeReported | None) -> tuple[float, float]:
    """(saved, ended) so long before the fact."""
    assert facts is not None
    [fact] = facts.workers
    return fact.saved_ago_s, fact.ended_ago_s


def test_an_end_enters_with_its_age_and_once() -> None:
    """The same end is older in the next report, which is no news of it."""
    folder = make_folder()
    gone = worker(WorkerPhase.EXITED, saved_ago_s=9.0, ended_ago_s=4.0)
    assert ages(folder.fold(report(1, gone), now_s=0.0)) == (9.0, 4.0)
    older = worker(WorkerPhase.EXITED, saved_ago_s=10.0, ended_ago_s=5.0)
    assert folder.fold(report(2, older), now_s=1.0) is None


def test_what_is_said_again_has_grown_older() -> None:
    """Whoever takes the lead may have heard a report some time ago."""
    folder = make_folder()
    gone = report(1, worker(WorkerPhase.EXITED, saved_ago_s=9.0, ended_ago_s=4.0))
    folder.fold(gone, now_s=0.0)
    assert ages(folder.say_again(gone, now_s=6.0)) == (15.0, 10.0)


def test_a_save_is_told_with_its_age_of_then() -> None:
    """Progress waits for its period, and a save that was told is not told again for its age."""
    folder = make_folder()
    folder.fold(report(1, worker(WorkerPhase.RUNNING, saved_ago_s=2.0)), now_s=0.0)
    [first] = folder.due(now_s=PROGRESS_PERIOD_S)
    assert isinstance(first, ProgressReported)
    assert (first.checkpoint, first.saved_ago_s) == (SAVED, 2.0 + PROGRESS_PERIOD_S)
    folder.fold(report(2, worker(WorkerPhase.RUNNING, saved_ago_s=15.0)), now_s=13.0)
    assert folder.due(now_s=2 * PROGRESS_PERIOD_S) == []


def test_a_save_keeps_its_own_age_when_another_worker_is_further() -> None:
    """The progress is that of the furthest one, the checkpoint of the one that has one."""
    folder = make_folder()
    further = msgspec.structs.replace(
        worker(WorkerPhase.RUNNING, saved_ago_s=0.0),
        key=WorkerKey(JobId("j"), 1, 1),
        progress=Progress(step=8),
        checkpoint=None,
    )
    folder.fold(report(1, worker(WorkerPhase.RUNNING, saved_ago_s=2.0), further), now_s=0.0)
    [said] = folder.due(now_s=PROGRESS_PERIOD_S)
    assert isinstance(said, ProgressReported)
    assert (said.progress, said.checkpoint) == (Progress(step=8), SAVED)
    assert said.saved_ago_s == 2.0 + PROGRESS_PERIOD_S


def test_the_age_of_a_way_home_is_no_news_and_grows() -> None:
    """Each report says how long ago it was over, once it was."""
    folder = make_folder()
    plain = msgspec.structs.replace(report(1), home_ago_s=None)
    old = folder.fold(plain, now_s=0.0)
    assert old is not None
    assert old.home_ago_s is None
    home = msgspec.structs.replace(plain, sequence=2, stage_durations_s={"exit": 1.0})
    home = msgspec.structs.replace(home, home_ago_s=2.0)
    told = folder.fold(home, now_s=1.0)
    assert told is not None
    assert told.home_ago_s == 2.0
    later = msgspec.structs.replace(home, sequence=3, home_ago_s=3.0)
    assert folder.fold(later, now_s=2.0) is None
    assert folder.say_again(later, now_s=6.0).home_ago_s == 7.0
