"""Gandiva in sets: nodes of one gang size, turns in each set, shares by demand, several GPU types,
and what a turn costs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from common.clock import SystemClock
from common.model import CheckpointSpec, JobId, JobState, NodeName, Pool, Preemptibility
from coordinator.engine.state.settings import EngineSettings
from coordinator.policies.contract.decisions import Start
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.gandiva.node_sets import Class, Division, NodeSet
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.cluster import NodeSpec
from coordinator.sim.run.play import Run, play
from coordinator.sim.run.runtime import Saves
from coordinator.sim.run.simulation import Simulation, Submission
from coordinator.workloads.records import NodeGroup, TraceJob, Workload
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_spec,
    make_worker_view,
)
from tests.harness.served import cell, changed, served_job

ONE, FOUR, EIGHT = (Class(gpus, "H100", 1) for gpus in (1, 4, 8))


LATER = settings(max_examples=100, deadline=None)


def division(count: int, *sets: NodeSet) -> Division:
    """Nodes n0, n1 and so on of 4 GPUs, and these sets."""
    names = [NodeName(f"n{number}") for number in range(count)]
    return Division(sets, gpus=dict.fromkeys(names, 4), types=dict.fromkeys(names, "H100"))


def nodes(kind: Class, names: str, jobs: str = "") -> NodeSet:
    """A set; jobs have names of one letter."""
    return NodeSet(kind, tuple(map(NodeName, names.split())), [JobId(name) for name in jobs])


def shape(found: Division) -> dict[int, list[int]]:
    """Jobs in each set, by gang size."""
    shapes: dict[int, list[int]] = {}
    for each in sorted(found.sets, key=lambda each: each.nodes):
        shapes.setdefault(each.kind.gpus, []).append(len(each.jobs))
    return shapes


# --- where newcomers go -------------------------------------------------------------------------


def test_a_newcomer_takes_room_then_loose_nodes_then_turns() -> None:
    """A set of its size with room, else a new set, else behind those of the least loaded set."""
    found = division(2, nodes(ONE, "n0", "abc"))
    assert [found.place(JobId(name), [ONE], ()) for name in "defghi"] == [True] * 6
    assert shape(found) == {1: [4, 4]} | {1: [5, 4]}
    assert found.place(JobId("j"), [ONE], ())
    assert shape(found) == {1: [5, 5]}


def test_sets_of_another_size_are_left_alone() -> None:
    """A gang without a set of its size waits while no node is loose, whatever is free there."""
    found = division(2, nodes(ONE, "n0", "a"), nodes(FOUR, "n1", "b"))
    assert not found.place(JobId("c"), [EIGHT], ())
    found = division(3, nodes(ONE, "n0", "a"))
    assert found.place(JobId("c"), [EIGHT], ())
    assert shape(found) == {1: [1], 8: [1]}


def test_whoever_stands_in_its_set_no_more_leaves_it_and_the_set_stays() -> None:
    """Whether it does is asked with the set: of its class, or of its nodes."""
    found = division(2, nodes(ONE, "n0", "ab"), nodes(FOUR, "n1", "a"))
    found.leave(lambda job_id, each: job_id != "a" or NodeName("n0") in each.nodes)
    assert shape(found) == {1: [2], 4: [0]}


@pytest.mark.parametrize(("jobs", "is_shared"), [("a", False), ("ab", True)])
def test_a_division_is_shared_where_a_set_has_more_jobs_than_room(
    jobs: str, is_shared: bool
) -> None:
    """Somebody waits for a turn then; that another set has room is no help."""
    assert division(2, nodes(FOUR, "n1", jobs), nodes(ONE, "n0", "c")).is_shared is is_shared


def test_a_job_is_not_put_where_it_avoids_a_node() -> None:
    """Not into a set with that node, nor into a new one on it."""
    found = division(2, nodes(ONE, "n0", "a"))
    assert not found.place(JobId("b"), [ONE], (NodeName("n0"), NodeName("n1")))
    assert found.place(JobId("b"), [ONE], (NodeName("n0"),))
    assert found.set_of()[JobId("b")].nodes == ("n1",)


# --- turns --------------------------------------------------------------------------------------


def test_turns_are_round_robin() -> None:
    """Each job of an overfull set computes as often as the others, before anybody does twice."""
    found = division(1, nodes(ONE, "n0", "abcdef"))
    turns = ""
    for _ in range(3):
        turns += "".join(found.computing(found.sets[0]))
        found.rotate(())
    assert turns == "abcdefabcdef"


def test_who_may_not_be_stopped_keeps_its_turn() -> None:
    """The others take turns on what is left."""
    found = division(1, nodes(FOUR, "n0", "ab"))
    found.rotate([JobId("a")])
    assert found.computing(found.sets[0]) == ["a"]


def test_a_set_with_room_for_all_does_not_change_turns() -> None:
    """Nobody is put behind nobody."""
    found = division(1, nodes(ONE, "n0", "abcd"))
    found.rotate(())
    assert found.sets[0].jobs == list("abcd")


# --- shares -------------------------------------------------------------------------------------


def test_nodes_go_to_gang_sizes_in_proportion_to_what_they_ask_for() -> None:
    """A size that has too little gets loose nodes; one that has too much gives back."""
    found = division(4, nodes(FOUR, "n0", "abcdef"), nodes(ONE, "n1", "xyz"))
    found.divide(counts_by_gang=False)
    assert shape(found) == {4: [2, 2, 2], 1: [3]}
    found = division(
        4,
        nodes(FOUR, "n0", "abcdefghi"),
        *(nodes(ONE, f"n{number}", f"x{number}"[:1]) for number in (1, 2, 3)),
    )
    found.divide(counts_by_gang=False)
    found.divide(counts_by_gang=False)
    assert shape(found)[1] == [3]
    assert len(shape(found)[4]) == 3
    found = division(
        4,
        *(nodes(FOUR, f"n{number}", jobs) for number, jobs in enumerate(("ab", "c", "d"))),
        nodes(ONE, "n3", "ijklmnopqrstuvwx"),
    )
    found.divide(counts_by_gang=False)
    found.divide(counts_by_gang=False)
    assert shape(found) == {4: [2, 2], 1: [8, 8]}


def test_the_artefact_counts_a_set_for_each_gang() -> None:
    """Small gangs get a node each, and at the next look all but one go back."""
    found = division(8, nodes(ONE, "n0", "abcdefgh"))
    found.divide(counts_by_gang=False)
    assert shape(found) == {1: [4, 4]}
    found = division(8, nodes(ONE, "n0", "abcdefgh"))
    found.divide(counts_by_gang=True)
    assert shape(found) == {1: [2, 2, 2, 1, 1]}
    found.divide(counts_by_gang=True)
    assert shape(found) == {1: [8]}


@LATER
@given(
    jobs=st.lists(st.sampled_from([ONE, FOUR, EIGHT]), max_size=30),
    looks=st.lists(st.booleans(), max_size=4),
)
def test_no_node_is_in_two_sets_and_no_job_is_lost(jobs: list[Class], looks: list[bool]) -> None:
    """Whatever comes and however often nodes are shared out; a gang fits into its set."""
    found = division(5)
    placed = {
        JobId(f"j{number}")
        for number, kind in enumerate(jobs)
        if found.place(JobId(f"j{number}"), [kind], ())
    }
    for counts_by_gang in looks:
        found.rotate(())
        found.divide(counts_by_gang=counts_by_gang)
    names = [name for each in found.sets for name in each.nodes]
    assert len(names) == len(set(names))
    assert sorted(job_id for each in found.sets for job_id in each.jobs) == sorted(placed)
    assert all(found.room(each) >= 1 and each.jobs for each in found.sets)


# --- a pass -------------------------------------------------------------------------------------


def test_a_high_priority_is_never_suspended_for_a_low_one() -> None:
    """Section 3.1; among equals the turn goes round."""
    high = structs.replace(served_job("high", 4, node="n0"), priority=1)
    low = served_job("low", 4, submitted_at_s=1.0)
    memory = policy("gandiva-sets").allocate(cell([high, low], n0=4), b"").memory
    snapshot = cell([high, low], n0=4, now_s=NOW_S + 60.0)
    assert changed(snapshot, "gandiva-sets", memory) == ([], [])
    equal = [structs.replace(high, priority=0), low]
    snapshot = cell(equal, n0=4, now_s=NOW_S + 60.0)
    assert changed(snapshot, "gandiva-sets", memory) == (["high"], ["low"])


def test_turns_last_a_slice() -> None:
    """Nobody is stopped before it is over, and the pass is asked for then."""
    jobs = [served_job("runs", 4, node="n0"), served_job("waits", 4, submitted_at_s=1.0)]
    first = policy("gandiva-sets").allocate(cell(jobs, n0=4), b"")
    assert first.wake_at_s == NOW_S + 60.0
    early = cell(jobs, n0=4, now_s=NOW_S + 59.0)
    assert changed(early, "gandiva-sets", first.memory) == ([], [])
    assert changed(early, "gandiva-sets:slice_s=59", first.memory) == (["runs"], ["waits"])


def test_others_take_turns_beside_a_job_that_did_not_agree() -> None:
    """It counts among those that compute: one of the others gives way."""
    jobs = [served_job(name, node="n0") for name in "abcd"]
    jobs[3] = structs.replace(jobs[3], preemptibility=Preemptibility.NON)
    jobs.append(served_job("e", submitted_at_s=1.0))
    memory = policy("gandiva-sets").allocate(cell(jobs, n0=4), b"").memory
    later = cell(jobs, n0=4, now_s=NOW_S + 60.0)
    assert changed(later, "gandiva-sets", memory) == (["c"], ["e"])


def test_who_lost_its_place_goes_on_until_somebody_comes_there() -> None:
    """A set goes to wider gangs, which have not enough nodes yet: nobody is stopped in vain."""
    wide = [served_job(name, 4, workers=2, submitted_at_s=1.0) for name in ("x", "y", "w")]
    jobs = [served_job(name, node="n2") for name in "abcd"] + [served_job("z", node="n3")]
    sizes = dict.fromkeys(("n0", "n1", "n2", "n3"), 4)
    memory = policy("gandiva-sets").allocate(cell([*jobs, *wide], **sizes), b"").memory
    later = cell([*jobs, *wide], now_s=NOW_S + 60.0, **sizes)
    assert changed(later, "gandiva-sets", memory)[0] == []
    waits = policy("gandiva-sets").allocate(later, memory).memory
    assert b"n3" not in waits


def test_a_job_that_did_not_agree_is_not_stopped() -> None:
    """It keeps its turn until it ends."""
    runs = structs.replace(served_job("runs", 4, node="n0"), preemptibility=Preemptibility.NON)
    jobs = [runs, served_job("waits", 4, submitted_at_s=1.0)]
    memory = policy("gandiva-sets").allocate(cell(jobs, n0=4), b"").memory
    later = cell(jobs, n0=4, now_s=NOW_S + 600.0)
    assert changed(later, "gandiva-sets", memory) == ([], [])


def test_the_artefact_stops_who_lost_its_place_even_where_nobody_comes() -> None:
    """Five jobs on two nodes: it gives one back for three GPUs too many, and the fifth waits."""
    jobs = [served_job(name, node="n0") for name in "abcd"] + [served_job("e", node="n1")]
    for knobs, stopped in (("", []), (":counts_by_gang=true", ["e"])):
        name = f"gandiva-sets{knobs}"
        memory = policy(name).allocate(cell(jobs, n0=4, n1=4), b"").memory
        later = cell(jobs, n0=4, n1=4, now_s=NOW_S + 60.0)
        assert changed(later, name, memory) == (stopped, [])


def test_the_artefact_looks_when_a_job_comes_or_none_did_for_long() -> None:
    """Until then GPUs that a job left stay idle."""
    name = "gandiva-sets:quiet_s=1000"
    jobs = [served_job("runs", 4, node="n0"), served_job("waits", 4, submitted_at_s=1.0)]
    first = policy(name).allocate(cell(jobs, n0=4), b"")
    assert first.wake_at_s == NOW_S + 1000.0
    left = jobs[1:]
    assert changed(cell(left, n0=4, now_s=NOW_S + 500.0), name, first.memory) == ([], [])
    assert changed(cell(left, n0=4, now_s=NOW_S + 1000.0), name, first.memory) == ([], ["waits"])
    came = [*left, served_job("new", 4, submitted_at_s=500.0)]
    assert changed(cell(came, n0=4, now_s=NOW_S + 500.0), name, first.memory) == ([], ["waits"])
    soon = policy(name).allocate(cell(came, n0=4, now_s=NOW_S + 30.0), first.memory)
    assert (soon.decisions, soon.wake_at_s) == ((), NOW_S + 60.0)


def test_whoever_waits_is_told_why() -> None:
    """Its set and who is before it, or that no nodes are left for its size."""
    jobs = [
        served_job("runs", 4, node="n0"),
        served_job("waits", 4, submitted_at_s=1.0),
        served_job("small", 2, node="n1"),
        served_job("wide", 4, workers=2, submitted_at_s=2.0),
    ]
    holds = policy("gandiva-sets").pending_reasons(cell(jobs, n0=4, n1=4), b"")
    assert {hold.job_id: hold.blockers[0] for hold in holds} == {
        "waits": "waits for its turn in the set n0: 1 job before it, room for 1",
        "wide": "no set of nodes for gangs of 8 GPUs, and 0 nodes in no set",
    }


def test_memory_of_another_release_is_forgotten() -> None:
    """A pass goes on without it."""
    assert changed(cell([served_job("new", 4)], n0=4), "gandiva-sets", b"\xc1") == ([], ["new"])


def test_sets_on_nodes_that_left_are_dissolved() -> None:
    """Their jobs are newcomers elsewhere."""
    job = served_job("only", 4)
    memory = policy("gandiva-sets").allocate(cell([job], n0=4), b"").memory
    (start,) = policy("gandiva-sets").allocate(cell([job], n1=4), memory).decisions
    assert isinstance(start, Start)
    assert [placement.node for placement in start.placements] == ["n1"]


# --- against the engine ---------------------------------------------------------------------------


@pytest.mark.parametrize(("knobs", "slices"), [("", 2), (":counts_by_gang=true:quiet_s=120", 4)])
def test_equal_jobs_end_within_their_turns_of_one_another(knobs: str, slices: int) -> None:
    """Three jobs of ten minutes take turns of a minute on one node; invariants hold throughout.

    The artefact leaves the node idle after each end, until it looks again.
    """
    spec = NodeSpec(name=NodeName("t0"), home_pool=Pool.TRAINING, gpu_type="H100", gpus=4)
    options = EngineSettings(policy=f"gandiva-sets{knobs}", min_runtime_s=0.0)
    sim = Simulation(options, [spec], check=True)
    jobs = [
        Submission(
            at_s=1.0,
            job_id=JobId(name),
            spec=make_spec(
                name,
                gpus_per_worker=4,
                expected_runtime_s=600.0,
                checkpoint=CheckpointSpec(path="/saves", grace_s=30.0),
            ),
            work_s=600.0,
        )
        for name in "abc"
    ]
    sim.begin()
    sim.submit(jobs)
    sim.loop.run(until_s=10_000.0)
    entries = [sim.engine.state.jobs[job.job_id] for job in jobs]
    assert {entry.state for entry in entries} == {JobState.SUCCEEDED}
    ends_s = sorted(entry.finished_at_s or 0.0 for entry in entries)
    assert ends_s[-1] - ends_s[0] <= slices * 60.0


A100, H100, EIGHT_H100 = Class(4, "A100", 1), Class(4, "H100", 1), Class(8, "H100", 1)


def two_types(*sets: NodeSet) -> Division:
    """A node of each type, h and a, with 4 GPUs."""
    return Division(
        sets,
        gpus={NodeName("h"): 4, NodeName("a"): 4},
        types={NodeName("h"): "H100", NodeName("a"): "A100"},
    )


def test_a_newcomer_takes_turns_nowhere_while_another_type_has_room() -> None:
    """The first class with an open set or loose nodes, in its order; then the least loaded set."""
    found = two_types(nodes(H100, "h", "a"))
    assert found.place(JobId("b"), [H100, A100], ())
    assert found.set_of()[JobId("b")].kind == A100
    full = two_types(nodes(H100, "h", "ab"), nodes(A100, "a", "c"))
    assert full.place(JobId("d"), [H100, A100], ())
    assert full.set_of()[JobId("d")].kind == A100
    assert not full.place(JobId("e"), [EIGHT_H100], ())


@pytest.mark.parametrize(
    ("sets", "moves"),
    [
        pytest.param((("h", "ab"),), True, id="to nodes of the other type in no set"),
        pytest.param((("h", "ab"), ("a", "")), True, id="into a set there that has room"),
        pytest.param((("h", "ab"), ("a", "c")), False, id="not to wait for a turn there"),
        pytest.param((("h", "ba"),), False, id="not while it computes"),
    ],
)
def test_who_waits_for_a_turn_moves_on_to_room_on_another_type(
    sets: tuple[tuple[str, str], ...], moves: bool
) -> None:
    """It leaves its set for that; the set stays."""
    kinds = {"h": H100, "a": A100}
    found = two_types(*(nodes(kinds[name], name, jobs) for name, jobs in sets))
    before = found.set_of()[JobId("b")]
    found.move_on(JobId("b"), before, [H100, A100], ())
    after = found.set_of()[JobId("b")]
    assert (after.kind == A100) is moves
    assert (JobId("b") in before.jobs) is not moves
    assert JobId("a") in before.jobs


def test_nobody_leaves_a_set_for_nodes_of_its_own_class() -> None:
    """How many nodes a class has is for the shares of all classes to say."""
    names = {NodeName("h0"): 4, NodeName("h1"): 4}
    mine = nodes(H100, "h0", "ab")
    found = Division([mine], gpus=names, types=dict.fromkeys(names, "H100"))
    found.move_on(JobId("b"), mine, [H100, A100], ())
    assert found.sets == [mine]
    assert mine.jobs == ["a", "b"]


def test_nobody_moves_on_to_a_node_that_it_avoids() -> None:
    """It takes its turns where it is."""
    found = two_types(nodes(H100, "h", "ab"))
    mine = found.set_of()[JobId("b")]
    found.move_on(JobId("b"), mine, [H100, A100], (NodeName("a"),))
    assert found.set_of()[JobId("b")] is mine


def test_a_node_that_comes_free_takes_who_waits_longest_for_a_turn() -> None:
    """Of those that accept its type, in a later pass; whoever has a type goes on with that."""
    there = [make_node_view("h0"), make_node_view("a0", gpu_type="A100", free_gpus=0)]
    jobs = [
        make_job_view(name, gpus_per_worker=8, submitted_at_s=at_s, types=("H100", "A100"))
        for name, at_s in (("x", 0.0), ("z", 1.0), ("y", 2.0))
    ]
    full = make_snapshot(
        nodes=[there[0], structs.replace(there[1], is_schedulable=False)], jobs=jobs
    )
    first = policy("gandiva-sets").allocate(full, b"")
    assert {made.job_id for made in first.decisions if isinstance(made, Start)} == {"x"}
    runs = structs.replace(
        jobs[0],
        state=JobState.RUNNING,
        gpu_type="H100",
        placed=(make_worker_view("x", 0, "h0", gpus=8),),
    )
    back = [make_node_view("h0", workers=runs.placed), make_node_view("a0", gpu_type="A100")]
    snapshot = make_snapshot(nodes=back, jobs=[runs, *jobs[1:]], now_s=NOW_S + 1.0)
    again = policy("gandiva-sets").allocate(snapshot, first.memory)
    [start] = again.decisions
    assert isinstance(start, Start)
    assert (start.job_id, start.gpu_type) == ("z", "A100")


HOUR_S = 3600.0


def played(name: str, *, has_delays: bool) -> Run:
    """Three jobs of an hour on one node that each of them fills."""
    jobs = tuple(
        TraceJob(job_id=f"j{at}", submit_s=10.0 * at, duration_s=HOUR_S, gpus=8) for at in range(3)
    )
    nodes = (NodeGroup(count=1, gpus=8, gpu_type="V100"),)
    workload = Workload(name="three", jobs=jobs, loads=(), nodes=nodes, length_s=100.0)
    options = RunOptions(policy=name, has_delays=has_delays, saves=Saves.ON_REQUEST, check=True)
    return play(workload, options, clock=SystemClock())


def test_turns_leave_most_of_the_time_to_computing() -> None:
    """With the delays of a real cell at most a fifth goes into stops and starts.

    A minute, which is the paper's turn, is what one stop costs there: nobody would ever be done.
    """
    result = played("gandiva-sets", has_delays=True).result
    assert result.makespan_s <= 1.2 * 3 * HOUR_S
    assert result.preemptions > 3


def test_turns_that_cost_nothing_last_a_slice() -> None:
    """Where nothing takes time a turn ends after a minute, whatever the ratio."""
    runs = [
        played(f"gandiva-sets:least_turn_ratio={ratio}", has_delays=False).result
        for ratio in (0, 20)
    ]
    assert runs[0].preemptions == runs[1].preemptions > 3 * HOUR_S / 60.0 - 10


@pytest.mark.parametrize(("after_s", "stops"), [(299.0, []), (301.0, ["new"])])
def test_a_turn_lasts_by_what_it_took_to_hand_it_over(after_s: float, stops: list[str]) -> None:
    """Running 15 s after it was given it goes on for twenty times that; priority need not wait."""
    new = served_job("new", 4)
    given = policy("gandiva-sets").allocate(cell([new], n0=4), b"")
    assert [each.job_id for each in given.decisions if isinstance(each, Start)] == ["new"]
    running = job_with(served_job("new", 4, node="n0"), gpu_type="H100", started_at_s=NOW_S + 15.0)
    jobs = [running, served_job("waits", 4, submitted_at_s=1.0)]
    memory = (
        policy("gandiva-sets").allocate(cell(jobs, n0=4, now_s=NOW_S + 20.0), given.memory).memory
    )
    later = cell(jobs, n0=4, now_s=NOW_S + 15.0 + after_s)
    assert changed(later, "gandiva-sets", memory)[0] == stops
    urgent = [running, structs.replace(jobs[1], priority=1)]
    later = cell(urgent, n0=4, now_s=NOW_S + 15.0 + after_s)
    assert changed(later, "gandiva-sets", memory)[0] == ["new"]
