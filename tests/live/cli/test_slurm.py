"""Slurm's commands on a real cell, and a real program that calls them: submitit."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from common.api import Jobs, ListJobs
from common.model import FINAL_JOB_STATES, JobState
from coordinator.cli.slurm.main import COMMANDS
from coordinator.demo.cell import COORDINATOR
from tests.harness.live.cell import LiveHarness, running_cell
from tests.harness.live.commands import Said, environ_of, slurm_command

pytestmark = [pytest.mark.nats, pytest.mark.slow]

PROGRAM = """\
import sys
import time

import submitit


def tenfold(value):
    environment = submitit.JobEnvironment()
    return 10 * value + environment.global_rank, environment.num_tasks


def fails():
    raise ValueError("no such luck")


executor = submitit.AutoExecutor(folder=sys.argv[1], cluster="slurm")
executor.update_parameters(timeout_min=5, gpus_per_node=2, tasks_per_node=2, slurm_job_name="sub")
print(executor.submit(tenfold, 4).results())
try:
    executor.submit(fails).result()
except submitit.core.utils.FailedJobError as error:
    print("no such luck" in str(error))
job = executor.submit(time.sleep, 600)
while job.state != "RUNNING":
    time.sleep(0.5)
    job.watcher.update()
job.cancel()
print(job.job_id)
executor.update_parameters(tasks_per_node=1, gpus_per_node=1, slurm_array_parallelism=2)
print([job.result()[0] for job in executor.map_array(tenfold, [1, 2, 3])])
"""
"""What a user of submitit writes: results of two tasks, an error, and a job that is cancelled,
and an array."""

SAVES = """\
#!/bin/bash
#SBATCH --gpus=1 --signal=USR2@20 --open-mode=append --output=save-%j.out
srun bash -c 'trap "echo saved; exit 0" USR2; touch began-$SLURM_RESTART_COUNT
              [ "$SLURM_RESTART_COUNT" ] && exit 0
              while :; do sleep 0.1; done'
echo "srun ended with $?"
"""
"""A job that saves at its signal, and ends by itself at its second start."""

NODES = """\
#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=2 --gpus-per-node=4 --output=nodes-%j.out
srun sh -c 'echo "$SLURM_PROCID of $SLURM_NTASKS on $SLURM_NODEID"' | sort
[ "$SLURM_NODEID" = 0 ] || exit 0
scontrol show hostnames
squeue --noheader -j "$SLURM_JOB_ID" -o '%i %T %D'
"""


IN_PROCESS = frozenset(COMMANDS) - {"srun"}
"""Commands that the test gives in its own process. `srun` is a process: it answers signals for its
job. submitit and the jobs call the others as processes."""


class Shell:
    """A login node: Slurm's commands on its PATH, and a directory that all nodes see."""

    def __init__(self, harness: LiveHarness, directory: Path) -> None:
        self.harness = harness
        self.directory = directory
        self.environ = {
            **os.environ,
            **environ_of(harness.cell.nats.url),
            "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
            "PWD": str(directory),
        }

    async def run(self, *argv: str, types: str = "", code: int = 0) -> str:
        """Standard output of a command, which ends with this code."""
        if argv[0] in IN_PROCESS:
            said = await slurm_command(self.environ, *argv, types=types)
        else:
            said = await self._process(*argv)
        assert said.code == code, (argv, said)
        return said.out

    async def _process(self, *argv: str) -> Said:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.directory,
            env=self.environ,
        )
        out, err = await process.communicate()
        assert process.returncode is not None
        return Said(process.returncode, out.decode(), err.decode())

    async def until_ended(self, number: str, state: JobState) -> None:
        """Wait until a job is over."""
        await self.harness.until_job(
            await self.job_id(number), f"is {state}", lambda row: row.state == state
        )

    async def job_id(self, number: str) -> str:
        """Aryl's own id of a job."""
        shown = await self.run("scontrol", "-o", "show", "job", number)
        return shown.split("ArylJobId=")[1].split()[0]


async def test_slurm_s_commands_on_a_real_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch scripts, steps, signals, `srun` and submitit, by Slurm's own names."""
    async with running_cell(tmp_path, training_nodes=2, inference_nodes=0) as harness:
        shell = Shell(harness, tmp_path / "out")
        monkeypatch.chdir(shell.directory)  # where the commands are given
        await harness.aryl("slurm", "link", "bin")
        # On one cell: it takes longer to start than each of these.
        await a_script_travels(shell)
        await steps_of_two_nodes(shell)
        await a_signal_and_a_drain(shell)
        await srun_alone(shell)
        await expected_starts(shell)
        await arrays_and_dependencies(shell)
        await submitit_works(shell)
        await forgotten_jobs(shell)


async def a_script_travels(shell: Shell) -> None:
    """A file that is edited after sbatch changes nothing; the job's output lies where it ran."""
    script = shell.directory / "job.sh"
    script.write_text('#!/bin/sh\necho "first $1 $SLURM_JOB_NAME"\nexit 3\n')
    out = await shell.run("sbatch", "--gpus=1", "job.sh", "x")
    script.write_text("#!/bin/sh\necho second\n")
    number = out.removeprefix("Submitted batch job ").strip()
    await shell.until_ended(number, JobState.FAILED)
    assert (shell.directory / f"slurm-{number}.out").read_text() == "first x job.sh\n"
    shown = await shell.run("sacct", "-nPj", number, "-o", "JobID,State,ExitCode")
    assert shown == f"{number}|FAILED|3:0\n"


async def steps_of_two_nodes(shell: Shell) -> None:
    """Each node runs the script and its own tasks; the commands work inside."""
    number = (await shell.run("sbatch", "--parsable", types=NODES)).strip()
    await shell.until_ended(number, JobState.SUCCEEDED)
    first = (shell.directory / f"nodes-{number}.out").read_text().splitlines()
    second = (shell.directory / f"nodes-{number}.out.1").read_text().splitlines()
    assert (first[:2], second) == (
        ["0 of 4 on 0", "1 of 4 on 0"],
        ["2 of 4 on 1", "3 of 4 on 1"],
    )
    assert sorted(first[2:-1]) == ["train-1", "train-2"]
    assert first[-1] == f"{number} RUNNING 2"


async def a_signal_and_a_drain(shell: Shell) -> None:
    """A job that loses its node gets its signal, saves, and starts again elsewhere."""
    number = (await shell.run("sbatch", "--parsable", types=SAVES)).strip()

    async def began() -> bool:
        return (shell.directory / "began-").exists()

    await shell.harness.until("it runs", began)
    node = (await shell.run("squeue", "-h", "-j", number, "-o", "%N")).strip()
    await shell.harness.aryl("node", "drain", node, "--yes")
    await shell.until_ended(number, JobState.SUCCEEDED)
    await shell.harness.aryl("node", "uncordon", node)
    lines = (shell.directory / f"save-{number}.out").read_text().splitlines()
    assert lines == ["saved", "srun ended with 0", "srun ended with 0"]
    assert (shell.directory / "began-1").exists()


async def srun_alone(shell: Shell) -> None:
    """Outside of a job it is a job: the logs of its nodes and its exit code."""
    out = await shell.run("srun", "-n2", "-l", "--gpus=1", "sh", "-c", "echo hi; exit 4", code=4)
    assert {"0: hi", "1: hi"} <= set(out.splitlines())
    script = 'echo "on $SLURM_NODEID"; exit $((3 * SLURM_NODEID))'
    out = await shell.run("srun", "-N2", "-l", "--gpus-per-node=3", "sh", "-c", script, code=3)
    assert {"0: on 0", "1: on 1"} <= set(out.splitlines())


async def expected_starts(shell: Shell) -> None:
    """A job behind one with a time limit has a start and a node, and so would another."""
    runs = await shell.run(
        "sbatch", "--parsable", "-N2", "--gpus-per-node=4", "--time=9", "--wrap", "sleep 600"
    )
    waits = await shell.run("sbatch", "--parsable", "--gpus=4", "--time=9", "--wrap", "sleep 600")
    await shell.run("sbatch", "--test-only", "--gpus=4", "--wrap", "true")
    await shell.run("sbatch", "--test-only", "-N3", "--gpus=12", "--wrap", "true", code=1)
    line = await shell.run("squeue", "--start", "--noheader", "-o", "%i %S %Y")
    number, starts, node = line.split()
    assert (number, node[:-1]) == (waits.strip(), "train-")
    assert starts != "N/A"
    await shell.run("scancel", runs.strip(), number)
    await shell.until_ended(runs.strip(), JobState.CANCELLED)


async def arrays_and_dependencies(shell: Shell) -> None:
    """A held array shows one line for its tasks, a task is cancelled, and a job comes after it."""
    wrap = 'echo "$SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT"'
    array = await shell.run(
        "sbatch", "--parsable", "--hold", "--gpus=1", "--array=0-3%2", "--output=task-%a.out",
        "--wrap", wrap,
    )  # fmt: skip
    number = array.strip()
    after = (
        await shell.run(
            "sbatch", "--parsable", "--gpus=1", f"--dependency=afterany:{number}", "--wrap", "true"
        )
    ).strip()
    shown = await shell.run("squeue", "-h", "-o", "%i %T %r %E")
    assert shown.splitlines() == [
        f"{number}_[0-3%2] PENDING JobHeldUser (null)",
        f"{after} PENDING Dependency afterany:{number}",
    ]
    shown = await shell.run("scontrol", "-o", "show", "job", f"{number}_2")
    assert f"ArrayJobId={number} ArrayTaskId=2 " in shown and "Reason=JobHeldUser" in shown
    await shell.run("scancel", f"{number}_3")
    await shell.run("scontrol", "update", f"JobId={number}", "ArrayTaskThrottle=3")
    assert (await shell.run("squeue", "-h", "-o", "%i")).startswith(f"{number}_[0-2%3]\n")
    await shell.run("scontrol", "release", number)
    await shell.until_ended(after, JobState.SUCCEEDED)
    texts = [(shell.directory / f"task-{index}.out").read_text() for index in range(3)]
    assert texts == [f"{index} of 4\n" for index in range(3)]
    assert not (shell.directory / "task-3.out").exists()
    ended = await shell.run("sacct", "-nXPj", number, "-o", "JobID,State")
    lines = {f"{number}_{index}|COMPLETED" for index in range(3)} | {f"{number}_[3]|CANCELLED"}
    assert lines <= set(ended.splitlines())


async def submitit_works(shell: Shell) -> None:
    """The whole way of a program that knows nothing of Aryl."""
    script = shell.directory / "program.py"
    script.write_text(PROGRAM)
    out = await shell.run(sys.executable, str(script), str(shell.directory / "logs"))
    results, has_failed, number, of_array = out.splitlines()
    assert (results, has_failed) == ("[(40, 2), (41, 2)]", "True")
    assert of_array == "[10, 20, 30]"
    await shell.until_ended(number, JobState.CANCELLED)
    shown = await shell.run("sacct", "-o", "JobID,State", "--parsable2", "-j", number)
    assert shown == f"JobID|State\n{number}|CANCELLED\n"


async def forgotten_jobs(shell: Shell) -> None:
    """What sacct says of ended jobs stays the same as the cell forgets them, over a restart too."""
    call = ("sacct", "-anXP", "-S", "today", "-o", "JobID,State,ExitCode,Start,End,Elapsed,NNodes")

    async def has_ended() -> bool:
        return all(row.state in FINAL_JOB_STATES for row in await shell.harness.jobs())

    await shell.harness.until("every job has ended", has_ended)
    before = set((await shell.run(*call)).splitlines())
    settings = shell.harness.cell.run_dir / f"{COORDINATOR}.toml"
    text = settings.read_text()
    settings.write_text(text.replace("engine = {", "engine = {finished_jobs_kept = 1, ", 1))
    await shell.harness.kill_coordinator()
    await shell.harness.cell.ready(shell.harness.client)
    for _ in range(2):
        await shell.run("srun", "--gpus=1", "true")
    known = (await shell.harness.client.ask(ListJobs(), Jobs)).rows
    assert len(known) <= 4 < len(before)
    # The end of tasks that never had their turn is their own, and no longer that of their array.
    after = set((await shell.run(*call)).splitlines())
    assert {line for line in before - after if "_[" not in line} == set()
    assert len({line.split("|")[0] for line in after}) == len(after) == len(before) + 2
