"""How true work runs down: speed by workers, pauses, saves, and what a stop throws away."""

from __future__ import annotations

import pytest

from common.messages import OrderPhase, WorkerOrder
from common.model import (
    GpuRequest,
    GpuUuid,
    JobId,
    NodeName,
    StopReason,
    WorkerKey,
    WorkerRange,
)
from coordinator.engine.state.events import ProgressReported
from coordinator.sim.run.loop import Loop
from coordinator.sim.run.runtime import STEPS_PER_WORKER_S, RunRules, Runtime, Saves
from coordinator.workloads.records import SpeedUp
from coordinator.workloads.shaping import linear, lossy
from tests.harness.builders import make_spec

NODE = NodeName("n0")
JOB = JobId("j")
GPUS = 4


class Bench:
    """One job of 1 to 3 workers of 4 GPUs, and what it said."""

    def __init__(
        self,
        rules: RunRules | None = None,
        *,
        work_s: float = 1000.0,
        speedup: SpeedUp | None = None,
        path: str | None = None,
        multiplier: int = 1,
        workers: tuple[int, int] = (1, 3),
    ) -> None:
        self.loop = Loop()
        self.finished_at_s: float | None = None
        self.said: list[ProgressReported] = []
        self.runtime = Runtime(
            self.loop, rules or RunRules(), finished=self._finished, tell=self.said.append
        )
        span = WorkerRange(min=workers[0], max=workers[1])
        self.spec = make_spec(
            workers=workers,
            gpus_per_worker=GPUS,
            gpu=GpuRequest(worker_multiplier={"T4": multiplier}),
        )
        self.runtime.add(
            JOB,
            work_s=work_s,
            speedup=speedup or linear(span),
            gpus_per_worker=GPUS,
            path=path,
        )

    def _finished(self, job_id: JobId, workers: dict[WorkerKey, NodeName]) -> None:
        self.finished_at_s = self.loop.now_s

    def start(
        self,
        *indices: int,
        attempt: int = 1,
        gpus: tuple[GpuUuid, ...] = (),
        gpu_type: str = "T4",
    ) -> None:
        """Workers compute from now on."""
        for index in indices:
            order = WorkerOrder(
                key=WorkerKey(JOB, attempt, index),
                spec=self.spec,
                tenant="t",
                user="u",
                submitted_at_s=0.0,
                gpu_uuids=gpus,
                gpu_type=gpu_type,
                is_flexible=False,
                phase=OrderPhase.RUN,
                worker_count=1,
            )
            self.runtime.started(NODE, order)

    def stop(self, *indices: int, attempt: int = 1) -> None:
        """Workers are asked to stop."""
        for index in indices:
            self.runtime.stopped(WorkerKey(JOB, attempt, index))

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.loop.run(self.loop.now_s + seconds)

    def saved_s(self) -> float:
        """Work in the last checkpoint that it told."""
        checkpoints = [word.checkpoint for word in self.said if word.checkpoint is not None]
        return checkpoints[-1].step / STEPS_PER_WORKER_S if checkpoints else 0.0


@pytest.mark.parametrize(("workers", "ends_s"), [(1, 1000.0), (2, 500.0)])
def test_linear_work_is_divided_by_the_workers(workers: int, ends_s: float) -> None:
    """n workers need 1/n of the time."""
    bench = Bench()
    bench.start(*range(workers))
    bench.wait(2000.0)
    assert bench.finished_at_s == ends_s


def test_a_table_says_how_fast_each_worker_count_is() -> None:
    """The job's own speed-ups decide: with 20 % loss two workers do 1.8 workers' work."""
    bench = Bench(speedup=lossy(WorkerRange(min=1, max=3)), work_s=1800.0)
    bench.start(0, 1)
    bench.wait(5000.0)
    assert bench.finished_at_s == pytest.approx(1000.0)


def test_a_gang_that_is_not_whole_makes_no_progress() -> None:
    """The time until the last base worker starts does not count."""
    bench = Bench(workers=(2, 2))
    bench.start(0)
    bench.wait(300.0)
    bench.start(1)
    bench.wait(2000.0)
    assert bench.finished_at_s == 300.0 + 500.0


def test_workers_on_a_smaller_type_do_the_same_work_together() -> None:
    """Two workers that stand for one are as fast as that one."""
    bench = Bench(multiplier=2)
    bench.start(0, 1)
    bench.wait(5000.0)
    assert bench.finished_at_s == 1000.0


def test_a_resize_stands_still_for_its_rendezvous() -> None:
    """Growing from one to two workers pauses the whole gang, then it goes twice as fast."""
    bench = Bench(RunRules(resize_s=30.0))
    bench.start(0)
    bench.wait(200.0)
    bench.start(1)
    bench.wait(2000.0)
    assert bench.finished_at_s == 200.0 + 30.0 + 400.0


def test_a_release_costs_no_work() -> None:
    """A flexible worker that leaves keeps what was done; the rest goes on more slowly."""
    bench = Bench()
    bench.start(0, 1)
    bench.wait(100.0)
    bench.stop(1)
    bench.wait(2000.0)
    assert bench.finished_at_s == 100.0 + 800.0
    assert bench.runtime.lost_gpu_s == 0.0


# --- what a stop costs --------------------------------------------------------------------------


def preempted(rules: RunRules, *, path: str | None = None, after_s: float = 400.0) -> Bench:
    """A job of 1000 s that ran for a while, was stopped, and starts again 100 s later."""
    bench = Bench(rules, path=path)
    bench.start(0)
    bench.wait(after_s)
    bench.stop(0)
    bench.wait(100.0)
    bench.start(0, attempt=2)
    bench.wait(5000.0)
    return bench


def test_without_checkpoints_it_starts_over() -> None:
    """All work is lost, and its GPU-seconds are counted."""
    bench = preempted(RunRules())
    assert bench.finished_at_s == 500.0 + 1000.0
    assert bench.runtime.lost_gpu_s == 400.0 * GPUS
    assert bench.saved_s() == 0.0


def test_asked_to_stop_it_saves_all() -> None:
    """A job that has a checkpoint path loses nothing, and says what it saved."""
    bench = preempted(RunRules(), path="/c")
    assert bench.finished_at_s == 500.0 + 600.0
    assert bench.runtime.lost_gpu_s == 0.0
    assert bench.saved_s() == 400.0


def test_periodic_saves_keep_what_was_done_at_the_last_one() -> None:
    """Of 400 s with a save every 150 s, 100 s are lost."""
    bench = preempted(RunRules(saves=Saves.PERIODIC, save_period_s=150.0))
    assert bench.finished_at_s == 500.0 + 700.0
    assert bench.runtime.lost_gpu_s == 100.0 * GPUS


def test_each_regular_save_is_told_when_it_is_made() -> None:
    """At 150 and 300 s of computing; what the stop at 400 s says adds nothing to that."""
    bench = Bench(RunRules(saves=Saves.PERIODIC, save_period_s=150.0))
    bench.start(0)
    found: list[float] = []
    for wait_s in (149.0, 2.0, 148.0, 2.0, 99.0):
        bench.wait(wait_s)
        found.append(bench.saved_s())
    bench.stop(0)
    assert [*found, bench.saved_s()] == [0.0, 150.0, 150.0, 300.0, 300.0, 300.0]


def test_a_preempted_job_makes_no_regular_save_until_it_ends() -> None:
    """Asked at 200 s and ended at 400 s, it has what it saved at 150 s and not what was due at
    300 s; what it computed meanwhile is lost too."""
    bench = Bench(RunRules(saves=Saves.PERIODIC, save_period_s=150.0))
    bench.start(0)
    bench.wait(200.0)
    bench.runtime.asked(WorkerKey(JOB, 1, 0), StopReason.PREEMPT)
    bench.wait(200.0)
    bench.stop(0)
    assert bench.saved_s() == 150.0
    assert bench.runtime.lost_gpu_s == 250.0 * GPUS


def test_a_preempted_job_does_not_finish_while_its_workers_end() -> None:
    """Not with all of them, nor with those that are left when the first has ended."""
    bench = Bench()
    bench.start(0, 1)
    bench.wait(400.0)
    for index in (0, 1):
        bench.runtime.asked(WorkerKey(JOB, 1, index), StopReason.PREEMPT)
    bench.wait(50.0)
    bench.stop(1)
    bench.wait(500.0)
    assert bench.finished_at_s is None
    bench.stop(0)
    assert bench.runtime.lost_gpu_s == 450.0 * 2 * GPUS + 500.0 * GPUS


def test_a_restart_takes_its_time_and_the_first_start_does_not() -> None:
    """Loading is paid by attempts after the first."""
    bench = preempted(RunRules(saves=Saves.ON_REQUEST, restart_s=33.0))
    assert bench.finished_at_s == 500.0 + 33.0 + 600.0


def test_a_crash_leaves_nothing_to_save_in_time() -> None:
    """Power is lost before anybody can ask: only regular saves help."""
    bench = Bench(RunRules(saves=Saves.ON_REQUEST))
    bench.start(0)
    bench.wait(400.0)
    bench.runtime.crashed(WorkerKey(JOB, 1, 0))
    assert bench.runtime.lost_gpu_s == 400.0 * GPUS
    assert bench.saved_s() == 0.0


def test_a_gang_is_broken_once() -> None:
    """The loss of a gang of two is counted when its first worker goes, not again for the other."""
    bench = Bench(RunRules(), workers=(2, 2))
    bench.start(0, 1)
    bench.wait(100.0)
    bench.stop(0)
    bench.wait(50.0)
    bench.stop(1)
    assert bench.runtime.lost_gpu_s == 100.0 * 2 * GPUS


def test_a_gang_says_once_what_it_saved() -> None:
    """Its checkpoint is told when its first worker goes, not again for the other."""
    bench = Bench(RunRules(saves=Saves.ON_REQUEST), workers=(2, 2))
    bench.start(0, 1)
    bench.wait(100.0)
    bench.stop(0, 1)
    assert [word.checkpoint is not None for word in bench.said] == [True]


def test_an_old_attempt_has_no_say() -> None:
    """A worker of an attempt that is over neither stops nor slows the present one."""
    bench = Bench()
    bench.start(0, attempt=2)
    bench.wait(100.0)
    bench.stop(0, attempt=1)
    bench.wait(2000.0)
    assert bench.finished_at_s == 1000.0


def test_an_attempt_that_follows_a_lost_one_has_its_gpus_and_its_work_for_itself() -> None:
    """Whoever sits on a node that was given up does no work that counts, and slows nobody down."""
    bench = Bench()
    gpus = (GpuUuid("g0"),)
    bench.start(0, attempt=1, gpus=gpus)
    bench.wait(100.0)
    bench.start(0, attempt=2, gpus=gpus)
    assert bench.runtime.lost_gpu_s == 100.0 * GPUS
    bench.stop(0, attempt=1)
    bench.wait(2000.0)
    assert bench.finished_at_s == 100.0 + 1000.0


@pytest.mark.parametrize("key_index", [0, 1], ids=["the same worker", "another one"])
def test_a_number_that_comes_back_is_an_attempt_of_its_own(key_index: int) -> None:
    """A coordinator that lost its journal gives out numbers again: the one that was asked to leave
    under this number computes for nothing beside the new one, or is gone, and the job ends."""
    bench = Bench(RunRules(saves=Saves.NEVER), workers=(1, 1))
    bench.start(0, attempt=2)
    bench.wait(100.0)
    bench.runtime.asked(WorkerKey(JOB, 2, 0), StopReason.PREEMPT)
    if key_index == 0:
        bench.stop(0, attempt=2)
    bench.wait(50.0)
    bench.start(key_index, attempt=2)
    bench.stop(1 - key_index, attempt=2)
    bench.wait(2000.0)
    assert bench.finished_at_s == 150.0 + 1000.0


def test_a_number_that_comes_back_has_the_pace_of_its_own_gpus() -> None:
    """What was true of the attempt that had it before, such as its GPU type, is not of this one."""
    bench = Bench(RunRules(saves=Saves.NEVER), workers=(1, 3), multiplier=2)
    bench.start(0, 1, attempt=1, gpu_type="T4")
    bench.wait(100.0)
    for index in range(2):
        bench.runtime.crashed(WorkerKey(JOB, 1, index))
    bench.start(0, attempt=1, gpu_type="V100")
    bench.wait(2000.0)
    assert bench.finished_at_s == 100.0 + 1000.0


# --- what it says -------------------------------------------------------------------------------


def steps(bench: Bench) -> list[float]:
    """Work done at each word about progress."""
    words = [word.progress for word in bench.said if word.progress is not None]
    return [word.step / STEPS_PER_WORKER_S for word in words]


def test_progress_is_told_once_after_each_change() -> None:
    """An even pace needs one word; a changed one needs another."""
    bench = Bench(RunRules(progress_after_s=10.0))
    bench.start(0)
    bench.wait(100.0)
    bench.start(1)
    bench.wait(2000.0)
    assert steps(bench) == [10.0, 120.0]


def test_repeated_progress_comes_in_ever_longer_steps() -> None:
    """Each word comes when twice as long has passed since the start."""
    bench = Bench(RunRules(progress_after_s=100.0, is_progress_repeated=True))
    bench.start(0)
    bench.wait(2000.0)
    assert steps(bench) == [100.0, 200.0, 400.0, 800.0]
