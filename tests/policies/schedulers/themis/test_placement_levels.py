"""Where Themis' bidders offer to go: a rack is left to whom it matters, else they stay close."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from common.profile import JobProfile
from coordinator.policies.contract.snapshot import JobView, NodeView
from coordinator.policies.schedulers.themis.arbiter import Arbiter
from coordinator.policies.schedulers.themis.knobs import ThemisKnobs
from coordinator.policies.schedulers.themis.lease_terms import Payment
from coordinator.policies.schedulers.themis.leases import Memory
from coordinator.policies.schedulers.themis.placement_levels import orders
from tests.harness.builders import NOW_S, job_with, make_job_view, make_node_view, make_snapshot
from tests.tables import each_row


def gang(name: str, far_ratio: float) -> JobView:
    """Two workers of one GPU that have `far_ratio` of their speed over several racks."""
    job = make_job_view(name, workers=(2, 2), remaining_work_s=36_000.0, submitted_at_s=NOW_S)
    profile = JobProfile(far_speed_ratio=far_ratio)
    return job_with(job, whole_work_s=36_000.0, profile=profile)


def nodes_of(racks: Iterable[str]) -> list[NodeView]:
    """Idle nodes of one GPU, by their racks."""
    return [replace(make_node_view(f"n{at}", gpus=1), rack=rack) for at, rack in enumerate(racks)]


def racks_won(jobs: Sequence[JobView], racks: str, knobs: ThemisKnobs) -> dict[str, str]:
    """Racks of the GPUs that each job was given in a pass, sorted."""
    nodes = nodes_of(racks)
    arbiter = Arbiter(knobs, make_snapshot(nodes=nodes, jobs=jobs), Memory())
    arbiter.run()
    of = {node.name: node.rack for node in nodes}
    return {
        name: "".join(sorted(of[placement.node] for placement in given.more))
        for name, given in arbiter.sale.given.items()
    }


@each_row("payment", [*Payment])
@each_row("seed", range(1, 9))
def test_whoever_is_as_fast_over_racks_leaves_the_whole_one_to_others(
    payment: Payment, seed: int
) -> None:
    """One rack has room for a gang; who loses half of its speed elsewhere has it, if both bid."""
    jobs = [gang("near", 0.5), gang("any", 1.0)]
    knobs = ThemisKnobs(f=0.0, payment=payment, seed=seed)
    assert racks_won(jobs, "aabc", knobs) == {"near": "aa", "any": "bc"}


def test_without_a_rival_it_stays_in_one_rack() -> None:
    """Of bids that are worth the same the closer one is taken."""
    assert racks_won([gang("any", 1.0)], "aabc", ThemisKnobs()) == {"any": "aa"}


@each_row(
    ("racks", "is_far_as_fast", "expected"),
    [
        ("aabc", False, ["aa"]),
        ("aabc", True, ["aa", "cbaa"]),
        ("aab", True, ["aa", "baa"]),
        ("aabb", True, ["aa", "bb"]),
        ("aabbc", True, ["aa", "caabb", "bb"]),
        ("abc", False, ["cba"]),
        ("abc", True, ["cba"]),
    ],
)
def test_racks_with_too_little_room_come_first_in_a_spread(
    racks: str, is_far_as_fast: bool, expected: list[str]
) -> None:
    """So little of a whole rack is taken; beside it stands the best one, or all that there is."""
    nodes = {node.name: node for node in nodes_of(racks)}
    found = orders(dict.fromkeys(nodes, 1), 2, nodes, frozenset(), is_far_as_fast=is_far_as_fast)
    assert ["".join(nodes[name].rack for name in order) for order in found] == expected
