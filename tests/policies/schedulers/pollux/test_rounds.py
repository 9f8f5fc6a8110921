"""Pollux over several rounds: jobs grow by what they held, wide ones share no node, and an
allocation is mended on the nodes, never worse than a greedy share."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.errors import ConfigError
from common.model import JobId, JobState, Preemptibility
from coordinator.policies.contract.decisions import Decision, Placement, Preempt, Resize, Start
from coordinator.policies.contract.free_gpus import FreeGpus, Place, consolidated, present_workers
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, WorkerView
from coordinator.policies.parts.grants import Grant
from coordinator.policies.parts.pooling import Pool, pools
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.pollux.genetic_search import Genes, Problem, SearchKnobs
from coordinator.policies.schedulers.pollux.placement import ApartFloor, apart, first_to_leave
from coordinator.policies.schedulers.pollux.rounds import Asking, workers_after
from tests.draws import pick, whole, yes_or_no
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.tables import each_row

FAST = "pollux:generations=4:population=8:rest_rounds=0"


ROUND_S = 60.0


GPUS = 4


class World:
    """Jobs on nodes of four GPUs, to which decisions are applied at once. It judges nothing."""

    def __init__(self, nodes: int, jobs: Iterable[JobView], name: str = FAST) -> None:
        self.nodes = [f"n{number}" for number in range(nodes)]
        self.jobs = {job.job_id: job for job in jobs}
        self.hidden: set[JobId] = set()
        self.memory = b""
        self.now_s = NOW_S
        self._policy = policy(name)

    def __getitem__(self, name: str) -> JobView:
        return self.jobs[JobId(name)]

    def snapshot(self) -> ClusterSnapshot:
        """Without those hidden, of which only names are told."""
        seen = [self.jobs[name] for name in sorted(self.jobs) if name not in self.hidden]
        workers = [worker for job in seen for worker in job.placed]
        nodes = [
            make_node_view(
                name, gpus=GPUS, workers=[worker for worker in workers if worker.node == name]
            )
            for name in self.nodes
        ]
        made = make_snapshot(nodes=nodes, jobs=seen, now_s=self.now_s)
        return replace(made, unseen=frozenset(self.hidden & self.jobs.keys()))

    def next_round(self) -> tuple[Decision, ...]:
        """What it decides, carried out; the same from the same bytes."""
        snapshot = self.snapshot()
        made = self._policy.allocate(snapshot, self.memory)
        assert made == self._policy.allocate(snapshot, self.memory)
        for decision in made.decisions:
            self._apply(decision)
        self.memory = made.memory
        self.now_s += ROUND_S
        return made.decisions

    def _apply(self, decision: Decision) -> None:
        match decision:
            case Start():
                job = self.jobs[decision.job_id]
                started = job_with(
                    job,
                    state=JobState.RUNNING,
                    gpu_type="H100",
                    attempt_number=job.attempt.number + 1,
                    first_started_at_s=job.attempt.first_started_at_s or self.now_s,
                    is_resizable=job.is_elastic,
                    placed=added(job, decision.placements, ()),
                )
                self.jobs[decision.job_id] = started
            case Resize():
                job = self.jobs[decision.job_id]
                stay = [
                    each for each in job.placed if each.worker_index not in decision.removed_workers
                ]
                self.jobs[decision.job_id] = replace(job, placed=added(job, decision.added, stay))
            case _:
                assert isinstance(decision, Preempt)
                self.stop(decision.job_id)

    def stop(self, name: str) -> None:
        """A job waits again."""
        job = self[name]
        self.jobs[job.job_id] = replace(
            job, state=JobState.PENDING, gpu_type=None, placed=(), is_resizable=False
        )

    def pass_between(self) -> None:
        """Half a round after the last one, it looks at what there is and decides nothing."""
        self.now_s -= ROUND_S / 2
        assert self.next_round() == ()
        self.now_s -= ROUND_S / 2

    def counts(self) -> dict[str, int]:
        """Workers of each job."""
        return {name: present_workers(job) for name, job in self.jobs.items()}

    def clashes(self) -> list[str]:
        """Nodes with workers of two jobs over several nodes."""
        wide = [
            nodes for job in self.jobs.values()
            if len(nodes := {worker.node for worker in job.placed}) > 1
        ]  # fmt: skip
        return [name for name in self.nodes if sum(name in nodes for nodes in wide) > 1]


def added(
    job: JobView, placements: Iterable[Placement], stay: Iterable[WorkerView]
) -> tuple[WorkerView, ...]:
    """Workers that stay, then those that come: the base gang first, as it has the first indices."""
    workers = list(stay)
    for placement in sorted(placements, key=lambda each: each.is_flexible):
        for _ in range(placement.worker_count):
            index = max((each.worker_index for each in workers), default=-1) + 1
            workers.append(
                make_worker_view(
                    job.job_id,
                    index,
                    placement.node,
                    gpus=job.gpus_per_worker,
                    is_flexible=placement.is_flexible,
                )
            )
    return tuple(workers)


def waiting(name: str, least: int, most: int, *, gpus: int = 1) -> JobView:
    """A job that came ten minutes ago."""
    return make_job_view(
        name, workers=(least, most), gpus_per_worker=gpus, submitted_at_s=NOW_S - 600.0
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Nodes and jobs of any sizes; a few of them may not be stopped."""
    jobs: list[JobView] = []
    for number in range(draw(whole(2, 6))):
        least = draw(whole(1, 7))
        job = waiting(
            f"j{number}", least, least + draw(pick(0, 0, 2, 5, 9)), gpus=draw(pick(1, 1, 2))
        )
        is_rigid = draw(whole(0, 5)) == 0
        preemptibility = Preemptibility.NON if is_rigid else Preemptibility.FULL
        jobs.append(replace(job, preemptibility=preemptibility))
    return World(draw(whole(2, 5)), jobs)


def disturb(world: World, data: st.DataObject) -> None:
    """Between rounds a job may fail, end, or have no room by its quota."""
    for name in sorted(world.jobs):
        match data.draw(whole(0, 9)):
            case 0:
                world.stop(name)
            case 1:
                del world.jobs[name]
            case 2 if not world.jobs[name].placed:
                world.hidden.add(name)
            case _:
                world.hidden.discard(name)


@pytest.mark.slow
@given(worlds(), st.data())
@settings(max_examples=60)
def test_no_round_breaks_either_rule(world: World, data: st.DataObject) -> None:
    """In any run of rounds a job has its smallest gang first and never more than twice the most
    that it ever had, and no two jobs over several nodes have workers on one."""
    held: dict[str, int] = {}
    for _ in range(6):
        world.next_round()
        assert world.clashes() == []
        for name, count in world.counts().items():
            least = world[name].workers.min
            assert count <= max(least, 2 * held.get(name, 0))
            held[name] = max(count, held.get(name, 0))
        disturb(world, data)


# --- how much a job may have --------------------------------------------------------------------


def test_a_job_that_is_alone_doubles_from_round_to_round() -> None:
    """1, 2, 4, 8, and twelve of twelve GPUs, as sixteen are more than there are."""
    world = World(3, [waiting("a", 1, 20)])
    had: list[int] = []
    for _ in range(6):
        world.next_round()
        had += world.counts().values()
    assert had == [1, 2, 4, 8, 12, 12]


def test_the_knob_turns_the_factor_and_the_rule_off() -> None:
    """By three it is 1, 3, 9; with none all at once."""
    for value, counts in (("3", [1, 3, 9, 12]), ("null", [12, 12, 12, 12])):
        world, had = World(3, [waiting("a", 1, 20)], f"{FAST}:grows_at_most={value}"), list[int]()
        for _ in range(4):
            world.next_round()
            had += world.counts().values()
        assert had == counts


@each_row("value", ["1", "0", "1.5", "ten"])
def test_a_factor_by_which_nobody_could_grow_is_refused(value: str) -> None:
    """Once the most that a job had is no growth; the error names the knob."""
    with pytest.raises(ConfigError, match="pollux: grows_at_most="):
        policy(f"pollux:grows_at_most={value}")


def test_what_a_job_held_is_remembered_while_it_waits_and_is_hidden() -> None:
    """It had four, failed, had no room by its quota for a round, and starts with as many as it can
    use of twice that."""
    world = World(3, [waiting("a", 1, 20), waiting("b", 1, 1)])
    for _ in range(3):
        world.next_round()
    assert world.counts() == {"a": 4, "b": 1}
    world.pass_between()
    world.stop("a")
    world.hidden.add(JobId("a"))
    world.next_round()
    assert msgspec.msgpack.decode(world.memory)["held"] == {"a": 4}
    world.hidden.clear()
    world.next_round()
    assert world.counts() == {"a": 8, "b": 1}


def test_what_a_job_held_between_two_rounds_counts() -> None:
    """Six workers that another policy gave it are gone before the next round; and who has ended is
    forgotten."""
    world = World(3, [waiting("a", 1, 20)])
    world.next_round()
    placed = added(world["a"], (), world["a"].placed)
    more = [Placement(node=placed[0].node, worker_count=3, is_flexible=True)]
    grown = replace(world["a"], placed=added(world["a"], more, placed))
    world.jobs[grown.job_id] = grown
    world.pass_between()
    world.stop("a")
    world.next_round()
    assert world.counts() == {"a": 8}
    world.jobs = {each.job_id: each for each in [waiting("b", 1, 1)]}
    world.next_round()
    assert msgspec.msgpack.decode(world.memory)["held"] == {}


def test_a_job_that_ran_before_anything_was_remembered_held_its_smallest_gang() -> None:
    """Its memory is lost, or another policy's: it starts with at most twice three."""
    job = job_with(waiting("a", 3, 20), first_started_at_s=NOW_S - 300.0, attempt_number=1)
    world = World(3, [job])
    world.next_round()
    assert world.counts() == {"a": 6}


def test_a_resize_that_must_wait_is_asked_for_again_in_the_next_round() -> None:
    """A round that found only that is no round that changed nothing: no rest follows it."""
    world = World(3, [waiting("a", 1, 20)], "pollux:generations=4:population=8:rest_rounds=10")
    world.next_round()
    resized = job_with(world["a"], resizes_latest_at_s=world.now_s - 30.0)
    world.jobs[resized.job_id] = resized
    cooling = replace(world.snapshot(), resize_cooldown_s=60.0)
    made = policy("pollux:generations=4:population=8").allocate(cooling, world.memory)
    assert made.decisions == ()
    world.memory, world.now_s = made.memory, world.now_s + ROUND_S
    world.next_round()
    assert world.counts() == {"a": 2}


# --- who is on which node -----------------------------------------------------------------------


def test_two_gangs_over_several_nodes_share_none() -> None:
    """Two gangs of six on three nodes: one runs; without the rule both do."""
    gangs = [waiting("a", 6, 6), waiting("b", 6, 6)]
    apart_world, both = World(3, gangs), World(3, gangs, f"{FAST}:spans_apart=false")
    apart_world.next_round()
    both.next_round()
    assert sorted(apart_world.counts().values()) == [0, 6]
    assert (both.counts(), len(both.clashes())) == ({"a": 6, "b": 6}, 1)


def test_what_one_job_cannot_have_for_the_rule_goes_to_another() -> None:
    """One gang of six runs on two of three nodes; of the six GPUs left the elastic one gets the
    four of the third node, and the small one two."""
    world = World(
        3,
        [waiting("a", 6, 6), waiting("b", 6, 6), waiting("c", 2, 2), waiting("d", 4, 4)],
    )
    world.next_round()
    counts = world.counts()
    assert counts["a"] + counts["b"] == 6
    assert (counts["c"], counts["d"]) == (2, 4)


def test_jobs_that_stood_there_before_are_parted_in_one_round() -> None:
    """Two gangs over n1 from another policy: the one that is stopped starts elsewhere, later."""
    a, b = (replace(waiting(name, 6, 6), state=JobState.RUNNING) for name in "ab")
    world = World(4, [])
    for job, nodes in ((a, (("n0", 4), ("n1", 2))), (b, (("n1", 2), ("n2", 4)))):
        places = [
            Placement(node=make_node_view(name).name, worker_count=count) for name, count in nodes
        ]
        world.jobs[job.job_id] = job_with(
            job, gpu_type="H100", attempt_number=1, placed=added(job, places, ())
        )
    assert world.clashes() == ["n1"]
    [stop] = world.next_round()
    assert isinstance(stop, Preempt)
    assert "has workers on n1 and on other nodes" in stop.reason
    assert world.clashes() == []
    world.next_round()
    assert (world.counts(), world.clashes()) == ({"a": 6, "b": 6}, [])
    kept = World(4, world.jobs.values(), f"{FAST}:spans_apart=false")
    assert kept.next_round() == ()


# --- what is told -------------------------------------------------------------------------------


def test_who_may_not_grow_yet_is_told_so() -> None:
    """With the number that it held; and a start says that it is the smallest gang."""
    world = World(3, [waiting("a", 2, 20)])
    [start] = world.next_round()
    assert start.reason.endswith("; it begins with its smallest gang")
    [grow] = world.next_round()
    assert grow.reason.endswith("; at most 2 times the 2 that it ever had")
    job = world["a"]
    between = replace(world.snapshot(), now_s=world.now_s - 30.0)
    [told] = policy(FAST).standing(between, world.memory, job.job_id)
    assert told == "next round it may have 8 workers: at most 2 times the 4 that it ever had"
    free = policy(f"{FAST}:grows_at_most=null")
    assert free.standing(between, world.memory, job.job_id) == ()


def test_a_gang_that_others_keep_from_nodes_is_told_whose() -> None:
    """Six of the six free GPUs are on two nodes, one of which the wide gang is on."""
    world = World(3, [waiting("a", 6, 6)])
    world.next_round()
    [wide] = world.jobs.values()
    late = waiting("b", 6, 6)
    world.jobs[late.job_id] = late
    snapshot = replace(world.snapshot(), now_s=world.now_s - 30.0)
    [hold] = policy(FAST).pending_reasons(snapshot, world.memory)
    assert hold.job_id == "b"
    assert (
        f"{wide.job_id} has workers on several nodes where it would have some too, and at most one "
        "job over several nodes has workers on each"
    ) in hold.blockers[0]
    [other] = policy(f"{FAST}:spans_apart=false").pending_reasons(snapshot, world.memory)
    assert "jobs that make more of them" in other.blockers[0]


def test_a_job_that_others_keep_on_its_node_is_told_whose() -> None:
    """Its node is full, and the only room is on nodes of the wide gang."""
    world = World(3, [waiting("a", 6, 6)])
    world.next_round()
    full = next(
        name for name in world.nodes
        if all(worker.node != name for worker in world["a"].placed)
    )  # fmt: skip
    small = waiting("b", 1, 6)
    places = [
        Placement(node=make_node_view(full).name, worker_count=count, is_flexible=count > 1)
        for count in (1, 3)
    ]
    world.jobs[small.job_id] = job_with(
        small,
        state=JobState.RUNNING,
        gpu_type="H100",
        is_resizable=True,
        attempt_number=1,
        placed=added(small, places, ()),
    )
    [told] = policy(FAST).standing(world.snapshot(), world.memory, small.job_id)
    assert told.startswith("it has no room for more workers now: a has workers on several nodes")


def test_a_job_that_could_do_with_one_node_makes_room_for_a_gang_that_needs_two() -> None:
    """An elastic job has grown over all three nodes; it shrinks to one, and the gang that came
    starts on the others, instead of waiting for its end."""
    world = World(3, [waiting("a", 1, 12)])
    for _ in range(5):
        world.next_round()
    assert world.counts() == {"a": 12}
    late = waiting("b", 6, 6)
    world.jobs[late.job_id] = late
    for _ in range(2):
        world.next_round()
        assert world.clashes() == []
    counts = world.counts()
    assert counts["b"] == 6
    assert 1 <= counts["a"] <= 6


def test_a_job_that_shrinks_leaves_nodes_where_it_has_fewest_workers() -> None:
    """Not the newest ones: two on n1 go before the five on n0 and n2, none of the base gang."""
    places = [
        Placement(node=make_node_view("n0").name, worker_count=1),
        Placement(node=make_node_view("n1").name, worker_count=2, is_flexible=True),
        Placement(node=make_node_view("n2").name, worker_count=4, is_flexible=True),
    ]
    job = waiting("a", 1, 8)
    job = replace(job, placed=added(job, places, ()))
    assert first_to_leave(job, 2) == (1, 2)
    assert first_to_leave(job, 3) == (1, 2, 6)
    assert first_to_leave(job, 9) == (1, 2, 3, 4, 5, 6)


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
