"""Workers that keep their place and do not compute: by their own word, else frozen."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from agent.core.state import PauseWorker, StartWorker
from agent.shim.pause import (
    ANSWER_S,
    DO_ASK,
    DO_FREEZE,
    DO_TELL_RESUME,
    DO_THAW,
    PauseProtocol,
)
from common.messages import OrderPhase, WorkerOrder, WorkerPhase
from common.model import JobId, NodeRole, StopReason, WorkerKey
from tests.harness.node.life import LifeHarness, key, order
from tests.harness.node.workers import (
    PATIENCE_S,
    WorkerHarness,
    make_order,
    make_workers,
    talker,
)

P = WorkerPhase
OTHER = WorkerKey(JobId("other"), 1, 0)


# --- the protocol -----------------------------------------------------------------------------


def suspended(pause: PauseProtocol) -> bool:
    """A call, because type checkers think that an attribute stays as it was."""
    return pause.is_suspended


def test_a_job_that_does_not_speak_is_frozen_and_thawed() -> None:
    """Each once, however often the order is repeated."""
    pause = PauseProtocol()
    assert pause.suspend(0.0, answers=False) == [DO_FREEZE]
    assert pause.suspend(1.0, answers=False) == []
    assert suspended(pause)
    assert pause.resume() == [DO_THAW]
    assert pause.resume() == []
    assert not suspended(pause)


def test_a_job_that_speaks_is_suspended_when_it_says_so() -> None:
    """It is asked, not frozen, and told when it may go on."""
    pause = PauseProtocol()
    assert pause.suspend(0.0, answers=True) == [DO_ASK]
    assert not suspended(pause)
    pause.on_suspended()
    assert suspended(pause)
    assert pause.due(ANSWER_S + 1) == []
    assert pause.resume() == [DO_TELL_RESUME]


def test_a_job_that_does_not_answer_is_frozen_in_the_end() -> None:
    """Its GPU's turn is another's by then."""
    pause = PauseProtocol()
    pause.suspend(0.0, answers=True)
    assert pause.due(ANSWER_S - 0.1) == []
    assert pause.due(ANSWER_S) == [DO_FREEZE]
    assert suspended(pause)
    assert pause.resume() == [DO_THAW, DO_TELL_RESUME]


def test_a_word_that_nobody_asked_for_suspends_nothing() -> None:
    """A job cannot take itself out of the books."""
    pause = PauseProtocol()
    pause.on_suspended()
    assert not suspended(pause)
    pause.suspend(0.0, answers=True)
    assert not suspended(pause)


# --- the node's rules ------------------------------------------------------------------------


def shared(*, suspended: bool, worker: WorkerKey | None = None) -> WorkerOrder:
    """An order to run on a GPU that others have too."""
    given = structs.replace(order(), is_suspended=suspended, is_sharing=True)
    return given if worker is None else structs.replace(given, key=worker)


def running(life_harness: LifeHarness) -> None:
    """Bring the default worker to running."""
    life_harness.want(NodeRole.TRAINING, order(phase=OrderPhase.RUN))
    life_harness.step()
    life_harness.life.workers.checked(key(), endpoint="n1:29500", refusal=None)
    life_harness.step()
    life_harness.life.workers.started(key(), error="")
    life_harness.runs(key())
    life_harness.step()


def phase(life_harness: LifeHarness, worker: WorkerKey) -> WorkerPhase:
    """What the node says of a worker."""
    return {report.key: report for report in life_harness.life.workers.reports()}[worker].phase


def test_a_turn_is_given_on_only_when_it_was_left() -> None:
    """The newcomer starts when the other is seen suspended, though it was not told to stop."""
    life_harness = LifeHarness(inference=False)
    running(life_harness)
    life_harness.want(
        NodeRole.TRAINING, shared(suspended=True), shared(suspended=False, worker=OTHER)
    )  # fmt: skip
    assert life_harness.steps(3) == [PauseWorker(key(), is_suspended=True)]
    assert phase(life_harness, OTHER) == P.RESERVING
    life_harness.runs(key(), phase=P.SUSPENDED)
    life_harness.step()
    life_harness.life.workers.checked(OTHER, endpoint="n1:29501", refusal=None)
    assert [type(action) for action in life_harness.step()] == [StartWorker]
    assert phase(life_harness, key()) == P.SUSPENDED


def test_a_suspended_worker_goes_on_when_the_other_has_left() -> None:
    """Both orders change in one desired state; the GPU has one that computes at every instant."""
    life_harness = LifeHarness(inference=False)
    running(life_harness)
    life_harness.want(NodeRole.TRAINING, shared(suspended=True))
    life_harness.step()
    life_harness.runs(key(), phase=P.SUSPENDED)
    life_harness.want(
        NodeRole.TRAINING, shared(suspended=True), shared(suspended=False, worker=OTHER)
    )
    life_harness.step()
    life_harness.life.workers.checked(OTHER, endpoint="n1:29501", refusal=None)
    life_harness.step()
    life_harness.life.workers.started(OTHER, error="")
    life_harness.runs(OTHER)
    life_harness.step()
    life_harness.want(
        NodeRole.TRAINING, shared(suspended=False), shared(suspended=True, worker=OTHER)
    )
    assert life_harness.steps(3) == [PauseWorker(OTHER, is_suspended=True)]
    life_harness.runs(OTHER, phase=P.SUSPENDED)
    assert life_harness.steps(3) == [PauseWorker(key(), is_suspended=False)]


def test_an_agent_that_starts_again_tells_nobody_what_is_so() -> None:
    """A suspended worker that should be is left alone."""
    life_harness = LifeHarness(inference=False)
    running(life_harness)
    life_harness.want(NodeRole.TRAINING, shared(suspended=True))
    life_harness.step()
    life_harness.runs(key(), phase=P.SUSPENDED)
    life_harness.step()
    again = LifeHarness(inference=False, memory=life_harness.memory)
    again.runs(key(), phase=P.SUSPENDED)
    assert not [action for action in again.steps(3) if isinstance(action, PauseWorker)]
    assert phase(again, key()) == P.SUSPENDED


# --- real processes --------------------------------------------------------------------------

COUNTER = """
count = 0
while True:
    count += 1
    log(count)
    time.sleep(0.01)
"""
POLITE = """
for line in hear:
    message = json.loads(line)
    log("heard", message["type"])
    if message["type"] == "suspend":
        say(type="suspended")
    if message["type"] == "checkpoint_request":
        sys.exit(0)
"""


harness = pytest.fixture(make_workers)


def is_stopped(pid: int) -> bool:
    """Whether the kernel has stopped a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.slow
async def test_a_silent_worker_is_stopped_with_its_children_and_goes_on(
    harness: WorkerHarness,
) -> None:
    """SIGSTOP to the last descendant, SIGCONT, and the same processes count on."""
    order = make_order("sh", "-c", "sleep 600 & echo child $!; wait")
    given = await harness.start(order)
    await harness.until_said(given, "child ")
    child = int(harness.log(given).split("child ")[1].split()[0])
    pid = (await harness.status(given)).pid
    await harness.runner.pause(given, is_suspended=True)
    await harness.until_status(given, lambda s: s.phase == P.SUSPENDED, "suspended")
    # The kernel stops a process when it runs next, which on a busy machine is soon, not at once.
    await harness.until(lambda: is_stopped(pid) and is_stopped(child), "both are stopped")
    await harness.runner.pause(given, is_suspended=False)
    await harness.until_status(given, lambda s: s.phase == P.RUNNING, "running")
    await harness.until(lambda: not is_stopped(pid) and not is_stopped(child), "both go on")


@pytest.mark.slow
async def test_a_worker_that_speaks_is_asked_and_never_frozen(harness: WorkerHarness) -> None:
    """So that it can move what it has on the device to the host (Gandiva, section 3.1)."""
    words = (word.replace('type="hello"', 'type="hello", suspends=True') for word in talker(POLITE))
    given = await harness.start(make_order(*words))
    pid = (await harness.status(given)).pid
    await harness.runner.resize(given, 5)
    await harness.until_said(given, "heard resize")  # so that its hello was heard
    await harness.runner.pause(given, is_suspended=True)
    await harness.until_status(given, lambda s: s.phase == P.SUSPENDED, "suspended")
    assert not is_stopped(pid)
    await harness.runner.pause(given, is_suspended=False)
    await harness.until_said(given, "heard resume")
    await harness.until_status(given, lambda s: s.phase == P.RUNNING, "running")


@pytest.mark.slow
async def test_a_frozen_worker_can_still_save_when_it_is_stopped(harness: WorkerHarness) -> None:
    """A stop thaws it first: it is asked, and leaves by itself."""
    body = """
for line in hear:
    message = json.loads(line)
    if message["type"] == "checkpoint_request":
        log("saves")
        sys.exit(0)
"""
    given = await harness.start(make_order(*talker("log('up')\n" + body)))
    await harness.until_said(given, "up")
    pid = (await harness.status(given)).pid
    await harness.runner.pause(given, is_suspended=True)
    await harness.until_status(given, lambda s: s.phase == P.SUSPENDED, "suspended")
    await harness.until(lambda: is_stopped(pid), "it is stopped")
    await harness.runner.stop(given, StopReason.PREEMPT, PATIENCE_S)
    status = await harness.until_exited(given)
    assert status.exit_code == 0
    assert "saves" in harness.log(given)


@pytest.mark.slow
async def test_another_runner_finds_a_worker_suspended_and_resumes_it(
    harness: WorkerHarness,
) -> None:
    """An agent that starts again adopts it as it is."""
    given = await harness.start(make_order(*talker(COUNTER)))
    await harness.until_said(given, "3")
    await harness.runner.pause(given, is_suspended=True)
    await harness.until_status(given, lambda s: s.phase == P.SUSPENDED, "suspended")
    harness.runner = harness.new_runner()
    assert await harness.runner.adopt() == (given,)
    assert (await harness.status(given)).phase == P.SUSPENDED
    said = len(harness.log(given))
    await harness.runner.pause(given, is_suspended=False)
    await harness.until(lambda: len(harness.log(given)) > said, "it counts on")
