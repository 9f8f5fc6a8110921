"""Tiresias with Gittins indices: what age the index is of, and what order it gives (NSDI'19)."""

from __future__ import annotations

import msgspec
from msgspec import structs

from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.tiresias.policy import Memory
from tests.harness.builders import NOW_S
from tests.harness.served import cell, changed
from tests.harness.served import served_job as job
from tests.policies.tenant_passes import Asked, Cell

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


# --- jobs that quotas hide ----------------------------------------------------------------------

LEARNING = "tiresias-gittins:limits=90000"


NO_MORE = TenantView(name="a", guarantee_gpus=8, borrow_limit_gpus=0)
"""A tenant that may use no more than what `full` has."""


def of(view: JobView, tenant: str) -> JobView:
    """The same job, a tenant's."""
    return structs.replace(view, tenant=tenant)


def full() -> JobView:
    """The job that has all that its tenant may use."""
    return of(job("full", 8, node="n0", served=499.0, first_s=1.0), "a")


def ran() -> JobView:
    """A job of the same tenant with 500 GPU-seconds, which waits: its quota hides it."""
    return of(job("ran", 8, served=500.0, first_s=1.0), "a")


def with_quotas(*jobs: JobView) -> ClusterSnapshot:
    """Two nodes of 8 with these jobs, and the quota of `a`."""
    return structs.replace(cell(jobs, n0=8, n1=8), tenants=(NO_MORE,))


def seen_once() -> bytes:
    """What a pass remembers that had `ran` before it."""
    return policy(LEARNING).allocate(cell([full(), ran()], n0=8), b"").memory


def test_whoever_is_hidden_by_a_quota_has_not_left() -> None:
    """However many passes it waits through its service is nobody's whole one; once it goes it is
    learned, and once."""
    made, memory = policy(LEARNING), seen_once()
    for _ in range(3):
        memory = made.allocate(with_quotas(full(), ran()), memory).memory
        kept = msgspec.msgpack.decode(memory, type=Memory)
        assert kept.served == ()
        assert "ran" in kept.lived
    for _ in range(2):
        memory = made.allocate(with_quotas(full()), memory).memory
        assert msgspec.msgpack.decode(memory, type=Memory).served == (500.0,)


def test_a_hidden_job_counts_with_no_service_after_its_stop() -> None:
    """It ran when it was last seen, and waits since: what it holds no more it does not attain."""
    made = policy(LEARNING)
    runs = of(job("ran", 8, node="n1", served=500.0, first_s=1.0), "a")
    memory = made.allocate(with_quotas(full(), runs), b"").memory
    memory = made.allocate(with_quotas(full(), ran()), memory).memory
    later = structs.replace(with_quotas(full()), now_s=NOW_S + 100.0)
    memory = made.allocate(later, memory).memory
    assert msgspec.msgpack.decode(memory, type=Memory).served == (500.0,)


def test_what_a_hidden_job_has_so_far_stops_nobody() -> None:
    """No job has left: nothing is known of any, and whoever runs goes on. Taken for a whole job's,
    its 500 GPU-seconds would have the one that passed them stopped for the one that has not."""
    old = of(job("old", 8, node="n1", served=600.0, first_s=2.0), "b")
    new = of(job("new", 8, served=100.0, first_s=3.0), "b")
    snapshot, memory = with_quotas(full(), ran(), old, new), seen_once()
    for _ in range(3):
        assert changed(snapshot, LEARNING, memory) == ([], [])
        memory = policy(LEARNING).allocate(snapshot, memory).memory


def test_a_history_of_a_shared_cell_is_of_jobs_that_ended() -> None:
    """Half of the jobs wait for their quota at any time: no more is learned than there are ends."""
    tenants = [
        TenantSettings(name="a", guarantee_gpus=8, borrow_limit_gpus=0),
        TenantSettings(name="b", guarantee_gpus=4),
    ]
    played = Cell("tiresias-gittins", tenants, check=True)
    played.ask(
        Asked(
            tenant="aab"[number % 3],
            at_s=40.0 * number,
            gpus=(4, 2, 8)[number % 3],
            work_s=(300.0, 1800.0, 900.0, 3000.0)[number % 4],
        )
        for number in range(24)
    )
    counters = played.engine.state.counters
    for until_s in range(600, 24_001, 600):
        played.run(until_s=float(until_s))
        kept = msgspec.msgpack.decode(played.engine.state.policy_memory, type=Memory)
        assert len(kept.served) <= counters.jobs_finished
    assert counters.jobs_finished == 24
