"""Tiresias with Gittins indices: what age the index is of, and what order it gives (NSDI'19)."""

from __future__ import annotations

from coordinator.policies.bundles import policy
from tests.builders import NOW_S
from tests.served import cell, changed
from tests.served import served_job as job

HISTORY = "tiresias-gittins:services=100/100/100/10000:limits=50000/90000"
"""Of past jobs three in four took 100 GPU-seconds, the fourth 10,000: a job that outlived the first
is worth little until it is nearly done."""


def test_in_a_queue_before_the_last_the_greater_index_goes_first() -> None:
    """Age 50 has 50 left with three in four; age 200 has 9,800 left: first start does not count."""
    old = job("old", 8, served=200.0, first_s=1.0)
    young = job("young", 8, served=50.0, first_s=9.0, submitted_at_s=9.0)
    assert changed(cell([old, young], n0=8), HISTORY) == ([], ["young"])
    nearly = job("nearly", 8, served=9990.0, first_s=10.0, submitted_at_s=10.0)
    assert changed(cell([old, young, nearly], n0=8), HISTORY) == ([], ["nearly"])


def test_in_the_last_queue_the_first_start_counts() -> None:
    """There the index orders nobody (section 3.2.2)."""
    last = "tiresias-gittins:services=100/100/100/10000:limits=40"
    old = job("old", 8, served=200.0, first_s=1.0)
    nearly = job("nearly", 8, served=9990.0, first_s=10.0, submitted_at_s=10.0)
    assert changed(cell([old, nearly], n0=8), last) == ([], ["old"])


def test_the_queue_counts_before_the_index() -> None:
    """A job of a former queue goes first, however small its index."""
    low = "tiresias-gittins:services=100/100/100/10000:limits=5000/50000"
    former = job("former", 8, served=200.0, first_s=5.0)
    later = job("later", 8, served=9990.0, first_s=1.0)
    assert changed(cell([former, later], n0=8), low) == ([], ["former"])


def test_a_promotion_does_not_change_the_age_of_the_index() -> None:
    """The queue's service is reset, the total is not, and it is of the total that S is known.

    Of 9,990 GPU-seconds the job has 10 to go at most; counted from its promotion it would be as
    good as new, which is worse than an age of 50.
    """
    promoting = "tiresias-gittins:services=100/100/100/10000:limits=5000/90000:promote=1"
    back = job("back", 8, served=9990.0, first_s=9.0, waits_since_s=NOW_S - 9990.0 / 8)
    young = job("young", 8, served=50.0, first_s=1.0)
    assert changed(cell([young, back], n0=8), promoting) == ([], ["back"])
    assert changed(cell([young, back], n0=8), promoting.replace(":promote=1", "")) == (
        [],
        ["young"],
    )


def test_promoted_jobs_stand_by_their_index_in_the_first_queue() -> None:
    """A return makes nobody first there: one that outlived all but the longest waits on."""
    promoting = "tiresias-gittins:services=100/100/100/10000:limits=150/90000:promote=1"
    back = job("back", 8, served=200.0, first_s=1.0, waits_since_s=NOW_S - 200.0 / 8)
    young = job("young", 8, served=50.0, first_s=9.0)
    assert changed(cell([young, back], n0=8), promoting) == ([], ["young"])
    assert changed(cell([back], n0=8), promoting) == ([], ["back"])


def test_what_is_learned_of_a_job_is_its_total_service() -> None:
    """A promotion resets what the queues count, not what the job took: that is in the history.

    Learned is 60,100 GPU-seconds of a job that was promoted at 60,000; had 100 been learned, a job
    of age 99 would be about to end, and stand before one of age 60,000.
    """
    name = "tiresias-gittins:limits=90000/99000:promote=1000"
    promoted = "tiresias-gittins:limits=50000/99000:promote=1"
    back = job("back", 8, served=60_000.0, first_s=9.0, waits_since_s=NOW_S - 7500.0)
    memory = policy(promoted).allocate(cell([back], n0=8), b"").memory
    runs = job("back", 8, node="n0", served=60_100.0, first_s=9.0)
    memory = policy(promoted).allocate(cell([runs], n0=8, now_s=NOW_S), memory).memory
    memory = policy(promoted).allocate(cell([], n0=8, now_s=NOW_S), memory).memory
    near = job("near", 8, served=60_000.0, first_s=9.0)
    far = job("far", 8, served=99.0, first_s=1.0)
    assert changed(cell([near, far], n0=8), name, memory) == ([], ["near"])
