"""Foreign GPU processes: told once, and a node that serves beside one is not lent."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from common.model import GpuUuid, Mode, Pool
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.nodes.foreign_processes import QUIET_S, STORIES_KEPT
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import (
    Event,
    NodeReported,
    OperatorAction,
    OperatorAsked,
    TrespassFact,
)
from coordinator.policies.contract.decisions import Loan
from coordinator.service.api.explain_node import reasons as explain_node
from coordinator.service.api.explain_service import why as why_of_service
from tests.harness.cluster.engine import CHAT
from tests.harness.cluster.scripted_nodes import GPUS, N, Reporting, service

EVE = "uid 1001: train"


class Cell(Reporting):
    """A node that trains, beside whom a test says."""

    def __init__(self) -> None:
        self.trespasses: tuple[TrespassFact, ...] = ()
        super().__init__(Pool.TRAINING)

    def handle(self, event: Event) -> Outcome:
        """Reports say who is on the GPUs."""
        if isinstance(event, NodeReported):
            event = replace(event, trespasses=self.trespasses)
        return super().handle(event)

    def has(self, *pids: int, owner: str = EVE, gpu: str = GPUS[0]) -> None:
        """The node reports these on a GPU, a second later."""
        self.trespasses = tuple(TrespassFact(pid, GpuUuid(gpu), owner) for pid in pids)
        self.report()

    def crashes(self, times: int, *, first_pid: int = 100, owner: str = EVE) -> None:
        """A program that ends and is started again, a second each."""
        for number in range(times):
            self.has(first_pid + number, owner=owner)
            self.has()

    def lines(self) -> list[tuple[str, str]]:
        """What was told of them: what happened, and why that matters."""
        stories = self.engine.state.stories
        return [(line.what, line.reason) for line in stories if line.what.startswith("trespass")]


@pytest.mark.parametrize("owner", [EVE, ""])
def test_a_program_that_crashes_in_a_loop_is_told_once(owner: str) -> None:
    """Each time it is another process; of an agent that tells no owner, whoever is on that GPU."""
    cell = Cell()
    cell.crashes(500, owner=owner)
    [(what, why)] = cell.lines()
    assert what == f"trespass: process 100 on {GPUS[0]}"
    assert ("it is of uid 1001: train" in why) == bool(owner)


def test_one_that_comes_while_the_last_is_still_there_is_of_the_same_story() -> None:
    """A supervisor may start it before the old one has gone."""
    cell = Cell()
    for pid in range(100, 150):
        cell.has(pid, pid + 1)
    assert len(cell.lines()) == 1


def test_after_a_quiet_while_the_next_is_told_with_how_many_there_were() -> None:
    """Nobody has to count lines to know how bad it was."""
    cell = Cell()
    cell.crashes(10)
    cell.now_s += QUIET_S - 2.0
    cell.has(200)
    assert len(cell.lines()) == 1
    cell.has()
    cell.now_s += QUIET_S
    cell.crashes(5, first_pid=300)
    [_, (what, why)] = cell.lines()
    assert what == f"trespass: process 300 on {GPUS[0]}"
    assert why.endswith("; 10 more of these processes seen since the last report")
    cell.now_s += QUIET_S
    cell.has(400)
    assert "; 4 more of these processes" in cell.lines()[2][1]


def test_another_user_or_program_and_another_gpu_are_another_story() -> None:
    """Also where two of them take turns."""
    cell = Cell()
    for number in range(20):
        cell.has(100 + number)
        cell.has(500 + number, owner="uid 1002: train")
        cell.has(900 + number, owner="uid 1001: notebook")
        cell.has(1300 + number, gpu=GPUS[1])
    assert [what.split()[2] for what, _ in cell.lines()] == ["100", "500", "900", "1300"]


def test_a_process_that_goes_to_another_gpu_has_left_the_first_one() -> None:
    """Who comes there a quiet while later is told, though the same process is about."""
    cell = Cell()
    cell.has(100)
    cell.has(100, gpu=GPUS[1])
    cell.now_s += QUIET_S
    cell.has(200)
    told = [what.removeprefix("trespass: process ") for what, _ in cell.lines()]
    assert told == [f"100 on {GPUS[0]}", f"100 on {GPUS[1]}", f"200 on {GPUS[0]}"]


def test_a_process_that_was_told_is_not_told_again_however_long_it_was_away() -> None:
    """It is the same one, and may be on its GPU now and then."""
    cell = Cell()
    cell.has(100)
    cell.has()
    cell.now_s += 10 * QUIET_S
    cell.has(100)
    assert len(cell.lines()) == 1


def test_a_process_that_changes_its_name_is_told_once() -> None:
    """As those of Ray and vLLM do, which write into it what they do; it is the same one, and what
    comes in its place is found by the name that it had first."""
    cell = Cell()
    for number in range(50):
        cell.has(100, owner=f"uid 1001: ray::step{number}")
    cell.has()
    cell.has(101, owner="uid 1001: ray::step0")
    assert [what.split()[2] for what, _ in cell.lines()] == ["100"]
    cell.has(101, 102, owner="uid 1001: ray::step49")
    assert [what.split()[2] for what, _ in cell.lines()] == ["100", "102"]


def test_two_of_whom_nobody_knows_whose_they_are_are_told_each() -> None:
    """Of one that is gone nobody tells the owner: what is there beside another one is no crash of
    it, and what comes when it has left may be."""
    cell = Cell()
    cell.has(100, owner="")
    cell.has(100, 200, owner="")
    assert [what.split()[2] for what, _ in cell.lines()] == ["100", "200"]
    for pid in range(300, 350):
        cell.has(100, pid, owner="")
    assert len(cell.lines()) == 2


def test_whose_a_process_is_may_be_learnt_later() -> None:
    """From then on it is that program's."""
    cell = Cell()
    cell.has(100, owner="")
    cell.has(100, owner=EVE)
    cell.has(101, owner=EVE)
    assert len(cell.lines()) == 1


def test_after_a_boot_a_number_is_another_process() -> None:
    """Those that were told have gone with the boot."""
    cell = Cell()
    cell.has(100)
    cell.boot = "b2"
    cell.has(100)
    assert len(cell.lines()) == 2
    assert [story.pids for story in cell.node.trespass_stories] == [[100]]


def test_what_is_known_of_them_is_bounded_and_outlives_the_leader() -> None:
    """A new one tells nobody of whom the old one told; a node with crowds on it costs no more."""
    cell = Cell()
    cell.crashes(5)
    cell.engine = Engine(cell.engine.settings, decode_state(cell.engine.encode_state()))
    cell.crashes(5, first_pid=200)
    assert len(cell.lines()) == 1
    for number in range(2 * STORIES_KEPT):
        cell.has(1000 + number, owner=f"uid {number}: x")
    assert len(cell.node.trespass_stories) == STORIES_KEPT


class ServingCell(Reporting):
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
    cell = ServingCell()
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
    cell = ServingCell(Mode.RECOMMEND)
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
    cell = ServingCell()
    for trespasses in ((TrespassFact(4711, GpuUuid(GPUS[0])),), ()):
        cell.trespasses = trespasses
        assert cell.report().needs_loan_pass
    assert not cell.report().needs_loan_pass
