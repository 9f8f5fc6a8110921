"""Whatever a policy decides and whatever the nodes do, the engine keeps its safety properties.

Decisions here are random and often nonsense: the engine must refuse what does not fit. The oracle
is the pretend nodes' own tables, not the engine's.
"""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import WorkerPhase
from common.model import JobId, NodeName, WorkerKey
from coordinator.engine.commands import Outcome
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.events import Event, NodeSilent, OperatorAction, OperatorAsked
from coordinator.policies.decisions import Loan, Placement, Preempt, Reclaim, Resize, Start
from coordinator.service.journal import Entry, Record, decision_bytes, replay
from coordinator.sim.cluster import Delays
from tests.engine.house import CHAT, House

NODES = ("t0", "t1", "i0", "i1")


class Op(NamedTuple):
    """One random step: what, and numbers that it uses as it likes."""

    what: str
    a: int
    b: int
    c: int


STEPS = ["submit", "start", "start", "start", "resize", "preempt", "loan", "reclaim", "wait"]
STEPS += ["wait", "crash", "boot", "silent", "fail", "recall", "drain", "confirm"]

OPS = st.lists(
    st.builds(
        Op,
        st.sampled_from(STEPS),
        st.integers(0, 9),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    min_size=20,
    max_size=60,
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


def perform(house: House, op: Op) -> None:
    """Carry out one random step."""
    jobs = list(house.engine.state.jobs.values())
    job = jobs[op.a % len(jobs)] if jobs else None
    node = NodeName(NODES[op.b % len(NODES)])
    other = NodeName(NODES[op.c % len(NODES)])
    match op.what:
        case "submit":
            low = 1 + op.a % 3
            house.submit(
                f"j{len(jobs)}",
                workers=(low, low + op.b % 3),
                gpus_per_worker=(1, 2, 4, 8)[op.c % 4],
                work_s=50.0 * (1 + op.b),
                max_restarts=op.c % 2,
            )
        case "start" if job:
            base = job.spec.workers.min
            first = base if op.c % 2 else base // 2
            placements: tuple[Placement, ...] = (
                Placement(node=node, worker_count=first),
                Placement(node=other, worker_count=base - first),
            )
            placements = tuple(p for p in placements if p.worker_count)
            house.decide(
                Start(
                    job_id=job.job_id,
                    gpu_type="H100",
                    placements=placements,
                    estimated_runtime_s=1.0,
                    estimate_source="random",
                    reason="random",
                )
            )
        case "resize" if job:
            added = (Placement(node=node, worker_count=op.c % 3, is_flexible=True),)
            removed = tuple(index for index in job.workers if index % 3 == op.a % 3)
            house.decide(
                Resize(
                    job_id=job.job_id,
                    added=added if op.c % 3 else (),
                    removed_workers=removed if op.b % 2 else (),
                    reason="random",
                )
            )
        case "preempt" if job:
            house.decide(Preempt(job_id=job.job_id, reason="random"))
        case "loan":
            house.decide(Loan(node=node, service=CHAT, reason="random"), lend=True)
        case "reclaim":
            reclaim = Reclaim(node=node, service=CHAT, deadline_s=30.0, reason="random")
            house.decide(reclaim, lend=True)
        case _:
            happen(house, op, node)
    house.settle()


def happen(house: House, op: Op, node: NodeName) -> None:
    """What the world does by itself."""
    pretend = house.sim.nodes[node]
    match op.what:
        case "wait":
            house.wait(5.0 * op.a)
        case "crash":
            pretend.crash()
        case "boot" if not pretend.is_up:
            pretend.boot()
        case "silent":
            house.sim.handle(NodeSilent(node=node, silent_s=20.0))
        case "fail":
            for key in pretend.keys(WorkerPhase.RUNNING)[:1]:
                pretend.exited(key, 1)
        case "recall" | "drain" | "confirm":
            action = {
                "recall": OperatorAction.RECALL,
                "drain": OperatorAction.DRAIN,
                "confirm": OperatorAction.CONFIRM_DEAD,
            }[op.what]
            target = "" if op.what == "recall" else node
            # An operator who vouches for a node that still runs would lie; that is not our bug.
            if op.what != "confirm" or not pretend.is_up:
                house.sim.handle(OperatorAsked(action=action, by="ops/me", target=target))
        case _:
            pass


def no_gpu_holds_two_exclusive_workers(house: House) -> None:
    """On the nodes themselves: two processes never compute on one GPU."""
    for node in house.sim.nodes.values():
        on_gpu: dict[str, WorkerKey] = {}
        if not node.is_up:
            continue
        for order in node.orders(WorkerPhase.RUNNING):
            for uuid in order.gpu_uuids:
                assert uuid not in on_gpu, f"{uuid} runs {on_gpu[uuid]} and {order.key}"
                on_gpu[uuid] = order.key


def gangs_are_whole_or_absent(house: House) -> None:
    """A worker runs only if every base worker of its attempt was ready once."""
    for node in house.sim.nodes.values():
        for order in node.orders(WorkerPhase.RUNNING) if node.is_up else ():
            job = house.engine.state.jobs[order.key.job_id]
            assert order.key.attempt <= job.attempt
            if order.key.attempt == job.attempt:
                assert job.attempt_ran_at_s is not None or job.state != "starting"


def no_attempt_runs_beside_a_newer_one(house: House) -> None:
    """Two attempts of one job never compute at the same time."""
    running: dict[JobId, set[int]] = {}
    for node in house.sim.nodes.values():
        for order in node.orders(WorkerPhase.RUNNING) if node.is_up else ():
            running.setdefault(order.key.job_id, set()).add(order.key.attempt)
    assert all(len(attempts) == 1 for attempts in running.values()), running


@settings(max_examples=150, deadline=None)
@given(OPS, DELAYS)
def test_safety_holds_under_random_decisions_and_faults(ops: list[Op], delays: Delays) -> None:
    """No GPU twice, gangs whole, attempts alone, and the engine's own invariants."""
    house = House(delays=delays)
    for op in ops:
        perform(house, op)
        no_gpu_holds_two_exclusive_workers(house)
        gangs_are_whole_or_absent(house)
        no_attempt_runs_beside_a_newer_one(house)


@settings(max_examples=40, deadline=None)
@given(OPS)
def test_a_journal_replays_to_identical_decisions_and_state(ops: list[Op]) -> None:
    """What entered the engine, entered again, gives the same bytes."""
    journal: list[tuple[float, Event, Outcome]] = []
    house = House()
    real = house.engine.handle

    def recording(event: Event, *, now_s: float) -> Outcome:
        outcome = real(event, now_s=now_s)
        journal.append((now_s, event, outcome))
        return outcome

    start_state = house.engine.encode_state()
    house.engine.handle = recording  # type: ignore[method-assign]  # a tap, not a mock
    for op in ops:
        perform(house, op)
    again = Engine(house.engine.settings, decode_state(start_state))
    again.policy = house.engine.policy
    for now_s, event, outcome in journal:
        house.script(outcome)
        record = Record(
            epoch=1, writer="w", entries=(Entry(now_s, event),), decisions=outcome.decisions
        )
        assert replay(again, record), decision_bytes(outcome.decisions)
    assert again.encode_state() == house.engine.encode_state()
