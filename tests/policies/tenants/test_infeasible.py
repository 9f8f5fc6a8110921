"""What no waiting cures: fleets that are too small for a job, whoever else is there."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import NodeRole, Preemptibility, WorkerRange
from coordinator.policies.contract.snapshot import JobView, NodeView, ServiceView, TenantView
from coordinator.policies.tenants.infeasible import Fleet, wish_of
from tests.harness.builders import (
    job_with,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_spec,
)

OURS = (make_node_view("t0"), make_node_view("t1"))


def serving(count: int, *, role: NodeRole = NodeRole.SERVING) -> tuple[NodeView, ...]:
    """Nodes of the one service."""
    return tuple(make_node_view(f"s{number}", role=role) for number in range(count))


def never(job: JobView, *nodes: NodeView, service: ServiceView | None = None) -> tuple[str, ...]:
    """Why the fleet of these nodes could not run a job."""
    service = service or make_service_view()
    return Fleet(make_snapshot(nodes=nodes, services=(service,))).why_never(wish_of(job))


def test_what_is_taken_now_may_come_free() -> None:
    """Neither workers, nor a cordon, nor the loss of a node is for ever."""
    busy = make_node_view("t0", free_gpus=0, is_drained_by_operator=True)
    gone = replace(make_node_view("t1"), role=NodeRole.LOST, is_schedulable=False)
    assert never(make_job_view("j", workers=(16, 16)), busy, gone) == ()
    assert never(make_job_view("j", workers=(17, 17)), busy, gone) == (
        "can never run here: all 2 nodes of type H100 have 16 GPUs together, room for 16 workers",
    )


def test_one_type_that_would_do_is_enough() -> None:
    """Of a job that accepts several, the others are no reason; where none would, all are told."""
    nodes = (*OURS, make_node_view("a0", gpu_type="A100", gpus=4))
    both = make_job_view("j", types=("T4", "A100", "H100"), gpus_per_worker=8)
    assert never(both, *nodes) == ()
    assert never(make_job_view("j", types=("T4", "A100"), gpus_per_worker=8), *nodes) == (
        "GPU type T4 not present",
        "can never run here: no node of type A100 has 8 GPUs; the largest has 4",
    )


def test_nodes_that_a_job_may_not_use_do_not_count_for_it() -> None:
    """By its labels; a node that it leaves alone for a while counts, as it may use it later."""
    wide = make_job_view("j", gpus_per_worker=8, workers=(2, 2))
    away = {"nodes_avoided": (OURS[0].name,)}
    assert never(job_with(wide, **away), *OURS) == ()
    job = job_with(wide, **away, nodes_excluded=(OURS[0].name,))
    assert never(job, *OURS) == (
        "can never run here: the 1 node of type H100 that it may use has 8 GPUs together, "
        "room for 1 worker",
    )
    none = job_with(wide, nodes_excluded=tuple(node.name for node in OURS))
    assert never(none, *OURS) == (
        "can never run here: no node of type H100 fits what it asks of nodes",
    )


def test_a_service_counts_for_what_it_may_lend_at_one_time() -> None:
    """With its minimum kept: what it never lends together is no room for a gang."""
    job = make_job_view("j", gpus_per_worker=8, workers=(4, 4))
    assert never(job, *OURS, *serving(3)) == ()
    assert never(job, *OURS, *serving(3), service=make_service_view(min_serving=2)) == (
        "can never run here: all 5 nodes of type H100 have 40 GPUs together, room for 5 workers, "
        "but chat lends at most 1 of its 3 nodes (min_serving is 2): room for 3 at one time",
    )


def test_under_a_policy_that_lends_nothing_only_what_is_lent_already_counts() -> None:
    """Two of ours and one that is lent hold a gang of three; that a fourth serves is no help."""
    lent = make_node_view("l0", role=NodeRole.ON_LOAN)
    nodes = (*OURS, lent, *serving(3))
    snapshot = make_snapshot(nodes=nodes, services=(make_service_view(min_serving=0),))
    fleet = Fleet(snapshot, lends=False)
    for count, is_never in ((3, False), (4, True)):
        gang = make_job_view("j", gpus_per_worker=8, workers=(count, count))
        assert fleet.is_never(gang) is is_never
        assert fleet.hosts(gang, ["H100", "T4"]) == ([] if is_never else ["H100"])
        assert not Fleet(snapshot).is_never(gang)


def test_a_service_that_keeps_all_its_nodes_lends_none() -> None:
    """A job is told so where it would need one of them."""
    [why] = never(make_job_view("j", workers=(17, 17)), *OURS, *serving(1))
    assert "chat lends none of its 1 node (min_serving is 1)" in why


@pytest.mark.parametrize(("ratio", "has_room"), [(0.0, True), (0.34, False)])
def test_headroom_is_never_lent_either(ratio: float, has_room: bool) -> None:
    """It is kept above any load, so above none."""
    service = make_service_view(min_serving=1, headroom_ratio=ratio)
    found = never(
        make_job_view("j", gpus_per_worker=8, workers=(4, 4)), *OURS, *serving(3), service=service
    )
    assert (found == ()) is has_room
    if found:
        assert "chat lends at most 1 of its 3 nodes (headroom_ratio 0.34 keeps 2)" in found[0]


def test_what_is_lent_already_was_not_too_much() -> None:
    """Settings that were changed since do not make a gang of it impossible."""
    job = make_job_view("j", gpus_per_worker=8, workers=(4, 4))
    lent = serving(2, role=NodeRole.ON_LOAN)
    assert never(job, *OURS, *lent, service=make_service_view(min_serving=2)) == ()


def test_nodes_that_rules_keep_from_a_job_are_not_counted() -> None:
    """Its own preemptibility and its grace keep it from lent nodes, and no settings keep all."""
    job = make_job_view("j", gpus_per_worker=8, workers=(3, 3))
    said = "can never run here: the 2 nodes of type H100 that it may use have 16 GPUs together"
    for kept in (
        replace(job, preemptibility=Preemptibility.NON),
        replace(job, preemptibility=Preemptibility.SEMI),
        replace(job, grace_s=61.0),
    ):
        [why] = never(kept, *OURS, *serving(2))
        assert why.startswith(said)
    assert never(job, *OURS, *serving(2)) == ()


def test_a_gang_that_may_span_types_has_room_on_all_of_them_together() -> None:
    """No type would do alone."""
    nodes = (make_node_view("t0"), make_node_view("a0", gpu_type="A100"))
    job = make_job_view("j", types=("H100", "A100"), gpus_per_worker=8, workers=(2, 2))
    assert len(never(job, *nodes)) == 2
    spanning = replace(job, gpu=replace(job.gpu, heterogeneous_speed_ratio=0.7))
    assert never(spanning, *nodes) == ()


def test_a_type_that_needs_more_workers_needs_more_room() -> None:
    """Twice as many of the slower type."""
    job = make_job_view("j", multiplier={"H100": 2}, gpus_per_worker=8, workers=(2, 2))
    [why] = never(job, *OURS)
    assert "room for 2 workers" in why


def test_a_user_and_a_policy_ask_for_the_same() -> None:
    """What a job's spec says is what its view says."""
    spec = make_spec(workers=(2, 3), gpus_per_worker=4)
    view = make_job_view("j", workers=(2, 3), gpus_per_worker=4, grace_s=spec.checkpoint.grace_s)
    assert wish_of(view) == wish_of(spec)


def test_a_cell_without_nodes_says_so() -> None:
    """Nor does one whose nodes have no GPU."""
    assert never(make_job_view("j")) == ("no nodes are known",)
    assert never(make_job_view("j"), make_node_view("t0", gpus=0)) == ("no nodes are known",)


def of_tenants(*tenants: TenantView, tenant: str, gpus: int) -> tuple[str, ...]:
    """Why two nodes of eight GPUs could not run a tenant's gang of so many workers of one GPU."""
    job = replace(make_job_view("j", workers=(gpus, gpus)), tenant=tenant)
    snapshot = replace(make_snapshot(nodes=OURS, jobs=(job,)), tenants=tenants)
    return Fleet(snapshot).why_never(wish_of(job), tenant)


def test_what_its_tenant_may_use_at_most_is_such_a_reason() -> None:
    """By its own limit, whatever it uses now."""
    bounded = TenantView(name="a", guarantee_gpus=4, borrow_limit_gpus=4)
    assert of_tenants(bounded, tenant="a", gpus=8) == ()
    assert of_tenants(bounded, tenant="a", gpus=9) == (
        "can never run here: needs 9 GPUs at one time, and tenant a may use 8: its guarantee of 4 "
        "and its borrow limit of 4",
    )
    team = TenantView(name="team", parent="a")
    [why] = of_tenants(bounded, team, tenant="team", gpus=9)
    assert "tenant a may use 8" in why


def test_what_others_never_lend_is_such_a_reason() -> None:
    """While they use nothing, it stays theirs; while they use it, too."""
    keeper = TenantView(name="b", guarantee_gpus=6, lend_limit_gpus=2)
    assert of_tenants(TenantView(name="a"), keeper, tenant="a", gpus=12) == ()
    assert of_tenants(TenantView(name="a"), keeper, tenant="a", gpus=13) == (
        "can never run here: needs 13 GPUs at one time, and tenant a may use 12 of the 16 in this "
        "fleet: the lend limits of b keep the others idle",
    )
    assert of_tenants(TenantView(name="a"), keeper, tenant="b", gpus=16) == ()


def test_the_fleet_comes_before_a_tenant_s_limits() -> None:
    """Where neither would do, the one that no setting cures is told."""
    bounded = TenantView(name="a", guarantee_gpus=4, borrow_limit_gpus=4)
    [why] = of_tenants(bounded, tenant="a", gpus=17)
    assert "room for 16 workers" in why


def test_what_is_kept_under_a_limited_parent_is_such_a_reason() -> None:
    """Of what the parent may use at most, a team gets no more than its siblings do not keep."""
    tenants = (
        TenantView(name="p", guarantee_gpus=8, borrow_limit_gpus=0),
        TenantView(name="c", parent="p", guarantee_gpus=4, lend_limit_gpus=0),
        TenantView(name="d", parent="p"),
    )
    assert of_tenants(*tenants, tenant="d", gpus=4) == ()
    [why] = of_tenants(*tenants, tenant="d", gpus=6)
    assert "tenant d may use 4 of the 16 in this fleet: the lend limits of c keep" in why
    assert of_tenants(*tenants, tenant="c", gpus=8) == ()


def test_those_who_are_no_tenant_by_name_are_told_of_in_words() -> None:
    """Jobs without a tenant, and a tenant's own beside those of its teams."""
    keeper = TenantView(name="c", parent="p", guarantee_gpus=8, lend_limit_gpus=0)
    tenants = (TenantView(name="p", guarantee_gpus=8), keeper)
    [why] = of_tenants(*tenants, tenant="", gpus=9)
    assert "at one time, and jobs without a tenant may use 8 of the 16" in why
    [why] = of_tenants(*tenants, tenant="p", gpus=9)
    assert "at one time, and tenant p by its own jobs may use 8 of the 16" in why


@pytest.mark.parametrize(("min_serving", "most"), [(2, 4), (1, 12), (0, 20)])
def test_nodes_that_a_service_never_lends_are_no_room_for_a_tenant(
    min_serving: int, most: int
) -> None:
    """Of sixteen GPUs twelve are kept, and of the service's two nodes so many may be lent."""
    keeper = TenantView(name="a", guarantee_gpus=12, lend_limit_gpus=0)
    service = make_service_view(min_serving=min_serving)
    job = replace(make_job_view("j", workers=(most, most)), tenant="b")
    snapshot = make_snapshot(nodes=(*OURS, *serving(2)), jobs=(job,), services=(service,))
    fleet = Fleet(replace(snapshot, tenants=(keeper,)))
    assert fleet.why_never(wish_of(job), "b") == ()
    more = replace(job, workers=WorkerRange(min=most + 1, max=most + 1))
    [why] = fleet.why_never(wish_of(more), "b")
    assert f"tenant b may use {most} of the {most + 12} in this fleet" in why


def test_a_job_may_use_the_nodes_on_which_its_gang_could_run() -> None:
    """By the type, the healthy GPUs and the service of a node. Of a gang that spans types, the
    nodes of each type count."""
    lent = make_node_view("a0", role=NodeRole.ON_LOAN, gpu_type="A100", gpus=4)
    fleet = Fleet(make_snapshot(nodes=(*OURS, lent), services=(make_service_view(),)))

    def used(job: JobView, node: NodeView = lent) -> bool:
        return fleet.may_use(wish_of(job), node, is_elastic=job.is_elastic)

    wide = make_job_view("j", types=("H100", "A100"), gpus_per_worker=4, workers=(2, 2))
    assert used(make_job_view("j", gpus_per_worker=4))
    assert not used(make_job_view("j", types=("H100",)))
    assert not used(make_job_view("j", gpus_per_worker=5))
    assert not used(make_job_view("j", gpus_per_worker=4), replace(lent, sick_gpus=1))
    assert (used(wide), used(wide, OURS[0])) == (False, True)
    assert used(replace(wide, gpu=replace(wide.gpu, heterogeneous_speed_ratio=0.9)))
    nine = make_job_view(
        "j", types=("H100", "A100"), multiplier={"A100": 2}, gpus_per_worker=2, workers=(9, 9)
    )
    spanning = replace(nine, gpu=replace(nine.gpu, heterogeneous_speed_ratio=0.9))
    assert (used(nine), used(spanning)) == (False, True), "the ninth worker has 4 GPUs there"
    mine = make_job_view("j", preemptibility=Preemptibility.NON)
    assert (used(mine), used(mine, OURS[0])) == (False, True)
    semi = make_job_view("j", types=("A100",), preemptibility=Preemptibility.SEMI, workers=(1, 2))
    assert not used(semi), "its base gang may be on no node of this type"
