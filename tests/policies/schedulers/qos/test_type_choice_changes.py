"""Promises on several GPU types: when one that was made changes its type, and when it does not."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from common.model import JobId, JobState, Preemptibility
from coordinator.policies.contract.decisions import Allocation
from coordinator.policies.contract.free_gpus import FreeGpus
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.parts.blockers_for_all import NOWHERE
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.qos.type_choice import Kinds
from tests.harness.builders import NOW_S, job_with, make_node_view
from tests.policies.schedulers.qos.type_cells import (
    BOTH,
    EXACT,
    asks,
    cell,
    decided,
    promised,
    rejects,
    runs,
    starts,
)
from tests.tables import each_row


def waiting_cell(*, within_s: float = 1000.0) -> tuple[list[JobView], JobView, bytes]:
    """A job runs on each type; a third one was promised its deadline behind that on the first."""
    held = [runs(asks("a", 200.0, 201.0), "A100"), runs(asks("h", 300.0, 301.0), "H100")]
    last = asks("last", 100.0, within_s)
    memory = decided(cell(held)).memory
    found = decided(cell([*held, last]), memory)
    assert promised(found)[1]["last"] == "A100"
    return held, last, found.memory


def test_a_promise_stays_on_its_type_while_no_other_has_free_gpus() -> None:
    """Whatever a newcomer would choose now."""
    held, last, memory = waiting_cell()
    sooner = job_with(held[1], remaining_work_s=10.0)
    found = decided(cell([held[0], sooner, last]), memory)
    assert promised(found)[1]["last"] == "A100"
    assert found.decisions == ()


def test_nobody_is_stopped_on_another_type_for_a_promise_that_holds() -> None:
    """A job without one has the GPUs there on which this could begin now."""
    held, last, memory = waiting_cell()
    soft = runs(asks("soft", 1e5, None, types=["H100"]), "H100")
    found = decided(cell([held[0], soft, last]), memory)
    assert (found.decisions, promised(found)[1]["last"]) == ((), "A100")


def test_who_is_late_goes_before_those_that_are_in_time_anyway() -> None:
    """Free GPUs of the other type would do for either; one alone has no other way."""
    long = runs(asks("long", 500.0, 501.0, gpus=4, types=["A100"]), "A100")
    short = runs(asks("short", 100.0, 101.0, gpus=4, types=["A100"]), "A100")
    fine = asks("fine", 250.0, 360.0, gpus=4)
    late = asks("late", 200.0, 400.0)
    plans = {
        "long": [[NOW_S, NOW_S + 500.0, 1]],
        "short": [[NOW_S, NOW_S + 100.0, 1]],
        "fine": [[NOW_S + 100.0, NOW_S + 350.0, 1]],
        "late": [[NOW_S + 100.0, NOW_S + 300.0, 1]],
    }
    stored = [plans, NOW_S, NOW_S, NOW_S, (), {}, {}, (), {"fine": "A100", "late": "A100"}]
    found = decided(cell([long, short, fine, late]), msgspec.msgpack.encode(stored))
    assert starts(found) == {"late": "H100"}
    assert promised(found)[1] == {"fine": "A100", "late": "H100"}


def test_a_promised_job_goes_to_another_type_that_has_free_gpus() -> None:
    """Its plan is given up where it was: a newcomer is promised these GPUs in the same pass."""
    held, last, memory = waiting_cell()
    found = decided(cell([held[0], last]), memory)
    assert starts(found) == {"last": "H100"}
    assert promised(found)[1]["last"] == "H100"
    newcomer = asks("new", 100.0, 310.0, types=["A100"])
    both = decided(cell([held[0], last, newcomer]), memory)
    assert (starts(both), rejects(both)) == ({"last": "H100"}, {})
    assert promised(both)[0] == {"a", "last", "new"}


def test_free_gpus_that_were_promised_to_another_one_are_not_taken() -> None:
    """Those of the other type are due for a wider gang before the job would be done."""
    held, last, memory = waiting_cell()
    due = asks("due", 300.0, 305.0, types=["H100"])
    plans, late, kinds = msgspec.msgpack.decode(memory)[0], (), {"last": "A100", "a": "A100"}
    del plans["h"]
    plans["due"] = [[NOW_S, NOW_S + 300.0, 1]]
    stored = [plans, NOW_S, NOW_S, NOW_S + 60.0, late, {}, {}, (), kinds]
    found = decided(cell([held[0], last, due]), msgspec.msgpack.encode(stored))
    assert starts(found) == {"due": "H100"}
    assert promised(found)[1]["last"] == "A100"


def test_who_would_be_late_on_its_type_goes_where_it_is_in_time() -> None:
    """Though it has to wait there as well: the job before it took longer than was predicted."""
    held, last, memory = waiting_cell(within_s=420.0)
    longer = job_with(held[0], remaining_work_s=400.0, deadline_at_s=NOW_S + 401.0)
    found = decided(cell([longer, held[1], last]), memory)
    assert promised(found) == ({"a", "h", "last"}, {"a": "A100", "h": "H100", "last": "H100"})
    assert msgspec.msgpack.decode(found.memory)[4] == []


def test_who_runs_is_planned_on_what_it_has() -> None:
    """Whatever is remembered, and whatever else is free."""
    held, _, memory = waiting_cell()
    moved = runs(replace(held[0], state=JobState.PENDING, placed=()), "H100")
    found = decided(cell([moved]), memory)
    assert found.decisions == ()
    assert promised(found) == ({"a"}, {"a": "H100"})


def test_a_promise_on_nodes_that_take_nobody_holds_no_gpus_and_comes_back() -> None:
    """While its node is closed it waits for that, and `explain` says so; then it is planned."""
    memory = waiting_cell()[2]
    last = asks("last", 100.0, 1000.0, types=["A100"])
    small = make_node_view("small", gpu_type="A100", gpus=4)
    open_ = cell([last])
    closed = cell([last], closed=BOTH)
    closed = replace(closed, nodes=(*closed.nodes, small))
    found = decided(closed, memory)
    assert (found.decisions, promised(found)[0]) == ((), set())
    [hold] = policy(EXACT).pending_reasons(closed, memory)
    assert hold.blockers[0] == NOWHERE
    assert starts(decided(open_, found.memory)) == {"last": "A100"}


@pytest.mark.parametrize("types", [("A100",), ()])
def test_a_promise_outlives_an_hour_in_which_no_node_takes_workers(types: tuple[str, ...]) -> None:
    """It may be late when they are back, and runs then as well as it can: it is not refused."""
    memory = decided(cell([asks("last", 100.0, 120.0, types=types)], closed=["H100"])).memory
    last = asks("last", 100.0, 120.0, types=types)
    closed = decided(cell([last], now_s=NOW_S + 1.0, closed=BOTH), memory)
    assert closed.decisions == ()
    back = decided(cell([last], now_s=NOW_S + 10.0), closed.memory)
    assert (starts(back), promised(back)[0]) == ({"last": "A100"}, {"last"})
    late = decided(cell([last], now_s=NOW_S + 3600.0), closed.memory)
    assert (starts(late), rejects(late)) == ({"last": "A100"}, {})


def test_a_promise_whose_type_takes_nobody_breaks_none_on_another_type() -> None:
    """It would have the earlier deadline there, and room for one of both in time."""
    held = [runs(asks(kind, 30.0, 31.0, types=[kind]), kind) for kind in BOTH]
    keep, away = asks("keep", 100.0, 140.0, types=["H100"]), asks("away", 100.0, 135.0)
    jobs = [*held, keep, away]
    memory = decided(cell(jobs)).memory
    found = decided(cell(jobs, closed=["A100"]), memory)
    assert found.decisions == ()
    assert promised(found) == ({"A100", "H100", "keep"}, {"away": "A100"})
    back = decided(cell(jobs), found.memory)
    assert promised(back) == ({"A100", "H100", "keep", "away"}, {"away": "A100"})


def test_a_promise_stays_on_its_type_when_one_is_back_that_it_would_rather_have() -> None:
    """It was made while that was closed; who had been promised its GPUs before has them."""
    held = [runs(asks(kind, 30.0, 31.0, types=[kind]), kind) for kind in BOTH]
    keep = asks("keep", 100.0, 140.0, types=["H100"])
    before = decided(cell([*held, keep]))
    jobs = [*held, keep, asks("own", 100.0, 135.0, types=["H100", "A100"])]
    closed = decided(cell(jobs, closed=["H100"]), before.memory)
    found = decided(cell(jobs), closed.memory)
    assert found.decisions == ()
    assert promised(found) == ({"A100", "H100", "keep", "own"}, {"own": "A100"})


def test_who_runs_on_nodes_that_take_nobody_keeps_its_promise() -> None:
    """None of its type takes workers: it goes on there by its plan."""
    run = runs(asks("run", 100.0, 120.0), "A100")
    found = decided(cell([run], closed=["A100"]), decided(cell([run])).memory)
    assert (found.decisions, promised(found)) == ((), ({"run"}, {"run": "A100"}))


def test_only_types_of_those_that_take_several_are_remembered() -> None:
    """A promise to who takes one is there anyway."""
    found = decided(cell([asks("one", 100.0, 200.0, types=["H100"])]))
    assert promised(found) == ({"one"}, {})


def test_who_waits_for_no_gpus_of_its_own_type_leaves_the_others_to_newcomers() -> None:
    """Free GPUs of the type that it has are its own first; a newcomer chooses among the rest."""
    own = replace(asks("own", 100.0, 900.0), submitted_at_s=NOW_S - 9.0)
    snapshot = cell([own, asks("new", 100.0, 901.0)])
    found = Kinds(snapshot, FreeGpus(snapshot), {"own"}, {"own": "H100"})
    assert (found.of, found.free) == ({"own": "H100", "new": "A100"}, {})


def test_a_promise_is_planned_where_it_was_made_while_others_have_free_gpus() -> None:
    """Where it goes is for its plan to say; a type that it does not take, or is gone, counts as the
    first that it takes."""
    held = runs(asks("h", 300.0, 301.0), "H100")
    snapshot = cell([held, asks("own", 100.0, 900.0)])
    found = Kinds(snapshot, FreeGpus(snapshot), {"own"}, {"own": "H100"})
    assert (found.of, found.free) == ({"h": "H100", "own": "H100"}, {"own": "A100"})
    gone = Kinds(snapshot, FreeGpus(snapshot), {"own"}, {"own": "T4"})
    assert gone.of[JobId("own")] == "A100"


def test_one_that_would_begin_at_once_by_stopping_others_goes_to_free_gpus_instead() -> None:
    """On its own type a job without a promise would have to give way for it."""
    soft = runs(asks("soft", 1e5, None), "H100")
    last = asks("last", 100.0, 1000.0)
    stored = [{"last": [[NOW_S, NOW_S + 100.0, 1]]}, NOW_S, NOW_S, NOW_S, (), {}, {}, ()]
    memory = msgspec.msgpack.encode([*stored, {"last": "H100"}])
    found = decided(cell([soft, last]), memory)
    assert (starts(found), len(found.decisions)) == ({"last": "A100"}, 1)


def test_nobody_goes_to_free_gpus_on_which_it_would_be_done_later() -> None:
    """Half of the other node is free until a promise needs all of it, for long."""
    half = asks("half", 50.0, 55.0, gpus=4, types=["H100"])
    due = asks("due", 600.0, 660.0, types=["H100"])
    held = [runs(asks("a", 100.0, 101.0), "A100"), runs(half, "H100")]
    first = decided(cell([*held, due]))
    last = asks("last", 100.0, 2000.0, gpus=4, types=["A100", "H100"])
    plans = msgspec.msgpack.decode(first.memory)[0]
    plans["last"] = [[NOW_S + 100.0, NOW_S + 200.0, 1]]
    kinds = {"a": "A100", "last": "A100"}
    stored = [plans, NOW_S, NOW_S, NOW_S, (), {}, {}, (), kinds]
    found = decided(cell([*held, due, last]), msgspec.msgpack.encode(stored))
    assert (found.decisions, promised(found)[1]["last"]) == ((), "A100")


def late_cell(
    *names: str, gpus: int = 8, within_s: float = 425.0, start_s: float = 0.0
) -> Allocation:
    """They were promised GPUs of the first type, which a job has now that cannot be stopped; those
    of the other come free in 315 s, with the margin."""
    held = [runs(asks("a", 600.0, None), "A100"), runs(asks("h", 300.0, 330.0), "H100")]
    held[0] = replace(held[0], preemptibility=Preemptibility.SEMI)
    late = [asks(name, 100.0, within_s, gpus=gpus) for name in names]
    plans = {"h": [[NOW_S, NOW_S + 300.0, 1]]}
    plans |= {name: [[NOW_S + 200.0, NOW_S + 300.0, 1]] for name in names}
    stored = [plans, NOW_S, NOW_S, NOW_S, (), {}, {}, (), dict.fromkeys(plans, "A100")]
    snapshot = replace(cell([*held, *late]), start_s=start_s)
    return decided(snapshot, msgspec.msgpack.encode(stored), "qos-elasticflow")


def test_who_is_late_takes_no_more_of_another_type_than_there_is() -> None:
    """Of two that would both be in time there the first goes, and the other is late."""
    found = late_cell("x", "y")
    assert promised(found)[1] == {"h": "H100", "x": "H100", "y": "A100"}
    assert msgspec.msgpack.decode(found.memory)[4] == ["y"]
    both = late_cell("x", "y", gpus=4)
    assert promised(both)[1] == {"h": "H100", "x": "H100", "y": "H100"}


@pytest.mark.parametrize(("within_s", "kind"), [(425.0, "H100"), (418.0, "H100"), (415.0, "A100")])
def test_who_is_late_goes_where_it_is_in_time_without_the_margin(
    within_s: float, kind: str
) -> None:
    """It would be done after 416 s there, and after 421 with the margin; a start takes one."""
    found = late_cell("x", within_s=within_s, start_s=1.0)
    assert promised(found)[1]["x"] == kind
    assert msgspec.msgpack.decode(found.memory)[4] == ([] if kind == "H100" else ["x"])


@each_row("start_s", [0.0, 5.0])
@each_row("within_s", [50.0, -5.0])
def test_who_is_late_anywhere_goes_to_free_gpus(within_s: float, start_s: float) -> None:
    """Its own type is taken for long; the other one is idle."""
    held = runs(asks("a", 6000.0, 6500.0, types=["A100"]), "A100")
    plans = {"a": [[NOW_S, NOW_S + 6000.0, 1]]}
    stored = [plans, NOW_S, NOW_S, NOW_S, ["x"], {}, {}, (), {"x": "A100"}]
    snapshot = replace(cell([held, asks("x", 100.0, within_s)]), start_s=start_s)
    found = decided(snapshot, msgspec.msgpack.encode(stored))
    assert starts(found) == {"x": "H100"}
    assert promised(found)[1] == {"x": "H100"}


def test_who_is_late_takes_no_free_gpus_that_were_promised_to_others() -> None:
    """They are due for another one now."""
    held = runs(asks("a", 6000.0, 6500.0, types=["A100"]), "A100")
    plans = {"a": [[NOW_S, NOW_S + 6000.0, 1]], "due": [[NOW_S, NOW_S + 100.0, 1]]}
    stored = [plans, NOW_S, NOW_S, NOW_S, ["x"], {}, {}, (), {"x": "A100"}]
    due = asks("due", 100.0, 101.0, types=["H100"])
    found = decided(cell([held, due, asks("x", 100.0, 50.0)]), msgspec.msgpack.encode(stored))
    assert starts(found) == {"due": "H100"}


def test_who_is_late_and_waits_stays_on_its_type() -> None:
    """It is remembered with that, though it has no plan."""
    held = [runs(asks("a", 600.0, 601.0), "A100"), runs(asks("h", 600.0, 601.0), "H100")]
    stored = [{}, NOW_S, NOW_S, NOW_S, ["x"], {}, {}, (), {"x": "H100"}]
    found = decided(cell([*held, asks("x", 100.0, 110.0)]), msgspec.msgpack.encode(stored))
    assert found.decisions == ()
    assert promised(found) == ({"a", "h"}, {"a": "A100", "h": "H100", "x": "H100"})
