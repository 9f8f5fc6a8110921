"""Turns on shared GPUs: as long as they should be, for everybody, with no GPU idle."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.model import JobId, JobState, Preemptibility
from coordinator.policies.contract.decisions import Resume, Start, Suspend
from coordinator.policies.schedulers.gandiva.board import COMPUTING_STATES
from tests.policies.sharing_cell import DELAYS, SLICE_S, Cell


def test_two_gangs_on_one_node_take_turns_and_end_together() -> None:
    """Equal jobs share the time equally, and none of it is lost."""
    cell = Cell()
    cell.submit("a", work_s=600.0)
    cell.submit("b", work_s=600.0)
    cell.until(5000.0)
    ends = sorted((cell.end_s("a"), cell.end_s("b")))
    assert ends[1] == pytest.approx(1.0 + 1200.0)
    assert ends[1] - ends[0] <= SLICE_S + 1.0


def test_a_high_priority_is_never_suspended_for_a_low_one() -> None:
    """The low one waits until it has ended (section 3.1)."""
    cell = Cell()
    cell.submit("low", work_s=600.0)
    cell.submit("high", at_s=100.0, work_s=600.0, priority=1)
    cell.until(650.0)
    assert cell.state("low") == JobState.SUSPENDED
    assert "high" not in {each.job_id for _, each in cell.said if isinstance(each, Suspend)}
    cell.until(5000.0)
    assert cell.end_s("high") <= 100.0 + SLICE_S + 600.0


def test_jobs_of_tenants_with_rules_share_no_gpu_and_nobody_gives_way_in_vain() -> None:
    """Where tenants have rules their jobs take no turns with one another: the first one computes
    all the time, and the second waits until it has ended."""
    cell = Cell(weights={"one": 1.0, "other": 3.0})
    cell.submit("a", work_s=600.0, tenant="one")
    cell.submit("b", work_s=600.0, tenant="other")
    cell.until(5000.0)
    assert (cell.end_s("a"), cell.end_s("b")) == (601.0, 1201.0)
    assert cell.made(Suspend) == []


def test_a_newcomer_takes_turns_with_a_gang_of_its_own_tenant() -> None:
    """The seat of another tenant comes first by name and is as full, and is passed over."""
    cell = Cell(nodes=2, weights={"one": 1.0, "other": 1.0})
    cell.submit("a", tenant="other")
    cell.submit("b", tenant="one")
    cell.submit("c", at_s=10.0, tenant="one")
    cell.until(100.0)
    assert cell.nodes("c") == cell.nodes("b")


def test_jobs_of_one_tenant_take_turns_whatever_it_weighs() -> None:
    """The rules of tenants part none of their own jobs."""
    cell = Cell(weights={"one": 3.0})
    for name in ("a", "b"):
        cell.submit(name, work_s=600.0, tenant="one")
    cell.until(5000.0)
    assert abs(cell.end_s("a") - cell.end_s("b")) <= SLICE_S + 1.0


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.sampled_from((1, 1, 2, 4, 8)), st.integers(1, 12), st.integers(0, 20)),
        min_size=2,
        max_size=9,
    ),
    has_delays=st.booleans(),
)
def test_nobody_starves_and_no_gpu_idles_beside_one_who_waits(
    sizes: list[tuple[int, int, int]], has_delays: bool
) -> None:
    """Whoever is suspended computes again within a turn of each of the others there, and while it
    is, somebody computes on its GPUs; all jobs end."""
    cell = Cell(nodes=2, delays=DELAYS if has_delays else None)
    for number, (gpus, slices, at) in enumerate(sizes):
        cell.submit(
            f"j{number}",
            at_s=1.0 + at * 30.0,
            gpus=gpus,
            gpus_per_worker=min(gpus, 4),
            work_s=slices * 40.0,
        )
    seen_s = [0.0]

    def watch(now_s: float) -> None:
        if now_s > seen_s[0] + 1e-6:
            _somebody_computes(cell)
        seen_s[0] = now_s

    if not has_delays:  # with delays a pass gathers facts a little after they happened
        cell.sim.watch = watch
    cell.until(100_000.0)
    assert all(cell.state(f"j{number}") == JobState.SUCCEEDED for number in range(len(sizes)))
    since_s: dict[str, float] = {}
    began_s: dict[str, float] = {}
    for at_s, each in cell.said:
        if isinstance(each, Start | Resume):
            began_s[each.job_id] = at_s
        if isinstance(each, Suspend):
            since_s[each.job_id] = at_s
            assert at_s - began_s[each.job_id] >= SLICE_S / 2  # nobody's turn is cut short
        elif isinstance(each, Resume):
            # Three others at most, each with a turn and a half, and a start that no turn cuts.
            assert at_s - since_s.pop(each.job_id) <= 3 * 1.5 * SLICE_S + 120.0


def _somebody_computes(cell: Cell) -> None:
    state = cell.sim.engine.state
    computing = {
        uuid
        for job in state.live()
        if job.state in COMPUTING_STATES
        for worker in job.workers.values()
        for uuid in worker.gpu_uuids
    }
    for job_id in state.suspended_jobs:
        mine = {uuid for worker in state.jobs[job_id].workers.values() for uuid in worker.gpu_uuids}
        assert mine & computing, f"{job_id} waits for nobody"


def test_who_never_gives_way_takes_the_gpus_of_nobody_before_it() -> None:
    """Its turn would last as long as it does: it waits for the end of a job that came first, and
    not for that of one that came later."""
    cell = Cell()
    cell.submit("first", work_s=600.0)
    cell.submit("stays", at_s=100.0, work_s=2000.0, preemptibility=Preemptibility.SEMI)
    cell.submit("later", at_s=200.0, work_s=2000.0)
    cell.until(650.0)
    assert "behind it" in cell.sim.engine.explain.blockers(JobId("stays"))[0]
    cell.until(5000.0)
    assert cell.end_s("first") <= 1.0 + 2 * 600.0 + SLICE_S
    assert cell.end_s("stays") <= cell.end_s("first") + 2000.0 + 2 * SLICE_S
    assert cell.end_s("later") == 1.0 + 600.0 + 2000.0 + 2000.0


def test_who_never_gives_way_takes_the_gpus_of_a_lower_priority() -> None:
    """The line is by priority first."""
    cell = Cell()
    cell.submit("low", work_s=600.0)
    cell.submit("high", at_s=100.0, priority=1, preemptibility=Preemptibility.NON)
    cell.until(200.0)
    assert cell.state("high") == JobState.RUNNING


def test_nobody_shrinks_for_one_that_may_not_have_its_gpus() -> None:
    """What a job has grown by is no use to a gang that waits for its end all the same."""
    cell = Cell(gpus=8)
    cell.submit("first", gpus=4, gpus_per_worker=2, most=3, work_s=3000.0)
    cell.submit("other", gpus=2, work_s=3000.0)
    cell.submit("stays", at_s=100.0, gpus=4, preemptibility=Preemptibility.SEMI)
    cell.until(400.0)
    assert cell.state("stays") == JobState.PENDING
    assert cell.job("first").running_workers == 3
