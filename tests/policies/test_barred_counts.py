"""What is counted of GPUs that come free for nobody, rule by rule: as room, gain, a job's own."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import JobState
from coordinator.policies.contract.decisions import Start
from coordinator.policies.registry import policy
from tests.builders import make_job_view, make_node_view, make_snapshot, make_worker_view
from tests.policies.aryl.lending.test_odds import HOUR_S, cell, needed
from tests.policies.aryl.lending.test_odds import job as of_whole_nodes
from tests.policies.aryl.test_scaling import counts, nodes_of, phase_2, running


def test_a_worker_that_has_one_is_not_exchanged_for_a_better_one() -> None:
    """Its job would lose two GPUs and the other gain one: it counts as fixed, also where each of
    the other's workers is worth more. Without such a GPU it is exchanged."""
    poor = running("poor", workers=(1, 2), on=("n0", "n0"), gpus=2, fastest_s=10.0)
    rich = running("rich", workers=(1, 3), on=("n1",), fastest_s=100000.0)
    nodes = {"n0": 4, "n1": 1}
    shares, _ = phase_2(nodes_of(nodes, [poor, rich]), [poor, rich])
    assert counts(shares) == {"poor": 1, "rich": 3}
    base, flexible = poor.placed
    poor = replace(poor, placed=(base, replace(flexible, freed_gpus=1)))
    shares, _ = phase_2(nodes_of(nodes, [poor, rich]), [poor, rich])
    assert counts(shares) == {"poor": 2, "rich": 1}


@pytest.mark.parametrize(("barred", "started"), [(0, ["wide"]), (1, ["a", "b"])])
def test_a_pool_does_not_give_way_to_a_gang_that_fits_nowhere_anyhow(
    barred: int, started: list[str]
) -> None:
    """The gang needs all GPUs of the cell, of which one is nobody's to have."""
    nodes = [make_node_view("n0", barred_gpus=barred), make_node_view("n1")]
    wide = make_job_view("wide", workers=(2, 2), gpus_per_worker=8, submitted_at_s=0.0)
    others = [make_job_view(n, gpus_per_worker=4, submitted_at_s=1.0) for n in ("a", "b", "c")]
    snapshot = make_snapshot(nodes=nodes, jobs=[wide, *others], now_s=1000.0)
    found = policy("philly:prerun_gpus=4").allocate(snapshot, b"").decisions
    assert [each.job_id for each in found if isinstance(each, Start)] == started


def test_an_idle_node_that_has_one_is_no_room_to_wait_for() -> None:
    """A job of whole nodes waits for the next one that comes free."""
    snapshot = cell([HOUR_S, 9 * HOUR_S], of_whole_nodes("j", 4.0))
    idle = make_node_view("idle", barred_gpus=1)
    snapshot = replace(snapshot, nodes=(*snapshot.nodes, idle))
    assert needed(snapshot, "j") == pytest.approx(4 / (4 + 2))


def test_a_job_that_has_one_keeps_what_it_runs_on() -> None:
    """All of its GPUs are its own, the barred one too: a job after it in line, for which what it
    leaves to others would do, waits."""
    worker = make_worker_view("j", 0, "n0", gpus=4, barred_gpus=1)
    job = make_job_view("j", state=JobState.RUNNING, gpus_per_worker=4, placed=(worker,))
    job = replace(job, started_at_s=0.0, first_started_at_s=0.0, priority=1)
    after = make_job_view("after", gpus_per_worker=3)
    node = make_node_view("n0", gpus=4, workers=[worker])
    snapshot = make_snapshot(nodes=[node], jobs=[job, after], now_s=1e6)
    assert policy("themis-simple").allocate(snapshot, b"").decisions == ()
