"""Rendezvous stores as real processes: what outlives what, and PyTorch's on a pretend torch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.shim import torch_store
from agent.telemetry.machine import ThisMachine
from agent.workers.spec import TORCH_STORE, worker_argv
from common.messages import WorkerOrder, WorkerPhase
from common.model import NodeRole, StopReason
from tests.harness.node.daemon import DaemonHarness, kill_9, make_daemon_harness
from tests.harness.node.rendezvous_store import KEY_VALUE_STORE, ask, store_order
from tests.harness.node.workers import (
    WorkerHarness,
    is_alive,
    kill,
    make_order,
    make_workers,
)

P, R = WorkerPhase, NodeRole
STORE = store_order().key

pytestmark = pytest.mark.slow
daemon = pytest.fixture(make_daemon_harness)

TORCH = """
import json, os, socket, sys
class TCPStore:
    def __init__(self, host, port, **options):
        print(json.dumps({"host": host, "port": port, **options, "path": sys.path}), flush=True)
        self.listener = socket.create_server((host, port))
"""
"""A pretend `torch.distributed` whose store says what it was given, and really listens."""


harness = pytest.fixture(make_workers)


def torch_order(directory: Path, torch: str = TORCH) -> WorkerOrder:
    """A torchrun job's store, whose PATH has a python3 and whose PYTHONPATH a torch."""
    package = directory / "packages" / "torch" / "distributed"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text(torch)
    (directory / "bin").mkdir()
    (directory / "bin" / "python3").symlink_to(sys.executable)
    env = {"PATH": f"{directory / 'bin'}:/usr/bin:/bin", "PYTHONPATH": str(package.parents[1])}
    return store_order(make_order("train.py", env=env))


def free_endpoint() -> str:
    """Where nobody listens."""
    return f"127.0.0.1:{ThisMachine().free_port()}"


# --- PyTorch's store --------------------------------------------------------------------------


async def test_a_torchrun_job_s_store_is_a_tcpstore_of_its_own_python(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """As master at the endpoint, waiting for nobody; modules of ours are not in torch's way."""
    endpoint = free_endpoint()
    order = torch_order(tmp_path)
    await harness.runner.start(order, endpoint=endpoint)
    await harness.until_said(order.key, f"rendezvous store at {endpoint}")
    given = json.loads(harness.log(order.key).splitlines()[0])
    path = given.pop("path")
    port = int(endpoint.rpartition(":")[2])
    assert given == {
        "host": "127.0.0.1",
        "port": port,
        "is_master": True,
        "wait_for_workers": False,
    }
    assert str(TORCH_STORE.parent) not in path
    assert port in ThisMachine().listening_ports()
    await harness.runner.stop(order.key, StopReason.STALE, 10.0)
    status = await harness.until_exited(order.key)
    assert (status.exit_code, status.stop_reason) == (-15, StopReason.STALE)
    assert port not in ThisMachine().listening_ports()


async def test_a_port_that_was_taken_meanwhile_has_an_exit_code_of_its_own(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """Nobody is at fault: the gang gets another one."""
    endpoint = free_endpoint()
    first, second = store_order(command=KEY_VALUE_STORE), torch_order(tmp_path)
    await harness.runner.start(first, endpoint=endpoint)
    await harness.until_said(first.key, "pid")
    second = replace(second, key=replace(second.key, attempt=2))
    await harness.runner.start(second, endpoint=endpoint)
    assert (await harness.until_exited(second.key)).exit_code == torch_store.EX_TEMPFAIL
    assert "in use" in harness.log(second.key)


async def test_a_python_without_torch_is_said_in_the_store_s_log(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """Whoever looks for the reason finds what Python says."""
    order = torch_order(tmp_path, torch="raise ImportError('no torch of this kind')")
    await harness.runner.start(order, endpoint=free_endpoint())
    assert (await harness.until_exited(order.key)).exit_code == 1
    assert "no torch of this kind" in harness.log(order.key)


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:65536", "host:x"])
def test_what_is_no_endpoint_is_a_wrong_call(text: str) -> None:
    """It says what was expected and hosts nothing."""
    assert torch_store.main([text]) == torch_store.EX_USAGE
    assert torch_store.main([]) == torch_store.EX_USAGE
    assert torch_store.parse_endpoint("[fe80::1]:80") == ("fe80::1", 80)
    assert torch_store.parse_endpoint("node-1:29400") == ("node-1", 29400)


def test_the_default_store_s_command_names_a_file_that_is_there() -> None:
    """It is shipped with the agent, wherever that was installed."""
    script = worker_argv(store_order(), endpoint="n:1")[1]
    assert Path(script).is_file()
    assert os.access(script, os.R_OK)


# --- one node ---------------------------------------------------------------------------------


async def test_a_store_outlives_the_workers_of_its_node_and_kill_9_of_the_agent(
    daemon: DaemonHarness,
) -> None:
    """Kill a flexible worker with its shim, then the agent: what was kept is there, and adopted."""
    config = daemon.config()
    agent = await daemon.start(config)
    store = store_order(make_order("x", workers=(1, 2)), command=KEY_VALUE_STORE)
    flexible = make_order("sleep", "600", index=1, workers=(1, 2), is_flexible=True)
    flexible = replace(flexible, gpu_uuids=(daemon.gpu(),))
    await daemon.want(R.TRAINING, store, flexible)
    await daemon.until_phase(store.key, P.RUNNING)
    await daemon.until_phase(flexible.key, P.RUNNING)
    found = daemon.worker(store.key)
    assert found is not None
    assert ask(found.endpoint, "rank0=here") == "here"
    raw = daemon.workers.raw(flexible.key)
    for name in ("shim_pid", "pid"):
        kill(int(str(raw[name])))
    await daemon.until_phase(flexible.key, P.EXITED)
    await kill_9(agent)
    assert ask(found.endpoint, "rank0") == "here"
    await daemon.start(config)
    await daemon.until_phase(store.key, P.RUNNING)
    assert ask(found.endpoint, "rank0") == "here"
    pid = int(str(daemon.workers.raw(store.key)["pid"]))
    kill(pid)
    await daemon.until_phase(store.key, P.EXITED)
    gone = daemon.worker(store.key)
    assert gone is not None
    assert (gone.exit_code, gone.stop_reason, is_alive(pid)) == (-9, None, False)
    await daemon.want(R.TRAINING, acknowledged=(store.key, flexible.key))
    await daemon.until_phase(store.key, None)
    assert (await daemon.log(store.key)).text == f"pid {pid}\n"
