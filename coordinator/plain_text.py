"""Values and rows of the API as plain text for people; the terminal and the dashboard share it.

Units are in names everywhere else; here they become text. Pure.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterable

import msgspec

from common.api import (
    ArrayRow,
    ClosedRow,
    JobRow,
    NodeRow,
    ServiceRow,
    Status,
    UnknownLoadRow,
    WindowRow,
)
from common.model import FINAL_JOB_STATES, Gate, JobState
from coordinator.policies.contract.text import counted

MISSING = "-"
"""Stands for an unknown value."""


def duration(seconds: float | None) -> str:
    """A length of time in at most two units: `45s`, `3m 20s`, `2h 5m`, `4d 1h`."""
    if seconds is None:
        return MISSING
    if seconds < 0:
        return "-" + duration(-seconds)
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 10 and seconds != int(seconds):
        return f"{seconds:.1f}s"
    left = int(seconds)
    sizes = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
    units = list(sizes)
    for place, unit in enumerate(units):
        if left >= sizes[unit] or unit == "s":
            parts = [f"{left // sizes[unit]}{unit}"]
            rest = left % sizes[unit]
            if unit != "s" and rest // sizes[units[place + 1]]:
                parts.append(f"{rest // sizes[units[place + 1]]}{units[place + 1]}")
            return " ".join(parts)
    raise AssertionError("seconds is the last unit")


def ago(at_s: float | None, now_s: float) -> str:
    """An instant relative to now: `3m ago`. One unit: the eye compares rows, not seconds."""
    if at_s is None:
        return MISSING
    passed_s = now_s - at_s
    if passed_s < 1:
        return "now"
    return duration(passed_s).split()[0].replace(".0s", "s") + " ago"


def instant(at_s: float | None) -> str:
    """An instant as RFC 3339 in UTC, to the second."""
    if at_s is None:
        return MISSING
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


NEAR_S = 1800.0
"""An instant within this is shown with its seconds."""


def local_instant(at_s: float, now_s: float) -> str:
    """An instant in local time, for the near future: `18:00` of today, else with its date.

    With its seconds, if it has any, where it is near.
    """
    at, now = (
        datetime.datetime.fromtimestamp(round(s), datetime.UTC).astimezone() for s in (at_s, now_s)
    )
    clock = f"{at:%H:%M:%S}" if at.second and at_s - now_s < NEAR_S else f"{at:%H:%M}"
    return clock if at.date() == now.date() else f"{at:%a %Y-%m-%d} {clock}"


def percent(ratio: float | None) -> str:
    """A ratio of 0..1 as a whole percentage."""
    return MISSING if ratio is None else f"{ratio * 100:.0f}%"


def number(value: float | None) -> str:
    """A quantity without a needless decimal."""
    return MISSING if value is None else f"{value:.1f}".removesuffix(".0")


def plain(text: str) -> str:
    """Text on one line, control characters out: a job's error must not drive a terminal."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


MOST_INDICES = 20
"""Characters of an array's indices beside its id."""


def job_id(row: JobRow) -> str:
    """The id; of an array with its indices and throttle, as Slurm shows them: `j..._[0-99%5]`."""
    array = row.array
    if not isinstance(array, ArrayRow):
        return row.job_id
    text = array.indices
    if len(text) > MOST_INDICES:
        text = text[:MOST_INDICES].rpartition(",")[0] + ",..."
    return f"{row.job_id}_[{text}" + (f"%{array.throttle}]" if array.throttle else "]")


def tasks(array: ArrayRow, *, is_held: bool = False) -> str:
    """The tasks of an array by state, those that there are: `80 waiting, 5 running, 15 done`; of a
    held one `80 held`."""
    counts = (
        (array.waiting, "held" if is_held else "waiting"),
        (array.running, "running"),
        (array.succeeded, "done"),
        (array.failed, "failed"),
        (array.cancelled, "cancelled"),
    )
    return ", ".join(f"{count} {state}" for count, state in counts if count)


def without_tasks(rows: Iterable[JobRow], *, waiting_only: bool = False) -> list[JobRow]:
    """Rows without the tasks of arrays, which the row of the array sums up.

    waiting_only: tasks with GPUs stay.
    """
    return [
        row
        for row in rows
        if not isinstance(row.array_id, str) or (waiting_only and row.state != JobState.PENDING)
    ]


def in_order(rows: Collection[JobRow]) -> list[JobRow]:
    """Rows in order of submission, the tasks of an array behind its own row."""
    at_s = {row.job_id: row.submitted_at_s for row in rows}

    def place(row: JobRow) -> tuple[float, str, int]:
        if isinstance(row.array, ArrayRow):
            return row.submitted_at_s, row.job_id, -1
        if not isinstance(row.array_id, str) or not isinstance(row.array_index, int):
            return row.submitted_at_s, "", 0  # of one instant as they came
        return at_s.get(row.array_id, row.submitted_at_s), row.array_id, row.array_index

    return sorted(rows, key=place)


def job_state(row: JobRow) -> str:
    """The state; `STALLED` of one that runs and reports no progress any more, `held` of one that
    waits and is held; of an array, how its tasks are.
    """
    if isinstance(row.array, ArrayRow):
        return tasks(row.array, is_held=row.gate == Gate.HELD)
    if row.gate == Gate.HELD:
        return "held"
    return "STALLED" if isinstance(row.stalled_s, float) else str(row.state)


def workers(row: JobRow) -> str:
    """`3 of 2:4`: how many run of how many it can use. Of an array, how many each task can use."""
    bounds = f"{row.min_workers}:{row.max_workers}"
    wanted = bounds if row.max_workers > row.min_workers else str(row.min_workers)
    is_whole = row.state in FINAL_JOB_STATES or isinstance(row.array, ArrayRow)
    return wanted if is_whole else f"{row.worker_count} of {wanted}"


def progress(row: JobRow) -> str:
    """Share of the steps where both are known, else the step. Of an array, the share that ended."""
    if isinstance(row.array, ArrayRow):
        array = row.array
        return percent((array.succeeded + array.failed + array.cancelled) / array.tasks)
    if row.step is not None and row.total_steps:
        return percent(row.step / row.total_steps)
    return number(row.step)


def why(row: JobRow) -> str:
    """What blocks a job now, or how it ended. For a waiting job: the latest fault, which is why it
    stopped, and its first blocker, which is why it does not start. The class of a failure stands
    before its exit code: a narrow table cuts off the end.
    """
    blocker = row.blockers[0] if row.blockers else ""
    if said := row.error if row.state in FINAL_JOB_STATES else blocker or row.error:
        return said
    if row.state != JobState.FAILED or row.exit_code is None:
        return ""
    code = f"exit code {row.exit_code}"
    return f"{row.failure.title} ({code})" if row.failure else code


def closes(window: WindowRow) -> str:
    """When a node closes: `closes at 18:00, in 2h`."""
    at = local_instant(window.at_s, window.at_s - window.left_s)
    return f"closes at {at}, in {duration(round(window.left_s))}"


def role(row: NodeRow) -> str:
    """The role, whether its server is down, whether it is closed by an order or because it can take
    no work, whether running work has to leave or has left, and when it closes.
    """
    said = ["server down"] if row.is_server_down else []
    if isinstance(row.load_unknown, UnknownLoadRow):
        said.append("load unknown")
    if row.gpus_out:
        said.append(f"{counted(row.gpus_out, 'GPU')} out")
    if row.is_cordoned:
        drained = "draining" if row.jobs else "drained"
        said.append(drained if row.is_draining else "cordoned")
    if isinstance(row.closed, ClosedRow):
        said.append("closed")
    if isinstance(row.window, WindowRow):
        said.append(closes(row.window))
    return f"{row.role} ({', '.join(said)})" if said else str(row.role)


def heard(row: NodeRow) -> str:
    """How long ago this coordinator heard it."""
    return "never" if row.heard_ago_s is None else ago(0.0, row.heard_ago_s)


def load(row: ServiceRow) -> str:
    """Its load, and for how many of its nodes that is only the last known one."""
    found = row.load_unknown
    if not isinstance(found, UnknownLoadRow):
        return number(row.load_per_s)
    if len(found.nodes) == found.serving:
        return f"{number(row.load_per_s)} (unknown)"
    return f"{number(row.load_per_s)} ({len(found.nodes)} of {found.serving} unknown)"


def glance(found: Status) -> list[tuple[str, str]]:
    """The cell in a few lines of name and value."""
    only = "decides only what services get back"
    frozen = f"; FROZEN, {only} (aryl freeze --off)" if found.is_frozen else ""
    return [
        ("cell", f"{found.cell}, up {duration(found.up_s)}, epoch {found.epoch}"),
        ("policy", f"{found.policy}{frozen}"),
        ("nodes", f"{found.nodes_heard} of {found.nodes} heard{_closed(found)}"),
        (
            "training",
            f"{found.training_gpus_held} of {found.training_gpus} GPUs held, "
            f"busy {percent(found.gpu_busy_ratio_training)}",
        ),
        (
            "inference",
            f"{found.serving_nodes} of {found.inference_nodes} nodes serving, "
            f"busy {percent(found.gpu_busy_ratio_inference)}{_unknown(found)}",
        ),
        (
            "on loan",
            f"{counted(found.on_loan_nodes, 'node')}, {found.on_loan_gpus_held} of "
            f"{found.on_loan_gpus} GPUs held; {counted(found.coming_home_nodes, 'node')} "
            f"coming home{_recall(found)}",
        ),
        (
            "jobs",
            f"{found.running_jobs} running{_stalled(found)}{_suspended(found)}, "
            f"{found.starting_jobs} starting, {found.pending_jobs} pending{_gated(found)}",
        ),
        *_without_room(found),
        *_gpus_out(found),
        ("bad messages", str(found.bad_messages)),
        *([("overload", _shed(found.reports_shed))] if found.reports_shed else []),
        *([("clock", found.clock_warning)] if found.clock_warning else []),
    ]


def _gpus_out(found: Status) -> list[tuple[str, str]]:
    """Shown only where faults took GPUs out; highlighted once the breaker holds further ones."""
    if not found.gpus_out:
        return []
    more = f"; BREAKER OPEN: {found.gpu_breaker}" if found.gpu_breaker else ""
    return [("faults", f"{counted(found.gpus_out, 'GPU')} out (aryl node list){more}")]


def _closed(found: Status) -> str:
    """Nodes that take nothing new by themselves, where there are any."""
    if not found.nodes_closed:
        return ""
    return f", {found.nodes_closed} CLOSED to new work (aryl node list)"


def _shed(count: int) -> str:
    """That reports are shed, and what that costs."""
    return f"{counted(count, 'report')} shed so far: only the newest of each node is read"


def _stalled(found: Status) -> str:
    """Running jobs that stopped reporting progress, if there are any."""
    return f" ({found.stalled_jobs} STALLED)" if found.stalled_jobs else ""


def _gated(found: Status) -> str:
    """Pending jobs that are not in the queue, where there are any."""
    said = [f"{found.held_jobs} held"] if found.held_jobs else []
    if found.dependent_jobs:
        said.append(f"{found.dependent_jobs} after other jobs")
    if found.never_jobs:
        said.append(f"{found.never_jobs} of them NEVER")
    return f" ({', '.join(said)})" if said else ""


def _suspended(found: Status) -> str:
    """Jobs that stand still while others compute on their GPUs, where there are any."""
    return f", {found.suspended_jobs} suspended" if found.suspended_jobs else ""


def _without_room(found: Status) -> list[tuple[str, str]]:
    """Pending jobs without room in the fleet, and the reason of the first of them."""
    count = found.jobs_without_room
    if not count:
        return []
    who = counted(count, "pending job has", "pending jobs have")
    first = "" if count == 1 else "the first: "
    return [("no room", f"{who} no room in this fleet: {first}{'; '.join(found.without_room_why)}")]


def _recall(found: Status) -> str:
    """The services that lend nothing by an order; a recall that ended for each service by itself
    still holds for others.
    """
    names = [*found.recalled_services, *(["services to come"] if found.is_recalled else [])]
    return f"; RECALLED: {', '.join(names)} (aryl recall --all --off)" if names else ""


def _unknown(found: Status) -> str:
    """Services whose load is unknown, or of some of their nodes."""
    if found.loads_unknown is msgspec.UNSET:
        return ""
    return f"; LOAD UNKNOWN: {', '.join(found.loads_unknown)} (aryl service list)"
