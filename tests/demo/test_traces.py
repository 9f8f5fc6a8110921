"""The packaged slices keep the rules of ORIGIN.md; bad trace files are named to the column."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.jobspec import parse
from common.profile import JobProfile
from coordinator.demo import cut
from coordinator.demo.load import arrivals, percentile
from coordinator.demo.traces import (
    TENANTS,
    JobOptions,
    find,
    ratios,
    read_jobs,
    read_load,
    searches,
    shape,
    submissions,
)
from coordinator.workloads.records import LoadSeries, TraceJob
from tests.tables import each_row

OPTIONS = JobOptions(speed=120.0, checkpoint_root=Path("/shared/checkpoints"))
SQUARE = LoadSeries(name="x", values=(100, 0, 50), step_s=600)


def job(submit_s: float, *, duration_s: float, gpus: int, model: str = "") -> TraceJob:
    """A row of a trace."""
    return TraceJob(job_id="j", submit_s=submit_s, duration_s=duration_s, gpus=gpus, model=model)


def test_packaged_jobs_obey_the_rules_they_were_cut_by() -> None:
    """Every packaged job is in order and within the bounds that ORIGIN.md states."""
    jobs = read_jobs()
    assert len(jobs) == cut.JOB_LIMIT
    assert jobs[0].submit_s == 0
    assert [job.submit_s for job in jobs] == sorted(job.submit_s for job in jobs)
    assert all(cut.SHORTEST_S <= job.duration_s <= cut.LONGEST_S for job in jobs)
    assert {job.gpus for job in jobs} == {1, 4, 8, 16}


def test_packaged_jobs_are_more_than_two_minutes_of_work_for_the_demo() -> None:
    """At speed 120 the first two minutes ask for more GPUs than training and lent nodes have."""
    jobs = [made for made in submissions(read_jobs(), OPTIONS) if made.at_s < 120]
    asked = sum(job.gpus * job.duration_s for job in read_jobs()[: len(jobs)]) / 120
    assert len(jobs) >= 100
    assert asked / (48 + 32) > 120


def test_packaged_load_is_a_day_with_a_fall_a_trough_and_a_rise() -> None:
    """The day begins high, has its lowest hour in the first half, and ends where it began."""
    load = read_load()
    shares = ratios(load)
    assert load.length_s == 86_400
    assert shares[0] > 0.8
    assert min(shares) < 0.3
    assert shares.index(min(shares)) < len(shares) / 2
    assert sum(shares[-6:]) / 6 > 0.7


def test_every_submission_is_a_valid_job_file() -> None:
    """What the demo submits passes the same checks as a person's job file."""
    for made in submissions(read_jobs(), OPTIONS):
        assert parse(msgspec.to_builtins(made.spec), source=made.spec.name) == made.spec


def test_every_other_larger_job_is_elastic() -> None:
    """Jobs of two GPUs and more alternate; single GPUs never are elastic."""
    jobs = [job(n, duration_s=600, gpus=gpus) for n, gpus in enumerate((2, 1, 4, 8))]
    made = submissions(jobs, OPTIONS)
    assert [m.spec.is_elastic for m in made] == [True, False, False, True]


def test_single_gpus_of_one_minute_are_one_search() -> None:
    """At most four of them, one after the other; a larger job or a longer pause ends it."""
    times = ((0, 1), (10, 1), (69, 1), (80, 1), (81, 1), (82, 4), (83, 1), (144, 1))
    jobs = [job(at_s, duration_s=600, gpus=gpus) for at_s, gpus in times]
    assert [len(group) for group in searches(jobs)] == [4, 1, 1, 1, 1]
    made = submissions(jobs, OPTIONS)
    assert len({m.spec.app for m in made[:4]}) == 1
    assert made[0].spec.app is not None
    assert [m.spec.app for m in made[4:]] == [None] * 4
    assert [m.tenant for m in made] == ["research"] * 4 + [
        "product", "platform", "research", "product",
    ]  # fmt: skip


def test_every_other_job_by_itself_has_a_deadline_that_it_could_meet() -> None:
    """More than it computes with the fewest workers, plus the way to its first step."""
    jobs = [job(n * 600, duration_s=1200, gpus=1) for n in range(8)]
    made = submissions(jobs, OPTIONS)
    assert [m.spec.deadline_s for m in made] == [22.5, None, 25.0, None, 30.0, None, 22.5, None]


def test_the_packaged_jobs_have_all_that_policies_look_at() -> None:
    """Of the first two minutes: three tenants, searches of several trials, deadlines."""
    made = [each for each in submissions(read_jobs(), OPTIONS) if each.at_s < 120]
    assert {each.tenant for each in made} == set(TENANTS)
    apps = [each.spec.app for each in made if each.spec.app]
    assert len(set(apps)) >= 10
    assert sum(each.spec.deadline_s is not None for each in made) >= 20
    assert {each.spec.profile.model for each in made} == {""}


def test_a_model_that_the_trace_names_is_told() -> None:
    """Without facts of it: the demo's worker computes as it does whatever it is called."""
    jobs = [job(0, duration_s=600, gpus=1, model="vgg16")]
    (made,) = submissions(jobs, OPTIONS)
    assert made.spec.profile == JobProfile(model="vgg16")


def test_speed_scales_arrivals_and_durations_only() -> None:
    """At twice the speed a job comes and ends in half the time; its grace stays."""
    jobs = [
        job(0, duration_s=1200, gpus=1),
        job(60, duration_s=1200, gpus=1),
    ]
    slow = submissions(jobs, JobOptions(speed=10, checkpoint_root=Path("/c")))[1]
    fast = submissions(jobs, JobOptions(speed=20, checkpoint_root=Path("/c")))[1]
    assert (slow.at_s, fast.at_s) == (6.0, 3.0)
    assert "--work-s=120.000" in slow.spec.command
    assert "--work-s=60.000" in fast.spec.command
    assert slow.spec.checkpoint.grace_s == fast.spec.checkpoint.grace_s
    assert slow.spec.command[0] == sys.executable


@given(st.integers(1, 200), st.booleans(), st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_a_shape_fits_a_node_and_the_cap(gpus: int, is_elastic: bool, most_gpus: int) -> None:
    """No worker spans nodes, no gang exceeds the cap, and elastic gangs may double."""
    per_worker, workers = shape(gpus, is_elastic=is_elastic, most_gpus=most_gpus, gpus_per_node=8)
    assert per_worker in {1, 2, 4, 8}
    assert min(gpus, most_gpus) <= workers.min * per_worker <= most_gpus
    assert workers.max == workers.min * (2 if is_elastic else 1)


def test_a_philly_file_is_read_from_its_first_job(tmp_path: Path) -> None:
    """Wall times become seconds from the first job; rows without a GPU are no jobs."""
    path = tmp_path / "philly.csv.gz"
    text = (
        "timestamp,duration,num_gpus,gpu_time,cluster\n"
        "2017-10-01 00:00:00,90.0,1,90.0,bb\n"
        "2017-10-01 00:00:30,90.0,0,0.0,bb\n"
        "2017-10-01 00:01:00,30.0,8,240.0,aa\n"
    )
    path.write_bytes(gzip.compress(text.encode()))
    found = [(each.submit_s, each.duration_s, each.gpus) for each in read_jobs(path)]
    assert found == [(0, 90, 1), (60, 30, 8)]


def test_a_servegen_aggregate_gives_the_asked_model(tmp_path: Path) -> None:
    """Other models' rows are left out."""
    path = tmp_path / "rates.csv"
    path.write_text(
        "model,t_s,req_per_s\n"
        "language:m-large,0,9\nlanguage:m-large,600,8\n"
        "language:m-small,0,1\nlanguage:m-small,600,2\n"
    )
    assert read_load(path).samples() == [(0, 1), (600, 2)]
    with pytest.raises(ConfigError, match="m-mid"):
        read_load(path, model="m-mid")


@each_row(
    ("text", "said"),
    [
        (
            "submit_s,duration_s,gpus\n0,10,1\n5,x,1\n",
            "line 3: column duration_s: 'x' is not a number",
        ),
        (
            "submit_s,duration_s,gpus\n0,10,1.5\n",
            "line 2: column gpus: '1.5' is not a whole number",
        ),
        (
            "submit_s,duration_s,gpus\n0,-1,1\n",
            "line 2: column duration_s: -1, expected at least 0",
        ),
        ("submit_s,duration_s,gpus\n0,nan,1\n", "line 2: column duration_s: 'nan' is not a number"),
        ("submit_s,duration_s,gpus\n0,10\n", "line 2: column gpus: missing"),
        (
            "timestamp,duration,num_gpus,cluster\nsoon,1,1,aa\n",
            "column timestamp: 'soon' is not a date and time",
        ),
        ("a,b\n1,2\n", "line 1: column a: no known trace begins so"),
    ],
)
def test_a_bad_job_file_is_named_to_the_column(tmp_path: Path, text: str, said: str) -> None:
    """An error names file, line, column, what stood there and what was expected."""
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_jobs(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


@each_row(
    ("text", "said"),
    [
        ("t_s,req_per_s\n0,1\n600,1\n1300,1\n", "line 4: column t_s: 1300, expected 1200"),
        ("t_s,req_per_s\n0,0\n600,0\n", "all zero"),
        ("t_s,rate\n0,0\n", "column req_per_s or busy_ratio: missing"),
        ("t_s,req_per_s\n0,1\n600,-3\n", "line 3: column req_per_s: -3"),
    ],
)
def test_a_bad_load_file_is_named_to_the_column(tmp_path: Path, text: str, said: str) -> None:
    """Uneven steps, a load of nothing, and negative rates are errors."""
    path = tmp_path / "load.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_load(path)
    assert said in str(caught.value)


def test_a_trace_is_found_by_path_or_below_the_traces_directory(tmp_path: Path) -> None:
    """A name is tried as a path, then below the directory; the error lists both."""
    (tmp_path / "a.csv").write_text("")
    assert find("a.csv", str(tmp_path)) == tmp_path / "a.csv"
    assert find(str(tmp_path / "a.csv")) == tmp_path / "a.csv"
    with pytest.raises(ConfigError, match=r"b\.csv"):
        find("b.csv", str(tmp_path))


def test_arrivals_follow_the_rate_of_each_step() -> None:
    """Nothing arrives in a step without load, and half the load brings half the requests."""
    instants = list(arrivals(SQUARE, speed=60, peak_req_per_s=200, seed=3))
    first = sum(at_s < 10 for at_s in instants)
    silent = sum(10 <= at_s < 20 for at_s in instants)
    last = sum(20 <= at_s < 30 for at_s in instants)
    assert instants == sorted(instants)
    assert silent == 0
    assert first + last == len(instants)
    # 2,000 and 1,000 expected: five standard deviations of a Poisson count on either side.
    assert abs(first - 2000) < 5 * 2000**0.5
    assert abs(last - 1000) < 5 * 1000**0.5


def test_arrivals_repeat_by_seed_and_by_cycle() -> None:
    """A seed gives the same instants again, another one others; cycles lengthen the series."""
    once = list(arrivals(SQUARE, speed=60, peak_req_per_s=20, seed=3))
    twice = list(arrivals(SQUARE, speed=60, peak_req_per_s=20, seed=3, cycles=2))
    assert once == list(arrivals(SQUARE, speed=60, peak_req_per_s=20, seed=3))
    assert once != list(arrivals(SQUARE, speed=60, peak_req_per_s=20, seed=4))
    assert twice[: len(once)] == once
    assert 30 <= twice[len(once)] < twice[-1] < 60


def test_a_percentile_is_a_value_that_occurred() -> None:
    """Nearest rank: no interpolation, the maximum at 1, nothing of nothing."""
    assert percentile([], 0.5) is None
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 1.0) == 4.0
