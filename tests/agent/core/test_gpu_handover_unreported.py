"""A driver that does not tell who is on a GPU: "not reported" is never read as "nobody"."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core import gpu_handover
from agent.core.gpu_handover import IDLE_BUSY_RATIO
from agent.core.state import Facts, first_memory
from agent.gpu.known_gpus import completed, identities, identity_only
from agent.telemetry.gpu_attribution import Look, Strangers
from common.faults import Fault
from common.messages import (
    UNTOLD_PID,
    GpuHealth,
    GpuProcess,
    GpuReport,
    MigInstance,
    NodeReport,
    OrderPhase,
    WorkerPhase,
)
from common.model import GpuUuid, NodeRole, Pool
from coordinator.service.nodes.report_folding import facts_of
from tests.harness.node.life import SERVER, LifeHarness, key, order, settings
from tests.tables import each_row

R = NodeRole
RATIO = 0.05
AFTER_S = 2.0
UUID = GpuUuid("GPU-0")


def seen(
    *,
    busy_ratio: float | None = 0.0,
    used: int = 0,
    processes: tuple[GpuProcess, ...] | None = None,
) -> GpuReport:
    """A GPU of 1000 bytes whose processes are not told."""
    return GpuReport(
        uuid=UUID,
        index=0,
        gpu_type="H100",
        memory_total_bytes=1000,
        memory_used_bytes=used,
        gpu_busy_ratio=busy_ratio,
        processes=processes,
    )


@given(st.none() | st.floats(0.0, 1.0), st.integers(0, 1000), st.booleans())
def test_a_gpu_in_use_is_not_free_where_nobody_is_told(
    busy_ratio: float | None, used: int, is_told: bool
) -> None:
    """Load or memory shows that somebody is there. An idle one is free, as it always was; and where
    nobody is told to be there, load alone is what the last one left behind."""
    gpu = seen(busy_ratio=busy_ratio, used=used, processes=() if is_told else None)
    is_loaded = busy_ratio is not None and busy_ratio > IDLE_BUSY_RATIO and not is_told
    is_free = used <= RATIO * 1000 and not is_loaded
    why = gpu_handover.busy(gpu, free_memory_ratio=RATIO)
    assert (why == "") == is_free
    assert why == "" or is_told or "does not report the processes" in why
    facts = Facts(now_s=2.0, gpus=(gpu,), sampled_at_s=1.0)
    for way in (gpu_handover.to_workers, gpu_handover.to_server):
        assert way(facts, since_s=0.0, free_memory_ratio=RATIO) == why


def test_nothing_told_is_no_proof_that_a_server_has_no_requests() -> None:
    """Neither processes nor load: memory alone does not show that nobody is there."""
    assert gpu_handover.are_unused([seen(processes=())], free_memory_ratio=RATIO)
    assert gpu_handover.are_unused([seen(busy_ratio=0.0)], free_memory_ratio=RATIO)
    assert not gpu_handover.are_unused([seen(busy_ratio=None)], free_memory_ratio=RATIO)
    assert not gpu_handover.are_unused([seen(busy_ratio=0.9)], free_memory_ratio=RATIO)


class Nobody:
    """A machine in which no process is anybody's kin."""

    def strangers(self, pids: set[int], owners: object) -> set[int]:
        return pids

    def beside_server(self, pids: set[int], server: object) -> set[int] | None:
        return pids


class Harness:
    """What a node concludes of its one GPU from samples a second apart."""

    def __init__(self, role: NodeRole) -> None:
        self.memory = first_memory(settings(inference=False), "boot-1")
        self.memory.role = role
        self.eye = Strangers(Nobody(), SERVER, after_s=AFTER_S, free_memory_ratio=RATIO)
        self.at_s = 0.0

    def saw(self, gpu: GpuReport, *, is_held: bool = False) -> list[int]:
        """The pids of strangers after one more sample."""
        self.at_s += 1.0
        held = frozenset([UUID]) if is_held else frozenset[GpuUuid]()
        look = Look(at_s=self.at_s, gpus=(gpu,), owners=(), is_healthy=True, held=held)
        self.eye.saw(look, self.memory)
        return [pid for pid, _ in self.eye.found]


@pytest.mark.parametrize("role", [R.TRAINING, R.ON_LOAN])
def test_a_gpu_in_use_without_a_worker_is_a_trespass_that_nobody_can_name(role: NodeRole) -> None:
    """Once it lasts, as what has just left shows for a moment; until it is idle, or a worker's."""
    harness = Harness(role)
    busy = seen(busy_ratio=0.9, used=30)
    assert [harness.saw(busy) for _ in range(3)] == [[], [], [UNTOLD_PID]]
    assert harness.memory.strangers == [], "no process to look for after a restart"
    assert harness.saw(busy, is_held=True) == []
    assert [harness.saw(busy) for _ in range(3)] == [[], [], [UNTOLD_PID]]
    assert harness.saw(seen()) == []
    assert harness.saw(busy) == []


@each_row("role", [R.SERVING, R.DRAINING, R.VACATING, R.WARMING])
def test_a_servers_gpu_is_no_trespass(role: NodeRole) -> None:
    """It is in use by the server, as far as anybody can tell."""
    harness = Harness(role)
    assert [harness.saw(seen(busy_ratio=0.9)) for _ in range(5)] == [[]] * 5


def test_a_trespass_without_a_process_is_told_as_such() -> None:
    """No process 0 is ever named, nor remembered as left behind."""
    memory = first_memory(settings(), "boot-1")
    facts = Facts(now_s=1.0, trespassers=((UNTOLD_PID, UUID),))
    said = gpu_handover.in_words(gpu_handover.told(facts), memory)
    assert said == f"trespass: a process that its driver does not name on {UUID}"
    gpu_handover.keep(memory, [UNTOLD_PID, 7])
    assert memory.left_behind == [7]


def test_who_was_left_behind_is_not_forgotten_by_a_list_that_is_not_told() -> None:
    """Only a list without it shows that it has gone."""
    memory = first_memory(settings(), "boot-1")
    memory.left_behind = [7]
    gpu_handover.forget_gone(memory, Facts(now_s=1.0, gpus=(seen(),)))
    assert memory.left_behind == [7]
    gpu_handover.forget_gone(memory, Facts(now_s=1.0, gpus=(seen(processes=()),)))
    assert memory.left_behind == []


# --- MIG mode ----------------------------------------------------------------------------------

PART = MigInstance(
    uuid=GpuUuid("MIG-1"),
    gpu_type="H100 MIG 1g.10gb",
    memory_total_bytes=10,
    gpu_instance_id=1,
    memory_used_bytes=5,
    processes=(GpuProcess(pid=7),),
)


def parted(is_mig: bool | None, *, index: int = 0) -> GpuReport:
    """A GPU that may be in MIG mode, with one instance if it is."""
    return GpuReport(
        uuid=GpuUuid(f"GPU-{index}"),
        index=index,
        gpu_type="H100",
        memory_total_bytes=1000,
        is_mig=is_mig,
        mig=(PART,) if is_mig else (),
    )


@pytest.mark.parametrize(
    ("is_mig", "phase", "why"),
    [
        (True, WorkerPhase.REFUSED, "GPU GPU-0 is in MIG mode"),
        (None, WorkerPhase.REFUSED, "GPU GPU-0 does not report its MIG mode"),
        (False, WorkerPhase.RESERVING, ""),
    ],
)
def test_a_worker_is_never_given_the_whole_of_a_gpu_in_mig_mode(
    is_mig: bool | None, phase: WorkerPhase, why: str
) -> None:
    """Its order was made before the mode was changed: it is refused, and not the job's fault."""
    life_harness = LifeHarness(inference=False)
    life_harness.want(R.TRAINING, order(phase=OrderPhase.RESERVE))
    life_harness.life.step(
        Facts(now_s=1.0, gpus=(parted(is_mig), parted(False, index=1)), sampled_at_s=1.0)
    )
    [report] = life_harness.life.workers.reports()
    assert (report.phase, report.error) == (phase, why)
    assert report.fault == (Fault.NODE if why else Fault.NONE)
    assert report.key == key()


def test_of_a_gpu_in_mig_mode_a_scheduler_has_its_instances_alone() -> None:
    """Of one that does not tell its mode it has nothing; its neighbours are what they were."""
    report = NodeReport(
        node="n1",
        boot_id="b",
        sequence=1,
        home_pool=Pool.TRAINING,
        role=R.TRAINING,
        epoch=0,
        generation=0,
        instance="one",
        period_s=1.0,
        gpus=(parted(True), parted(None, index=1), parted(False, index=2)),
    )
    assert [fact.uuid for fact in facts_of(report).gpus] == ["MIG-1", "GPU-2"]


def test_a_silent_gpu_in_mig_mode_stays_one() -> None:
    """A hang, a loss or an agent that starts beside one must not make a whole GPU of it; what its
    instances do is not told then."""
    gpu = parted(True)
    silent = msgspec.structs.replace(PART, memory_used_bytes=None, processes=None)
    lost = identity_only(gpu, GpuHealth.LOST)
    [kept] = completed((), identities([gpu]), is_whole=False)
    assert [(one.is_mig, one.mig) for one in (lost, kept)] == [(True, (silent,))] * 2
