"""Rows of tenants, as `aryl tenant list` shows them."""

from __future__ import annotations

from msgspec.structs import replace

from common.model import GpuUuid, JobState
from coordinator.cli.columns import tenants
from coordinator.policies.contract.snapshot import JobView, TenantView
from coordinator.service.api.rows import tenant_rows
from tests.builders import make_job_view, make_node_view, make_snapshot, make_worker_view


def job(name: str, tenant: str, gpus: int, *, runs: bool) -> JobView:
    """One worker, that waits or runs."""
    made = make_job_view(
        name,
        gpus_per_worker=gpus,
        state=JobState.RUNNING if runs else JobState.PENDING,
        placed=[make_worker_view(name, 0, "n0", gpus=gpus)] if runs else (),
    )
    return replace(made, tenant=tenant)


def test_a_row_counts_all_below_a_tenant() -> None:
    """Use, waiting demand and fair share of a division are those of its teams."""
    running = job("r", "team", 6, runs=True)
    snapshot = replace(
        make_snapshot(
            nodes=[make_node_view("n0", workers=running.placed)],
            jobs=[running, job("w", "team", 4, runs=False), job("x", "other", 8, runs=False)],
        ),
        tenants=(
            TenantView(name="division", guarantee_gpus=4),
            TenantView(name="team", parent="division", guarantee_gpus=2),
        ),
    )
    rows = {row.tenant: row for row in tenant_rows(snapshot)}
    assert list(rows) == ["division", "other", "team"]
    division = rows["division"]
    assert (division.used_gpus, division.borrowed_gpus, division.waiting_gpus) == (6, 2, 4)
    assert (division.fair_share_gpus, rows["other"].fair_share_gpus) == (6.0, 2.0)
    assert (rows["team"].borrowed_gpus, rows["other"].waiting_gpus) == (4, 8)


def test_tenants_that_share_gpus_have_parts_of_them() -> None:
    """Three that take turns on two GPUs; a whole number stays one, also in JSON."""
    named = tuple(GpuUuid(f"GPU-{n}") for n in range(2))
    jobs = [job(name, name, 2, runs=True) for name in ("a", "b", "c")]
    shared = [replace(each, placed=(replace(each.placed[0], gpu_uuids=named),)) for each in jobs]
    own = replace(job("d", "d", 4, runs=True))
    snapshot = make_snapshot(nodes=[make_node_view("n0", free_gpus=2)], jobs=[*shared, own])
    used = {row.tenant: row.used_gpus for row in tenant_rows(snapshot)}
    assert used == {"a": 2 / 3, "b": 2 / 3, "c": 2 / 3, "d": 4}
    assert isinstance(used["d"], int)
    table = [column.value(row) for row in tenant_rows(snapshot)[:1] for column in tenants()]
    assert "0.7" in table
