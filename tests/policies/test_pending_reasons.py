"""The order of `pending_reasons`: `explain` tells each job its place in it."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from common.model import JobState
from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.registry import POLICIES, policy
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.tables import each_row

ROUNDS = {"las", "themis-lp"}
"""In their first round nobody is owed more than anybody else."""


LINED = sorted(name for name in POLICIES if policy(name).is_ordered and name not in ROUNDS)
"""Who has a line in which one of these jobs stands before another."""


def cell(tenants: Mapping[str, str], free_gpus: int) -> ClusterSnapshot:
    """Jobs of one GPU, the earlier the shorter, the sooner due and the later by name; one runs.

    tenants: by job, in the order of submission.
    """
    worker = make_worker_view("runs", 0, "n0", gpus=2)
    runs = make_job_view(
        "runs", state=JobState.RUNNING, gpus_per_worker=2, placed=[worker],
        remaining_work_s=10.0, submitted_at_s=NOW_S - 50,
    )  # fmt: skip
    runs = replace(runs, tenant="used", deadline_at_s=NOW_S + 100.0)
    jobs = [job_with(runs, first_started_at_s=NOW_S - 50)]
    for at, (name, tenant) in enumerate(tenants.items()):
        job = make_job_view(
            name, remaining_work_s=600.0 * (at + 1), submitted_at_s=NOW_S - 1000 + 100 * at
        )
        jobs.append(replace(job, tenant=tenant, deadline_at_s=NOW_S + 2000.0 + 3000 * at))
    nodes = [make_node_view("n0", gpus=2, workers=[worker])]
    nodes += [make_node_view("n1", gpus=free_gpus)] * bool(free_gpus)
    return make_snapshot(nodes=nodes, jobs=jobs)


@each_row("name", LINED)
def test_number_one_of_those_that_wait_starts_when_a_gpu_falls_free(name: str) -> None:
    """Of four alike, whatever their names are."""
    four = dict.fromkeys("dcba", "one")
    first = policy(name).pending_reasons(cell(four, 0), b"")[0].job_id
    decisions = policy(name).allocate(cell(four, 1), b"").decisions
    assert first == next(made.job_id for made in decisions if isinstance(made, Start))


@each_row("name", ["afs", "afs-lyra", "gandiva-sets", "qos", "qos-edf", "sjf"])
def test_the_others_stand_behind_it_in_the_same_order(name: str) -> None:
    """By submission here, which agrees with shortness and with deadlines."""
    holds = policy(name).pending_reasons(cell(dict.fromkeys("dcba", "one"), 0), b"")
    assert [hold.job_id for hold in holds] == list("dcba")


@each_row("name", ["drf", "mesos", "yarn-capacity", "yarn-fair"])
def test_the_tenant_that_is_served_next_has_the_first_job(name: str) -> None:
    """Not the one whose name comes first, or whose job was submitted first."""
    waiting = {"d": "used", "c": "wants"}
    assert policy(name).pending_reasons(cell(waiting, 0), b"")[0].job_id == "c"
