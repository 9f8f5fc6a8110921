"""A run in which jobs only take turns at being stopped is ended; how patient it is can be said."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.clock import SystemClock
from common.errors import ConfigError
from coordinator.sim.ending import Headway
from coordinator.sim.inputs import parse_cluster
from coordinator.sim.run import play
from coordinator.sim.runtime import Saves
from coordinator.sim.stage import RunOptions, Stage
from tests.sim.small import small


def test_long_jobs_in_short_turns_need_more_patience() -> None:
    """Too many facts without a job's end are no headway, unless the run is told to wait longer."""
    some = small(2)
    jobs = tuple(structs.replace(job, submit_s=0, gpus=4, duration_s=20_000) for job in some.jobs)
    workload = structs.replace(some, jobs=jobs, loads=(), nodes=parse_cluster("1x4+0x8"))
    options = RunOptions(policy="gandiva-sets", has_delays=False, saves=Saves.ON_REQUEST)
    impatient = structs.replace(options, idle_events=0)
    with pytest.raises(ConfigError, match="makes no headway"):
        play(workload, impatient, clock=SystemClock())
    assert play(workload, options, clock=SystemClock()).result.jobs == len(jobs)


def test_patience_is_for_each_end_and_grows_with_the_jobs() -> None:
    """Pairs of jobs that take turns, one pair after the other: in all there are more facts than the
    run has patience for, but never so many without a job's end."""
    some = small(12)
    jobs = tuple(
        structs.replace(
            job,
            submit_s=20_000 * (number // 2),
            gpus=4,
            duration_s=4_500,
            gpus_per_worker=None,
            min_workers=None,
            max_workers=None,
        )
        for number, job in enumerate(some.jobs)
    )
    workload = structs.replace(some, jobs=jobs, loads=(), nodes=parse_cluster("1x4+0x8"))
    options = RunOptions(
        policy="gandiva-sets", has_delays=False, saves=Saves.ON_REQUEST, idle_events=0
    )
    stage = Stage(workload, options)
    stage.sim.run_jobs(Headway(stage, options))
    assert stage.sim.engine.state.counters.jobs_finished == len(jobs)
    assert stage.sim.events > 100 * len(jobs)


def why_it_ends(*, preemptions: tuple[int, int] = (0, 0), resizes: tuple[int, int] = (0, 0)) -> str:
    """What is said of a run with so many of them before its last end and since, in which one job
    runs and one waits."""
    some = small(2)
    jobs = tuple(structs.replace(job, submit_s=0, gpus=4, duration_s=900) for job in some.jobs)
    workload = structs.replace(some, jobs=jobs, loads=(), nodes=parse_cluster("1x4+0x8"))
    options = RunOptions(policy="fifo", has_delays=False, idle_events=0)
    stage = Stage(workload, options)
    stage.sim.run(60.0)
    headway, counters = Headway(stage, options), stage.sim.engine.state.counters
    counters.jobs_finished += 1
    counters.preemptions, counters.resizes = preemptions[0], resizes[0]
    headway()
    counters.preemptions += preemptions[1]
    counters.resizes += resizes[1]
    stage.sim.events += 1_000
    with pytest.raises(ConfigError) as caught:
        headway()
    return str(caught.value)


def test_where_jobs_only_stop_one_another_checkpoints_are_advised() -> None:
    """Since the last end of a job; then they may lose their work each time."""
    why = why_it_ends(preemptions=(2, 7))
    assert "then none in 200 events, with 7 preemptions and 0 resizes; " in why
    assert why.endswith("jobs that keep their work (--checkpoints on-request) may help")


@pytest.mark.parametrize(
    ("preemptions", "resizes", "done"),
    [
        ((0, 0), (0, 0), "0 preemptions and 0 resizes"),
        ((7, 0), (0, 0), "0 preemptions and 0 resizes"),
        ((7, 0), (3, 900), "0 preemptions and 900 resizes"),
        ((7, 1), (3, 900), "1 preemption and 900 resizes"),
    ],
)
def test_else_it_is_said_what_the_first_that_is_left_waits_for(
    preemptions: tuple[int, int], resizes: tuple[int, int], done: str
) -> None:
    """What was stopped before the last end is no reason, and workers that come and go lose no work:
    that advice would help nobody."""
    why = why_it_ends(preemptions=preemptions, resizes=resizes)
    assert f"with {done}; the first that is left is " in why
    assert "checkpoints" not in why
