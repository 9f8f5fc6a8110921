"""What a log says of a program that others ended, of one that was well, and of what passes."""

from __future__ import annotations

import pytest

from common.failure_rules import NO_SIGNATURE, read_rules
from common.failures import RetryClass
from tests.tables import each_row

RULES = read_rules()
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
HARMLESS = (
    "/w/run.sh: line 3: module: command not found\n",
    "rm: cannot remove '/scratch/cache': No such file or directory\n",
    "mkdir: cannot create directory '/data': Permission denied\n",
    "flash_attn not installed: No module named 'flash_attn'\n",
)
START = "".join(f"INFO loading shard {number}\n" for number in range(300))
COLOURED = "".join(
    f"[titan] root - \x1b[31mstep: {number:3}  \x1b[32mloss:  8.1\x1b[0m\n" for number in range(300)
)


@each_row("line", HARMLESS)
@each_row("after", [START, COLOURED], ids=["start", "coloured"])
@each_row("exit_code", [-9, 137, -15, 143])
def test_a_harmless_line_says_nothing_of_a_kill(line: str, after: str, exit_code: int) -> None:
    """A program that ran on after it and was ended by others is tried again as without the line."""
    bare = RULES.classify(after.encode(), exit_code=exit_code)
    assert bare.reason in (NO_SIGNATURE, "job_preempted")
    assert RULES.classify((line + after).encode(), exit_code=exit_code) == bare


@pytest.mark.parametrize("line", HARMLESS[:3])
def test_what_a_shell_told_says_nothing_of_a_kill_however_soon_it_came(line: str) -> None:
    """A shell goes on after it: the program that it started next was ended by others."""
    log = (line + "step 1 loss 2.3\n").encode()
    assert RULES.classify(log, exit_code=-9).reason == NO_SIGNATURE
    assert RULES.classify(log, exit_code=1).reason != NO_SIGNATURE


def test_coloured_steps_are_progress() -> None:
    """Whatever the exit: who trains on has got over what it told before."""
    assert RULES.classify((HARMLESS[3] + COLOURED).encode(), exit_code=1).reason == NO_SIGNATURE


@each_row(
    ("expected", "log"),
    [
        ("gpu_out_of_memory", f"{START}RuntimeError: CUDA out of memory\nbye\n"),
        ("semantic_error", f"{TRACEBACK}KeyError: 'label'\n{START}"),
        ("cpu_out_of_memory", f"Out of memory: Killed process 811\n{START}"),
        ("mpi_runtime_failure", f"Watchdog caught collective operation timeout\n{START}"),
    ],
)
def test_a_kill_hides_no_end_that_the_log_tells(expected: str, log: str) -> None:
    """What stands last, what nobody caught, the system's word and a peer's end still decide."""
    assert RULES.classify(log.encode(), exit_code=-9).reason == expected


@each_row(
    ("reason", "bad", "well"),
    [
        ("cpu_out_of_memory", '"OOMKilled": true,', '"OOMKilled": false,'),
        ("cpu_out_of_memory", "reason: OOMKilled", "OOMKilled=false"),
        ("cpu_out_of_memory", "oom-kill:constraint=CONSTRAINT_MEMCG", "kernel.oom-kill = 0"),
        ("gpu_ecc_error", "Double Bit ECC Errors : 2", "Double Bit ECC Errors : 0"),
        ("gpu_ecc_error", "Double Bit ECC Error", "Double Bit ECC Error: N/A"),
        ("gpu_ecc_error", "ECC page retirement: 1", "ECC page retirement: N/A"),
        ("gpu_ecc_error", "ECC page retirement pending", "ECC page retirement : 0"),
    ],
)
def test_a_report_that_all_is_well_is_no_evidence(reason: str, bad: str, well: str) -> None:
    """A state or a counter that a tool prints counts only where it says that something was."""
    assert RULES.classify(f"{bad}\nbye\n".encode(), exit_code=1).reason == reason
    assert RULES.classify(f"{well}\nbye\n".encode(), exit_code=1).reason == NO_SIGNATURE


BOTO = (
    "botocore.exceptions.ClientError: An error occurred ({}) when calling the PutObject operation"
)


@each_row(
    "line",
    [
        *(BOTO.format(code) for code in ("InternalError", "ServiceUnavailable", "SlowDown")),
        "urllib.error.URLError: <urlopen error [Errno 111] Connection refused>",
        "ssl.SSLEOFError: EOF occurred in violation of protocol (_ssl.c:1007)",
        "google.api_core.exceptions.ServiceUnavailable: 503 failed to connect to all addresses",
        "aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected",
        "jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Id: Connect",
        "etcd.EtcdConnectionFailed: Connection to etcd failed",
    ],
)
def test_a_server_that_does_not_answer_passes(line: str) -> None:
    """One more try at most would give up jobs that need two."""
    found = RULES.classify(f"{TRACEBACK}{line}\n".encode(), exit_code=1)
    assert (found.reason, found.retry) == ("mpi_runtime_failure", RetryClass.BACK_OFF)


@each_row(
    ("expected", "log", "exit_code"),
    [
        (
            "permission_error",
            f"{TRACEBACK}botocore.exceptions.NoCredentialsError: Unable to locate credentials",
            1,
        ),
        ("permission_error", TRACEBACK + BOTO.format("ExpiredToken"), 1),
        ("syntax_error", "exec /w/run.sh: exec format error", 126),
        ("syntax_error", "bash: ./train: cannot execute binary file: Exec format error", 126),
    ],
)
def test_a_user_s_error_is_not_tried_again(expected: str, log: str, exit_code: int) -> None:
    """Credentials that are none, and a program of another machine, fail again."""
    found = RULES.classify(log.encode(), exit_code=exit_code)
    assert (found.reason, found.retry) == (expected, RetryClass.NEVER)


def test_a_launcher_that_was_told_to_end_was_preempted() -> None:
    """torchrun raises what SIGTERM means; as with that signal's exit codes, no cause is named."""
    words = (
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 140 got signal: "
    )
    found = RULES.classify(f"{TRACEBACK}{words}15\n".encode(), exit_code=1)
    assert (found.reason, found.is_explicit) == ("job_preempted", False)
    other = RULES.classify(f"{TRACEBACK}{words}1\n".encode(), exit_code=1)
    assert other.reason == "traceback_from_crash"
