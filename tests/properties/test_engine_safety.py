"""Whatever a policy decides and whatever the nodes do, the engine keeps its safety properties.

Decisions here are random and often nonsense: the engine must refuse what does not fit. The oracle
is the pretend nodes' own tables, not the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from common.messages import OrderPhase, WorkerOrder, WorkerPhase
from common.model import JobId, JobState, Launcher, NodeName, NodeRole, WorkerKey
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.record import Entry, Record, decision_bytes, replay
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import (
    Event,
    JobCancelRequested,
    NodeSilent,
    OperatorAction,
    OperatorAsked,
)
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import (
    Loan,
    Placement,
    Preempt,
    Reclaim,
    Resize,
    Start,
)
from coordinator.sim.run.cluster import Delays
from tests.draws import words
from tests.harness.cluster.engine import CHAT, EngineHarness

CALM_S = 20.0
"""Virtual time in which reports, stops and starts that are under way come to their end.

Not more: a torn gang that went on would come to the end of its work and leave no trace.
"""
START_S = 15.0  # start_p99_s
NODES = tuple(NodeName(name) for name in ("t0", "t1", "i0", "i1"))


class Op(NamedTuple):
    """One random step: what, and numbers that it uses as it likes."""

    what: str
    a: int
    b: int
    c: int


WEIGHTS = {
    "submit": 3,
    "start": 4,
    "swap": 3,
    "resize": 3,
    "preempt": 1,
    "cancel": 2,
    "loan": 3,
    "reclaim": 2,
    "wait": 4,
    "crash": 1,
    "boot": 2,
    "silent": 1,
    "deaf": 2,
    "fail": 2,
    "amnesia": 1,
    "recall": 1,
    "drain": 1,
    "window": 2,
    "uncordon": 2,
    "confirm": 1,
    "remove": 2,
    "label": 3,
}
ASKED = {
    "recall": OperatorAction.RECALL,
    "drain": OperatorAction.DRAIN,
    "window": OperatorAction.DRAIN_AT,
    "uncordon": OperatorAction.UNCORDON,
    "confirm": OperatorAction.CONFIRM_DEAD,
    "remove": OperatorAction.REMOVE,
    "label": OperatorAction.LABEL,
}


def steps(*, without: str = "") -> st.SearchStrategy[list[Op]]:
    """A story of one cell; `without` leaves out one kind of step."""
    kinds = [what for what, weight in WEIGHTS.items() for _ in range(weight) if what != without]

    def op(word: int) -> Op:
        number, kind = divmod(word, len(kinds))
        return Op(kinds[kind], number % 10, number // 10 % 10, number // 100 % 10)

    return words(30, 60).map(lambda story: [op(word) for word in story])


# Without the phase that explains: a story takes milliseconds, and to explain one tells hundreds.
often = settings(
    max_examples=200,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
DELAYS = st.builds(
    Delays,
    ready_s=st.sampled_from([0.0, 2.0]),
    start_s=st.sampled_from([0.0, 1.0]),
    stop_s=st.sampled_from([0.0, 7.0]),
    drain_s=st.sampled_from([0.0, 3.0]),
    warm_up_s=st.sampled_from([0.0, 5.0]),
    report_s=st.sampled_from([0.0, 1.0]),
)


def perform(harness: EngineHarness, op: Op) -> None:
    """Carry out one random step."""
    if op.what in ("submit", "start", "swap", "resize", "preempt", "cancel", "loan", "reclaim"):
        decide(harness, op)
    else:
        happen(harness, op, NODES[op.b % len(NODES)])
    harness.settle()


def choose(harness: EngineHarness, number: int, *states: JobState) -> JobEntry | None:
    """A job in one of the states, or now and then any job at all."""
    jobs = list(harness.engine.state.jobs.values())
    fitting = jobs if number == 9 else [job for job in jobs if job.state in states]
    return fitting[number % len(fitting)] if fitting else None


def decide(harness: EngineHarness, op: Op) -> None:
    """What a policy or a user might say, right or wrong; neither looks at what is free."""
    node = NODES[op.b % len(NODES)]
    active = (JobState.RUNNING, JobState.STARTING, JobState.RESIZING)
    match op.what:
        case "submit":
            low = 1 + op.a % 2
            harness.submit(
                f"j{len(harness.sim.decisions)}-{harness.sim.loop.events}",
                workers=(low, low + op.b % 3),
                gpus_per_worker=(8, 4, 2, 8)[op.c % 4],
                work_s=30.0 * (1 + op.b),
                max_restarts=op.c % 2,
                launcher=(Launcher.NONE, Launcher.TORCHRUN)[op.a // 2 % 2],
                require=("fast",) if op.b == 2 else (),
                exclude=("fast|slow",) if op.b == 3 else (),
                time_limit_s=None if op.a < 5 else 20.0 * (1 + op.b),
            )
        case "start" if job := choose(harness, op.a, JobState.PENDING):
            harness.decide(any_start(harness, job, op))
        case "swap" if job := choose(harness, op.a, JobState.PENDING):
            # on the node that another job is told to leave: it is the nominee until that is gone
            victims = [worker.key.job_id for _, worker in harness.workers_on(node)]
            stops = [Preempt(job_id=name, reason="random") for name in dict.fromkeys(victims)]
            harness.decide(*stops, any_start(harness, job, op))
        case "resize" if job := choose(harness, op.a, JobState.RUNNING):
            added = (Placement(node=node, worker_count=1 + op.c % 2, is_flexible=True),)
            removed = tuple(
                i for i, worker in job.workers.items() if worker.is_flexible or op.c > 8
            )
            harness.decide(
                Resize(
                    job_id=job.job_id,
                    added=added if op.c % 3 else (),
                    removed_workers=removed if op.c % 2 else (),
                    reason="random",
                )
            )
        case "preempt" if job := choose(harness, op.a, *active):
            harness.decide(Preempt(job_id=job.job_id, node=node, reason="random"))
        case "cancel" if job := choose(harness, op.a, *JobState):
            harness.sim.handle(JobCancelRequested(job_id=job.job_id, by="u"))
        case "loan":
            harness.decide(Loan(node=node, service=CHAT, reason="random"), lend=True)
        case "reclaim":
            reclaim = Reclaim(node=node, service=CHAT, deadline_s=30.0, reason="random")
            harness.decide(reclaim, lend=True)
        case _:
            pass


def any_start(harness: EngineHarness, job: JobEntry, op: Op) -> Start:
    """The base gang on one or two nodes, most often on nodes that might take it."""
    wild = op.c == 9
    roles = (NodeRole.TRAINING, NodeRole.ON_LOAN)
    known = harness.engine.state.nodes
    names = [name for name, node in known.items() if wild or node.role in roles] or list(NODES)
    base = job.spec.workers.min
    first = base if op.c % 2 else max(1, base // 2)
    placements = (
        Placement(node=names[op.b % len(names)], worker_count=first),
        Placement(node=names[(op.b + 1) % len(names)], worker_count=base - first),
    )
    return Start(
        job_id=job.job_id,
        gpu_type="H100",
        placements=tuple(p for p in placements if p.worker_count),
        estimated_runtime_s=1.0,
        estimate_source="random",
        reason="random",
    )


def happen(harness: EngineHarness, op: Op, node: NodeName) -> None:
    """What the world does by itself."""
    pretend = harness.sim.nodes[node]
    match op.what:
        case "wait":
            harness.wait((1.0, 3.0, 8.0, 2.0, 40.0)[op.a % 5])
        case "crash":
            pretend.crash()
        case "boot" if not pretend.is_up:
            harness.deaf.discard(node)
            pretend.boot()
        case "silent":
            harness.sim.handle(NodeSilent(node=node, silent_s=20.0))
        case "deaf":
            harness.toggle_deaf(node)
        case "amnesia":
            harness.lose_journal()
        case "fail":
            for key in pretend.keys(WorkerPhase.RUNNING)[:1]:
                pretend.exited(key, 1)
        # An operator who vouches for a node that still runs would lie; that is not our bug.
        case what if what in ASKED and not (what == "confirm" and pretend.is_up):
            target = "" if what == "recall" else node
            later_s = 20.0 if what in ("drain", "window") and op.c % 2 else None
            begins_s = (5.0, 60.0, 100.0, 300.0)[op.a % 4] if what == "window" else None
            label = ("fast", "fast-")[op.c % 2] if what == "label" else ""
            asked = OperatorAsked(
                action=ASKED[what],
                by="ops/me",
                target=target,
                value=label,
                deadline_s=later_s,
                in_s=begins_s,
            )
            harness.sim.handle(asked)
        case _:
            pass


def no_gpu_holds_two_exclusive_workers(harness: EngineHarness) -> None:
    """On the nodes themselves: no two processes on one GPU, not even while one is ending."""
    for node in harness.sim.nodes.values():
        on_gpu: dict[str, WorkerKey] = {}
        if not node.is_up:
            continue
        for order in node.orders(WorkerPhase.RUNNING, WorkerPhase.STOPPING):
            for uuid in order.gpu_uuids:
                assert uuid not in on_gpu, f"{uuid} runs {on_gpu[uuid]} and {order.key}"
                on_gpu[uuid] = order.key


class Placed:
    """Which workers each job was given, step by step; labels change only between steps."""

    def __init__(self) -> None:
        self._seen: set[WorkerKey] = set()

    def nothing_starts_on_a_node_that_its_job_may_not_use(self, harness: EngineHarness) -> None:
        """A worker that is new has a node with the label that its job requires, and none with one
        that it excludes.
        """
        state = harness.engine.state
        for job in state.live():
            for worker in job.workers.values():
                node = state.nodes.get(worker.node)
                if worker.key in self._seen or node is None:
                    continue
                self._seen.add(worker.key)
                is_fast = "fast" in node.labels.now
                assert is_fast or not job.spec.require, f"{worker.key} is on {node.name}"
                assert not (is_fast and job.spec.exclude), f"{worker.key} is on {node.name}"


class Gangs:
    """What the nodes really hold of each attempt, at every change; asks no engine.

    A base worker is one whose order is not flexible; a gang has as many as its job's minimum.
    """

    def __init__(self, harness: EngineHarness) -> None:
        self._harness = harness
        self._were_ready: dict[tuple[JobId, int], set[WorkerKey]] = {}
        self._adopted: set[tuple[JobId, int]] = set()
        for node in harness.sim.nodes.values():
            node.report_soon = partial(self._changed, node.report_soon)  # type: ignore[method-assign]  # a tap, not a mock

    def _changed(self, report_soon: Callable[[], None]) -> None:
        report_soon()
        self.start_whole()

    def _orders(self, *phases: WorkerPhase) -> list[WorkerOrder]:
        nodes = self._harness.sim.nodes.values()
        return [order for node in nodes if node.is_up for order in node.orders(*phases)]

    def forget(self) -> None:
        """The journal is lost now: whatever runs goes on as it is, because that stops nothing."""
        for order in self._orders(WorkerPhase.RUNNING):
            self._adopted.add((order.key.job_id, order.key.attempt))

    def start_whole(self) -> None:
        """No worker has begun to compute before every base worker of its attempt was ready once."""
        for order in self._orders(WorkerPhase.READY, WorkerPhase.RUNNING):
            if not order.is_flexible:
                gang = (order.key.job_id, order.key.attempt)
                self._were_ready.setdefault(gang, set()).add(order.key)
        for order in self._orders(WorkerPhase.RUNNING):
            ready = self._were_ready.get((order.key.job_id, order.key.attempt), set())
            assert len(ready) >= order.spec.workers_on(order.gpu_type).min, (
                f"{order.key} runs, ready were {ready}"
            )

    def _running(self) -> dict[tuple[JobId, int], list[WorkerOrder]]:
        running: dict[tuple[JobId, int], list[WorkerOrder]] = {}
        for order in self._orders(WorkerPhase.RUNNING):
            running.setdefault((order.key.job_id, order.key.attempt), []).append(order)
        return running

    def tear(self) -> None:
        """One worker of each attempt fails, just now."""
        torn = [min(order.key for order in orders) for orders in self._running().values()]
        for node in self._harness.sim.nodes.values():
            for key in node.keys(WorkerPhase.RUNNING):
                if key in torn:
                    node.exited(key, 1)

    def are_whole_or_absent(self) -> None:
        """Of each attempt every base worker computes, or no worker does."""
        for gang, orders in self._running().items():
            if gang in self._adopted:
                continue
            base = [order.key for order in orders if not order.is_flexible]
            assert len(base) == orders[0].spec.workers_on(orders[0].gpu_type).min, (
                f"{gang} runs with {base}"
            )


class Windows:
    """Which workers there were before each event, and when the windows of their nodes begin.

    A worker is new on a node when an event gives it to its job; by then the window was ordered.
    """

    def __init__(self, harness: EngineHarness) -> None:
        self._harness = harness
        self._known = self._workers()
        self._begin_at_s = self._instants()

    def _workers(self) -> dict[WorkerKey, NodeName]:
        jobs = self._harness.engine.state.live()
        return {worker.key: worker.node for job in jobs for worker in job.workers.values()}

    def _instants(self) -> dict[NodeName, float]:
        state = self._harness.engine.state
        return {name: window.at_s for name, window in state.windows.items()}

    def watch(self) -> None:
        """Look after each event from now on, of the engine that there is."""
        engine = self._harness.engine
        real = engine.handle

        def handle(event: Event, *, now_s: float) -> Outcome:
            outcome = real(event, now_s=now_s)
            self.nothing_that_starts_overruns_a_window()
            return outcome

        engine.handle = handle  # type: ignore[method-assign]  # a tap, not a mock

    def nothing_that_starts_overruns_a_window(self) -> None:
        """Its time limit ends a new worker on a training node, with its grace, before the node is
        drained; a job without a time limit gets none there.
        """
        state, before = self._harness.engine.state, self._known
        self._known = self._workers()
        for key, name in self._known.items():
            at_s = self._begin_at_s.get(name)
            if key in before or at_s is None or not name.startswith("t"):
                continue
            job = state.jobs[key.job_id]
            limit_s, ran_at_s = job.spec.time_limit_s, job.attempt.ran_at_s
            assert limit_s is not None, f"{key} has no time limit, and {name} is drained at {at_s}"
            begins_at_s = state.now_s + START_S if ran_at_s is None else ran_at_s
            end_s = begins_at_s + limit_s + job.spec.checkpoint.grace_s
            assert end_s <= at_s, f"{key} may end at {end_s}, and {name} is drained at {at_s}"
        self._begin_at_s = self._instants()


def calm_down(harness: EngineHarness) -> None:
    """No more faults: every node is there and hears, and time for what is under way."""
    for name, node in harness.sim.nodes.items():
        if name in harness.deaf:
            harness.toggle_deaf(name)
        if not node.is_up:
            node.boot()
        node.report_soon()
    harness.wait(CALM_S)


def no_attempt_runs_beside_a_newer_one(harness: EngineHarness) -> None:
    """Two attempts of one job never compute at the same time."""
    running: dict[JobId, set[int]] = {}
    for node in harness.sim.nodes.values():
        for order in node.orders(WorkerPhase.RUNNING) if node.is_up else ():
            running.setdefault(order.key.job_id, set()).add(order.key.attempt)
    assert all(len(attempts) == 1 for attempts in running.values()), running


def no_cancelled_job_computes(harness: EngineHarness) -> None:
    """A cancel that is over has ended every worker: what may run on a silent node is waited for."""
    known = harness.engine.state.jobs
    over = {name for name, job in known.items() if job.state == JobState.CANCELLED}
    for node in harness.sim.nodes.values():
        for order in node.orders(WorkerPhase.RUNNING, WorkerPhase.STOPPING) if node.is_up else ():
            is_reserved = order.phase == OrderPhase.RESERVE
            assert is_reserved or order.key.job_id not in over, f"{order.key} runs"


@often
@given(steps(), DELAYS)
def test_safety_holds_under_random_decisions_and_faults(ops: list[Op], delays: Delays) -> None:
    """No GPU twice, gangs start whole, attempts alone, nothing that starts overruns a window, and
    the engine's own invariants.

    A gang that a fault has torn is ended once its nodes are heard: none goes on in part.
    """
    harness = EngineHarness(delays=delays, gang_ready_timeout_s=30.0)
    gangs, placed, windows = Gangs(harness), Placed(), Windows(harness)
    windows.watch()
    for op in ops:
        if op.what == "amnesia":
            gangs.forget()
        perform(harness, op)
        if op.what == "amnesia":  # with its orders, and in a new engine
            windows = Windows(harness)
            windows.watch()
        no_gpu_holds_two_exclusive_workers(harness)
        no_attempt_runs_beside_a_newer_one(harness)
        no_cancelled_job_computes(harness)
        placed.nothing_starts_on_a_node_that_its_job_may_not_use(harness)
    gangs.tear()
    calm_down(harness)
    gangs.are_whole_or_absent()


@settings(often, max_examples=40)
@given(steps(without="amnesia"))
def test_a_journal_replays_to_identical_decisions_and_state(ops: list[Op]) -> None:
    """What entered the engine, entered again, gives the same bytes."""
    journal: list[tuple[float, Event, Outcome]] = []
    harness = EngineHarness()
    real = harness.engine.handle

    def recording(event: Event, *, now_s: float) -> Outcome:
        outcome = real(event, now_s=now_s)
        journal.append((now_s, event, outcome))
        return outcome

    start_state = harness.engine.encode_state()
    harness.engine.handle = recording  # type: ignore[method-assign]  # a tap, not a mock
    for op in ops:
        perform(harness, op)
    again = Engine(harness.engine.settings, decode_state(start_state))
    again.policy = harness.engine.policy
    for now_s, event, outcome in journal:
        harness.script(outcome)
        record = Record(
            number=1,
            after=0,
            epoch=1,
            writer="w",
            entries=(Entry(now_s, event),),
            decisions=outcome.decisions,
        )
        assert replay(again, record), decision_bytes(outcome.decisions)
    assert again.encode_state() == harness.engine.encode_state()
