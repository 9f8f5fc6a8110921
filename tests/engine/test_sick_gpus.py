"""A node that serves with a GPU that is not well is not lent: it might never serve again."""

from __future__ import annotations

import pytest

from common.messages import GpuHealth
from common.model import Mode, NodeRole, Pool
from coordinator.engine.state.events import OperatorAction, OperatorAsked
from coordinator.policies.contract.decisions import Loan
from coordinator.service.api.explain import node as explain_node
from coordinator.service.api.explain_service import why as why_of_service
from tests.engine.house import CHAT
from tests.engine.scripted_nodes import GPUS, N, Reporting, service

SICK = [health for health in GpuHealth if health != GpuHealth.OK]


def unwell(health: GpuHealth, mode: Mode = Mode.ACT) -> Reporting:
    """A node that serves, whose last GPU is so, and a job that the other one would do for."""
    cell = Reporting(Pool.INFERENCE, service(mode=mode))
    cell.submit("j", gpus=1)
    cell.health = {GPUS[-1]: health}
    cell.report()
    return cell


@pytest.mark.parametrize("health", SICK)
def test_it_is_not_lent_until_the_gpu_is_well_again(health: GpuHealth) -> None:
    """It serves on meanwhile, and explain says which GPU it is, of the node and of its service."""
    cell = unwell(health)
    assert cell.loan_pass().decisions == ()
    assert cell.node.role == NodeRole.SERVING
    said = explain_node(cell.engine, cell.node)
    assert any(f"GPU {GPUS[-1]} is {health}" in line for line in said)
    assert any("1 of its GPUs is not well" in line for line in said)
    of_service = why_of_service(cell.engine, CHAT, now_s=cell.now_s)
    assert f"{N} has 1 GPU not well: it is not lent" in of_service
    cell.health = {}
    cell.report()
    assert [type(decision) for decision in cell.loan_pass().decisions] == [Loan]


def test_a_recommendation_of_before_cannot_be_approved() -> None:
    """The GPU fell out between the two; the operator is told."""
    cell = unwell(GpuHealth.OK, Mode.RECOMMEND)
    cell.loan_pass()
    assert list(cell.engine.state.recommendations) == [N]
    cell.health = {GPUS[-1]: GpuHealth.LOST}
    cell.report()
    cell.handle(OperatorAsked(action=OperatorAction.APPROVE_LOAN, by="ops/ada", target=N))
    assert cell.node.lease is None
    [said] = [line for line in cell.engine.state.stories if line.what == "not lent"]
    assert f"GPU {GPUS[-1]} is lost" in said.reason
