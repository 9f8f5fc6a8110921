"""Lent nodes on which nothing runs: which waiting jobs keep them lent, and what `explain` says."""

from __future__ import annotations

import pytest
from hypothesis import given
from msgspec import UNSET, structs

from common.model import (
    CheckpointSpec,
    GpuRequest,
    JobState,
    NodeRole,
    Pool,
    Preemptibility,
    WorkerRange,
)
from coordinator.engine.state.events import (
    JobCancelRequested,
    LeaderStarted,
    LoanPassDue,
    OperatorAction,
    OperatorAsked,
)
from coordinator.engine.state.settings import EngineSettings, TenantSettings
from coordinator.service.api import explain_node
from tests.draws import together
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import state
from tests.harness.cluster.scripted_nodes import Lending, N, Reporting, service

LIMIT_S = 600.0


def settings(cell: Reporting | Lending, *tenants: TenantSettings) -> EngineSettings:
    """Those of the cell, with the time limit of idle loans."""
    return structs.replace(cell.engine.settings, idle_return_s=LIMIT_S, tenants=tenants)


def idle(*tenants: TenantSettings) -> Reporting:
    """A cell of one node of two GPUs that is lent, and on which nothing runs."""
    cell = Reporting(Pool.INFERENCE, service())
    asks = cell.submit("asks", gpus=2)
    cell.lend()
    cell.handle(JobCancelRequested(job_id=asks.job_id, by="t/u"))
    cell.handle(LeaderStarted(epoch=2, holder="t", settings=settings(cell, *tenants)))
    cell.report()
    return cell


def goes_home(cell: Reporting, idle_s: float = LIMIT_S + 100.0) -> bool:
    """Whether the next loan pass recalls the node, after nothing ran on it for `idle_s`."""
    cell.now_s = cell.engine.state.idle_loans_since_s[N] + idle_s
    cell.report()
    cell.handle(LoanPassDue())
    return cell.node.desired.role == NodeRole.SERVING


@pytest.mark.parametrize(
    ("idle_s", "gpus", "is_home"),
    [(500.0, 0, False), (700.0, 0, True), (700.0, 2, False), (700.0, 9, True)],
)
def test_an_idle_loan_goes_home_unless_a_waiting_job_could_use_it(
    idle_s: float, gpus: int, *, is_home: bool
) -> None:
    """After `idle_return_s` on which nothing ran there. A job larger than the cell never starts,
    and keeps no node."""
    cell = idle()
    if gpus:
        cell.submit("waits", gpus=gpus)
    assert goes_home(cell, idle_s) == is_home
    if is_home:
        [loan] = cell.engine.state.loans.values()
        assert loan.reclaim_reason.endswith("and no waiting job could use it (idle_return_s)")


JOBS = together(
    (1, 2, 3),  # GPUs of a worker
    ((1, 1), (1, 2), (2, 2), (2, 3)),
    ((), ("H100",), ("A100",), ("A100", "H100")),
    tuple(Preemptibility),
    (30.0, 1e5),  # its grace
    (UNSET, ("n",), ("other",)),
    (UNSET, ("n",)),
    (None, 0, 1, 2),  # the borrow limit of its tenant
    (False, False, True),  # is held
)


@given(JOBS)
def test_a_job_keeps_the_node_of_a_cell_exactly_if_a_pass_would_start_it_there(
    drawn: tuple[object, ...],
) -> None:
    """So an infeasible job keeps none: by size, type, selection, grace, hold, or tenant."""
    gpus, workers, types, preemptibility, grace_s, only, never, limit_gpus, is_held = drawn
    assert isinstance(workers, tuple)
    base = make_spec(name="waits", command=("train",), workers=(workers[0], workers[1]))
    spec = structs.replace(
        base,
        gpus_per_worker=gpus,
        gpu=structs.replace(GpuRequest(), types=types),
        preemptibility=preemptibility,
        checkpoint=structs.replace(CheckpointSpec(), grace_s=grace_s),
        require_nodes=only,
        exclude_nodes=never,
        is_held=is_held or UNSET,
    )
    tenant = structs.replace(TenantSettings(name="t"), borrow_limit_gpus=limit_gpus)
    cell = idle(*(() if limit_gpus is None else (tenant,)))
    job = cell.submitted(spec)
    is_home = goes_home(cell)
    if not is_home:
        cell.passes()
    assert (state(job) == JobState.STARTING) != is_home


@pytest.mark.parametrize(
    ("fields", "is_home"),
    [
        ({}, False),
        ({"preemptibility": Preemptibility.NON}, True),
        ({"preemptibility": Preemptibility.SEMI}, True),
        ({"preemptibility": Preemptibility.SEMI, "workers": WorkerRange(min=1, max=2)}, False),
        ({"checkpoint": CheckpointSpec(grace_s=1e5)}, True),
        ({"exclude_nodes": ("i0",)}, True),
        ({"require_nodes": ("t0",)}, True),
    ],
)
def test_a_job_that_only_the_training_node_may_run_keeps_no_lent_node(
    fields: dict[str, object], *, is_home: bool
) -> None:
    """The training node is busy, so the job waits. A `semi` job may have flexible workers alone on
    a lent node."""
    cell = Lending(nodes=1)
    asks = cell.submit("asks")
    [name] = cell.lends()
    cell.handle(JobCancelRequested(job_id=asks.job_id, by="t/u"))
    cell.handle(LeaderStarted(epoch=2, holder="t", settings=settings(cell)))
    cell.report(name, NodeRole.ON_LOAN)
    job = cell.submitted(structs.replace(make_spec("waits", gpus_per_worker=2), **fields))
    assert cell.engine.explain.why_never(job.job_id) == ()
    cell.now_s += LIMIT_S
    cell.handle(LoanPassDue())
    assert (cell.node(name).desired.role == NodeRole.SERVING) == is_home


def test_explain_says_which_job_keeps_an_idle_node_or_when_it_returns() -> None:
    """The answer is the rule's own; without the limit, or in a frozen cell, there is none."""
    cell = idle()

    def why() -> list[str]:
        said = explain_node.reasons(cell.engine, cell.node)
        return [one for one in said if one.startswith("nothing has run on it for ")]

    cell.submit("large", gpus=9)
    [said] = why()
    assert said.endswith(
        "no waiting job could use it: it returns at the first loan pass after 600 s (idle_return_s)"
    )
    cell.submit("fits", gpus=2)
    [said] = why()
    assert said.endswith("it stays lent, because job fits waits and could use it")
    assert not goes_home(cell)
    cell.handle(OperatorAsked(action=OperatorAction.FREEZE, by="ops/ada"))
    assert why() == []
    cell.handle(OperatorAsked(action=OperatorAction.THAW, by="ops/ada"))
    unlimited = structs.replace(cell.engine.settings, idle_return_s=None)
    cell.handle(LeaderStarted(epoch=3, holder="t", settings=unlimited))
    cell.report()
    assert why() == []
