"""`srun` outside of a job: the logs of all its nodes, and its exit code."""

from __future__ import annotations

from common.api import ApiErrorCode, Describe, Description, GetLogs, JobRow, Logs
from common.model import JobState
from tests.cli.fake_cell import FakeCell, refusal
from tests.cli.slurm.fake_slurm import asked, cell, row, slurm

RUNS = row(17, request=asked(ran_workers=2))
ENDED = row(17, state=JobState.FAILED, exit_code=4, request=asked(ran_workers=2))


def of_states(*rows: JobRow) -> FakeCell:
    """A cell in which a job is in one of these states after the other, the last for ever."""
    of = cell()
    of.answers[Describe] = [Description(kind="job", name="j17", job=each) for each in rows]
    return of


def test_srun_prints_the_logs_of_all_nodes_in_whole_lines() -> None:
    """A line that is not ended yet waits for its end, and none comes twice."""
    texts = {0: ["0: a\n0: ", "0: a\n0: b\n"], 1: ["1: c\n1: ", "1: c\n1: d"]}
    of = of_states(RUNS, RUNS, RUNS, ENDED)

    def log(request: GetLogs) -> Logs:
        index = request.worker_index or 0
        found = texts[index]
        text = found.pop(0) if len(found) > 1 else found[0]
        return Logs(text=text, node=f"t{index}", worker_index=index, attempt=1)

    of.answers[GetLogs] = log
    found = slurm(of, "srun", "-N2", "-l", "--gpus-per-node=1", "true")
    assert (found.code, found.out) == (4, "0: a\n1: c\n0: b\n1: d")


def test_srun_returns_the_highest_exit_code_of_any_task() -> None:
    """The job itself has that of the first node that failed."""
    of = of_states(RUNS, ENDED)

    def log(request: GetLogs) -> Logs:
        index = request.worker_index or 0
        text = f"srun: error: t{index}: task {index}: Exited with exit code {4 + 3 * index}\n"
        return Logs(text=text, node=f"t{index}", worker_index=index, attempt=1)

    of.answers[GetLogs] = log
    assert slurm(of, "srun", "-N2", "--gpus-per-node=1", "false").code == 7


def test_srun_of_a_job_that_never_ran_prints_its_end() -> None:
    """There is no log, and none is missed."""
    of = of_states(row(17, state=JobState.CANCELLED, error="by ada", request=asked()))
    of.answers[GetLogs] = refusal(ApiErrorCode.NOT_FOUND, "never started", "worker_index")
    found = slurm(of, "srun", "true")
    assert (found.code, found.out) == (1, "")
    assert "missing" not in found.err
    assert "error: job 17: by ada" in found.err
