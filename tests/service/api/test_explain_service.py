"""What an operator reads of a service: what it lends, wants back, and what is not well."""

from __future__ import annotations

from common.api import Describe, Description, Operate, ServiceRow
from common.model import NodeName, NodeRole
from coordinator.engine.state.events import LoadMeasured
from coordinator.engine.state.tables import Awaited
from coordinator.policies.contract.decisions import Reclaim
from tests.harness.cluster.coordinator import CHAT, Cell, make_settings, on_loan, submit


async def described(cell: Cell) -> Description:
    """The service in full."""
    reply = await cell.ask(Describe(kind="service", name=CHAT))
    assert isinstance(reply, Description), reply
    return reply


def row(found: Description) -> ServiceRow:
    """Its row, that every description of a service has."""
    assert found.service is not None
    return found.service


async def test_a_quiet_service_says_what_it_needs_and_what_keeps_its_first_node() -> None:
    """Balance and reason are the ones that `explain node` gives; its nodes and story are there."""
    async with Cell(inference=2) as cell:
        coordinator = await cell.lead()
        await cell.until(lambda: bool(coordinator.engine.state.services[CHAT].load))
        found = await described(cell)
        node = await cell.ask(Describe(kind="node", name="i0"))
        assert isinstance(node, Description)
        balance, reason = found.why
        assert balance.startswith(f"{CHAT}: load forecast")
        assert balance in node.why
        assert reason == (
            "i0, the first to be lent: no job that waits or could grow wants more GPUs on lent "
            "nodes"
        )
        assert [node.node for node in found.nodes] == ["i0", "i1"]
        assert {line.subject for line in found.story} == {"i0", "i1"}
        assert (row(found).reclaims, row(found).last_reclaim_s) == (0, None)
        assert (row(found).running_requests, row(found).waiting_requests) == (0.0, 0.0)


async def test_a_node_that_is_wanted_back_is_named_with_the_time_that_is_left() -> None:
    """From the order until it serves, and then the reclaim is a figure."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        found = await described(cell)
        assert [(loan.node, loan.state) for loan in found.loans] == [("i0", "on loan")]
        assert "none of its nodes serves now, so none can be lent" in found.why
        coordinator.decider.post(LoadMeasured(service=CHAT, load=9.0))
        state = coordinator.engine.state
        [loan] = state.loans.values()
        await cell.until(lambda: loan.reclaim_ordered_at_s is not None)
        [said] = [why for why in (await described(cell)).why if "wanted back" in why]
        assert said.startswith("i0 has been wanted back for ")
        assert " s left of 60 s: load forecast " in said
        await cell.until(lambda: loan.returned_at_s is not None)
        found = await described(cell)
        assert not [why for why in found.why if "wanted back" in why]
        assert (row(found).reclaims, row(found).reclaims_late) == (1, 0)
        took_s = row(found).last_reclaim_s
        assert took_s is not None
        assert 0 < took_s < 60.0
        assert [loan.state for loan in found.loans] == ["returned"]


async def test_a_node_that_waits_for_its_jobs_is_named_with_the_last_moment() -> None:
    """It is not ordered home yet, and it is not spare either."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead(settings=make_settings(policy="foresight"))
        await on_loan(cell, coordinator)
        state = coordinator.engine.state
        home = Reclaim(
            node=NodeName("i0"), service=CHAT, deadline_s=60.0, wait_s=40.0, reason="load rises"
        )
        # As `awaiting.begin` keeps it, which needs a job that is about to end.
        state.awaited[home.node] = Awaited(
            decision=home, began_at_s=state.now_s, until_s=state.now_s + 40.0
        )
        [said] = [why for why in (await described(cell)).why if "its jobs have ended" in why]
        assert said.startswith("i0 comes home when its jobs have ended, or in ")
        assert said.endswith(" s: load rises")


async def test_a_recalled_service_says_how_to_end_it() -> None:
    """While its node is on its way home, when no node of it can say so."""
    async with Cell(training=0, inference=1) as cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        await cell.ask(Operate(action="recall", target=CHAT), tenant="ops")
        said = "recalled: it lends nothing until aryl recall --service chat --off"
        assert said in (await described(cell)).why
        await cell.ask(Operate(action="recall"), tenant="ops")
        said = "recalled: it lends nothing until aryl recall --all --off"
        assert said in (await described(cell)).why


async def test_a_node_that_nobody_counts_on_is_named_with_the_reason() -> None:
    """One that is silent and one that a person took out, apart from the one that is well."""
    async with Cell(inference=3) as cell:
        coordinator = await cell.lead()
        nodes = coordinator.engine.state.nodes
        cell.agents["i0"].is_silent = True
        order = Operate(action="cordon", target="i1", reason="fan")
        await cell.ask(order, tenant="ops")
        await cell.until(lambda: nodes[NodeName("i0")].role == NodeRole.LOST)
        why = (await described(cell)).why
        assert [said for said in why if said.startswith("i0 is lost")]
        [cordoned] = [said for said in why if said.startswith("i1 is cordoned")]
        assert "fan" in cordoned
        assert [said for said in why if said.startswith("i2, the first to be lent")]


async def test_many_nodes_that_are_not_well_are_counted() -> None:
    """A rack that burns must not hide the rest of the page."""
    async with Cell(inference=11) as cell:
        await cell.lead()
        for number in range(11):
            await cell.ask(Operate(action="cordon", target=f"i{number}"), tenant="ops")
        why = (await described(cell)).why
        assert len([said for said in why if " is cordoned: by ops/" in said]) == 8
        assert "and 3 more nodes are not well" in why


async def test_a_service_without_a_node_says_so() -> None:
    """Its settings came before its machines; a job that waits changes nothing."""
    async with Cell(training=1, inference=0) as cell:
        await cell.lead()
        await submit(cell)
        found = await described(cell)
        assert found.why == ("it has no node here: none whose agent names it was ever heard",)
        assert row(found).running_requests is None
