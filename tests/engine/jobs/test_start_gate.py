"""Holds, dependencies, requeues and changes: what may not start, and that it starts then."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from msgspec import UNSET
from msgspec.structs import replace

from common import arrays as array_text
from common.model import (
    ArraySpec,
    CheckpointSpec,
    Dependency,
    DependencyKind,
    Gate,
    JobChange,
    JobId,
    JobState,
    NodeName,
    PrerunSpec,
    WorkerRange,
)
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.jobs import (
    array_orders,
    arrays,
    changes,
    numbers,
    person_orders,
    prerun_spec,
    start_gate,
)
from coordinator.engine.state.accounting import queueing_s
from coordinator.engine.state.array_entry import ArrayEntry
from coordinator.engine.state.events import (
    ArrayThrottled,
    Event,
    JobCancelRequested,
    JobChanged,
    JobsHeld,
    JobsReleased,
    JobsRequeued,
    JobSubmitted,
    PassDue,
)
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Resize
from coordinator.policies.registry import policy
from coordinator.workloads.shaping import linear
from tests.draws import words
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import EngineHarness, start, state
from tests.harness.cluster.scripted_nodes import journalled
from tests.policies.counted_calls import calls

K = DependencyKind


def _line(*, kept: int = 2000, nodes: int = 1) -> EngineHarness:
    """A cell of one node that takes the first job that waits, and forgets ended jobs soon."""
    settings = EngineSettings(policy="fifo", min_runtime_s=0.0, finished_jobs_kept=kept)
    harness = EngineHarness(training=nodes, inference=0, settings=settings)
    harness.engine.policy = policy("fifo")
    return harness


def _submit(
    harness: EngineHarness,
    name: str,
    *after: tuple[DependencyKind, str],
    is_held: bool = False,
    **spec: Any,
) -> JobEntry:
    """A job of 30 s on the whole node, that saves."""
    asked = make_spec(
        name,
        gpus_per_worker=8,
        expected_runtime_s=30.0,
        checkpoint=CheckpointSpec(path=f"/ckpt/{name}", grace_s=5.0),
        **spec,
    )
    if after:
        found = tuple(Dependency(job=job, when=when) for when, job in after)
        asked = replace(asked, depends_on=found)
    if is_held:
        asked = replace(asked, is_held=True)
    job_id = JobId(name)
    harness.sim.runtime.add(
        job_id,
        work_s=30.0 * asked.workers.min,
        speedup=linear(asked.workers),
        gpus_per_worker=8,
        path=asked.checkpoint.path,
    )
    event = JobSubmitted(job_id=job_id, spec=asked, tenant="t", user="u")
    harness.sim.handle(journalled(event))
    harness.settle()
    return harness.engine.state.jobs[job_id]


def _submit_array(
    harness: EngineHarness,
    name: str,
    *after: tuple[DependencyKind, str],
    is_held: bool = False,
    **array: Any,
) -> ArrayEntry:
    """An array of tasks of 10 s, each on the whole node."""
    asked = make_spec(
        name,
        gpus_per_worker=8,
        expected_runtime_s=10.0,
        checkpoint=CheckpointSpec(path=f"/ckpt/{name}-{{index}}", grace_s=5.0),
        array=ArraySpec(**array),
        is_held=is_held or UNSET,
        depends_on=tuple(Dependency(job=job, when=when) for when, job in after) or UNSET,
    )
    for index in array_text.indices(array["indices"]):
        harness.sim.runtime.add(
            JobId(f"{name}_{index}"),
            work_s=10.0,
            speedup=linear(asked.workers),
            gpus_per_worker=8,
            path=f"/ckpt/{name}-{index}",
        )
    harness.sim.handle(
        journalled(JobSubmitted(job_id=JobId(name), spec=asked, tenant="t", user="u"))
    )
    harness.settle()
    return harness.engine.state.arrays[JobId(name)]


def _change(harness: EngineHarness, job: JobEntry | ArrayEntry, **values: Any) -> None:
    event = JobChanged(job_id=start_gate.id_of(job), by="t/u", change=JobChange(**values))
    harness.sim.handle(journalled(event))
    harness.settle()


# --- the property ------------------------------------------------------------------------------


class Op(NamedTuple):
    """One random step: what, and numbers that it uses as it likes."""

    what: str
    a: int
    b: int
    kind: DependencyKind


KINDS = (
    *("submit", "submit", "array", "hold", "release"),
    *("requeue", "after", "cancel", "fail", "wait"),
)


def _op(word: int) -> Op:
    number, what = divmod(word, len(KINDS))
    return Op(KINDS[what], number % 10, number // 10 % 10, list(K)[number // 100 % len(K)])


OPS = words(10, 30).map(lambda story: [_op(word) for word in story])


def _event(harness: EngineHarness, op: Op) -> Event | None:
    """The order of one step about some job or array, whether or not it fits."""
    known, named = _known(harness), _named(harness)
    if not known:
        return None
    job_id, other = known[op.a % len(known)], named[op.b % len(named)]
    match op.what:
        case "hold":
            return JobsHeld(job_ids=(job_id,), by="t/u")
        case "release":
            return JobsReleased(job_ids=(job_id,), by="t/u")
        case "requeue":
            return JobsRequeued(job_ids=(job_id,), by="t/u", is_held=op.b % 2 == 1)
        case "after":
            each = Dependency(job=other, when=op.kind)
            change = JobChange(depends_on=(each,) if op.b < 8 else ())
            return JobChanged(job_id=job_id, by="t/u", change=change)
        case "cancel":
            return JobCancelRequested(job_id=job_id, by="t/u")
        case _:
            return None


def _known(harness: EngineHarness) -> list[JobId]:
    """Jobs and arrays."""
    return [*harness.engine.state.jobs, *harness.engine.state.arrays]


def _named(harness: EngineHarness) -> list[JobId]:
    """What a dependency may name: those, and the last task of each array."""
    return [*_known(harness), *(array.task_id(2) for array in harness.engine.state.arrays.values())]


def _after(harness: EngineHarness, op: Op) -> list[tuple[DependencyKind, str]]:
    """What a job that this step submits depends on."""
    named = _named(harness)
    return [(op.kind, named[op.b % len(named)])] if named and op.a % 3 else []


def _perform(harness: EngineHarness, op: Op, number: int) -> None:
    if op.what == "submit":
        _submit(harness, f"j{number}", *_after(harness, op), is_held=op.a % 4 == 1)
    elif op.what == "array":
        throttle = (None, 1, 2)[op.b % 3]
        held = op.a % 4 == 1
        _submit_array(harness, f"a{number}", *_after(harness, op), is_held=held, indices="0-2",
                      throttle=throttle)  # fmt: skip
    elif op.what == "wait":
        harness.wait((1.0, 7.0, 40.0)[op.a % 3])
    elif op.what == "fail":
        for node in harness.sim.nodes.values():
            for key in node.keys()[:1]:
                node.exited(key, 1)
    elif (event := _event(harness, op)) is not None:
        harness.sim.handle(journalled(event))
    harness.settle()


ENDS = ("succeeded", "failed", "cancelled")


def _array_of(name: str) -> str:
    """The array of a task of it; of others the same."""
    return name.partition("_")[0]


class Story:
    """What the event lines tell of each job, read from the start; asks no gate."""

    def __init__(self) -> None:
        self.asked: dict[str, tuple[Dependency, ...]] = {}
        self._began: set[str] = set()
        self._ended: dict[str, str] = {}
        self._held: set[str] = set()
        self._let: set[str] = set()
        """Tasks that a person released, and has not held since with their array."""
        self._seen = 0

    def read(self, harness: EngineHarness) -> None:
        """No job starts while it is held, or before what it depends on; no task while its array is
        held, or before what that depends on."""
        state = harness.engine.state
        for one in state.arrays.values():  # of tasks that never were jobs no line tells
            self._ended |= {one.task_id(place): "cancelled" for place in one.cancelled}
        for line in state.stories[self._seen - state.stories_dropped :]:
            what, name = line.what, line.subject
            array = _array_of(name)
            if what == "start -> starting":
                assert name not in self._held, f"{name} was held"
                assert array not in self._held or name in self._let, f"{array} was held"
                if name not in self._began:
                    asked = (*self.asked.get(name, ()), *self.asked[array])
                    assert all(map(self._holds, asked)), f"{name} started too soon"
            elif what == "gang_ready -> running":
                self._began |= {name, array}
            elif what == "held":
                self._held.add(name)
                self._let = {task for task in self._let if name not in (task, _array_of(task))}
            elif what == "released":
                self._held.discard(name)
                self._let.add(name)
            elif (end := what.replace("array ", "-> ").partition("-> ")[2]) in ENDS:
                assert self._ended.get(name, end) == end, f"{name} ended twice"
                self._ended[name] = end
            elif what == "changed":
                job = start_gate.gated(state, name)
                self.asked[name] = () if job is None else job.spec.depends_on or ()
        self._seen = state.stories_dropped + len(state.stories)

    def _holds(self, each: Dependency) -> bool:
        end = self._ended.get(each.job)
        match each.when:
            case K.STARTED:
                return end is not None or each.job in self._began
            case K.OK:
                return end == "succeeded"
            case K.NOT_OK:
                return end in ("failed", "cancelled")
            case K.ENDED:
                return end is not None


@settings(max_examples=30, deadline=None)
@given(OPS)
def test_no_job_starts_behind_a_shut_gate_and_each_that_is_opened_ends(ops: list[Op]) -> None:
    """Whatever people order, and though ended jobs are forgotten at once.

    Once all holds are released and all dependencies taken away, every job comes to its end. The
    same events give the same state again from a snapshot in the middle.
    """
    harness, story = _line(kept=1), Story()
    later: list[tuple[float, Event]] = []
    real, middle = harness.engine.handle, b""

    def recording(event: Event, *, now_s: float) -> Any:
        later.append((now_s, event))
        return real(event, now_s=now_s)

    for number, op in enumerate(ops):
        if number == len(ops) // 2:
            middle = harness.engine.encode_state()
            harness.engine.handle = recording  # type: ignore[method-assign]  # a tap, not a mock
        if op.what in ("submit", "array"):
            each = tuple(Dependency(job=job, when=when) for when, job in _after(harness, op))
            story.asked[f"{'j' if op.what == 'submit' else 'a'}{number}"] = each
        _perform(harness, op, number)
        story.read(harness)
        _recount(harness.engine)
    again = Engine(harness.engine.settings, decode_state(middle))
    for now_s, event in later:
        again.handle(event, now_s=now_s)
    assert again.encode_state() == harness.engine.encode_state()
    for job_id in [*harness.engine.state.live_jobs, *harness.engine.state.live_arrays]:
        harness.sim.handle(JobsReleased(job_ids=(job_id,), by="t/u"))
        none = JobChange(depends_on=())
        harness.sim.handle(JobChanged(job_id=job_id, by="t/u", change=none))
    harness.wait(3000.0)
    story.read(harness)
    assert not (harness.engine.state.live_jobs or harness.engine.state.live_arrays)
    assert not (harness.engine.state.dependents or harness.engine.state.gated_jobs)


def _recount(engine: Engine) -> None:
    """A job behind a shut gate is put to no policy, and counts as one that waits."""
    found = engine.state
    seen = {view.job_id for view in engine.snapshot().jobs}
    pending = [job for job in found.live() if job.state == JobState.PENDING]
    assert not seen & {job.job_id for job in pending if job.gate.is_shut}
    live = [found.arrays[array_id] for array_id in found.live_arrays]
    shut = [array for array in live if array.gate.is_shut]
    behind = sum(bool(array.waiting) for array in live if array not in shut)
    behind += sum(min(len(array.waiting), 1 + _free(array)) for array in shut)
    assert engine.waiting_jobs("t") == len(pending) + behind


def _free(array: ArrayEntry) -> int:
    """Tasks that enter the line when the gate opens."""
    return len(array.waiting) if array.throttle is None else array.throttle - len(array.live)


# --- dependencies -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "end", "starts"),
    [
        (K.OK, "succeeded", True), (K.OK, "cancelled", False),
        (K.NOT_OK, "succeeded", False), (K.NOT_OK, "cancelled", True),
        (K.ENDED, "cancelled", True), (K.STARTED, "cancelled", True),
    ],
)  # fmt: skip
def test_what_an_end_means_for_a_job_that_waits_for_it(
    when: DependencyKind, end: str, starts: bool
) -> None:
    """It starts, or it waits for ever and says why, also when the other job is forgotten."""
    harness = _line(kept=0)
    first = _submit(harness, "first")
    second = _submit(harness, "second", (when, "first"), (K.ENDED, "first"))
    assert start_gate.kind(second) == Gate.DEPENDENCY
    if end == "cancelled":
        harness.sim.handle(JobCancelRequested(job_id=first.job_id, by="t/u"))
    harness.wait(40.0)
    assert first.job_id not in harness.engine.state.jobs
    if starts:
        assert second.attempt.number == 1
        return
    assert start_gate.kind(second) == Gate.NEVER
    [why] = harness.engine.explain.blockers(second.job_id)
    said = "succeed, which was cancelled" if when == K.OK else "fail, which succeeded"
    assert f"first to {said}" in why
    assert not harness.engine.state.dependents


def test_a_job_follows_the_start_of_another() -> None:
    """`started` holds once the gang runs, and no earlier."""
    harness = _line(nodes=2)
    first = _submit(harness, "first", is_held=True)
    second = _submit(harness, "second", (K.STARTED, "first"))
    harness.wait(10.0)
    assert (first.attempt.number, second.attempt.number) == (0, 0)
    harness.sim.handle(JobsReleased(job_ids=(first.job_id,), by="t/u"))
    harness.wait(10.0)
    assert state(first) == state(second) == JobState.RUNNING


def test_jobs_cannot_wait_for_themselves() -> None:
    """A change that closes a circle is refused, as is a job that is not there."""
    harness = _line()
    first = _submit(harness, "first", is_held=True)
    second = _submit(harness, "second", (K.OK, "first"))
    third = _submit(harness, "third", (K.OK, "second"))
    for asked in ("first", "second", "third", "nobody"):
        change = JobChange(depends_on=(Dependency(job=asked, when=K.OK),))
        found = changes.why_not(harness.engine.state, first, change)
        assert found is not None and found.field == "depends_on", asked
    change = JobChange(depends_on=(Dependency(job="first", when=K.OK),))
    assert changes.why_not(harness.engine.state, third, change) is None
    assert not second.attempt.number


def test_a_change_of_dependencies_frees_a_job_that_could_never_start() -> None:
    """The old ones are forgotten, and the new ones count at once."""
    harness = _line()
    first = _submit(harness, "first")
    second = _submit(harness, "second", (K.NOT_OK, "first"))
    harness.wait(40.0)
    assert start_gate.kind(second) == Gate.NEVER
    _change(harness, second, depends_on=(Dependency(job="first", when=K.OK),))
    assert start_gate.kind(second) is None
    assert (state(first), state(second)) == (JobState.SUCCEEDED, JobState.RUNNING)


# --- holds and requeues ------------------------------------------------------------------------


def test_no_decision_starts_a_held_job() -> None:
    """Whatever a policy decides: the engine refuses it."""
    harness = EngineHarness()
    job = harness.submit()
    harness.sim.handle(JobsHeld(job_ids=(job.job_id,), by="t/u"))
    assert harness.refusals(start(job, "t0")) == ["j is not in the queue"]
    harness.sim.handle(JobsReleased(job_ids=(job.job_id,), by="t/u"))
    harness.start(job, "t0")
    assert job.attempt.number == 1


def test_time_behind_a_shut_gate_is_no_queueing_time() -> None:
    """Neither of a hold at submission nor of a later one."""
    harness = _line()
    _submit(harness, "first")
    second = _submit(harness, "second", is_held=True)
    harness.wait(10.0)
    now_s = harness.sim.loop.now_s
    assert queueing_s(second, now_s) == 0.0
    harness.sim.handle(JobsReleased(job_ids=(second.job_id,), by="t/u"))
    harness.wait(5.0)
    harness.sim.handle(JobsHeld(job_ids=(second.job_id,), by="t/u"))
    harness.wait(100.0)
    harness.sim.handle(JobsReleased(job_ids=(second.job_id,), by="t/u"))
    harness.wait(10.0)
    assert state(second) == JobState.RUNNING
    assert 5.0 <= queueing_s(second, harness.sim.loop.now_s) < 15.0


def test_a_requeue_keeps_the_checkpoint_and_charges_no_restart() -> None:
    """It is a preemption that a person ordered: grace, then the queue."""
    harness = _line()
    job = _submit(harness, "first")
    harness.wait(20.0)
    event = JobsRequeued(job_ids=(job.job_id,), by="t/u", is_held=True)
    harness.sim.handle(journalled(event))
    assert (state(job), job.loss is not None and job.loss.is_ordered) == (JobState.PREEMPTING, True)
    harness.wait(10.0)
    assert (state(job), job.gate.held_by) == (JobState.PENDING, "t/u")
    assert (job.counts.preemptions, job.counts.own_faults) == (1, 0)
    assert job.saves.checkpoint is not None
    harness.wait(50.0)
    assert state(job) == JobState.PENDING
    harness.sim.handle(JobsReleased(job_ids=(job.job_id,), by="t/u"))
    harness.wait(50.0)
    assert (state(job), job.attempt.number) == (JobState.SUCCEEDED, 2)
    assert "submit it again" in person_orders.why_not_requeued(job, is_held=False)


def test_a_hold_of_a_running_job_names_the_order_that_does_it() -> None:
    """And changes nothing."""
    harness = _line()
    job = _submit(harness, "first")
    harness.wait(10.0)
    harness.sim.handle(JobsHeld(job_ids=(job.job_id,), by="t/u"))
    assert (state(job), job.gate.is_shut) == (JobState.RUNNING, False)
    assert "aryl job requeue first --hold" in person_orders.why_not_held(job)


# --- changes -----------------------------------------------------------------------------------


def test_a_running_job_ends_at_a_limit_that_it_has_passed() -> None:
    """By the usual path; without the limit it goes on."""
    harness = _line(nodes=2)
    first = _submit(harness, "first", time_limit_s=25.0)
    second = _submit(harness, "second")
    harness.wait(20.0)
    _change(harness, first, time_limit_s=None)
    _change(harness, second, time_limit_s=10.0)
    harness.wait(20.0)
    assert state(first) == JobState.SUCCEEDED
    assert (state(second), second.error) == (JobState.FAILED, "ran into its time_limit_s of 10 s")


def test_a_new_priority_is_that_of_the_queue() -> None:
    """Policies see it in the next pass."""
    harness = _line()
    _submit(harness, "first")
    _submit(harness, "second")
    third = _submit(harness, "third")
    _change(harness, third, priority=7)
    views = {view.job_id: view.priority for view in harness.engine.snapshot().jobs}
    assert views[third.job_id] == 7


def test_a_lower_maximum_shrinks_a_job_that_runs() -> None:
    """Flexible workers beyond it leave by one resize; a minimum stays while there are workers."""
    harness = EngineHarness(training=4)
    job = harness.submit(workers=(1, 4))
    harness.start(job, "t0", flexible=("t1", "t2", "t3"))
    harness.wait(5.0)
    assert job.running_workers == 4
    change = JobChange(workers=WorkerRange(min=2, max=2))
    found = changes.why_not(harness.engine.state, job, change)
    assert found is not None and found.field == "workers"
    _change(harness, job, workers=WorkerRange(min=1, max=2))
    harness.wait(40.0)
    assert (state(job), sorted(job.workers), job.counts.resizes) == (JobState.RUNNING, [0, 1], 1)
    assert not harness.engine.state.oversized_jobs
    harness.sim.ask_pass()
    harness.settle()
    assert not harness.engine.state.oversized_jobs


def test_a_new_range_of_a_job_before_its_pre_run_is_that_of_the_gang() -> None:
    """The pre-run stays one worker, and the estimate is that of the new gang."""
    harness = _line()
    job = _submit(harness, "first", is_held=True, workers=(2, 2), prerun=PrerunSpec(time_s=60.0))
    assert job.spec.prerun.gang is not None
    _change(harness, job, workers=WorkerRange(min=3, max=4))
    gang = prerun_spec.submitted(job)
    assert (job.spec.workers.max, gang.workers) == (1, WorkerRange(min=3, max=4))
    assert (gang.is_held, job.estimate.expected_work_s) == (True, 90.0)
    assert job.submitted_spec is not None and job.submitted_spec.workers.min == 2


def test_a_shrink_waits_for_the_gang_and_for_the_end_of_a_freeze() -> None:
    """Nothing is resized before the gang runs, or in a frozen cell."""
    harness = EngineHarness(training=4, delays=None)
    job = harness.submit(workers=(1, 3))
    harness.start(job, "t0", flexible=("t1", "t2"))
    harness.wait(5.0)
    harness.engine.state.is_frozen = True
    _change(harness, job, workers=WorkerRange(min=1, max=1))
    harness.wait(20.0)
    assert (job.running_workers, list(harness.engine.state.oversized_jobs)) == (3, [job.job_id])
    harness.engine.state.is_frozen = False
    outcome = harness.engine.handle(PassDue(), now_s=harness.sim.loop.now_s)
    [resize] = outcome.decisions
    assert isinstance(resize, Resize) and resize.removed_workers == (2, 1)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (JobChange(), ""),
        (JobChange(workers=WorkerRange(min=3, max=2)), "workers"),
        (JobChange(deadline_s=5.0), "deadline_s"),
    ],
)
def test_a_change_is_checked_as_a_submission_is(change: JobChange, field: str) -> None:
    """By field; and what is refused changes nothing."""
    harness = _line()
    job = _submit(harness, "first", is_held=True)
    harness.wait(10.0)
    harness.sim.ask_pass()
    harness.settle()
    before = harness.engine.encode_state()
    found = changes.why_not(harness.engine.state, job, change)
    assert found is not None and found.field == field
    harness.engine.handle(
        JobChanged(job_id=job.job_id, by="t/u", change=change), now_s=harness.sim.loop.now_s
    )
    assert harness.engine.encode_state() == before


def test_no_order_to_a_node_has_what_matters_before_a_start_alone() -> None:
    """An agent of an older version takes the order; the spec of the job keeps it."""
    harness = _line()
    _submit(harness, "first")
    second = _submit(harness, "second", (K.ENDED, "first"), is_held=True)
    harness.sim.handle(JobsReleased(job_ids=(second.job_id,), by="t/u"))
    harness.wait(40.0)
    [order] = harness.engine.desired(NodeName("t0")).workers
    assert order.key.job_id == second.job_id
    assert order.spec == replace(
        numbers.ordered(second.spec, second.number), depends_on=UNSET, is_held=UNSET
    )
    assert second.spec.depends_on and second.spec.is_held


# --- arrays -------------------------------------------------------------------------------------


def test_an_array_behind_a_shut_gate_has_no_task_in_the_line() -> None:
    """Neither while it is held nor before its dependencies hold; that time is no queueing time."""
    harness = _line()
    _submit(harness, "first")
    array = _submit_array(harness, "a", (K.OK, "first"), is_held=True, indices="0-4")
    assert (list(array.live), start_gate.kind(array)) == ([], Gate.HELD)
    harness.sim.handle(JobsReleased(job_ids=(JobId("a"),), by="t/u"))
    assert (list(array.live), start_gate.kind(array)) == ([], Gate.DEPENDENCY)
    [why] = start_gate.why_shut(harness.engine.state, array)
    assert "first to succeed" in why
    assert array.queueing_s(harness.sim.loop.now_s) == 0.0
    harness.wait(35.0)
    assert (len(array.live), start_gate.kind(array)) == (5, None)
    task = harness.engine.state.jobs[JobId("a_0")]
    assert (task.spec.is_held, task.spec.depends_on) == (UNSET, UNSET)
    assert array.queueing_s(harness.sim.loop.now_s) < 10.0
    harness.wait(120.0)
    assert array.outcome == JobState.SUCCEEDED


@pytest.mark.parametrize(
    ("when", "name", "at_start", "at_end"),
    [
        (K.STARTED, "a", True, True), (K.OK, "a", False, True), (K.NOT_OK, "a", False, False),
        (K.ENDED, "a", False, True), (K.OK, "a_2", False, True), (K.NOT_OK, "a_2", False, False),
    ],
)  # fmt: skip
def test_a_job_waits_for_an_array_or_for_a_task_of_it(
    when: DependencyKind, name: str, *, at_start: bool, at_end: bool
) -> None:
    """A task counts while it waits in its array, and after it was forgotten as a job."""
    harness = _line(kept=1, nodes=2)
    array = _submit_array(harness, "a", indices="0-3", throttle=1)
    job = _submit(harness, "job", (when, name))
    harness.wait(8.0)
    assert (list(array.live), bool(job.attempt.number)) == (["a_0"], at_start)
    harness.wait(200.0)
    assert array.outcome == JobState.SUCCEEDED
    assert JobId("a_2") not in harness.engine.state.jobs
    assert bool(job.attempt.number) == at_end
    later = _submit(harness, "later", (when, "a_2"))
    assert (start_gate.kind(later) == Gate.NEVER) == (when == K.NOT_OK)


def test_a_task_that_is_cancelled_in_its_array_settles_what_waits_for_it() -> None:
    """It has never been a job."""
    harness = _line()
    array = _submit_array(harness, "a", indices="0-9", throttle=1)
    job = _submit(harness, "job", (K.NOT_OK, "a_7"))
    event = JobCancelRequested(job_id=array.array_id, by="t/u", indices="7-8")
    harness.sim.handle(journalled(event))
    assert start_gate.kind(job) is None
    assert not harness.engine.state.dependents


def test_neither_an_array_nor_its_tasks_wait_for_themselves() -> None:
    """An array and its tasks are one here, through other jobs too."""
    harness = _line()
    _submit(harness, "first")
    array = _submit_array(harness, "a", (K.OK, "first"), indices="0-9")
    _submit(harness, "second", (K.ENDED, "a_3"))
    for asked in ("a", "a_3", "second", "a_77"):
        change = JobChange(depends_on=(Dependency(job=asked, when=K.ENDED),))
        found = array_orders.why_not_changed(harness.engine.state, array, change)
        assert found is not None and found.field == "depends_on", asked
    harness.wait(35.0)
    task = harness.engine.state.jobs[JobId("a_5")]
    for asked in ("a", "a_3", "second"):
        change = JobChange(depends_on=(Dependency(job=asked, when=K.ENDED),))
        found = changes.why_not(harness.engine.state, task, change)
        assert found is not None and found.field == "depends_on", asked


def test_a_held_array_leaves_the_line_but_for_what_runs() -> None:
    """A task that loses its GPUs meanwhile waits until the release, and none counts twice."""
    harness = _line()
    array = _submit_array(harness, "a", indices="0-9", throttle=5)
    harness.wait(8.0)
    assert len(array.live) == 5
    harness.sim.handle(JobsHeld(job_ids=(JobId("a"),), by="t/u"))
    assert list(array.live) == ["a_0"]
    harness.sim.handle(journalled(JobsRequeued(job_ids=(JobId("a"),), by="t/u")))
    harness.wait(60.0)
    first = harness.engine.state.jobs[JobId("a_0")]
    assert (state(first), start_gate.kind(first)) == (JobState.PENDING, Gate.HELD)
    assert array_orders.why_not_requeued(harness.engine.state, array, is_held=True).endswith(
        "aryl job hold a holds it"
    )
    harness.sim.handle(JobsReleased(job_ids=(JobId("a"),), by="t/u"))
    harness.wait(300.0)
    assert (array.outcome, first.attempt.number) == (JobState.SUCCEEDED, 2)
    assert harness.engine.state.counters.jobs_submitted == 10


def test_a_task_that_a_person_held_stays_a_job() -> None:
    """A lower throttle does not take it back into an array that knows nothing of its hold."""
    harness = _line()
    array = _submit_array(harness, "a", indices="0-9", throttle=5)
    harness.sim.handle(JobsHeld(job_ids=(JobId("a_4"),), by="t/u"))
    harness.sim.handle(ArrayThrottled(job_id=array.array_id, by="t/u", throttle=1))
    assert JobId("a_4") in array.live
    harness.sim.handle(JobsReleased(job_ids=(JobId("a"),), by="t/u"))
    harness.wait(300.0)
    assert array.outcome == JobState.SUCCEEDED


def test_a_change_of_an_array_is_one_of_its_tasks() -> None:
    """Of those to come, and of live ones as far as it fits each; dependencies until it starts."""
    harness = _line()
    _submit(harness, "first", is_held=True)
    array = _submit_array(harness, "a", indices="0-99")
    harness.wait(8.0)
    _change(harness, array, workers=WorkerRange(min=2, max=3), priority=7)
    specs = {job_id: job.spec for job_id, job in harness.engine.state.jobs.items()}
    assert (specs[JobId("a_0")].workers.min, specs[JobId("a_0")].priority) == (1, 7)
    assert (specs[JobId("a_1")].workers.min, specs[JobId("a_1")].priority) == (2, 7)
    assert array.submitted_spec is not None and array.submitted_spec.priority == 0
    after = (Dependency(job="first", when=K.OK),)
    found = array_orders.why_not_changed(harness.engine.state, array, JobChange(depends_on=after))
    assert found is not None and found.field == "depends_on"
    _change(harness, array, workers=WorkerRange(min=1, max=1))
    other = _submit_array(harness, "b", indices="0-9")
    _change(harness, other, depends_on=after)
    assert (list(other.live), start_gate.kind(other)) == ([], Gate.DEPENDENCY)
    _change(harness, other, depends_on=())
    assert len(other.live) == 10
    harness.wait(60.0)
    assert harness.engine.state.jobs[JobId("a_68")].spec.priority == 7
    assert len(array.in_line) == arrays.WINDOW


# --- state and cost ---------------------------------------------------------------------------


def test_a_snapshot_of_before_has_no_gate_and_is_read() -> None:
    """Every job of it is in the queue."""
    harness = _line()
    _submit(harness, "first")
    saved: dict[str, Any] = msgspec.msgpack.decode(harness.engine.encode_state())
    for table in ("gated_jobs", "dependents", "oversized_jobs"):
        del saved[table]
    for job in saved["jobs"].values():
        del job["gate"], job["submitted_spec"]
    old = decode_state(msgspec.msgpack.encode(saved))
    assert not any(job.gate.is_shut for job in old.jobs.values())
    assert Engine(harness.engine.settings, old).check() == []


def test_jobs_behind_a_shut_gate_cost_a_pass_nothing() -> None:
    """A pass calls as much with a hundred of them as with none, after the pass that saw them
    come."""

    def cost(count: int) -> int:
        harness = _line()
        _submit(harness, "first")
        for number in range(count):
            _submit(harness, f"held{number}", is_held=True)
            _submit(harness, f"later{number}", (K.OK, "held0"))
        harness.wait(10.0)
        now_s = harness.sim.loop.now_s
        harness.engine.handle(PassDue(), now_s=now_s)
        return calls(lambda: harness.engine.handle(PassDue(), now_s=now_s))

    assert cost(50) == cost(0)
