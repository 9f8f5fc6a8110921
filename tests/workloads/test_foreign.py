"""Traces and logs of others: read, put in order, or named as what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from coordinator.sim.inputs.inputs import read_workload, reordered
from coordinator.workloads.formats import parse_jobs, read_jobs
from tests.tables import each_row
from tests.workloads.damaged import DATA

OPENB = "name,cpu_milli,memory_mib,num_gpu,gpu_milli"
SWF = "; Version: 2.2\n; MaxProcs: 64\n"
SWF_ROW = "1 0 5 600 8 -1 -1 8 900 -1 1 1 1 1 1 1 -1 -1\n"
SACCT = (
    "JobID|User|Submit|ElapsedRaw|AllocTRES|State\n101|ann|2026-01-05T08:00:00|9|gres/gpu=8|DONE\n"
)
PHILLY = '[\n {"status": "Pass", "vc": "ee9e8c", "jobid": "application_1", "attempts": []}]\n'
DLRM = "instance_sn,role,gpu_request,creation_time,scheduled_time,deletion_time\ni,HN,1,,,\n"


def error_of(text: str) -> str:
    """What reading a trace of that text says."""
    with pytest.raises(ConfigError) as raised:
        parse_jobs("t", text)
    return str(raised.value)


def test_helios_is_read() -> None:
    """Wall times without a zone; the tenant is the virtual cluster. One that never started is left
    out, as is one without a GPU where that is asked for."""
    trace = read_jobs(DATA / "helios.csv", skip_zero_gpus=True)
    assert (trace.format, trace.skipped_zero_gpus, trace.skipped_not_run) == ("helios", 1, 1)
    first, second = trace.jobs
    assert (first.gpus, first.cpus, first.tenant, first.user) == (8, 32, "vc3", "u1")
    assert second.submit_s - first.submit_s == 239.0
    assert second.duration_s == 300.0


def test_a_list_of_openb_that_is_not_sorted_is_put_in_order_with_a_notice(tmp_path: Path) -> None:
    """As the gpushare lists are published; it says of how many rows that is so."""
    trace = tmp_path / "t.csv"
    trace.write_text(
        f"{OPENB},gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
        "p-1,4000,8192,1,1000,,BE,Succeeded,500,900,500\n"
        "p-2,4000,8192,1,1000,,BE,Succeeded,100,700,100\n"
        "p-3,4000,8192,1,1000,,BE,Succeeded,600,700,600\n"
    )
    workload = read_workload(str(trace), cluster="1x8")
    assert [job.job_id for job in workload.jobs] == ["p-2", "p-1", "p-3"]
    assert reordered(workload) == (
        f"{trace}: 1 row stands behind a later submission: the trace is put in order of submission"
    )
    assert workload.source.lines == {"p-1": 2, "p-2": 3, "p-3": 4}


@each_row(
    ("text", "said"),
    [
        (SWF + SWF_ROW, "Standard Workload Format (SWF)"),
        (SWF_ROW * 2, "Standard Workload Format (SWF)"),
        (SACCT, "accounting of Slurm (sacct -P)"),
        (PHILLY, "a job log of Philly in JSON"),
        (f"{OPENB}\np-1,4000,8192,1,1000\n", "a list of OpenB pods without times"),
        (DLRM, "no known trace begins so"),
    ],
)
def test_what_is_not_read_is_named(text: str, said: str) -> None:
    """Not its first line taken for column names, nor a column that another format would have."""
    found = error_of(text)
    assert found.startswith("t: line 1: column ")
    assert said in found


def test_most_of_a_format_is_that_format() -> None:
    """A header with half of its columns is told what it lacks; one with less is none of it."""
    assert "missing from a trace in philly format" in error_of("timestamp,duration,x\n1,2,3\n")
    assert "no known trace begins so" in error_of("timestamp,x,y\n1,2,3\n")
