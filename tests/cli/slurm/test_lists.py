"""`squeue`, `sinfo`, `sacct`, `scontrol`, `scancel`: the lines that Slurm's clients read."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from common.api import (
    ApiError,
    ApiErrorCode,
    ArrayRow,
    Cancel,
    Describe,
    EndedJobs,
    JobRow,
    ListEndedJobs,
)
from common.failures import Failure, RetryClass
from common.messages import Message
from common.model import Dependency, DependencyKind, JobSpec, JobState, NodeRole, Pool, WorkerRange
from common.slurm import times
from coordinator.cli.slurm import words
from tests.cli.fake_cell import NOW_S, FakeCell, node_row, refusal
from tests.cli.slurm.fake_slurm import A100, H100, asked, cell, row, slurm
from tests.tables import each_row

RUNNING = row(17)
WAITING = row(
    18,
    name="b",
    user="bob",
    state=JobState.PENDING,
    nodes=(),
    worker_count=0,
    started_at_s=None,
    blockers=("needs 16 GPUs of type H100, 2 workers of 8; 0 free on 0 nodes",),
    request=asked(title="b(1)", gpu_types=(H100,), time_limit_s=None),
)
ENDED = row(
    16,
    state=JobState.FAILED,
    exit_code=3,
    nodes=(),
    worker_count=0,
    finished_at_s=NOW_S - 60.0,
    request=asked(ran_on=("t0",), ran_workers=1),
)
ALL = (ENDED, RUNNING, WAITING)
SPEC = JobSpec(
    name="b",
    command=("/bin/sh", "-c", "run", "#!/bin/sh\ntrue\n", "x"),
    workers=WorkerRange(min=2, max=4),
    env={"ARYL_BATCH_TASKS": "1", "ARYL_BATCH_OUTPUT": "/w/slurm-%j.out"},
)


def failure(reason: str) -> Failure:
    """Why a worker failed, by its log."""
    return Failure(reason=reason, title="title", retry=RetryClass.NEVER)


def test_squeue_shows_slurm_s_columns() -> None:
    """Jobs that run come first; ended ones are left out."""
    assert slurm(cell(*ALL), "squeue").out.splitlines() == [
        "             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)",
        "                17       all train.sh      ada  R       3:00      2 i0,t0",
        "                18 H100_80GB     b(1)      bob PD       0:00      2 (Resources)",
    ]


def test_times_are_those_of_the_present_attempt() -> None:
    """A requeued job has its whole limit again; one whose gang is not ready has used nothing."""
    began_s = NOW_S - 60.0
    again = row(17, started_at_s=NOW_S - 9000.0, request=asked(attempt_started_at_s=began_s))
    ends = began_s + 3600.0
    found = slurm(cell(again), "squeue", "-h", "-o", "%M|%L|%e|%S").out.strip().split("|")
    assert found == ["1:00", "59:00", times.instant(ends), times.instant(began_s)]
    shown = slurm(cell(again, spec=SPEC), "scontrol", "-o", "show", "job", "17").out
    assert "RunTime=00:01:00" in shown and f"EndTime={times.instant(ends)}" in shown
    starting = replace(again, state=JobState.STARTING, request=asked())
    found = slurm(cell(starting), "squeue", "-h", "-o", "%M|%L|%e|%S").out.strip().split("|")
    assert found == ["0:00", "1:00:00", "N/A", "N/A"]


def test_dependencies_are_shown_in_slurm_s_form() -> None:
    """By number, as they were asked for."""
    waits_for = (
        Dependency(job="12", when=DependencyKind.OK),
        Dependency(job="13_4", when=DependencyKind.ENDED),
    )
    waits = replace(WAITING, request=asked(waits_for=waits_for))
    found = slurm(cell(RUNNING, waits), "squeue", "-h", "-o", "%i %E").out.splitlines()
    assert found == ["17 (null)", "18 afterok:12,afterany:13_4"]
    shown = slurm(cell(waits, spec=SPEC), "scontrol", "-o", "show", "job", "18").out
    assert "Dependency=afterok:12,afterany:13_4" in shown


def array() -> JobRow:
    """Array 6: two tasks run, one waits, two were cancelled, and one of these had started."""
    ranges = {"waiting": "2", "running": "0-1", "cancelled": "3-4"}
    counts: dict[str, Any] = {
        "waiting": 1,
        "running": 2,
        "succeeded": 0,
        "failed": 0,
        "cancelled": 2,
    }
    tasks = ArrayRow(indices="0-4", throttle=2, tasks=5, ranges=ranges, **counts)
    return replace(row(6, array=tasks, worker_count=4, blockers=(BOUND,)), request=asked())


BOUND = "at most 2 at once (throttle)"


def task(index: int, state: JobState) -> JobRow:
    """A task of it that is a job, with a number of its own."""
    of = {"array_id": "j6", "array_index": index, "state": state}
    return replace(
        row(7 + index, request=asked(array_number=6, array_index=index), **of),
        job_id=f"j6_{index}",
    )


TASKS = (
    array(),
    task(0, JobState.RUNNING),
    task(1, JobState.RUNNING),
    task(4, JobState.CANCELLED),
)


def test_tasks_that_wait_are_one_line_with_the_amounts_and_the_reason_of_one_task() -> None:
    """Also while other tasks run; `show job` of the array is about those that wait."""
    of = cell(*TASKS, spec=SPEC)
    found = slurm(of, "squeue", "-h", "-o", "%i|%T|%r|%D|%M|%S").out.splitlines()
    assert found[-1] == "6_[2%2]|PENDING|JobArrayTaskLimit|2|0:00|N/A"
    assert slurm(of, "squeue", "-h", "-t", "PD", "-O", "Sentence:60").out.strip() == BOUND
    shown = slurm(of, "scontrol", "-o", "show", "job", "6").out
    assert "ArrayTaskId=2 " in shown and "JobState=PENDING Reason=JobArrayTaskLimit" in shown


def test_tasks_that_were_cancelled_before_they_started_are_one_line_of_sacct() -> None:
    """Those that had started have lines of their own."""
    of = cell(*TASKS)
    lines = slurm(of, "sacct", "-nXP", "-j", "6", "-o", "JobID,State,Elapsed,Start").out
    assert lines.splitlines() == [
        "6_[2%2]|PENDING|00:00:00|Unknown",
        *(f"6_{index}|RUNNING|00:03:00|{times.instant(NOW_S - 180.0)}" for index in range(2)),
        "6_[3]|CANCELLED|00:00:00|Unknown",
        f"6_4|CANCELLED|00:03:00|{times.instant(NOW_S - 180.0)}",
    ]
    assert "6_[3]" not in slurm(of, "squeue", "-h", "-o", "%i").out


PENDING_FORMAT = "%i|%r|%L|%l|%b|%a"


@each_row(
    "words_, lines",
    [
        (["--noheader", "-o", "%i %t", "-t", "all", "-u", "ada"], ["17 R", "16 F"]),
        (["-h", "--format=%i|%T", "--states=all", "--name", "train"], ["17|RUNNING", "16|FAILED"]),
        (["-h", "-j", "16,18", "-t", "all", "-o", "%i"], ["18", "16"]),
        (["-h", "-j", "17_[0-3]", "-o", "%A"], ["17"]),
        (["--me", "-h", "-o", "%i:%u"], ["17:ada"]),
        (
            ["-h", "-t", "PD", "-o", PENDING_FORMAT],
            ["18|Resources|UNLIMITED|UNLIMITED|gres/gpu:H100_80GB_HBM3:8|lab"],
        ),
        (
            ["-h", "-p", "h100_80gb_hbm3", "-O", "JobID:4,State:.10,UserName"],
            ["18     PENDINGbob"],
        ),
    ],
)
def test_squeue_filters_and_formats(words_: list[str], lines: list[str]) -> None:
    """The calls of Nextflow and Snakemake among them."""
    assert slurm(cell(*ALL), "squeue", *words_).out.splitlines() == lines


def test_squeue_asks_for_ended_jobs_only_where_they_are_wanted() -> None:
    """A cell may remember thousands."""
    for options, live_only in (((), True), (("-t", "all"), False), (("-t", "R"), True)):
        of = cell(*ALL)
        slurm(of, "squeue", *options)
        [request] = of.asked
        assert getattr(request, "is_live_only", None) == live_only


def test_squeue_prints_json_with_slurm_s_words() -> None:
    """Beside them stands the whole reason."""
    found = slurm(cell(*ALL), "squeue", "--json").json["jobs"]
    assert [job["job_state"] for job in found] == [["RUNNING"], ["PENDING"]]
    assert found[1]["state_description"].startswith("needs 16 GPUs")


@each_row(
    "changes, state",
    [
        ({"state": JobState.STARTING}, "CONFIGURING"),
        ({"state": JobState.RESIZING}, "RUNNING"),
        ({"state": JobState.SUSPENDED}, "SUSPENDED"),
        ({"state": JobState.PREEMPTING}, "COMPLETING"),
        ({"blockers": ("cancelled by a/b: it ends when its workers have left t0",)}, "COMPLETING"),
        ({"state": JobState.SUCCEEDED}, "COMPLETED"),
        ({"state": JobState.CANCELLED}, "CANCELLED"),
        ({"state": JobState.FAILED, "exit_code": 1}, "FAILED"),
        ({"state": JobState.FAILED, "error": "ran into its time_limit_s of 60 s"}, "TIMEOUT"),
        ({"state": JobState.FAILED, "failure": failure("cpu_out_of_memory")}, "OUT_OF_MEMORY"),
        ({"state": JobState.FAILED, "error": "node fault: t0 was lost"}, "NODE_FAIL"),
    ],
)
def test_states_have_slurm_s_words(changes: dict[str, Any], state: str) -> None:
    """A preempted job is not over: it completes, and waits again."""
    found = row(**changes)
    assert words.state(found) == state
    assert words.compact(found) in words.COMPACT.values()


@each_row(
    "sentence, code",
    [
        ("needs 8 GPUs; 0 free and 3 held by flexible workers", "Resources"),
        ("it is its turn, but of 2 workers of 4 GPUs only 1 can be placed", "Resources"),
        ("behind j1, which does not fit (the order is strict)", "Priority"),
        ("t0 is kept for j1, which waits with priority 5 and can have it in 9 s", "Priority"),
        ("tenant a uses 8 GPUs, and its share by weight is 4.0: jobs of tenants below", "Priority"),
        ("tenant a: 4 GPUs on top of the 8 that it uses exceeds its guarantee of 8 and its borrow "
         "limit of 0", "AssocGrpGRES"),
        ("can never run here: no node of type H100 has 16 GPUs", "PartitionConfig"),
        ("can never run here: needs 9 GPUs at one time, and tenant a may use 8: its guarantee of 8",
         "AssocGrpGRES"),
        ("GPU type H200 not present", "PartitionConfig"),
        ("tries again in 20 s (restart 1 of 3): exit code 1 on t0", "BeginTime"),
        ("2 nodes of type H100 cordoned", "ReqNodeNotAvail"),
        ("t0 closes in 51 s, and j has no time limit", "ReqNodeNotAvail"),
        ("t0, t1 close in 51 s, and j may run until 9 s after that", "ReqNodeNotAvail"),
        ("the cell is frozen: nothing is started, resized or lent", "PartitionDown"),
        ("held by lab/ada: aryl job release j6_0", "JobHeldUser"),
    ],
)  # fmt: skip
def test_pending_reasons_have_slurm_s_codes(sentence: str, code: str) -> None:
    """The nearest code; the sentence itself stands in `Sentence` and `ArylReason`."""
    assert words.reason(row(state=JobState.PENDING, blockers=(sentence,))) == code


NODES = (
    node_row("t1", gpu_type=H100, gpus_held=0),
    node_row("t2", gpu_type=H100, gpus_held=3),
    node_row("t3", gpu_type=A100),
    node_row("t4", gpu_type=A100, is_cordoned=True, gpus_held=0, detail="fan"),
    node_row("i1", gpu_type=H100, home_pool=Pool.INFERENCE, role=NodeRole.SERVING, service="chat"),
    node_row("i2", gpu_type=H100, home_pool=Pool.INFERENCE, role=NodeRole.ON_LOAN, service="chat"),
    node_row("i3", gpu_type=H100, role=NodeRole.LOST),
)


def test_sinfo_groups_nodes_by_partition_and_state() -> None:
    """The default partition has a star; nodes that serve are reserved, lent ones are not."""
    lines = slurm(cell(nodes=NODES), "sinfo", "-h", "-o", "%P %t %D %N").out.splitlines()
    assert lines == [
        "all* idle 1 t1",
        "all* mix 1 t2",
        "all* alloc 2 t3,i2",
        "all* drain 1 t4",
        "all* resv 1 i1",
        "all* down 1 i3",
        "A100-SXM4-80GB alloc 1 t3",
        "A100-SXM4-80GB drain 1 t4",
        "H100_80GB_HBM3 idle 1 t1",
        "H100_80GB_HBM3 mix 1 t2",
        "H100_80GB_HBM3 resv 1 i1",
        "H100_80GB_HBM3 alloc 1 i2",
        "H100_80GB_HBM3 down 1 i3",
    ]


def test_sinfo_counts_a_node_once_where_no_partition_is_asked_for() -> None:
    """A node is in several partitions, and scripts that count GPUs read these lines."""
    of = cell(nodes=NODES)
    assert slurm(of, "sinfo", "-h", "-o", "%D").out == "7\n"
    assert slurm(of, "sinfo", "-h", "-t", "alloc,mix", "-o", "%n %t").out.splitlines() == [
        "t2 mix",
        "t3 alloc",
        "i2 alloc",
    ]
    assert slurm(of, "sinfo", "-h", "-p", "A100-SXM4-80GB,all", "-t", "drain", "-o", "%D").out == (
        "1\n"
    )
    assert slurm(of, "sinfo", "-h", "-p", "nosuch", "-o", "%D").out == ""


def test_sinfo_by_node_shows_the_labels_and_why_a_node_is_closed() -> None:
    """`%f` has the labels of a node and nothing else: `--constraint` takes what it lists."""
    i2 = replace(NODES[5], labels={"rack": "r7", "nvlink": ""})
    of = cell(nodes=(*NODES[:5], i2, *NODES[6:]))
    lines = slurm(of, "sinfo", "-N", "-h", "-p", "all", "-n", "i2,t4", "-o", "%N %G %f %E").out
    assert lines.splitlines() == [
        "t4 gpu:A100-SXM4-80GB:8 (null) fan",
        "i2 gpu:H100_80GB_HBM3:8 nvlink,rack=r7 none",
    ]
    assert slurm(of, "sinfo", "-o", "%P").out.split()[:2] == ["PARTITION", "all*"]
    assert slurm(of, "sinfo", "-R", "-h", "-o", "%N|%E").out.splitlines()[:2] == [
        "t4|fan",
        "i3|none",
    ]


def test_sacct_answers_submitit_and_snakemake() -> None:
    """Their very calls."""
    of = cell(*ALL)
    call = "-o JobID,State,NodeList --parsable2 -j 16 -j 17 -j 99"
    assert slurm(of, "sacct", *call.split()).out.splitlines() == [
        "JobID|State|NodeList",
        "16|FAILED|t0",
        "17|RUNNING|i0,t0",
    ]
    call = (
        "-X --parsable2 --clusters all --noheader --format=JobIdRaw,State "
        "--starttime 2023-11-12T22:00 --endtime now --name train"
    )
    assert slurm(of, "sacct", *call.split()).out.splitlines() == ["16|FAILED", "17|RUNNING"]


def test_sacct_shows_a_table_with_its_defaults() -> None:
    """Widths, dashes, and a `+` where a text is cut."""
    lines = slurm(cell(*ALL), "sacct", "-j", "16").out.splitlines()
    assert lines == [
        "JobID           JobName  Partition    Account  AllocCPUS      State ExitCode ",
        "------------ ---------- ---------- ---------- ---------- ---------- -------- ",
        "16             train.sh        all        lab          4     FAILED      3:0 ",
    ]
    found = slurm(
        cell(*ALL), "sacct", "-P", "-n", "-j", "16", "-o", "Elapsed,AllocTRES,MaxRSS,JobName%4"
    )
    assert found.out == "00:02:00|billing=8,cpu=4,gres/gpu=8,mem=8192M,node=1||train.sh\n"


def test_sacct_leaves_out_others_jobs_and_other_days_unless_it_is_asked() -> None:
    """Without -j: one's own, of today."""
    of = cell(*ALL)
    assert slurm(of, "sacct", "-n", "-P", "-o", "JobID").out.split() == ["16", "17"]
    assert slurm(of, "sacct", "-a", "-n", "-P", "-o", "JobID").out.split() == ["16", "17", "18"]
    late = slurm(of, "sacct", "-n", "-P", "-o", "JobID", "-S", "now+1hour", "-E", "now+2hours")
    assert late.out.split() == ["17"]
    assert slurm(of, "sacct", "-s", "F", "-n", "-P", "-o", "JobID").out.split() == ["16"]


def test_scontrol_shows_a_job_in_slurm_s_form() -> None:
    """One line with -o; unknown keys are Aryl's own, with its name before them."""
    of = cell(*ALL, spec=SPEC)
    [line] = slurm(of, "scontrol", "-o", "show", "job", "17").out.splitlines()
    pairs = dict(part.split("=", 1) for part in line.split() if "=" in part)
    assert (pairs["JobId"], pairs["JobState"], pairs["NodeList"]) == ("17", "RUNNING", "i0,t0")
    assert (pairs["TimeLimit"], pairs["RunTime"]) == ("01:00:00", "00:03:00")
    assert (pairs["StdOut"], pairs["ArylJobId"]) == ("/w/slurm-17.out", "j17")
    assert slurm(of, "scontrol", "write", "batch_script", "17", "-").out == "#!/bin/sh\ntrue\n"


def test_scontrol_shows_partitions_as_snakemake_reads_them() -> None:
    """The name alone on its line, then pairs."""
    lines = slurm(cell(nodes=NODES), "scontrol", "show", "partition").out.splitlines()
    assert lines[0] == "PartitionName=all"
    assert "MaxTime=UNLIMITED" in " ".join(lines)
    assert "TotalNodes=7" in " ".join(lines)


def test_scontrol_expands_and_makes_node_lists_without_a_cell() -> None:
    """Batch scripts call it to find their first node."""
    of = cell()
    environ = {"SLURM_JOB_NODELIST": "n[1-2],m"}
    assert slurm(of, "scontrol", "show", "hostnames", environ=environ).out == "n1\nn2\nm\n"
    assert slurm(of, "scontrol", "show", "hostlist", "n1,n2,m").out == "n[1-2],m\n"
    assert of.asked == []


def test_an_unknown_job_is_an_error_where_it_is_one_in_slurm() -> None:
    """Of one job for squeue and scontrol; sacct and a list of several pass over it."""
    invalid = "slurm_load_jobs error: Invalid job id specified\n"
    for command, line, code, err in (
        ("squeue", "-j 99", 1, invalid),
        ("squeue", "-h -j 98,99", 0, ""),
        ("squeue", "-h -j 16", 0, ""),
        ("scontrol", "show job 99", 1, invalid),
        ("sacct", "-n -j 99", 0, ""),
        ("sinfo", "-h -p nosuch", 0, ""),
    ):
        of = with_no_other_job(cell(*ALL))
        found = slurm(of, command, *line.split())
        assert (found.code, found.out, found.err) == (code, "", err), line


def with_no_other_job(of: FakeCell) -> FakeCell:
    """The cell as it refuses jobs that it does not list, and has no history of them."""
    known = of.answers[Describe]
    rows = {name for each in ALL for name in (str(each.number), each.job_id)}

    def described(request: Describe) -> Message:
        assert callable(known)
        if request.name in rows:
            return known(request)
        return ApiError(code=ApiErrorCode.NOT_FOUND, message=f"no job {request.name!r}")

    of.answers |= {Describe: described, ListEndedJobs: EndedJobs(rows=())}
    return of


def test_scontrol_fills_the_names_of_output_files() -> None:
    """Of a job, a task and the tasks that wait, whose own numbers are not known."""
    env = {"ARYL_BATCH_OUTPUT": "/w/%x-%A_%a-%j.out", "ARYL_BATCH_ERROR": "/w/%4j-%u-%n"}
    spec = replace(SPEC, env=env)
    of = cell(RUNNING, array(), task(1, JobState.RUNNING), spec=spec)
    for name, output, error in (
        ("17", "/w/train.sh-17_4294967294-17.out", "/w/0017-ada-0"),
        ("8", "/w/train.sh-6_1-8.out", "/w/0008-ada-0"),
        ("6", "/w/train.sh-6_%a-%j.out", "/w/%j-ada-0"),
    ):
        shown = slurm(of, "scontrol", "-o", "show", "job", name).out
        assert f" StdErr={error} " in shown and f" StdOut={output} " in shown, shown


def test_scontrol_names_what_it_does_not_know() -> None:
    """A command, a thing, a node."""
    of = cell(nodes=NODES)
    for line, says in (
        ("reconfigure", "invalid keyword: reconfigure"),
        ("show topology", "invalid entity: topology"),
        ("show node nosuch", "Node nosuch not found"),
        ("update NodeName=t1 State=DRAIN", "expected JobId=JOB"),
        ("update JobId=17 Nosuch=1", "nosuch cannot be changed"),
        ("update JobId=17 ArrayTaskThrottle=x", "ArrayTaskThrottle: 'x', expected a count"),
        ("update JobId=17 ArrayTaskThrottle=2 Nice=1", "ArrayTaskThrottle stands alone"),
    ):
        found = slurm(of, "scontrol", *line.split())
        assert found.code == 1
        assert says in found.err, line


def cancelled(of: FakeCell) -> list[str]:
    """The jobs that were asked to end."""
    return [each.job_id for each in of.asked if isinstance(each, Cancel)]


@each_row(
    "options, jobs",
    [
        ("17", ["17"]),
        ("17 18", ["17", "18"]),
        ("17_3 17_[4-6]", ["17_3", "17_[4-6]"]),
        ("17,18 -Q", ["17", "18"]),
        ("--me", ["j17"]),
        ("-u bob -t PENDING", ["j18"]),
        ("--name=train --state=R", ["j17"]),
        ("-A other", []),
        ("--signal=KILL 17", ["17"]),
    ],
)
def test_scancel_ends_the_jobs_that_are_meant(options: str, jobs: list[str]) -> None:
    """By number, or all that every filter lets pass."""
    of = cell(*ALL)
    assert slurm(of, "scancel", *options.split()).code == 0
    assert cancelled(of) == jobs


def test_scancel_refuses_what_would_end_too_much_or_nothing() -> None:
    """No job named, a signal that is none to end, a number that no job has."""
    for options, says in (
        ("", "No job identification"),
        ("--signal=USR2 17", "--signal=USR2 is not supported"),
        ("-b 17", "--batch is not supported"),
    ):
        of = cell(*ALL)
        found = slurm(of, "scancel", *options.split())
        assert (found.code, cancelled(of)) == (1, [])
        assert says in found.err
    of = cell()
    of.answers[Cancel] = refusal(ApiErrorCode.NOT_FOUND, "no job '99'", "job")
    found = slurm(of, "scancel", "99")
    assert (found.code, found.err) == (
        1,
        "scancel: error: Kill job error on job id 99: Invalid job id specified\n",
    )
