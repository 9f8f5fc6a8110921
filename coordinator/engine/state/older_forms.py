"""States as earlier versions saved them, brought to the form of today.

A reader takes missing fields as their defaults and passes over unknown ones, so a field that only
moved would be lost in silence. `STATE_VERSION` grows with each change of that kind, and the way
from the version before is added here.

1: all fields of a job and of a node stood side by side.
2: those that belong together stand in groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from common.errors import ProtocolError
from coordinator.engine.state.tables import STATE_VERSION

JOB_FIELDS_OF_1 = {
    "attempt": ("attempt", "number"),
    "attempt_ran_at_s": ("attempt", "ran_at_s"),
    "gpu_type": ("attempt", "gpu_type"),
    "endpoint": ("attempt", "endpoint"),
    "next_worker_index": ("attempt", "next_worker_index"),
    "gang_deadline_s": ("attempt", "gang_deadline_s"),
    "succeeded_workers": ("attempt", "succeeded_workers"),
    "progress_at_start": ("attempt", "start_step"),
    "is_packed": ("attempt", "is_packed"),
    "packed_speed_ratio": ("attempt", "packed_speed_ratio"),
    "awaited_nodes": ("attempt", "awaited_nodes"),
    "worker_s": ("clock", "worker_s"),
    "worker_s_at_s": ("clock", "at_s"),
    "attained_gpu_s": ("clock", "attained_gpu_s"),
    "progress_gpu_s": ("clock", "progress_gpu_s"),
    "checkpoint": ("saves", "checkpoint"),
    "checkpoint_at_s": ("saves", "at_s"),
    "saved_gpu_s": ("saves", "attained_gpu_s"),
    "expected_work_s": ("estimate", "expected_work_s"),
    "estimate_source": ("estimate", "source"),
    "measured_left_s": ("estimate", "measured_left_s"),
    "measured_worker_s": ("estimate", "measured_worker_s"),
    "measured_work_s": ("estimate", "measured_work_s"),
    "longest_work_s": ("estimate", "longest_work_s"),
    "first_step": ("estimate", "first_step"),
    "first_worker_s": ("estimate", "first_worker_s"),
    "first_work_s": ("estimate", "first_work_s"),
    "suspended_at_s": ("suspension", "since_s"),
    "suspended_s": ("suspension", "total_s"),
    "suspended_before_s": ("suspension", "before_attempt_s"),
    "preemption_count": ("counts", "preemptions"),
    "node_fault_count": ("counts", "node_faults"),
    "own_fault_count": ("counts", "own_faults"),
    "resize_count": ("counts", "resizes"),
    "suspension_count": ("counts", "suspensions"),
    "migration_count": ("counts", "migrations"),
    "pending_since_s": ("wait", "pending_since_s"),
    "total_queueing_s": ("wait", "queueing_s"),
    "ended_workers": ("ended", "workers"),
    "earlier_workers": ("ended", "earlier"),
    "left_at_s": ("ended", "at_s"),
}
"""Where a field of a job of version 1 stands in version 2: its group, and its name there."""

NODE_FIELDS_OF_1 = {
    "is_heard": ("contact", "is_heard"),
    "heard_at_s": ("contact", "heard_at_s"),
    "silent_since_s": ("contact", "silent_since_s"),
    "reported_epoch": ("contact", "epoch"),
    "reported_generation": ("contact", "generation"),
    "desired_role": ("desired", "role"),
    "generation": ("desired", "generation"),
    "validation": ("desired", "validation"),
    "last_lease_id": ("homecoming", "lease_id"),
    "reclaim_at_s": ("homecoming", "reclaim_at_s"),
    "is_awaited": ("homecoming", "is_awaited"),
    "stage_durations_s": ("homecoming", "stage_durations_s"),
    "is_cordoned": ("cordon", "is_cordoned"),
    "is_draining": ("cordon", "is_draining"),
    "cordon_reason": ("cordon", "reason"),
    "refused_starts": ("failed_starts", "refused"),
    "refused_last": ("failed_starts", "last"),
    "hung_starts": ("failed_starts", "hung"),
    "closed_reason": ("failed_starts", "closed_reason"),
    "ledger_error": ("ledger", "error"),
    "unknown_workers": ("ledger", "unknown_workers"),
    "stores": ("ledger", "stores"),
    "stale_stops": ("ledger", "stale_stops"),
    "left_reservations": ("ledger", "left_reservations"),
    "acknowledged": ("ledger", "acknowledged"),
}
"""The same for a node."""


class _VersionOnly(Struct):
    version: int = 1
    """Version 1 did not name itself."""


_version_decoder = msgspec.msgpack.Decoder(_VersionOnly)


def brought_up(blob: bytes) -> bytes:
    """A saved state of this version or an earlier one, in the form of this version.

    Raises:
        ProtocolError: a later version wrote it.
        msgspec.MsgspecError, ValueError: the bytes are no saved state.
    """
    version = _version_decoder.decode(blob).version
    if version > STATE_VERSION:
        raise ProtocolError(
            f"snapshot: field version: {version}, written by a newer coordinator; this one reads "
            f"up to {STATE_VERSION}"
        )
    if version == STATE_VERSION:
        return blob
    state = msgspec.msgpack.decode(blob, type=dict[str, Any])
    for table, moves in (("jobs", JOB_FIELDS_OF_1), ("nodes", NODE_FIELDS_OF_1)):
        for entry in state.get(table, {}).values():
            _regroup(entry, moves)
    state["version"] = STATE_VERSION
    return msgspec.msgpack.encode(state)


def _regroup(entry: dict[str, Any], moves: Mapping[str, tuple[str, str]]) -> None:
    groups: dict[str, dict[str, Any]] = {}
    for old, (group, name) in moves.items():
        if old in entry:  # a version before 1 may lack it
            groups.setdefault(group, {})[name] = entry.pop(old)
    for group, values in groups.items():
        entry[group] = entry.get(group, {}) | values
