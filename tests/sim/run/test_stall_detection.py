"""A run in which no work is added to what is kept is ended; how patient it is can be said."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.errors import ConfigError
from common.model import NodeName
from coordinator.sim.inputs.inputs import parse_cluster
from coordinator.sim.run.attempts import Attempt, Truth
from coordinator.sim.run.build import RunOptions, Stage
from coordinator.sim.run.outages import Crash
from coordinator.sim.run.runtime import Saves
from coordinator.sim.run.stall_detection import Headway, UnfinishedError
from coordinator.workloads.records import SpeedUp, Workload
from tests.sim.small import small
from tests.tables import each_row

PATIENCE = 200
"""Facts, of a run of two jobs that is told to wait for none beyond those for each of them."""
STEPS = 20


def cell(*, duration_s: float, jobs: int = 2, loads: bool = False) -> Workload:
    """So many jobs of a node's four GPUs, submitted at once, that name no number of workers."""
    some = small(2)
    [first, *_] = some.jobs
    gangs = tuple(
        structs.replace(
            first,
            job_id=f"gang-{number}",
            submit_s=0,
            gpus=4,
            duration_s=duration_s,
            gpus_per_worker=None,
            min_workers=None,
            max_workers=None,
        )
        for number in range(jobs)
    )
    nodes = parse_cluster("1x4+1x8" if loads else "1x4+0x8")
    return structs.replace(some, jobs=gangs, loads=some.loads if loads else (), nodes=nodes)


def looked_at_often(workload: Workload, options: RunOptions) -> Stage:
    """Played with a look every few steps, so that little patience is much."""
    stage = Stage(workload, options)
    headway = Headway(stage, options)
    stage.sim.begin()
    while stage.sim.loop.steps(STEPS) == STEPS:
        headway()
    return stage


IMPATIENT = RunOptions(policy="gandiva", has_delays=False, saves=Saves.NEVER, idle_events=0)
KEEPING = structs.replace(IMPATIENT, policy="gandiva-sets", saves=Saves.ON_REQUEST)


@pytest.mark.parametrize("options", [IMPATIENT, KEEPING], ids=["suspended", "preempted"])
def test_long_jobs_in_short_turns_get_on(options: RunOptions) -> None:
    """What they have done and keep grows with each turn, so there is headway without an end of one
    in many times as many facts as a run has patience for."""
    stage = looked_at_often(cell(duration_s=20_000), options)
    assert stage.sim.engine.state.counters.jobs_finished == 2
    assert stage.sim.events > 10 * PATIENCE


def test_turns_too_short_for_a_start_get_on_all_the_same() -> None:
    """Who was stopped is not stopped again before it has run, however short a turn is to be."""
    hurried = structs.replace(KEEPING, has_delays=True, knobs=("least_turn_ratio=0",))
    stage = looked_at_often(cell(duration_s=20_000), hurried)
    assert stage.sim.engine.state.counters.jobs_finished == 2


def crashes(every_s: float, *, times: int) -> tuple[Crash, ...]:
    """Of the only node, each for a minute."""
    return tuple(
        Crash(node=NodeName("t00000"), at_s=every_s * (1 + number), down_s=60.0)
        for number in range(times)
    )


def test_work_that_is_thrown_away_is_no_headway() -> None:
    """A job that computes between crashes, and begins again after each, does not get on."""
    options = structs.replace(IMPATIENT, crashes=crashes(1_000, times=200))
    workload = cell(duration_s=20_000, jobs=1)
    with pytest.raises(UnfinishedError, match="makes no headway: 0 of 1 jobs ended"):
        looked_at_often(workload, options)


def test_a_run_that_lost_work_may_make_up_for_it() -> None:
    """In as many facts as that had taken, though nothing is more than it was in most of them."""
    options = structs.replace(IMPATIENT, crashes=crashes(30_000, times=1))
    stage = looked_at_often(cell(duration_s=20_000), options)
    assert stage.sim.engine.state.counters.jobs_finished == 2


def test_a_job_that_nothing_happens_to_gets_on() -> None:
    """What it has done is counted as time goes by, be there only facts of others."""
    options = structs.replace(IMPATIENT, policy="fifo")
    workload = cell(duration_s=100_000, jobs=1, loads=True)
    stage = looked_at_often(workload, options)
    assert stage.sim.engine.state.counters.jobs_finished == 1
    assert stage.sim.events > 2 * PATIENCE


@each_row(
    ("now_s", "done_s"),
    [(100.0, 300.0), (130.0, 300.0), (150.0, 340.0), (480.0, 1000.0), (600.0, 1000.0)],
)
def test_work_done_by_an_instant_goes_on_until_all_is_done(now_s: float, done_s: float) -> None:
    """Not while a change pauses the job, and never beyond its work: who has computed all of it and
    is not heard of yet gets no further."""
    truth = Truth(
        work_s=1000.0,
        speedup=SpeedUp(min_workers=1, rates=(1.0,)),
        gpus_per_worker=1,
        saves=Saves.ON_REQUEST,
        path="",
        done_s=300.0,
        attempt=Attempt(number=1, multiplier=1, at_s=100.0, paused_until_s=130.0, rate=2.0),
    )
    assert truth.done_by_s(now_s) == done_s
    assert truth.done_s == 300.0


def test_nobody_is_awaited_where_no_job_lives() -> None:
    """A run has as much patience as it takes until the next job comes."""
    options = structs.replace(IMPATIENT, policy="fifo")
    workload = cell(duration_s=60, loads=True)
    first, second = workload.jobs
    later = structs.replace(second, submit_s=100_000)
    stage = looked_at_often(structs.replace(workload, jobs=(first, later)), options)
    assert stage.sim.engine.state.counters.jobs_finished == 2
    assert stage.sim.events > 2 * PATIENCE


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


def test_an_end_is_headway_and_a_new_reckoning() -> None:
    """What a job had done that is over, is nothing that those which are left have to exceed: two
    that take turns have less to do, together, in more facts than the run needed up to then."""
    workload = cell(duration_s=6_000, jobs=3)
    first, *others = workload.jobs
    later = [structs.replace(job, submit_s=19_900) for job in others]
    jobs = (structs.replace(first, duration_s=20_000), *later)
    stage = looked_at_often(structs.replace(workload, jobs=jobs), KEEPING)
    assert stage.sim.engine.state.counters.jobs_finished == 3
    assert stage.sim.events > 5 * PATIENCE


def test_next_to_nothing_is_no_gain() -> None:
    """Work that grows by less than a millionth of all there is, in all of a run's patience."""
    stage = Stage(cell(duration_s=900_000_000), structs.replace(IMPATIENT, policy="fifo"))
    stage.sim.run(60.0)
    headway = Headway(stage, IMPATIENT)
    headway()
    stage.sim.loop.run(70.0)
    stage.sim.events += 2 * PATIENCE
    with pytest.raises(UnfinishedError, match="nor did the work that is done and kept grow"):
        headway()


def why_it_ends(
    *,
    preemptions: tuple[int, int] = (0, 0),
    resizes: tuple[int, int] = (0, 0),
    saves: Saves | None = Saves.NEVER,
    has_checkpoints: bool = False,
) -> str:
    """What is said of a run with so many of them before its last end and since, in which one job
    runs and one waits."""
    workload = cell(duration_s=900)
    kept, other = workload.jobs
    jobs = (
        structs.replace(kept, has_checkpoints=True),
        structs.replace(other, has_checkpoints=has_checkpoints),
    )
    workload = structs.replace(workload, jobs=jobs)
    options = structs.replace(IMPATIENT, policy="fifo", saves=saves)
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


@pytest.mark.parametrize("saves", [None, Saves.NEVER, Saves.PERIODIC])
def test_where_jobs_only_stop_one_another_checkpoints_are_advised(saves: Saves | None) -> None:
    """Since the last end of a job; then those that do not save whenever they are asked to may lose
    their work each time."""
    why = why_it_ends(preemptions=(2, 7), saves=saves)
    assert "1 of 2 jobs ended, then none in 200 events, nor did the work that is done and " in why
    assert "kept grow, with 7 preemptions and 0 resizes; " in why
    assert why.endswith("jobs that keep their work (--checkpoints on-request) may help")


@pytest.mark.parametrize(
    ("saves", "has_checkpoints"),
    [(Saves.ON_REQUEST, False), (Saves.ON_REQUEST, True), (None, True)],
)
def test_what_all_jobs_do_already_is_not_advised(
    saves: Saves | None, *, has_checkpoints: bool
) -> None:
    """They save whenever they are asked to, each for itself or as the run says."""
    why = why_it_ends(preemptions=(2, 7), saves=saves, has_checkpoints=has_checkpoints)
    assert "; jobs keep their work, but turns may be too short to do any; the first that is" in why
    assert "checkpoints" not in why


@each_row(
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
