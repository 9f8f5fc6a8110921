"""Deadlines by prediction: how long a job takes, which jobs are admitted, which grow and which give
back, and how often one moves."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from common.model import JobState
from common.profile import JobProfile
from coordinator.policies.contract.decisions import Decision, Preempt, Resize, Start
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.parts.memory import recalled
from coordinator.policies.parts.pooling import Pool
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.qos.demands import wish_of
from coordinator.policies.schedulers.qos.prediction import (
    MODELS_KEPT,
    Memory,
    Prediction,
    Sample,
    fit,
    key_of,
    refitted,
)
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

EXACT = "qos:margin=1"


def view(
    name: str,
    work_s: float,
    deadline_s: float | None,
    *,
    workers: tuple[int, int] = (1, 8),
    placed: int = 0,
    model: str = "",
) -> JobView:
    """A job of one GPU a worker; `deadline_s` from now. With `placed` workers it runs on node n."""
    job = make_job_view(
        name,
        state=JobState.RUNNING if placed else JobState.PENDING,
        workers=workers,
        remaining_work_s=work_s,
        submitted_at_s=NOW_S - 100.0,
        placed=[
            make_worker_view(name, index, "n", gpus=1, is_flexible=index >= workers[0])
            for index in range(placed)
        ],
    )
    return job_with(
        job,
        deadline_at_s=None if deadline_s is None else NOW_S + deadline_s,
        profile=JobProfile(model=model),
        estimated_left_s=work_s,
        as_of_s=NOW_S,
        work_rate=placed,
        computing_gpus=placed,
    )


def decide(*jobs: JobView, gpus: int = 8, text: str = EXACT) -> dict[str, Decision]:
    """One pass on one node, by job."""
    workers = [worker for job in jobs for worker in job.placed]
    node = make_node_view("n", gpus=gpus, workers=workers)
    found = policy(text).allocate(make_snapshot(nodes=[node], jobs=jobs), b"")
    return {decision.job_id: decision for decision in found.decisions}  # type: ignore[union-attr]  # all of jobs


def started(decision: Decision) -> int:
    """Workers of a start."""
    assert isinstance(decision, Start)
    return sum(placement.worker_count for placement in decision.placements)


# --- prediction -----------------------------------------------------------------------------------


@given(st.floats(0, 10), st.floats(0.01, 10), st.sets(st.integers(1, 64), min_size=2, max_size=6))
def test_the_fit_finds_what_the_steps_follow(a: float, b: float, sizes: set[int]) -> None:
    """Exact measurements of a + b / workers give a and b back."""
    found = fit([Sample(size, a + b / size) for size in sorted(sizes)])
    for size in (1, 2, 64):
        assert found[0] + found[1] / size == pytest.approx(a + b / size, rel=1e-6, abs=1e-9)


@given(st.dictionaries(st.integers(1, 16), st.floats(0.1, 10), min_size=1, max_size=6))
def test_no_part_of_a_step_is_negative(rows: dict[int, float]) -> None:
    """Whatever was measured, more workers never make a step longer, nor is it done in no time."""
    a, b = fit([Sample(*row) for row in rows.items()])
    assert min(a, b) >= 0
    assert a + b > 0


def test_one_size_alone_scales_in_proportion() -> None:
    """With a single measurement all of the step is taken to shrink with workers."""
    assert fit([Sample(4, 2.0)]) == (0.0, 8.0)


def test_steps_that_grow_with_workers_are_taken_as_constant() -> None:
    """The best bounded fit of steps that get longer is their mean: workers do not help."""
    assert fit([Sample(1, 1.0), Sample(2, 3.0)]) == (2.0, 0.0)


HERE = "H100"


def measured(job: JobView, workers: int, step_s: float, *, on: str = HERE) -> JobView:
    """A running job that has measured a step time."""
    return job_with(
        job,
        step_time_s=step_s,
        steps_workers=workers,
        steps_gpu_type=on,
        steps_left=100.0,
    )


def test_step_times_are_learned_by_model() -> None:
    """What one job measured serves the next of its model, and the memory survives its encoding."""
    first = measured(view("a", 100.0, None, placed=1, model="m"), 1, 3.0)
    memory = refitted(Memory(), [first])
    memory = refitted(memory, [measured(first, 2, 2.0)])
    memory = recalled(msgspec.msgpack.encode(memory), Memory)
    fresh = view("b", 300.0, None, model="m")
    found = Prediction(fresh, memory.steps, NOW_S, 1.0, gpu_type=HERE)
    assert found.source == "step times of 2 sizes"
    assert found.left_s(1) == pytest.approx(300.0)
    assert found.left_s(2) == pytest.approx(200.0)
    assert found.left_s(4) == pytest.approx(150.0)
    assert refitted(memory, [measured(first, 2, 2.0)]) is memory


def test_a_running_job_is_predicted_by_its_own_steps() -> None:
    """Steps left times seconds a step, scaled by the fit to other sizes, with the margin."""
    job = measured(view("a", 1e9, None, placed=2, model="m"), 2, 2.0)
    memory = Memory({key_of(job, HERE): (Sample(1, 3.0), Sample(2, 2.0))})
    found = Prediction(job, memory.steps, NOW_S + 50.0, 1.1, gpu_type=HERE)
    assert found.left_s(2) == pytest.approx(1.1 * (200.0 - 50.0))
    assert found.left_s(1) == pytest.approx(1.1 * 150.0 * 1.5)


def test_without_measurements_the_profile_counts() -> None:
    """A job that tells how it scales is predicted by that; any other one in proportion."""
    profile = JobProfile(speedup=((1, 1.0), (2, 1.5)))
    told = structs.replace(view("a", 300.0, None), profile=profile)
    for job, left_s in ((told, 200.0), (view("b", 300.0, None), 150.0)):
        found = Prediction(job, {}, NOW_S, 1.0, gpu_type=HERE)
        assert found.left_s(2) == pytest.approx(left_s)


def test_a_step_time_of_one_gpu_type_says_nothing_of_another() -> None:
    """Two sizes of V100 are learned: on T4 the job is as fast as its profile says, not as they."""
    profile = JobProfile(model="m", speedup=((1, 1.0), (2, 1.9)))
    seen = structs.replace(view("a", 100.0, None, placed=1), profile=profile)
    memory = refitted(Memory(), [measured(seen, 1, 3.0, on="V100")])
    memory = refitted(memory, [measured(seen, 2, 3.0, on="V100")])
    fresh = structs.replace(view("b", 380.0, None), profile=profile)
    there, here = (
        Prediction(fresh, memory.steps, NOW_S, 1.0, gpu_type=kind) for kind in ("V100", "T4")
    )
    assert (there.left_s(2), here.left_s(2)) == pytest.approx((380.0, 200.0))
    assert (there.source, here.source) == ("step times of 2 sizes", "its profile")


def test_a_job_that_moved_is_not_as_fast_as_where_it_was_measured() -> None:
    """Its steps left times its seconds a step hold on V100 only; else its estimate counts."""
    job = measured(view("a", 800.0, None, placed=2, model="m"), 2, 2.0, on="V100")
    steps = {key_of(job, kind): (Sample(1, 3.0), Sample(2, 2.0)) for kind in ("V100", "T4")}
    left_s = [
        Prediction(job, steps, NOW_S, 1.0, gpu_type=kind).left_s(2) for kind in ("V100", "T4")
    ]
    assert left_s == pytest.approx([200.0, 800.0 * 2.0 / 3.0])


def test_a_step_time_of_no_known_type_is_not_learned() -> None:
    """Who measured it did not say where: it would be taken for any type."""
    job = measured(view("a", 800.0, None, placed=2, model="m"), 2, 2.0, on="")
    assert refitted(Memory(), [job]) == Memory()


def test_workers_that_stand_for_one_are_counted_as_the_type_has_them() -> None:
    """On a type of which two workers stand for one, one of the reference type is measured as two.

    A step takes 1 + 8 / n there: 5 s with two workers, 3 s with four.
    """
    job = measured(view("a", 1e9, None, placed=4, model="m"), 4, 3.0, on="T4")
    steps = {key_of(job, "T4"): (Sample(2, 5.0), Sample(4, 3.0))}
    found = Prediction(job, steps, NOW_S, 1.0, gpu_type="T4", factor=2)
    assert [found.left_s(count) for count in (1, 2, 4)] == pytest.approx([500.0, 300.0, 200.0])
    fresh = Prediction(view("b", 50.0, None, model="m"), steps, NOW_S, 1.0, gpu_type="T4", factor=2)
    assert [fresh.left_s(count) for count in (1, 2)] == pytest.approx([50.0, 30.0])


def test_what_a_job_needs_of_a_pool_counts_workers_as_its_type_has_them() -> None:
    """A step takes 1 + 8 / n on T4, of which two stand for one: 50 s of work takes 30 s with two.

    Were two workers taken for two T4, they would be in time after 28 s.
    """
    fresh = view("b", 50.0, 29.0, model="m")
    job = structs.replace(fresh, gpu=structs.replace(fresh.gpu, worker_multiplier={"T4": 2}))
    steps = {key_of(job, "T4"): (Sample(2, 5.0), Sample(4, 3.0))}
    pool = Pool(gpu_type="T4", gpus=16, jobs=(job,))
    found = wish_of(job, pool, steps, now_s=NOW_S, margin=1.0)
    assert found.time.left_s(2) == pytest.approx(30.0)
    assert (found.need, found.gpus_each) == (3, 2)


def test_each_pool_learns_from_its_own_gpus() -> None:
    """100 s of work in 60 s: two V100 are twice as fast as one, two T4 are no faster than one."""
    jobs = [
        job_with(
            view(f"{kind}-{count}", 1e6, None, placed=count, model="m"),
            gpu_type=kind,
            step_time_s=step_s,
            steps_workers=count,
            steps_gpu_type=kind,
            steps_left=100.0,
        )
        for kind, rows in (("V100", ((1, 2.0), (2, 1.0))), ("T4", ((1, 2.0), (2, 2.0))))
        for count, step_s in rows
    ]
    memory = refitted(Memory(), jobs)
    asks = view("new", 100.0, 60.0, model="m")
    pools = {kind: Pool(gpu_type=kind, gpus=8, jobs=(asks,)) for kind in ("V100", "T4")}
    needs = {
        kind: wish_of(asks, pool, memory.steps, now_s=NOW_S, margin=1.0).need
        for kind, pool in pools.items()
    }
    assert needs == {"V100": 2, "T4": None}


def test_what_is_remembered_is_bounded() -> None:
    """The models that were seen longest ago are forgotten."""
    memory = Memory()
    for number in range(MODELS_KEPT + 5):
        job = measured(view("a", 1.0, None, placed=1, model=f"m{number}"), 1, 1.0)
        memory = refitted(memory, [job])
    assert len(memory.steps) == MODELS_KEPT
    assert f"m4/0/1/{HERE}" not in memory.steps


def test_a_model_that_still_trains_is_not_forgotten() -> None:
    """However long its steps have taken as long as before: others were heard of longer ago, and
    what it had with another number of workers would be lost."""
    steady = view("a", 1.0, None, placed=2, model="steady")
    memory = refitted(Memory(), [measured(steady, 1, 1.0)])
    steady = measured(steady, 2, 0.6)
    for number in range(MODELS_KEPT + 5):
        job = measured(view("b", 1.0, None, placed=1, model=f"m{number}"), 1, 1.0)
        memory = refitted(memory, [steady, job])
    assert len(memory.steps) == MODELS_KEPT
    assert memory.steps[f"steady/0/1/{HERE}"] == (Sample(1, 1.0), Sample(2, 0.6))
    assert f"m5/0/1/{HERE}" not in memory.steps


# --- who runs, with how many workers --------------------------------------------------------------


def test_a_job_gets_the_fewest_workers_that_are_in_time() -> None:
    """800 worker-seconds in 300 s need three workers, and others wait for the rest."""
    found = decide(view("a", 800.0, 300.0), view("b", 800.0, 170.0), gpus=8)
    assert {name: started(decision) for name, decision in found.items()} == {"a": 3, "b": 5}


def test_the_margin_counts() -> None:
    """With a margin of 1.2 the same job needs four."""
    jobs = (view("a", 800.0, 300.0), view("b", 1e6, None, workers=(5, 5)))
    assert started(decide(*jobs, text="qos:margin=1.2")["a"]) == 4


def test_a_job_whose_neighbours_go_lets_more_in() -> None:
    """Moore and Hodgson: one job of all GPUs gives way to two later ones that fit together."""
    large = view("a", 800.0, 100.0)
    small = [view("b", 400.0, 101.0), view("c", 400.0, 102.0)]
    assert set(decide(large, *small)) == {"b", "c"}


def test_a_long_job_that_runs_gives_way_to_a_short_one() -> None:
    """Either can be in time, not both: who leaves more GPU-time to others is, though it waits."""
    long, short = view("a", 8000.0, 1200.0, placed=8), view("b", 80.0, 12.0, workers=(8, 8))
    stop, start = decide(long, short).values()
    assert (type(stop), type(start)) == (Preempt, Start)


def test_work_that_a_stop_would_throw_away_counts_for_who_runs() -> None:
    """The same job with a day of unsaved work goes on: stopping it would not give time free."""
    long = job_with(
        view("a", 8000.0, 1200.0, workers=(8, 8), placed=8),
        unsaved_gpu_s=86_400.0,
        attained_gpu_s=86_400.0,
    )
    assert decide(long, view("b", 80.0, 12.0, workers=(8, 8))) == {}


def test_a_job_without_time_to_spare_is_not_given_up() -> None:
    """A margin of 1.2 would need nine of eight workers: eight are in time if all goes well, and a
    job without a deadline waits for them."""
    jobs = (view("a", 800.0, 105.0), view("b", 1e6, None))
    found = decide(*jobs, text="qos:margin=1.2")
    assert started(found["a"]) == 8
    assert list(found) == ["a"]


def test_a_hopeless_job_runs_on_what_is_left() -> None:
    """No size meets its deadline: it comes after those that can be in time."""
    found = decide(view("a", 1e6, 10.0), view("b", 700.0, 100.0))
    assert {name: started(decision) for name, decision in found.items()} == {"a": 1, "b": 7}
    assert "cannot be met" in found["a"].reason


def test_a_predicted_miss_grows() -> None:
    """A running job that would be late with what it has gets what it needs."""
    late = view("a", 800.0, 200.0, placed=2)
    found = decide(late, view("b", 1e6, None, workers=(4, 4)))
    resize = found["a"]
    assert isinstance(resize, Resize)
    assert sum(placement.worker_count for placement in resize.added) == 2


def test_an_early_job_gives_back_while_others_wait() -> None:
    """A job with slack shrinks to its need for one that waits; it keeps all when nobody does."""
    early = view("a", 800.0, 1000.0, placed=8)
    waits = view("b", 100.0, 50.0, workers=(2, 2))
    found = decide(early, waits)
    shrink = found["a"]
    assert isinstance(shrink, Resize)
    assert len(shrink.removed_workers) >= 2
    assert decide(early) == {}


def test_a_job_that_is_hardly_early_keeps_what_it_has() -> None:
    """20 s of a window of 220 s are less than `slack_ratio`, and more than a twentieth."""
    busy, waits = view("a", 800.0, 120.0, placed=8), view("b", 1e6, None)
    assert decide(busy, waits) == {}
    assert isinstance(decide(busy, waits, text=f"{EXACT}:slack_ratio=0.05")["a"], Resize)


def test_a_job_that_was_just_resized_rests() -> None:
    """Hysteresis: within `resize_every_s` it keeps what it has beyond its need."""
    early = job_with(view("a", 800.0, 1000.0, placed=6), resizes_latest_at_s=NOW_S - 10.0)
    waits = view("b", 1e6, None, workers=(4, 4))
    assert decide(early, waits) == {}
    assert isinstance(decide(early, waits, text=f"{EXACT}:resize_every_s=5")["a"], Resize)


def test_idle_gpus_are_filled_only_where_they_help() -> None:
    """Nobody waits: the job takes all GPUs, unless it saves less than a resize costs."""
    assert started(decide(view("a", 800.0, 1000.0))["a"]) == 8
    assert started(decide(view("a", 4.0, 1000.0))["a"]) == 1
    assert started(decide(view("a", 800.0, 1000.0), text=f"{EXACT}:fills_idle=false")["a"]) == 1


def test_predictions_are_looked_at_again_while_there_is_a_deadline() -> None:
    """The next pass is wanted in a tick, and not at all where no job has a deadline."""
    for deadline_s, wake_at_s in ((100.0, NOW_S + 30.0), (None, None)):
        job = view("a", 10.0, deadline_s)
        snapshot = make_snapshot(nodes=[make_node_view("n")], jobs=[job])
        assert policy(EXACT).allocate(snapshot, b"").wake_at_s == wake_at_s


def test_waiting_jobs_are_told_why() -> None:
    """Each reason names what stands in the way: others' deadlines, its own, or having none."""
    jobs = (
        view("a", 800.0, 100.0, workers=(1, 8)),
        view("b", 1e6, 10.0),
        view("c", 10.0, None),
    )
    snapshot = make_snapshot(nodes=[make_node_view("n", gpus=8)], jobs=jobs)
    holds = {hold.job_id: hold.blockers[0] for hold in policy(EXACT).pending_reasons(snapshot, b"")}
    assert set(holds) == {"b", "c"}
    assert "no size meets its deadline" in holds[jobs[1].job_id]
    assert "no deadline" in holds[jobs[2].job_id]


# --- earliest deadline first ----------------------------------------------------------------------


def test_edf_gives_the_most_that_helps_in_order_of_deadline() -> None:
    """The first takes four of six GPUs by powers of two, the next two, the last waits."""
    jobs = (view("a", 1.0, 300.0), view("b", 1.0, 100.0), view("c", 1.0, 200.0))
    found = decide(*jobs, gpus=6, text="qos-edf")
    assert {name: started(decision) for name, decision in found.items()} == {"b": 4, "c": 2}


def test_edf_stops_where_more_is_slower_unless_asked() -> None:
    """A curve that falls ends the sizes; `largest` goes on to what the range allows."""
    profile = JobProfile(speedup=((1, 1.0), (2, 1.5), (4, 1.2), (8, 1.0)))
    job = structs.replace(view("a", 1.0, 300.0), profile=profile)
    assert started(decide(job, text="qos-edf")["a"]) == 2
    assert started(decide(job, text="qos-edf:largest=true")["a"]) == 8
    assert started(decide(job, gpus=7, text="qos-edf:powers_of_two=false")["a"]) == 2


SHORT = f"{EXACT}:resize_every_s=5"


def test_who_was_just_resized_does_not_grow_onto_idle_gpus() -> None:
    """Nobody waits for them; it gets them once its rest is over."""
    job = job_with(view("a", 8000.0, 4000.0, placed=2), resizes_latest_at_s=NOW_S - 10.0)
    assert decide(job) == {}
    assert isinstance(decide(job, text=SHORT)["a"], Resize)


def test_who_would_be_late_grows_however_lately_it_was_resized() -> None:
    """The rest is for what can wait; a deadline cannot."""
    late = job_with(view("a", 800.0, 200.0, placed=2), resizes_latest_at_s=NOW_S - 10.0)
    resize = decide(late, view("b", 1e6, None, workers=(4, 4)))["a"]
    assert isinstance(resize, Resize)
    assert sum(placement.worker_count for placement in resize.added) == 2


def test_who_was_just_started_is_not_stopped_for_two_others() -> None:
    """One more job would be in time without it; so soon after its start it goes on all the same."""
    wide = view("wide", 800.0, 110.0, workers=(8, 8), placed=8)
    wide = job_with(wide, started_at_s=NOW_S - 10.0)
    others = [view(name, 400.0, 110.0, workers=(4, 4)) for name in ("b", "c")]
    assert decide(wide, *others) == {}
    found = decide(wide, *others, text=SHORT)
    assert isinstance(found["wide"], Preempt)
    assert isinstance(found["b"], Start)
    assert isinstance(found["c"], Start)


def test_a_reason_tells_the_time_that_its_workers_take() -> None:
    """One worker would do; it goes on with the seven that a newcomer leaves, and ends sooner."""
    rich, late = view("rich", 400.0, 900.0, placed=8), view("late", 100.0, 200.0)
    resize = decide(rich, late)["rich"]
    assert resize.reason.startswith("7 workers: 57 s predicted by ")
    grown = decide(view("rich", 8000.0, 9000.0, placed=2))["rich"]
    assert grown.reason.startswith("8 workers: 1000 s predicted by ")
    assert grown.reason.endswith(", and no job waits for the rest")


def test_nor_is_who_was_just_resized() -> None:
    """A resize counts as a start does, whichever was later."""
    wide = view("wide", 800.0, 110.0, workers=(8, 8), placed=8)
    wide = job_with(wide, started_at_s=NOW_S - 600.0, resizes_latest_at_s=NOW_S - 10.0)
    others = [view(name, 400.0, 110.0, workers=(4, 4)) for name in ("b", "c")]
    assert decide(wide, *others) == {}
    assert isinstance(decide(wide, *others, text=SHORT)["wide"], Preempt)
