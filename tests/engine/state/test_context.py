"""A cell lives for years: what the engine keeps has bounds, and what is live is never dropped."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import JobState, NodeName, NodeRole
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.jobs import estimates
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import ClusterState, LoanEntry
from coordinator.policies.contract.decisions import Allocation, Loan, Reclaim
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.registry import policy
from coordinator.sim.run.cluster import Delays
from tests.harness.cluster.engine import CHAT, EngineHarness, state


def bounded(**kept: int) -> EngineHarness:
    """The usual cell that keeps little."""
    harness = EngineHarness(inference=3)
    harness.engine.settings = replace(harness.engine.settings, **kept)
    return harness


def round_trip(harness: EngineHarness, node: str) -> None:
    """A node is lent and comes home."""
    lend(harness, node)
    harness.decide(
        Reclaim(node=NodeName(node), service=CHAT, deadline_s=60.0, reason="wanted"), lend=True
    )
    harness.wait(1.0)
    assert harness.node(node).role == NodeRole.SERVING


def lend(harness: EngineHarness, node: str) -> None:
    """A node is lent."""
    harness.decide(Loan(node=NodeName(node), service=CHAT, reason="idle"), lend=True)
    harness.wait(1.0)


def returned(loan: LoanEntry) -> float | None:
    """When it came home, now; a call, because type checkers think that an attribute stays."""
    return loan.returned_at_s


def test_the_oldest_loans_that_came_home_are_forgotten() -> None:
    """The newest stay, and one that is out stays however old it is."""
    harness = bounded(ended_loans_kept=3)
    lend(harness, "i0")
    [out] = harness.engine.state.loans
    for _ in range(20):
        round_trip(harness, "i1")
        assert len(harness.engine.state.loans) <= 6
    kept = [int(lease_id.rpartition("-")[2]) for lease_id in harness.engine.state.loans]
    assert out in harness.engine.state.loans
    assert kept[-3:] == [19, 20, 21]
    assert harness.engine.state.counters.loans == 21


def test_a_loan_of_which_the_node_never_showed_anything_is_closed() -> None:
    """Called back before the node moved, it is over when the node shows the order to stay."""
    harness = EngineHarness(delays=Delays(report_s=1.0))
    harness.wait(5.0)
    harness.toggle_deaf(NodeName("i0"))
    harness.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    harness.decide(
        Reclaim(node=NodeName("i0"), service=CHAT, deadline_s=60.0, reason="wanted"), lend=True
    )
    [loan] = harness.engine.state.loans.values()
    harness.wait(5.0)
    assert returned(loan) is None
    harness.toggle_deaf(NodeName("i0"))
    harness.wait(5.0)
    assert returned(loan) is not None
    assert loan.begun_at_s is None
    assert harness.engine.state.counters.reclaim_s == []
    assert harness.node("i0").homecoming.lease_id is None


def test_a_loan_closes_after_a_restart_of_the_engine() -> None:
    """Which loan a node comes home from is in the state."""
    harness = EngineHarness(delays=Delays(warm_up_s=10.0))
    lend(harness, "i0")
    harness.decide(
        Reclaim(node=NodeName("i0"), service=CHAT, deadline_s=60.0, reason="wanted"), lend=True
    )
    fresh = Engine(harness.engine.settings, decode_state(harness.engine.encode_state()))
    fresh.policy = harness.engine.policy
    harness.sim.engine = fresh
    harness.engine = fresh
    harness.wait(15.0)
    [loan] = harness.engine.state.loans.values()
    assert loan.returned_at_s is not None


def test_the_kinds_of_jobs_seen_longest_ago_are_forgotten() -> None:
    """A tenant that names each job anew does not fill the memory."""
    harness = bounded(job_histories_kept=4)
    for number in range(8):
        job = harness.submit(f"once-{number}", work_s=1.0)
        harness.start(job, "t0")
        harness.wait(5.0)
        assert state(job) == JobState.SUCCEEDED
    history = harness.engine.state.history
    assert [key.split("\x00")[1] for key in history if "\x00" in key] == [
        "once-5",
        "once-6",
        "once-7",
    ]
    assert len(history["size:8"]) == 8


def test_a_kind_of_job_in_use_is_not_forgotten() -> None:
    """It is the last use that counts, not the first."""
    harness = EngineHarness()
    often = harness.submit("often")
    known = ClusterState()
    for number in range(12):
        estimates.record(known, often, 1.0, kept=4)
        estimates.record(known, harness.submit(f"once-{number}"), 1.0, kept=4)
    assert len(known.history) == 4
    assert len(known.history[estimates.history_key(often.tenant, often.spec)]) == 12


def test_a_history_of_one_kind_has_a_bound_too() -> None:
    """Only its newest runs count."""
    harness = EngineHarness()
    job = harness.submit("j")
    known = ClusterState()
    for number in range(estimates.HISTORY_KEPT + 5):
        estimates.record(known, job, float(number), kept=10)
    assert all(len(seen) == estimates.HISTORY_KEPT for seen in known.history.values())
    assert {seen[-1] for seen in known.history.values()} == {estimates.HISTORY_KEPT + 4.0}


# --- when a policy wants to be asked again ------------------------------------------------------


@pytest.mark.parametrize(("wish_s", "expected_s"), [(None, 300.0), (40.0, 40.0), (500.0, 300.0)])
def test_the_earlier_of_engine_and_policy_is_the_wish(
    wish_s: float | None, expected_s: float
) -> None:
    """A gang's deadline does not hide the policy's instant, nor that the gang's."""
    harness = EngineHarness(
        delays=Delays(ready_s=1e6), settings=EngineSettings(gang_ready_timeout_s=300.0)
    )

    def allocate(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        return replace(scripted(snapshot, memory), wake_at_s=wish_s)

    scripted = harness.engine.policy.allocate
    harness.engine.policy = replace(harness.engine.policy, allocate=allocate)
    job = harness.submit("j")
    harness.start(job, "t0")
    assert state(job) == JobState.STARTING
    assert harness.engine._wake_at_s() == expected_s


def test_a_job_that_rests_is_looked_at_when_its_cooldown_ends() -> None:
    """Nothing else happens then: without the wish it would stay small for ever."""
    harness = EngineHarness(training=3, settings=EngineSettings(resize_cooldown_s=100.0))
    harness.engine.policy = policy("aryl")
    for name, work_s in (("first", 30.0), ("second", 60.0)):
        assert state(harness.submit(name, work_s=work_s)) == JobState.RUNNING
    job = harness.submit("j", workers=(1, 6), gpus_per_worker=4, work_s=1e6)
    sizes: list[int] = []
    for _ in range(4):
        harness.wait(20.0)
        sizes.append(job.running_workers)
    assert sizes == [2, 4, 4, 4]
    assert job.resized_at_s == 30.0
    harness.wait(60.0)
    assert job.running_workers == 6
