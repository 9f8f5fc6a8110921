"""Slurm's words for what Aryl shows: states, reasons, partitions, GPU counts. Pure.

A state or a reason that Slurm has no word for gets the nearest one; the sentence of Aryl's own
stands beside it where a format has room.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from common.api import JobRow, NodeRow
from common.faults import NODE_FAULT
from common.model import FINAL_JOB_STATES, DependencyKind, Gate, JobState, NodeRole, is_mig
from common.node_labels import label_text
from coordinator.cli.slurm.cell import request_of

COMPACT = {
    "PENDING": "PD",
    "CONFIGURING": "CF",
    "RUNNING": "R",
    "SUSPENDED": "S",
    "COMPLETING": "CG",
    "COMPLETED": "CD",
    "FAILED": "F",
    "CANCELLED": "CA",
    "TIMEOUT": "TO",
    "OUT_OF_MEMORY": "OOM",
    "NODE_FAIL": "NF",
    "PREEMPTED": "PR",
    "DEADLINE": "DL",
    "REQUEUED": "RQ",
    "RESIZING": "RS",
    "STOPPED": "ST",
    "BOOT_FAIL": "BF",
    "REVOKED": "RV",
}
"""All states that Slurm's clients name in filters; a job here is in one of the first eleven."""

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "DEADLINE")

_BY_STATE = {
    JobState.PENDING: "PENDING",
    JobState.STARTING: "CONFIGURING",
    JobState.RUNNING: "RUNNING",
    JobState.RESIZING: "RUNNING",
    JobState.PREEMPTING: "COMPLETING",
    JobState.SUSPENDED: "SUSPENDED",
    JobState.SUCCEEDED: "COMPLETED",
    JobState.CANCELLED: "CANCELLED",
    JobState.FAILED: "FAILED",
}

OUT_OF_MEMORY = frozenset({"cpu_out_of_memory"})
"""A GPU that is full is the program's own error, which Slurm calls FAILED."""

_BY_GATE = {
    Gate.HELD: "JobHeldUser",
    Gate.DEPENDENCY: "Dependency",
    Gate.NEVER: "DependencyNeverSatisfied",
}
DEPENDENCIES = {
    "after": DependencyKind.STARTED,
    "afterok": DependencyKind.OK,
    "afternotok": DependencyKind.NOT_OK,
    "afterany": DependencyKind.ENDED,
}
_BY_DEPENDENCY = {kind: word for word, kind in DEPENDENCIES.items()}
_REASONS = (
    (r"^held by", _BY_GATE[Gate.HELD]),  # of an array, all of whose tasks are held one by one
    (r"\bcloses? in \d+ s, and", "ReqNodeNotAvail"),
    (r"^needs \d|can be placed|has no room", "Resources"),
    (r"throttle", "JobArrayTaskLimit"),
    (r"user_max|one user", "AssocMaxGRESPerJob"),
    (r"the cell is frozen", "PartitionDown"),
    (r"share by weight|go first|behind|which waits with priority", "Priority"),
    (r"tenant .*(limit|guarantee|borrow|lend|quota)", "AssocGrpGRES"),
    (r"can never run|not present", "PartitionConfig"),
    (r"tried again|tries again|rest", "BeginTime"),
    (r"cordoned|lost|quarantined|closed|left alone|not lent", "ReqNodeNotAvail"),
    (r"deadline", "DeadLine"),
    (r"priority|turn|queue", "Priority"),
)
"""Words of a pending reason, and Slurm's code for it; the first that fits. Else `Resources`."""
_ENDING = re.compile(r"when its workers have left")


def state(row: JobRow) -> str:
    """The state of a job in Slurm's long form."""
    if row.state != JobState.FAILED:
        is_ending = bool(row.blockers) and _ENDING.search(row.blockers[0]) is not None
        return "COMPLETING" if is_ending else _BY_STATE[row.state]
    if row.error.startswith("ran into its time_limit_s"):
        return "TIMEOUT"
    if row.failure is not None and row.failure.reason in OUT_OF_MEMORY:
        return "OUT_OF_MEMORY"
    if row.error.startswith(NODE_FAULT):
        return "NODE_FAIL"
    return "DEADLINE" if "deadline" in row.error and row.attempt == 0 else "FAILED"


_ACCOUNTED = {"CONFIGURING": "PENDING", "COMPLETING": "RUNNING"}


def accounted(row: JobRow) -> str:
    """The state of a job as `sacct` has it: Slurm's accounting knows no state on the way to
    another, and submitit takes one that it does not know for an end.
    """
    found = state(row)
    return _ACCOUNTED.get(found, found)


def compact(row: JobRow) -> str:
    """The state in two or three letters."""
    return COMPACT[state(row)]


def sentence(row: JobRow) -> str:
    """Why a job is where it is, in Aryl's words; empty where there is nothing to report."""
    return row.blockers[0] if row.blockers else row.error


def reason(row: JobRow) -> str:
    """Slurm's code for why a job waits or ended."""
    if row.state == JobState.PENDING:
        if isinstance(row.gate, Gate):
            return _BY_GATE[row.gate]
        why = sentence(row)
        if not why:
            return "None"
        found = (code for words, code in _REASONS if re.search(words, why, re.IGNORECASE))
        return next(found, "Resources")
    ended = {
        "TIMEOUT": "TimeLimit",
        "FAILED": "NonZeroExitCode",
        "OUT_OF_MEMORY": "OutOfMemory",
        "NODE_FAIL": "NodeDown",
        "DEADLINE": "DeadLine",
    }
    return ended.get(state(row), "None")


def exit_code(row: JobRow) -> str:
    """Exit code and signal in Slurm's form, `1:0` or `0:9`."""
    code = row.exit_code or 0
    return f"0:{-code}" if code < 0 else f"{code}:0"


def title(row: JobRow) -> str:
    """The name that its user gave to a job, rules or not."""
    return request_of(row).title or row.name


def nodes_of(row: JobRow) -> tuple[str, ...]:
    """Where a job runs; of one that ended, where its latest attempt ran."""
    return row.nodes or request_of(row).ran_on


def node_count(row: JobRow) -> int:
    """Slurm's number of nodes: one for each worker that is there, of a job that ended for each
    worker of its largest gang.
    """
    if row.state in FINAL_JOB_STATES:
        asked = request_of(row)
        return asked.most_workers or asked.ran_workers or row.min_workers
    return max(row.worker_count, row.min_workers)


def started_s(row: JobRow) -> float | None:
    """When the present attempt of a job ran, or the last one of an ended job; None: it waits."""
    return None if row.state == JobState.PENDING else request_of(row).attempt_started_at_s


def elapsed_s(row: JobRow, now_s: float) -> float:
    """Time since the present attempt of a job ran, or until it ended."""
    begun_s = started_s(row)
    if begun_s is None:
        return 0.0
    return max(0.0, (now_s if row.finished_at_s is None else row.finished_at_s) - begun_s)


def cpu_s(row: JobRow, now_s: float) -> float:
    """CPU-seconds of the present attempt of a job: its gang may have grown and shrunk."""
    asked = request_of(row)
    worker_s = asked.worker_s or elapsed_s(row, now_s) * node_count(row)
    return max(1, asked.cpus_per_worker) * (worker_s if started_s(row) is not None else 0.0)


def end_s(row: JobRow) -> float | None:
    """When a job ended, or will run into its time limit; None: neither is known."""
    begun_s, limit_s = started_s(row), request_of(row).time_limit_s
    if row.finished_at_s is not None or begun_s is None or limit_s is None:
        return row.finished_at_s
    return begun_s + limit_s


def dependency(row: JobRow) -> str:
    """What a job still waits for in Slurm's form, `afterok:12,afterany:13_4`; empty: nothing."""
    found = request_of(row).waits_for
    return ",".join(f"{_BY_DEPENDENCY[each.when]}:{each.job}" for each in found)


# --- partitions and nodes ----------------------------------------------------------------------

DEFAULT_PARTITION = "all"
"""The partition of all nodes with whole GPUs, which a job uses that names no GPU type."""


def partition(gpu_type: str) -> str:
    """The partition of a GPU type: its name without the maker and without blanks."""
    plain = gpu_type.removeprefix("NVIDIA ").strip()
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", plain) or DEFAULT_PARTITION


def partitions(row: JobRow) -> str:
    """The partitions that a job accepts."""
    types = request_of(row).gpu_types
    return ",".join(dict.fromkeys(map(partition, types))) or DEFAULT_PARTITION


def types_meant(text: str, known: Iterable[str]) -> tuple[str, ...]:
    """GPU types that a partition's or a GRES's name stands for; empty: none.

    A whole name comes first, however it is written; else a name that a type begins with or has as
    one of its words, such as `h100`.
    """
    wanted = text.lower()
    types = sorted(set(known))
    same = [kind for kind in types if wanted in (kind.lower(), partition(kind).lower())]
    if same:
        return tuple(same)
    words = {kind: re.split(r"[^a-z0-9.]+", kind.lower()) for kind in types if not is_mig(kind)}
    near = [k for k in words if wanted in words[k] or partition(k).lower().startswith(wanted)]
    return tuple(near)


def node_types(row: NodeRow) -> tuple[str, ...]:
    """The GPU types of a node."""
    return tuple(kind for kind in row.gpu_type.split(", ") if kind)


def node_partitions(row: NodeRow) -> list[str]:
    """The partitions that a node is in."""
    types = node_types(row)
    whole = [DEFAULT_PARTITION] if any(not is_mig(kind) for kind in types) or not types else []
    return [*whole, *dict.fromkeys(map(partition, types))]


def node_state(row: NodeRow) -> str:
    """The state of a node in Slurm's long form.

    A node that serves inference, or is on its way to or from a service, is `reserved`; a lent one
    has the state of its GPUs.
    """
    if row.role == NodeRole.LOST or not row.is_heard:
        return "down"
    if row.is_cordoned or row.is_draining or row.role == NodeRole.QUARANTINED or row.closed:
        return "draining" if row.gpus_held else "drained"
    if row.role not in (NodeRole.TRAINING, NodeRole.ON_LOAN):
        return "reserved"
    if not row.gpus_held:
        return "idle"
    return "allocated" if row.gpus_held >= row.gpus else "mixed"


NODE_COMPACT = {
    "down": "down",
    "draining": "drng",
    "drained": "drain",
    "reserved": "resv",
    "idle": "idle",
    "allocated": "alloc",
    "mixed": "mix",
}


def features(row: NodeRow) -> str:
    """The labels of a node, each as `--constraint` takes it; `(null)` without any."""
    labels = row.labels or {}
    return ",".join(label_text(key, labels[key]) for key in sorted(labels)) or "(null)"


def node_gres(row: NodeRow) -> str:
    """The GPUs of a node in Slurm's form."""
    types = node_types(row)
    if not row.gpus:
        return "(null)"
    return f"gpu:{partition(types[0])}:{row.gpus}" if len(types) == 1 else f"gpu:{row.gpus}"
