"""Known traces and logs that are not read: their names, and the way to convert each."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SWF_HEAD = re.compile(r"\s*;\s*[A-Za-z]+\s*:")
_SWF_ROW = re.compile(r"\s*-?[0-9.]+(?:[ \t]+-?[0-9.]+){17}\s*")

SWF = (
    "a log in the Standard Workload Format (SWF), which counts processors and has no GPUs: not "
    "read; docs/traces.md says how to make a trace of one (From other logs)"
)
SACCT = (
    "accounting of Slurm (sacct -P): not read; docs/traces.md says how to make a trace of it (From "
    "other logs)"
)
PHILLY = (
    "a job log of Philly in JSON (cluster_job_log), whose GPUs are those of each attempt: not "
    "read; the same trace as a table, as ElasticFlow cut it, is (docs/traces.md)"
)
OPENB_WITHOUT_TIMES = (
    "column creation_time: missing: a list of OpenB pods without times (the multigpu lists): "
    "these say what was asked for and not when, so that nothing can be played; the default and "
    "gpushare lists of the same data have times (docs/traces.md)"
)


def not_read(text: str) -> str:
    """The kind of a known file that is not read, by its beginning; empty for any other."""
    first = text.partition("\n")[0]
    begin = text[:2000].lstrip()
    if _SWF_HEAD.match(first) or _SWF_ROW.fullmatch(first):
        return SWF
    if first.count("|") and {"JobID", "JobIDRaw"} & {name.strip() for name in first.split("|")}:
        return SACCT
    if begin.startswith("[") and '"attempts"' in begin and '"vc"' in begin:
        return PHILLY
    return ""


def without_times(columns: Sequence[str]) -> str:
    """Why a table of pods is no trace: it has no times; empty for any other table."""
    have = set(columns)
    times = {"creation_time", "scheduled_time", "deletion_time"}
    if {"name", "num_gpu", "gpu_milli"} <= have and not times & have:
        return OPENB_WITHOUT_TIMES
    return ""
