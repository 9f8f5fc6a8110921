"""Offers: who asks, what is declined, what is hoarded for a gang, when a cell stands still."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from common.model import NodeName
from coordinator.policies.schedulers.mesos.offers import (
    Hoards,
    Refusals,
    Refused,
    Still,
    askers,
    begun,
    ends_s,
)
from coordinator.policies.tenants.infeasible import Fleet, wish_of
from tests.harness.builders import job_with, make_job_view, make_node_view, make_snapshot
from tests.tables import each_row

N0, N1, N2 = (NodeName(f"n{number}") for number in range(3))


def refusals(number: int, *, now_s: float = 0.0) -> Refusals:
    """Those of an allocation, each for five seconds."""
    return Refusals(number=number, now_s=now_s, refuse_s=5.0)


def standing(
    before: Refused, *, number: int, now_s: float, askers: str, wanted: Iterable[NodeName] = ()
) -> dict[str, set[NodeName]]:
    """Whom a later allocation does not ask after which nodes."""
    later = refusals(number, now_s=now_s)
    later.stand(before, askers, lambda _: set(wanted))
    return {asker: set(later.of(asker)) for asker in askers}


NODES = (make_node_view("n0"), make_node_view("n1", free_gpus=3))


WAITS = make_job_view("j")


# --- who asks ---------------------------------------------------------------------------------


def test_whoever_could_never_run_asks_for_nothing_and_is_told_why() -> None:
    """The order stays; a line of which nobody could run is none."""
    fits = [make_job_view(f"j{number}") for number in range(2)]
    too_large = [make_job_view(f"n{number}", gpus_per_worker=9) for number in range(2)]
    fleet = Fleet(make_snapshot(nodes=NODES))
    waiting = {"a": [fits[1], too_large[0], fits[0]], "b": [too_large[1]], "c": []}
    left, why = askers(waiting, fleet)
    assert left == {"a": [fits[1], fits[0]]}
    assert why == {job.job_id: fleet.why_never(wish_of(job)) for job in too_large}
    assert all(why.values())


# --- refusals ---------------------------------------------------------------------------------


def test_what_is_declined_is_not_offered_until_the_refusal_ends() -> None:
    """Of one asker alone nothing but the time counts."""
    made = refusals(1)
    made.add("a", [N1, N0])
    assert ends_s(made.by_asker) == [5.0, 5.0]
    assert standing(made.by_asker, number=2, now_s=4.9, askers="a") == {"a": {N0, N1}}
    assert standing(made.by_asker, number=2, now_s=5.0, askers="a") == {"a": set()}


def test_a_refusal_holds_until_all_the_others_were_asked() -> None:
    """However late allocations come: as many of them as there are other askers."""
    made = refusals(7)
    made.add("a", [N0])
    for number, held in ((8, {N0}), (9, {N0}), (10, set[NodeName]())):
        found = standing(made.by_asker, number=number, now_s=1e6, askers="abc")
        assert found == {"a": held, "b": set(), "c": set()}


def test_a_node_that_is_wanted_after_all_is_refused_for_the_others_turns_only() -> None:
    """Its time has not ended; once the others were asked it is offered again all the same."""
    made = refusals(1)
    made.add("a", [N0, N1])
    in_turn = standing(made.by_asker, number=2, now_s=1.0, askers="ab", wanted=[N0])
    after = standing(made.by_asker, number=3, now_s=1.0, askers="ab", wanted=[N0])
    assert (in_turn["a"], after["a"]) == ({N0, N1}, {N1})


def test_whoever_is_gone_refuses_nothing() -> None:
    """Its refusals are forgotten, and nobody waits for its turn."""
    made = refusals(1)
    made.add("gone", [N0])
    later = refusals(2)
    later.stand(made.by_asker, ["a"], lambda _: set())
    assert later.by_asker == {}


def test_only_refusals_of_this_allocation_are_new() -> None:
    """Those that stand from before were known when it began."""
    made = refusals(1)
    at_first = made.are_new
    made.add("a", [N0])
    assert (at_first, made.are_new) == (False, True)
    later = refusals(2)
    later.stand(made.by_asker, "ab", lambda _: set())
    assert later.of("a") == {N0}
    assert not later.are_new


# --- hoards -----------------------------------------------------------------------------------


def hoards(now_s: float = 100.0, **since_s: float) -> Hoards:
    """Hoards that last for fifty seconds."""
    return Hoards(since_s, now_s=now_s, hoard_s=50.0)


@each_row(
    ("since_s", "who"),
    [
        ({"a": 51.0}, None),
        ({"a": 50.0}, "a"),
        ({"a": 40.0, "b": 30.0}, "b"),
        ({"b": 30.0, "a": 30.0}, "a"),
    ],
)
def test_the_oldest_hoard_that_lasted_too_long_ends(
    since_s: dict[str, float], who: str | None
) -> None:
    """One at a time; of equals the first by name, and none before its time."""
    assert hoards(**since_s).gives_back == who


def test_what_is_offered_adds_up_and_what_is_kept_replaces_it() -> None:
    """Since when it hoards stays as it was; whoever begins does so now."""
    made = hoards(a=80.0)
    for owner in "ab":
        made.add(owner, N0, 2)
        made.add(owner, N0, 1)
        made.add(owner, N1, 4)
        assert made.of(owner) == {N0: 3, N1: 4}
        made.keep(owner, {N1: 4})
    assert made.by_owner == {"a": {N1: 4}, "b": {N1: 4}}
    assert made.since_s == {"a": 80.0, "b": 100.0}


def test_a_gang_that_started_leaves_the_next_one_its_whole_time() -> None:
    """What is hoarded afterwards is for another gang, from now on."""
    made = hoards(a=60.0)
    made.add("a", N0, 1)
    made.renew("a")
    made.keep("a", made.of("a"))
    assert made.since_s == {"a": 100.0}


def test_who_gives_back_keeps_nothing() -> None:
    """It does not count as hoarding before, and nothing is left of it after."""
    made = hoards(a=10.0, b=90.0)
    for owner in "ab":
        made.add(owner, N0, 1)
    assert [made.is_kept(owner) for owner in "abc"] == [False, True, False]
    made.end("a")
    assert (made.by_owner, made.since_s) == ({"b": {N0: 1}}, {"b": 90.0})


def test_the_oldest_of_some_is_found_among_those_that_hoard() -> None:
    """Whoever began first; of equals the first by name, and none where none of them hoards."""
    made = hoards(a=90.0, b=80.0, c=80.0)
    assert [made.oldest(among) for among in ("abc", "ca", "a", "d", "")] == ["b", "c", "a"] + [
        None
    ] * 2


def test_hoards_of_those_that_are_gone_are_forgotten() -> None:
    """Nobody waits for any of its gangs."""
    assert begun({"a": 1.0, "b": 2.0}, ["b", "c"]) == {"b": 2.0}


# --- a standstill -----------------------------------------------------------------------------


def test_a_cell_in_which_nothing_changes_stands_still() -> None:
    """Since it was seen so first, for as many passes as came after that one."""
    seen = Still().after(make_snapshot(nodes=NODES, jobs=[WAITS], now_s=10.0))
    assert (seen.since_s, seen.passes) == (10.0, 0)
    again = seen.after(make_snapshot(nodes=NODES, jobs=[WAITS], now_s=25.0))
    assert again == Still(seen.seen, 10.0, 1)


@pytest.mark.parametrize("what", ["free", "job", "attempt"])
def test_whatever_is_free_or_waits_anew_ends_a_standstill(what: str) -> None:
    """Another count of free GPUs, another job, or another attempt of the same one."""
    seen = Still().after(make_snapshot(nodes=NODES, jobs=[WAITS], now_s=10.0))
    nodes, jobs = list(NODES), [WAITS]
    match what:
        case "free":
            nodes[1] = make_node_view("n1", free_gpus=4)
        case "job":
            jobs.append(make_job_view("k"))
        case _:
            jobs = [job_with(WAITS, attempt_number=WAITS.attempt.number + 1)]
    now = seen.after(make_snapshot(nodes=nodes, jobs=jobs, now_s=25.0))
    assert (now.since_s, now.passes) == (25.0, 0)
    assert now.seen != seen.seen


@pytest.mark.parametrize(
    ("now_s", "passes", "is_longer"), [(70.1, 5, True), (70.0, 5, False), (70.1, 4, False)]
)
def test_a_standstill_is_long_by_its_time_and_by_its_passes(
    now_s: float, passes: int, is_longer: bool
) -> None:
    """Both must be beyond what was asked: passes may come late, or often."""
    still = Still(since_s=10.0, passes=passes)
    assert still.outlasts(now_s, least_s=60.0, passes=4) is is_longer
