"""Promises on several GPU types: on which newcomers are asked, refused, and started."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.clock import SystemClock
from common.model import WorkerRange
from coordinator.policies.contract.decisions import Preempt, Start
from coordinator.policies.contract.free_gpus import FreeGpus
from coordinator.policies.contract.job_groups import Behind
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.parts.blockers_for_all import NOWHERE
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.qos.admission import Book
from coordinator.policies.schedulers.qos.gpu_pools import Asking, Pool, Tried
from coordinator.policies.schedulers.qos.minimum_shares import Claim
from coordinator.policies.schedulers.qos.type_choice import Kinds
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import NodeGroup, TraceJob, Workload
from tests.harness.builders import NOW_S, make_job_view, make_node_view, make_snapshot
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


def test_a_newcomer_is_refused_only_where_no_type_can_promise_what_it_asks_for() -> None:
    """On the type that it is asked on first it would be late behind a promise; the other has room
    in time, which a job without a promise uses."""
    first, soft = runs(asks("first", 100.0, 101.0), "A100"), runs(asks("soft", 1e5, None), "H100")
    hurry = asks("hurry", 100.0, 150.0)
    before = decided(cell([first, soft]))
    found = decided(cell([first, soft, hurry]), before.memory)
    assert rejects(found) == {}
    assert promised(found) == ({"first", "hurry"}, {"first": "A100", "hurry": "H100"})
    assert [made.job_id for made in found.decisions if isinstance(made, Preempt)] == ["soft"]
    one_type = asks("hurry", 100.0, 150.0, types=["A100"])
    assert rejects(decided(cell([first, soft, one_type]), before.memory)) == {"hurry": 201.0}


@pytest.mark.parametrize("closed", [("large",), ("large", "A100")])
def test_who_waits_for_closed_nodes_is_not_refused(closed: Sequence[str]) -> None:
    """Its gang fits on one of them alone: it is told so, and asked when that is back."""
    asked = asks("asked", 100.0, 500.0, gpus=16, types=["A100"])
    nodes = [make_node_view("A100"), make_node_view("large", gpus=16)]
    open_ = make_snapshot(nodes=[replace(node, gpu_type="A100") for node in nodes], jobs=[asked])
    shut = tuple(replace(node, is_schedulable=node.name not in closed) for node in open_.nodes)
    found = decided(replace(open_, nodes=shut))
    assert (found.decisions, promised(found)[0]) == ((), set())
    assert policy(EXACT).pending_reasons(replace(open_, nodes=shut), b"")[0].blockers[0] == NOWHERE
    assert starts(decided(open_, found.memory)) == {"asked": "A100"}
    assert rejects(decided(replace(open_, nodes=open_.nodes[:1]))) == {"asked": None}


def pre_run(work_s: float, within_s: float, *, gpus: int, most: int = 1) -> JobView:
    """Ten seconds on one GPU, before a gang whose workers have so many each."""
    gang = Behind(
        workers=WorkerRange(min=1, max=most),
        gpus_per_worker=gpus,
        work_s=work_s,
        estimate_source="declared",
    )
    return replace(asks("pre", 10.0, within_s, gpus=1), behind=gang)


def test_a_pre_run_is_promised_what_nodes_of_its_type_would_hold_of_its_gang() -> None:
    """Two nodes of eight hold no worker of 16 GPUs, a node of the other type does; without that
    there is nothing to promise."""
    asked = pre_run(100.0, 500.0, gpus=16)
    nodes = [make_node_view(name, gpu_type="A100") for name in ("a0", "a1")]
    large = make_node_view("h", gpu_type="H100", gpus=16)
    assert starts(decided(make_snapshot(nodes=[*nodes, large], jobs=[asked]))) == {"pre": "H100"}
    assert rejects(decided(make_snapshot(nodes=nodes, jobs=[asked]))) == {"pre": None}


def test_a_pre_run_goes_where_all_the_workers_are_free_that_its_gang_needs() -> None:
    """One GPU of the first type would do for itself."""
    held = runs(asks("held", 6000.0, None, gpus=7, types=["A100"]), "A100")
    found = decided(cell([held, pre_run(400.0, 120.0, gpus=1, most=8)]))
    assert (starts(found), len(found.decisions)) == ({"pre": "H100"}, 1)


@each_row("name", ["qos", "qos-edf", "qos-elasticflow"])
@each_row("within_s", [None, 6100.0])
def test_who_needs_several_workers_goes_where_these_are_free(
    name: str, within_s: float | None
) -> None:
    """One GPU of the first type is, beside a job of seven, and the second type is idle: nobody is
    stopped, and the deadline that needs four is met."""
    held = runs(asks("held", 6000.0, within_s, gpus=7, types=["A100"]), "A100")
    four = make_job_view(
        "four", workers=(1, 8), gpus_per_worker=1, types=BOTH, remaining_work_s=400.0
    )
    four = replace(four, submitted_at_s=NOW_S, deadline_at_s=NOW_S + 120.0)
    found = decided(cell([held, four]), name=name)
    assert (starts(found), len(found.decisions)) == ({"four": "H100"}, 1)
    [start] = [made for made in found.decisions if isinstance(made, Start)]
    assert sum(place.worker_count for place in start.placements) == 8


@pytest.mark.parametrize(("a100", "h100"), [(100.0, 300.0), (300.0, 100.0)])
def test_who_is_refused_is_told_the_earliest_date_of_all_types(a100: float, h100: float) -> None:
    """Whichever it was asked on first; asked for that date, it is promised."""
    held = [
        runs(asks("a", a100, a100 + 1.0), "A100"),
        runs(asks("h", h100, h100 + 1.0), "H100"),
    ]
    before = decided(cell(held))
    late = asks("late", 50.0, 60.0)
    found = decided(cell([*held, late]), before.memory)
    assert rejects(found) == {"late": 151.0}
    again = decided(cell([*held, replace(late, deadline_at_s=NOW_S + 151.0)]), before.memory)
    assert rejects(again) == {}
    assert promised(again)[1]["late"] == ("A100" if a100 < h100 else "H100")


def test_who_may_not_be_refused_waits_without_a_promise() -> None:
    """It is asked on both types again in each pass, and has GPUs of neither."""
    held = [runs(asks("a", 100.0, 101.0), "A100"), runs(asks("h", 100.0, 101.0), "H100")]
    name = f"{EXACT}:rejects=false"
    memory = decided(cell(held), name=name).memory
    late = asks("late", 50.0, 60.0)
    found = decided(cell([*held, late]), memory, name)
    assert found.decisions == ()
    assert promised(found)[0] == {"a", "h"}
    done = decided(cell([held[1], late], now_s=NOW_S + 5.0), found.memory, name)
    assert starts(done) == {"late": "A100"}


def test_who_cannot_be_promised_anything_still_starts_on_free_gpus() -> None:
    """On the type where it was asked first, where it is not refused."""
    held = runs(asks("h", 100.0, 101.0), "H100")
    name = f"{EXACT}:rejects=false"
    memory = decided(cell([held]), name=name).memory
    found = decided(cell([held, asks("hopeless", 100.0, 50.0)]), memory, name)
    assert starts(found) == {"hopeless": "A100"}


@pytest.mark.parametrize(("within_s", "types"), [(200.0, {"second": "H100"}), (120.0, {})])
def test_who_comes_from_another_type_begins_behind_those_that_take_the_free_gpus(
    within_s: float, types: dict[str, str]
) -> None:
    """Where starts take time, GPUs that others have to leave first come only after their grace of
    30 s: the free ones of the second type are taken, and those of the first promised for long."""
    due = asks("due", 1000.0, 1100.0, types=["A100"])
    running = runs(asks("run", 50.0, None, gpus=4, types=["H100"]), "H100")
    first = asks("first", 100.0, 400.0, gpus=4, types=["H100"])
    second = asks("second", 100.0, within_s, gpus=4)
    stored = [{"due": [[NOW_S, NOW_S + 1001.0, 1]]}]
    snapshot = replace(cell([due, running, first, second]), start_s=1.0)
    found = decided(snapshot, msgspec.msgpack.encode(stored))
    plans, kinds = promised(found)
    assert kinds == types
    assert plans == {"due", "first", *types}
    assert set(rejects(found)) == {"second"} - set(types)


def test_newcomers_from_several_types_go_on_in_order_of_submission() -> None:
    """Two types refuse one each, and the third has room for the one that came first."""
    kinds = ("A100", "H100", "V100")
    held = [runs(asks(kind, 900.0, 901.0, types=[kind]), kind) for kind in kinds[:2]]
    nodes = [
        make_node_view(
            kind, gpu_type=kind, workers=[w for j in held for w in j.placed if w.node == kind]
        )
        for kind in kinds
    ]
    later = asks("later", 100.0, 150.0, types=["A100", "V100"])
    sooner = asks("sooner", 100.0, 150.0, types=["H100", "V100"])
    soft = runs(asks("soft", 1e5, None, types=["V100"]), "V100")
    nodes[2] = make_node_view("V100", gpu_type="V100", workers=soft.placed)
    jobs = [
        *held,
        soft,
        replace(later, submitted_at_s=NOW_S - 1.0),
        replace(sooner, submitted_at_s=NOW_S - 2.0),
    ]
    found = decided(make_snapshot(nodes=nodes, jobs=jobs))
    assert starts(found) == {"sooner": "V100"}
    assert set(rejects(found)) == {"later"}


def test_newcomers_that_one_type_cannot_take_go_on_in_order_of_submission() -> None:
    """Of three one is promised its deadline on each type; the last is told when there is room."""
    jobs = [
        replace(asks(f"j{at}", 100.0, 110.0), submitted_at_s=NOW_S - 3.0 + at) for at in range(3)
    ]
    found = decided(cell(jobs))
    assert starts(found) == {"j0": "A100", "j1": "H100"}
    assert rejects(found) == {"j2": 202.0}


def test_a_worker_larger_than_any_node_is_refused_though_the_gpus_would_do() -> None:
    """Sixteen GPUs on two nodes are no room for a worker of sixteen."""
    nodes = [make_node_view(name, gpu_type="A100") for name in ("a0", "a1")]
    huge, small = asks("huge", 10.0, 1e4, gpus=16), asks("small", 10.0, 20.0)
    found = decided(make_snapshot(nodes=nodes, jobs=[huge, small]))
    assert rejects(found) == {"huge": None}
    assert starts(found) == {"small": "A100"}


def test_newcomers_that_are_admitted_together_are_refused_together() -> None:
    """Also where one of them alone could be promised its deadline."""
    jobs = [asks(f"j{at}", 100.0, 150.0, types=["A100"]) for at in range(2)]
    found = decided(cell(jobs), name=f"{EXACT}:admits_together=true")
    assert rejects(found).keys() == {"j0", "j1"}
    assert starts(decided(cell(jobs))) == {"j0": "A100"}


def test_one_that_never_fits_keeps_nobody_out_that_comes_with_it() -> None:
    """Admitted together are those that could be."""
    jobs = [asks("huge", 10.0, 1e4, gpus=16), asks("small", 100.0, 150.0, types=["A100"])]
    found = decided(cell(jobs), name=f"{EXACT}:admits_together=true")
    assert rejects(found) == {"huge": None}
    assert starts(found) == {"small": "A100"}


def crowd(count: int, *, most_plans: int) -> tuple[list[Claim], dict[str, Pool]]:
    """Who has no answer yet of so many that neither type can promise anything, and the books."""
    line = [asks(f"j{at}", 100.0, 50.0) for at in range(count)]
    snapshot = cell(line)
    kinds = Kinds(snapshot, FreeGpus(snapshot), (), {})
    pools = {
        kind: Pool(kind=kind, gpus=8, jobs={}, book=Book(NOW_S, 8, {}), soft=[], asked=[])
        for kind in BOTH
    }

    def claims_on(_: Pool, jobs: Sequence[JobView]) -> list[Claim]:
        return [
            Claim(
                job_id=job.job_id,
                sizes=(1,),
                rates=(1.0,),
                gpus_per_worker=8,
                work_s=100.0,
                deadline_s=NOW_S + 50.0,
            )
            for job in jobs
        ]

    def refuse(_: JobView, tried: Tried) -> None:
        assert [pool.book.earliest_s(claim) for pool, claim in tried] == [NOW_S + 101.0] * 2

    asking = Asking(pools, kinds, claims_on, refuse, together=False, most_plans=most_plans)
    return asking.answer({"A100": line}), pools


def test_what_an_answer_looks_for_on_all_types_counts_as_its_work() -> None:
    """Dates are looked for on each; beside that of its own type a pass answers fewer."""
    later, pools = crowd(8, most_plans=10**9)
    assert later == []
    own = pools["H100"].book.tried
    assert own > pools["A100"].book.tried / 2 > 0
    left, _ = crowd(8, most_plans=own + 1)
    assert 0 < len(left) < 8


# --- over time ------------------------------------------------------------------------------------

ROWS = st.lists(
    st.tuples(
        st.integers(0, 100),
        st.integers(5, 120),
        st.integers(0, 400),
        st.integers(1, 4),
        st.sampled_from([("A100",), ("H100",), ("A100", "H100"), ("H100", "A100")]),
        st.booleans(),
    ),
    min_size=2,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_no_promise_is_broken_on_two_types(
    rows: list[tuple[int, int, int, int, tuple[str, ...], bool]],
) -> None:
    """KeptPromises: where predictions are exact, nothing takes time and jobs save."""
    jobs = tuple(
        TraceJob(
            job_id=f"j{number}",
            submit_s=float(at_s),
            duration_s=float(work_s),
            gpus=gpus,
            gpus_per_worker=1,
            min_workers=1 if is_elastic else gpus,
            max_workers=gpus,
            deadline_s=float(deadline_s) or None,
            gpu_types=types,
        )
        for number, (at_s, work_s, deadline_s, gpus, types, is_elastic) in enumerate(sorted(rows))
    )
    nodes = tuple(NodeGroup(count=1, gpus=4, gpu_type=kind) for kind in BOTH)
    options = RunOptions(policy=EXACT, has_delays=False, saves=Saves.ON_REQUEST, check=True)
    workload = Workload(name="two", jobs=jobs, loads=(), nodes=nodes, length_s=200.0)
    found = play(workload, options, clock=SystemClock()).result
    assert not found.promises_missed
