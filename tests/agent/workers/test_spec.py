"""What a worker is given: command line, environment, unit. Nothing runs here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from agent.workers.spec import (
    BATCH,
    TORCH_LAUNCHER,
    Account,
    shim_spec,
    worker_argv,
    worker_environment,
)
from agent.workers.starters import (
    DetachedStarter,
    ShimStarter,
    SystemdStarter,
    shim_argv,
    systemd_argv,
)
from common.clock import SystemClock
from common.model import (
    STORE_INDEX,
    GpuRequest,
    GpuUuid,
    Launcher,
    PrerunGang,
    PrerunSpec,
    WorkerRange,
)
from tests.harness.node.workers import make_order

ENDPOINT = "node-1:29400"


def test_without_a_launcher_the_command_is_run_as_it_is() -> None:
    """Aryl adds nothing to a command line that it was not asked to launch."""
    order = make_order("python", "train.py", "--lr", "0.1")
    assert worker_argv(order, endpoint=ENDPOINT) == ("python", "train.py", "--lr", "0.1")


def test_torchrun_gets_the_gang_s_range_and_rendezvous() -> None:
    """Range, ranks per worker, endpoint and an id of its own for each attempt."""
    order = make_order("train.py", launcher=Launcher.TORCHRUN, workers=(2, 8), gpus_per_worker=4)
    assert worker_argv(order, endpoint=ENDPOINT) == (
        "python3",
        str(TORCH_LAUNCHER),
        "--nnodes=2:8",
        "--nproc-per-node=4",
        "--max-restarts=1000000",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=node-1:29400",
        "--rdzv-id=job-1-1",
        "train.py",
    )


def test_an_elastic_gang_under_torchrun_meets_quickly_at_a_store_of_its_own() -> None:
    """Its launchers join the store, wait little for more, and share no store between rounds."""
    order = make_order("train.py", launcher=Launcher.TORCHRUN, workers=(2, 8))
    order = msgspec.structs.replace(order, has_store=True)
    assert (
        "--rdzv-conf=is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=10"
        in worker_argv(order, endpoint=ENDPOINT)
    )
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    assert worker_environment(order, endpoint=ENDPOINT)[name] == "1"
    forged = msgspec.structs.replace(
        order, spec=msgspec.structs.replace(order.spec, env={name: "0"})
    )
    assert worker_environment(forged, endpoint=ENDPOINT)[name] == "1"


def test_a_worker_on_another_gpu_type_has_a_rank_for_each_gpu() -> None:
    """Where an attempt spans types, four small GPUs may stand for two: ranks follow the GPUs."""
    order = make_order("train.py", launcher=Launcher.TORCHRUN, gpus_per_worker=2)
    more = tuple(GpuUuid(f"GPU-{index}") for index in range(4))
    wide = msgspec.structs.replace(order, gpu_uuids=more)
    assert "--nproc-per-node=2" in worker_argv(order, endpoint=ENDPOINT)
    assert "--nproc-per-node=4" in worker_argv(wide, endpoint=ENDPOINT)


def test_a_worker_multiplier_counts_in_the_range() -> None:
    """On a GPU type that needs two workers for one, the gang is twice as large."""
    order = make_order("train.py", launcher=Launcher.TORCHRUN, workers=(2, 8))
    gpu = GpuRequest(worker_multiplier={"V100": 2})
    order = msgspec.structs.replace(order, spec=msgspec.structs.replace(order.spec, gpu=gpu))
    assert "--nnodes=4:16" in worker_argv(order, endpoint=ENDPOINT)
    environment = worker_environment(order, endpoint=ENDPOINT)
    assert (environment["ARYL_WORKERS_MIN"], environment["ARYL_WORKERS_MAX"]) == ("4", "16")


def test_the_environment_of_a_worker() -> None:
    """Every variable of the contract, and no other."""
    order = make_order(
        "x", workdir="/srv/job", checkpoint="saves", grace_s=12.5, workers=(2, 8), index=3,
        is_flexible=True, env={"LR": "0.1"}, gpus_per_worker=2,
    )  # fmt: skip
    assert worker_environment(order, endpoint=ENDPOINT, home="/home/u") == {
        "ARYL_JOB_ID": "job-1",
        "ARYL_ATTEMPT": "1",
        "ARYL_WORKER_INDEX": "3",
        "ARYL_WORKER_COUNT": "2",
        "ARYL_WORKERS_MIN": "2",
        "ARYL_WORKERS_MAX": "8",
        "ARYL_GRACE_SECONDS": "12.5",
        "ARYL_CHECKPOINT_PATH": "/srv/job/saves",
        "ARYL_RENDEZVOUS_ENDPOINT": "node-1:29400",
        "ARYL_IS_FLEXIBLE": "1",
        "ARYL_NODES": "",
        "ARYL_PYTHON": sys.executable,
        "ARYL_BATCH": str(BATCH),
        "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2",
        "MASTER_ADDR": "node-1",
        "MASTER_PORT": "29400",
        "RANK": "3",
        "WORLD_SIZE": "2",
        "NODE_RANK": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "HOME": "/home/u",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "USER": "u",
        "LOGNAME": "u",
        "LR": "0.1",
    }


RANKS = {"RANK", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}


@given(st.integers(1, 64), st.data())
def test_each_worker_of_a_plain_gang_is_a_machine_of_one_process(
    workers: int, data: st.DataObject
) -> None:
    """Ranks are consistent by every formula of the frameworks, wherever the workers run; a single
    worker is told of no other process beside it."""
    index = data.draw(st.integers(0, workers - 1))
    order = make_order("x", workers=(workers, workers), index=index)
    given_ranks = worker_environment(order, endpoint=ENDPOINT)
    assert int(given_ranks["RANK"]) == index < int(given_ranks["WORLD_SIZE"]) == workers
    has_local = {name in given_ranks for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    assert has_local == {workers > 1}
    local, of = int(given_ranks.get("LOCAL_RANK", 0)), int(given_ranks.get("LOCAL_WORLD_SIZE", 1))
    assert int(given_ranks["NODE_RANK"]) * of + local == index
    assert local < len(given_ranks["CUDA_VISIBLE_DEVICES"].split(","))


def test_a_launcher_and_a_rendezvous_store_are_given_no_rank() -> None:
    """torchrun gives its ranks their own; a store is none."""
    launcher = make_order("x", launcher=Launcher.TORCHRUN, workers=(2, 2))
    store = make_order("x", workers=(2, 2), index=STORE_INDEX)
    for order in (launcher, store):
        assert not RANKS & worker_environment(order, endpoint=ENDPOINT).keys()


def test_the_pre_run_of_a_gang_is_a_gang_of_one() -> None:
    """Its command is the gang's, and meets as that does."""
    order = make_order("x")
    gang = PrerunGang(workers=WorkerRange(min=2, max=2), gpus_per_worker=1)
    spec = msgspec.structs.replace(order.spec, prerun=PrerunSpec(time_s=9.0, gang=gang))
    found = worker_environment(msgspec.structs.replace(order, spec=spec), endpoint=ENDPOINT)
    assert (found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("1", "0")


@given(st.sampled_from(["ARYL_JOB_ID", "CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "RANK"]), st.text())
def test_a_job_cannot_take_other_gpus_by_its_environment(name: str, value: str) -> None:
    """What Aryl grants is not what a job asks for in its env."""
    plain = worker_environment(make_order("x"), endpoint=ENDPOINT)
    forged = worker_environment(make_order("x", env={name: value}), endpoint=ENDPOINT)
    assert forged == plain


def test_a_job_chooses_its_path_and_an_account_its_home() -> None:
    """The job's env wins over defaults; a user's home is that of the account."""
    account = Account(name="ada", uid=1000, gid=1000, home="/home/ada")
    order = make_order("x", env={"PATH": "/opt/venv/bin:/bin"})
    environment = worker_environment(order, endpoint="[fe80::1]:80", account=account)
    assert environment["PATH"] == "/opt/venv/bin:/bin"
    assert (environment["HOME"], environment["USER"]) == ("/home/ada", "ada")
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("fe80::1", "80")


def test_a_shim_s_spec_is_plain_data() -> None:
    """The shim reads it without any of our types."""
    account = Account(name="ada", uid=1000, gid=1001, home="/home/ada")
    order = make_order("x", checkpoint="/saves", signal_name="SIGUSR1")
    spec = shim_spec(order, endpoint=ENDPOINT, directory="/run/w", account=account)
    assert msgspec.json.decode(msgspec.json.encode(spec)) == spec
    assert spec["account"] == {"name": "ada", "uid": 1000, "gid": 1001}
    assert (spec["signal"], spec["checkpoint_path"]) == ("SIGUSR1", "/saves")


def test_a_unit_of_systemd_is_asked_for_word_by_word() -> None:
    """A transient unit in the jobs' slice, stopped through its shim, with the job's limits."""
    order = make_order("x", grace_s=30.0)
    spec = msgspec.structs.replace(order.spec, memory_bytes_per_worker=1 << 30, cpus_per_worker=4)
    argv = systemd_argv(Path("/run/w"), msgspec.structs.replace(order, spec=spec))
    assert argv == (
        "systemd-run",
        "--quiet",
        "--collect",
        "--no-ask-password",
        "--slice=aryl-jobs.slice",
        "--unit=aryl-worker-job-1.1.0.service",
        "--description=Aryl worker job-1.1.0 of t/u",
        "--property=Type=exec",
        "--property=KillMode=mixed",
        "--property=TimeoutStopSec=40",
        "--property=OOMPolicy=continue",
        "--property=OOMScoreAdjust=0",
        "--property=StandardOutput=append:/run/w/shim.log",
        "--property=StandardError=append:/run/w/shim.log",
        "--property=MemoryMax=1073741824",
        "--property=CPUWeight=400",
        "--",
        *shim_argv(Path("/run/w")),
    )


def test_a_unit_of_the_system_s_manager_runs_as_the_agent_s_own_user() -> None:
    """Without that PID 1 would run it as root, and jobs never are; a user's manager cannot."""
    order = make_order("x")
    own = (f"--uid={os.geteuid()}", f"--gid={os.getegid()}")
    argv = SystemdStarter(SystemClock()).argv(Path("/run/w"), order)
    assert tuple(word for word in argv if word.startswith(("--uid", "--gid"))) == own
    argv = SystemdStarter(SystemClock(), is_user_manager=True).argv(Path("/run/w"), order)
    assert not [word for word in argv if word.startswith(("--uid", "--gid"))]


def test_both_starters_are_starters() -> None:
    """Whatever a machine has, a runner sees the same thing."""
    starters: list[ShimStarter] = [
        DetachedStarter(SystemClock()),
        SystemdStarter(SystemClock(), is_user_manager=True),
    ]
    assert len(starters) == 2
