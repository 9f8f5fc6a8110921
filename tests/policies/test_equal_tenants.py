"""Tenants that are due as much take turns, also where the part of each is less than one job."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName, Pool
from coordinator.engine.state.settings import EngineSettings, TenantSettings
from coordinator.policies.contract.decisions import Resize
from coordinator.policies.registry import policy as named
from coordinator.sim.run.cluster import NodeSpec
from coordinator.sim.run.simulation import Simulation, Submission
from tests.builders import make_job_view, make_node_view, make_snapshot, make_spec, make_worker_view
from tests.tables import each_row

BY_THE_TREE = ("drf", "mesos", "philly", "yarn-capacity", "yarn-fair")
"""Policies that serve the tenant that has least."""

FLAT = tuple(TenantSettings(name=name) for name in ("t0", "t1", "t2"))

NESTED = (
    TenantSettings(name="a", weight=7.0),
    TenantSettings(name="a0", parent="a"),
    TenantSettings(name="t"),
    *(TenantSettings(name=f"t{number}", parent="t") for number in range(3)),
)


def started(policy: str, tenants: tuple[TenantSettings, ...]) -> Counter[str]:
    """Jobs by tenant that got their turn within an hour, on two GPUs that all want all the time.

    Each minute there is one job more of each tenant, and each takes about five.
    """
    sim = Simulation(
        EngineSettings(policy=policy, tenants=tenants),
        [
            NodeSpec(name=NodeName(f"n{n}"), home_pool=Pool.TRAINING, gpu_type="H100", gpus=1)
            for n in range(2)
        ],
        check=True,
    )
    inner = {each.parent for each in tenants}
    leaves = [each.name for each in tenants if each.name not in inner]
    sim.submit(
        Submission(
            at_s=60.0 * number,
            job_id=JobId(f"{number:02d}-{owner}"),
            spec=make_spec(expected_runtime_s=300.0 + 7.0 * number),
            work_s=300.0 + 7.0 * number,
            tenant=owner,
        )
        for number in range(40)
        for owner in leaves
    )
    sim.run(3600.0)
    jobs = sim.engine.state.jobs.values()
    waiting = Counter(job.tenant for job in jobs if job.state == JobState.PENDING)
    assert set(waiting) == set(leaves), "the backlog has run out"
    return Counter(job.tenant for job in jobs if job.state != JobState.PENDING)


@pytest.mark.slow
@each_row("policy", BY_THE_TREE)
def test_equals_take_turns(policy: str) -> None:
    """Three tenants on two GPUs: where all have none of a GPU that comes free the one whose job
    waits for longest has it, so that nobody stands behind the same two for ever."""
    found = started(policy, FLAT)
    assert sum(found.values()) > 15
    assert max(found.values()) - min(found[each.name] for each in FLAT) <= 1


@pytest.mark.slow
@each_row("policy", BY_THE_TREE)
def test_teams_of_a_small_organisation_take_turns(policy: str) -> None:
    """Its part is less than a GPU for each of its three teams, and its sibling weighs far more."""
    found = started(policy, NESTED)
    teams = [found[f"t{number}"] for number in range(3)]
    assert sum(teams) > 5
    assert max(teams) - min(teams) <= 1


@pytest.mark.parametrize("first", ["a", "b"])
def test_of_equals_the_one_whose_job_came_first_grows(first: str) -> None:
    """Under `drf` a single GPU that both could use is nobody's by name."""
    running = [
        replace(
            make_job_view(
                name,
                state=JobState.RUNNING,
                workers=(1, 2),
                placed=(make_worker_view(name, 0, "n0"),),
                submitted_at_s=0.0 if name == first else 1.0,
            ),
            tenant=name,
        )
        for name in ("a", "b")
    ]
    there = [make_node_view("n0", gpus=3, workers=[each.placed[0] for each in running])]
    [grown] = named("drf").allocate(make_snapshot(nodes=there, jobs=running), b"").decisions
    assert isinstance(grown, Resize) and grown.job_id == first
