"""A real cell's journal in the simulator: what real processes made it decide is decided again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from common.model import JobState, NodeRole
from coordinator.engine.record import decision_bytes
from coordinator.policies.contract.decisions import Decision, Loan, Reclaim, Resize, Start
from coordinator.sim.run.replay import replay
from tests.harness.live.cell import PERIODS, LiveHarness, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]

COUNTED = (
    "jobs_submitted",
    "jobs_finished",
    "loans",
    "reclaims",
    "preemptions",
    "resizes",
    "flexible_workers_released",
)


PATIENT = msgspec.structs.replace(PERIODS, lease_ttl_s=12.0, reclaim_deadline_s=25.0)
"""Leases outlive the takeover on a busy machine too: nodes come home because they are reclaimed."""


async def a_life_with_loans_and_reclaims(harness: LiveHarness) -> None:
    """An elastic job and a guest on lent nodes, a coordinator that dies, a load that rises."""
    elastic = harness.training("elastic", work_s=600, workers=(4, 8), save_every_s=600)
    first = await harness.submit(msgspec.structs.replace(elastic, expected_runtime_s=600.0))
    await harness.until_job(first, "has grown", lambda row: row.worker_count == 8)
    await harness.kill_coordinator()
    guest = await harness.submit(harness.training("guest", work_s=8, gpus=4))
    row = await harness.until_job(guest, "runs on a lent node", lambda row: bool(row.nodes))
    assert row.nodes != ("train-1",)
    async with harness.load(req_per_s=12.0):
        await harness.until_role(NodeRole.SERVING, 2)
        await harness.until_job(guest, "was preempted", lambda row: row.preemption_count == 1)
    await harness.until_state(guest, JobState.SUCCEEDED)


async def test_the_journal_of_a_real_cell_is_replayed_without_a_difference(tmp_path: Path) -> None:
    """Real agents, jobs, loans, reclaims and a killed coordinator: the same bytes are decided."""
    async with running_cell(
        tmp_path, training_nodes=1, inference_nodes=2, periods=PATIENT
    ) as harness:
        await a_life_with_loans_and_reclaims(harness)
        known = await harness.figures()
        records = await harness.journal()
    result = replay(records)
    assert result.differences == ()
    recorded = tuple(decision for _, record in records for decision in record.decisions)
    assert decision_bytes(result.decisions) == decision_bytes(recorded)
    kinds: set[type[Decision]] = {type(decision) for decision in result.decisions}
    assert {Start, Loan, Reclaim, Resize} <= kinds, kinds
    assert len({record.epoch for _, record in records}) == 2
    assert {name: getattr(result.figures, name) for name in COUNTED} == {
        name: known[name] for name in COUNTED
    }
