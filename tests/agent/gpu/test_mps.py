"""A server of CUDA's Multi-Process Service on the GPUs: it is whosever its clients are."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from agent.core import gpu_handover
from agent.core.state import first_memory
from agent.gpu.child_process import child_starter
from agent.gpu.fake.fleet import fake_uuid
from agent.gpu.fake.processes import MPS_ENV, VISIBLE_ENV
from agent.gpu.mps import without_servers
from agent.gpu.reader import GpuReader
from agent.telemetry.collectors import GpuCollector
from agent.telemetry.gpu_attribution import Look, Strangers
from agent.telemetry.machine import ThisMachine
from common.clock import SystemClock
from common.messages import GpuProcess, GpuReport
from common.model import GpuUuid, NodeRole
from tests.harness.node.life import SERVER, settings

FLEET = 'gpu = [{count = 1, model = "H100", memory_bytes = 85899345920}]\n'
CALLED = """
import sys
open("/proc/self/comm", "w").write(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""
AFTER_S = 1.0
NODE = f"n{os.getpid()}"
"""No other test has it: every NVML child sees the processes of the whole machine."""
MPS, JOB = "nvidia-cuda-mps-server", "python"


@contextlib.contextmanager
def process(name: str, **variables: str) -> Generator[int]:
    """A real process that is called so; its pid."""
    argv = (sys.executable, "-I", "-S", "-c", CALLED, name)
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **variables},
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child.pid
        finally:
            child.kill()


def gpu(*pids: int, memory_used_bytes: int = 0) -> GpuReport:
    """One GPU of 1000 bytes with these processes."""
    return GpuReport(
        uuid=GpuUuid("GPU-0"),
        index=0,
        gpu_type="H100",
        memory_total_bytes=1000,
        memory_used_bytes=memory_used_bytes,
        processes=tuple(GpuProcess(pid=pid) for pid in pids),
    )


def seen(*pids: int, memory_used_bytes: int = 0) -> GpuReport:
    """The same as an agent sees it."""
    [found] = without_servers((gpu(*pids, memory_used_bytes=memory_used_bytes),))
    return found


def strangers(role: NodeRole, *pids: int, owners: tuple[int, ...] = ()) -> set[int]:
    """Who of these is a stranger by a second look at a node of this role."""
    memory = first_memory(settings(), "boot-1")
    memory.role = role
    eye = Strangers(ThisMachine(), SERVER, after_s=AFTER_S, free_memory_ratio=0.05)
    for at_s in (1.0, 2.0):
        look = Look(at_s=at_s, gpus=(seen(*pids),), owners=owners, is_healthy=True)
        eye.saw(look, memory)
    return {pid for pid, _ in eye.found}


@pytest.mark.parametrize("role", [NodeRole.TRAINING, NodeRole.ON_LOAN, NodeRole.VACATING])
def test_the_server_of_a_workers_gpu_is_no_stranger(role: NodeRole) -> None:
    """A client of it that nobody granted the GPU is one all the same."""
    with process(MPS) as server, process(JOB) as worker, process(JOB) as stranger:
        assert strangers(role, server, worker, owners=(worker,)) == set()
        if role != NodeRole.VACATING:
            assert strangers(role, server, worker, stranger, owners=(worker,)) == {stranger}


def test_a_server_without_clients_keeps_nobody_from_a_gpu() -> None:
    """The next worker becomes its client; memory that is in use on the GPU keeps it out still."""
    with process(MPS) as server, process(JOB) as other:
        assert gpu_handover.busy(gpu(server), free_memory_ratio=0.05) != ""
        assert gpu_handover.busy(seen(server), free_memory_ratio=0.05) == ""
        assert f"process {other}" in gpu_handover.busy(seen(server, other), free_memory_ratio=0.05)
        held = seen(server, memory_used_bytes=100)
        assert "MiB in use" in gpu_handover.busy(held, free_memory_ratio=0.05)


def test_who_has_ended_meanwhile_is_no_server() -> None:
    """Nobody can tell any more how it was called: the next sample shows that it has gone."""
    with process(MPS) as server:
        assert seen(server).processes == ()
    assert [one.pid for one in seen(server).processes or ()] == [server]


@pytest.mark.slow
async def test_a_collector_tells_the_clients_in_place_of_their_server(tmp_path: Path) -> None:
    """From NVML's two lists to the report, with real processes."""
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEET)
    given = {VISIBLE_ENV: fake_uuid(NODE, 0)}
    reader = GpuReader(
        child_starter(NODE, now_s=SystemClock().now_s, fake_fleet=fleet),
        SystemClock(),
        deadline_s=30.0,  # a child that starts on a busy machine takes longer than a sample may
    )
    with (
        process(MPS, **given),
        process(JOB, **given, **{MPS_ENV: str(tmp_path)}) as client,
        process(JOB, **given) as alone,
    ):
        part = await GpuCollector(reader, SystemClock()).collect()
    await reader.close()
    assert part.gpus is not None
    assert {one.pid for one in part.gpus[0].processes or ()} == {client, alone}
