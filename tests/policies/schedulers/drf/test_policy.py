"""DRF: the properties that its papers state, progressive filling, which jobs it stops, and which
workers it takes for a gang."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.policies.contract.decisions import Preempt, Resize, Start
from coordinator.policies.contract.snapshot import TenantView
from coordinator.policies.parts.resource_vectors import Vector, wanted
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.drf.policy import deal, fewest_victims
from tests.harness.builders import job_with
from tests.policies.machines import cell, decide, full, job, machine, started, stopped

LINES = st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(0, 3), max_size=3))


def dealt(lines: dict[str, list[int]]) -> tuple[str, dict[str, int]]:
    """In which order lines were given one each, and what each has: who stands there takes so
    many, and each time the line that has least is first."""
    order = ""
    has = dict.fromkeys(lines, 0)
    people: dict[str, list[list[object]]] = {
        name: [[name, most, 0] for most in line] for name, line in lines.items()
    }

    def give(person: list[object]) -> bool:
        nonlocal order
        name, most, had = str(person[0]), int(str(person[1])), int(str(person[2]))
        if had == most:
            return False
        person[2], has[name], order = had + 1, has[name] + 1, order + name
        return True

    deal(people, lambda names: min(names, key=lambda name: (has[name], name)), give)
    return order, has


def test_the_line_that_has_least_is_given_the_next_one() -> None:
    """Of equals the first by name; who takes no more does not hold up the others."""
    assert dealt({"b": [3], "a": [1], "c": [2]}) == ("abcbcb", {"a": 1, "b": 3, "c": 2})


def test_the_next_of_a_line_follows_the_one_that_takes_no_more() -> None:
    """Whoever is passed over has no turn any more, and who takes nothing is no obstacle."""
    assert dealt({"a": [1, 0, 2], "b": [1]}) == ("abaa", {"a": 3, "b": 1})


@given(LINES)
def test_everybody_is_given_all_that_it_takes(lines: dict[str, list[int]]) -> None:
    """And no line is given one while another that takes more has less."""
    order, has = dealt(lines)
    assert has == {name: sum(line) for name, line in lines.items()}
    given = dict.fromkeys(lines, 0)
    for name in order:
        open_ = [each for each in lines if given[each] < sum(lines[each])]
        assert given[name] == min(given[each] for each in open_)
        given[name] += 1


SIZES = st.lists(st.integers(0, 4), max_size=8)


def found(
    sizes: list[int], wanted: int, may_go: Callable[[int], bool] = lambda _: True
) -> tuple[list[int] | None, int]:
    """Places in line of the victims for so many GPUs, and what came free."""
    free = 0

    def move(at: int, sign: int) -> None:
        nonlocal free
        free += sign * sizes[at]

    line = range(len(sizes))
    return fewest_victims(line, may_go=may_go, move=move, fits=lambda: free >= wanted), free


def test_victims_go_in_the_order_of_the_line() -> None:
    """Whoever stands behind the one that made it fit is not looked at."""
    victims, _ = found([1, 1, 1, 1], 2)
    assert victims is not None
    assert sorted(victims) == [0, 1]


def test_whoever_is_not_needed_in_the_end_stays() -> None:
    """The second one alone is enough: the first was taken before that was known."""
    assert found([1, 4], 4) == ([1], 4)


def test_whoever_may_not_go_stays() -> None:
    """Even where it would be the only one."""
    assert found([4, 1], 4, may_go=lambda at: at > 0) == (None, 0)


@given(sizes=SIZES, wanted=st.integers(1, 12))
def test_nobody_goes_in_vain(sizes: list[int], wanted: int) -> None:
    """MinimalVictims: without any one of them it would not fit; without room nobody goes at all."""
    victims, free = found(sizes, wanted)
    if victims is None:
        assert (sum(sizes) < wanted, free) == (True, 0)
        return
    assert free == sum(sizes[at] for at in victims) >= wanted
    assert all(free - sizes[at] < wanted for at in victims)


# --- DRF ----------------------------------------------------------------------------------------


def test_the_paper_s_example_of_dominant_shares() -> None:
    """9 CPUs and 18 GB; A wants (1, 4) and B (3, 1): three and two of them run, both at 2/3."""
    jobs = (
        *(job(f"a{n}", "A", cpus=1, memory_gb=4) for n in range(9)),
        *(job(f"b{n}", "B", cpus=3, memory_gb=1) for n in range(9)),
    )
    # GPUs are plenty: they bind nobody, as in the paper, where there are none.
    snapshot = cell(machine("n0", gpus=100, cpus=9, memory_gb=18), jobs=jobs)
    assert Counter(name[0] for name in started(decide("drf", snapshot))) == {"a": 3, "b": 2}


def test_the_share_that_counts_is_the_dominant_one() -> None:
    """Twelve CPUs, GPUs are plenty: who wants two CPUs a job has half as many, not equally many."""
    jobs = (
        *(job(f"a{n}", "A", cpus=1, memory_gb=1) for n in range(12)),
        *(job(f"b{n}", "B", cpus=2, memory_gb=1) for n in range(12)),
    )
    snapshot = cell(machine("n0", gpus=100, cpus=12, memory_gb=100), jobs=jobs)
    assert Counter(name[0] for name in started(decide("drf", snapshot))) == {"a": 6, "b": 3}


demands = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))


def filled(wants: list[tuple[int, int, int]], each: int) -> Counter[str]:
    """How many start of many equal small jobs of each tenant, on one large node."""
    jobs = tuple(
        job(f"j{number}-{n:03d}", f"t{number}", gpus=gpus, cpus=cpus, memory_gb=memory)
        for number, (gpus, cpus, memory) in enumerate(wants)
        for n in range(each)
    )
    snapshot = cell(machine("n0", gpus=96, cpus=96, memory_gb=96), jobs=jobs)
    tenants: dict[str, str] = {made.job_id: made.tenant for made in jobs}
    return Counter(tenants[name] for name in started(decide("drf", snapshot)))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(wants=st.lists(demands, min_size=2, max_size=3))
def test_drf_has_its_properties_but_for_whole_jobs(wants: list[tuple[int, int, int]]) -> None:
    """Sharing incentive, no envy and nothing left, up to the jobs that indivisibility cuts off."""
    got = filled(wants, 96)
    counts = [got[f"t{n}"] for n in range(len(wants))]
    total = [sum(c * want[r] for c, want in zip(counts, wants, strict=True)) for r in range(3)]
    # Pareto: no tenant's next job fits.
    assert all(any(total[r] + want[r] > 96 for r in range(3)) for want in wants)
    for count, mine in zip(counts, wants, strict=True):
        # Sharing incentive: whoever is blocked has the smallest share, and nobody else is ahead of
        # it by more than one job, so that its share is an equal one less its part of those.
        assert count * max(mine) * len(wants) > 96 - sum(max(want) for want in wants)
        for other, theirs in zip(counts, wants, strict=True):
            # No envy: the other was one job ahead of it when it was blocked, and then grew on no
            # more than one job of its leaves of what blocked it.
            runs = min(other * theirs[r] // mine[r] for r in range(3))
            ahead = max(theirs) + max(mine) * max(theirs) / min(theirs)
            assert runs * max(mine) <= count * max(mine) + ahead


def test_a_tenant_with_more_weight_gets_more() -> None:
    """Weight 3 against 1: of eight GPUs six and two."""
    jobs = tuple(job(f"{t}{n}", t) for t in "ab" for n in range(8))
    snapshot = replace(
        cell(machine("n0"), jobs=jobs),
        tenants=(TenantView(name="a", weight=3.0), TenantView(name="b")),
    )
    assert Counter(name[0] for name in started(decide("drf", snapshot))) == {"a": 6, "b": 2}


def test_a_job_that_can_never_run_blocks_nobody() -> None:
    """It wants more CPUs than any node has: the next of its tenant starts, and it is told why."""
    jobs = (job("huge", cpus=200), job("next", submitted_at_s=1.0))
    snapshot = cell(machine("n0", cpus=64, memory_gb=100), jobs=jobs)
    for name in ("drf", "tetris"):
        assert started(decide(name, snapshot)) == ["next"]
        (hold,) = policy(name).pending_reasons(snapshot, b"")
        assert hold.blockers[0].startswith("can never run here")


def test_a_job_that_tells_no_cpus_wants_its_gpus_part_of_a_node() -> None:
    """Half of the GPUs stand for half of the CPUs and of the memory."""
    whole = Vector(8.0, 64.0, 512.0)
    assert wanted(job("j", gpus=4), whole) == Vector(4.0, 32.0, 256.0)
    assert wanted(job("j", gpus=4, cpus=8), whole) == Vector(4.0, 8.0, 256.0)


@pytest.mark.parametrize(("name", "stops"), [("drf", set[str]()), ("drf:preempts=true", {"b1"})])
def test_drf_preempts_by_volcano_s_rule_where_it_is_told_to(name: str, stops: set[str]) -> None:
    """A goes to 2/8 and B comes from 6/8 to 4/8: A stays below. One more would not."""
    jobs = (
        *(job(f"b{n}", "B", gpus=2, nodes=("n0",)) for n in (1, 2, 3, 4)),
        job("a1", "A", gpus=2),
    )
    allocation = decide(name, cell(machine("n0", jobs=jobs), jobs=jobs))
    assert {d.job_id for d in allocation.decisions if isinstance(d, Preempt)} == stops
    assert bool(started(allocation)) == bool(stops)


def test_drf_does_not_swap_equals() -> None:
    """A preemption that turns the shares round would be taken back by the next pass."""
    jobs = (job("b1", "B", gpus=8, nodes=("n0",)), job("a1", "A", gpus=8))
    assert decide("drf:preempts=true", cell(machine("n0", jobs=jobs), jobs=jobs)).decisions == ()


def test_drf_takes_flexible_workers_for_a_gang_and_deals_the_rest() -> None:
    """B runs on all eight GPUs with one base worker: A's gang of two makes two of them go."""
    jobs = (
        job("b", "B", workers=(1, 8), nodes=("n0",) * 8),
        job("a", "A", gpus=2, workers=(1, 1)),
    )
    allocation = decide("drf", cell(machine("n0", jobs=jobs), jobs=jobs))
    (resize,) = (d for d in allocation.decisions if isinstance(d, Resize))
    assert resize.removed_workers == (6, 7)
    assert started(allocation) == ["a"]


def test_drf_grows_jobs_of_the_smallest_share_first() -> None:
    """Four GPUs are left: two elastic jobs of equal tenants get two more workers each."""
    jobs = (
        job("a", "A", workers=(2, 8), nodes=("n0",) * 2),
        job("b", "B", workers=(2, 8), nodes=("n0",) * 2),
    )
    allocation = decide("drf", cell(machine("n0", jobs=jobs), jobs=jobs))
    grown = {
        d.job_id: sum(placement.worker_count for placement in d.added)
        for d in allocation.decisions
        if isinstance(d, Resize)
    }
    assert grown == {"a": 2, "b": 2}


# --- DRF ----------------------------------------------------------------------------------------


def test_drf_stops_nobody_for_an_equal_share_after_the_move() -> None:
    """A would come to 4/8 and B down to 4/8: the preemptor must stay below (Volcano's rule)."""
    theirs = [job(f"b{n}", "B", gpus=2, nodes=("n0",)) for n in range(3)]
    mine = job("a0", "A", gpus=2, nodes=("n0",))
    assert stopped("drf:preempts=true", full(*theirs, mine, job("a1", "A", gpus=2))) == []
    smaller = job("a0", "A", gpus=1, nodes=("n0",))
    assert len(stopped("drf:preempts=true", full(*theirs, smaller, job("a1", "A", gpus=2)))) == 1


def test_drf_stops_the_gang_that_loses_least() -> None:
    """Of one tenant's jobs the one whose last checkpoint is nearest, not the first by name."""
    lost = {"b0": 900.0, "b1": 100.0, "b2": 500.0}
    theirs = [
        job_with(job(name, "B", gpus=2, nodes=("n0",)), unsaved_gpu_s=gpu_s)
        for name, gpu_s in lost.items()
    ]
    snapshot = full(*theirs, job("a", "A", gpus=2), gpus=6)
    assert stopped("drf:preempts=true", snapshot) == ["b1"]


def test_drf_stops_a_gang_for_its_cpus_alone() -> None:
    """B's two gangs have all CPUs of their nodes and two of eight GPUs: no gang of A's starts there
    beside both of them."""
    theirs = tuple(job(f"b{n}", "B", gpus=2, cpus=64, nodes=(f"n{n}",)) for n in range(2))
    nodes = [machine(f"n{n}", gpus=8, cpus=64, memory_gb=64, jobs=theirs) for n in range(2)]
    snapshot = cell(*nodes, jobs=(*theirs, job("a", "A", gpus=2, cpus=8)))
    assert started(decide("drf", snapshot)) == []
    assert started(decide("drf:preempts=true", snapshot)) == ["a"]
    assert stopped("drf:preempts=true", snapshot) == ["b0"]


def test_drf_stops_nobody_whose_place_is_free_after_a_later_stop() -> None:
    """A's first gang takes four GPUs of the node that B's two share; for its second, B's wide one
    has to leave the other node, and with it enough of this one for the narrow one to stay."""
    narrow = job("narrow", "B", gpus=4, nodes=("n0",))
    wide = job("wide", "B", gpus=4, workers=(3, 3), nodes=("n0", "n1", "n1"))
    wide = job_with(wide, unsaved_gpu_s=100.0)
    asks = [job(f"a{n}", "A", gpus=gpus, submitted_at_s=n) for n, gpus in enumerate((4, 8))]
    held = [job(f"b{n}", "B", gpus=8, nodes=(f"n{n}",)) for n in (2, 3, 4, 5)]
    held = [job_with(each, unsaved_gpu_s=1e6) for each in held]
    jobs = (narrow, wide, *held)
    nodes = [machine(f"n{n}", gpus=8, jobs=jobs) for n in range(6)]
    snapshot = cell(*nodes, jobs=(*jobs, *asks))
    assert started(decide("drf:preempts=true", snapshot)) == ["a0", "a1"]
    assert stopped("drf:preempts=true", snapshot) == ["wide"]


def test_drf_stops_jobs_of_the_tenant_with_most() -> None:
    """B has 6/12 and C 4/12: B gives, though C's jobs have lost nothing and come first by name."""
    theirs = [job(f"z{n}", "B", gpus=2, nodes=("n0",)) for n in range(3)]
    others = [job(f"c{n}", "C", gpus=2, nodes=("n0",)) for n in range(2)]
    theirs = [job_with(each, unsaved_gpu_s=100.0) for each in theirs]
    snapshot = full(*theirs, *others, job("a", "A", gpus=2), gpus=10)
    assert stopped("drf:preempts=true", snapshot) == ["z0"]


def test_drf_stops_the_richest_of_those_that_may_be_stopped() -> None:
    """C would stay above A after the stop as well: B has 8 of 16 and C 6, so B gives."""
    theirs = [job(f"z{n}", "B", gpus=2, nodes=("n0",)) for n in range(4)]
    others = [job(f"c{n}", "C", gpus=2, nodes=("n0",)) for n in range(3)]
    mine = job("r", "A", gpus=2, nodes=("n0",))
    snapshot = full(*theirs, *others, mine, job("a", "A"), gpus=16)
    assert stopped("drf:preempts=true", snapshot) == ["z0"]
    alone = full(*theirs[:1], *others, mine, job("a", "A"), gpus=10)
    assert stopped("drf:preempts=true", alone) == ["c0"], "it would have been allowed"


def test_drf_shrinks_jobs_of_the_tenant_with_most() -> None:
    """B has five of nine GPUs and C three: B gives a flexible worker, though C comes by name."""
    jobs = (
        job("c", "C", workers=(1, 8), nodes=("n0",) * 3),
        job("z", "B", workers=(1, 8), nodes=("n0",) * 5),
        job("a", "A"),
    )
    found = decide("drf", full(*jobs))
    assert [each.job_id for each in found.decisions if isinstance(each, Resize)] == ["z"]


def test_drf_stops_elastic_gangs_like_rigid_ones() -> None:
    """B's two gangs hold all GPUs and have nobody flexible: one of them goes for A's single GPU.

    Flexible workers go first, so that a gang that gives one goes on.
    """
    theirs = [job(f"b{n}", "B", workers=(4, 8), nodes=("n0",) * 4) for n in range(2)]
    assert stopped("drf:preempts=true", full(*theirs, job("a", "A"))) == ["b0"]
    assert stopped("drf", full(*theirs, job("a", "A"))) == []
    grown = job("b1", "B", workers=(3, 8), nodes=("n0",) * 4)
    found = decide("drf:preempts=true", full(theirs[0], grown, job("a", "A")))
    assert [type(each) for each in found.decisions] == [Resize, Start]


def test_drf_counts_an_elastic_gang_as_gone_with_its_flexible_workers() -> None:
    """All five GPUs of a gang of three come free with it: for A's three, and for two after it."""
    kept = job_with(job("b", "B", gpus=7, nodes=("n0",)), unsaved_gpu_s=900.0)
    elastic = job("e", "B", workers=(3, 5), nodes=("n0",) * 5)
    asks = (job("a0", "A", gpus=3), job("a1", "A", submitted_at_s=1.0))
    snapshot = full(kept, elastic, *asks, gpus=12)
    assert stopped("drf:preempts=true", snapshot) == ["e"]
    assert started(decide("drf:preempts=true", snapshot)) == ["a0", "a1"]


def test_drf_deals_what_a_stopped_gang_leaves_to_those_who_stay() -> None:
    """The gang that goes gets no flexible worker; another one of its tenant gets the GPU."""
    gone = job("e", "B", workers=(3, 8), nodes=("n0",) * 3)
    stays = job("g", "B", workers=(7, 8), nodes=("n0",) * 7, submitted_at_s=1.0)
    found = decide("drf:preempts=true", full(gone, stays, job("a", "A", gpus=2), gpus=10))
    of_jobs = [each for each in found.decisions if isinstance(each, Preempt | Resize | Start)]
    assert len(of_jobs) == len(found.decisions)
    assert {each.job_id: type(each) for each in of_jobs} == {"e": Preempt, "g": Resize, "a": Start}


def test_drf_stops_nobody_in_vain() -> None:
    """Whose GPUs the gang does not need after all goes on, though it was the first to be asked."""
    theirs = [
        job_with(job(name, "B", gpus=gpus, nodes=("n0",)), unsaved_gpu_s=float(gpus))
        for name, gpus in (("b0", 1), ("b1", 4), ("b2", 11))
    ]
    snapshot = full(*theirs, job("a", "A", gpus=4), gpus=16)
    assert stopped("drf:preempts=true", snapshot) == ["b1"]


def test_drf_takes_the_newest_flexible_workers_and_no_more_than_it_needs() -> None:
    """Five stand beyond B's base worker: A's gang of two takes the last two of them."""
    grown = job("b", "B", workers=(1, 8), nodes=("n0",) * 6)
    found = decide("drf", full(grown, job("a", "A", workers=(2, 2)), gpus=6))
    resizes = [each for each in found.decisions if isinstance(each, Resize)]
    assert [each.removed_workers for each in resizes] == [(4, 5)]


def test_drf_lets_nobody_pass_the_first_of_its_tenant() -> None:
    """One whose job does not fit is blocked for the pass; another tenant goes on."""
    jobs = (
        job("runs", "C", gpus=6, nodes=("n0",)),
        job("a0", "A", gpus=4),
        job("a1", "A", gpus=1, submitted_at_s=1.0),
        job("b0", "B", gpus=1, submitted_at_s=2.0),
    )
    assert started(decide("drf", full(*jobs))) == ["b0"]


def test_drf_counts_what_it_starts_at_once() -> None:
    """Equal tenants take turns within one pass, by what they were just given."""
    jobs = tuple(
        job(f"{tenant}{n}", tenant, gpus=2, submitted_at_s=float(n))
        for tenant in ("A", "B")
        for n in range(4)
    )
    assert started(decide("drf", full(*jobs))) == ["A0", "B0", "A1", "B1"]


def test_nobody_makes_room_in_vain() -> None:
    """Of victims in order those without whom it would fit as well stay: the last that is needed."""
    sizes = {"one": 1, "four": 4, "two": 2}
    free = [0]

    def move(name: str, sign: int) -> None:
        free[0] += sign * sizes[name]

    def found(need: int) -> list[str] | None:
        free[0] = 0
        return fewest_victims(sizes, may_go=lambda _: True, move=move, fits=lambda: free[0] >= need)

    for need, expected in ((4, ["four"]), (5, ["four", "one"]), (7, ["two", "four", "one"])):
        assert found(need) == expected
        assert free[0] == sum(sizes[name] for name in expected)
    assert found(8) is None
    assert free[0] == 0, "everybody is where it was"
