"""Tetris: the rules that its paper states, and which machine goes first."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coordinator.policies.contract.decisions import Start
from tests.harness.builders import job_with
from tests.policies.machines import cell, decide, full, job, machine, placed, started, with_weights
from tests.tables import each_row


def test_tetris_packs_by_alignment() -> None:
    """CPUs are what the machine has most of: the job that wants them aligns best and goes first."""
    running = job("r", "z", gpus=4, cpus=1, memory_gb=60, nodes=("n0",))
    jobs = (
        running,
        job("greedy", gpus=1, cpus=2, memory_gb=30, submitted_at_s=0.0),
        job("aligned", gpus=1, cpus=40, memory_gb=1, submitted_at_s=1.0),
    )
    snapshot = cell(machine("n0", cpus=64, memory_gb=100, jobs=jobs), jobs=jobs)
    assert started(decide("tetris:fairness=0:srtf_weight=0", snapshot))[0] == "aligned"


def test_tetris_prefers_what_is_nearly_done() -> None:
    """Equal demands: the one with less work left starts, though it came later."""
    jobs = (
        job("long", gpus=8, work_s=9000.0),
        job("short", gpus=8, work_s=60.0, submitted_at_s=1.0),
    )
    assert started(decide("tetris:fairness=0", cell(machine("n0"), jobs=jobs))) == ["short"]


@each_row(
    ("fairness", "first"), [("0", "rich"), ("0.49", "rich"), ("0.5", "poor"), ("0.9", "poor")]
)
def test_tetris_looks_at_the_worst_off_only(fairness: str, first: str) -> None:
    """The job of the tenant that has most is the shortest, but fairness leaves it out: of two jobs
    the 1 - f part, rounded up, is one from a half on."""
    jobs = (
        job("r", "R", gpus=8, nodes=("n0",)),
        job("rich", "R", gpus=8, work_s=10.0),
        job("poor", "P", gpus=8, work_s=9000.0, submitted_at_s=1.0),
    )
    snapshot = cell(machine("n0", jobs=jobs), machine("n1"), jobs=jobs)
    assert started(decide(f"tetris:fairness={fairness}", snapshot)) == [first]


def test_tetris_takes_eps_over_those_that_fairness_leaves() -> None:
    """eps is the mean alignment over the mean work of the candidates. Of three jobs a half, rounded
    up, is two: `wide` with 4 of 8 GPUs and 400 x 4/16 = 100 left, `small` with 1 and 320/16 = 20.
    eps = (1/2 + 1/8) / (100 + 20), so that they score -0.02 and 0.02; with the long job of the rich
    tenant, whose work is 10,000, eps would be next to nothing and `wide` would go first."""
    jobs = (
        job("r", "R", gpus=8, nodes=("n0",)),
        job("long", "R", work_s=160_000.0),
        job("wide", "P", gpus=4, work_s=400.0),
        job("small", "P", work_s=320.0, submitted_at_s=1.0),
    )
    snapshot = cell(machine("n0", jobs=jobs), machine("n1"), jobs=jobs)
    assert started(decide("tetris:fairness=0.5", snapshot))[0] == "small"


def test_tetris_starts_whole_gangs_where_all_resources_fit() -> None:
    """Four GPUs are free on each node, but CPUs for one worker only: the gang of two is spread."""
    running = (
        job("r0", gpus=4, cpus=56, nodes=("n0",)),
        job("r1", gpus=4, cpus=56, nodes=("n1",)),
    )
    gang = job("gang", gpus=1, cpus=8, workers=(2, 2))
    more = job("more", gpus=1, cpus=8, submitted_at_s=1.0, work_s=9e6)
    nodes = [machine(name, cpus=64, memory_gb=100, jobs=running) for name in ("n0", "n1")]
    allocation = decide("tetris:fairness=0", cell(*nodes, jobs=(*running, gang, more)))
    (only,) = (d for d in allocation.decisions if isinstance(d, Start))
    assert only.job_id == "gang"
    assert {placement.node for placement in only.placements} == {"n0", "n1"}


def test_tetris_keeps_whole_machines_for_whole_machine_jobs() -> None:
    """Small jobs share one machine of an idle cluster: the 8-GPU job that comes later starts."""
    names = ("n0", "n1", "n2", "n3")
    small = tuple(job(f"s{n}", submitted_at_s=float(n)) for n in range(4))
    where = placed(decide("tetris", cell(*(machine(name) for name in names), jobs=small)))
    running = tuple(job(name, nodes=tuple(nodes)) for name, nodes in where.items())
    assert len(running) == 4
    jobs = (*running, job("whole", gpus=8, submitted_at_s=9.0))
    snapshot = cell(*(machine(name, jobs=running) for name in names), jobs=jobs)
    assert started(decide("tetris", snapshot)) == ["whole"]


def test_tetris_lets_the_fullest_machine_pick_first() -> None:
    """n1 is half full: it takes the small job before n0 takes the one that aligns better there."""
    running = job("r", gpus=4, nodes=("n1",))
    jobs = (running, job("large", gpus=8), job("small", gpus=2, submitted_at_s=1.0, work_s=9e6))
    snapshot = cell(machine("n0"), machine("n1", jobs=jobs), jobs=jobs)
    where = placed(decide("tetris:fairness=0", snapshot))
    assert list(where.items()) == [("small", {"n1": 1}), ("large", {"n0": 1})]


def test_tetris_goes_on_with_a_machine_until_nothing_fits_there() -> None:
    """Six jobs of two GPUs on three idle machines: four fill the first, two open the second."""
    jobs = tuple(job(f"j{n}", gpus=2, submitted_at_s=float(n)) for n in range(6))
    snapshot = cell(machine("n0"), machine("n1"), machine("n2"), jobs=jobs)
    nodes = [node for where in placed(decide("tetris", snapshot)).values() for node in where]
    assert nodes == ["n0"] * 4 + ["n1"] * 2


@each_row(
    ("workers", "expected"),
    [(4, {"n0": 4}), (5, {"n1": 5}), (8, {"n1": 8}), (12, {"n1": 8, "n0": 4})],
)
def test_tetris_spreads_a_gang_only_where_no_machine_takes_it_whole(
    workers: int, expected: dict[str, int]
) -> None:
    """A whole gang goes to one machine; a larger one to the fewest, its rest to the fullest."""
    running = (job("r0", gpus=4, nodes=("n0",)), job("r3", gpus=7, nodes=("n3",)))
    jobs = (*running, job("gang", workers=(workers, workers)))
    nodes = [machine(f"n{n}", jobs=running) for n in range(4)]
    assert placed(decide("tetris", cell(*nodes, jobs=jobs))) == {"gang": expected}


def test_tetris_looks_for_the_fullest_again_after_a_spread_gang() -> None:
    """The gang leaves n2 two GPUs: it is now the fullest with CPUs for the other job, not n1."""
    running = (
        job("r0", gpus=4, cpus=56, nodes=("n0",)),
        job("r1", gpus=3, cpus=4, nodes=("n1",)),
    )
    jobs = (*running, job("gang", gpus=3, cpus=2, workers=(3, 3)), job("other", gpus=1, cpus=20))
    nodes = [machine(f"n{n}", cpus=64, memory_gb=100, jobs=running) for n in range(3)]
    where = placed(decide("tetris", cell(*nodes, jobs=jobs)))
    assert where == {"gang": {"n0": 1, "n2": 2}, "other": {"n2": 1}}


def test_tetris_serves_the_highest_priority_on_all_machines_first() -> None:
    """A small job fits on the fullest machine, but a gang of more priority needs that too."""
    running = job("r", gpus=4, nodes=("n1",))
    gang = replace(job("gang", gpus=2, workers=(6, 6), work_s=9e6, submitted_at_s=1.0), priority=1)
    jobs = (running, job("small", work_s=60.0), gang)
    snapshot = cell(machine("n0"), machine("n1", jobs=jobs), jobs=jobs)
    assert started(decide("tetris", snapshot)) == ["gang"]


@pytest.mark.parametrize(("ratio", "first"), [("0.9", "gang"), ("0.1", "small")])
def test_tetris_counts_remote_workers_of_a_gang_for_less(ratio: str, first: str) -> None:
    """Two of its six workers are remote: (4 x 1/4 + 2 x 1/8 x ratio) / 6 against 3/16."""
    running = job("r", gpus=4, nodes=("n1",))
    jobs = (running, job("gang", gpus=2, workers=(6, 6)), job("small", gpus=3))
    snapshot = cell(machine("n0"), machine("n1", jobs=jobs), jobs=jobs)
    knobs = f"tetris:fairness=0:srtf_weight=0:remote_ratio={ratio}"
    assert started(decide(knobs, snapshot)) == [first]


def test_tetris_counts_all_workers_of_a_gang_that_starts() -> None:
    """Four of the first gang are more than three of a running job: its tenant is the better off of
    the two from then on, and with fairness near 1 its second job waits behind the other's."""
    jobs = (
        job("runs", "Q", gpus=3, nodes=("n0",)),
        job("gang", "P", workers=(4, 4), submitted_at_s=0.0),
        job("second", "P", gpus=1, work_s=10.0, submitted_at_s=1.0),
        job("other", "Q", gpus=1, work_s=9000.0, submitted_at_s=2.0),
    )
    snapshot = cell(machine("n0", gpus=8, jobs=jobs), jobs=jobs)
    assert started(decide("tetris:fairness=0.99", snapshot)) == ["gang", "other"]


# --- Tetris -------------------------------------------------------------------------------------

EVEN = "tetris:fairness=0"


LEFT_ONLY = f"{EVEN}:srtf_weight=1000"


def test_tetris_weighs_what_is_left_by_what_a_worker_takes_of_the_cluster() -> None:
    """Remaining work is time x resources: 4 GPUs for 1,000 s are more than 2 for 1,500 s."""
    wide = job("wide", gpus=4, work_s=1000.0)
    narrow = job("narrow", gpus=2, work_s=1500.0, submitted_at_s=1.0)
    assert started(decide(LEFT_ONLY, full(wide, narrow, gpus=4))) == ["narrow"]


def test_tetris_adds_up_the_parts_of_all_resources() -> None:
    """Half of the GPUs and half of the CPUs are more than five eighths of the GPUs alone."""
    two = job("two", gpus=4, cpus=32, memory_gb=1, work_s=1000.0)
    one = job("one", gpus=5, cpus=1, memory_gb=1, work_s=1000.0, submitted_at_s=1.0)
    snapshot = cell(machine("n0", cpus=64, memory_gb=100), jobs=(two, one))
    assert started(decide(LEFT_ONLY, snapshot)) == ["one"]


def test_tetris_lets_alignment_and_work_left_weigh_alike() -> None:
    """eps is the ratio of the means: neither term is decided by the unit of the other.

    Mean alignment over mean work left makes the sum of both terms' means 0: a job that aligns twice
    as well goes first unless it has more than that more to do, in seconds as in years.
    """
    for unit_s in (1.0, 1e6):
        aligned = job("aligned", gpus=4, work_s=3.0 * unit_s)
        short = job("short", gpus=2, work_s=5.0 * unit_s, submitted_at_s=1.0)
        assert started(decide(EVEN, full(aligned, short, gpus=4)))[0] == "aligned"
        long = job_with(aligned, remaining_work_s=9.0 * unit_s)
        assert started(decide(EVEN, full(long, short, gpus=4)))[0] == "short"


def test_tetris_counts_what_it_starts_to_its_tenant() -> None:
    """With f near 1 the worst off goes next, and a tenant that was just served is not."""
    jobs = tuple(
        job(f"{tenant}{n}", tenant, gpus=2, submitted_at_s=float(n + 10 * (tenant == "B")))
        for tenant in ("A", "B")
        for n in range(4)
    )
    found = started(decide("tetris:fairness=0.99", full(*jobs, gpus=8)))
    assert sorted(found) == ["A0", "A1", "B0", "B1"]


def test_tetris_divides_shares_by_weights() -> None:
    """Weight 3 against 1: of eight jobs that start, A has six."""
    jobs = tuple(job(f"{tenant}{n}", tenant) for tenant in ("A", "B") for n in range(8))
    snapshot = with_weights(full(*jobs), {"A": 3.0, "B": 1.0})
    found = started(decide("tetris:fairness=0.99", snapshot))
    assert sum(name.startswith("A") for name in found) == 6
