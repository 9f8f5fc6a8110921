"""Maintenance windows under every family of policies: each sees which nodes close to which jobs."""

from __future__ import annotations

from common.model import Mode, NodeName, NodeRole
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import Event, LoadMeasured, OperatorAction, OperatorAsked
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.policies.registry import policy
from coordinator.sim.run.cluster import Delays
from tests.harness.cluster.engine import CHAT, EngineHarness
from tests.policies.families import FAMILIES
from tests.tables import each_row

IN_S = 500.0


RECLAIM_S = 200.0


T0 = NodeName("t0")


LIMITS_S = (150.0,) * 4 + (None, 100.0, 900.0, 200.0, None, 250.0)
"""The first four fill both nodes: strict orders go no further before a job that has no place."""


DELAYS = Delays(start_s=1.0, stop_s=3.0, device_free_s=1.0, warm_up_s=10.0)


def busy(name: str) -> tuple[EngineHarness, list[str]]:
    """A cell under a policy, with a window of `t0` and jobs of several limits, rigid and elastic,
    more than it has room for; and the list of all that the engine refuses for the window.
    """
    harness, refused = EngineHarness(inference=0, delays=DELAYS), list[str]()
    harness.engine.policy = policy(name)
    close(harness, "t0")
    real = harness.engine.handle

    def handle(event: Event, *, now_s: float) -> Outcome:
        outcome = real(event, now_s=now_s)
        refused.extend(one.why for one in outcome.refused if "closes in" in one.why)
        return outcome

    harness.engine.handle = handle  # type: ignore[method-assign]  # a tap, not a mock
    for number, limit_s in enumerate(LIMITS_S):
        harness.submit(
            f"j{number}",
            workers=(1, 1 + number % 3 if number >= 4 else 1),
            gpus_per_worker=4 if number < 4 else 2,
            work_s=1500.0 if number % 2 else 100.0,
            time_limit_s=limit_s,
        )
    return harness, refused


def close(harness: EngineHarness, node: str, in_s: float = IN_S) -> None:
    """An operator orders the window."""
    harness.sim.handle(
        OperatorAsked(action=OperatorAction.DRAIN_AT, by="ops/me", target=node, in_s=in_s)
    )


def settings_of(name: str) -> EngineSettings:
    """A cell under a policy whose service keeps one node and lends at once what came home."""
    service = ServiceSettings(
        name=CHAT,
        capacity_per_node=10.0,
        mode=Mode.ACT,
        reclaim_deadline_s=RECLAIM_S,
        hold_off_s=0.0,
    )
    return EngineSettings(policy=name, services=(service,))


@each_row("name", FAMILIES)
def test_no_policy_asks_for_what_would_overrun_a_window(name: str) -> None:
    """None of its decisions is refused for one: jobs that fit start on the node, and it is empty
    when it is drained."""
    harness, refused = busy(name)
    ran = dict[str, float | None]()
    for _ in range(16):
        harness.wait(30.0)
        ran |= {job.job_id: job.spec.time_limit_s for job, _ in harness.workers_on(T0)}
    assert refused == []
    assert ran
    assert None not in ran.values()
    harness.wait(IN_S - 1.0 - harness.sim.loop.now_s)
    assert harness.workers_on(T0) == []
    assert harness.engine.check() == []


@each_row("name", ("aryl", "foresight", "opportunistic"))
def test_every_policy_has_its_loans_home_before_a_window(name: str) -> None:
    """The nodes are lent to jobs that wait, whatever their limits; the one that closes is recalled
    in time by the usual way, told why, and is lent to nobody after that. Its sister stays lent.
    """
    harness = EngineHarness(training=1, inference=3, delays=DELAYS, settings=settings_of(name))
    harness.engine.policy = policy(name)
    for number in range(6):
        harness.submit(f"j{number}", work_s=5000.0)
    lend(harness, until_s=100.0)
    lent = [n for n, node in harness.engine.state.nodes.items() if node.role == NodeRole.ON_LOAN]
    assert len(lent) == 2
    name_of = lent[0]
    close(harness, name_of)
    lend(harness, until_s=100.0 + IN_S - 1.0)
    [loan] = [one for one in harness.engine.state.loans.values() if one.node == name_of]
    assert loan.reclaim_reason == f"{name_of} closes in {RECLAIM_S:.0f} s, ordered by ops/me"
    assert loan.returned_at_s is not None
    assert loan.returned_at_s <= 100.0 + IN_S
    assert harness.node(name_of).role == NodeRole.SERVING
    assert harness.engine.state.counters.reclaims_late == 0
    lend(harness, until_s=100.0 + 2 * IN_S)
    assert harness.node(name_of).cordon.is_draining
    assert harness.node(lent[1]).role == NodeRole.ON_LOAN
    assert harness.engine.check() == []


@each_row("name", ("aryl", "foresight", "opportunistic"))
@each_row(
    ("closes_lent", "closes_serving", "in_s"),
    [(0, 1, RECLAIM_S + 5.0), (1, 1, RECLAIM_S + 60.0), (1, 0, RECLAIM_S + 60.0), (1, 1, IN_S)],
)
def test_a_service_has_what_it_needs_when_its_nodes_close(
    closes_lent: int, closes_serving: int, in_s: float, name: str
) -> None:
    """A node that closes soon counts as gone: nothing is lent on it, and a lent node that stays
    open is home when it closes, even in a cell without any other event."""
    harness = EngineHarness(training=1, inference=3, delays=DELAYS, settings=settings_of(name))
    harness.engine.policy = policy(name)
    for number in range(6):
        harness.submit(f"j{number}", work_s=5000.0)
    lend(harness, until_s=100.0)
    nodes = [node for node in harness.engine.state.nodes.values() if node.service == CHAT]
    lent = [node.name for node in nodes if node.role == NodeRole.ON_LOAN]
    serving = [node.name for node in nodes if node.role == NodeRole.SERVING]
    assert (len(lent), len(serving)) == (2, 1)
    for node_name in (*lent[:closes_lent], *serving[:closes_serving]):
        close(harness, node_name, in_s)
    until_s = 100.0 + in_s
    lend(harness, until_s=until_s - 1.0)
    ready = [
        n
        for n in nodes
        if n.role == NodeRole.SERVING and n.name not in harness.engine.state.windows
    ]
    assert len(ready) == 1
    lend(harness, until_s=until_s + 100.0)
    ready = [n for n in nodes if n.role == NodeRole.SERVING and not n.cordon.is_cordoned]
    assert len(ready) == 1
    assert harness.engine.state.counters.reclaims_late == 0
    assert harness.engine.check() == []


def lend(harness: EngineHarness, *, until_s: float) -> None:
    """The service has no load, and loan passes come every 20 seconds."""
    while harness.sim.loop.now_s < until_s:
        harness.sim.handle(LoadMeasured(service=CHAT, load=0.0))
        harness.sim.ask_loan_pass()
        harness.wait(min(20.0, until_s - harness.sim.loop.now_s))
