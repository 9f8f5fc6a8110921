"""Plans as requests: who may ask, and what is refused before anything is played."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from common.api import ApiError, ApiErrorCode
from common.errors import Unavailable
from common.model import Dependency, DependencyKind
from common.plans import Plan, PlanKind
from coordinator.service.api import plans
from tests.harness.cluster.coordinator import Cell, make_spec
from tests.tables import each_row

TOO_LARGE = make_spec("new", gpus_per_worker=9)
AFTER_NONE = replace(
    make_spec("new"), depends_on=(Dependency(job="jnone", when=DependencyKind.OK),)
)
K = PlanKind
REFUSED: dict[str, tuple[str, dict[str, Any], ApiErrorCode, str]] = {
    "a drain by a tenant": ("team", {"kind": K.DRAIN}, ApiErrorCode.DENIED, "tenant"),
    "a recall by a tenant": ("team", {"kind": K.RECALL}, ApiErrorCode.DENIED, "tenant"),
    "no such node": ("ops", {"kind": K.DRAIN, "target": "x"}, ApiErrorCode.NOT_FOUND, "node"),
    "no such service": (
        "ops", {"kind": K.RECALL, "target": "x"}, ApiErrorCode.NOT_FOUND, "service",
    ),
    "no such lender": (
        "ops", {"kind": K.LOAN, "target": "t0"}, ApiErrorCode.NOT_FOUND, "service",
    ),
    "no job": ("team", {"kind": K.JOB}, ApiErrorCode.USAGE, "spec"),
    "a job after none": (
        "team", {"kind": K.JOB, "spec": AFTER_NONE}, ApiErrorCode.USAGE, "depends_on",
    ),
    "a job that is not known": (
        "team", {"kind": K.JOB, "target": "208"}, ApiErrorCode.NOT_FOUND, "job",
    ),
    "a spec and a job": (
        "team", {"kind": K.JOB, "spec": make_spec("new"), "target": "1"}, ApiErrorCode.USAGE,
        "target",
    ),
    "a queue of a job": ("team", {"kind": K.QUEUE, "target": "1"}, ApiErrorCode.USAGE, "target"),
    "a job for no node": (
        "team", {"kind": K.JOB, "spec": TOO_LARGE}, ApiErrorCode.USAGE, "gpus_per_worker",
    ),
}  # fmt: skip


@each_row("why", REFUSED)
async def test_a_plan_that_cannot_be_is_refused_by_its_field(why: str) -> None:
    """As the change itself would be; no process is started and nothing changes."""
    tenant, request, code, field = REFUSED[why]
    async with Cell() as cell:
        coordinator = await cell.lead()
        before = coordinator.engine.encode_state()
        reply = await cell.ask(Plan(**request), tenant=tenant)
        assert isinstance(reply, ApiError)
        assert (reply.code, reply.field) == (code, field)
        assert coordinator.engine.encode_state() == before


async def test_a_queue_of_plans_is_bounded() -> None:
    """One more than may wait is refused at once, and may ask again."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        played = plans.Plans(coordinator)
        played.waiting = plans.MAX_WAITING
        with pytest.raises(Unavailable, match="plans wait here"):
            await played.answer(Plan(kind=PlanKind.RECALL), "ops", "ada")
