"""What minimum shares leave: who takes one more step, and who does not though GPUs are idle."""

from __future__ import annotations

import pytest
from msgspec import structs

from coordinator.policies.deadlines.leftovers import Sharing
from coordinator.policies.deadlines.promises import Book
from coordinator.policies.deadlines.shares import Claim
from coordinator.policies.deadlines.timeline import Piece

TWO_S = Claim(
    job_id="c",
    sizes=(1, 2, 4),
    rates=(1.0, 1.5, 2.0),
    gpus_per_worker=1,
    work_s=3.0,
    deadline_s=2.01,
)
"""Its share is two workers for two seconds."""


def given(claim: Claim, *, slot_s: float, gpus: int = 4) -> int:
    """Workers that it gets now, alone."""
    book = Book(0.0, gpus, {})
    book.promise([claim])
    assert book.plans[claim.job_id] == (Piece(0.0, 2.0, 2),)
    return Sharing(book, (), now_s=0.0, gpus=gpus, slot_s=slot_s).share()[claim.job_id]


@pytest.mark.parametrize(("slot_s", "workers"), [(1.0, 2), (1.2, 4), (1.5, 4)])
def test_one_more_step_is_taken_only_where_the_job_then_ends_earlier(
    slot_s: float, workers: int
) -> None:
    """Four workers for a second leave a second of work for one: it ends when it would have ended,
    and the idle GPUs stay free. For longer than that it ends earlier, and takes them."""
    assert given(TWO_S, slot_s=slot_s) == workers


def test_a_step_that_only_saves_gpu_time_is_not_taken_either() -> None:
    """Four workers for half a second and one for the rest are 3.5 GPU-s in place of four, and end
    at the same time."""
    cheap = structs.replace(TWO_S, rates=(1.4, 1.5, 1.8))
    assert given(cheap, slot_s=0.5) == 2
