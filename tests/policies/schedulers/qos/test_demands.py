"""Lines of deadlines: which jobs can be in time together, found at less cost than by trying every
instant, which one is first, which ones make room, and when a pre-run is due."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from common.model import JobState, Preemptibility, WorkerRange
from common.profile import JobProfile
from coordinator.policies.contract.decisions import Preempt, Start
from coordinator.policies.contract.job_groups import Behind
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.parts.pooling import Pool
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.qos.demands import Line, Wish, wish_of
from coordinator.policies.schedulers.qos.prediction import Sample, Steps, key_of
from tests.draws import pick, whole
from tests.harness.builders import (
    NOW_S,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.policies.counted_calls import calls
from tests.policies.schedulers.qos.plain_line import PlainLine
from tests.tables import each_row

KIND = "H100"


PROFILES = (
    JobProfile(),
    JobProfile(speedup=((1, 1.0), (2, 1.9), (3, 2.0), (4, 2.0), (8, 4.0))),
    JobProfile(speedup=((2, 1.0), (4, 1.7), (6, 2.5))),
    JobProfile(model="measured"),
)


SAMPLES = (Sample(1, 3.0), Sample(2, 2.0), Sample(4, 1.6))


Row = tuple[float, float, int, int, int, int, int]
"""Work in worker-seconds, the deadline from now, fewest workers and how many more it may have,
GPUs of a worker, its profile, and how it stands: 0 waits, 1 runs and saves, 2 runs and does not, 3
nor does that, and may not be stopped."""


def job_of(number: int, row: Row) -> JobView:
    """Of one row."""
    work_s, deadline_s, fewest, more, gpus, profile, standing = row
    name = f"j{number:04}"
    placed = [make_worker_view(name, at, "n0", gpus=gpus) for at in range(fewest)]
    job = make_job_view(
        name,
        state=JobState.RUNNING if standing else JobState.PENDING,
        workers=(fewest, fewest + more),
        gpus_per_worker=gpus,
        remaining_work_s=work_s,
        submitted_at_s=NOW_S - number % 3,
        placed=placed if standing else (),
        unsaved_gpu_s=work_s * fewest * gpus / 3 if standing >= 2 else 0.0,
        preemptibility=Preemptibility.NON if standing == 3 else Preemptibility.FULL,
    )
    return structs.replace(job, deadline_at_s=NOW_S + deadline_s, profile=PROFILES[profile])


def wishes_of(rows: Sequence[Row], gpus: int, margin: float) -> list[Wish]:
    """In order of rank; those that can be in time at all."""
    jobs = tuple(job_of(number, row) for number, row in enumerate(rows))
    pool = Pool(gpu_type=KIND, gpus=gpus, jobs=jobs)
    steps: Steps = {key_of(job, KIND): SAMPLES for job in jobs if job.profile.model}
    kept = pool.kept_gpus()
    mosts = [gpus + kept.get(job.job_id, 0) for job in jobs]
    made = [
        wish_of(job, pool, steps, now_s=NOW_S, margin=margin, most_gpus=most)
        for job, most in zip(jobs, mosts, strict=True)
    ]
    return sorted((wish for wish in made if wish.is_urgent), key=lambda wish: wish.rank)


def as_before(rows: Sequence[Row], gpus: int, margin: float) -> int:
    """All plans are as by trying every instant, running jobs first and all at once; how many."""
    wishes = wishes_of(rows, gpus, margin)
    plain, quick = PlainLine(gpus, NOW_S), Line(gpus, NOW_S)
    for line in (plain, quick):
        line.add([wish for wish in wishes if wish.runs])
        line.is_settled = True
        line.add([wish for wish in wishes if not wish.runs])
    assert quick.plans == plain.plans
    others = PlainLine(gpus, NOW_S), Line(gpus, NOW_S)
    for line in others:
        line.add(wishes)
    assert others[1].plans == others[0].plans
    return len(plain.plans)


MARGINS = pick(1.0, 1.1, 1.7)


WORKS = pick(0.0, 1e-11, 0.001, 1.0, 5.0, 7.5, 10.0, 20.0, 20.0, 33.3, 60.0, 200.0)


ROWS = st.lists(
    st.tuples(
        WORKS, pick(1.0, 5.0, 9.0, 10.0, 20.0, 31.7, 40.0, 80.0), whole(1, 3), whole(0, 5),
        pick(1, 1, 2), whole(0, 3), pick(0, 0, 0, 1, 2, 2, 3),
    ),
    min_size=2,
    max_size=14,
)  # fmt: skip


FADES: list[Row] = [
    (80_000.0, 41_000.0, 2, 0, 1, 0, 0),
    (80_000.0, 81_000.0, 2, 0, 1, 0, 0),
    (1e-11, 90_000.0, 1, 0, 1, 0, 0),
]
"""At the instant at which the second follows the first one the third would end where it begins,
for rounding: it needs no GPU then."""


LOSES: list[Row] = [
    (400.0, 101.0, 4, 0, 1, 0, 0),
    (100.0, 160.0, 2, 0, 1, 0, 0),
    (80.0, 175.0, 4, 0, 1, 0, 0),
    (60.0, 178.0, 1, 1, 1, 0, 2),
]
"""The last one, which runs, fits between the first and the third with two workers: one would be
enough then if its stop threw nothing away, and would not be done before the third begins."""


GROWS: list[Row] = [
    (400.0, 100.0, 4, 0, 1, 0, 0),
    (803.0, 200.9, 4, 4, 1, 0, 3),
    (45.0, 202.0, 3, 0, 1, 0, 0),
]
"""The second one, whose base gang is nobody else's, needs as many again when the first is done."""


@settings(max_examples=400)
@given(ROWS, whole(2, 10), MARGINS)
@example(FADES, 2, 1.0)
@example(LOSES, 4, 1.0)
@example(GROWS, 4, 1.0)
def test_a_line_is_the_one_that_trying_every_instant_makes(
    rows: list[Row], gpus: int, margin: float
) -> None:
    """Whatever jobs need, hold and would lose: each begins when it did, with as many workers."""
    as_before(rows, gpus, margin)


def planned(rows: Sequence[Row], gpus: int) -> dict[str, tuple[float, int]]:
    """When each of a line begins, from now, and on how many GPUs; without a margin."""
    line = Line(gpus, NOW_S)
    line.add(wishes_of(rows, gpus, 1.0))
    return {name: (plan[0].start_s - NOW_S, plan[0].workers) for name, plan in line.plans.items()}


def test_who_may_not_be_stopped_loses_nothing_where_it_grows_later() -> None:
    """It computes at least with its base gang until the four GPUs before it are free: a stop would
    throw away a third of its work, and no size would make up for that."""
    first: Row = (400.0, 100.0, 4, 0, 1, 0, 0)
    grows: Row = (804.0, 200.9, 4, 4, 1, 0, 3)
    assert planned([first, grows], 4) == {"j0000": (0.0, 4), "j0001": (100.0, 4)}


def test_who_may_not_be_stopped_gives_what_it_takes_beyond_its_base_gang() -> None:
    """Five workers, one of which is not its own anyhow: so the other one makes room, which gives
    three GPUs for as long; and where it is the one that gives most, what a stop would throw away
    does not count."""
    needs_one: Row = (500.0, 100.0, 4, 4, 1, 0, 3)
    needs_three: Row = (300.0, 101.0, 3, 0, 1, 0, 0)
    comes: Row = (150.0, 102.0, 3, 0, 1, 0, 0)
    assert planned([needs_one, needs_three, comes], 4).keys() == {"j0000", "j0002"}
    needs_four: Row = (800.0, 100.0, 4, 4, 1, 0, 3)
    needs_one_later: Row = (100.0, 101.0, 1, 0, 1, 0, 0)
    comes_later: Row = (300.0, 102.0, 3, 0, 1, 0, 0)
    assert planned([needs_four, needs_one_later, comes_later], 4).keys() == {"j0001", "j0002"}


@each_row("seed", range(4))
def test_a_long_line_is_the_one_that_trying_every_instant_makes(seed: int) -> None:
    """Of 160 jobs, most in time and many not: steps enough for several blocks, with holes."""
    chance = random.Random(seed)
    rows: list[Row] = [
        (
            chance.uniform(20.0, 200.0), chance.uniform(30.0, 900.0), chance.randint(1, 2),
            chance.randint(0, 6), chance.randint(1, 2), chance.randrange(4),
            chance.choice((0, 0, 0, 1, 2, 2, 3)),
        )
        for _ in range(160)
    ]  # fmt: skip
    assert as_before(rows, 16, 1.1) >= 60


def waiting(count: int, window_s: float) -> list[JobView]:
    """Jobs of up to four workers whose deadlines are spread over a time."""
    jobs: list[JobView] = []
    for at in range(count):
        job = make_job_view(
            f"w{at:05}",
            workers=(1, 4),
            remaining_work_s=60.0 + 7 * at % 50,
            submitted_at_s=NOW_S - 10.0 - at % 7,
        )
        jobs.append(structs.replace(job, deadline_at_s=NOW_S + 100.0 + 37 * at % window_s))
    return jobs


@pytest.mark.parametrize("each_s", [20.0, 5.0], ids=["all in time", "half in time"])
def test_four_times_the_jobs_cost_little_more_for_each(each_s: float) -> None:
    """One of 800 waiting jobs takes a pass at most twice the calls that one of 200 takes."""
    per_job: list[float] = []
    for count in (200, 800):
        jobs = waiting(count, each_s * count)
        snapshot = make_snapshot(nodes=[make_node_view("n0", gpus=8)], jobs=jobs)
        cost = calls(partial(policy("qos").allocate, snapshot, b""))
        per_job.append(cost / count)
    assert per_job[1] <= 2 * per_job[0]


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
        unsaved_gpu_s=max(0.0, lost_s),
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
