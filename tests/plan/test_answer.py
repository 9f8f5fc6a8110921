"""A plan says what the engine then does, and leaves no trace. Cells come from random stories."""

from __future__ import annotations

import itertools
import time
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.messages import OrderPhase, WorkerPhase
from common.model import (
    ArraySpec,
    Dependency,
    DependencyKind,
    JobId,
    JobSpec,
    JobState,
    Launcher,
    Mode,
    NodeName,
    NodeRole,
    WorkerKey,
)
from common.plans import Plan, PlanKind, Planned
from coordinator.engine import what_if
from coordinator.engine.engine import Engine
from coordinator.engine.record import decision_bytes
from coordinator.engine.state.events import (
    JobSubmitted,
    LoadMeasured,
    LoanPassDue,
    OperatorAction,
    OperatorAsked,
    PassDue,
)
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.engine.what_if import WhatIf
from coordinator.plan.answer import answer
from coordinator.plan.decide import JOB_ID, Change, change_of
from coordinator.plan.run import Run
from coordinator.policies.contract.decisions import Decision
from coordinator.policies.registry import policy
from coordinator.sim.run.cluster import Delays
from coordinator.workloads.shaping import linear
from tests.draws import pick, whole
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import CHAT, EngineHarness
from tests.properties.test_engine_safety import Op, often, perform, steps
from tests.tables import each_row

POLICIES = ("aryl", "fifo", "tiresias", "gandiva", "themis")
PLAYED_S = 3_000.0
SOON_S = 20.0
LED_S = (0.0, 1.0, 5.0, 200.0)
"""How long the policy leads before the question: loans, stops and starts of its own are under way,
and jobs have ended.
"""
ORDERS = {
    25: (OperatorAction.RECALL, CHAT),
    45: (OperatorAction.DRAIN, "t0"),
}
TASK_S = 40.0
RESTING = (JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED)


def question(
    engine: Engine, *, now_s: float | None = None, loan_pass_in_s: float = 60.0, **request: Any
) -> WhatIf:
    """A question of tenant ops, as it comes out of the pipe; by default at the last event."""
    now_s = engine.state.now_s if now_s is None else now_s
    data = what_if.ask(
        engine,
        Plan(**request),
        tenant="ops",
        user="ada",
        now_s=now_s,
        loan_pass_at_s=now_s + loan_pass_in_s,
    )
    return what_if.read(data)


def plan(engine: Engine, **request: Any) -> Planned:
    """The answer to a question."""
    return answer(question(engine, **request), clock_s=time.monotonic)


class Array(NamedTuple):
    """A job array of the cell; `gate` is `held`, `after` (all else that lives) or empty."""

    tasks: int
    throttle: int | None = None
    gate: str = ""


def submit_array(cell: EngineHarness, name: str, array: Array) -> None:
    """Submit an array; each task has its work, as a job has that is added."""
    fields: dict[str, Any] = {}
    if array.gate == "after":
        live = (*cell.engine.state.live_jobs, *cell.engine.state.live_arrays)
        fields["depends_on"] = tuple(
            Dependency(job=one, when=DependencyKind.ENDED) for one in live[-3:]
        )
    spec = make_spec(
        name,
        gpus_per_worker=4,
        expected_runtime_s=TASK_S,
        array=ArraySpec(indices=f"0-{array.tasks - 1}", throttle=array.throttle),
        is_held=array.gate == "held",
        **fields,
    )
    for index in range(array.tasks):
        cell.sim.runtime.add(
            JobId(f"{name}_{index}"),
            work_s=TASK_S,
            speedup=linear(spec.workers),
            gpus_per_worker=4,
        )
    cell.sim.handle(JobSubmitted(job_id=JobId(name), spec=spec, tenant="trace", user="u"))


def lived(name: str, ops: list[Op], delays: Delays, arrays: list[Array]) -> EngineHarness:
    """A cell after a story, with loans under way and nodes that are silent; a policy takes over."""
    service = ServiceSettings(
        name=CHAT, capacity_per_node=10.0, mode=Mode.ACT, reclaim_deadline_s=300.0, min_serving=0
    )
    cell = EngineHarness(
        delays=delays,
        settings=EngineSettings(policy=name, services=(service,), min_runtime_s=0.0),
    )
    for op in ops:
        perform(cell, op)
    cell.engine.policy = policy(name)
    for number, array in enumerate(arrays):
        submit_array(cell, f"a{number}", array)
    cell.sim.ask_pass()
    cell.wait(LED_S[len(ops) % len(LED_S)])
    return cell


def as_array(spec: JobSpec, number: int) -> JobSpec:
    """The job as an array, with a throttle or without one."""
    return replace(spec, array=ArraySpec(indices="0-6", throttle=(None, 1, 3)[number // 2 % 3]))


def asked(kind: PlanKind, number: int) -> dict[str, Any]:
    """A question of a kind."""
    low = 1 + number % 2
    spec = make_spec("new", workers=(low, low + number % 3), gpus_per_worker=(8, 4, 2)[number % 3])
    match kind:
        case PlanKind.JOB:
            return {"spec": spec if number % 2 else as_array(spec, number)}
        case PlanKind.DRAIN:
            deadline_s = 20.0 if number % 3 == 0 else None
            return {"target": ("t0", "t1", "i0", "i1")[number % 4], "deadline_s": deadline_s}
        case PlanKind.RECALL:
            return {"target": ("", CHAT)[number % 2]}
        case PlanKind.LOAN:
            return {"target": CHAT}
        case PlanKind.TENANT:
            return {"target": ("trace", "other")[number % 2], "guarantee_gpus": 8 * (number % 3)}
        case PlanKind.POLICY:
            return {"target": POLICIES[number % len(POLICIES)]}
        case PlanKind.QUEUE:
            return {}


def really(engine: Engine, kind: PlanKind, request: dict[str, Any]) -> tuple[Decision, ...]:
    """The decisions of the live loop when the change really comes now."""
    now_s, target = engine.state.now_s, request.get("target", "")
    match kind:
        case PlanKind.JOB:
            spec = request["spec"]
            event: JobSubmitted | OperatorAsked = JobSubmitted(
                job_id=JobId(JOB_ID),
                spec=spec,
                tenant="ops",
                user="ada",
            )
        case PlanKind.DRAIN:
            event = OperatorAsked(
                action=OperatorAction.DRAIN,
                by="ops/ada",
                target=target,
                deadline_s=request["deadline_s"],
            )
        case PlanKind.LOAN:
            event = OperatorAsked(
                action=OperatorAction.SET_MODE, by="ops/ada", target=target, value=Mode.ACT
            )
        case _:
            event = OperatorAsked(action=OperatorAction.RECALL, by="ops/ada", target=target)
    outcomes = [engine.handle(event, now_s=now_s)]
    if outcomes[0].needs_loan_pass:
        outcomes.append(engine.handle(LoanPassDue(), now_s=now_s))
    outcomes.append(engine.handle(PassDue(), now_s=now_s))
    return tuple(decision for outcome in outcomes for decision in outcome.decisions)


def told_to_run(run: Run) -> set[WorkerKey]:
    """Workers that are ready and have their order to run."""
    return {
        worker.key
        for job in run.state.live()
        for worker in job.workers.values()
        if (worker.phase, worker.order) == (WorkerPhase.READY, OrderPhase.RUN)
    }


def stuck(run: Run) -> list[str]:
    """Jobs and nodes that are still on their way to something, though all nodes that they need
    answer."""
    nodes = run.simulation.nodes
    up = {name for name, node in nodes.items() if node.is_up}
    jobs = [
        f"{job.job_id} is {job.state}"
        for job in run.state.live()
        if (job.state not in RESTING or job.after_vacating is not None)
        and {worker.node for worker in job.workers.values()} <= up
    ]
    on_way = (NodeRole.DRAINING, NodeRole.VACATING, NodeRole.WARMING)
    return jobs + [
        f"{name} is {nodes[name].role}" for name in sorted(up) if nodes[name].role in on_way
    ]


DELAYS = st.builds(
    Delays,
    ready_s=pick(0.0, 2.0),
    stop_s=pick(0.0, 7.0),
    drain_s=pick(0.0, 3.0),
    warm_up_s=pick(0.0, 5.0),
    report_s=pick(0.0, 1.0),
)
ARRAYS = st.lists(
    st.builds(Array, whole(1, 70), pick(None, 1, 3), pick("", "", "held", "after")), max_size=2
)
EVENTS = pick(PlanKind.JOB, PlanKind.DRAIN, PlanKind.RECALL, PlanKind.LOAN)


@pytest.mark.slow
@settings(often, max_examples=25)
@given(steps(), DELAYS, ARRAYS, pick(*POLICIES), EVENTS, whole(0, 11))
def test_a_plan_decides_what_the_engine_then_decides(
    ops: list[Op],
    delays: Delays,
    arrays: list[Array],
    name: str,
    kind: PlanKind,
    number: int,
) -> None:
    """At the same instant: byte for byte the same first decisions, from the live part alone."""
    cell = lived(name, ops, delays, arrays)
    request = asked(kind, number)
    put = question(cell.engine, kind=kind, **request)
    run = Run(put, change_of(put))
    expected = really(cell.engine, kind, request)
    assert decision_bytes(run.decided.decisions) == decision_bytes(expected)


@pytest.mark.slow
@settings(often, max_examples=25)
@given(steps(), DELAYS, ARRAYS, pick(*POLICIES), pick(*PlanKind), whole(0, 11))
def test_a_played_cell_keeps_the_rules_and_the_real_one_keeps_its_state(
    ops: list[Op],
    delays: Delays,
    arrays: list[Array],
    name: str,
    kind: PlanKind,
    number: int,
) -> None:
    """However the cell was found, playing it ahead breaks no invariant; the state is untouched."""
    cell = lived(name, ops, delays, arrays)
    before = cell.engine.encode_state()
    put = question(cell.engine, kind=kind, **asked(kind, number))
    plan(cell.engine, kind=kind, horizon_s=PLAYED_S, limit_s=60.0, **asked(kind, number))
    assert cell.engine.encode_state() == before
    for change in (change_of(put), Change(settings=put.settings)):
        run = Run(put, change)
        run.play(PLAYED_S, is_over=lambda: False, is_done=lambda run: False)
        assert run.engine.check() == []
        assert stuck(run) == []


def test_whatever_is_under_way_comes_to_its_end_in_a_plan() -> None:
    """Asked in each second of loans, starts, a recall, a drain and a way home: no step is lost."""
    service = ServiceSettings(
        name=CHAT, capacity_per_node=10.0, mode=Mode.ACT, reclaim_deadline_s=300.0, min_serving=0
    )
    service = replace(service, hold_off_s=0.0, headroom_ratio=0.0)
    slow = Delays(
        report_s=1.0, ready_s=3.0, start_s=2.0, stop_s=4.0, drain_s=3.0, device_free_s=3.0,
        warm_up_s=4.0,
    )  # fmt: skip
    cell = EngineHarness(
        delays=slow, settings=EngineSettings(services=(service,), min_runtime_s=0.0)
    )
    cell.engine.policy = policy("aryl")
    cell.sim.handle(LoadMeasured(service=CHAT, load=0.0))
    for name in "abcd":
        cell.submit(name, work_s=600.0, workers=(1, 2), launcher=Launcher.TORCHRUN)
    seen: set[str] = set()
    for second in range(60):
        if second in ORDERS:
            action, target = ORDERS[second]
            cell.sim.handle(OperatorAsked(action=action, by="ops/ada", target=target))
        seen |= {node.role for node in cell.engine.state.nodes.values()}
        seen |= {
            f"{w.phase} {w.stop}" for j in cell.engine.state.live() for w in j.workers.values()
        }
        put = question(cell.engine, now_s=cell.sim.loop.now_s, kind=PlanKind.RECALL)
        run = Run(put, Change(settings=put.settings))
        ready = told_to_run(run)
        run.play(SOON_S, is_over=lambda: False, is_done=lambda run: False)
        assert not ready & told_to_run(run), f"asked after {second} s"
        run.play(PLAYED_S, is_over=lambda: False, is_done=lambda run: False)
        assert run.engine.check() == []
        assert stuck(run) == [], f"asked after {second} s"
        assert run.state.counters.gang_timeouts == 0, f"asked after {second} s"
        cell.wait(1.0)
    assert seen >= {*NodeRole} - {NodeRole.LOST, NodeRole.QUARANTINED}, seen
    phases = ("reserving None", "ready None", "running None", "stopping preempt")
    assert seen >= set(phases), seen


def test_a_drain_at_an_instant_is_played_until_the_node_is_empty() -> None:
    """A node without work until then is not empty before, and what is there then is stopped then:
    as the cell then has it."""
    cell = EngineHarness(inference=0, settings=EngineSettings(policy="fifo"))
    cell.engine.policy = policy("fifo")
    asked: dict[str, Any] = {"kind": PlanKind.DRAIN, "target": "t0", "in_s": 300.0}
    idle = plan(cell.engine, **asked)
    assert [move.in_s for move in idle.moves] == [pytest.approx(300.0, abs=1.0)]
    job = cell.submit("stays", work_s=900.0)
    cell.sim.ask_pass()
    cell.wait(1.0)
    [node] = {worker.node for worker in job.workers.values()}
    asked["target"] = node
    found = plan(cell.engine, **asked)
    assert [(one.job_id, one.what) for one in found.effects] == [("stays", "preempted")]
    assert found.effects[0].in_s == pytest.approx(300.0, abs=1.0)
    cell.sim.handle(
        OperatorAsked(action=OperatorAction.DRAIN_AT, by="ops/ada", target=node, in_s=300.0)
    )
    cell.wait(299.0)
    assert job.counts.preemptions == 0
    cell.wait(2.0)
    assert job.counts.preemptions == 1


def test_a_job_starts_when_and_where_the_plan_says() -> None:
    """In a cell whose jobs run as long as they declare, the plan's start is the real one."""
    cell = EngineHarness(inference=0, settings=EngineSettings(policy="fifo"))
    cell.engine.policy = policy("fifo")
    for name, work_s in (("a", 500.0), ("b", 900.0)):
        cell.submit(name, work_s=work_s)
    cell.sim.ask_pass()
    cell.wait(100.0)
    found = plan(
        cell.engine,
        now_s=cell.sim.loop.now_s,
        kind=PlanKind.JOB,
        spec=make_spec("new", gpus_per_worker=8),
    )
    assert found.start is not None
    assert found.start.in_s is not None
    assert [end.name for end in found.start.after] == ["a"]
    assert found.start.waits_for
    began_s = cell.sim.loop.now_s
    job = cell.submit("new", work_s=100.0)
    cell.wait(found.start.in_s + 5.0)
    assert job.started_at_s == pytest.approx(began_s + found.start.in_s, abs=5.0)
    assert {worker.node for worker in job.workers.values()} == set(map(NodeName, found.start.nodes))


def test_a_task_starts_when_the_plan_says() -> None:
    """A throttled array lets in a task for each that ends, in a plan as in the cell.

    An array in question starts with its first task.
    """
    cell = EngineHarness(training=1, inference=0, settings=EngineSettings(policy="fifo"))
    cell.engine.policy = policy("fifo")
    submit_array(cell, "a", Array(tasks=6, throttle=1))
    cell.wait(10.0)
    now_s = cell.sim.loop.now_s
    put = question(cell.engine, now_s=now_s, kind=PlanKind.RECALL)
    run = Run(put, Change(settings=put.settings))
    run.play(PLAYED_S, is_over=lambda: False, is_done=lambda run: False)
    starts = {job_id: run.began_s + one.starts[0] for job_id, one in run.jobs.items() if one.starts}
    spec = as_array(make_spec("new", gpus_per_worker=8, expected_runtime_s=50.0), 2)
    found = plan(cell.engine, now_s=now_s, kind=PlanKind.JOB, spec=spec)
    assert found.start is not None
    assert found.start.in_s == pytest.approx(6 * TASK_S - now_s, abs=0.6 * TASK_S)
    assert [end.name for end in found.start.after][-1:] == ["a"]
    cell.wait(6 * TASK_S + 10.0)
    real = {job_id: job.started_at_s for job_id, job in cell.engine.state.jobs.items()}
    assert len(real) == 6
    assert starts == {job_id: pytest.approx(real[job_id], abs=0.6 * TASK_S) for job_id in starts}
    assert len(starts) == 5


def test_a_job_that_waits_starts_when_its_plan_says() -> None:
    """Asked for by its id or as one of the queue, it has this start in the plan, and no change."""
    cell = EngineHarness(training=1, inference=0, settings=EngineSettings(policy="fifo"))
    cell.engine.policy = policy("fifo")
    for name, work_s in (("a", 500.0), ("b", 300.0)):
        cell.submit(name, work_s=work_s)
    submit_array(cell, "c", Array(tasks=3, throttle=1))
    cell.wait(100.0)
    now_s = cell.sim.loop.now_s
    found = {
        name: plan(cell.engine, now_s=now_s, kind=PlanKind.JOB, target=name) for name in ("b", "c")
    }
    queue = plan(cell.engine, now_s=now_s, kind=PlanKind.QUEUE)
    starts = {name: one.start for name, one in found.items()}
    assert {turn.job_id: (turn.in_s, turn.nodes) for turn in queue.turns or ()} == {
        name: (start.in_s, start.nodes) for name, start in starts.items() if start is not None
    }
    assert not queue.has_changes
    cell.wait(800.0)
    for name, first in (("b", "b"), ("c", "c_0")):
        start = found[name].start
        assert start is not None
        assert start.in_s is not None
        really_s = cell.engine.state.jobs[JobId(first)].started_at_s
        assert now_s + start.in_s == pytest.approx(really_s, abs=10.0)
        assert start.waits_for
        assert start.after
        assert not found[name].has_changes


def test_a_queue_is_played_until_the_next_task_of_each_array_starts() -> None:
    """Also where nothing else waits: its other tasks run, or it waits for another job."""
    cell = EngineHarness(training=1, inference=0, settings=EngineSettings(policy="fifo"))
    cell.engine.policy = policy("fifo")
    submit_array(cell, "a", Array(tasks=3, throttle=1))
    cell.wait(10.0)
    queue = plan(cell.engine, now_s=cell.sim.loop.now_s, kind=PlanKind.QUEUE)
    [turn] = queue.turns or ()
    assert (turn.job_id, turn.gpus) == ("a", 4)
    assert turn.in_s == pytest.approx(TASK_S - 10.0, abs=0.6 * TASK_S)
    submit_array(cell, "b", Array(tasks=3, throttle=1, gate="after"))
    after = make_spec("c", depends_on=(Dependency(job="b", when=DependencyKind.ENDED),))
    cell.sim.handle(JobSubmitted(job_id=JobId("c"), spec=after, tenant="trace", user="u"))
    now_s = cell.sim.loop.now_s
    queue = plan(cell.engine, now_s=now_s, kind=PlanKind.QUEUE)
    found = plan(cell.engine, now_s=now_s, kind=PlanKind.JOB, target="c")
    assert [turn.job_id for turn in queue.turns or ()] == ["a", "b", "c"]
    assert found.start is not None
    assert (found.start.in_s, found.start.unknown) == ((queue.turns or ())[2].in_s, "")


def test_a_plan_that_its_limit_ends_says_which_option_gives_it_more() -> None:
    """The option stands before the command."""
    cell = EngineHarness(training=1, inference=0, settings=EngineSettings(policy="fifo"))
    cell.engine.policy = policy("fifo")
    for name in ("a", "b"):
        cell.submit(name, work_s=500.0)
    cell.wait(10.0)
    ticks = itertools.count()
    put = question(cell.engine, now_s=cell.sim.loop.now_s, kind=PlanKind.QUEUE)
    found = answer(put, clock_s=lambda: 1e6 * next(ticks))
    assert found.assumptions[-1].endswith("; `aryl --timeout S plan` gives it more")


HELD = make_spec("held", is_held=True)
LARGE = make_spec("large", workers=(9, 9), gpus_per_worker=8)
GATED: dict[str, tuple[JobSpec, str]] = {
    "held": (HELD, "it is held until a person releases it"),
    "after a held one": (
        make_spec("new", depends_on=(Dependency(job="held", when=DependencyKind.ENDED),)),
        "what it depends on is held, cannot run, or has no estimate of its end",
    ),
    "too large": (LARGE, "no node of the fleet as it is can run it"),
}


@each_row("why", GATED)
def test_a_plan_ends_where_only_jobs_wait_that_cannot_start(why: str) -> None:
    """Held jobs, those behind them and those beyond the fleet are not waited for."""
    cell = EngineHarness(training=1, inference=0, settings=EngineSettings(policy="fifo-skip"))
    cell.engine.policy = policy("fifo-skip")
    for waiting in (HELD, LARGE):
        job_id = JobId(waiting.name)
        cell.sim.handle(JobSubmitted(job_id=job_id, spec=waiting, tenant="trace", user="u"))
    cell.submit("runs", work_s=50_000.0)
    cell.wait(10.0)
    spec, unknown = GATED[why]
    found = plan(cell.engine, now_s=cell.sim.loop.now_s, kind=PlanKind.JOB, spec=spec)
    assert found.start is not None
    assert (found.start.in_s, found.start.unknown) == (None, unknown)
    assert found.played_s < 60.0
    assert not any("planned" in why for why in found.start.waits_for)
    runs = make_spec("new", gpus_per_worker=8, expected_runtime_s=50.0)
    after = replace(runs, depends_on=(Dependency(job="runs", when=DependencyKind.OK),))
    for spec in (runs, after):
        found = plan(cell.engine, now_s=cell.sim.loop.now_s, kind=PlanKind.JOB, spec=spec)
        assert found.start is not None
        assert found.start.in_s == pytest.approx(49_990.0, abs=10.0)


def test_a_job_after_one_that_has_ended_starts_in_its_plan() -> None:
    """The plan knows the end of the jobs that its job names, as the submission does."""
    cell = EngineHarness(inference=0, settings=EngineSettings(policy="fifo"))
    cell.engine.policy = policy("fifo")
    ended = cell.submit("a", work_s=50.0)
    cell.sim.ask_pass()
    cell.wait(100.0)
    assert ended.state == JobState.SUCCEEDED
    starts = [
        plan(
            cell.engine,
            kind=PlanKind.JOB,
            spec=make_spec("new", depends_on=(Dependency(job=ended.job_id, when=when),)),
        ).start
        for when in (DependencyKind.OK, DependencyKind.NOT_OK)
    ]
    assert starts[0] is not None
    assert starts[1] is not None
    assert (starts[0].in_s, starts[1].in_s) == (0.0, None)
    [why] = starts[1].waits_for
    assert "it waits for a to fail, which succeeded" in why


def test_who_pays_for_a_drain_is_named() -> None:
    """The job on the node is stopped with its loss, and starts again where the plan says so."""
    cell = EngineHarness(inference=0, settings=EngineSettings(policy="fifo", min_runtime_s=0.0))
    cell.engine.policy = policy("fifo")
    job = cell.submit("a", work_s=500.0)
    cell.sim.ask_pass()
    cell.wait(100.0)
    [node] = {worker.node for worker in job.workers.values()}
    found = plan(cell.engine, now_s=cell.sim.loop.now_s, kind=PlanKind.DRAIN, target=node)
    [effect] = found.effects
    assert (effect.job_id, effect.what, effect.in_s) == (job.job_id, "preempted", 0.0)
    assert effect.lost_gpu_s == pytest.approx(800.0, rel=0.05)
    assert effect.again_in_s is not None
    assert [(step.action, step.subject) for step in found.now] == [("stop", job.job_id)]
    assert found.has_changes
    idle = ({"t0", "t1"} - {node}).pop()
    assert not plan(
        cell.engine, now_s=cell.sim.loop.now_s, kind=PlanKind.DRAIN, target=idle
    ).effects


def test_a_job_behind_one_without_an_estimate_has_no_start() -> None:
    """Where only the default would say the end of the jobs that run, the start is unknown."""
    cell = EngineHarness(training=1, inference=0, settings=EngineSettings(policy="fifo"))
    cell.engine.policy = policy("fifo")
    spec = make_spec("mute", gpus_per_worker=8, expected_runtime_s=None)
    cell.sim.runtime.add(JobId("mute"), work_s=1e9, speedup=linear(spec.workers), gpus_per_worker=8)
    cell.sim.handle(JobSubmitted(job_id=JobId("mute"), spec=spec, tenant="trace", user="u"))
    cell.wait(10.0)
    found = plan(
        cell.engine,
        now_s=cell.sim.loop.now_s,
        kind=PlanKind.JOB,
        spec=make_spec("new", gpus_per_worker=8),
    )
    assert found.start is not None
    assert (found.start.in_s, found.start.unknown) == (
        None,
        "no running job has an estimate of its end",
    )
    assert not found.has_changes


def test_a_job_without_an_estimate_ends_by_its_time_limit() -> None:
    """The plan knows the start behind it, and names the limit as the source."""
    cell = EngineHarness(training=1, inference=0, settings=EngineSettings(policy="fifo"))
    cell.engine.policy = policy("fifo")
    spec = make_spec("mute", gpus_per_worker=8, expected_runtime_s=None, time_limit_s=300.0)
    cell.sim.runtime.add(JobId("mute"), work_s=1e9, speedup=linear(spec.workers), gpus_per_worker=8)
    cell.sim.handle(JobSubmitted(job_id=JobId("mute"), spec=spec, tenant="trace", user="u"))
    cell.wait(10.0)
    new = make_spec("new", gpus_per_worker=8)
    found = plan(cell.engine, now_s=cell.sim.loop.now_s, kind=PlanKind.JOB, spec=new)
    assert found.start is not None
    assert found.start.in_s == pytest.approx(300.0, abs=20.0)
    assert [(end.name, end.source) for end in found.start.after] == [("mute", "its time limit")]
