"""A node that serves beside a process of nobody's is not lent: no worker could have the GPU, and
its server might not find room beside that process again."""

from __future__ import annotations

import msgspec

from common.model import GpuUuid, Mode, Pool
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import (
    Event,
    NodeReported,
    OperatorAction,
    OperatorAsked,
    TrespassFact,
)
from coordinator.policies.contract.decisions import Loan
from coordinator.service.api.explain import node as explain_node
from coordinator.service.api.explain_service import why as why_of_service
from tests.engine.house import CHAT
from tests.engine.scripted_nodes import GPUS, N, Reporting, service


class Cell(Reporting):
    """A node that serves, whose reports a test adds to, and a job that one GPU would do for."""

    def __init__(self, mode: Mode = Mode.ACT) -> None:
        self.trespasses: tuple[TrespassFact, ...] = ()
        super().__init__(Pool.INFERENCE, service(mode=mode))
        self.submit("j", gpus=1)

    def handle(self, event: Event) -> Outcome:
        """Reports say who is on the GPUs."""
        if isinstance(event, NodeReported):
            event = msgspec.structs.replace(event, trespasses=self.trespasses)
        return super().handle(event)

    def comes(self) -> None:
        """A process is on the last GPU."""
        self.trespasses = (TrespassFact(4711, GpuUuid(GPUS[-1])),)
        self.report()


def test_it_is_not_lent_until_the_process_has_gone() -> None:
    """It serves on meanwhile, and explain names process and GPU, of the node and of its service."""
    cell = Cell()
    cell.comes()
    assert cell.loan_pass().decisions == ()
    said = explain_node(cell.engine, cell.node)
    named = f"GPU {GPUS[-1]} is used by process 4711, which no worker was granted it for and that"
    assert any(line.startswith(named) and line.endswith("is not lent") for line in said)
    assert any("1 of its GPUs is used by a process that is not its server's" in w for w in said)
    of_service = why_of_service(cell.engine, CHAT, now_s=cell.now_s)
    assert f"{N} has 1 GPU used by a foreign process: it is not lent" in of_service
    cell.trespasses = ()
    cell.report()
    assert [type(decision) for decision in cell.loan_pass().decisions] == [Loan]


def test_a_recommendation_of_before_the_process_came_cannot_be_approved() -> None:
    """The operator is told whose process it is."""
    cell = Cell(Mode.RECOMMEND)
    cell.loan_pass()
    assert list(cell.engine.state.recommendations) == [N]
    cell.comes()
    cell.handle(OperatorAsked(action=OperatorAction.APPROVE_LOAN, by="ops/ada", target=N))
    assert cell.node.lease is None
    [said] = [line for line in cell.engine.state.stories if line.what == "not lent"]
    assert said.reason.endswith(
        f"its GPU {GPUS[-1]} is used by process 4711, which is not its server's"
    )


def test_a_process_that_comes_or_goes_asks_for_a_loan_pass() -> None:
    """What may be lent is another then, and the next period may be half a minute away."""
    cell = Cell()
    for trespasses in ((TrespassFact(4711, GpuUuid(GPUS[0])),), ()):
        cell.trespasses = trespasses
        assert cell.report().needs_loan_pass
    assert not cell.report().needs_loan_pass
