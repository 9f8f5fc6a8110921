"""Modes, freeze, recall, revocations, renewals: what a service and its lent nodes can rely on."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.api import (
    ApiError,
    ApiErrorCode,
    Describe,
    Description,
    Done,
    GetStatus,
    Jobs,
    ListJobs,
    ListLoans,
    Loans,
    Operate,
    Status,
)
from common.errors import Unavailable
from common.model import JobState, Mode, NodeName, NodeRole
from coordinator.engine.state.events import LoadMeasured, OperatorAction, OperatorAsked
from coordinator.policies.contract.decisions import Loan, Recommend
from tests.harness.cluster.coordinator import (
    CHAT,
    LEASE_TTL_S,
    Cell,
    decisions,
    job,
    make_settings,
    on_loan,
    submit,
)

SETTINGS = make_settings()


# --- modes, freeze, recall -------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.RECOMMEND])
async def test_a_service_that_does_not_act_is_only_told(mode: Mode) -> None:
    """What would have been lent is in the journal and names the node; the node stays."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead(settings=make_settings(mode=mode))
        await submit(cell, workers=(1, 2))
        await cell.clock.advance(40.0)
        said = [d for d in decisions(cell) if isinstance(d, Recommend)]
        assert {(d.action, d.node) for d in said} == {("lend", "i0")}
        assert not [d for d in decisions(cell) if isinstance(d, Loan)]
        assert coordinator.engine.state.nodes[NodeName("i0")].role == NodeRole.SERVING
        assert {d.role for d in cell.agents["i0"].desired} == {NodeRole.SERVING}


async def test_a_recommended_loan_is_listed_described_and_approved() -> None:
    """An operator sees it where loans are, says yes, and it is a loan like any other."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead(settings=make_settings(mode=Mode.RECOMMEND))
        await submit(cell, workers=(1, 2))
        waits = await submit(cell, "waits")
        await cell.until(lambda: bool(coordinator.engine.state.recommendations))
        waiting = await cell.ask(Describe(kind="job", name=waits))
        assert isinstance(waiting, Description)
        assert [said for said in waiting.why if "aryl loan approve i0" in said]
        listed = await cell.ask(ListLoans())
        assert isinstance(listed, Loans)
        assert [(row.node, row.state) for row in listed.rows] == [("i0", "recommended")]
        service = await cell.ask(Describe(kind="service", name=CHAT))
        assert isinstance(service, Description)
        assert [said for said in service.why if "recommends to lend i0" in said]
        loan = await cell.ask(Describe(kind="loan", name="i0"))
        assert isinstance(loan, Description)
        assert "aryl loan approve i0" in loan.why[0]
        assert loan.loan == listed.rows[0]
        mine = await cell.ask(Operate(action="approve_loan", target="i0"), tenant="team")
        assert isinstance(mine, ApiError)
        assert mine.code == ApiErrorCode.DENIED
        assert isinstance(
            await cell.ask(Operate(action="approve_loan", target="i0"), tenant="ops"), Done
        )
        await cell.until(
            lambda: coordinator.engine.state.nodes[NodeName("i0")].role == NodeRole.ON_LOAN
        )
        again = await cell.ask(Operate(action="approve_loan", target="i0"), tenant="ops")
        assert isinstance(again, ApiError)
        assert (again.code, again.field) == (ApiErrorCode.NOT_FOUND, "loan")
        assert again.message == "no loan of 'i0' is recommended; none is now"


async def test_a_recommendation_that_holds_no_more_is_neither_shown_nor_approved() -> None:
    """The cell is frozen since: an approval is refused, with the reason, and changes nothing."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead(settings=make_settings(mode=Mode.RECOMMEND))
        await submit(cell, workers=(1, 2))
        await cell.until(lambda: bool(coordinator.engine.explain.recommended()))
        await cell.ask(Operate(action="freeze"), tenant="ops")
        listed = await cell.ask(ListLoans())
        assert isinstance(listed, Loans)
        assert listed.rows == ()
        service = await cell.ask(Describe(kind="service", name=CHAT))
        assert isinstance(service, Description)
        assert not [said for said in service.why if "aryl loan approve" in said]
        refused = await cell.ask(Operate(action="approve_loan", target="i0"), tenant="ops")
        assert isinstance(refused, ApiError)
        assert refused.code in (ApiErrorCode.CONFLICT, ApiErrorCode.NOT_FOUND)
        assert coordinator.engine.state.loans == {}


async def test_a_watched_service_says_what_would_have_been() -> None:
    """Whoever describes it reads the shadow loans, and the list of loans stays empty."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead(settings=make_settings(mode=Mode.OBSERVE))
        await submit(cell, workers=(1, 2))
        await cell.until(lambda: bool(coordinator.engine.state.shadow_loans))
        service = await cell.ask(Describe(kind="service", name=CHAT))
        assert isinstance(service, Description)
        assert service.why[-2:] == (
            "only watched: 1 loan would have been made and 0 taken back, 0 of them late",
            "would be lent now: i0",
        )
        listed = await cell.ask(ListLoans())
        assert isinstance(listed, Loans)
        assert listed.rows == ()


async def test_act_lends_and_takes_back_when_load_rises() -> None:
    """The whole loop of one loan: out, preempted by load, and home again by its deadline."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        job_id = (await on_loan(cell, coordinator))[-1]
        await cell.clock.advance(20.0)
        state = coordinator.engine.state
        coordinator.decider.post(LoadMeasured(service=CHAT, load=9.0))
        await cell.until(lambda: state.nodes[NodeName("i0")].role == NodeRole.SERVING)
        [loan] = state.loans.values()
        assert loan.returned_at_s is not None
        assert state.counters.reclaims_late == 0
        assert (job(coordinator, job_id).state, job(coordinator, job_id).counts.preemptions) == (
            JobState.PENDING,
            1,
        )
        assert coordinator.engine.check() == []


async def test_a_frozen_cell_decides_nothing_until_it_thaws() -> None:
    """Freeze: jobs wait, nodes stay; thaw: at once they go on. Across a restart too."""
    async with Cell(inference=1) as cell:
        await cell.lead(settings=make_settings(mode=Mode.OBSERVE))
        assert isinstance(await cell.ask(Operate(action="freeze"), tenant="ops"), Done)
        await cell.leaders[0].crash()
        coordinator = await cell.lead("two")
        job_id = await submit(cell)
        await cell.clock.advance(40.0)
        assert job(coordinator, job_id).state == JobState.PENDING
        assert coordinator.engine.state.nodes[NodeName("i0")].role == NodeRole.SERVING
        status = await cell.ask(GetStatus())
        assert isinstance(status, Status)
        assert status.is_frozen
        jobs = await cell.ask(ListJobs())
        assert isinstance(jobs, Jobs)
        assert "frozen" in jobs.rows[0].blockers[0]
        await cell.ask(Operate(action="thaw"), tenant="ops")
        await cell.until(lambda: job(coordinator, job_id).state == JobState.RUNNING)


async def test_a_recall_brings_home_what_is_lent_even_while_frozen() -> None:
    """An order of a person needs no decision, and nothing is lent again before it ends."""
    async with Cell(training=0, inference=1) as cell:
        coordinator = await cell.lead()
        [job_id] = await on_loan(cell, coordinator)
        await cell.ask(Operate(action="freeze"), tenant="ops")
        await cell.ask(Operate(action="recall"), tenant="ops")
        refused = await cell.agents["i0"].renew()
        assert not refused.is_granted
        assert "called back" in refused.reason
        node = coordinator.engine.state.nodes[NodeName("i0")]
        await cell.until(lambda: node.role == NodeRole.SERVING)
        await cell.ask(Operate(action="thaw"), tenant="ops")
        await cell.clock.advance(30.0)
        assert node.role == NodeRole.SERVING
        assert job(coordinator, job_id).state == JobState.PENDING
        await cell.ask(Operate(action="end_recall"), tenant="ops")
        await cell.until(lambda: job(coordinator, job_id).state == JobState.RUNNING)


async def test_a_mode_is_refused_for_a_service_that_left_the_settings() -> None:
    """The order would change nothing, and lie in wait until the name is used again."""
    async with Cell(inference=1) as cell:
        await cell.lead()
        await cell.leaders[0].crash()
        (service,) = SETTINGS.engine.services
        renamed = structs.replace(service, name="talk")
        engine = structs.replace(SETTINGS.engine, services=(renamed,))
        coordinator = await cell.lead("two", structs.replace(SETTINGS, engine=engine))
        order = Operate(action=OperatorAction.SET_MODE, target=CHAT, value=Mode.OBSERVE)
        refusal = await cell.ask(order, tenant="ops")
        assert isinstance(refusal, ApiError)
        assert (refusal.code, refusal.field) == (ApiErrorCode.NOT_FOUND, "service")
        assert refusal.message.startswith("no service 'chat'; known: talk; chat is not in the set")
        assert coordinator.engine.state.services[CHAT].mode == Mode.ACT
        of_all = structs.replace(order, target="")
        assert isinstance(await cell.ask(of_all, tenant="ops"), Done)


async def test_only_operators_operate() -> None:
    """Another tenant changes nothing and is told whose right it is."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        reply = await cell.ask(Operate(action="freeze"))
        assert isinstance(reply, ApiError)
        assert (reply.code, reply.field) == (ApiErrorCode.DENIED, "tenant")
        assert not coordinator.engine.state.is_frozen


# --- renewals --------------------------------------------------------------------------------


async def test_a_lease_is_renewed_only_while_somebody_leads() -> None:
    """No leader, no answer: the node comes home at the end of its TTL by itself."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        agent = cell.agents["i0"]
        granted = await agent.renew()
        assert (granted.is_granted, granted.ttl_s, granted.epoch) == (True, LEASE_TTL_S, 1)
        await cell.leaders[0].crash()
        with pytest.raises(Unavailable):
            await agent.renew()


async def test_a_leader_that_lost_its_lease_renews_nothing() -> None:
    """Its own clock says that its time is over: no answer, though it still listens."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        coordinator.is_leading = False
        with pytest.raises(Unavailable):
            await cell.agents["i0"].renew()
        assert coordinator.renewals.unanswered == 1


async def test_a_leader_that_does_not_decide_renews_nothing() -> None:
    """Its journal hangs, so it passes no more: leases run out although it listens."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        cell.leaders[0].journal.is_down = True
        await cell.clock.advance(4 * SETTINGS.pass_period_s)
        with pytest.raises(Unavailable):
            await cell.agents["i0"].renew()


async def test_a_node_that_is_not_heard_gets_no_renewal() -> None:
    """Its reports do not arrive, so nobody knows what it does."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        cell.agents["i0"].is_silent = True
        await cell.clock.advance(2 * SETTINGS.lost_after_s)
        with pytest.raises(Unavailable):
            await cell.agents["i0"].renew()


async def test_a_change_of_the_leader_ends_no_loan() -> None:
    """While the new leader has not heard the node yet it says nothing; a refusal would end it."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        job_id = (await on_loan(cell, coordinator))[-1]
        agent = cell.agents["i0"]
        agent.is_silent = True
        await cell.leaders[0].crash()
        again = cell.launch("two").coordinator
        await cell.until(lambda: again.is_leading)
        with pytest.raises(Unavailable):
            await agent.renew()
        await cell.clock.advance(SETTINGS.coalesce_s)
        agent.is_silent = False
        await agent.report()  # it is heard, and not yet in the journal
        with pytest.raises(Unavailable):
            await agent.renew()
        await cell.until(lambda: again.engine.state.nodes[agent.name].contact.is_heard)
        await cell.until(lambda: cell.is_obeyed(again))
        assert (await agent.renew()).is_granted
        assert job(again, job_id).state == JobState.RUNNING


async def test_a_service_of_a_frozen_cell_is_told_its_promise_and_has_it_kept() -> None:
    """Nothing more is lent, jobs wait, leases are renewed; and its node comes home for its load."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        assert isinstance(await cell.ask(Operate(action="freeze"), tenant="ops"), Done)
        found = await cell.ask(Describe(kind="service", name=CHAT))
        assert isinstance(found, Description)
        [said] = [why for why in found.why if "frozen" in why]
        assert "nodes that its load needs still come home" in said
        await submit(cell, "waits")
        await cell.clock.advance(3.0 * LEASE_TTL_S)
        node = coordinator.engine.state.nodes[NodeName("i0")]
        assert node.role == NodeRole.ON_LOAN
        coordinator.decider.post(LoadMeasured(service=CHAT, load=9.0))
        await cell.until(lambda: node.serving_since_s is not None)
        listed = await cell.ask(ListJobs(is_live_only=True))
        assert isinstance(listed, Jobs)
        waiting = [row for row in listed.rows if row.state == "pending"]
        assert {row.name for row in waiting} >= {"waits"}
        assert all("nothing is started, resized or lent" in row.blockers[0] for row in waiting)


I0 = NodeName("i0")


def revoked(cell: Cell) -> list[str]:
    """What the journal says was called back, by whatever name it has there."""
    asked = [entry.event for _, record in cell.journal() for entry in record.entries]
    return [
        event.target
        for event in asked
        if isinstance(event, OperatorAsked) and event.action == OperatorAction.REVOKE_LOAN
    ]


@pytest.mark.parametrize("is_by_node", [False, True])
async def test_a_loan_is_revoked_by_its_id_or_its_node(is_by_node: bool) -> None:
    """Either names it, what is answered and recorded is its id, and the node comes home."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        [loan] = coordinator.engine.state.loans.values()
        order = Operate(
            action=OperatorAction.REVOKE_LOAN, target=I0 if is_by_node else loan.lease_id
        )
        assert await cell.ask(order, tenant="ops") == Done(detail=f"revoke_loan {loan.lease_id}")
        assert revoked(cell) == [loan.lease_id]
        nodes = coordinator.engine.state.nodes
        await cell.until(lambda: nodes[I0].role == NodeRole.SERVING)
        assert loan.returned_at_s is not None


async def test_a_node_that_is_not_lent_is_not_revoked() -> None:
    """Neither one that came home, nor one that never left, nor one that nobody knows."""
    async with Cell(inference=2) as cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        [loan] = coordinator.engine.state.loans.values()
        other = next(name for name in coordinator.engine.state.nodes if name != loan.node)
        order = Operate(action=OperatorAction.REVOKE_LOAN, target=loan.node)
        await cell.ask(order, tenant="ops")
        await cell.until(lambda: loan.returned_at_s is not None)
        before = revoked(cell)
        home = f"there is no loan of {loan.node}, which is serving"
        over = f"loan {loan.lease_id} came home already: {home}"
        never = (
            f"there is no loan of {other}, which is {coordinator.engine.state.nodes[other].role}"
        )
        for target, code, said in (
            (loan.node, ApiErrorCode.CONFLICT, home),
            (loan.lease_id, ApiErrorCode.CONFLICT, over),
            (other, ApiErrorCode.NOT_FOUND, never),
            ("t9", ApiErrorCode.NOT_FOUND, "no loan 't9'; known: "),
            ("", ApiErrorCode.NOT_FOUND, "no loan ''; known: "),
        ):
            order = Operate(action=OperatorAction.REVOKE_LOAN, target=target)
            refused = await cell.ask(order, tenant="ops")
            assert isinstance(refused, ApiError)
            assert refused.code == code
            assert refused.message.startswith(said)
            assert refused.field
        assert revoked(cell) == before
