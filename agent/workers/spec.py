"""Builds the command line, environment and shim spec of a worker or rendezvous store. Pure."""

from __future__ import annotations

import posixpath
import sys
from pathlib import Path

from msgspec import Struct

from common.messages import WorkerOrder
from common.model import Launcher

TORCHRUN_MAX_RESTARTS = 1_000_000
"""High enough never to matter: `torch_launcher.py` meets again as often as members change, and ends
at the first failure, whose retry Aryl decides."""
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
LOG_MAX_BYTES = 64 << 20
TORCH_STORE = Path(__file__).parents[1] / "shim/torch_store.py"
TORCH_LAUNCHER = Path(__file__).parents[1] / "shim/torch_launcher.py"
BATCH = Path(__file__).parents[1] / "batch/run.py"
"""Runs a batch script; `ARYL_PYTHON` runs it, which needs no package."""
RENDEZVOUS = (
    "is_host=0",  # otherwise the launcher on the store's node would try to host another one
    "last_call_timeout=2",  # those that start together have met before: 30 s would be idle
    "keep_alive_interval=1",
    "keep_alive_max_attempt=10",
)
"""For an elastic gang. A member is dead 10 s after its last heartbeat: a busy machine or a clock
that is off may stay silent that long. A leaving member announces it (`torch_launcher.py`)."""
STORE_GRACE_S = 5.0
"""A store has nothing to save: it exists for as long as its gang, and no longer."""


class Account(Struct, frozen=True, kw_only=True):
    """The account of this machine that a worker runs as; never root."""

    name: str
    uid: int
    gid: int
    home: str


def worker_argv(order: WorkerOrder, *, endpoint: str) -> tuple[str, ...]:
    """The command of a worker, inside its launcher; of a store, the store's.

    With torchrun, `min:max` of the GPU type is its range of nodes: PyTorch's documentation of
    torchrun, "Elastic (min=1, max=4, tolerates up to 3 membership changes or failures)".
    """
    spec = order.spec
    if order.key.is_store:
        # By name: beside torchrun on the job's PATH lies the Python that has torch.
        return spec.rendezvous.command or ("python3", str(TORCH_STORE), endpoint)
    match spec.launcher:
        case Launcher.NONE:
            return spec.command
        case Launcher.TORCHRUN:
            workers = spec.workers_on(order.gpu_type)
            return (
                # By name, as the store's; torchrun's own options follow.
                "python3",
                str(TORCH_LAUNCHER),
                f"--nnodes={workers.min}:{workers.max}",
                # Where an attempt spans GPU types, a worker on another type has more of them.
                f"--nproc-per-node={len(order.gpu_uuids) or spec.gpus_per_worker}",
                f"--max-restarts={TORCHRUN_MAX_RESTARTS}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={endpoint}",
                *([f"--rdzv-conf={','.join(RENDEZVOUS)}"] if order.has_store else []),
                f"--rdzv-id={order.key.job_id}-{order.key.attempt}",
                *spec.command,
            )


def grace_s(order: WorkerOrder) -> float:
    """Seconds from the request to end until SIGKILL; for a store no more than for its workers."""
    of_job_s = order.spec.checkpoint.grace_s
    return min(of_job_s, STORE_GRACE_S) if order.key.is_store else of_job_s


def checkpoint_path(order: WorkerOrder) -> str:
    """Where the job saves, absolute; empty when it never does; a store never does."""
    path = None if order.key.is_store else order.spec.checkpoint.path
    return posixpath.join(order.spec.workdir, path) if path else ""


def worker_environment(
    order: WorkerOrder, *, endpoint: str, account: Account | None = None, home: str = "/"
) -> dict[str, str]:
    """Every variable of a worker except the socket's, which the shim adds (docs/job-contract.md).

    Nothing of the agent's own environment passes through. The job's variables override `HOME`,
    `PATH`, `LANG` and `USER`, and never Aryl's own.
    """
    workers = order.spec.workers_on(order.gpu_type)
    user = account.name if account is not None else order.user
    host, _, port = endpoint.rpartition(":")
    given = {
        "ARYL_JOB_ID": order.key.job_id,
        "ARYL_ATTEMPT": str(order.key.attempt),
        "ARYL_WORKER_INDEX": str(order.key.worker_index),
        "ARYL_WORKER_COUNT": str(order.worker_count),
        "ARYL_WORKERS_MIN": str(workers.min),
        "ARYL_WORKERS_MAX": str(workers.max),
        "ARYL_GRACE_SECONDS": f"{order.spec.checkpoint.grace_s:g}",
        "ARYL_CHECKPOINT_PATH": checkpoint_path(order),
        "ARYL_RENDEZVOUS_ENDPOINT": endpoint,
        "ARYL_NODES": ",".join(order.gang_nodes),
        "ARYL_PYTHON": sys.executable,
        "ARYL_BATCH": str(BATCH),
        "ARYL_IS_FLEXIBLE": str(int(order.is_flexible)),
        "CUDA_VISIBLE_DEVICES": ",".join(order.gpu_uuids),
    }
    if order.key.is_store:
        del given["ARYL_WORKER_INDEX"], given["ARYL_IS_FLEXIBLE"]
    if endpoint:
        given |= {"MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}
    if order.spec.launcher == Launcher.TORCHRUN and not order.key.is_store:
        # Otherwise ranks that stay look for the new round's store where the old round's was.
        given["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if order.spec.launcher == Launcher.NONE and not order.key.is_store:
        given |= _ranks(order)
    defaults = {
        "HOME": account.home if account is not None else home,
        "PATH": DEFAULT_PATH,
        "LANG": "C.UTF-8",
        "USER": user,
        "LOGNAME": user,
    }
    return defaults | order.spec.env | given


def _ranks(order: WorkerOrder) -> dict[str, str]:
    """The variables that `env://` of PyTorch reads, for a worker without a launcher.

    Each worker stands for a machine with one process, wherever it runs. It sees no GPUs but its
    own, so `torch.cuda.set_device(LOCAL_RANK)` needs 0. Gangs need not be spread evenly, although
    frameworks assume it that compute a rank from NODE_RANK, LOCAL_RANK and processes per node. A
    job of one worker gets no LOCAL_RANK: Lightning and Accelerate take it as a sign that another
    process was started for each GPU.
    """
    spec, rank = order.spec, str(order.key.worker_index)
    ranks = {"RANK": rank, "WORLD_SIZE": str(order.worker_count), "NODE_RANK": rank}
    after_prerun = spec.prerun.gang
    is_gang = spec.workers_on(order.gpu_type).max > 1
    if is_gang or (after_prerun is not None and after_prerun.workers.max > 1):
        ranks |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return ranks


def search_path(order: WorkerOrder) -> str:
    """PATH as the worker will see it."""
    return order.spec.env.get("PATH", DEFAULT_PATH)


def shim_spec(
    order: WorkerOrder,
    *,
    endpoint: str,
    directory: str = "",
    account: Account | None = None,
    home: str = "/",
    contact_at_s: float | None = None,
    log_max_bytes: int = LOG_MAX_BYTES,
    mark: int | None = None,
) -> dict[str, object]:
    """The spec.json of a worker's shim.

    directory: where the shim keeps its files; marks all processes of the worker.
    contact_at_s: when the coordinator was last heard, on the boot clock: from there on
        `stop_after_s` counts, however late the shim starts.
    log_max_bytes: the size at which its log is cut.
    mark: a limit that all processes of the worker inherit, see `process_marks`; None: none.
    """
    spec = order.spec
    is_store = order.key.is_store
    return {
        "key": str(order.key),
        "argv": list(worker_argv(order, endpoint=endpoint)),
        "env": worker_environment(order, endpoint=endpoint, account=account, home=home)
        | {"ARYL_WORKER_DIRECTORY": directory},
        "workdir": spec.workdir,
        # A store gets the usual signal; the job's own may only mean "save".
        "signal": "SIGTERM" if is_store else spec.checkpoint.signal,
        "grace_s": grace_s(order),
        "checkpoint_path": checkpoint_path(order),
        "worker_count": order.worker_count,
        # Silence proves nothing, so without the job's own wish it ends no worker.
        "stop_after_s": spec.stop_after_s,
        "contact_at_s": contact_at_s,
        "log_max_bytes": log_max_bytes,
        "mark": mark,
        "account": None
        if account is None
        else {"name": account.name, "uid": account.uid, "gid": account.gid},
    }
