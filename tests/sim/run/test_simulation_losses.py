"""What the engine believes that preemptions cost, against the truth of the simulated jobs."""

from __future__ import annotations

import pytest

from common.model import JobId, JobState, NodeName
from coordinator.engine.engine import Engine
from coordinator.engine.state.events import OrdersRecovered
from coordinator.sim.run.build import RunOptions, Stage
from coordinator.sim.run.outages import Crash
from coordinator.sim.run.runtime import Saves
from coordinator.sim.run.simulation import Submission
from coordinator.sim.run.wire import Wire, WireRules
from tests.harness.builders import make_spec
from tests.sim.run.test_simulation import SLOW, job, sim, to_the_end
from tests.sim.small import small


def played(policy: str, saves: Saves | None, *, has_delays: bool) -> Stage:
    """A small run with loans, reclaims and preemptions, at its end."""
    stage = Stage(small(120), RunOptions(policy=policy, has_delays=has_delays, saves=saves))
    stage.sim.run_jobs()
    assert stage.sim.engine.state.counters.preemptions > 0
    return stage


def believed_gpu_s(stage: Stage) -> float:
    """What the cell counts, which is what its jobs count."""
    state = stage.sim.engine.state
    lost_gpu_s = state.counters.preemption_cost_gpu_s
    assert sum(job.lost_gpu_s for job in state.jobs.values()) == pytest.approx(lost_gpu_s)
    return lost_gpu_s


@pytest.mark.slow
@pytest.mark.parametrize("has_delays", [False, True])
def test_jobs_that_save_on_request_lose_nothing_and_the_engine_knows(has_delays: bool) -> None:
    """A preemption that its jobs answer with a save costs no work, as they live it."""
    stage = played("aryl", Saves.ON_REQUEST, has_delays=has_delays)
    assert (stage.sim.runtime.lost_gpu_s, believed_gpu_s(stage)) == (0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["aryl", "srsf"])
@pytest.mark.parametrize("saves", [Saves.NEVER, Saves.PERIODIC, None])
def test_the_engine_believes_what_the_jobs_lose(policy: str, saves: Saves | None) -> None:
    """To the GPU-second where nothing takes time, but for the moment in which a save is heard."""
    stage = played(policy, saves, has_delays=False)
    assert stage.sim.runtime.lost_gpu_s > 0
    assert believed_gpu_s(stage) == pytest.approx(stage.sim.runtime.lost_gpu_s, abs=1.0)


@pytest.mark.slow
def test_what_takes_time_is_a_small_part_of_what_is_lost() -> None:
    """The engine counts an attempt from its order to run, and hears of its stop a report later."""
    stage = played("aryl", Saves.NEVER, has_delays=True)
    assert believed_gpu_s(stage) == pytest.approx(stage.sim.runtime.lost_gpu_s, rel=0.01)


@pytest.mark.parametrize(("down_s", "stop_after_s"), [(60.0, None), (1e6, 60.0)])
def test_a_crash_that_takes_flexible_workers_only_costs_no_attempt(
    down_s: float, stop_after_s: float | None
) -> None:
    """It boots, or is silent past the job's limit: the gang goes on with its base, nothing is
    preempted, requeued or thrown away."""
    run = sim(delays=SLOW, policy="aryl", training=2)
    spec = make_spec(
        "a", workers=(1, 2), gpus_per_worker=8, expected_runtime_s=1000.0, stop_after_s=stop_after_s
    )
    run.submit([Submission(at_s=0.0, job_id=JobId("a"), spec=spec, work_s=1000.0)])

    def crash() -> None:
        job = run.engine.state.jobs[JobId("a")]
        held = [worker.node for worker in job.workers.values() if worker.is_flexible]
        assert len(held) == 1
        run.crash([Crash(node=held[0], at_s=200.0, down_s=down_s)])

    run.loop.at(200.0, crash)
    to_the_end(run)
    job = run.engine.state.jobs[JobId("a")]
    assert (job.state, job.attempt.number, job.counts.node_faults) == (JobState.SUCCEEDED, 1, 1)
    assert run.engine.state.counters.preemptions == 0
    assert run.runtime.lost_gpu_s == 0.0
    assert (job.finished_at_s or 0.0) < 850.0  # 1200 s and more with the work of a new attempt


class Scripted(Wire):
    """Loses the messages that it is told to; those that come after these all arrive."""

    def __init__(self, *arriving: bool) -> None:
        super().__init__(WireRules())
        self._arriving = list(arriving)

    def arrives(self) -> bool:
        """As told, one after the other."""
        return self._arriving.pop(0) if self._arriving else True


def ledger_read_at_s(*arriving: bool) -> list[float]:
    """When ledgers come in at a coordinator that forgot all it knew at 100 s, after which these of
    the messages arrive."""
    run = sim(training=1)
    run.submit([job("a", 0.0, work_s=1000.0), job("b", 500.0)])

    def forget() -> None:
        run.engine = Engine(run.engine.settings)
        run.wire = Scripted(*arriving)
        run.nodes[NodeName("t0")].report_soon()

    run.loop.at(100.0, forget)
    to_the_end(run)
    assert run.engine.state.jobs[JobId("a")].state == JobState.SUCCEEDED
    return [at_s for at_s, event in run.seen if isinstance(event, OrdersRecovered)]


def test_a_question_for_a_ledger_is_lost_like_any_message_and_asked_again() -> None:
    """No ledger comes of a lost question: the node's next report makes the coordinator ask anew."""
    assert ledger_read_at_s(True, True) == [100.0]
    assert ledger_read_at_s(True, False) == [100.0 + WireRules().report_period_s]
