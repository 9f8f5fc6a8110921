"""Whole bundles: what each adds, the order of decisions, and what a decision tells of itself."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from common.errors import ConfigError
from common.model import JobState, Mode, NodeRole
from coordinator.policies.aryl.rules import Lending, Rules
from coordinator.policies.aryl.shortest_first import shortest_key
from coordinator.policies.contract.decisions import (
    Decision,
    Loan,
    Preempt,
    Reclaim,
    Recommend,
    Resize,
    Start,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.registry import COMPARED, POLICIES, bundle, policy
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_cluster,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
)
from tests.policies.families import FAMILIES, family
from tests.policies.hash_seeds import said


def decided(snapshot: ClusterSnapshot, name: str = "aryl") -> tuple[Decision, ...]:
    """One scheduling pass."""
    return policy(name).allocate(snapshot, b"").decisions


def kinds(decisions: Iterable[Decision]) -> list[str]:
    """Decision types in order."""
    return [type(decision).__name__ for decision in decisions]


def wide_job(*, last_resized_at_s: float | None = None) -> tuple[list[NodeView], list[JobView]]:
    """Two training nodes of 8; job `wide` has 4 GPUs of the first as base, the second flexibly."""
    nodes, jobs = make_cluster(
        {"n1": {"wide": 4}}, flexible={"n2": {"wide": 4}}, role=NodeRole.TRAINING
    )
    return nodes, [job_with(job, resizes_latest_at_s=last_resized_at_s) for job in jobs]


def test_an_unknown_policy_names_the_known_ones() -> None:
    """The error is the operator's, and says what to write instead."""
    known = ", ".join(sorted(POLICIES))
    with pytest.raises(ConfigError, match=f"'best' is not one of {known}$"):
        policy("best")


def test_a_name_that_is_nearly_one_is_told_those_first() -> None:
    """What was probably meant, the closest first, then all that there are."""
    said = "'gandiva-set' is not one of the policies; did you mean gandiva-sets or gandiva or .*"
    with pytest.raises(ConfigError, match=rf"{said}\? There are all, afs, .*, yarn-fair$"):
        policy("gandiva-set", also=("all",))


def test_the_table_is_explicit() -> None:
    """Every bundle is there under its own name, with a sentence of what it does."""
    plain = {"fifo", "fifo-skip", "sjf", "srtf", "srsf"}
    ours = {"aryl", "aryl-loan", "aryl-elastic", "foresight"}
    rows = {"aryl-random", "aryl-scf", "opportunistic", "gandiva-lyra", "afs-lyra"}
    assert {*plain, *ours, *rows} <= set(POLICIES)
    assert set(COMPARED) <= set(POLICIES)
    assert all(name == made.name and made.description for name, made in POLICIES.items())


def test_gandiva_as_lyra_has_it_grows_only_while_nobody_waits() -> None:
    """With a job that does not fit nobody gets a flexible worker; without it the node is filled."""
    wide = make_job_view("wide", workers=(1, 8), submitted_at_s=1.0)
    stuck = make_job_view("stuck", workers=(9, 9), submitted_at_s=2.0)
    node = make_node_view("n1")

    def workers(*jobs: JobView) -> list[int]:
        starts = decided(make_snapshot(nodes=[node], jobs=jobs), "gandiva-lyra:resize_cost_s=0")
        return [
            sum(placement.worker_count for placement in start.placements)
            for start in starts
            if isinstance(start, Start)
        ]

    assert workers(wide) == [8]
    assert workers(wide, stuck) == [1]


@pytest.mark.parametrize(
    ("name", "starts"),
    [("fifo", ["early"]), ("fifo-skip", ["early", "late"]), ("sjf", ["late", "early"])],
)
def test_bundles_differ_in_order_and_blocking(name: str, starts: list[str]) -> None:
    """FIFO blocks, FIFO with skip goes on, shortest-first turns the order round."""
    jobs = [
        make_job_view("early", gpus_per_worker=4, submitted_at_s=1.0, remaining_work_s=90.0),
        make_job_view("huge", gpus_per_worker=8, submitted_at_s=2.0, remaining_work_s=50.0),
        make_job_view("late", gpus_per_worker=4, submitted_at_s=3.0, remaining_work_s=10.0),
    ]
    decisions = decided(make_snapshot(nodes=[make_node_view("n1")], jobs=jobs), name)
    assert [d.job_id for d in decisions if isinstance(d, Start)] == starts


def test_decisions_come_in_the_order_in_which_they_can_be_carried_out() -> None:
    """Shrink, start on the room, grow, then the reasons of those that wait."""
    nodes, jobs = wide_job()
    grows_on = make_node_view("a1", gpu_type="A100")
    grows = make_job_view(
        "grows",
        state=JobState.RUNNING,
        workers=(1, 3),
        gpu_type="A100",
        placed=[replace(jobs[0].placed[0], job_id="grows", node="a1", gpus=1)],
    )
    nodes.append(replace(grows_on, workers=grows.placed, free_gpus=7))
    jobs += [grows, make_job_view("starts", types=("H100",), gpus_per_worker=8)]
    jobs.append(make_job_view("waits", types=("H100",), gpus_per_worker=8, remaining_work_s=9e5))
    snapshot = make_snapshot(nodes=nodes, jobs=jobs)
    decisions = decided(snapshot)
    assert kinds(decisions) == ["Resize", "Start", "Resize"]
    shrink, start, growth = decisions
    assert isinstance(shrink, Resize)
    assert isinstance(start, Start)
    assert isinstance(growth, Resize)
    assert (shrink.job_id, shrink.removed_workers) == ("wide", (1,))
    assert (start.job_id, [p.node for p in start.placements]) == ("starts", ["n2"])
    assert growth.job_id == "grows"
    assert [hold.job_id for hold in policy("aryl").pending_reasons(snapshot, b"")] == ["waits"]


def test_a_resize_says_for_whom_and_at_what_cost() -> None:
    """The beneficiary, the running time before and after, and the GPU-seconds it stalls."""
    nodes, jobs = wide_job()
    jobs.append(make_job_view("starts", gpus_per_worker=8))
    shrink = decided(make_snapshot(nodes=nodes, jobs=jobs))[0]
    assert isinstance(shrink, Resize)
    assert shrink.reason == (
        "shrinks from 2 to 1 workers, 1800 s left become 3600 s: room for the base gang of starts"
    )
    assert shrink.predicted_cost_gpu_s == 5.0 * 8


def test_a_start_records_its_estimate_and_where_it_came_from() -> None:
    """Running time on the workers it gets, flexible ones included, and the estimate's source."""
    job = make_job_view("j", workers=(2, 4), remaining_work_s=1200.0, priority=3)
    job = job_with(job, estimate_source="history of 7 runs")
    start = decided(make_snapshot(nodes=[make_node_view("n1")], jobs=[job]))[0]
    assert isinstance(start, Start)
    assert (start.estimated_runtime_s, start.estimate_source) == (300.0, "history of 7 runs")
    assert start.reason == (
        "its turn (at least 300 s by history of 7 runs, priority 3): 4 GPUs of type H100 on 1 node"
    )
    counts = [(p.worker_count, p.is_flexible) for p in start.placements]
    assert counts == [(2, False), (2, True)]


def test_a_job_in_its_cooldown_neither_grows_nor_wakes_late() -> None:
    """It may shrink for base demand, does not grow, and the pass asks to be woken when it may."""
    nodes, jobs = wide_job(last_resized_at_s=NOW_S - 10.0)
    free = make_node_view("n3")
    resting = make_snapshot(nodes=[*nodes, free], jobs=jobs, resize_cooldown_s=60.0)
    allocation = policy("aryl").allocate(resting, b"")
    assert (allocation.decisions, allocation.wake_at_s) == ((), NOW_S + 50.0)
    rested = policy("aryl").allocate(replace(resting, resize_cooldown_s=10.0), b"")
    assert (kinds(rested.decisions), rested.wake_at_s) == (["Resize"], None)
    urgent = [*jobs, *[make_job_view(f"b{n}", gpus_per_worker=8) for n in range(2)]]
    pressed = decided(replace(resting, jobs=tuple(sorted(urgent, key=lambda j: j.job_id))))
    assert [d.removed_workers for d in pressed if isinstance(d, Resize)] == [(1,)]


def test_loaning_only_in_mode_act_changes_anything() -> None:
    """Observe and recommend get the same loans as recommendations."""
    nodes = [make_node_view(f"s{n}", role=NodeRole.SERVING) for n in range(3)]
    jobs = [make_job_view("j", workers=(2, 2), gpus_per_worker=8)]
    lent: dict[Mode, list[str]] = {}
    for mode in Mode:
        service = make_service_view(load=5.0, mode=mode)
        decisions = policy("aryl").lend(make_snapshot(nodes=nodes, jobs=jobs, services=[service]))
        kind = Loan if mode == Mode.ACT else Recommend
        assert all(isinstance(decision, kind) for decision in decisions)
        lent[mode] = [d.node for d in decisions if isinstance(d, Loan | Recommend)]
    assert lent == {mode: ["s0", "s1"] for mode in Mode}


def test_a_loan_tells_its_numbers() -> None:
    """Forecast, horizon, capacity, need and what is ready, for people."""
    nodes = [make_node_view(f"s{n}", role=NodeRole.SERVING) for n in range(3)]
    service = make_service_view(load=15.0)
    snapshot = make_snapshot(
        nodes=nodes, services=[service], jobs=[make_job_view("j", gpus_per_worker=8)]
    )
    (loan,) = policy("aryl").lend(snapshot)
    assert loan.reason == (
        "load forecast 15 over 420 s at 10 per node needs 2 nodes with headroom "
        "(2 before lending); 3 ready, 0 coming"
    )


def test_only_what_a_service_that_acts_takes_covers_demand() -> None:
    """A recommendation of one service leaves the demand to one that acts, and is made only for
    what that one leaves over."""
    nodes = [
        make_node_view("a1", role=NodeRole.SERVING, service="asks"),
        make_node_view("b1", role=NodeRole.SERVING, service="does"),
    ]
    services = [
        make_service_view("asks", mode=Mode.RECOMMEND, load=0.0, min_serving=0),
        make_service_view("does", load=0.0, min_serving=0),
    ]
    jobs = [make_job_view(name, gpus_per_worker=8) for name in ("j", "k")]
    for count, expected in ((1, ["Loan"]), (2, ["Recommend", "Loan"])):
        snapshot = make_snapshot(nodes=nodes, jobs=jobs[:count], services=services)
        assert kinds(policy("aryl").lend(snapshot)) == expected


def test_the_papers_rules_are_a_bundle_away() -> None:
    """Lending whatever is spare, asked for or not, is one rule; the default waits for demand."""
    nodes = [make_node_view(f"s{n}", role=NodeRole.SERVING) for n in range(3)]
    snapshot = make_snapshot(nodes=nodes, services=[make_service_view(load=5.0)])
    rules = Rules(order=shortest_key, lending=Lending(only_on_demand=False))
    assert kinds(bundle("paper", "as printed", rules).lend(snapshot)) == ["Loan", "Loan"]
    assert policy("aryl").lend(snapshot) == ()


@pytest.mark.parametrize(
    ("name", "lends", "on_demand"),
    [
        ("aryl", True, True),
        ("aryl:lend_only_on_demand=false", True, False),
        ("sjf:is_loaning=true:lend_only_on_demand=false", True, False),
        ("aryl:is_loaning=false", False, True),
        ("fifo", False, True),
        ("themis", False, True),
    ],
)
def test_a_policy_says_whether_and_what_it_lends(name: str, lends: bool, on_demand: bool) -> None:
    """The engine asks: an idle node that came home stays there only where loans wait for demand."""
    made = policy(name)
    assert (made.lends, made.lends_on_demand) == (lends, on_demand)


def test_a_bundle_without_loans_still_calls_home() -> None:
    """What another policy lent comes back when the load needs it."""
    nodes = [
        make_node_view("l1", role=NodeRole.ON_LOAN),
        make_node_view("l2", role=NodeRole.ON_LOAN),
    ]
    snapshot = make_snapshot(nodes=nodes, services=[make_service_view(load=5.0)])
    (reclaim,) = policy("fifo").lend(snapshot)
    assert isinstance(reclaim, Reclaim)
    assert (reclaim.node, reclaim.deadline_s) == ("l1", 300.0)


def test_two_services_share_no_victim() -> None:
    """A gang on nodes of both stops once, for the first; the second finds its node empty."""
    nodes, jobs = make_cluster({"n1": {"gang": 8}, "n2": {"gang": 8}})
    nodes = [replace(nodes[0], service="chat"), replace(nodes[1], service="search")]
    services = [make_service_view(name, load=5.0) for name in ("chat", "search")]
    decisions = policy("aryl").lend(make_snapshot(nodes=nodes, jobs=jobs, services=services))
    assert kinds(decisions) == ["Preempt", "Reclaim", "Reclaim"]
    victim, first, second = decisions
    assert isinstance(victim, Preempt)
    assert isinstance(first, Reclaim)
    assert isinstance(second, Reclaim)
    assert (victim.beneficiary, victim.node) == ("chat", "n1")
    assert (first.predicted_preemptions, second.predicted_preemptions) == (1, 0)
    assert second.reason.endswith("idle")


def test_a_recalled_service_gets_everything_back_in_every_mode() -> None:
    """Also in mode observe, also frozen, also what is only on its way out."""
    nodes = [
        make_node_view("l1", role=NodeRole.ON_LOAN),
        make_node_view("d1", role=NodeRole.DRAINING),
        make_node_view("s1", role=NodeRole.SERVING),
    ]
    service = make_service_view(mode=Mode.OBSERVE, load=0.0, is_recalled=True)
    for is_frozen in (False, True):
        snapshot = make_snapshot(nodes=nodes, services=[service], is_frozen=is_frozen)
        decisions = policy("aryl").lend(snapshot)
        assert [d.node for d in decisions if isinstance(d, Reclaim)] == ["d1", "l1"]
        assert all("was recalled" in decision.reason for decision in decisions)


def test_memory_passes_through() -> None:
    """Bundles without reservations remember nothing of their own, and lose nothing that was
    there; the others forget what they cannot read."""
    assert policy("sjf").allocate(make_snapshot(), b"kept").memory == b"kept"
    assert policy("aryl").allocate(make_snapshot(), b"kept").memory == b""


DIGEST = """
import hashlib, msgspec
from coordinator.policies.registry import POLICIES
from tests.benchmarks.bench_pass import make_cluster
snapshot = make_cluster(200, 200)
decided = [[p.allocate(snapshot, b""), p.lend(snapshot)] for _, p in sorted(POLICIES.items())]
print(hashlib.sha256(msgspec.msgpack.encode(decided)).hexdigest())
"""


@pytest.mark.slow
def test_decisions_repeat_whatever_the_hash_seed() -> None:
    """Two interpreters that order sets differently decide the same bytes for one cluster."""
    digests = said(DIGEST)
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


def test_no_family_of_policies_is_without_one_in_the_sample() -> None:
    """A scheduler that is added has a place of its own, and comes in with it."""
    assert {family(name) for name in FAMILIES} == {family(name) for name in POLICIES}
