"""Job arrays in the engine: a window of tasks in the line, and each index ends once."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import WorkerPhase
from common.model import (
    ArraySpec,
    CheckpointSpec,
    JobChange,
    JobId,
    JobSpec,
    JobState,
    NodeName,
    Pool,
)
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.jobs import arrays
from coordinator.engine.state.array_entry import ArrayEntry, Places
from coordinator.engine.state.events import (
    ArrayThrottled,
    Event,
    JobCancelRequested,
    JobChanged,
    JobsHeld,
    JobsReleased,
    JobsRequeued,
    JobSubmitted,
    LeaderStarted,
    PassDue,
    RecordsLost,
)
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import ClusterState
from coordinator.sim.run.cluster import Delays, NodeSpec
from coordinator.sim.run.simulation import Simulation
from coordinator.workloads.shaping import linear
from tests.draws import pick, words
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import EngineHarness
from tests.harness.cluster.scripted_nodes import journalled

ARRAY = JobId("array")
NODE = NodeName("t0")


class Cell:
    """One node of 8 GPUs under a real policy, and one array."""

    def __init__(self, indices: str, throttle: int | None = None, *, policy: str = "fifo") -> None:
        node = NodeSpec(name=NODE, home_pool=Pool.TRAINING, gpu_type="H100", gpus=8)
        delays = Delays(ready_s=1.0, start_s=1.0, stop_s=2.0)
        self.sim = Simulation(EngineSettings(policy=policy), [node], delays=delays, check=True)
        self.sim.run(until_s=0.0)
        self.most_live = 0
        self.sim.watch = lambda now_s: self.look()
        self.spec = sweep(indices, throttle)
        self.sim.handle(JobSubmitted(job_id=ARRAY, spec=self.spec, tenant="lab", user="ada"))
        for place in range(len(self.array.indices)):
            self.sim.runtime.add(
                self.array.task_id(place),
                work_s=5.0 + place % 7,
                speedup=linear(self.spec.workers),
                gpus_per_worker=1,
            )

    @property
    def array(self) -> ArrayEntry:
        """As the engine has it now."""
        return self.sim.engine.state.arrays[ARRAY]

    def look(self) -> None:
        """Note how many tasks live at once."""
        if ARRAY in self.sim.engine.state.arrays:
            self.most_live = max(self.most_live, len(self.array.live))

    def run(self, seconds: float) -> None:
        """Let time pass, with a pass at its end."""
        self.sim.loop.run(until_s=self.sim.loop.now_s + seconds)
        self.sim.ask_pass()
        self.sim.loop.run(until_s=self.sim.loop.now_s)
        self.look()

    def fail_one(self) -> None:
        """A worker that computes exits with 3."""
        node = self.sim.nodes[NODE]
        for key in node.keys(WorkerPhase.RUNNING)[:1]:
            node.exited(key, 3)

    def restart(self) -> None:
        """Another coordinator takes over with a snapshot; it knows the same."""
        blob = self.sim.engine.encode_state()
        self.sim.engine = Engine(self.sim.engine.settings, decode_state(blob))
        assert self.sim.engine.encode_state() == blob


def sweep(indices: str, throttle: int | None = None) -> JobSpec:
    """An array of tasks of one GPU, each with a checkpoint of its own."""
    return make_spec(
        "sweep",
        expected_runtime_s=10.0,
        env={"ARYL_ARRAY_INDEX": "mine", "SEED": "7"},
        checkpoint=CheckpointSpec(path="/saves/{index}/last"),
        array=ArraySpec(indices=indices, throttle=throttle),
    )


class Step(NamedTuple):
    """One thing that happens: what, and two numbers."""

    what: str
    a: int
    b: int


ORDERS = ("hold", "release", "requeue", "change")
KINDS = ("wait", "wait", "fail", "cancel", "throttle", "restart", *ORDERS)


def _step(word: int) -> Step:
    number, what = divmod(word, len(KINDS))
    return Step(KINDS[what], number % 24, number // 24 % 21)


STORIES = words(0, 12).map(lambda story: [_step(word) for word in story])


def carry_out(cell: Cell, step: Step) -> None:
    """Let one step happen to the array."""
    match step.what:
        case "wait":
            cell.run(float(step.b))
        case "fail":
            cell.fail_one()
        case "cancel":
            text = f"{step.a}-{min(23, step.a + step.b)}"
            cell.sim.handle(JobCancelRequested(job_id=ARRAY, by="lab/ada", indices=text))
        case "throttle":
            most = step.b or None
            cell.sim.handle(ArrayThrottled(job_id=ARRAY, by="lab/ada", throttle=most))
        case "restart":
            cell.restart()
        case _:
            cell.sim.handle(journalled(order(step, cell.array.task_id(step.a))))


def order(step: Step, task: JobId) -> Event:
    """An order of a person about the array or about one task."""
    job_id = ARRAY if step.b % 2 else task
    match step.what:
        case "hold":
            return JobsHeld(job_ids=(job_id,), by="lab/ada")
        case "release":
            return JobsReleased(job_ids=(job_id,), by="lab/ada")
        case "requeue":
            return JobsRequeued(job_ids=(job_id,), by="lab/ada", is_held=step.b % 3 == 0)
        case _:
            return JobChanged(job_id=job_id, by="lab/ada", change=JobChange(priority=step.b))


@settings(max_examples=30)
@given(STORIES, pick(None, 1, 3, 7))
def test_each_index_ends_exactly_once(story: list[Step], throttle: int | None) -> None:
    """Whatever fails, is cancelled, throttled, held, requeued, changed or taken over, every task
    has one final state, and jobs count as submitted as often as they ended.
    """
    cell = Cell("0-23", throttle)
    for step in story:
        carry_out(cell, step)
    cell.sim.handle(ArrayThrottled(job_id=ARRAY, by="lab/ada", throttle=None))
    cell.sim.handle(JobsReleased(job_ids=(ARRAY,), by="lab/ada"))
    cell.run(120.0)
    array, state = cell.array, cell.sim.engine.state
    assert array.is_over
    assert not state.live_arrays
    ends = [*array.succeeded, *array.failed, *array.cancelled]
    assert sorted(ends) == list(range(24))
    for place in range(24):
        job = state.jobs.get(array.task_id(place))
        if job is not None:
            assert place in array.ended(job.state)
            assert job.array_task is not None
            assert job.array_task.index == place
    assert state.counters.jobs_submitted == len(state.jobs) + len(array.taken_back)


@given(st.integers(1, 9), st.sampled_from(["0-39", "0-200:4", "5,9-30,77"]))
@settings(max_examples=8)
def test_no_more_tasks_live_than_the_throttle_allows(throttle: int, indices: str) -> None:
    """At every instant, those in the line included; and the throttle is used up."""
    cell = Cell(indices, throttle)
    while not cell.array.is_over:
        cell.run(5.0)
    assert cell.most_live == throttle
    assert len(cell.array.succeeded) == len(cell.array.indices)
    assert cell.array.outcome == JobState.SUCCEEDED


def test_a_huge_array_is_a_window_of_jobs() -> None:
    """However many tasks wait, so many of them are in the line, and tasks start in order."""
    cell = Cell("0-9999")
    cell.run(0.0)
    state = cell.sim.engine.state
    assert len(cell.array.in_line) == arrays.WINDOW
    assert len(state.jobs) == arrays.WINDOW + 8
    started = [job.array_task.index for job in state.jobs.values()
               if job.array_task and job.attempt.number]  # fmt: skip
    assert started == list(range(8))
    assert cell.array.waiting.spans == [(arrays.WINDOW + 8, 9999)]
    assert cell.sim.engine.waiting_jobs("lab") == arrays.WINDOW + 1
    assert cell.sim.engine.jobs_of_user("lab", "ada") == 10_000


def test_a_task_is_a_job_with_its_own_index_and_checkpoint() -> None:
    """Its variables win over the user's, and its order has nothing that agents do not know."""
    cell = Cell("4-20:8")
    [first, second, third] = [job.spec for job in cell.sim.engine.state.live()]
    assert [spec.checkpoint.path for spec in (first, second, third)] == [
        "/saves/4/last", "/saves/12/last", "/saves/20/last"]  # fmt: skip
    assert second.env == {
        "SEED": "7",
        "ARYL_ARRAY_ID": "array",
        "ARYL_ARRAY_NUMBER": "1",
        "ARYL_ARRAY_INDEX": "12",
        "ARYL_ARRAY_COUNT": "3",
        "ARYL_ARRAY_MIN": "4",
        "ARYL_ARRAY_MAX": "20",
    }
    assert second.array is msgspec.UNSET


def test_a_lower_throttle_takes_waiting_tasks_out_of_the_line() -> None:
    """Running tasks go on; the highest of those that wait come back later, and count once."""
    cell = Cell("0-29")
    cell.run(3.0)
    running = len(cell.array.live) - len(cell.array.in_line)
    assert running == 8
    cell.sim.handle(ArrayThrottled(job_id=ARRAY, by="lab/ada", throttle=10))
    assert len(cell.array.live) == 10
    assert cell.array.waiting.spans == [(10, 29)]
    while not cell.array.is_over:
        cell.run(5.0)
    assert cell.sim.engine.state.counters.jobs_submitted == 30
    assert cell.sim.engine.state.counters.jobs_finished == 30


def test_tasks_of_a_cancelled_range_never_start() -> None:
    """Those that wait are cancelled at once, those that run leave, and others go on."""
    cell = Cell("0-29", 10)
    cell.run(3.0)
    cell.sim.handle(JobCancelRequested(job_id=ARRAY, by="lab/ada", indices="0-3,20-29"))
    assert cell.array.cancelled.spans == [(20, 29)]
    while not cell.array.is_over:
        cell.run(5.0)
    assert cell.array.cancelled.spans == [(0, 3), (20, 29)]
    assert cell.array.succeeded.spans == [(4, 19)]
    assert cell.array.outcome == JobState.CANCELLED


def test_an_array_that_is_cancelled_ends_with_its_last_task() -> None:
    """It fails if one of its tasks had failed, with that one's exit code."""
    cell = Cell("0-29", 10)
    cell.run(3.0)
    cell.fail_one()
    cell.run(1.0)
    cell.sim.handle(JobCancelRequested(job_id=ARRAY, by="lab/ada"))
    cell.run(10.0)
    assert cell.array.state == JobState.FAILED
    assert cell.array.exit_code == 3
    assert len(cell.array.failed) == 1
    assert len(cell.array.cancelled) == 29


def test_the_same_events_lead_to_the_same_array() -> None:
    """A journal that is run again gives the same bytes."""
    events: list[tuple[float, Event]] = []
    cell = Cell("0-39", 12)
    handle = cell.sim.engine.handle

    def note(event: Event, *, now_s: float) -> object:
        events.append((now_s, event))
        return handle(event, now_s=now_s)

    blob = cell.sim.engine.encode_state()
    cell.sim.engine.handle = note  # type: ignore[method-assign,assignment]  # a tap, not a mock
    for _ in range(4):
        cell.run(7.0)
        cell.fail_one()
    again = Engine(cell.sim.engine.settings, decode_state(blob))
    for now_s, event in events:
        again.handle(event, now_s=now_s)
    assert again.encode_state() == cell.sim.engine.encode_state()


def test_no_task_enters_while_one_may_run_unseen() -> None:
    """After a loss of records a task that the array has as waiting may have started: it never
    waits in the line, is found in a ledger, and does not start twice.
    """
    cell = Cell("0-29", 4)
    before = cell.sim.engine.encode_state()
    while len(cell.array.succeeded) < 4:
        cell.run(1.0)
    cell.run(3.0)
    running = {key.job_id for key in cell.sim.nodes[NODE].keys(WorkerPhase.RUNNING)}
    assert running
    # The state of the beginning, and none of the records since.
    cell.sim.engine = Engine(cell.sim.engine.settings, decode_state(before))
    seen: set[JobId] = set()
    cell.sim.watch = lambda now_s: seen.update(cell.array.in_line)
    cell.sim.handle(LeaderStarted(epoch=2, holder="new"))
    cell.sim.handle(RecordsLost(first=1, last=9, from_s=0.0))
    cell.sim.handle(ArrayThrottled(job_id=ARRAY, by="lab/ada", throttle=8))
    cell.sim.handle(PassDue())
    cell.sim.nodes[NODE].report_soon()
    cell.run(2.0)
    assert not seen & running
    assert running <= cell.array.live.keys()
    starts = [job.attempt.number for job in map(cell.sim.engine.state.jobs.get, running) if job]
    assert starts == [1] * len(running)


def test_older_snapshots_have_no_arrays() -> None:
    """A state that an earlier version saved is read, and jobs in it are tasks of none."""
    harness = EngineHarness(training=1, inference=0)
    harness.submit("old")
    plain = msgspec.msgpack.decode(harness.engine.encode_state())
    for name in ("arrays", "live_arrays"):
        del plain[name]
    for job in plain["jobs"].values():
        del job["array_task"]
    found = decode_state(msgspec.msgpack.encode(plain))
    assert isinstance(found, ClusterState)
    assert found.arrays == {}
    assert found.jobs[JobId("old")].array_task is None


def test_an_array_of_an_older_snapshot_has_an_open_gate() -> None:
    """It goes on as before."""
    cell = Cell("0-9", 2)
    plain = msgspec.msgpack.decode(cell.sim.engine.encode_state())
    for name in ("gate", "gated_s", "shut_since_s", "submitted_spec"):
        del plain["arrays"]["array"][name]
    found = decode_state(msgspec.msgpack.encode(plain))
    assert not found.arrays[ARRAY].gate.is_shut
    assert Engine(cell.sim.engine.settings, found).check() == []


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 8)), max_size=30))
def test_places_are_a_set(changes: list[tuple[bool, int, int]]) -> None:
    """Adding and taking spans does what it does to a set of numbers; spans stay apart."""
    found, wanted = Places(), set[int]()
    for is_added, first, length in changes:
        span = range(first, first + length + 1)
        if is_added:
            found.add(first, span[-1])
            wanted |= set(span)
        else:
            taken = found.take(Places(spans=[(first, span[-1])]))
            assert set(taken) == wanted & set(span)
            wanted -= set(span)
        assert list(found) == sorted(wanted)
        assert len(found) == len(wanted)
        assert all(n in found for n in wanted)
        ends = [end for span in found.spans for end in span]
        assert ends == sorted(ends)
        assert all(b[0] - a[1] > 1 for a, b in zip(found.spans, found.spans[1:], strict=False))
