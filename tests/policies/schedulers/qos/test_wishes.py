"""Who of several is first, who makes room, and when a pre-run is due."""

from __future__ import annotations

from msgspec.structs import replace

from common.model import JobState, WorkerRange
from coordinator.policies.contract.decisions import Preempt, Start
from coordinator.policies.contract.snapshot import Behind, JobView
from coordinator.policies.parts.pooling import Pool
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.qos.demands import wish_of
from tests.builders import NOW_S, make_job_view, make_node_view, make_snapshot, make_worker_view


def asks(
    name: str, work_s: float, deadline_s: float, *, waited_s: float = 0.0, lost_s: float = -1.0
) -> JobView:
    """A job of one GPU; with `lost_s` from zero on it runs, and a stop throws away as much."""
    runs = lost_s >= 0.0
    job = make_job_view(
        name,
        state=JobState.RUNNING if runs else JobState.PENDING,
        remaining_work_s=work_s,
        submitted_at_s=NOW_S - waited_s,
        placed=[make_worker_view(name, 0, "n", gpus=1)] if runs else (),
        lost_if_preempted_gpu_s=max(0.0, lost_s),
    )
    return replace(job, deadline_at_s=NOW_S + deadline_s)


def told(text: str, *jobs: JobView, gpus: int = 1) -> tuple[list[str], list[str]]:
    """Who starts and who is stopped in a pass on one node."""
    node = make_node_view("n", gpus=gpus, workers=[each for job in jobs for each in job.placed])
    found = policy(text).allocate(make_snapshot(nodes=[node], jobs=jobs), b"").decisions
    starts: list[str] = [each.job_id for each in found if isinstance(each, Start)]
    stops: list[str] = [each.job_id for each in found if isinstance(each, Preempt)]
    return starts, stops


def test_of_equal_deadlines_the_job_with_less_time_to_spare_is_first() -> None:
    """Both can be in time, one after the other: the longer one begins, though it came later."""
    jobs = (asks("a", 10.0, 100.0, waited_s=50.0), asks("b", 50.0, 100.0))
    assert told("qos:margin=1", *jobs) == (["b"], [])


def test_who_makes_room_is_who_frees_most_beyond_the_work_that_a_stop_throws_away() -> None:
    """One of two running jobs makes room for two others: not the longer one, as 400 of the 1000
    GPU-seconds that it still needs would have to be done again."""
    others = (asks("p", 300.0, 1060.0), asks("q", 300.0, 1070.0))
    long, short = asks("x", 1000.0, 1050.0, lost_s=400.0), asks("y", 900.0, 1050.0, lost_s=0.0)
    assert told("qos:margin=1", long, short, *others, gpus=2) == (["p"], ["y"])
    saved = asks("x", 1000.0, 1050.0, lost_s=0.0)
    assert told("qos:margin=1", saved, short, *others, gpus=2) == (["p"], ["x"])


def before_gang() -> JobView:
    """A pre-run of 50 s; its gang has 1000 s from now for 800 worker-seconds on up to two."""
    gang = Behind(
        workers=WorkerRange(min=1, max=2), gpus_per_worker=1, work_s=800.0, estimate_source="told"
    )
    return replace(asks("pre", 50.0, 1000.0), behind=gang)


def test_a_pre_run_is_due_before_its_gang_with_the_margin_of_that() -> None:
    """400 s at its fastest, twice that with a margin of 2: so it is due at 200 s, not at 600."""
    job = before_gang()
    pool = Pool(gpu_type="H100", gpus=8, jobs=(job,))
    for margin, due_s in ((1.0, 600.0), (2.0, 200.0)):
        found = wish_of(job, pool, {}, now_s=NOW_S, margin=margin)
        assert found.job.deadline_at_s == NOW_S + due_s


def test_a_pre_run_goes_before_a_job_that_is_due_later_than_it() -> None:
    """With a margin of 2 it is due before a job whose deadline is at 400 s, without it behind."""
    jobs = (asks("other", 50.0, 400.0), before_gang())
    assert told("qos:margin=2", *jobs) == (["pre"], [])
    assert told("qos:margin=1", *jobs) == (["other"], [])
