"""Themis auctions again what the first auction of a pass left: the later rounds, by hand."""

from __future__ import annotations

from msgspec.structs import replace

from common.model import JobState
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.schedulers.themis.arbiter import Arbiter
from coordinator.policies.schedulers.themis.knobs import ThemisKnobs
from coordinator.policies.schedulers.themis.lease_terms import Horizon, Payment
from coordinator.policies.schedulers.themis.leases import Memory
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

ALL_BID = ThemisKnobs(f=0.0, payment=Payment.FLOOR, horizon=Horizon.GOOD)
"""Worths are as in the paper's formula: in proportion to the GPUs of a new app that scales."""


def app(name: str, most: int) -> JobView:
    """One job, of one GPU a worker, that has much to do."""
    job = make_job_view(name, workers=(1, most), remaining_work_s=1e7, submitted_at_s=NOW_S)
    return job_with(job, whole_work_s=1e7)


def busy(count: int) -> list[JobView]:
    """Apps that have all that they can use, on a node of theirs: they make shares small."""
    return [
        job_with(
            app(f"busy{number}", 1),
            state=JobState.RUNNING,
            gpu_type="H100",
            started_at_s=NOW_S,
            placed=(make_worker_view(f"busy{number}", 0, "full", gpus=1),),
        )
        for number in range(count)
    ]


def ran(knobs: ThemisKnobs = ALL_BID) -> Arbiter:
    """All rounds of a pass: two alike apps and eight idle GPUs, of which either could use all.

    With eight others a share is 1.6 GPUs, and that is what nothing is worth.
    """
    nodes = [make_node_view("full", free_gpus=0), make_node_view("idle")]
    jobs = [app("a", 8), app("b", 8), *busy(8)]
    arbiter = Arbiter(knobs, make_snapshot(nodes=nodes, jobs=jobs), Memory())
    arbiter.run()
    return arbiter


def gpus(arbiter: Arbiter) -> list[int]:
    """What each job was given, the least first."""
    given = arbiter.sale.given.values()
    return sorted(sum(placement.worker_count for placement in each.more) for each in given)


def test_what_was_paid_is_auctioned_again() -> None:
    """Two alike win 4 of 8 GPUs each and keep 4 x 1/2; of the 4 left they win 2 and keep 2 x 2/3.

    In the third round each wins one, keeps 1 x 4/5 of it and so none: that is the last one in which
    an app bid, and the one that is told. The 2 that are left go to the two in turn.
    """
    arbiter = ran()
    assert gpus(arbiter) == [4, 4]
    assert not any(arbiter.sale.free.values())
    assert set(arbiter.sale.outcome.values()) == {
        "won 1 GPU among 2 bidders and paid 1 of them for the harm to others"
    }
    assert {given.why.partition(";")[0] for given in arbiter.sale.given.values()} == {
        "withheld from bidders, shared in turn"
    }


def test_rounds_end_when_nobody_is_given_anything() -> None:
    """Without a payment the first auction leaves nothing, and each has its half."""
    knobs = replace(ALL_BID, payment=Payment.NONE)
    assert gpus(ran(knobs)) == [4, 4]
