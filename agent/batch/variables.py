"""The variables of a batch script: Slurm's names for what Aryl's variables say. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from common.slurm import patterns
from common.slurm.nodelists import compress

RANKS = ("RANK", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""A batch script is no rank, and Slurm sets none of these: a step's tasks have `SLURM_PROCID`."""
TASKS = "ARYL_BATCH_TASKS"
"""Tasks on each node, as submitted."""


def of_script(environ: Mapping[str, str], *, host: str) -> dict[str, str]:
    """All variables of a script.

    Args:
        environ: those of the worker.
        host: short name of this machine, in place of a node list that is not known.
    """
    nodes, node = node_count(environ), node_index(environ)
    tasks = tasks_per_node(environ)
    names = [name for name in environ.get("ARYL_NODES", "").split(",") if name] or [host]
    number = job_number(environ)
    found = {name: value for name, value in environ.items() if name not in RANKS}
    found |= {
        "SLURM_JOB_ID": number,
        "SLURM_JOBID": number,
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(nodes * tasks),
        "SLURM_NPROCS": str(nodes * tasks),
        "SLURM_TASKS_PER_NODE": each(tasks, nodes),
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node * tasks),
        "SLURM_LOCALID": "0",
        "SLURM_JOB_NODELIST": compress(names),
        "SLURM_NODELIST": compress(names),
        "SLURMD_NODENAME": names[0] if len(names) == 1 or node == 0 else host,
        "SLURM_GPUS_ON_NODE": str(len(gpus(environ))),
        "SLURM_JOB_GPUS": environ.get("CUDA_VISIBLE_DEVICES", ""),
    }
    restarts = int(environ.get("ARYL_ATTEMPT", "1")) - 1
    if restarts > 0:
        found["SLURM_RESTART_COUNT"] = str(restarts)
    return found | _of_array(environ)


def _of_array(environ: Mapping[str, str]) -> dict[str, str]:
    index = environ.get("ARYL_ARRAY_INDEX")
    if index is None:
        return {}
    names = {
        "SLURM_ARRAY_JOB_ID": "ARYL_ARRAY_NUMBER",
        "SLURM_ARRAY_TASK_COUNT": "ARYL_ARRAY_COUNT",
        "SLURM_ARRAY_TASK_MIN": "ARYL_ARRAY_MIN",
        "SLURM_ARRAY_TASK_MAX": "ARYL_ARRAY_MAX",
    }
    found = {name: environ[ours] for name, ours in names.items() if ours in environ}
    return {"SLURM_ARRAY_TASK_ID": index, **found}


def of_patterns(environ: Mapping[str, str], *, host: str) -> dict[str, str]:
    """What the letters of a file name stand for, by the variables of a script or a task."""
    number = environ.get("SLURM_JOB_ID", "")
    step = environ.get("SLURM_STEP_ID", "batch")
    return {
        "A": environ.get("SLURM_ARRAY_JOB_ID", number),
        "a": environ.get("SLURM_ARRAY_TASK_ID", patterns.NO_TASK),
        "J": f"{number}.{step}",
        "j": number,
        "N": host,
        "n": environ.get("SLURM_NODEID", "0"),
        "s": step,
        "t": environ.get("SLURM_PROCID", "0"),
        "u": environ.get("SLURM_JOB_USER", environ.get("USER", "")),
        "x": environ.get("SLURM_JOB_NAME", ""),
    }


def job_number(environ: Mapping[str, str]) -> str:
    """The number of the job; its id where the coordinator is of an older version."""
    return environ.get("ARYL_JOB_NUMBER") or environ.get("ARYL_JOB_ID", "")


def node_count(environ: Mapping[str, str]) -> int:
    """Nodes of the job: each worker is one."""
    return int(environ.get("ARYL_WORKER_COUNT", "1"))


def node_name(environ: Mapping[str, str], *, host: str) -> str:
    """The name of this node in the cell; the host name where no variable has it."""
    return environ.get("ARYL_NODE") or environ.get("SLURMD_NODENAME") or host


def node_index(environ: Mapping[str, str]) -> int:
    """Which of them this is, from 0."""
    return int(environ.get("ARYL_WORKER_INDEX", "0"))


def tasks_per_node(environ: Mapping[str, str]) -> int:
    """Tasks that a step starts on each node by default."""
    return int(environ.get(TASKS, "1"))


def gpus(environ: Mapping[str, str]) -> list[str]:
    """UUIDs of the GPUs of this worker."""
    return [uuid for uuid in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if uuid]


def each(tasks: int, nodes: int) -> str:
    """Tasks on each node in Slurm's form: `2(x4)`."""
    return f"{tasks}(x{nodes})" if nodes > 1 else str(tasks)
