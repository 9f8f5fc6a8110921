"""A gang's rendezvous store on its node: started first, stopped last, and counted as no worker."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.core.state import CheckReserve, ResizeWorker, StartWorker, StopWorker
from agent.telemetry.machine import ThisMachine
from agent.workers.record import directory_name, key_of
from agent.workers.spec import (
    STORE_GRACE_S,
    TORCH_STORE,
    shim_spec,
    worker_argv,
    worker_environment,
)
from agent.workers.starters import systemd_argv
from common.errors import ConfigError
from common.faults import Fault
from common.messages import OrderPhase, StopOrder, WorkerOrder, WorkerPhase
from common.model import (
    STORE_INDEX,
    JobId,
    Launcher,
    NodeRole,
    StopReason,
    WorkerKey,
)
from tests.harness.node.agent import NodeHarness as NodeHarness
from tests.harness.node.life import LifeHarness, key, order
from tests.harness.node.models import running
from tests.harness.node.rendezvous_store import ENDPOINT, store_order
from tests.harness.node.workers import make_order

P, R = WorkerPhase, NodeRole
STORE = key(STORE_INDEX)

# --- what it is given -------------------------------------------------------------------------


def test_a_store_is_named_apart_from_the_workers() -> None:
    """In directories, units, ledgers and logs; no worker's index can name it."""
    store = WorkerKey(JobId("j"), 3, STORE_INDEX)
    assert str(store) == directory_name(store) == "j.3.store"
    assert key_of(Path("j.3.store")) == store
    assert key_of(Path("j.3.0")) == WorkerKey(JobId("j"), 3, 0)
    with pytest.raises(ConfigError):
        directory_name(WorkerKey(JobId("j"), 3, -2))


def test_without_a_command_of_the_job_the_store_is_pytorch_s() -> None:
    """Run by the Python of the job's PATH, at the store's own endpoint."""
    assert worker_argv(store_order(), endpoint=ENDPOINT) == ("python3", str(TORCH_STORE), ENDPOINT)
    own = store_order(command=("kv", "--fast"))
    assert worker_argv(own, endpoint=ENDPOINT) == ("kv", "--fast")


def test_launchers_join_a_store_and_never_host_another() -> None:
    """c10d's launcher on the endpoint's host would else take the store's port for itself."""
    given = make_order("train.py", launcher=Launcher.TORCHRUN, workers=(1, 4))
    joined = " ".join(worker_argv(replace(given, has_store=True), endpoint=ENDPOINT))
    assert " --rdzv-conf=is_host=0," in joined
    assert "is_host" not in " ".join(worker_argv(given, endpoint=ENDPOINT))


def test_a_store_gets_no_gpu_and_is_no_worker_by_its_environment() -> None:
    """It knows where to listen, whose it is, and no worker's index."""
    environment = worker_environment(store_order(), endpoint=ENDPOINT)
    assert environment["ARYL_RENDEZVOUS_ENDPOINT"] == ENDPOINT
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert not {"ARYL_WORKER_INDEX", "ARYL_IS_FLEXIBLE"} & set(environment)


def test_a_store_has_nothing_to_save_and_none_of_a_worker_s_limits() -> None:
    """It gets SIGTERM and a short grace, whatever the job's workers get."""
    given = make_order("x", checkpoint="/saves", grace_s=600.0, signal_name="SIGUSR1")
    limited = replace(given.spec, memory_bytes_per_worker=1 << 20, cpus_per_worker=2)
    spec = shim_spec(store_order(replace(given, spec=limited)), endpoint=ENDPOINT)
    assert (spec["signal"], spec["grace_s"], spec["checkpoint_path"]) == (
        "SIGTERM",
        STORE_GRACE_S,
        "",
    )
    unit = systemd_argv(Path("/run/s"), store_order(replace(given, spec=limited)))
    assert "--unit=aryl-worker-job-1.1.store.service" in unit
    assert not [word for word in unit if "MemoryMax" in word or "CPUWeight" in word]


# --- its life on a node -----------------------------------------------------------------------


def life_harness_with(*orders: WorkerOrder) -> LifeHarness:
    """A training node that was ordered these."""
    life_harness = LifeHarness(inference=False)
    life_harness.want(R.TRAINING, *orders)
    return life_harness


def store(life_harness: LifeHarness) -> WorkerPhase:
    """The phase that the node reports of the store."""
    [found] = [one for one in life_harness.life.workers.reports() if one.key == STORE]
    return found.phase


def awaits_store(life_harness: LifeHarness) -> bool:
    """A call, so that a type checker does not think that it stays the same."""
    return life_harness.life.workers.awaits_store


def reserved_store_order() -> WorkerOrder:
    """The default store of the life_harness."""
    return replace(order(STORE, gpus=(), phase=OrderPhase.RESERVE), endpoint="")


def started() -> LifeHarness:
    """A node whose store was started and does not listen yet."""
    life_harness = life_harness_with(reserved_store_order())
    life_harness.step()
    life_harness.life.workers.checked(STORE, endpoint=ENDPOINT, refusal=None)
    life_harness.step()
    life_harness.life.workers.started(STORE, error="")
    life_harness.runs(STORE)
    life_harness.step()
    return life_harness


def test_a_store_starts_with_the_reservation_at_the_endpoint_that_its_node_offers() -> None:
    """It must listen before anybody is told to run; the order has no endpoint yet."""
    life_harness = life_harness_with(reserved_store_order())
    assert [type(action) for action in life_harness.step()] == [CheckReserve]
    life_harness.life.workers.checked(STORE, endpoint=ENDPOINT, refusal=None)
    [start] = life_harness.step()
    assert isinstance(start, StartWorker)
    assert (start.order.key, start.order.endpoint) == (STORE, ENDPOINT)


def test_a_store_counts_as_running_once_it_listens() -> None:
    """A process that still gets ready keeps the gang waiting; once seen, it is not asked again."""
    life_harness = started()
    assert awaits_store(life_harness)
    life_harness.listening_ports = frozenset({29501})
    life_harness.steps(2)
    assert store(life_harness) == P.RESERVING
    life_harness.listening_ports = frozenset({29500})
    life_harness.step()
    assert store(life_harness) == P.RUNNING
    assert not awaits_store(life_harness)
    life_harness.listening_ports = frozenset()
    life_harness.step()
    assert store(life_harness) == P.RUNNING


def test_a_store_is_told_nothing_of_the_gang_s_size() -> None:
    """It is no worker; who joins is between it and them."""
    life_harness = started()
    life_harness.want(R.TRAINING, replace(reserved_store_order(), worker_count=3))
    assert not [action for action in life_harness.steps(2) if isinstance(action, ResizeWorker)]


def test_a_store_that_was_not_started_is_its_node_s_fault() -> None:
    """The gang is placed anew, free of charge."""
    life_harness = life_harness_with(reserved_store_order())
    life_harness.step()
    life_harness.life.workers.checked(STORE, endpoint=ENDPOINT, refusal=None)
    life_harness.step()
    life_harness.life.workers.started(STORE, error="no space")
    [found] = life_harness.life.workers.reports()
    assert found.phase == P.REFUSED
    assert found.fault == Fault.NODE


def test_a_node_that_goes_home_stops_a_store_after_its_workers() -> None:
    """They may meet there for their last save; a store of another gang is not kept by them."""
    life_harness = LifeHarness()
    life_harness.serve()
    life_harness.lend()
    worker, other = key(0), WorkerKey(JobId("j2"), 1, STORE_INDEX)
    life_harness.want(
        R.ON_LOAN, order(worker), reserved_store_order(), replace(reserved_store_order(), key=other)
    )
    for one in (worker, STORE, other):
        life_harness.runs(one)
    life_harness.step()
    life_harness.want(R.SERVING)
    stops = [a.key for a in life_harness.steps(2) if isinstance(a, StopWorker)]
    assert sorted(stops) == sorted([worker, other])
    life_harness.ends(worker, -15, StopReason.PREEMPT)
    stops = [a.key for a in life_harness.steps(2) if isinstance(a, StopWorker)]
    assert stops == [STORE]


def test_a_stop_ends_a_store_as_any_worker() -> None:
    """The coordinator gave it up with its attempt."""
    life_harness = started()
    stop = StopOrder(key=STORE, reason=StopReason.STALE, grace_s=10.0)
    life_harness.want(R.TRAINING, stops=(stop,))
    assert life_harness.step() == [StopWorker(STORE, StopReason.STALE, 10.0)]
    life_harness.ends(STORE, -15, StopReason.STALE)
    life_harness.step()
    assert store(life_harness) == P.EXITED


async def test_a_store_on_a_gpu_trespasses() -> None:
    """It was granted none, so it is no excuse for a process that holds one."""

    class Machine(ThisMachine):
        """Everybody descends from nobody but himself."""

        def strangers(self, pids: Iterable[int], owners: Iterable[int]) -> set[int]:
            return set(pids) - set(owners)

    harness = NodeHarness(world=Machine())
    harness.runner.known = {STORE: running(STORE, 77), key(): running(key(), 78)}
    harness.machine.pids = {0: 77, 1: 78}
    await harness.turn()
    assert [found.pid for found in harness.life.trespasses] == [77]


def test_the_machine_knows_who_listens() -> None:
    """As long as the socket is open, on either family of addresses."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(family) as listener:
            listener.bind(("", 0))
            port = listener.getsockname()[1]
            assert port not in ThisMachine().listening_ports()
            listener.listen()
            assert port in ThisMachine().listening_ports()
