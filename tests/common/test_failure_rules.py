"""Which words in a log mean which failure, and what that says of another try."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from common.failure_rules import MAX_CHARS_OF_LINE, NO_SIGNATURE, TAIL_BYTES, read_rules
from common.failures import MAX_LINE_CHARS, Failure, RetryClass, is_more_telling
from tests.common.failure_logs import LOGS, PASSING
from tests.tables import each_row

RULES = read_rules()

NEVER, ELSEWHERE, BACK_OFF = RetryClass.NEVER, RetryClass.ELSEWHERE, RetryClass.BACK_OFF

CLASSES = {
    "cpu_out_of_memory": NEVER,
    "incorrect_inputs": NEVER,
    "semantic_error": NEVER,
    "core_dump": ELSEWHERE,
    "invalid_memory_access": ELSEWHERE,
    "model_checkpoint_error": BACK_OFF,
    "cuda_failure": ELSEWHERE,
    "syntax_error": NEVER,
    "traceback_from_crash": ELSEWHERE,
    "mpi_error": BACK_OFF,
    "gpu_out_of_memory": NEVER,
    "mpi_runtime_failure": BACK_OFF,
    "permission_error": NEVER,
    "import_error": NEVER,
    "job_preempted": BACK_OFF,
    "cuda_init_failed": ELSEWHERE,
    "model_diverged": NEVER,
    "cuda_version_mismatch": NEVER,
    "gpu_ecc_error": ELSEWHERE,
    "output_node_error": NEVER,
    "cannot_load_libs": NEVER,
    "no_signature": ELSEWHERE,
}

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'

SHM = (
    "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient "
    "shared memory (shm)."
)

SEEN = [
    ("cpu_out_of_memory", "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB"),
    ("cpu_out_of_memory", "RuntimeError: DataLoader worker (pid 41) is killed by signal: Killed."),
    ("cpu_out_of_memory", "terminate called after throwing an instance of 'std::bad_alloc'"),
    ("incorrect_inputs", TRACEBACK + "FileNotFoundError: [Errno 2] No such file: 'train.tfrecord'"),
    ("incorrect_inputs", TRACEBACK + "json.decoder.JSONDecodeError: Expecting value: line 1"),
    (
        "incorrect_inputs",
        f"{TRACEBACK}OSError: lab/absent is not a local folder and is not a valid model identifier "
        "listed on 'https://hub.example/models'",
    ),
    (
        "incorrect_inputs",
        f"{TRACEBACK}botocore.exceptions.ClientError: An error occurred (404) when calling the "
        "HeadObject operation: Not Found",
    ),
    ("semantic_error", TRACEBACK + "ValueError: optimizer got an empty parameter list"),
    ("semantic_error", "[rank3]: KeyError: 'labels'"),
    ("semantic_error", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    *(
        ("semantic_error", f"{TRACEBACK}RuntimeError: {words}")
        for words in (
            "Given groups=1, weight of size [64, 3, 7, 7], expected input[1, 1, 28, 28] to have 3 "
            "channels, but got 1 channels instead",
            "Trying to backward through the graph a second time (or directly access saved tensors "
            "after they have already been freed).",
            "stack expects each tensor to be equal size, but got [3, 224, 224] at entry 0 and [1, "
            "224, 224] at entry 1",
            "Sizes of tensors must match except in dimension 1. Expected size 8 but got size 4 for "
            "tensor number 1 in the list.",
        )
    ),
    ("core_dump", "./train.sh: line 4:  811 Aborted                 (core dumped) ./train"),
    ("invalid_memory_access", "./train.sh: line 4:  811 Segmentation fault      (core dumped)"),
    ("invalid_memory_access", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ("model_checkpoint_error", "OSError: [Errno 28] No space left on device"),
    ("model_checkpoint_error", "ERROR: failed to save the checkpoint at step 4000"),
    ("cuda_failure", "RuntimeError: CUDA error: unspecified launch failure"),
    ("cuda_failure", "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ("syntax_error", '  File "train.py", line 9\n    def f(:\nSyntaxError: invalid syntax'),
    ("syntax_error", "train.py: error: unrecognized arguments: --batch-sise 64"),
    ("traceback_from_crash", TRACEBACK + "deepstuff.Oops: what now"),
    ("mpi_error", "MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD"),
    ("mpi_error", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1331"),
    ("mpi_error", TRACEBACK + "RuntimeError: [1]:  Connection reset by peer"),
    (
        "mpi_error",
        f"[rank3]: {TRACEBACK}[rank3]: RuntimeError: [gloo/transport/tcp/pair.cc:598] Connection "
        "closed by peer [10.0.0.2]:41230",
    ),
    (
        "mpi_error",
        f"{TRACEBACK}RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection "
        "closed by peer [10.0.0.2]:41230",
    ),
    *(
        ("mpi_error", f"{TRACEBACK}RuntimeError: [/pytorch/third_party/gloo/gloo/transport/{said}")
        for said in (
            "tcp/pair.cc:535] Read error [10.1.3.122]:42916: Connection reset by peer",
            "tcp/pair.cc:529] writev [::1]:54172: Connection reset by peer",
            "tcp/pair.cc:529] writev [10.1.3.122]:42916: Broken pipe",
            "tcp/pair.cc:525] Application timeout caused pair closure",
            "tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        )
    ),
    *(
        (
            "mpi_error",
            f"{TRACEBACK}RuntimeError: [enforce fail at {path}gloo/transport/tcp/device.cc:84] "
            "ifa != nullptr. Unable to find address for: eth7",
        )
        for path in ("", "../third_party/gloo/", "/pytorch/third_party/gloo/")
    ),
    *(
        ("traceback_from_crash", f"{TRACEBACK}RuntimeError: [{said}")
        for said in (
            "db-1:5432] Connection reset by peer",
            "client.cc:12] Read error [10.1.3.122]:42916: Connection reset by peer",
            "1] writev [::1]:54172: Connection reset by peer",
            "shop.py:8] Application timeout caused pair closure",
            "queue.py:8] Timed out waiting 100ms for recv operation to complete",
            "enforce fail at igloo/roof.cc:84] roof != nullptr",
        )
    ),
    (
        "gpu_out_of_memory",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    ),
    ("gpu_out_of_memory", "ResourceExhaustedError: OOM when allocating tensor with shape[64,512]"),
    (
        "gpu_out_of_memory",
        f"{TRACEBACK}jaxlib._jax.XlaRuntimeError: RESOURCE_EXHAUSTED: Failed to allocate request "
        "for 12.0GiB (12884901888B) on device ordinal 0",
    ),
    ("cpu_out_of_memory", "low 0\nhigh 31\nmax 9\noom 1\noom_kill 1"),
    ("no_signature", "low 0\nhigh 31\nmax 9\noom 0\noom_kill 0\noom_group_kill 0"),
    ("no_signature", "oom_kill_disable 0\nunder_oom 0\noom_kill 0"),
    ("mpi_runtime_failure", "ORTE has lost communication with a remote daemon."),
    (
        "mpi_runtime_failure",
        f"{TRACEBACK}TimeoutError: The client socket has timed out after 600000ms while trying to "
        "connect to (n1, 29500).",
    ),
    ("mpi_runtime_failure", "[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)"),
    ("permission_error", "PermissionError: [Errno 13] Permission denied: '/data/imagenet'"),
    (
        "permission_error",
        f"{TRACEBACK}botocore.exceptions.ClientError: An error occurred (403) when calling the "
        "HeadObject operation: Forbidden",
    ),
    ("import_error", TRACEBACK + "ModuleNotFoundError: No module named 'apex'"),
    ("job_preempted", "slurmstepd: error: *** STEP 7.0 CANCELLED AT noon DUE TO PREEMPTION ***"),
    ("cuda_init_failed", "E cuda_driver.cc:351] failed call to cuInit: CUDA_ERROR_UNKNOWN"),
    ("cuda_init_failed", "RuntimeError: No CUDA GPUs are available"),
    (
        "cuda_init_failed",
        "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, "
        "e.g. changing env variable CUDA_VISIBLE_DEVICES after program start.",
    ),
    *(
        ("cuda_init_failed", f"{TRACEBACK}RuntimeError: {words}")
        for words in (
            "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before "
            "calling NumCudaDevices() that might have already set an error? Error 802: system not "
            "yet initialized",
            "CUDA error: system not yet initialized",
            "Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display "
            "driver / cuda driver combination",
            "Failed to initialize NVML: Driver/library version mismatch",
            "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is "
            "False.",
        )
    ),
    ("cuda_init_failed", f"{TRACEBACK}AssertionError: CUDA is not available"),
    (
        "mpi_error",
        "n3:1:2 [0] misc/ibvwrap.cc:160 NCCL WARN Call to ibv_reg_mr failed with error Cannot "
        f"allocate memory\n{TRACEBACK}torch.distributed.DistBackendError: NCCL error in: "
        "ProcessGroupNCCL.cpp:1970, unhandled system error",
    ),
    (
        "cuda_version_mismatch",
        f"{TRACEBACK}RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 804: forward "
        "compatibility was attempted on non supported HW",
    ),
    (
        "cuda_version_mismatch",
        f"{TRACEBACK}RuntimeError: The detected CUDA version (11.3) mismatches the version that "
        "was used to compile PyTorch (10.2). Please make sure to use the same CUDA versions.",
    ),
    (
        "cpu_out_of_memory",
        f"{TRACEBACK}RuntimeError: unable to open shared memory object </torch_1> in read-write "
        "mode: Too many open files (24)",
    ),
    ("cpu_out_of_memory", SHM),
    ("cpu_out_of_memory", f"{SHM}\nBus error (core dumped)"),
    (
        "cpu_out_of_memory",
        f"{TRACEBACK}RuntimeError: DataLoader worker (pid 41) is killed by signal: Bus error. It "
        "is possible that dataloader's workers are out of shared memory.",
    ),
    ("invalid_memory_access", "./train.sh: line 4:  811 Bus error      (core dumped) ./train"),
    ("model_diverged", "ERROR:tensorflow:Model diverged with loss = NaN."),
    ("model_diverged", "FloatingPointError: Loss became infinite or NaN at iteration=132!"),
    ("cuda_version_mismatch", "CUDA driver version is insufficient for CUDA runtime version"),
    ("gpu_ecc_error", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    ("gpu_ecc_error", "NVRM: Xid (PCI:0000:3b:00): 48, pid=811, Double bit error"),
    ("output_node_error", "EXCEPTION: Output node 'z2' not found in the network"),
    ("output_node_error", "RuntimeError: Could not find output node 'z'"),
    (
        "cannot_load_libs",
        TRACEBACK + "ImportError: libcudart.so.11.0: cannot open shared object file",
    ),
    ("no_signature", "epoch 3 done\nbye"),
]


def reason(log: str, exit_code: int | None = 1, error: str = "") -> str:
    """What the packaged rules say."""
    return RULES.classify(log.encode(), exit_code=exit_code, error=error).reason


def test_every_row_of_the_table_is_a_reason_with_its_retry_class() -> None:
    """The 22 rows of the study's table 7, each in the class that follows from section 5."""
    assert {name: rule.retry for name, rule in RULES.reasons.items()} == CLASSES
    assert not [name for name, rule in RULES.reasons.items() if rule.most_retries is not None]
    assert [name for name, rule in RULES.reasons.items() if rule.is_free] == ["job_preempted"]
    assert [name for name, rule in RULES.reasons.items() if rule.suspects_node] == ["gpu_ecc_error"]


@each_row(("expected", "log"), SEEN, ids=[f"{row[0]}-{row[1][-20:]}" for row in SEEN])
def test_what_programs_print_is_recognised(expected: str, log: str) -> None:
    """Words that real programs print mean the reason that people would name."""
    assert reason(f"step 1 loss 2.3\n{log}\nexiting\n") == expected


@each_row(("expected", "log"), [row[1:] for row in LOGS], ids=[row[0] for row in LOGS])
def test_what_a_program_ended_by_decides(expected: str, log: str) -> None:
    """Not what it got over, nor what its end brought about, wherever those stand."""
    assert reason(log) == expected


@pytest.mark.parametrize("prefix", ["[rank0]: ", "[default3]:", "[trainer0]:[rank5]: "])
def test_what_a_launcher_puts_before_each_line_changes_no_reason(prefix: str) -> None:
    """With one rank's name before each line the same programs ended by the same."""
    told = [(expected, f"step 1 loss 2.3\n{log}\nexiting\n") for expected, log in SEEN]
    told += [row[1:] for row in LOGS if "[rank" not in row[2]]
    assert len(told) > 100
    for expected, log in told:
        named = "".join(f"{prefix}{line}\n" for line in log.splitlines())
        assert reason(named) == expected, named


@each_row(("expected", "line"), PASSING)
def test_storage_and_servers_that_do_not_answer_are_tried_again(expected: str, line: str) -> None:
    """They pass, so that one more try at most would give up jobs that need two."""
    found = RULES.classify(f"{TRACEBACK}{line}\n".encode(), exit_code=1)
    assert (found.reason, found.retry, found.is_explicit) == (expected, BACK_OFF, True)


def test_every_reason_is_seen_in_some_log() -> None:
    """No reason is in the table that no log can show."""
    assert {expected for expected, _ in SEEN} == set(CLASSES)


def test_a_root_cause_goes_before_its_outcome_wherever_they_stand() -> None:
    """A traceback, a broken connection or a signal never hides what the log names."""
    cause = "RuntimeError: CUDA out of memory. Tried to allocate 1 GiB\n"
    outcome = "mpirun noticed that process rank 0 exited on signal 9\nConnection reset by peer\n"
    assert reason(TRACEBACK + cause + outcome, exit_code=-9) == "gpu_out_of_memory"
    assert reason(outcome + TRACEBACK + cause) == "gpu_out_of_memory"
    found = RULES.classify((TRACEBACK + outcome).encode(), exit_code=1)
    assert (found.reason, found.is_explicit) == ("traceback_from_crash", False)


@each_row(
    ("exit_code", "expected"),
    [
        (-9, NO_SIGNATURE),
        (-11, "invalid_memory_access"),
        (139, "invalid_memory_access"),
        (-6, "core_dump"),
        (-15, "job_preempted"),
        (127, "syntax_error"),
        (3, NO_SIGNATURE),
        (None, NO_SIGNATURE),
    ],
)
def test_where_the_log_is_silent_the_exit_code_speaks(exit_code: int | None, expected: str) -> None:
    """A signal says something of the cause, but is never an explicit one."""
    found = RULES.classify(b"all went well\n", exit_code=exit_code)
    assert (found.reason, found.is_explicit) == (expected, False)


def test_what_the_supervisor_says_counts_as_a_line_of_the_log() -> None:
    """An error that the log does not have is looked at as well."""
    assert reason("", error="cannot execute: Permission denied") == "permission_error"


def test_only_the_end_of_a_log_is_looked_at() -> None:
    """A cause farther from the end than 64 KiB is not seen, one within is."""
    cause, filling = b"SyntaxError: bad\n", b"x\n" * (TAIL_BYTES // 2)
    assert RULES.classify(cause + filling, exit_code=1).reason == NO_SIGNATURE
    assert RULES.classify(cause + filling[: -len(cause)], exit_code=1).reason == "syntax_error"


def test_a_failure_says_who_has_to_look_at_it() -> None:
    """As its reason does."""
    found = RULES.classify(b"torch.OutOfMemoryError: CUDA out of memory", exit_code=1)
    assert found.origins == RULES.reasons[found.reason].origins != ()


def test_the_line_that_showed_it_is_told_and_is_short() -> None:
    """A failure carries the last such line, cut; a longer line is not searched to its end."""
    line = b"KeyError: " + b"k" * 5000
    found = RULES.classify(b"first\n" + line + b"\nlast\n", exit_code=1)
    assert found.line == line.decode()[:MAX_LINE_CHARS]
    far = b"." * MAX_CHARS_OF_LINE + b"SyntaxError: far"
    assert RULES.classify(far, exit_code=1).reason == NO_SIGNATURE


def test_bytes_that_are_no_text_are_no_obstacle() -> None:
    """A log may hold anything."""
    assert RULES.classify(b"\xff\xfe\x00CUDA out of memory\xff", exit_code=1).reason == (
        "gpu_out_of_memory"
    )


def test_the_decision_record_counts_the_signatures() -> None:
    """Its number is that of the packaged file."""
    record = Path(__file__).parents[2] / "docs" / "decisions" / "0015-failure-classes.md"
    count = sum(
        len(each.texts) + len(each.patterns) + len(each.exit_codes)
        for file in RULES.files
        for each in file.signature
    )
    assert f"{count} signatures" in record.read_text()


def failure(name: str, *, is_explicit: bool = True) -> Failure:
    """A failure of a reason."""
    return RULES.failure(name, is_explicit=is_explicit)


def test_of_a_gang_s_failures_the_root_cause_says_most() -> None:
    """A cause beats an outcome, and anything beats a connection that broke when a peer died."""
    cause, echo = failure("gpu_out_of_memory"), failure("mpi_error")
    outcome = failure("traceback_from_crash", is_explicit=False)
    for more, less in [(cause, None), (cause, echo), (cause, outcome), (echo, outcome)]:
        assert is_more_telling(more, less)
        assert less is None or not is_more_telling(less, more)
    assert not is_more_telling(cause, failure("syntax_error"))


def test_of_a_gang_s_logs_the_one_with_the_cause_is_told() -> None:
    """In whatever order its workers are heard: one ran out of memory, the others lost it."""
    logs = [
        TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n",
        TRACEBACK + "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:13\n",
        "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)\nSIGABRT\n",
    ]
    for order in permutations(logs):
        told: Failure | None = None
        for log in order:
            heard = RULES.classify(log.encode(), exit_code=-6)
            told = heard if is_more_telling(heard, told) else told
        assert told is not None
        assert told.reason == "gpu_out_of_memory"


BROKEN = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[10.1.3.122]:42916\n"
)
MEETING = "aryl-launcher: rank 1 exited with 1; worker 2 left: meeting again\n"


@pytest.mark.parametrize(("exit_code", "expected"), [(137, NO_SIGNATURE), (3, NO_SIGNATURE)])
def test_what_a_gang_met_again_after_is_no_evidence(exit_code: int, expected: str) -> None:
    """A change of membership breaks connections; what ended the worker came after it."""
    log = f"{TRACEBACK}{BROKEN}{MEETING}step 7 loss 1.1\n"
    assert reason(log, exit_code=exit_code) == expected
    assert reason(log.replace(": meeting again", ""), exit_code=exit_code) == "mpi_error"
    assert reason(log + BROKEN, exit_code=exit_code) == "mpi_error"


def test_a_launcher_that_failed_after_another_explains_nothing() -> None:
    """Its broken connection is an echo: any word of the first one's says more."""
    second = f"{BROKEN}aryl-launcher: rank 1 exited with 1 after worker 0 had failed\n"
    echo = RULES.classify(second.encode(), exit_code=1)
    assert (echo.retry, echo.is_explicit) == (BACK_OFF, False)
    assert RULES.classify(BROKEN.encode(), exit_code=1).is_explicit
    assert is_more_telling(RULES.classify(b"boom\n", exit_code=3), echo)
    own = RULES.classify(f"MemoryError\n{second}".encode(), exit_code=1)
    assert own.is_explicit == (own.retry != BACK_OFF)


@pytest.mark.parametrize(
    ("expected", "said", "exit_code"),
    [
        ("mpi_runtime_failure", "the rendezvous is lost: not enough members", 75),
        ("import_error", "/usr/bin/python3 has no module torch: put the environment", 127),
        ("import_error", "torch is 2.1, which launching under torchrun needs", 78),
    ],
)
def test_what_the_launcher_says_of_itself(expected: str, said: str, exit_code: int) -> None:
    """A lost rendezvous passes; a Python without PyTorch does not."""
    assert reason(f"aryl-launcher: {said}\n", exit_code=exit_code) == expected
