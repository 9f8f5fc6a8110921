"""Every policy, on a fleet of several GPU types and beside jobs that no nodes could hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

from msgspec.structs import replace

from common.model import JobId, JobState, NodeRole, Preemptibility
from coordinator.policies.contract.decisions import Resize, Start
from coordinator.policies.contract.snapshot import JobView, NodeView
from coordinator.policies.registry import POLICIES, policy
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_worker_view,
)
from tests.tables import each_row

GUESTS = "opportunistic"
"""Whose jobs for several types run on lent nodes alone, which is what it is compared for."""

NAMES = sorted(name for name in POLICIES if name != GUESTS)
NODES = (make_node_view("a", gpu_type="A100"), make_node_view("h", gpu_type="H100"))
DEADLINES = (None, NOW_S + 1e6)

NEVER = {
    "a worker larger than any node": make_job_view("never", gpus_per_worker=16),
    "a gang larger than the fleet": make_job_view("never", workers=(7, 7), gpus_per_worker=4),
    "a gang larger than its type": make_job_view(
        "never", workers=(5, 5), gpus_per_worker=4, types=("A100",)
    ),
    "more workers of each type for one than there is room for": make_job_view(
        "never", gpus_per_worker=8, multiplier={"A100": 3, "H100": 2}
    ),
    "a type that is not there": make_job_view("never", types=("T4",)),
}


def started(
    name: str, jobs: Sequence[JobView], nodes: Sequence[NodeView] = NODES
) -> dict[str, str]:
    """GPU types by job, of those that a first pass starts."""
    decisions = policy(name).allocate(make_snapshot(nodes=nodes, jobs=jobs), b"").decisions
    return {made.job_id: made.gpu_type for made in decisions if isinstance(made, Start)}


@each_row("name", NAMES)
def test_who_accepts_several_types_waits_for_none_while_another_is_free(name: str) -> None:
    """Two jobs for a whole node each, one node of each type: both run."""
    for types, deadline_at_s in product(((), ("A100", "H100"), ("H100", "A100")), DEADLINES):
        jobs = [make_job_view(f"j{number}", gpus_per_worker=8, types=types) for number in range(2)]
        found = started(name, [replace(job, deadline_at_s=deadline_at_s) for job in jobs])
        assert sorted(found) == ["j0", "j1"], (types, deadline_at_s)
        assert sorted(found.values()) == ["A100", "H100"]


ONE_LINE = {"mesos": "of a framework", "las": "of a round", "themis-lp": "of a round"}
"""Whose line is one, whatever the types."""

LINES = ("drf", "fifo", "gandiva-lyra", "yarn", "yarn-capacity", "yarn-fair")
"""Policies that let nobody pass the first of a line."""


def behind_a_full_type() -> tuple[list[JobView], list[NodeView]]:
    """The node of one type is another job's, for good; who waits for it is first in line."""
    holds = job_with(
        make_job_view(
            "holds",
            state=JobState.RUNNING,
            gpus_per_worker=8,
            gpu_type="A100",
            placed=[make_worker_view("holds", 0, "a", gpus=8)],
            preemptibility=Preemptibility.NON,
            remaining_work_s=1e6,
        ),
        first_started_at_s=0.0,
        started_at_s=0.0,
        as_of_s=NOW_S,
    )
    first = make_job_view("first", gpus_per_worker=8, types=("A100",))
    full = make_node_view("a", gpu_type="A100", workers=list(holds.placed))
    return [holds, first], [full, NODES[1]]


@each_row("types", [("H100",), ("A100", "H100")])
@each_row("name", sorted(set(NAMES) - ONE_LINE.keys()))
def test_who_waits_for_one_type_keeps_nobody_from_another(
    name: str, types: tuple[str, ...]
) -> None:
    """Of the same tenant, and submitted later."""
    jobs, nodes = behind_a_full_type()
    second = make_job_view("second", gpus_per_worker=8, types=types, submitted_at_s=1.0)
    assert started(name, [*jobs, second], nodes) == {"second": "H100"}


@each_row("name", LINES)
def test_a_strict_line_is_strict_on_each_type(name: str) -> None:
    """Half a node of the full type is free: the first needs all of it, the second could have it."""
    jobs, nodes = behind_a_full_type()
    half = make_worker_view("holds", 0, "a", gpus=4)
    jobs[0] = replace(jobs[0], gpus_per_worker=4, placed=(half,))
    nodes[0] = make_node_view("a", gpu_type="A100", workers=[half])
    second = make_job_view("second", gpus_per_worker=4, types=("A100",), submitted_at_s=1.0)
    third = make_job_view("third", gpus_per_worker=8, submitted_at_s=2.0)
    assert started(name, [*jobs, second], nodes) == {}
    assert started(name, [*jobs, second, third], nodes) == {"third": "H100"}


@each_row("name", LINES)
def test_who_could_never_run_on_a_type_keeps_nobody_waiting_there(name: str) -> None:
    """The first of a line accepts both types; only the nodes of one could ever hold its gang."""
    jobs, nodes = behind_a_full_type()
    jobs[1] = make_job_view("first", workers=(2, 2), gpus_per_worker=8, types=("A100", "H100"))
    nodes.append(make_node_view("a2", gpu_type="A100"))
    second = make_job_view("second", gpus_per_worker=8, types=("H100",), submitted_at_s=1.0)
    assert started(name, [*jobs, second], nodes) == {"second": "H100"}


@each_row("name", sorted(set(LINES) - {"fifo", "gandiva-lyra"}))
def test_who_is_behind_another_on_some_types_is_told_on_which_it_looked(name: str) -> None:
    """Half a node of the first's type is free and would do; of the other type nothing is."""
    [holds, first], [_, other] = behind_a_full_type()
    half = make_worker_view("holds", 0, "a", gpus=4)
    rest = replace(holds, job_id=JobId("rest"), gpu_type="H100")
    rest = replace(rest, placed=(make_worker_view("rest", 0, other.name, gpus=8),))
    jobs = [replace(holds, gpus_per_worker=4, placed=(half,)), rest, first]
    nodes = [
        make_node_view("a", gpu_type="A100", workers=[half]),
        make_node_view(other.name, workers=rest.placed),
    ]
    second = make_job_view("second", gpus_per_worker=4, submitted_at_s=1.0)
    told = policy(name).pending_reasons(make_snapshot(nodes=nodes, jobs=[*jobs, second]), b"")
    [said] = [hold.blockers[0] for hold in told if hold.job_id == "second"]
    assert "on H100; elsewhere it is behind first" in said
    assert "it is the first" not in said


@each_row("never", NEVER.values(), ids=NEVER)
@each_row("name", NAMES)
def test_who_could_never_run_keeps_nobody_waiting(name: str, never: JobView) -> None:
    """Submitted before the others or behind them, it does not start, and they do."""
    others = [
        make_job_view(
            "whole", workers=(2, 2), gpus_per_worker=8, types=("A100",), submitted_at_s=1.0
        ),
        make_job_view("elastic", workers=(1, 4), types=("H100",), submitted_at_s=1.0),
    ]
    nodes = (*NODES, make_node_view("a2", gpu_type="A100"))
    for at_s, deadline_at_s in product((0.0, 2.0), DEADLINES):
        jobs = [
            replace(job, deadline_at_s=deadline_at_s)
            for job in (job_with(never, submitted_at_s=at_s, remaining_work_s=60.0), *others)
        ]
        assert started(name, jobs, nodes).keys() == {"whole", "elastic"}, (at_s, deadline_at_s)


@each_row("name", [name for name in NAMES if not policy(name).parts.loan])
def test_who_could_run_only_on_nodes_that_nobody_lends_keeps_nobody_waiting(name: str) -> None:
    """A service's two nodes would hold it, and this policy lends none of them."""
    serving = [
        make_node_view(node, gpu_type="A100", role=NodeRole.SERVING) for node in ("s0", "s1")
    ]
    wide = make_job_view("wide", workers=(2, 2), gpus_per_worker=8, remaining_work_s=60.0)
    small = make_job_view("small", gpus_per_worker=8, submitted_at_s=1.0)
    snapshot = make_snapshot(
        nodes=[NODES[0], *serving],
        jobs=[small, wide],
        services=[make_service_view(load=0.0, min_serving=0)],
    )
    decisions = policy(name).allocate(snapshot, b"").decisions
    assert [made.job_id for made in decisions if isinstance(made, Start)] == ["small"]


@each_row(
    ("name", "at_s"),
    [
        *((name, 1.0) for name in ("afs", "afs-lyra", "qos", "qos-edf", "qos-elasticflow")),
        *((name, -1.0) for name in ("afs-p", "gandiva-sets", "pollux", "themis-simple")),
    ],
)
def test_who_comes_first_in_a_policys_order_chooses_its_type_first(name: str, at_s: float) -> None:
    """By length, by deadline, by submission or by who is worst off."""
    first = make_job_view("z", gpus_per_worker=8, remaining_work_s=600.0, submitted_at_s=at_s)
    second = make_job_view("a", gpus_per_worker=8, remaining_work_s=6000.0)
    jobs = [
        replace(first, deadline_at_s=NOW_S + 1e5),
        replace(second, deadline_at_s=NOW_S + 1e6),
    ]
    assert started(name, jobs) == {"z": "A100", "a": "H100"}


EDF = "qos-edf:largest=true:powers_of_two=false"
COUNTING = ["afs", "afs-lyra", "afs-p", "pollux:grows_at_most=null", "themis-simple", EDF]
"""Policies that themselves say how many workers an elastic job has."""


@each_row("name", COUNTING)
@each_row("runs", [False, True])
@each_row(("other_gpus", "workers"), [(0, 6), (3, 4)])
def test_workers_that_stand_for_one_are_given_and_counted_together(
    name: str, runs: bool, other_gpus: int, workers: int
) -> None:
    """On a type of which two stand for one, a job of 1 to 3 has two, four or six: of 8 GPUs six,
    and four where another has three of them, never five."""
    placed = [make_worker_view("wide", index, "n", is_flexible=index >= 2) for index in range(4)]
    nodes = [make_node_view("n", workers=placed if runs else ())]
    wide = make_job_view(
        "wide",
        state=JobState.RUNNING if runs else JobState.PENDING,
        workers=(1, 3),
        multiplier={"H100": 2},
        placed=placed if runs else (),
        submitted_at_s=NOW_S - 50_000.0,
        remaining_work_s=600.0,
    )
    other = make_job_view("other", gpus_per_worker=other_gpus or 1, remaining_work_s=300.0)
    jobs = [wide, other] if other_gpus else [wide]
    allocation = policy(name).allocate(make_snapshot(nodes=nodes, jobs=jobs), b"")
    counts = Counter({"wide": 4 if runs else 0})
    for made in allocation.decisions:
        match made:
            case Start():
                counts[made.job_id] += sum(place.worker_count for place in made.placements)
            case Resize():
                counts[made.job_id] += sum(place.worker_count for place in made.added)
                counts[made.job_id] -= len(made.removed_workers)
            case _:
                raise AssertionError(made)
    assert counts == {"wide": workers} | ({"other": 1} if other_gpus else {})
