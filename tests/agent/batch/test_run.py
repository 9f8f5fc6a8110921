"""A batch script on a worker: real processes, without an agent around them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.batch import variables
from agent.batch.run import children
from agent.workers.spec import BATCH

PATIENCE_S = 30.0
WORKER = {
    "PATH": os.environ["PATH"],
    "ARYL_JOB_ID": "jabc",
    "ARYL_JOB_NUMBER": "17",
    "ARYL_ATTEMPT": "1",
    "ARYL_WORKER_COUNT": "1",
    "ARYL_WORKER_INDEX": "0",
    "ARYL_NODES": "gpu-1",
    "ARYL_BATCH_TASKS": "2",
    "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
    "RANK": "0",
    "SLURM_JOB_NAME": "train",
}


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    return [pid, *(one for child in children(pid) for one in family(child))]


@contextlib.contextmanager
def begun(
    script: str, *arguments: str, tmp_path: Path, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """The runner of a script; its own temporary files lie below the test's.

    One that a test gives up ends with all that it has started.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(BATCH), script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={**WORKER, "TMPDIR": str(tmp_path), **variables},
    )
    with process:
        try:
            yield process
        except BaseException:
            for pid in family(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise


def ran(script: str, *arguments: str, tmp_path: Path, **variables: str) -> tuple[int, str]:
    """Exit code and log of a script."""
    with begun(script, *arguments, tmp_path=tmp_path, **variables) as process:
        log, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, log


def test_a_script_runs_once_with_its_interpreter_its_arguments_and_slurm_s_variables(
    tmp_path: Path,
) -> None:
    """As slurmd starts it; nothing is left of its files."""
    script = '#!/bin/bash -e\necho "$SLURM_JOB_ID $SLURM_JOB_NODELIST $SLURM_NTASKS $1 ${RANK-no}"'
    code, log = ran(script, "a b", tmp_path=tmp_path)
    assert (code, log) == (0, "17 gpu-1 2 a b no\n")
    assert list(tmp_path.iterdir()) == []


def test_output_goes_to_the_files_of_the_patterns_and_the_log_names_them(tmp_path: Path) -> None:
    """The end of the errors is in the log where a script fails: the reason is read there."""
    code, log = ran(
        "#!/bin/sh\necho out; echo err >&2; exit 3",
        tmp_path=tmp_path,
        ARYL_BATCH_OUTPUT=str(tmp_path / "%x-%j.out"),
        ARYL_BATCH_ERROR=str(tmp_path / "%j.err"),
    )
    assert code == 3
    assert (tmp_path / "train-17.out").read_text() == "out\n"
    assert (tmp_path / "17.err").read_text() == "err\n"
    assert log.endswith("17.err:\nerr\n")


def test_an_attempt_after_a_preemption_adds_to_the_output_and_the_first_begins_it(
    tmp_path: Path,
) -> None:
    """What a job wrote before it lost its node is not lost."""
    out = tmp_path / "out"
    out.write_text("older job\n")
    script = "#!/bin/sh\necho $SLURM_RESTART_COUNT."
    for attempt in ("1", "2"):
        ran(script, tmp_path=tmp_path, ARYL_BATCH_OUTPUT=str(out), ARYL_ATTEMPT=attempt)
    assert out.read_text() == ".\n1.\n"


def test_a_file_that_cannot_be_written_fails_the_job_with_its_name(tmp_path: Path) -> None:
    """In Slurm it fails as well, and says nothing."""
    code, log = ran(
        "#!/bin/sh\ntouch ran", tmp_path=tmp_path, ARYL_BATCH_OUTPUT=str(tmp_path / "no/such")
    )
    assert code == 1
    assert "no/such: No such file or directory" in log
    assert not (tmp_path / "ran").exists()


def test_srun_starts_the_tasks_of_the_node_each_with_its_own_gpus(tmp_path: Path) -> None:
    """Ranks count over all nodes, and the exit code is the highest."""
    task = 'echo "$SLURM_PROCID/$SLURM_NTASKS $SLURM_LOCALID $CUDA_VISIBLE_DEVICES"; '
    script = (
        "#!/bin/sh\nsrun --gpus-per-task=1 -o %t.out -- "
        f"sh -c '{task} exit $SLURM_PROCID'\necho code $?"
    )
    code, log = ran(script, tmp_path=tmp_path, ARYL_WORKER_COUNT="2", ARYL_WORKER_INDEX="1")
    assert code == 0
    assert (tmp_path / "2.out").read_text() == "2/4 0 GPU-a\n"
    assert (tmp_path / "3.out").read_text() == "3/4 1 GPU-b\n"
    assert log.endswith("code 3\n")


def test_srun_labels_whole_lines_of_both_outputs_and_names_the_node(tmp_path: Path) -> None:
    """A line without an end gets one, so that the next task's line begins behind it."""
    script = "#!/bin/sh\nsrun -l sh -c 'printf out; printf err >&2; exit $SLURM_PROCID'"
    code, log = ran(script, tmp_path=tmp_path)
    assert code == 1
    assert sorted(log.splitlines()) == sorted(
        [
            "0: out",
            "0: err",
            "1: out",
            "1: err",
            "srun: error: gpu-1: task 1: Exited with exit code 1",
        ]
    )


def test_a_step_on_one_node_runs_on_the_first_alone(tmp_path: Path) -> None:
    """Each node runs the script, so `srun -N1 -n1` is how something is done once."""
    script = "#!/bin/sh\nsrun -N1 -n1 echo here"
    logs = [
        ran(script, tmp_path=tmp_path, ARYL_WORKER_COUNT="2", ARYL_WORKER_INDEX=index)[1]
        for index in ("0", "1")
    ]
    assert logs == ["here\n", ""]


def test_a_worker_that_came_later_has_its_tasks_too(tmp_path: Path) -> None:
    """An elastic job that shrank and grew has indices beyond its count, and no idle GPUs."""
    script = "#!/bin/sh\nsrun echo here; srun -N2 echo here; srun -N1 -n1 echo not here"
    _, log = ran(script, tmp_path=tmp_path, ARYL_WORKER_COUNT="2", ARYL_WORKER_INDEX="3")
    assert log == "here\n" * 4


def test_srun_works_without_slurm_s_variables(tmp_path: Path) -> None:
    """Snakemake takes most of them away before it calls srun."""
    step = "srun -n1 --cpu-bind=q sh -c 'echo $SLURM_NTASKS'"
    script = f"#!/bin/sh\nunset SLURM_NTASKS SLURM_NNODES\n{step}"
    assert ran(script, tmp_path=tmp_path)[1] == "1\n"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("-n3", "3 tasks do not spread evenly over 2 nodes"),
        ("-N3", "the job has 2"),
        ("--pty", "--pty is not supported: a worker has no terminal"),
        ("-w gpu-1", "--nodelist is not supported"),
        ("--jobid=9", "this is job 17, not 9"),
        ("--nosuch", "unrecognized option '--nosuch'"),
        ("--gpus-per-task=3", "this node has 2"),
    ],
)
def test_a_step_that_cannot_be_is_refused_in_words(
    options: str, error: str, tmp_path: Path
) -> None:
    """Nothing starts."""
    script = f"#!/bin/sh\nsrun {options} touch ran"
    code, log = ran(script, tmp_path=tmp_path, ARYL_WORKER_COUNT="2", ARYL_WORKER_INDEX="0")
    assert code == 1
    assert error in log
    assert not (tmp_path / "ran").exists()


def test_sigterm_reaches_the_tasks_of_a_step_and_the_script_goes_on(tmp_path: Path) -> None:
    """A task saves and leaves; the line behind srun still runs within the grace."""
    script = (
        '#!/bin/sh\nsrun -n1 bash -c \'trap "echo saved; exit 5" TERM; '
        "echo ready; while :; do sleep 0.1; done'\necho code $?"
    )
    with begun(script, tmp_path=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        log, _ = process.communicate(timeout=PATIENCE_S)
    assert "saved\n" in log
    assert log.endswith("code 5\n")


def test_a_signal_that_comes_while_tasks_start_reaches_all_of_them(tmp_path: Path) -> None:
    """None computes on, not knowing that it is to leave."""
    script = (
        '#!/bin/sh\nsrun -n8 bash -c \'trap "exit 5" TERM; '
        "[ $SLURM_PROCID = 0 ] && kill -TERM $PPID; while :; do sleep 0.1; done'\necho code $?"
    )
    code, log = ran(script, tmp_path=tmp_path)
    assert code == 0
    assert log.count("srun: error") == 8
    assert log.splitlines()[-1] in {"code 5", "code 143"}, "143: it had set no trap yet"


def test_each_end_is_seen_where_one_failure_ends_the_rest(tmp_path: Path) -> None:
    """Tasks that end by themselves at that moment included."""
    script = "#!/bin/sh\nsrun -n8 -K1 sh -c 'exit $SLURM_PROCID'\necho code $?"
    for _ in range(5):
        code, log = ran(script, tmp_path=tmp_path)
        assert code == 0
        assert log.splitlines()[-1] in {"code 7", "code 143"}


def test_sigterm_reaches_a_program_of_a_script_without_steps(tmp_path: Path) -> None:
    """The shell dies of it, and the runner stays until the program has saved."""
    script = (
        '#!/bin/sh\nbash -c \'trap "sleep 0.3; echo saved; exit 5" TERM; '
        "echo ready; while :; do sleep 0.1; done'\necho never"
    )
    with begun(script, tmp_path=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        log, _ = process.communicate(timeout=PATIENCE_S)
    assert log == "saved\n"
    assert process.returncode == -signal.SIGTERM


def test_the_end_by_a_signal_is_the_worker_s_end_by_it(tmp_path: Path) -> None:
    """So that its exit code says which signal it was."""
    assert ran("#!/bin/bash\nkill -USR1 $$", tmp_path=tmp_path)[0] == -signal.SIGUSR1


def test_a_script_that_was_killed_ends_its_worker_as_killed(tmp_path: Path) -> None:
    """So that the kernel's kill for want of memory is told as that, and as no fault of the code."""
    code, log = ran("#!/bin/bash\nkill -KILL $$", tmp_path=tmp_path)
    assert (code, log) == (-signal.SIGKILL, "")


def test_srun_in_the_place_of_its_shell_outlives_what_the_shell_has_started(tmp_path: Path) -> None:
    """After `exec` a monitor in the background is a child of srun's, and is no task."""
    task = "until ! grep -qs State:.[^Z] /proc/$monitor/status; do :; done; exit 5"
    script = f"#!/bin/bash\ntrue & export monitor=$!\nexec srun -n1 bash -c '{task}'"
    assert ran(script, tmp_path=tmp_path)[0] == 5


@pytest.mark.parametrize("to", ["| head -n1 >&2", "> /dev/full"])
def test_a_labelled_task_whose_output_nobody_takes_ends_by_sigpipe(to: str, tmp_path: Path) -> None:
    """As it would without labels: it does not wait for ever, on its GPUs."""
    script = f"#!/bin/bash\nsrun -n1 -l yes {to}\necho code ${{PIPESTATUS[0]}}"
    code, log = ran(script, tmp_path=tmp_path)
    assert code == 0
    assert "srun: error: gpu-1: task 0: Broken pipe" in log
    assert log.endswith("code 141\n")


def test_the_variables_of_a_task_of_an_array() -> None:
    """Aryl's variables under Slurm's names."""
    found = variables.of_script(
        {
            **WORKER,
            "ARYL_ARRAY_INDEX": "7",
            "ARYL_ARRAY_NUMBER": "12",
            "ARYL_ARRAY_COUNT": "10",
            "ARYL_ARRAY_MIN": "0",
            "ARYL_ARRAY_MAX": "9",
        },
        host="h",
    )
    assert (found["SLURM_ARRAY_JOB_ID"], found["SLURM_ARRAY_TASK_ID"]) == ("12", "7")
    assert (found["SLURM_ARRAY_TASK_MIN"], found["SLURM_ARRAY_TASK_MAX"]) == ("0", "9")
