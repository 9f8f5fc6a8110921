"""The rules of Themis' arbiter, one by one: who bids, what is paid, who gets what is left over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

import pytest

from coordinator.policies.contract.decisions import Placement
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.schedulers.themis.arbiter import Arbiter
from coordinator.policies.schedulers.themis.bundles import Bundle, Share
from coordinator.policies.schedulers.themis.finish_time_fairness import (
    AppRecord,
    Attendance,
    Held,
)
from coordinator.policies.schedulers.themis.knobs import ThemisKnobs
from coordinator.policies.schedulers.themis.lease_terms import Horizon, Payment, paid
from coordinator.policies.schedulers.themis.leases import Memory
from coordinator.policies.schedulers.themis.partial_allocation import Award, Bid
from coordinator.policies.schedulers.themis.seeded_chance import Chance
from tests.harness.builders import NOW_S, job_with, make_job_view, make_node_view, make_snapshot
from tests.tables import each_row

LEASE_S = ThemisKnobs().lease_s


def waiting(
    name: str, *, workers: tuple[int, int] = (1, 1), work_s: float = 3600.0, waited_s: float = 0.0
) -> JobView:
    """An app of one job, of one GPU a worker."""
    job = make_job_view(
        name, workers=workers, remaining_work_s=work_s, submitted_at_s=NOW_S - waited_s
    )
    return job_with(job, whole_work_s=work_s)


def cell(gpus: int, jobs: Iterable[JobView]) -> ClusterSnapshot:
    """One node, which is idle."""
    return make_snapshot(nodes=[make_node_view("n", gpus=gpus)], jobs=list(jobs))


def served(rhos: Mapping[str, float], *, ago_s: float = 0.0) -> Memory:
    """Apps that were last given GPUs so long ago, with the rho that they had then."""
    apps = {
        f"job {name}": AppRecord(NOW_S - ago_s, 0.0, granted_at_s=NOW_S - ago_s, rho=rho)
        for name, rho in rhos.items()
    }
    return Memory(attendance=Attendance(at_s=NOW_S, apps=apps))


def ran(knobs: ThemisKnobs, snapshot: ClusterSnapshot, memory: Memory | None = None) -> Arbiter:
    """All auctions of a pass."""
    arbiter = Arbiter(knobs, snapshot, memory or Memory())
    arbiter.run()
    return arbiter


def workers_of(arbiter: Arbiter) -> dict[str, int]:
    """What each job was given."""
    return {
        name: sum(placement.worker_count for placement in given.more)
        for name, given in arbiter.sale.given.items()
    }


# --- who bids -----------------------------------------------------------------------------------

TEN = [f"j{number}" for number in range(10)]


@each_row(("f", "bidders"), [(0.8, 2), (0.5, 5), (0.0, 10), (1.0, 1), (0.75, 2), (0.51, 4)])
def test_the_worst_off_bid_and_f_of_the_apps_are_left_out(f: float, bidders: int) -> None:
    """Section 4: the 1 - f part of the apps with the worst rho is asked, rounded down, and one app
    at least."""
    memory = served({name: 1.0 + at for at, name in enumerate(TEN)})
    knobs = ThemisKnobs(f=f, payment=Payment.NONE)
    arbiter = ran(knobs, cell(bidders, map(waiting, TEN)), memory)
    worst = {f"job {name}" for name in TEN[-bidders:]}
    assert arbiter.sale.outcome.keys() == worst
    assert {f"job {name}" for name in arbiter.sale.given} == worst


def test_an_app_that_never_had_gpus_is_the_worst_off() -> None:
    """Its rho is infinite, whatever others have suffered."""
    snapshot = cell(1, [waiting("new"), waiting("suffers")])
    arbiter = Arbiter(ThemisKnobs(), snapshot, served({"suffers": 50.0}))
    assert arbiter.standings["job new"].rho(NOW_S, LEASE_S) == inf
    arbiter.run()
    assert list(arbiter.sale.given) == ["new"]


@pytest.mark.parametrize("leases", [0.0, 1.0, 3.5])
def test_rho_grows_with_each_lease_without_gpus(leases: float) -> None:
    """Long-term compensation: by one of what it was, for each lease that it waits."""
    memory = served({"waits": 2.0}, ago_s=leases * LEASE_S)
    arbiter = Arbiter(ThemisKnobs(), cell(1, [waiting("waits")]), memory)
    assert arbiter.standings["job waits"].rho(NOW_S, LEASE_S) == pytest.approx(2.0 * (1.0 + leases))


def test_whoever_waited_longest_since_its_grant_comes_first_in_the_end() -> None:
    """Of equal ones at their grants; so nobody is left out for ever."""
    memory = served({"late": 2.0}, ago_s=3 * LEASE_S)
    memory.attendance.apps |= served({"early": 3.0}).attendance.apps
    arbiter = ran(ThemisKnobs(), cell(1, [waiting("early"), waiting("late")]), memory)
    assert list(arbiter.sale.given) == ["late"]


# --- what is left over ----------------------------------------------------------------------------


def test_what_the_bidders_leave_goes_to_others_at_random() -> None:
    """One of ten bids and two GPUs are left: over ten seeds more than four get them."""
    memory = dict.fromkeys(TEN, 1.0) | {"j0": 9.0}
    lucky = {
        name
        for seed in range(10)
        for name in ran(
            ThemisKnobs(f=0.9, seed=seed), cell(3, map(waiting, TEN)), served(memory)
        ).sale.given
    }
    assert "j0" in lucky
    assert len(lucky) > 4


def test_leftovers_go_round_until_nothing_is_left() -> None:
    """One of three bids, and wants one GPU of seven. The other two take the rest a GPU at a time in
    turn, and are asked for no bids, by which one of them would win all that it can use."""
    jobs = [waiting("bids"), waiting("x", workers=(1, 4)), waiting("y", workers=(1, 4))]
    memory = served({"bids": 9.0, "x": 1.0, "y": 1.0})
    arbiter = ran(ThemisKnobs(f=0.8), cell(7, jobs), memory)
    assert workers_of(arbiter) == {"bids": 1, "x": 3, "y": 3}
    assert arbiter.sale.outcome.keys() == {"job bids"}


@pytest.mark.parametrize("worst", ["a", "b", "c"])
def test_what_all_bidders_paid_goes_to_the_worst_off_first(worst: str) -> None:
    """Each of three would pay the one GPU, so that none keeps it: it is shared after all."""
    memory = served({name: 5.0 if name == worst else 1.0 for name in "abc"})
    knobs = ThemisKnobs(f=0.0, payment=Payment.FLOOR)
    arbiter = ran(knobs, cell(1, map(waiting, "abc")), memory)
    assert workers_of(arbiter) == {worst: 1}
    (given,) = arbiter.sale.given.values()
    assert given.why.startswith("withheld from bidders, shared in turn")


# --- what is paid -------------------------------------------------------------------------------


def bundle(workers: int, *, least: int) -> Bundle:
    """One share of so many one-GPU workers, of which fewer than `least` are of no use."""
    placed = Placement(node=make_node_view("n").name, worker_count=workers)
    share = Share(
        job=waiting("j", workers=(least, workers)),
        gpu_type="H100",
        more=(placed,),
        held=Held(workers, frozenset({placed.node})),
        is_grown=False,
        least=least,
    )
    return Bundle(shares=(share,), bid=Bid(((0, workers),), 1.0))


def left(payment: Payment, kept_ratio: float, *, least: int, seed: int = 1) -> int:
    """GPUs of a bundle of eight after its payment."""
    award = Award(bid=1, kept_ratio=kept_ratio)
    after = paid(bundle(8, least=least), award, payment, Chance(seed, 0), "job j")
    return sum(share.gpus for share in after.shares)


def test_the_hidden_payment_is_withheld_in_whole_gpus() -> None:
    """Of eight GPUs with c = 0.6 four stay, as 4.8 are no GPUs; with c = 1 all do."""
    assert left(Payment.WHOLE, 0.6, least=1) == left(Payment.FLOOR, 0.6, least=1) == 4
    assert left(Payment.NONE, 0.6, least=1) == 8
    assert [left(payment, 1.0, least=1) for payment in Payment] == [8] * 4


def test_a_gang_that_no_longer_fits_is_had_whole_with_chance_c() -> None:
    """By `whole`; by `floor` it gets nothing. Over 400 seeds about c of them have it."""
    wins = [left(Payment.WHOLE, 0.6, least=8, seed=seed) for seed in range(400)]
    assert set(wins) == {0, 8}
    assert wins.count(8) / 400 == pytest.approx(0.6, abs=0.1)
    assert left(Payment.FLOOR, 0.6, least=8) == 0


def test_a_lottery_gives_all_or_nothing() -> None:
    """Whatever would fit: c of the value on the average."""
    wins = [left(Payment.LOTTERY, 0.25, least=1, seed=seed) for seed in range(400)]
    assert set(wins) == {0, 8}
    assert wins.count(8) / 400 == pytest.approx(0.25, abs=0.1)


@pytest.mark.parametrize(("payment", "given"), [(Payment.NONE, 8), (Payment.FLOOR, 3)])
def test_bidders_pay_for_the_harm_that_they_do_to_others(payment: Payment, given: int) -> None:
    """One of two alike wins all eight GPUs. The other, which would have ended in 4500 s with them,
    ends in 10,200 s on its half after a lease: c is the ratio of these, and that is told."""
    jobs = [waiting(name, workers=(1, 8), work_s=36_000.0) for name in "ab"]
    knobs = ThemisKnobs(f=0.0, payment=payment, horizon=Horizon.GOOD)
    arbiter = Arbiter(knobs, cell(8, jobs), Memory())
    assert arbiter.sale.auction(list(arbiter.standings.values()))
    workers = sum(each.worker_count for won in arbiter.sale.given.values() for each in won.more)
    assert workers == given
    assert given == int(8 * (1.0 if payment == Payment.NONE else 4500.0 / 10_200.0))
    told = any("and paid 5 of them" in said for said in arbiter.sale.outcome.values())
    assert told == (payment == Payment.FLOOR)


# --- for how long a bid counts ------------------------------------------------------------------


@pytest.mark.parametrize(("horizon", "winner"), [(Horizon.LEASE, "short"), (Horizon.GOOD, "long")])
def test_the_horizon_decides_what_a_lease_is_worth(horizon: Horizon, winner: str) -> None:
    """A lease ends the short job and is a tenth of the long one, which gains more for good."""
    jobs = [
        waiting("long", work_s=10 * LEASE_S),
        waiting("short", work_s=LEASE_S, waited_s=LEASE_S),
    ]
    knobs = ThemisKnobs(f=0.0, payment=Payment.NONE, horizon=horizon)
    assert list(ran(knobs, cell(1, jobs)).sale.given) == [winner]
