"""A ledger of this version, read by an agent that finds in words alone whose fault an end is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from agent.core.state import Memory, WorkerState, first_memory
from agent.storage.ledger import Ledger, last_record, peek
from common.faults import Fault
from common.messages import WorkerPhase
from common.oldfaults import said
from tests.agent.bench import order, settings

GONE = "the worker and its supervisor are gone"


class OldHeld(Struct):
    """What an agent of before the field reads of a worker, and reports."""

    phase: WorkerPhase
    error: str = ""


class OldMemory(Struct):
    """And of its ledger."""

    workers: dict[str, OldHeld]


def memory_of(error: str, fault: Fault, *, phase: WorkerPhase = WorkerPhase.EXITED) -> Memory:
    """A node's memory with one worker that is over."""
    found = first_memory(settings(), "boot-1")
    found.workers["j1.1.0"] = WorkerState(order=order(), phase=phase, error=error, fault=fault)
    return found


async def read_by_an_old_agent(state_dir: Path, memory: Memory) -> OldHeld:
    """The worker as such an agent has it when it was put back in the place of one of today."""
    ledger = Ledger(state_dir)
    await ledger.save(memory)
    ledger.close()
    payload, _ = last_record((state_dir / "ledger").read_bytes())
    return msgspec.msgpack.decode(payload, type=OldMemory).workers["j1.1.0"]


@pytest.mark.parametrize("phase", [WorkerPhase.EXITED, WorkerPhase.REFUSED])
@pytest.mark.parametrize("fault", list(Fault))
async def test_an_older_agent_tells_the_same_budget(
    tmp_path: Path, fault: Fault, phase: WorkerPhase
) -> None:
    """It reports the error as it finds it; a job is not charged for what its node did."""
    memory = memory_of(f"workdir {GONE}", fault, phase=phase)
    held = await read_by_an_old_agent(tmp_path, memory)
    found = said(held.error, is_refused=phase == WorkerPhase.REFUSED)
    assert found.fault.is_nodes == fault.is_nodes
    assert found.error == f"workdir {GONE}"


@pytest.mark.parametrize("error", [GONE, "", "node fault: of its own", f"node fault: {GONE}"])
@pytest.mark.parametrize("fault", list(Fault))
async def test_what_is_written_for_others_is_not_read_back(
    tmp_path: Path, error: str, fault: Fault
) -> None:
    """People are told the fault once, however often the agent starts anew; the worker that is held
    now is not changed by being written down."""
    memory = memory_of(error, fault)
    for _ in range(3):
        ledger = Ledger(tmp_path)
        ledger.load()
        await ledger.save(memory)
        ledger.close()
        assert memory == memory_of(error, fault)
        found = Ledger(tmp_path).load()
        assert found is not None
        assert found == peek(tmp_path) == memory_of(error, fault)
        memory = found
