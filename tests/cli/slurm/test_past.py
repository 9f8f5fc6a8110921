"""`sacct` of jobs that the cell has forgotten: the same lines, from the history, each job once."""

from __future__ import annotations

from typing import TypeVar

from msgspec.structs import replace

from common.api import (
    ApiErrorCode,
    Cancel,
    EndedJobRow,
    EndedJobs,
    JobRow,
    Jobs,
    ListEndedJobs,
    ListJobs,
    Submit,
)
from common.history import JobRecord, Requested
from common.messages import Message
from common.model import ArraySpec, JobSpec, JobState
from coordinator.cli.slurm import cell as cell_reads
from coordinator.cli.slurm import past, sacct
from coordinator.cli.slurm.cell import of_tasks
from coordinator.service.coordinator import Coordinator
from tests.cli.fake_cell import NOW_S, FakeCell, refusal
from tests.cli.slurm.fake_slurm import cell, row, slurm
from tests.harness.cluster.coordinator import Cell, make_spec

M = TypeVar("M", bound=Message)


def lines(rows: list[JobRow]) -> dict[str, dict[str, str]]:
    """Every field of `sacct`, by job."""
    found = [sacct.Line(row, NOW_S) for row in rows]
    return {
        line.row.job_id: {name: field.text(line) for name, (_, field) in sacct.FIELDS.items()}
        for line in found
    }


async def asked(service: Cell, request: Message, kind: type[M]) -> M:
    reply = await service.ask(request)
    assert isinstance(reply, kind), reply
    return reply


async def run_and_cancel(service: Cell, coordinator: Coordinator, spec: JobSpec) -> None:
    """A job that runs for a while, or an array of which one task does."""
    state = coordinator.engine.state
    await service.ask(Submit(spec=spec, request_id=spec.name))
    await service.until(
        lambda: any(each.attempt.ran_at_s for each in map(state.jobs.get, state.live_jobs) if each)
    )
    await service.clock.advance(7.0)
    await service.ask(Cancel(job_id=spec.name))
    await service.until(lambda: not state.live_jobs and not state.live_arrays)


async def test_a_forgotten_job_has_the_line_that_it_had_before() -> None:
    """In every field: of a job, and of tasks of an array that ran, or never had their turn."""
    single = replace(
        make_spec("single", workers=(2, 2)), env={"SLURM_JOB_NAME": "train.sh"}, priority=3,
        time_limit_s=600.0, cpus_per_worker=2, memory_bytes_per_worker=1 << 30, workdir="/w",
    )  # fmt: skip
    sweep = replace(make_spec("sweep"), array=ArraySpec(indices="3-9", throttle=1))
    async with Cell(training=2, has_index=True) as service:
        coordinator = await service.lead()
        await run_and_cancel(service, coordinator, single)
        await run_and_cancel(service, coordinator, sweep)
        known = (await asked(service, ListJobs(in_full=True), Jobs)).rows
        ended = (await asked(service, ListEndedJobs(since_at_s=0.0), EndedJobs)).rows
        of_array = (
            await asked(service, ListEndedJobs(since_at_s=0.0, job_numbers=(2,)), EndedJobs)
        ).rows
    before = lines(of_tasks(known, live_only=False))
    after = {name.partition("_[")[0]: line for name, line in
             lines([past.row_of(one.job) for one in ended]).items()}  # fmt: skip
    never = next(name for name, line in after.items() if "_[" in line["JobID"])
    for found in (before, after):  # the cell knows the end of the array alone
        del found[never]["End"]
    assert after == before
    assert {line["JobID"] for line in after.values()} == {"1", "2_3", "2_[4-9]"}
    assert [line["Elapsed"] > "00:00:05" for line in after.values()].count(True) == 2
    assert [one.job.job_id for one in of_array] == [
        one.job.job_id for one in ended if one.job.array_number
    ]


def ended_job(number: int, **changes: object) -> EndedJobRow:
    """The account of a job that failed a while ago."""
    job = JobRecord(
        job_id=f"j{number}", name="train", tenant="lab", user="ada", state="failed", exit_code=3,
        submitted_at_s=NOW_S - 900.0, started_at_s=NOW_S - 800.0, ended_at_s=NOW_S - 700.0,
        attempt_started_at_s=NOW_S - 800.0, attempts=1, number=number, nodes=("t0",), workers=1,
        min_workers=1, gpus_per_worker=8, requested=Requested(title="train.sh"),
    )  # fmt: skip
    return EndedJobRow(number=number, job=replace(job, **changes))


def with_past(*rows: JobRow | EndedJobRow) -> FakeCell:
    """A cell that knows some jobs; its history has 15, 16, two tasks of array 6, and others."""
    of = cell(*(each for each in rows if isinstance(each, JobRow)))
    task = {"array_number": 6, "array_indices": "0"}
    never = {"array_number": 6, "array_indices": "2-4", "state": "cancelled", "exit_code": None,
             "started_at_s": None}  # fmt: skip
    past_jobs = (
        ended_job(7, job_id="j6_0", **task),
        ended_job(6, job_id="j6_[2-4]", attempt_started_at_s=None, **never),
        ended_job(15),
        ended_job(16, failure="cpu_out_of_memory"),
        *(each for each in rows if isinstance(each, EndedJobRow)),
    )

    def ended(request: ListEndedJobs) -> EndedJobs:
        numbers = request.job_numbers or ()
        found = [
            one
            for one in past_jobs
            if not numbers or {one.job.number, one.job.array_number} & set(numbers)
        ]
        return EndedJobs(rows=tuple(found))

    of.answers[ListEndedJobs] = ended
    return of


def test_sacct_shows_each_job_once_in_the_order_of_the_numbers() -> None:
    """A job that the cell knows has the cell's line, also where the history has it too."""
    of = with_past(row(16), row(17))
    found = slurm(of, "sacct", "-naXP", "-o", "JobID,State,ExitCode,Elapsed,NodeList")
    assert found.out.splitlines() == [
        "6_0|FAILED|3:0|00:01:40|t0",
        "6_[2-4]|CANCELLED|0:0|00:00:00|t0",
        "15|FAILED|3:0|00:01:40|t0",
        "16|RUNNING|0:0|00:03:00|i0,t0",
        "17|RUNNING|0:0|00:03:00|i0,t0",
    ]
    out = slurm(with_past(), "sacct", "-naP", "-j", "16", "-o", "JobID,State").out
    assert out == "16|OUT_OF_MEMORY\n"


def test_sacct_chooses_among_forgotten_jobs_as_among_others() -> None:
    """By number, task, state, name and span of time."""
    for options, numbers in (
        ("-j 6", ["6_0", "6_[2-4]"]),
        ("-j 6_0", ["6_0"]),
        ("-j 6_3,15", ["6_[2-4]", "15"]),
        ("-j 99", []),
        ("-a -s CA", ["6_[2-4]"]),
        ("-a --name nosuch", []),
        ("-u bob", []),
        ("-a -E now-20minutes", []),
        ("-a -S now-10minutes", []),
    ):
        found = slurm(with_past(), "sacct", "-nP", "-o", "JobID", *options.split())
        assert (found.code, found.err, found.out.split()) == (0, "", numbers), options


def test_sacct_shows_the_largest_gang_and_what_the_workers_used() -> None:
    """An elastic job has no more nodes than it had at one time, however many workers it began."""
    used = {"workers": 4, "worker_s": 172.0, "requested": Requested(cpus_per_worker=2)}
    of = with_past(ended_job(20, **used))
    names = "AllocNodes,AllocCPUS,ReqNodes,ReqCPUS,CPUTimeRAW,ElapsedRaw,AllocTRES"
    assert slurm(of, "sacct", "-nP", "-j", "20", "-o", names).out == (
        "4|8|1|2|344|100|billing=32,cpu=8,gres/gpu=32,node=4\n"
    )


async def test_a_forgotten_task_that_was_in_the_line_is_no_cancelled_range() -> None:
    """Its row comes from the history, which a caller may not see; the array shows the others."""
    sweep = replace(make_spec("sweep"), array=ArraySpec(indices="3-9", throttle=1))
    async with Cell(training=2) as service:
        coordinator = await service.lead()
        await run_and_cancel(service, coordinator, sweep)
        coordinator.engine.state.jobs.clear()
        known = (await asked(service, ListJobs(in_full=True), Jobs)).rows
    assert [cell_reads.number_of(each) for each in of_tasks(known, live_only=False)] == ["1_[4-9]"]


def test_sacct_orders_forgotten_tasks_by_index() -> None:
    """The history has them in the order of their ends."""
    tasks = (ended_job(number, job_id=f"j9_{index}", array_number=9, array_indices=str(index))
             for number, index in ((31, 10), (32, 2), (33, 0)))  # fmt: skip
    found = slurm(with_past(*tasks), "sacct", "-nP", "-j", "9", "-o", "JobID")
    assert found.out.split() == ["9_0", "9_2", "9_10"]


def test_sacct_of_a_span_shows_the_jobs_that_ran_in_it_as_running() -> None:
    """With -s R also those that have ended since; not one that runs now and began later."""
    of = with_past(row(17))
    for span, numbers in (
        ("-S now-13minutes -E now-12minutes", ["6_0", "15", "16"]),
        ("-S now-1minute", ["17"]),
        ("-S now-20minutes -E now-14minutes", []),
    ):
        found = slurm(of, "sacct", "-naP", "-s", "R", "-o", "JobID", *span.split())
        assert found.out.split() == numbers, span
    found = slurm(of, "sacct", "-S", "now", "-E", "now-1minute")
    assert (found.code, found.out) == (1, "")
    assert "--starttime" in found.err and "is after --endtime" in found.err


def test_sacct_shows_no_state_on_the_way_to_another() -> None:
    """Slurm's accounting has none, and submitit takes CONFIGURING for the end of a job."""
    of = cell(row(17, state=JobState.STARTING), row(18, state=JobState.PREEMPTING))
    shown = slurm(of, "sacct", "-nP", "-j", "17,18", "-o", "JobID,State").out
    assert shown.splitlines() == ["17|PENDING", "18|RUNNING"]
    assert slurm(of, "sacct", "-nP", "-j", "17,18", "-s", "PD", "-o", "JobID").out == "17\n"


def test_sacct_asks_the_history_only_for_what_it_may_have() -> None:
    """Not for jobs that the cell knows: submitit asks each few seconds."""
    for options, questions in (("-j 17", 0), ("-j 17,18", 1), ("-u ada", 1)):
        of = with_past(row(17))
        slurm(of, "sacct", *options.split())
        asked_for = [each for each in of.asked if isinstance(each, ListEndedJobs)]
        assert len(asked_for) == questions, options


def test_sacct_without_a_history_says_what_is_missing_and_shows_what_the_cell_knows() -> None:
    """On stderr, with exit code 0."""
    of = cell(row(17))
    of.answers[ListEndedJobs] = refusal(
        ApiErrorCode.UNAVAILABLE, "this coordinator keeps no history", "history"
    )
    found = slurm(of, "sacct", "-nP", "-o", "JobID")
    assert (found.code, found.out) == (0, "17\n")
    assert found.err == (
        "sacct: jobs that the cell has forgotten are missing: field history: this coordinator "
        "keeps no history\n"
    )
