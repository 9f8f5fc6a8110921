"""Explanations through the API, from the live state: why a job waits, why a node serves."""

from __future__ import annotations

import msgspec
import pytest

from common.api import Describe, Description, Submit, Submitted
from common.model import CheckpointSpec, GpuRequest, JobSpec, NodeName
from coordinator.engine.state.tables import DrainEntry
from coordinator.policies.contract.decisions import FAIR_SHARE, FRAGMENTATION, Loan
from coordinator.service.api import explain_job, explain_node
from tests.harness.cluster.coordinator import Cell, make_settings, make_spec
from tests.harness.cluster.engine import CHAT, EngineHarness


async def submit(cell: Cell, spec: JobSpec) -> str:
    """The id of a job that was acknowledged."""
    answer = await cell.ask(Submit(spec=spec, request_id=spec.name))
    assert isinstance(answer, Submitted), answer
    return answer.job_id


async def why(cell: Cell, kind: str, name: str) -> tuple[str, ...]:
    """The sentences of `explain`."""
    answer = await cell.ask(Describe(kind=kind, name=name))
    assert isinstance(answer, Description), answer
    return answer.why


async def waited_s(cell: Cell, name: str) -> dict[str, float]:
    """What a job has waited for, in seconds by kind."""
    answer = await cell.ask(Describe(kind="job", name=name))
    assert isinstance(answer, Description), answer
    assert answer.job is not None
    return answer.job.waited_s


def lasting(name: str, runtime_s: float) -> JobSpec:
    """A job that fills two nodes, of which there is one."""
    spec = make_spec(name, workers=(2, 2))
    return msgspec.structs.replace(spec, expected_runtime_s=runtime_s)


async def test_a_waiting_job_is_told_its_place_in_the_policys_own_order() -> None:
    """Shortest first: a job submitted last is number 1, and nobody is told who came before it."""
    async with Cell() as cell:
        await cell.lead()
        for name, runtime_s in (("slow", 900.0), ("quick", 60.0), ("middle", 300.0)):
            await submit(cell, lasting(name, runtime_s))
        for name, place in (("quick", 1), ("middle", 2), ("slow", 3)):
            reasons = await why(cell, "job", name)
            assert f"it is number {place} of 3 that wait, in the order of policy aryl" in reasons
            assert not [reason for reason in reasons if "submitted before" in reason]


@pytest.mark.parametrize("policy", ["pollux", "tetris", "themis"])
async def test_no_place_is_told_where_all_that_wait_are_weighed_anew(policy: str) -> None:
    """Any of them may be the next."""
    async with Cell() as cell:
        await cell.lead(settings=make_settings(policy=policy))
        for name in ("one", "two"):
            job_id = await submit(cell, lasting(name, 60.0))
        reasons = await why(cell, "job", job_id)
        assert (
            f"it is one of 2 that wait; policy {policy} ranks all of them at each pass" in reasons
        )


async def test_a_job_that_no_service_lends_to_is_told_so_while_all_nodes_serve() -> None:
    """Its grace is above what the service allows: true before any node is lent, and so said."""
    async with Cell(inference=1) as cell:
        await cell.lead()
        spec = make_spec("saves-long", workers=(2, 2))
        spec = msgspec.structs.replace(spec, checkpoint=CheckpointSpec(grace_s=30.0))
        reasons = await why(cell, "job", await submit(cell, spec))
        assert (
            "service chat: the job's grace 30 s exceeds the 5 s that chat allows, so chat's nodes "
            "are not lent to it" in reasons
        )


async def test_a_serving_node_is_told_why_it_is_not_lent() -> None:
    """The service's balance and what keeps it; a training node has nothing to say of loans."""
    async with Cell(inference=1) as cell:
        await cell.lead()
        reasons = await why(cell, "node", "i0")
        assert [reason for reason in reasons if reason.startswith("chat: load forecast")]
        assert "no job that waits or could grow wants more GPUs on lent nodes" in reasons
        assert not [reason for reason in await why(cell, "node", "t0") if "load" in reason]


@pytest.mark.parametrize("beside", ["", "unroute command: sh exited with 1", "lease l1-10"])
def test_a_lent_node_says_its_lease_once(beside: str) -> None:
    """Its agent names it too, and what else the agent says stays."""
    harness = EngineHarness()
    harness.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    node = harness.node("i0")
    assert node.lease is not None
    own = f"lease {node.lease.lease_id}"
    node.detail = f"{own}; {beside}" if beside else own
    said = explain_node.reasons(harness.engine, node)
    assert f"lent by chat under {own}" in said
    assert not [line for line in said if line.split("; ")[0] == own]
    assert [line for line in said if line == beside] == ([beside] if beside else [])
    node.lease = None
    assert node.detail in explain_node.reasons(harness.engine, node)


async def test_an_estimate_counts_a_type_that_needs_more_workers() -> None:
    """Two workers of half the pace do what one of the reference type would: 600 s, not 300."""
    async with Cell(training=2) as cell:
        await cell.lead()
        slow = GpuRequest(worker_multiplier={"H100": 2})
        job_id = await submit(cell, msgspec.structs.replace(make_spec("slow"), gpu=slow))
        await cell.until(
            lambda: len(cell.agents["t0"].running() + cell.agents["t1"].running()) == 2
        )
        answer = await cell.ask(Describe(kind="job", name=job_id))
        assert isinstance(answer, Description), answer
        left_s, words = answer.estimate.split(" s left ")
        assert words == "with 2 workers (source: declared)"
        assert 500 < int(left_s) <= 600


async def test_a_waiting_job_is_told_how_long_it_waited_for_what() -> None:
    """The seconds by kind go on between passes, and none is counted for a job that runs."""
    async with Cell() as cell:
        await cell.lead(settings=make_settings(policy="philly"))
        runs = await submit(cell, make_spec("runs"))
        await cell.until(lambda: len(cell.agents["t0"].running()) == 1)
        job_id = await submit(cell, make_spec("waits"))
        await cell.clock.advance(30.0)
        first = await waited_s(cell, job_id)
        await cell.clock.advance(3.0)
        second = await waited_s(cell, job_id)
        assert set(second) <= {FAIR_SHARE, FRAGMENTATION}
        assert sum(first.values()) > 0
        assert sum(second.values()) - sum(first.values()) == pytest.approx(3.0)
        assert await waited_s(cell, runs) == {}


def test_all_ages_of_an_answer_are_of_the_instant_that_it_is_asked_for() -> None:
    """A cell in which nothing happens has an old last event: nobody's time stands still for it."""
    harness = EngineHarness()
    job = harness.submit("runs", work_s=1000.0)
    harness.start(job, "t0")
    harness.wait(10.0)
    now_s = harness.engine.state.now_s
    harness.engine.state.drains[NodeName("t0")] = DrainEntry(until_s=now_s + 90.0, reason="drained")
    node = harness.node("t0")
    node.cordon.is_cordoned = node.cordon.is_draining = True

    def said(after_s: float) -> tuple[str, str, str]:
        at_s = now_s + after_s
        return (
            " ".join(explain_node.reasons(harness.engine, node, now_s=at_s)),
            " ".join(explain_job.reasons(harness.engine, job, now_s=at_s)),
            explain_job.estimate(harness.engine, job, now_s=at_s),
        )

    first_s = float(said(0.0)[2].split()[0])
    for after_s in (0.0, 30.0):
        of_node, of_job, left = said(after_s)
        assert f"may go on for {90.0 - after_s:.0f} s" in of_node
        assert f"unless it ends in {90.0 - after_s:.0f} s" in of_job
        assert float(left.split()[0]) == pytest.approx(first_s - after_s, abs=1.0)
