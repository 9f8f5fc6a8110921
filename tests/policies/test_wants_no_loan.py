"""A job that nodes could not start has no further node lent for it."""

from __future__ import annotations

from msgspec.structs import replace

from common.model import JobState, NodeName
from coordinator.policies.registry import policy
from tests.builders import make_job_view, make_snapshot, make_worker_view
from tests.policies.aryl.lending.test_demand import FULL, gang, idle, lent, serving


def test_no_node_is_lent_for_a_job_that_nodes_could_not_start() -> None:
    """Others that are like it in all else have theirs, also where it stands before them; and no
    service keeps a node ready for it alone."""
    hangs = replace(gang("a-hangs", nodes=1), wants_no_loan=True)
    assert lent(serving(2), [hangs]) == []
    assert lent(serving(3), [hangs, gang("b", nodes=1), gang("c", nodes=1)]) == ["n0", "n1"]
    snapshot = make_snapshot(nodes=serving(1), jobs=[hangs], services=[idle()])
    said = policy("aryl").not_lent_reasons(snapshot, NodeName("n0"))
    assert said == policy("aryl").not_lent_reasons(
        make_snapshot(nodes=serving(1), services=[idle()]), NodeName("n0")
    )


def test_a_job_that_nodes_could_not_start_has_no_node_lent_to_grow() -> None:
    """It may have what is lent already."""
    grows = make_job_view(
        "grows",
        workers=(1, 4),
        gpus_per_worker=FULL,
        remaining_work_s=1e6,
        placed=(make_worker_view("grows", 0, "t0", gpus=FULL),),
        state=JobState.RUNNING,
        is_resizable=True,
        gpu_type="H100",
    )
    for wants_no_loan in (False, True):
        found = lent(serving(2), [replace(grows, wants_no_loan=wants_no_loan)])
        assert bool(found) is not wants_no_loan
