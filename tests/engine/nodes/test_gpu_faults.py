"""Faults of GPUs take them out of use, and bring back what was mended; see `gpu_faults`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.messages import GpuHealth, RecoveryAction, WorkerPhase
from common.model import GpuUuid, JobState, Mode, NodeName, NodeRole, Pool
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.nodes import gpu_faults
from coordinator.engine.state.events import (
    FaultClass,
    GpuFact,
    GpuFaultFact,
    LeaderStarted,
    NodeReported,
    OperatorAction,
    OperatorAsked,
)
from coordinator.engine.state.settings import EngineSettings
from coordinator.policies.contract.decisions import Loan, Start
from coordinator.service.api.explain_job import reasons as explain_job
from coordinator.service.api.explain_node import reasons as explain_node
from coordinator.service.api.explain_service import why as why_of_service
from tests.harness.cluster.engine import CHAT
from tests.harness.cluster.scripted_nodes import GPUS, N, Reporting, facts, service, settings
from tests.tables import each_row

G0, G1 = GPUS
CLEAN = (None, RecoveryAction.NONE)
ASKS = [action for action in RecoveryAction if action not in CLEAN]


def xid(code: int, kind: FaultClass = FaultClass.GPU, *, count: int = 1) -> GpuFaultFact:
    """An XID of a class; 64 needs repair."""
    return GpuFaultFact(
        what=f"XID {code}",
        count=count,
        kind=kind,
        meaning="something broke",
        owner="operator",
        next_step="reset the GPU",
        needs_repair=code == 64,
    )


def training() -> Reporting:
    """A training node of two GPUs and nothing else."""
    return Reporting(Pool.TRAINING)


def lines(cell: Reporting) -> list[str]:
    """What was told of the node."""
    return [f"{line.what}: {line.reason}" for line in cell.engine.state.stories]


def starts(cell: Reporting) -> int:
    """Attempts that a pass begins now."""
    return sum(isinstance(one, Start) for one in cell.passes().decisions)


def uncordon(cell: Reporting) -> None:
    """An operator says that the node is well."""
    cell.handle(OperatorAsked(action=OperatorAction.UNCORDON, by="ops/ada", target=N))


@each_row("code", [48, 64, 79, 94, 95, 119, 120])
def test_nothing_new_begins_on_a_gpu_that_is_out(code: int) -> None:
    """A job of both GPUs waits and says why, one of a single GPU gets the other; an event, describe
    and explain name the fault, its owner and the next step, until an operator says it is well."""
    cell = training()
    cell.faults = {G0: (xid(code),)}
    cell.report()
    both = cell.submit("both", gpus=2)
    assert starts(cell) == 0
    assert any("1 GPU not well: 1 on n" in said for said in explain_job(cell.engine, both))
    [said] = [line for line in explain_node(cell.engine, cell.node) if "is out since" in line]
    assert f"XID {code}: something broke; next, by the operator: reset the GPU" in said
    assert any(line.startswith(f"GPU {G0} is out: XID {code}") for line in lines(cell))
    one = cell.submit("one", gpus=1)
    assert starts(cell) == 1
    assert one.workers[0].gpu_uuids == (GpuUuid(G1),)
    uncordon(cell)
    assert f"GPU {G0} is in use again: by ops/ada" in lines(cell)
    cell.report()
    cell.submit("two", gpus=1)
    assert starts(cell) == 1


def test_what_runs_on_it_goes_on() -> None:
    """A worker on a GPU that falls out is neither stopped nor counted as gone."""
    cell = training()
    job = cell.submit("j", gpus=2)
    cell.run(job)
    cell.faults = {G0: (xid(95),)}
    cell.report()
    cell.passes()
    assert job.state == JobState.RUNNING
    assert job.workers[0].stop is None


def test_a_fault_of_the_whole_node_closes_it() -> None:
    """Nothing begins on its other GPUs either, and explain says that it is the whole node."""
    cell = training()
    cell.faults = {G0: (xid(1, FaultClass.NODE),)}
    cell.report()
    cell.submit("one", gpus=1)
    assert starts(cell) == 0
    assert any("on the whole node" in line for line in explain_node(cell.engine, cell.node))
    cell.faults = {}
    cell.reboot(Pool.TRAINING, NodeRole.TRAINING)
    assert starts(cell) == 1


@pytest.mark.parametrize("kind", [FaultClass.INFO, FaultClass.JOB])
def test_a_fault_of_the_job_takes_no_gpu_out(kind: FaultClass) -> None:
    """It is told, and both GPUs are given out."""
    cell = training()
    cell.faults = {G0: (xid(13, kind),)}
    cell.report()
    cell.submit("both", gpus=2)
    assert any(line.startswith(f"GPU {G0}: XID 13") for line in lines(cell))
    assert starts(cell) == 1


@each_row("action", ASKS)
def test_the_driver_s_word_goes_before_the_catalogue_s(action: RecoveryAction) -> None:
    """What it asks a recovery for is out without any XID, as long as it asks, whoever says else."""
    cell = training()
    cell.recovery = {G0: action}
    cell.report()
    cell.submit("both", gpus=2)
    uncordon(cell)
    assert starts(cell) == 0
    assert any(f"GPU {G0} stays out: its driver still asks" in line for line in lines(cell))
    cell.recovery = {G0: RecoveryAction.NONE}
    cell.report()
    assert starts(cell) == 1


def test_a_driver_that_asks_for_nothing_keeps_the_gpu_in_use() -> None:
    """An XID that the catalogue would take it out for is told, and no more."""
    cell = training()
    cell.recovery = {G0: RecoveryAction.NONE}
    cell.faults = {G0: (xid(48),)}
    cell.report()
    cell.submit("both", gpus=2)
    assert any("its driver asks for no recovery" in line for line in lines(cell))
    assert starts(cell) == 1


@given(st.lists(st.sampled_from(["again", "silent", "lead", "agent", "sick", "well"]), max_size=8))
def test_a_fault_that_was_mended_does_not_come_back_by_itself(what: list[str]) -> None:
    """Whoever leads and however often the same count is told: one fault takes a GPU out once."""
    cell = training()
    fault = GpuFaultFact(what="uncorrected ECC errors", count=2, kind=FaultClass.GPU)
    cell.faults = {G0: (fault,)}
    cell.report()
    assert cell.node.out_uuids == {G0}
    uncordon(cell)
    for step in what:
        match step:
            case "lead":
                blob = cell.engine.encode_state()
                cell.engine = Engine(settings(), decode_state(blob))
                cell.handle(LeaderStarted(epoch=cell.engine.state.epoch + 1, holder="x"))
            case "sick":
                cell.health, cell.faults = {G0: GpuHealth.UNRESPONSIVE}, {}
            case _:
                cell.health, cell.faults = {}, {G0: (fault,)}
        cell.report()
        assert not cell.node.out_uuids
    cell.health, cell.faults = {}, {G0: (replace(fault, count=3),)}
    cell.report()
    assert cell.node.out_uuids == {G0}


def test_a_takeover_remembers_what_is_out() -> None:
    """The next leader knows it from the state, although the agent has started anew and tells of
    no XID any more."""
    cell = training()
    cell.faults = {G0: (xid(79),)}
    cell.report()
    cell.engine = Engine(settings(), decode_state(cell.engine.encode_state()))
    cell.handle(LeaderStarted(epoch=9, holder="x"))
    cell.faults = {}
    cell.report()
    cell.submit("both", gpus=2)
    assert starts(cell) == 0
    assert cell.node.out_uuids == {G0}


def test_a_new_boot_brings_back_what_needs_no_repair() -> None:
    """Only where the GPU is reported clean: not with errors that the boot did not take away, and
    not what somebody has to look at."""
    cell = training()
    cell.faults = {G0: (xid(48),), G1: (xid(64),)}
    cell.report()
    assert cell.node.out_uuids == {G0, G1}
    cell.faults = {G0: (GpuFaultFact(what="ECC", count=1, kind=FaultClass.GPU),)}
    cell.reboot(Pool.TRAINING, NodeRole.TRAINING)
    assert cell.node.out_uuids == {G0, G1}
    cell.faults = {}
    cell.reboot(Pool.TRAINING, NodeRole.TRAINING, boot="b3")
    assert cell.node.out_uuids == {G1}
    uncordon(cell)
    assert not cell.node.gpu_conditions


def test_programs_that_share_nothing_and_fail_on_one_gpu_make_it_suspect() -> None:
    """Three within hours take it out; the same job again and again does not, however often."""
    cell = training()
    for round_, name in enumerate(["a", "a", "a", "b", "c"], 1):
        if name not in cell.engine.state.jobs:
            for job in cell.engine.state.live():
                cell.workers = facts(job.workers.values(), WorkerPhase.EXITED)
                cell.report()
            cell.run(cell.submit(name, gpus=2))
        assert not cell.node.out_uuids
        cell.faults = {G0: (xid(13, FaultClass.JOB, count=round_),)}
        cell.report()
    assert cell.node.out_uuids == {G0}
    assert any("3 programs with nothing in common" in line for line in lines(cell))


def test_a_suspicion_fades() -> None:
    """After its half-life it counts half."""
    cell = training()
    job = cell.submit("a", gpus=2)
    cell.run(job)
    cell.faults = {G0: (xid(31, FaultClass.JOB),)}
    cell.report()
    condition = cell.node.gpu_conditions[GpuUuid(G0)]
    for after_s, score in ((0.0, 1.0), (100.0, 0.5), (300.0, 0.125)):
        said = gpu_faults.suspect_score(condition, cell.now_s + after_s, half_life_s=100.0)
        assert said == pytest.approx(score)


def fleet(*, nodes: int, share: float, least: int, count: int) -> Engine:
    """A cell of nodes with two GPUs each, of which so many had an XID 119 on their first."""
    engine = Engine(EngineSettings(gpus_out_ratio_max=share, gpus_out_min=least))
    engine.handle(LeaderStarted(epoch=1, holder="t"), now_s=0.0)
    for has_fault in (False, True):
        for number in range(nodes if not has_fault else count):
            faults = (xid(119),) if has_fault else ()
            event = NodeReported(
                node=NodeName(f"n{number}"),
                boot_id="b",
                home_pool=Pool.TRAINING,
                role=NodeRole.TRAINING,
                epoch=1,
                generation=0,
                gpus=(
                    GpuFact(GpuUuid(f"{number}-0"), "H100", faults=faults),
                    GpuFact(GpuUuid(f"{number}-1"), "H100"),
                ),
            )
            engine.handle(event, now_s=1.0)
    return engine


@given(
    nodes=st.integers(1, 12),
    share=st.floats(0, 1),
    least=st.integers(0, 4),
    count=st.integers(0, 12),
)
def test_a_driver_that_cries_of_every_gpu_does_not_empty_the_fleet(
    nodes: int, share: float, least: int, count: int
) -> None:
    """No more are out than the share or the least number. The breaker is open exactly where others
    would follow, it is told once, and one operator's word about the rest closes it."""
    count = min(nodes, count)
    engine = fleet(nodes=nodes, share=share, least=least, count=count)
    most = max(least, int(share * 2 * nodes))
    there, are_out = gpu_faults.shares(engine.state)
    assert (there, are_out) == (2 * nodes, min(count, most))
    assert (engine.state.breaker_since_s is not None) == (count > most)
    told = [line for line in engine.state.stories if line.what == "GPU breaker open"]
    assert len(told) == (count > most)
    for number in range(count):
        order = OperatorAsked(action=OperatorAction.UNCORDON, by="o", target=f"n{number}")
        engine.handle(order, now_s=2.0)
    assert engine.state.breaker_since_s is None
    assert engine.check() == []


def test_a_node_that_serves_is_not_lent_with_a_gpu_that_is_out() -> None:
    """Its server might not come back on it; the node and its service say so."""
    cell = Reporting(Pool.INFERENCE, service())
    cell.submit("j", gpus=1)
    cell.faults = {G1: (xid(95),)}
    cell.report()
    assert cell.loan_pass().decisions == ()
    of_service = why_of_service(cell.engine, CHAT, now_s=cell.now_s)
    assert f"{N} has 1 GPU not well: it is not lent" in of_service
    uncordon(cell)
    assert [type(decision) for decision in cell.loan_pass().decisions] == [Loan]


def test_a_lent_node_goes_home_with_a_gpu_that_is_out() -> None:
    """A fault keeps nobody from its service: the recall is ordered as of any other node."""
    cell = Reporting(Pool.INFERENCE, service())
    cell.submit("j", gpus=1)
    cell.lend()
    cell.faults = {G1: (xid(95),)}
    cell.report()
    cell.handle(OperatorAsked(action=OperatorAction.RECALL, by="ops/ada"))
    assert cell.node.desired.role == NodeRole.SERVING
    assert cell.node.lease is None


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
