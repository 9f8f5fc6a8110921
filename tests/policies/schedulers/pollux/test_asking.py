"""What comes of an allocation on the nodes: mended, and never worse than a greedy share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from coordinator.policies.contract.free_gpus import FreeGpus, Place, consolidated
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.parts.grants import Grant
from coordinator.policies.parts.pooling import Pool, pools
from coordinator.policies.schedulers.pollux.genetic_search import (
    Genes,
    Problem,
    SearchKnobs,
)
from coordinator.policies.schedulers.pollux.placement import ApartFloor, apart
from coordinator.policies.schedulers.pollux.rounds import Asking, workers_after
from tests.draws import whole, yes_or_no
from tests.policies.pollux_world import World, waiting, worlds


def asking(snapshot: ClusterSnapshot, place: Place, kind: type[FreeGpus]) -> Asking:
    """One round of the nodes and jobs of a snapshot."""
    shared = [pool for pool in pools(snapshot, kind(snapshot)) if pool.jobs]

    def grant(pool: Pool, job: JobView, count: int) -> Grant:
        return Grant(job=job, workers=count, gpu_type=pool.gpu_type, reason="a test")

    return Asking(
        snapshot=snapshot,
        pools=shared,
        problems=[Problem(SearchKnobs(), pool, snapshot.now_s) for pool in shared],
        floor=lambda: kind(snapshot),
        place=place,
        grant=grant,
    )


@given(worlds(), yes_or_no(), whole(0, 2))
def test_no_answer_is_worse_than_a_greedy_one_under_the_same_rules(
    world: World, is_apart: bool, rounds: int
) -> None:
    """Whatever is asked, what comes of it on the nodes is worth what comes of a greedy share, and
    of what there is."""
    for _ in range(rounds):
        world.next_round()
    place: Place = apart if is_apart else consolidated
    this = asking(world.snapshot(), place, ApartFloor if is_apart else FreeGpus)
    draw = np.random.default_rng(rounds)
    for problem in this.problems:  # one, or none where nobody is left who could be stopped
        asked = problem.repaired(draw.integers(0, problem.most + 1)[None, :], draw)[0]
        best = this.best([asked])
        for other in (asked, *problem.seeds()):
            [worth] = this.tried([other]).worth
            assert best.worth[0] >= worth


def test_what_nodes_do_not_give_is_asked_for_by_others() -> None:
    """By hand: six each of twelve GPUs are two jobs over n1. One gets four, 2 / (6/6 + 6/4) = 0.8;
    with the two that this leaves the other one has eight, 2 / (6/8 + 6/4) = 0.89."""
    world = World(3, [waiting("a", 6, 10), waiting("b", 4, 6)])
    this = asking(world.snapshot(), apart, ApartFloor)
    first = this.tried([genes(6, 6)])
    assert [counts.tolist() for counts in first.had] == [[6, 4]]
    assert [short.tolist() for short in first.short] == [[False, True]]
    assert first.worth[0] == pytest.approx(0.8, abs=2e-3)
    [problem], [asked], [had], [short] = this.problems, first.asked, first.had, first.short
    assert problem.mended(asked, had, short).tolist() == [8, 4]
    best = this.best([genes(6, 6)])
    assert workers_after(best.plan, this.pools[0]).tolist() == [8, 4]
    assert best.worth[0] == pytest.approx(2 / (6 / 8 + 6 / 4), abs=2e-3)


def genes(*counts: int) -> Genes:
    """Workers of jobs, in order."""
    return np.array(counts, dtype=np.int64)
