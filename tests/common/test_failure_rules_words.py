"""Whose words a line has: what one class of exceptions or one parser says is not another's."""

from __future__ import annotations

import pytest

from common.failure_rules import read_rules
from common.failures import RetryClass
from tests.common.failure_logs import OOM, TRACEBACK
from tests.tables import each_row

RULES = read_rules()

# --- whose memory it was ------------------------------------------------------------------------

TASK = (
    "ray.exceptions.RayTaskError({}): ray::train() (pid=123, ip=10.0.0.1)\n"
    '  File "train.py", line 9, in train\n    loss.backward()\n'
)
LOW = (
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
    "Memory on the node (IP: 10.0.0.1, ID: 8c5a) where the task (task ID: 4161, name=load, pid=5, "
    "memory used=12.18GB) was running was 31.91GB / 33.28GB (0.958)\n"
)


@each_row(
    ("expected", "words"),
    [
        ("gpu_out_of_memory", TASK.format("OutOfMemoryError") + OOM),
        ("gpu_out_of_memory", TASK.format("OutOfMemoryError") * 2 + OOM),
        ("gpu_out_of_memory", "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried\n"),
        (
            "gpu_out_of_memory",
            "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 8,000 bytes\n",
        ),
        ("cpu_out_of_memory", LOW),
        ("cpu_out_of_memory", TASK.format("OutOfMemoryError") + LOW),
        (
            "cpu_out_of_memory",
            TASK.format("RayOutOfMemoryError")
            + "ray.memory_monitor.RayOutOfMemoryError: More than 95% of the memory on n7 is used\n",
        ),
        ("cpu_out_of_memory", "ray.exceptions.OutOfMemoryError: the node is full\n"),
        (
            "cpu_out_of_memory",
            "ERROR - scores: Task was killed due to the node running low on memory\n",
        ),
        ("cpu_out_of_memory", "MemoryError\n"),
        ("cpu_out_of_memory", "mmap() failed with error Cannot allocate memory\n"),
        ("cpu_out_of_memory", TASK.format("MemoryError") + "MemoryError\n"),
        ("cpu_out_of_memory", "numpy._core._exceptions._ArrayMemoryError: no room\n"),
        ("cpu_out_of_memory", "java.lang.OutOfMemoryError: Java heap space\n"),
        ("traceback_from_crash", TASK.format("OutOfMemoryError")),
    ],
)
def test_an_exception_of_that_name_is_a_gpu_s_or_the_node_s_by_who_raised_it(
    expected: str, words: str
) -> None:
    """Also where Ray tells it of a task, by its class alone: then what stands below decides."""
    found = RULES.classify(f"{TRACEBACK}{words}".encode(), exit_code=1)
    assert found.reason == expected


# --- command lines ------------------------------------------------------------------------------

USAGE = "Usage: train.py [OPTIONS] NAME\nTry 'train.py --help' for help.\n"


WRONG = (
    "No such option: --batch-sise",
    "no such option: --batch-sise",
    "No such option '--batch-sise'. Did you mean '--batch-size'?",
    "No such command 'tra'. Did you mean 'train'?",
    "Missing option '--lr'.",
    "Missing argument 'NAME'.",
    "Missing command.",
    "Missing parameter: name",
    "Invalid value for '--lr': 'a' is not a valid float.",
    "Invalid value: two of the three are needed",
    "Got unexpected extra argument (y)",
    "Got unexpected extra arguments (y z)",
    "Option '--lr' requires an argument.",
    "Option '--resume' does not take a value.",
)


@each_row("form", ["\nError: {}\n", "╭─ Error ──────╮\n│ {} │\n╰──────────────╯\n"])
@each_row("words", WRONG)
def test_a_command_line_that_its_parser_refuses_is_not_tried_again(words: str, form: str) -> None:
    """By click and by Typer, in the words of their versions, as by argparse."""
    found = RULES.classify((USAGE + form.format(words)).encode(), exit_code=2)
    assert (found.reason, found.retry) == ("syntax_error", RetryClass.NEVER)


@each_row(
    "line",
    [
        "loader: Error: Invalid value for x",
        "Error: Invalid valuesets are left out",
        "Error: no answer",
        "Error: Missing shards",
        "| Missing option | none |",
        "Error: Option 'x' is old",
    ],
)
def test_other_errors_are_no_matter_of_the_command_line(line: str) -> None:
    """What a program tells of something else in words alike."""
    assert RULES.classify(f"{line}\n".encode(), exit_code=2).reason == "no_signature"


# --- what passes by itself ----------------------------------------------------------------------


@each_row(
    ("expected", "words"),
    [
        (
            "mpi_runtime_failure",
            "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to "
            "locate the file on the Hub and we cannot find the requested files in the local cache.",
        ),
        (
            "mpi_runtime_failure",
            "google.api_core.exceptions.ServiceUnavailable: 503 POST https://store.example/o",
        ),
        ("mpi_runtime_failure", "urllib.error.HTTPError: HTTP Error 403: rate limit exceeded"),
        (
            "mpi_runtime_failure",
            "google.api_core.exceptions.Forbidden: 403 Exceeded rate limits: too many table update "
            "operations for this table.",
        ),
        (
            "mpi_runtime_failure",
            "requests.exceptions.ChunkedEncodingError: ('Connection broken: IncompleteRead(9 bytes "
            "read, 4 more expected)', IncompleteRead(9 bytes read, 4 more expected))",
        ),
        (
            "mpi_runtime_failure",
            "ray.exceptions.NodeDiedError: Task was killed due to the node it ran on dying.",
        ),
        (
            "mpi_runtime_failure",
            "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
            "\nThe actor is dead because its worker process has died. There are some potential "
            "root causes. (1) The process is killed by SIGKILL by OOM killer. "
            "(3) The worker is crashed unexpectedly due to SIGSEGV or other unexpected errors.",
        ),
        ("mpi_error", "horovod.common.exceptions.HorovodInternalError: has been shut down"),
        (
            "model_checkpoint_error",
            "OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/fs/c'",
        ),
    ],
)
def test_a_server_or_a_peer_that_went_away_is_tried_again(expected: str, words: str) -> None:
    """Whatever else its words would mean, such as a file that is not found or a signal."""
    found = RULES.classify(f"{TRACEBACK}{words}\n".encode(), exit_code=1)
    assert (found.reason, found.retry) == (expected, RetryClass.BACK_OFF)


@pytest.mark.parametrize(
    "notice",
    [
        "CUDA is not available, using the CPU",
        "WARNING: torch.cuda.is_available() is False, sampling on the CPU",
    ],
)
def test_a_notice_that_there_is_no_gpu_is_not_what_ended_a_program(notice: str) -> None:
    """What came long after it is: a program that wanted a GPU would have ended there."""
    log = f"{notice}\n" + "loaded a shard\n" * 200
    died = RULES.classify(log.encode(), exit_code=139)
    assert died.reason == "invalid_memory_access"
    lost = RULES.classify(f"{log}Connection reset by peer\n".encode(), exit_code=1)
    assert lost.reason == "mpi_runtime_failure"


def test_what_ends_a_launcher_is_tried_again() -> None:
    """Also without a traceback: a fabric that gave up, and a rank that mpirun lost."""
    ends = {
        "UCX  ERROR Transport retry count exceeded on mlx5_0:1/IB (synd 0x15)": "mpi_error",
        "prterun noticed that process rank 1 on node n7 exited on": "mpi_runtime_failure",
    }
    for line, expected in ends.items():
        assert RULES.classify(f"{line}\n".encode(), exit_code=134).reason == expected, line


# --- what does not pass -------------------------------------------------------------------------


@each_row(
    ("expected", "words"),
    [
        (
            "semantic_error",
            "RuntimeError: Error(s) in loading state_dict for GPT2LMHeadModel:\n\t"
            "size mismatch for wte.weight",
        ),
        ("semantic_error", "RuntimeError: Missing key in checkpoint state_dict: layers.0.weight."),
        (
            "semantic_error",
            "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) "
            "should be the same",
        ),
        (
            "semantic_error",
            "RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::Half",
        ),
        (
            "semantic_error",
            "RuntimeError: The expanded size of the tensor (512) must match the existing size",
        ),
        (
            "semantic_error",
            "RuntimeError: a leaf Variable that requires grad is being used in an in-place "
            "operation",
        ),
        ("semantic_error", "jax.errors.ConcretizationTypeError: Abstract tracer value encountered"),
        ("model_diverged", "RuntimeError: Function 'MulBackward0' returned nan values in its 0th"),
        ("model_diverged", "FloatingPointError: invalid value (nan) encountered in jit(mul)"),
        ("syntax_error", "omegaconf.errors.ConfigKeyError: Key 'lrr' is not in struct"),
        ("incorrect_inputs", "urllib.error.HTTPError: HTTP Error 404: Not Found"),
        ("permission_error", "urllib.error.HTTPError: HTTP Error 403: Forbidden"),
        (
            "incorrect_inputs",
            "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files in "
            "the disk cache and outgoing traffic has been disabled.",
        ),
        (
            "incorrect_inputs",
            "google.api_core.exceptions.NotFound: 404 GET https://store.example/o",
        ),
        (
            "permission_error",
            "google.api_core.exceptions.Forbidden: 403 GET https://store.example/o: no access",
        ),
    ],
)
def test_a_program_at_odds_with_itself_or_its_inputs_is_not_tried_again(
    expected: str, words: str
) -> None:
    """A model that does not fit its checkpoint, types that do not fit, a value that is none."""
    found = RULES.classify(f"{TRACEBACK}{words}\n".encode(), exit_code=1)
    assert (found.reason, found.retry) == (expected, RetryClass.NEVER)


@each_row(
    "line",
    [
        "run.sh: line 9: syntax error: unexpected end of file",
        'run.sh: 4: Syntax error: "(" unexpected',
        "train.py: error: ambiguous option: --l could match --lr, --local_rank",
        "Could not override 'model.lrr'.\nKey 'lrr' is not in struct",
        "mpirun was unable to find the specified executable file, and therefore",
        "There are not enough slots available in the system to satisfy the 16",
    ],
)
def test_a_script_or_a_command_line_that_cannot_run_is_not_tried_again(line: str) -> None:
    """In the words of shells, of `mpirun` and of Hydra, which print no traceback."""
    found = RULES.classify(f"{line}\n".encode(), exit_code=1)
    assert (found.reason, found.retry) == ("syntax_error", RetryClass.NEVER)


# --- what is shown ------------------------------------------------------------------------------


def test_of_a_traceback_its_exception_is_told() -> None:
    """Its header says nothing; a launcher's exception is told only where there is no other."""
    own, launcher = f"{TRACEBACK}deepstuff.Oops: what now\n", f"{TRACEBACK}run.ChildFailedError: \n"
    for log, line in [
        (own, "deepstuff.Oops: what now"),
        (own + launcher, "deepstuff.Oops: what now"),
        (launcher, "run.ChildFailedError:"),
        (TRACEBACK, "Traceback (most recent call last):"),
    ]:
        found = RULES.classify(log.encode(), exit_code=1)
        assert (found.reason, found.line) == ("traceback_from_crash", line)
