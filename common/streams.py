"""The names of a cell's streams and buckets in JetStream."""

from __future__ import annotations

from common.subjects import token

LEADER_KEY = "leader"
"""The one key of `leader_bucket`."""


def journal(cell: str) -> str:
    """The stream of a cell's journal."""
    return f"ARYL_JOURNAL_{token(cell, what='cell')}"


def snapshots(cell: str) -> str:
    """The stream of a cell's engine snapshots."""
    return f"ARYL_SNAPSHOT_{token(cell, what='cell')}"


def history(cell: str) -> str:
    """The stream of the events of each job, node and service."""
    return f"ARYL_HISTORY_{token(cell, what='cell')}"


def leader_bucket(cell: str) -> str:
    """The bucket with the leader's lease."""
    return f"leader_{token(cell, what='cell')}"


def leader_stream(cell: str) -> str:
    """The stream in which JetStream keeps `leader_bucket`."""
    return f"KV_{leader_bucket(cell)}"


def leader_subject(cell: str) -> str:
    """The subject on which `LEADER_KEY` is written."""
    return f"$KV.{leader_bucket(cell)}.{LEADER_KEY}"
