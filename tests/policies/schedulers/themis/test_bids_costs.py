"""What bids in an auction of Themis cost, in calls, and that each app's are its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import GpuRequest, JobId, WorkerRange
from common.profile import JobProfile
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.schedulers.themis.app_standing import Standing
from coordinator.policies.schedulers.themis.arbiter import Arbiter
from coordinator.policies.schedulers.themis.auction import Sale
from coordinator.policies.schedulers.themis.bundles import Bundle
from coordinator.policies.schedulers.themis.finish_time_fairness import Aim
from coordinator.policies.schedulers.themis.knobs import ThemisKnobs
from coordinator.policies.schedulers.themis.lease_terms import Horizon
from coordinator.policies.schedulers.themis.leases import Memory
from coordinator.policies.schedulers.themis.seeded_chance import Chance
from tests.draws import pick, whole
from tests.harness.builders import job_with
from tests.policies.counted_calls import calls
from tests.policies.schedulers.themis.test_policy import cluster, running, waiting
from tests.policies.schedulers.themis.test_policy_costs import crowds


class Both(Sale):
    """It asks for the least and for all bids."""

    def asked(self, standing: Standing) -> tuple[Bundle | None, list[Bundle]]:
        """Of one app, before anything is given."""
        agent, places = self._agent(standing, self._offer(self.free)), self._places()
        return agent.least(places), agent.table(places)[1:]

    def tables(self, standings: Iterable[Standing], *, is_one_offer: bool) -> list[list[Bundle]]:
        """Of all apps, to which one offer is made, or to each its own."""
        offer = self._offer(self.free)
        return [
            self._table(standing, offer if is_one_offer else self._offer(self.free))
            for standing in standings
        ]


# --- apps that are alike --------------------------------------------------------------------------


def test_an_app_like_one_before_it_bids_without_a_look_for_nodes() -> None:
    """Twenty more bidders on 64 nodes cost no more calls than some for each node, which is to see
    how much is free; to look for every set of nodes cost twenty times as many."""

    def added(nodes: int) -> int:
        sizes = {f"n{at}": 2 for at in range(nodes)}

        def bids(apps: int) -> int:
            jobs = [waiting(f"w{at}", workers=(1, 16)) for at in range(apps)]
            snapshot, knobs = cluster(sizes, jobs), ThemisKnobs(f=0.0)
            arbiter = Arbiter(knobs, snapshot, Memory())
            sale = Both(snapshot, arbiter.leases, knobs, Chance(knobs.seed, 0))
            standings = list(arbiter.standings.values())
            return calls(lambda: sale.tables(standings, is_one_offer=True))

        return bids(40) - bids(20)

    assert added(64) - added(8) < 20 * 5 * (64 - 8)


@given(
    other=st.sampled_from(
        [
            {"gpus_per_worker": 2},
            {"workers": WorkerRange(min=3, max=6)},
            {"gpu": GpuRequest(types=("A100",))},
            {"nodes_avoided": ("n1",)},
            {"profile": JobProfile(far_speed_ratio=0.5, rack_speed_ratio=0.8)},
        ]
    ),
    free=st.tuples(*[whole(0, 4)] * 4),
)
def test_apps_to_which_one_offer_is_made_bid_as_if_each_had_its_own(
    other: dict[str, Any], free: tuple[int, ...]
) -> None:
    """Also where they are unlike in one thing that decides where a gang has room."""
    job = waiting("a", workers=(2, 6))
    unlike_it = job_with(job, **({"job_id": JobId("b")} | other))
    sizes = {f"n{at}": gpus for at, gpus in enumerate(free)}
    snapshot = cluster(sizes, [job, unlike_it], racks={"n0": "x", "n1": "x", "n2": "y", "n3": "y"})
    nodes = [
        replace(node, gpu_type="A100" if node.name == "n3" else node.gpu_type)
        for node in snapshot.nodes
    ]
    snapshot = replace(snapshot, nodes=tuple(nodes))
    knobs = ThemisKnobs()
    arbiter = Arbiter(knobs, snapshot, Memory())
    sale = Both(snapshot, arbiter.leases, knobs, Chance(knobs.seed, 0))
    standings = list(arbiter.standings.values())
    one, own = (sale.tables(standings, is_one_offer=is_one) for is_one in (True, False))
    assert one == own


# --- what is shared in turn -----------------------------------------------------------------------


def test_gpus_that_are_shared_in_turn_are_asked_for_one_by_one() -> None:
    """The least that helps is found without a look at all that an app could use besides: that may
    be four workers each or hundreds."""

    def added(most: int) -> int:
        """By eight GPUs more, of which nobody keeps any that it wins."""
        few, many = (
            cluster({"n0": gpus}, [waiting(f"w{at}", workers=(1, most)) for at in range(8)])
            for gpus in (8, 16)
        )

        def shared(snapshot: ClusterSnapshot) -> int:
            arbiter = Arbiter(ThemisKnobs(f=0.0), snapshot, Memory())
            for standing in arbiter.standings.values():
                arbiter.sale.give_least(standing, "first")

            def rest() -> None:
                wanting = list(arbiter.standings.values())
                while wanting:
                    wanting = [each for each in wanting if arbiter.sale.give_least(each, "rest")]

            return calls(rest)

        return shared(many) - shared(few)

    assert added(200) < 1.5 * added(4)


@settings(max_examples=200)
@given(snapshot=crowds(), horizon=pick(*Horizon), aim=pick(*Aim))
def test_the_least_that_helps_is_the_smallest_bid(
    snapshot: ClusterSnapshot, horizon: Horizon, aim: Aim
) -> None:
    """Of those that the app would name in an auction; nothing where it would name none."""
    knobs = ThemisKnobs(horizon=horizon, aim=aim)
    arbiter = Arbiter(knobs, snapshot, Memory())
    sale = Both(snapshot, arbiter.leases, knobs, Chance(knobs.seed, 0))
    for standing in arbiter.standings.values():
        least, bids = sale.asked(standing)
        assert least == (bids[0] if bids else None)


def test_the_least_that_helps_may_be_more_than_the_first_job() -> None:
    """Of a search that is done with its first trial: a long one that ran comes first in its bids,
    and helps only together with a short one that never did."""
    trials = [
        running(waiting("kept", work_s=5e3, app="search"), ["n0"], started_s_ago=60.0),
        running(waiting("back", work_s=1e6, app="search"), ["n1"], started_s_ago=1300.0),
        waiting("short", work_s=10.0, app="search"),
    ]
    snapshot = cluster({"n0": 1, "n1": 1, "n2": 1}, trials)
    knobs = ThemisKnobs(aim=Aim.FIRST)
    arbiter = Arbiter(knobs, snapshot, Memory())
    sale = Both(snapshot, arbiter.leases, knobs, Chance(knobs.seed, 0))
    (standing,) = arbiter.standings.values()
    least, bids = sale.asked(standing)
    assert least is not None
    assert least == bids[0]
    assert [share.job.job_id for share in least.shares] == ["back", "short"]
