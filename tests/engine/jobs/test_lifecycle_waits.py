"""What jobs wait for, summed by kind as the policy says it from pass to pass."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from common.model import JobId
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.jobs.lifecycle import spent_s
from coordinator.engine.state.events import JobCancelRequested
from coordinator.engine.state.settings import EngineSettings, TenantSettings
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import FAIR_SHARE, Allocation, Wait
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.service.api.rows import job_row
from coordinator.sim.report.waits import waits_by_size
from tests.harness.cluster.engine import EngineHarness, start


class Talking(EngineHarness):
    """A harness whose policy also says what jobs wait for."""

    def __init__(self) -> None:
        self.says: Mapping[str, str] = {}
        super().__init__(training=1, inference=0, settings=EngineSettings(policy="fifo"))

    def _allocate(self, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        allocation = super()._allocate(snapshot, memory)
        waits = tuple(Wait(kind=kind, jobs=(JobId(job_id),)) for job_id, kind in self.says.items())
        return replace(allocation, waits=waits)

    def say(self, **kinds: str) -> None:
        """From the next pass on, which is now."""
        self.says = kinds
        self.decide()


def spent(harness: EngineHarness, job: JobEntry) -> dict[str, float]:
    """Seconds by kind up to now."""
    return spent_s(job, harness.sim.loop.now_s)


def test_seconds_are_summed_by_kind_until_the_job_starts() -> None:
    """Each kind from the pass that says it to the pass that says something else."""
    harness = Talking()
    job = harness.submit("j")
    harness.wait(5.0)  # nothing is said of this
    harness.say(j="quota")
    harness.wait(10.0)
    harness.say(j="places")
    harness.wait(20.0)
    harness.say(j="quota")
    harness.wait(40.0)
    assert spent(harness, job) == {"quota": 50.0, "places": 20.0}
    harness.says = {}
    harness.decide(start(job, "t0"))
    harness.wait(100.0)
    assert spent(harness, job) == {"quota": 50.0, "places": 20.0}


def test_a_job_of_which_nothing_is_said_any_more_counts_no_further() -> None:
    """Another policy may lead by then, which tells nothing apart."""
    harness = Talking()
    job = harness.submit("j")
    harness.say(j="quota")
    harness.wait(10.0)
    harness.say()
    harness.wait(10.0)
    assert spent(harness, job) == {"quota": 10.0}


def test_a_job_that_is_cancelled_waits_no_longer() -> None:
    """Its sums stay as they are, for whoever asks later."""
    harness = Talking()
    job = harness.submit("j")
    harness.say(j="quota")
    harness.wait(10.0)
    harness.sim.handle(JobCancelRequested(job_id=job.job_id, by="u"))
    harness.wait(10.0)
    assert spent(harness, job) == {"quota": 10.0}
    row = job_row(harness.engine, job, now_s=harness.sim.loop.now_s)
    assert row.waited_s == {"quota": 10.0}


def test_the_sums_outlive_the_leader() -> None:
    """They are part of the saved state, the kind of now included."""
    harness = Talking()
    job = harness.submit("j")
    harness.say(j="quota")
    harness.wait(10.0)
    again = Engine(EngineSettings(policy="fifo"), decode_state(harness.engine.encode_state()))
    assert spent_s(again.state.jobs[job.job_id], 25.0) == {"quota": 25.0}


def test_who_is_kept_back_by_its_tenant_s_quota_waits_for_its_fair_share() -> None:
    """Under any policy: the rules of tenants say it, as the policy does not see the job."""
    tenants = (TenantSettings(name="trace", guarantee_gpus=0, borrow_limit_gpus=0),)
    harness = EngineHarness(
        training=1, inference=0, settings=EngineSettings(policy="fifo", tenants=tenants)
    )
    harness.engine.policy = Engine(harness.engine.settings).policy
    job = harness.submit("j")
    harness.wait(30.0)
    harness.decide()
    assert spent(harness, job) == {FAIR_SHARE: pytest.approx(30.0)}


def test_figures_by_size_count_each_job_where_it_waited_longest() -> None:
    """Table 2 of the Philly study: 1, 2-4, 5-8 and more than 8 GPUs."""
    harness = Talking()
    small, large = harness.submit("a", gpus_per_worker=4), harness.submit("b", workers=(2, 2))
    harness.say(a="quota", b="places")
    harness.wait(10.0)
    harness.say(a="places", b="places")
    harness.wait(30.0)
    harness.say()
    found = waits_by_size([small, large])
    assert set(found) == {"2-4", ">8"}
    both = found["2-4"]
    assert [(kind, both[kind].jobs, both[kind].waited_s) for kind in both] == [
        ("places", 1, 30.0),
        ("quota", 0, 10.0),
    ]
    assert (found[">8"]["places"].jobs_ratio, found[">8"]["places"].waited_s) == (1.0, 40.0)
