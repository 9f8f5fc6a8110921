"""A run with measured curves: no policy that knows them grows a job until it is slower."""

from __future__ import annotations

import pytest

from common.clock import SystemClock
from coordinator.policies.aryl.rules import Rules
from coordinator.policies.registry import policy
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import play
from coordinator.workloads.paper_runs import FAMILIES, SCENES
from coordinator.workloads.records import NodeGroup, ScalingCurve, TraceJob, Workload
from coordinator.workloads.shaping import RuntimeModel
from tests.tables import each_row

YOLO = ScalingCurve(
    model="yolov3",
    gpu_type="T4",
    batch_size=64,
    points=((4, 1.315), (8, 0.611), (16, 0.851)),
)
"""As ElasticFlow (ASPLOS'23) measured it."""

JOB = TraceJob(
    job_id="a",
    submit_s=0.0,
    duration_s=10_000.0,
    gpus=4,
    model="yolov3",
    batch_size=64,
    gpus_per_worker=1,
    min_workers=4,
    max_workers=16,
)


def jct_s(name: str, *, has_delays: bool = False) -> float:
    """How long the job takes on an idle cluster of four nodes of four GPUs."""
    options = RunOptions(
        policy=name,
        has_delays=has_delays,
        speedup=RuntimeModel.TABLE,
        curves={("yolov3", 64): YOLO},
        check=True,
    )
    nodes = (NodeGroup(count=4, gpus=4, gpu_type="V100"),)
    of = Workload(name="w", jobs=(JOB,), loads=(), nodes=nodes, length_s=10.0)
    return play(of, options, clock=SystemClock()).result.jct_s.mean


@each_row("has_delays", [False, True])
@each_row("name", ["aryl", "foresight", "aryl-elastic"])
def test_scaling_makes_a_lone_job_no_slower(name: str, *, has_delays: bool) -> None:
    """Its four GPUs are its best size, so with scaling it takes as long as without."""
    assert jct_s(name, has_delays=has_delays) <= jct_s("sjf", has_delays=has_delays)


def test_the_runs_of_the_paper_take_scaling_for_linear() -> None:
    """Whatever their jobs lose by it: so does the paper's scheduler."""
    scenes = [*SCENES.values(), *(family.scene(0) for family in FAMILIES.values())]
    rules = [knobs for scene in scenes if isinstance(knobs := policy(scene.policy).knobs, Rules)]
    scaling = [each for each in rules if each.scaling]
    assert len(scaling) > 10
    assert not any(each.trusts_profiles for each in scaling)


def test_who_does_not_trust_profiles_grows_it_as_the_paper_would() -> None:
    """All sixteen GPUs, by the rule that throughput is linear, at what they really make."""
    slow_s = 10_000.0 * 1.315 / 0.851
    assert jct_s("aryl:trusts_profiles=false") == pytest.approx(slow_s)
