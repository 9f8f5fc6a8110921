"""Reservations: a gang that has waited long enough has GPUs set aside, and its wait is bounded."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName
from coordinator.policies.aryl.reservations import SLACK_S, Reservation, remembered
from coordinator.policies.aryl.rules import Rules
from coordinator.policies.contract.decisions import Resize, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.registry import policy
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

AFTER_S = 3600.0
RESERVING = f"aryl:reservation_after_s={AFTER_S:g}"


def running(job_id: str, node: str, left_s: float, *, gpus: int = 8) -> tuple[NodeView, JobView]:
    """A node and the job on it, which has so long left by its estimate."""
    worker = make_worker_view(job_id, 0, node, gpus=gpus)
    job = make_job_view(
        job_id,
        state=JobState.RUNNING,
        gpus_per_worker=gpus,
        remaining_work_s=left_s,
        placed=[worker],
    )
    return make_node_view(node, workers=[worker]), job


def waiting(
    job_id: str,
    *,
    runtime_s: float = 600.0,
    waited_s: float = 0.0,
    workers: int = 1,
    gpus: int = 8,
    priority: int = 0,
) -> JobView:
    """A job that waits, of whole nodes unless it is said otherwise."""
    return make_job_view(
        job_id,
        workers=(workers, workers),
        gpus_per_worker=gpus,
        remaining_work_s=runtime_s * workers,
        submitted_at_s=NOW_S - waited_s,
        priority=priority,
    )


def gang(*, waited_s: float = AFTER_S, workers: int = 2, gpus: int = 8) -> JobView:
    """Two nodes for half an hour."""
    return waiting("gang", runtime_s=1800.0, waited_s=waited_s, workers=workers, gpus=gpus)


def cell(*jobs: JobView, left_s: float = 1200.0) -> ClusterSnapshot:
    """Three nodes: n1 is free, n2 is busy for 20 minutes, n3 for ten hours."""
    busy = [running("minutes", "n2", left_s), running("hours", "n3", 36_000.0)]
    nodes = [make_node_view("n1"), *(node for node, _ in busy)]
    return make_snapshot(nodes=nodes, jobs=[*jobs, *(job for _, job in busy)])


def passed(
    snapshot: ClusterSnapshot, memory: bytes = b"", name: str = RESERVING
) -> tuple[list[str], tuple[Reservation, ...], bytes]:
    """Who starts in a pass, what is set aside after it, and what is remembered."""
    found = policy(name).allocate(snapshot, memory)
    starts: list[str] = [each.job_id for each in found.decisions if isinstance(each, Start)]
    return starts, remembered(found.memory), found.memory


def test_a_gang_that_has_waited_long_enough_keeps_what_it_will_start_on() -> None:
    """The nodes that are free soonest, until the instant at which the last of them is."""
    late = waiting("late", runtime_s=1500.0)
    assert passed(cell(gang(waited_s=AFTER_S - 1.0), late))[:2] == (["late"], ())
    starts, (made,), _ = passed(cell(gang(), late))
    assert starts == []
    assert made == Reservation(
        job_id=made.job_id,
        gpu_type="H100",
        nodes=((NodeName("n1"), 8), (NodeName("n2"), 8)),
        since_s=NOW_S,
        ready_at_s=NOW_S + 1200.0,
    )


@pytest.mark.parametrize(
    ("runtime_s", "is_over"), [(1200.0 - SLACK_S, True), (1200.0 - SLACK_S + 1.0, False)]
)
def test_who_is_over_by_then_may_go_before(runtime_s: float, *, is_over: bool) -> None:
    """Backfilling by estimates: it costs the gang nothing."""
    starts, _, _ = passed(cell(gang(), waiting("quick", runtime_s=runtime_s)))
    assert starts == (["quick"] if is_over else [])


def test_gpus_that_the_gang_leaves_over_are_nobody_s() -> None:
    """Four workers of four GPUs take n1, half of n2 and four of n3's six GPUs: two of these are for
    whoever is long, and no four."""
    busy = [running("a", "n1", 1200.0), running("b", "n2", 36_000.0, gpus=4)]
    nodes = [*(node for node, _ in busy), make_node_view("n3", gpus=6)]
    two, four = (waiting(f"of{count}", runtime_s=9e4, gpus=count) for count in (2, 4))
    jobs = [gang(workers=4, gpus=4), two, four, *(job for _, job in busy)]
    starts, (made,), _ = passed(make_snapshot(nodes=nodes, jobs=jobs))
    assert dict(made.nodes) == {"n1": 8, "n2": 4, "n3": 4}
    assert starts == ["of2"]


def test_a_reservation_keeps_its_nodes_and_its_instant_when_estimates_were_wrong() -> None:
    """The job of 20 minutes does not end: nothing begins on n1 all the same, and n3, which seems
    to be free sooner now, is not taken in its place."""
    _, before, memory = passed(cell(gang()))
    late = replace(cell(gang(waited_s=9000.0), left_s=80_000.0), now_s=NOW_S + 1300.0)
    quick = waiting("quick", runtime_s=1.0)
    late = replace(late, jobs=(*late.jobs, quick))
    starts, after, _ = passed(late, memory)
    assert starts == []
    assert after == before


def test_a_reservation_moves_to_nodes_that_are_free_sooner() -> None:
    """Before its instant: n4 was lost, is back and has nothing on it but ten minutes of work."""
    _, (before,), memory = passed(cell(gang()))
    node, job = running("ten", "n4", 600.0)
    snapshot = cell(gang())
    later = replace(snapshot, nodes=(*snapshot.nodes, node), jobs=(*snapshot.jobs, job))
    _, (after,), _ = passed(replace(later, now_s=NOW_S + 60.0), memory)
    assert [name for name, _ in after.nodes] == ["n1", "n4"]
    assert after.ready_at_s < before.ready_at_s
    assert after.since_s == before.since_s


def test_a_node_that_closes_ends_a_reservation_and_another_takes_its_place() -> None:
    """The gang has had one since the same instant."""
    _, (before,), memory = passed(cell(gang()))
    snapshot = cell(gang())
    closed = tuple(replace(node, is_schedulable=node.name != "n1") for node in snapshot.nodes)
    _, (after,), _ = passed(replace(snapshot, nodes=closed, now_s=NOW_S + 9.0), memory)
    assert [name for name, _ in after.nodes] == ["n2", "n3"]
    assert after.since_s == before.since_s


@pytest.mark.parametrize(
    ("longest_s", "closes_at_s", "nodes"),
    [
        (2000.0, 3200.0, ["n1", "n2"]),
        (2000.0, 3199.0, ["n2", "n3"]),
        (None, 9e9, ["n2", "n3"]),
    ],
)
def test_a_reservation_is_on_no_node_that_closes_before_the_gang_would_be_over(
    longest_s: float | None, closes_at_s: float, nodes: list[str]
) -> None:
    """n1 is free and closes; at the instant, with its last node, all of the gang has to fit. One
    that was made before an operator ordered the window moves as well."""
    _, _, memory = passed(cell(gang()))
    snapshot = cell(job_with(gang(), longest_s=longest_s))
    closing = tuple(
        replace(node, closes_at_s=NOW_S + closes_at_s if node.name == "n1" else None)
        for node in snapshot.nodes
    )
    for before in (b"", memory):
        _, (made,), _ = passed(replace(snapshot, nodes=closing), before)
        assert [name for name, _ in made.nodes] == nodes


def test_one_gang_of_a_type_has_a_reservation_and_whoever_has_one_keeps_it() -> None:
    """The longest waiting first; one that came earlier and was only seen later waits for it."""
    older = replace(gang(waited_s=9000.0), job_id="older")
    _, (made,), memory = passed(cell(gang(), older))
    assert made.job_id == "older"
    eldest = replace(gang(waited_s=9900.0), job_id="eldest")
    _, (kept,), _ = passed(cell(gang(), older, eldest), memory)
    assert kept.job_id == "older"


def test_a_more_important_job_passes_and_takes_over_once_it_has_waited_as_long() -> None:
    """A reservation keeps nothing from a higher priority."""
    _, _, memory = passed(cell(gang()))
    urgent = waiting("urgent", runtime_s=5000.0, priority=1)
    assert passed(cell(gang(), urgent), memory)[0] == ["urgent"]
    wide = replace(gang(waited_s=AFTER_S), job_id="wide", priority=1)
    _, (made,), _ = passed(cell(gang(), wide), memory)
    assert made.job_id == "wide"


def test_who_is_no_wider_than_the_others_has_none() -> None:
    """Whatever comes free would do: only the order, shortest first, keeps it waiting."""
    one = waiting("one", runtime_s=9e5, waited_s=9e5)
    snapshot = cell(one, waiting("short"))
    assert passed(snapshot)[:2] == (["short"], ())
    narrow = waiting("narrow", gpus=1)
    assert passed(cell(one, waiting("short"), narrow))[0][0] == "one"


def test_a_job_that_never_fits_keeps_nothing() -> None:
    """No number of nodes coming free would do: nobody waits for it."""
    starts, made, _ = passed(cell(gang(workers=4), waiting("late", runtime_s=1500.0)))
    assert (starts, made) == (["late"], ())


def test_no_flexible_worker_is_added_when_it_would_be_in_the_way() -> None:
    """It goes when it is told to, but not again within the cooldown of its resize: until so long
    before the instant the reserved GPUs are used."""
    worker = make_worker_view("wide", 0, "n3", gpus=8)
    wide = make_job_view(
        "wide",
        state=JobState.RUNNING,
        workers=(1, 2),
        gpus_per_worker=8,
        remaining_work_s=36_000.0,
        placed=[worker],
    )
    node, minutes = running("minutes", "n2", 1200.0)
    nodes = [make_node_view("n1"), node, make_node_view("n3", workers=[worker])]
    for cooldown_s, is_used in ((60.0, True), (1200.0, False)):
        snapshot = make_snapshot(nodes=nodes, jobs=[gang(), minutes, wide])
        snapshot = replace(snapshot, resize_cooldown_s=cooldown_s)
        found = policy(RESERVING).allocate(snapshot, b"").decisions
        assert any(isinstance(each, Resize) for each in found) == is_used


def test_explanations_say_since_when_and_for_what() -> None:
    """Of the gang: GPUs, nodes, since when, until when and by which setting. Of others: for whom
    what they may not use is kept."""
    late = waiting("late", runtime_s=1500.0)
    _, _, memory = passed(cell(gang(), late))
    later = replace(cell(gang(), late), now_s=NOW_S + 200.0)
    said = {
        hold.job_id: "; ".join(hold.blockers)
        for hold in policy(RESERVING).pending_reasons(later, memory)
    }
    assert (
        "16 GPUs of type H100 on 2 nodes (n1, n2) reserved for it for 200 s, as it had waited "
        "3600 s (reservation_after_s); by what runs there it can start in 1000 s"
    ) in said[JobId("gang")]
    assert (
        "16 GPUs of type H100 are reserved for gang, which has waited 3800 s" in said[JobId("late")]
    )


def test_who_waits_out_of_sight_keeps_its_reservation_and_nothing_from_others() -> None:
    """Its tenant has no room now: it blocks nobody, and is not forgotten."""
    late = waiting("late", runtime_s=1500.0)
    _, before, memory = passed(cell(gang()))
    unseen = replace(cell(late), unseen=frozenset({"gang"}))
    starts, after, _ = passed(unseen, memory)
    assert starts == ["late"]
    assert after == before
    idle = replace(cell(), unseen=frozenset({"gang"}))
    assert passed(idle, memory)[1] == before
    assert passed(cell(), memory)[1] == ()


@pytest.mark.parametrize("memory", [b"\xc1", msgspec.msgpack.encode({"a": 1})])
def test_what_cannot_be_read_is_forgotten(memory: bytes) -> None:
    """As of a version of before or of another policy's."""
    assert passed(cell(gang()), memory)[1] == passed(cell(gang()))[1]


@st.composite
def streams(draw: st.DrawFn) -> list[tuple[float, float, float]]:
    """Jobs of one node that come one after the other: pause before it, true and told time."""
    seconds = st.sampled_from([60.0, 300.0, 900.0, 2400.0])
    return [(draw(st.sampled_from([1.0, 120.0])), draw(seconds), draw(seconds)) for _ in range(60)]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@example(stream=[(1.0, 2400.0, 60.0)] * 60, name="aryl")
@given(stream=streams(), name=st.sampled_from(["aryl", "foresight"]))
def test_the_wait_is_bounded_whatever_estimates_are_worth(
    stream: list[tuple[float, float, float]], name: str
) -> None:
    """A gang of three nodes starts at the latest after `reservation_after_s`, the longest that a
    job may be told to have left, and the longest that one really has."""
    step_s, told_s, true_s = 30.0, 2400.0, 2400.0
    bound_s = 600.0 + 2.0 * told_s + true_s + 3.0 * step_s
    came = 0.0
    coming = [(came := came + pause, f"j{n}", true, told) for n, (pause, true, told) in
              enumerate(stream * 4)]  # fmt: skip
    on: dict[str, tuple[str, float, float]] = {}
    at_s, memory, made = 0.0, b"", policy(f"{name}:reservation_after_s=600")
    while at_s <= bound_s:
        on = {node: held for node, held in on.items() if held[1] > at_s}
        nodes, views = list[NodeView](), [waiting("gang", workers=3, runtime_s=60.0)]
        views[0] = replace(views[0], submitted_at_s=0.0)
        for node in ("n1", "n2", "n3"):
            if node in on:
                job_id, _, told_end_s = on[node]
                left_s = abs(told_end_s - at_s)  # once outlived, it is thought to go on for as long
                view, job = running(job_id, node, max(1.0, left_s))
                nodes.append(view)
                views.append(job)
            else:
                nodes.append(make_node_view(node))
        arrived = [each for each in coming if each[0] <= at_s][:12]
        views += [
            replace(waiting(j, runtime_s=told), submitted_at_s=c) for c, j, _, told in arrived
        ]
        found = made.allocate(make_snapshot(nodes=nodes, jobs=views, now_s=at_s), memory)
        memory = found.memory
        for each in found.decisions:
            assert isinstance(each, Start)
            if each.job_id == "gang":
                return
            begun = next(one for one in coming if one[1] == each.job_id)
            coming.remove(begun)
            on[each.placements[0].node] = (begun[1], at_s + begun[2], at_s + begun[3])
        at_s += step_s
    pytest.fail(f"waited longer than {bound_s:g} s")


def test_aryl_and_foresight_are_shipped_with_it() -> None:
    """No wide gang starves under the policies that are recommended; a strict line needs none."""
    for name, is_on in (("aryl", True), ("foresight", True), ("sjf", False), ("fifo", False)):
        rules = policy(name).knobs
        assert isinstance(rules, Rules)
        assert (rules.reservation_after_s is not None) == is_on
