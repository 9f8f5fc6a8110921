"""Themis' own rules: who is asked to bid, what winning costs, and who gets what is left over.

Each is one of NSDI'20, sections 3 and 4, seen from a snapshot and the decisions on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import pytest
from msgspec.structs import replace

from common.profile import JobProfile
from coordinator.policies.contract.decisions import Allocation, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.themis.finish_time_fairness import (
    AppRecord,
    Attendance,
    Work,
    most_gpus,
)
from coordinator.policies.schedulers.themis.leases import Memory
from tests.harness.builders import NOW_S, job_with, make_job_view, make_node_view, make_snapshot
from tests.tables import each_row

LEASE_S = 1200.0


SEEDS = range(1, 25)


def waiting(
    name: str,
    *,
    workers: tuple[int, int] = (1, 1),
    gpus: int = 1,
    work_s: float = 36_000.0,
    waited_s: float = 0.0,
) -> JobView:
    """A job by itself, which is an app by itself; its work is in worker-seconds."""
    job = make_job_view(
        name,
        workers=workers,
        gpus_per_worker=gpus,
        remaining_work_s=work_s,
        submitted_at_s=NOW_S - waited_s,
    )
    return job_with(job, whole_work_s=work_s)


def cluster(jobs: Iterable[JobView], **gpus: int) -> ClusterSnapshot:
    """Idle nodes of so many GPUs, and these jobs."""
    nodes = [make_node_view(name, gpus=count) for name, count in gpus.items()]
    return make_snapshot(nodes=nodes, jobs=jobs)


def served_before(jobs: Iterable[JobView], **record: tuple[float, float]) -> bytes:
    """A memory in which jobs had GPUs once: (their rho then, seconds since), by name."""
    apps: dict[str, AppRecord] = {}
    for job in jobs:
        if job.job_id in record:
            rho, since_s = record[job.job_id]
            apps[f"job {job.job_id}"] = AppRecord(
                submitted_at_s=job.submitted_at_s,
                area_s=0.0,
                seen_at_s=job.submitted_at_s,
                jobs={
                    job.job_id: Work(
                        job.estimate.whole_work_s * job.gpus_per_worker, most_gpus(job)
                    )
                },
                granted_at_s=NOW_S - since_s,
                rho=rho,
            )
    attendance = Attendance(at_s=NOW_S, area_s=0.0, apps=apps)
    return msgspec.msgpack.encode(Memory(attendance=attendance))


def sizes(allocation: Allocation) -> dict[str, int]:
    """Workers of each job that starts."""
    return {
        decision.job_id: sum(placement.worker_count for placement in decision.placements)
        for decision in allocation.decisions
        if isinstance(decision, Start)
    }


def played(
    name: str, jobs: Iterable[JobView], gpus: Mapping[str, int], memory: bytes = b""
) -> dict[str, int]:
    """Workers of each job that starts in one pass."""
    return sizes(policy(name).allocate(cluster(jobs, **gpus), memory))


# --- who is asked to bid: the 1-f filter --------------------------------------------------------


@each_row(("f", "asked"), [(0.0, 5), (0.2, 4), (0.4, 3), (0.8, 1), (1.0, 1)])
def test_the_part_f_of_the_apps_is_left_out_of_an_auction(f: float, asked: int) -> None:
    """Of n apps the 1 - f that are worst off bid, one at least; others get what these leave."""
    jobs = [waiting(f"j{number}", workers=(1, 4)) for number in range(5)]
    found = played(f"themis:payment=none:f={f}", jobs, {"n1": asked * 4 + (5 - asked)})
    # Who bids has all that it can use, as there is enough; who does not has the least.
    assert sorted(found.values()) == [1] * (5 - asked) + [4] * asked


def test_the_worst_off_are_those_that_bid() -> None:
    """The filter keeps the apps with the greatest rho, not the smallest."""
    jobs = [waiting(f"j{number}", gpus=4) for number in range(5)]
    rhos = {f"j{number}": (1.0 + number, LEASE_S) for number in (3, 1, 4, 0, 2)}
    found = played("themis", jobs, {"n1": 4}, served_before(jobs, **rhos))
    assert found == {"j4": 1}


def test_an_app_that_never_had_gpus_is_infinitely_unfair() -> None:
    """Before its first GPUs an app is worse off than any that had some, whatever their rho."""
    jobs = [waiting("a", gpus=4), waiting("new", gpus=4)]
    found = played("themis", jobs, {"n1": 4}, served_before(jobs, a=(500.0, LEASE_S)))
    assert found == {"new": 1}


def test_a_loser_grows_more_unfair_lease_by_lease() -> None:
    """Long-term compensation: its rho grows by one of what it was for each lease that it waits."""
    jobs = [waiting("long", gpus=4), waiting("late", gpus=4)]
    # 1.2 after w leases is 1.2 * (1 + w); 3 after one is 6: they meet at four leases.
    for leases, first in ((3.9, "late"), (4.1, "long")):
        memory = served_before(jobs, long=(1.2, leases * LEASE_S), late=(3.0, LEASE_S))
        assert played("themis", jobs, {"n1": 4}, memory) == {first: 1}


def test_of_equals_at_the_cut_chance_chooses() -> None:
    """Apps of one rho are asked in an order that is left to chance, not to their names."""
    jobs = [waiting(f"j{number}", gpus=4) for number in range(5)]
    asked = {
        name
        for seed in SEEDS
        for name in played(f"themis:payment=none:seed={seed}", jobs, {"n1": 4})
    }
    assert len(asked) > 2


def test_once_served_an_app_is_no_longer_first() -> None:
    """A grant is remembered with its instant: one that had GPUs is behind one that never had."""
    had, new = waiting("had", gpus=4), waiting("new", gpus=4)
    for seed in range(1, 9):
        made = policy(f"themis:seed={seed}")
        memory = made.allocate(cluster([had], n1=4), b"").memory
        later = replace(cluster([had, new], n1=4), now_s=NOW_S + 1.0)
        assert sizes(made.allocate(later, memory)) == {"new": 1}


def test_priority_comes_before_fairness() -> None:
    """Of apps that an operator ranks the higher is asked first, however well off it is."""
    jobs = [waiting("poor", gpus=4), replace(waiting("high", gpus=4), priority=1)]
    memory = served_before(jobs, high=(0.5, 1.0))
    assert played("themis", jobs, {"n1": 4}, memory) == {"high": 1}


@pytest.mark.parametrize("ranks", [(0, 3, 0), (3, 0, 0), (0, 0, 3)])
def test_an_app_has_the_highest_priority_of_its_jobs(ranks: tuple[int, int, int]) -> None:
    """Not the lowest, the first one's, the mean or the sum of them, nor as many as come first."""
    trials = [
        replace(waiting(f"t{at}", gpus=4), app="search", priority=rank)
        for at, rank in enumerate(ranks)
    ]
    others = [
        replace(waiting(f"o{at}", gpus=4), app="other", priority=2) for at in range(len(trials))
    ]
    for seed in range(1, 9):
        found = played(f"themis:seed={seed}", [*others, *trials], {"n1": 4})
        assert found.keys() == {f"t{ranks.index(3)}"}  # and nothing of a lower priority before it


# --- hidden payments ----------------------------------------------------------------------------


GOOD = "themis:horizon=good"
"""Bids as in the paper's formula: of four GPUs a new linear app is worth twice what it is of two.

Two of them win two each of four, and each would have all without the other: c = 1/2.
"""


def rivals(*, others: int) -> list[JobView]:
    """Two elastic apps that are worse off than a number of others."""
    bidders = [waiting(f"bid{number}", workers=(1, 4)) for number in range(2)]
    return [*bidders, *(waiting(f"out{number:02d}") for number in range(others))]


def of_rivals(jobs: Iterable[JobView]) -> bytes:
    """A memory in which those that are left out had GPUs a lease ago."""
    jobs = list(jobs)
    records = {job.job_id: (2.0, LEASE_S) for job in jobs if job.job_id.startswith("out")}
    return served_before(jobs, **records)


def test_what_winners_pay_goes_to_those_that_were_left_out() -> None:
    """Winners keep the part c of their bundles; the GPUs withheld go to apps that did not bid."""
    jobs = rivals(others=3)
    free = played(f"{GOOD}:f=0.6:payment=none", jobs, {"n1": 4}, of_rivals(jobs))
    assert free == {"bid0": 2, "bid1": 2}
    paid = played(f"{GOOD}:f=0.6:payment=whole", jobs, {"n1": 4}, of_rivals(jobs))
    assert (paid.pop("bid0"), paid.pop("bid1")) == (1, 1)
    assert list(paid.values()) == [1, 1]


def test_a_payment_is_told() -> None:
    """The reason of a start says how many GPUs were won, and how many of them were paid."""
    jobs = rivals(others=3)
    name = f"{GOOD}:f=0.6:payment=whole"
    found = policy(name).allocate(cluster(jobs, n1=4), of_rivals(jobs))
    starts = [each for each in found.decisions if isinstance(each, Start)]
    said = [start.reason for start in starts if start.job_id.startswith("bid")]
    assert len(said) == 2
    for reason in said:
        assert "won 2 GPUs among 2 bidders and paid 1 of them" in reason


def test_whoever_harms_nobody_pays_nothing() -> None:
    """With room for all c is 1: no GPU of a bundle is withheld, and no bidder counts as paying."""
    jobs = rivals(others=3)
    found = played(f"{GOOD}:f=0.6", jobs, {"n1": 8}, of_rivals(jobs))
    assert found == {"bid0": 4, "bid1": 4}


def test_by_lottery_a_bidder_has_all_of_its_bundle_or_nothing() -> None:
    """With chance c the whole bundle, else none of it: c of it on the average, never a part.

    Three of six GPUs are won by each, who would have its four without the other: c = 3/4.
    """
    jobs = rivals(others=8)
    had: list[int] = []
    for seed in SEEDS:
        name = f"{GOOD}:f=0.8:payment=lottery:seed={seed}"
        found = played(name, jobs, {"n1": 6}, of_rivals(jobs))
        had += [found.get(f"bid{number}", 0) for number in range(2)]
    assert set(had) == {0, 3}
    assert 0.6 < had.count(3) / len(had) < 0.9


# --- leftovers ----------------------------------------------------------------------------------


def test_leftovers_go_to_anybody_that_was_left_out() -> None:
    """Who gets a GPU that no bidder took is left to chance, not to the order of names."""
    jobs = [waiting("bids"), *(waiting(f"out{number}") for number in range(8))]
    memory = served_before(jobs, **{f"out{number}": (2.0, LEASE_S) for number in range(8)})
    lucky: set[str] = set()
    for seed in SEEDS:
        found = played(f"themis:f=0.9:seed={seed}", jobs, {"n1": 2}, memory)
        assert found.pop("bids") == 1
        lucky |= found.keys()
    assert len(lucky) > 4


# --- what a bid counts --------------------------------------------------------------------------


def test_a_bid_counts_its_gpus_for_a_lease_or_for_good() -> None:
    """For a lease what ends within it gains most; for good, as in the formula, what is long does.

    The short app has waited three leases and would end within one: 4 leases or 5, from its
    submission. The long one would be done in 100 leases rather than in 201.
    """
    jobs = [
        waiting("short", work_s=LEASE_S, waited_s=3 * LEASE_S),
        waiting("long", work_s=100 * LEASE_S),
    ]
    for horizon, first in (("lease", "short"), ("good", "long")):
        name = f"themis:f=0:payment=none:horizon={horizon}"
        assert played(name, jobs, {"n1": 1}) == {first: 1}


def test_a_bid_for_nodes_of_several_racks_is_worth_what_they_bring() -> None:
    """Half the speed over racks is twice the rho: not the number of nodes alone decides."""
    far = replace(waiting("a", workers=(4, 4)), profile=JobProfile(far_speed_ratio=0.5))
    rhos: list[float] = []
    for rack in ("r1", "r2"):
        nodes = [make_node_view(name, gpus=2, workers=[]) for name in ("n1", "n2")]
        racks = zip(nodes, ("r1", rack), strict=True)
        snapshot = make_snapshot(
            nodes=[replace(node, rack=name) for node, name in racks], jobs=[far], now_s=NOW_S
        )
        found = policy("themis:payment=none").allocate(snapshot, b"")
        [start] = [each for each in found.decisions if isinstance(each, Start)]
        rhos.append(float(start.reason.split("rho of its job a ")[1].split()[0]))
    assert rhos[1] == pytest.approx(2.0 * rhos[0], abs=0.02)
