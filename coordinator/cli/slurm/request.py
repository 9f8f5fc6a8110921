"""`sbatch`'s options -> the mapping that `common.jobspec.parse` reads. Pure.

A node of Slurm's is a worker of Aryl's: `--nodes` is the number of workers, and the GPUs, CPUs and
memory of a node are those of a worker. The tasks of a node are processes that `srun` starts there.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from common.errors import ConfigError
from common.slurm import patterns, times
from coordinator.cli.slurm import node_options
from coordinator.cli.slurm.shape import Shape, shape_of
from coordinator.cli.slurm.words import DEFAULT_PARTITION, DEPENDENCIES, partition, types_meant

RUN = (
    ': "${ARYL_BATCH:?the agent of this node is of a version without batch scripts}"; '
    'exec "$ARYL_PYTHON" -I -S "$ARYL_BATCH" "$0" "$@"'
)
"""Hands the script to the node's agent's runner (agent/batch/run.py)."""
SCRIPT_PLACE = 3
"""Where the text of the script stands in the command of its job."""
SIGNAL_LEAD_S = 60.0
"""Slurm's own lead of `--signal` without `@`."""
SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE_KEY|API_?KEY|ACCESS_KEY", re.IGNORECASE)
OWN = ("SLURM_", "SBATCH_", "ARYL_BATCH", "ARYL_ARRAY_")
"""Variables of the job that submits, which say nothing of the one that it submits."""
OF_WORKER = frozenset(
    {
        "ARYL_ATTEMPT", "ARYL_CHECKPOINT_PATH", "ARYL_CONTROL_SOCKET", "ARYL_GRACE_SECONDS",
        "ARYL_IS_FLEXIBLE", "ARYL_JOB_ID", "ARYL_JOB_NUMBER", "ARYL_NODES", "ARYL_PYTHON",
        "ARYL_RENDEZVOUS_ENDPOINT", "ARYL_WORKERS_MAX", "ARYL_WORKERS_MIN", "ARYL_WORKER_COUNT",
        "ARYL_WORKER_DIRECTORY", "ARYL_WORKER_INDEX", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK",
        "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "WORLD_SIZE",
        "_", "OLDPWD", "SHLVL",
    }
)  # fmt: skip


class Request(Struct, frozen=True, kw_only=True):
    """A job to submit. values: as a job file has them; notes: what its user should know."""

    values: Mapping[str, Any]
    notes: tuple[str, ...]


class Submitter(Struct, frozen=True, kw_only=True):
    """Who submits, from where, and what the cell has.

    job_ids: ids of the jobs that `--dependency` names, by number.
    """

    user: str
    tenant: str
    cell: str
    host: str
    directory: str
    environ: Mapping[str, str]
    gpu_types: Sequence[str] = ()
    job_ids: Mapping[str, str] = MappingProxyType({})


def request(
    script: str,
    arguments: Sequence[str],
    asked: Mapping[str, str],
    by: Submitter,
    *,
    name: str,
) -> Request:
    """The job of a script and its options.

    Args:
        asked: the options by name; a flag has an empty value.
        name: of the job, where no option names it.

    Raises:
        ConfigError: names the option and what was expected.
    """
    shape = shape_of(asked)
    title = asked.get("job-name") or name
    notes: list[str] = []
    if not shape.has_gpus:
        notes.append("no GPUs are asked for; each node gets one, as every job of Aryl's has GPUs")
    if shape.nodes[1] > 1:
        notes.append(
            "the script runs on each node of the job, and srun starts the tasks of its own node"
        )
    env, left_out = exported(asked.get("export", "ALL"), by.environ)
    if left_out:
        notes.append(
            "not exported, as every user of the cell can read the variables of a job: "
            f"{', '.join(left_out)} (name them in --export to export them)"
        )
    directory = _joined(by.directory, asked.get("chdir") or by.directory)
    env |= _own_variables(asked, by, shape, title, directory)
    env["ARYL_BATCH_COMMAND"] = shlex.join([name, *arguments])
    values: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9_-]", "_", title)[:64] or "sbatch",
        "command": ["/bin/sh", "-c", RUN, script, *arguments],
        "workdir": directory,
        "workers": {"min": shape.nodes[0], "max": shape.nodes[1]},
        "gpus_per_worker": shape.gpus,
        "cpus_per_worker": shape.cpus,
        "memory_bytes_per_worker": shape.memory_bytes,
        "priority": _priority(asked),
        "gpu": {"types": list(_types(asked, shape, by.gpu_types))},
        "env": env,
    }
    values |= node_options.selected(asked, shape.nodes)
    if more := node_options.note(asked, shape.nodes):
        notes.append(more)
    if "signal" in asked:
        lead_s = signal_of(asked["signal"])[1]
        values["checkpoint"] = {"grace_s": lead_s}
    if "time" in asked:
        values["time_limit_s"] = _time_s(asked["time"])
    if "dependency" in asked:
        values["depends_on"] = dependencies(asked["dependency"], by.job_ids)
    if "array" in asked:
        values["array"] = array(asked["array"])
    if "hold" in asked:
        values["is_held"] = True
    return Request(values=values, notes=tuple(notes))


def _joined(base: str, path: str) -> str:
    return path if path.startswith("/") else f"{base.rstrip('/')}/{path}"


def exported(asked: str, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What `--export` makes of the submitter's variables, and the secrets that it leaves out.

    Every user of a cell can read the variables of a job. So `ALL` leaves out variables named like
    a secret, and an address that has a password.
    """
    names = [name for name in asked.split(",") if name]
    given = dict(name.split("=", 1) for name in names if "=" in name)
    named = {name for name in names if "=" not in name}
    if "NIL" in named:
        return given, []
    if "ALL" not in named:
        return {k: v for k, v in environ.items() if k in named} | given, []
    kept: dict[str, str] = {}
    secrets: list[str] = []
    for name, value in sorted(environ.items()):
        if name in OF_WORKER or name.startswith(OWN):
            continue
        is_secret = SECRET.search(name) or (name == "ARYL_NATS_URL" and "@" in value)
        if is_secret and name not in named and name not in given:
            secrets.append(name)
            continue
        kept[name] = value
    return kept | given, secrets


def _own_variables(
    asked: Mapping[str, str], by: Submitter, shape: Shape, title: str, directory: str
) -> dict[str, str]:
    """Slurm's variables that are known at submission, and what the runner of the script needs."""
    is_array = "array" in asked
    output = asked.get("output", "slurm-%A_%a.out" if is_array else "slurm-%j.out")
    own = {
        "SLURM_JOB_NAME": title,
        "SLURM_JOB_USER": by.user,
        "SLURM_JOB_ACCOUNT": by.tenant,
        "SLURM_JOB_PARTITION": asked.get("partition") or DEFAULT_PARTITION,
        "SLURM_SUBMIT_DIR": by.directory,
        "SLURM_SUBMIT_HOST": by.host,
        "SLURM_CLUSTER_NAME": by.cell,
        "ARYL_BATCH_TASKS": str(shape.tasks),
    }
    if output:  # without a file it goes into the log of the worker
        own["ARYL_BATCH_OUTPUT"] = _file("output", output, directory)
    if asked.get("error"):
        own["ARYL_BATCH_ERROR"] = _file("error", asked["error"], directory)
    if asked.get("comment"):
        own["SLURM_JOB_COMMENT"] = asked["comment"]
    if "signal" in asked:
        own["ARYL_BATCH_SIGNAL"] = signal_of(asked["signal"])[0]
    if "open-mode" in asked:
        own["SLURM_OPEN_MODE"] = _open_mode(asked["open-mode"])
    for option, name in (
        ("ntasks-per-node", "SLURM_NTASKS_PER_NODE"),
        ("cpus-per-task", "SLURM_CPUS_PER_TASK"),
        ("gpus", "SLURM_GPUS"),
        ("gpus-per-node", "SLURM_GPUS_PER_NODE"),
        ("gpus-per-task", "SLURM_GPUS_PER_TASK"),
    ):
        if asked.get(option):
            own[name] = asked[option]
    if shape.cpus:
        own["SLURM_CPUS_ON_NODE"] = own["SLURM_JOB_CPUS_PER_NODE"] = str(shape.cpus)
    if shape.memory_bytes:
        own["SLURM_MEM_PER_NODE"] = str(shape.memory_bytes >> 20)
    return own


def _file(option: str, pattern: str, directory: str) -> str:
    unknown = patterns.misfit(pattern)
    if unknown:
        known = ", ".join(f"%{letter}" for letter in patterns.LETTERS)
        raise ConfigError(f"--{option}: {pattern!r}: {unknown} is none of {known}")
    return _joined(directory, pattern)


def _open_mode(text: str) -> str:
    if text not in ("append", "truncate", "a", "t"):
        raise ConfigError(f"--open-mode: {text!r}, expected append or truncate")
    return "append" if text.startswith("a") else "truncate"


def signal_of(text: str) -> tuple[str, float]:
    """`[B:]SIGNAL[@SECONDS]`: the signal with its `B:`, and its seconds; ConfigError names it."""
    form = f"--signal: {text!r}, expected [B:]SIGNAL[@SECONDS], such as USR1@120"
    name, at, lead = text.partition("@")
    prefix, colon, name = name.rpartition(":")
    if (colon and prefix != "B") or (at and not lead.isdecimal()):
        raise ConfigError(form)
    name = name.upper().removeprefix("SIG")
    if name.isdecimal():
        try:
            name = signal.Signals(int(name)).name.removeprefix("SIG")
        except ValueError:
            raise ConfigError(form) from None
    if f"SIG{name}" not in signal.Signals.__members__:
        raise ConfigError(form)
    return ("B:" if colon else "") + name, float(lead) if at else SIGNAL_LEAD_S


def _time_s(text: str) -> float | None:
    try:
        return times.limit_s(text)
    except ValueError as error:
        raise ConfigError(f"--time: {error}") from None


def _priority(asked: Mapping[str, str]) -> int:
    """`--priority`, or `--nice` with the other sign."""
    option = "priority" if "priority" in asked else "nice"
    text = asked.get(option, "0") or "100"
    try:
        return int(text) if option == "priority" else -int(text)
    except ValueError:
        raise ConfigError(f"--{option}: {text!r}, expected a whole number") from None


def _types(asked: Mapping[str, str], shape: Shape, known: Sequence[str]) -> tuple[str, ...]:
    """The GPU types of a partition and of a GRES; both where both are named.

    Raises:
        ConfigError: a name that stands for no type of the cell, or two that have none in common.
    """
    names = [name for name in asked.get("partition", "").split(",") if name]
    wanted: list[str] = []
    for name in names:
        found = types_meant(name, known)
        if name.lower() != DEFAULT_PARTITION and not found:
            raise ConfigError(f"--partition: {_no_type(name, known)}")
        wanted += found
    if shape.gpu_kind:
        of_kind = types_meant(shape.gpu_kind, known)
        if not of_kind:
            raise ConfigError(f"GPUs: {_no_type(shape.gpu_kind, known)}")
        both = [kind for kind in of_kind if not wanted or kind in wanted]
        if not both:
            raise ConfigError(f"partition {','.join(names)} has no GPUs of type {shape.gpu_kind!r}")
        wanted = both
    return tuple(dict.fromkeys(wanted))


def _no_type(name: str, known: Sequence[str]) -> str:
    names = ", ".join([DEFAULT_PARTITION, *sorted({partition(kind) for kind in known})])
    return f"{name!r} is no GPU type of the cell; expected one of {names}"


def array(text: str) -> dict[str, object]:
    """`0-99%5` as the field `array`; ConfigError names the option."""
    indices, percent, throttle = text.partition("%")
    if percent and not (throttle.isascii() and throttle.isdecimal() and int(throttle)):
        raise ConfigError(f"--array: {text!r}, expected indices such as 0-99%5")
    return {"indices": indices, **({"throttle": int(throttle)} if percent else {})}


def dependencies(text: str, job_ids: Mapping[str, str]) -> list[dict[str, str]]:
    """`afterok:12:13,afterany:14` as the field `depends_on`.

    Raises:
        ConfigError: a kind that Aryl has not, or no job number.
    """
    found: list[dict[str, str]] = []
    if "?" in text:
        raise ConfigError("--dependency: '?' (any of them) is not supported: all have to hold")
    for part in text.split(","):
        kind, *numbers = part.split(":")
        when = DEPENDENCIES.get(kind)
        if when is None or not numbers:
            known = ", ".join(DEPENDENCIES)
            raise ConfigError(f"--dependency: {part!r}, expected KIND:JOB with one of {known}")
        for number in numbers:
            if "+" in number:
                raise ConfigError(f"--dependency: {part!r}: a delay (+) is not supported")
            found.append({"job": job_ids.get(number, number), "when": when})
    return found
