"""Settings files and job files as lists, from the structs that read them. Must not know values."""

from __future__ import annotations

import inspect
import re

from agent.settings import AgentSettings
from blocks.source import member_notes, one_line, short_range
from common import model
from common.model import JobSpec
from common.profile import JobProfile
from common.settings import SettingRow, describe
from coordinator.service.settings import CoordinatorSettings

SWITCH = "true or false"
MOST = " and <= 1e+09"
"""The pages say once that no time is above it."""
_NOTE = re.compile(r"^(\w+): (.+(?:\n    .+)*)$", re.MULTILINE)
_JOB_NOTES = {
    "name": "for people; `job describe` takes it as well as the id",
    "command": "program and arguments, run without a shell",
    "workers": "how many workers it can use; `min` = `max` makes it inelastic",
    "workers.min": "the gang without which it does not run",
    "workers.max": "no more than this, also when GPUs are idle",
    "gpus_per_worker": "GPUs of each worker, all on one node",
    "workdir": "where each worker starts; must be there on every node",
    "env": "variables of its own; never wins over a variable that Aryl sets",
    "cpus_per_worker": "share of the node's cores under contention (systemd `CPUWeight`), no limit",
    "memory_bytes_per_worker": "limit of a worker's unit (systemd `MemoryMax`); 0 is none",
    "gpu": "which GPUs it accepts",
    "priority": "higher goes first, before any other rule of the queue",
    "preemptibility": "`non`: never on a lent node; `semi`: only flexible workers; `full`: all",
    "deadline_s": "wanted end, from submission; the policies of `qos` act on it, others show it",
    "time_limit_s": "an attempt that ran this long is stopped, with its grace, and fails",
    "checkpoint": "how to ask it to save",
    "retry": "its budget for its own faults; preemptions and node faults are free of it",
    "retry.max_restarts": "own faults after which it is started again",
    "retry.on_exit_codes": "only these exit codes are tried again, whatever the failure class; "
    "empty means any, but for the class `never`",
    "retry.reset_after_s": "an attempt that ran this long makes `max_restarts` whole again; none: "
    "it counts for the job's whole life. All agents must be of this version",
    "launcher": "`torchrun`: Aryl puts torchrun before the command, one per worker",
    "rendezvous": "where its gang meets, if that is a program of its own",
    "array": "makes it a [job array](#job-arrays)",
    "app": "name of a group of trials of its tenant, which the policy `themis` serves as one; "
    "others show it. Another tenant's app of the same name is another app",
    "prerun": "a try on a few GPUs before the gang starts, which shows most failures as well",
    "profile": "how it runs; policies that need more say what they take",
    "depends_on[]": "other jobs, all of which come first: see [jobs in order](#jobs-in-order)",
    "depends_on[].job": "its id",
    "depends_on[].when": "what must have become of it",
    "require": "terms of labels, all of which a node fits: see [choose nodes](#choose-nodes)",
    "exclude": "terms of labels, none of which a node fits",
    "require_nodes": "the only nodes to run on",
    "exclude_nodes": "nodes not to run on",
    "is_held": "`true`: it waits outside the queue until `aryl job release`",
}
"""Meanings that no docstring of the struct gives; a key without one fails the build of the page."""


_NOT_A_USER_S = "prerun.gang"
"""The coordinator's to set: a job file that has it is refused."""


def agent_settings() -> str:
    """`agent.toml`, key by key."""
    return _list(_without_repeats(describe(AgentSettings)))


def coordinator_settings() -> str:
    """`coordinator.toml`, key by key."""
    return _list(describe(CoordinatorSettings))


def job_file() -> str:
    """A job file, key by key; the meanings are the docstrings of the parts."""
    notes = _parts_notes() | _JOB_NOTES
    rows = [row for row in describe(JobSpec) if not row.key.startswith(_NOT_A_USER_S)]
    return _list([row._replace(meaning=notes[row.key]) for row in rows])


def _parts_notes() -> dict[str, str]:
    """What the structs say themselves: below a field, or in the docstring of a part."""
    notes = {name: note for name, note in member_notes(JobSpec).items() if note}
    parts = {
        "gpu": model.GpuRequest,
        "checkpoint": model.CheckpointSpec,
        "rendezvous": model.RendezvousSpec,
        "profile": JobProfile,
        "prerun": model.PrerunSpec,
        "array": model.ArraySpec,
    }
    for key, part in parts.items():
        for name, note in _NOTE.findall(inspect.getdoc(part) or ""):
            notes[f"{key}.{name}"] = note
    return notes


def _without_repeats(rows: tuple[SettingRow, ...]) -> list[SettingRow]:
    """The keys of equal tables once; a later table names the first."""
    kept: list[SettingRow] = []
    first_with: dict[tuple[SettingRow, ...], str] = {}
    repeated: tuple[str, ...] = ()
    for row in rows:
        if row.key.startswith(repeated):
            continue
        prefix = f"{row.key}."
        keys = tuple(
            other._replace(key=other.key.removeprefix(prefix))
            for other in rows
            if other.key.startswith(prefix)
        )
        first = first_with.setdefault(keys, row.key) if keys else row.key
        if first != row.key:
            repeated += (prefix,)
            if row.meaning != f"as {first}":
                row = row._replace(meaning=f"{row.meaning}; its keys are those of `{first}`")
        kept.append(row)
    return kept


def _list(rows: list[SettingRow] | tuple[SettingRow, ...]) -> str:
    lines: list[str] = []
    for row in rows:
        kind = "" if row.type == SWITCH and row.default else _type(row.type)
        about = ", ".join(each for each in (kind, _default(row.default)) if each)
        lines.append(f"- `{row.key}` ({about}): {one_line(row.meaning)}".rstrip(": "))
    return "\n".join(lines)


def _type(text: str) -> str:
    text = text.replace("text matching " + model.TOKEN_PATTERN, "token")
    return short_range(one_line(text.replace(MOST, "")))


def _default(text: str) -> str:
    return text if text in ("required", "") else f"`{text}`"
