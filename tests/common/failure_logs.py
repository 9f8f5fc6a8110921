"""Ends of training logs and why each program ended, as people would tell; must not know the rules.

Written for these tests, by what launchers and frameworks print. Each has an error that was got
over, or that another one caused, beside the one that the program ended by. The later ones have
exceptions that were caught and printed, as Python's `traceback.print_exc()` and
`logger.exception()` print them.
"""

from __future__ import annotations

from collections.abc import Iterable

TRACEBACK = (
    'Traceback (most recent call last):\n  File "train.py", line 88, in <module>\n    main()\n'
)
STEPS = "".join(f"step {number} loss {3.0 / number:.3f}\n" for number in range(1, 41))
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1331, remote process "
    "exited or there was a network error\nncclRemoteError: A call failed possibly due to a network "
    "error or a remote process exiting prematurely.\n"
)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


def of_rank(rank: int, text: str) -> str:
    """The same lines as a launcher prints them, each with its rank."""
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


LOGS: tuple[tuple[str, str, str], ...] = (
    (
        "an optional module is not there, then a peer dies",
        "mpi_error",
        "WARNING: apex not used: ModuleNotFoundError: No module named 'apex'\n"
        + STEPS
        + TRACEBACK
        + NCCL,
    ),
    (
        "no library for an unused back end, then a peer dies",
        "mpi_error",
        "2026-03-02 07:11:01.3: W tensorflow/stream_executor/dso_loader.cc:64] Could not load "
        "dynamic library 'libnvinfer.so.7'; dlerror: libnvinfer.so.7: cannot open shared object "
        "file: No such file or directory\n" + TRACEBACK + NCCL,
    ),
    (
        "the first start finds no checkpoint, then a node is lost",
        "mpi_runtime_failure",
        "no checkpoint yet: No such file or directory: 'ckpt.pt'; starting from scratch\n"
        + STEPS
        + "mpirun noticed that process rank 3 with PID 811 on node n7 exited on signal 9\n",
    ),
    (
        "nobody says that it was got over, but training went on",
        "mpi_runtime_failure",
        "cache: [Errno 13] Permission denied: '/scratch/cache'\n"
        + STEPS
        + "ORTE has lost communication with a remote daemon.\n",
    ),
    (
        "a failed try with its traceback told as a warning",
        "mpi_error",
        "WARNING:root:metrics are not uploaded\n"
        + TRACEBACK
        + "PermissionError: [Errno 13] Permission denied: '/metrics'\n"
        + STEPS
        + TRACEBACK
        + NCCL,
    ),
    (
        "a warning just before the end is not about it",
        "permission_error",
        "WARNING:root:the loader is slow\n"
        + TRACEBACK
        + "PermissionError: [Errno 13] Permission denied: '/data'\n",
    ),
    (
        "it says that it goes on, and soon loses a peer",
        "mpi_error",
        "cache: [Errno 13] Permission denied: '/scratch'; going on without\n" + TRACEBACK + NCCL,
    ),
    (
        "the library's own warning is all that there is",
        "mpi_error",
        STEPS + "n7:811 [0] net_ib.cc:1295 NCCL WARN NET/IB : Got completion with error 12\n",
    ),
    (
        "the library complains early, the program ends by its own fault",
        "semantic_error",
        "n7:811 [0] net_ib.cc:1295 NCCL WARN NET/IB : Got completion with error 12\n"
        + TRACEBACK
        + "KeyError: 'label'\n",
    ),
    (
        "a script goes on after its program's own fault",
        "semantic_error",
        TRACEBACK
        + "KeyError: 'label'\n"
        + "cp: cannot stat 'out/model.pt': No such file or directory\n",
    ),
    (
        "of two failed attempts the last one is what it ended by",
        "semantic_error",
        TRACEBACK
        + "PermissionError: [Errno 13] Permission denied: '/data'\n"
        + STEPS
        + TRACEBACK
        + "KeyError: 'label'\n",
    ),
    (
        "an object cannot clean up while the interpreter goes down",
        "mpi_error",
        TRACEBACK
        + NCCL
        + "Exception ignored in: <function Pool.__del__ at 0x7f1>\n"
        + 'Traceback (most recent call last):\n  File "pool.py", line 268, in __del__\n'
        + "AttributeError: 'NoneType' object has no attribute 'dumps'\n",
    ),
    (
        "one rank runs out of memory, the others lose it",
        "gpu_out_of_memory",
        STEPS
        + of_rank(0, TRACEBACK + OOM)
        + of_rank(1, TRACEBACK + NCCL)
        + of_rank(3, TRACEBACK + NCCL)
        + "[E ProcessGroupNCCL.cpp:563] [Rank 2] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=911)\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "Fatal Python error: Aborted\nSIGABRT\n",
    ),
    (
        "one rank runs out of memory and its traceback stands among the others' lines",
        "gpu_out_of_memory",
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "train.py", line 9, in step\n'
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "train.py", line 12, in step\n'
        "[rank1]: ConnectionResetError: [Errno 104] Connection reset by peer\n"
        "[rank0]: " + OOM + "cp: cannot stat 'out/model.pt': No such file or directory\n",
    ),
    (
        "what was printed before a crash is flushed after it",
        "semantic_error",
        TRACEBACK + "KeyError: 'label'\n" + STEPS,
    ),
    (
        "a script goes on after its program lost a peer",
        "mpi_error",
        STEPS + TRACEBACK + NCCL + "cp: cannot stat 'out/model.pt': No such file or directory\n",
    ),
    (
        "a script goes on after a failure that no peer caused",
        "permission_error",
        "/opt/run.sh: line 3: /data/set: Permission denied\n"
        + NCCL
        + "cp: cannot stat 'out/model.pt': No such file or directory\n",
    ),
    (
        "a broken GPU is named before the library complains",
        "gpu_ecc_error",
        "n7:811 [2] misc/utils.cc:38 NCCL WARN Cuda failure 'uncorrectable ECC error encountered'\n"
        + TRACEBACK
        + "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1331, unhandled "
        "cuda error\n",
    ),
    (
        "a bad address in a kernel ends in an abort",
        "invalid_memory_access",
        "terminate called after throwing an instance of 'c10::Error'\n"
        "  what():  CUDA error: an illegal memory access was encountered\n"
        "./run.sh: line 4:  811 Aborted                 (core dumped) ./train\n",
    ),
    (
        "the library gives up and then trips over itself",
        "mpi_runtime_failure",
        STEPS
        + "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)\n"
        + "./run.sh: line 4:  811 Segmentation fault      (core dumped) python train.py\n",
    ),
    (
        "the kernel ends a loader, the rest fails in its own way",
        "cpu_out_of_memory",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n"
        + TRACEBACK
        + "EOFError: Ran out of input\n",
    ),
    (
        "the cluster takes it away, the handler stumbles",
        "job_preempted",
        "slurmstepd: error: *** STEP 7.0 ON n7 CANCELLED AT noon DUE TO PREEMPTION ***\n"
        + TRACEBACK
        + "ValueError: I/O operation on closed file\n",
    ),
    (
        "a download is tried again and comes, the data is bad",
        "incorrect_inputs",
        "503 Server Error: Service Unavailable for url: https://hub.example/set; retrying in 2 s\n"
        + TRACEBACK
        + "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)\n",
    ),
    (
        "one error is raised while another is handled",
        "cuda_version_mismatch",
        TRACEBACK
        + "ImportError: cannot import name 'fused_adam'\n\n"
        + "During handling of the above exception, another exception occurred:\n\n"
        + TRACEBACK
        + "RuntimeError: The NVIDIA driver on your system is too old (found version 10010).\n",
    ),
    (
        "the launcher starts it again, and then it fails for another reason",
        "model_checkpoint_error",
        TRACEBACK
        + "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)\n"
        + STEPS
        + TRACEBACK
        + "OSError: [Errno 28] No space left on device\n",
    ),
    (
        "a thread dies of the lost connection, the program of what it met",
        "gpu_out_of_memory",
        TRACEBACK
        + OOM
        + "Exception in thread Thread-2 (_pin_memory_loop):\n"
        + TRACEBACK
        + "EOFError: Ran out of input\n",
    ),
    (
        "a thread finds the other process's socket gone, then the peer's end is told",
        "mpi_error",
        STEPS
        + "Exception in thread Thread-5 (_pin_memory_loop):\n"
        + TRACEBACK
        + "FileNotFoundError: [Errno 2] No such file or directory\n"
        + TRACEBACK
        + NCCL,
    ),
    (
        "a helper finds that socket gone, and nothing else is told",
        "traceback_from_crash",
        STEPS + TRACEBACK + "FileNotFoundError: [Errno 2] No such file or directory\n",
    ),
    (
        "it cannot clean up at its exit",
        "mpi_error",
        STEPS
        + TRACEBACK
        + NCCL
        + "Error in atexit._run_exitfuncs:\n"
        + 'Traceback (most recent call last):\n  File "shutil.py", line 664, in _rmtree\n'
        + "FileNotFoundError: [Errno 2] No such file or directory: 'shards-4711'\n",
    ),
    (
        "only errors that were got over, and silence",
        "no_signature",
        "WARNING: fused kernels disabled: ImportError: no fused_adam\n" + STEPS,
    ),
)

PASSING: tuple[tuple[str, str], ...] = (
    ("mpi_runtime_failure", "OSError: [Errno 98] Address already in use"),
    ("mpi_runtime_failure", "RuntimeError: The server socket has failed to listen. EADDRINUSE"),
    ("mpi_runtime_failure", "EndpointConnectionError: Could not connect to the endpoint URL: 's3'"),
    (
        "mpi_runtime_failure",
        "requests.exceptions.ConnectionError: Max retries exceeded with url: /m",
    ),
    ("mpi_runtime_failure", "requests.exceptions.HTTPError: 503 Server Error for url: https://hub"),
    ("mpi_runtime_failure", "requests.exceptions.HTTPError: 429 Client Error for url: https://hub"),
    ("mpi_runtime_failure", "urllib.error.HTTPError: HTTP Error 502: Bad Gateway"),
    ("model_checkpoint_error", "OSError: [Errno 5] Input/output error: '/data/shard-3.tar'"),
    ("model_checkpoint_error", "OSError: [Errno 107] Transport endpoint is not connected"),
)
"""What passes by itself: storage and servers that did not answer."""


LOST = "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms\n"
WATCHDOG = (
    "[E ProcessGroupNCCL.cpp:563] [Rank 3] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=911, OpType=ALLREDUCE, Timeout(ms)=600000)\n"
)
LAUNCH_FAILURE = "RuntimeError: CUDA error: unspecified launch failure\n"
NO_FILE = "FileNotFoundError: [Errno 2] No such file or directory: '/data/cache.idx'\n"
NO_SHARD = "FileNotFoundError: [Errno 2] No such file or directory: '/data/shard-{}.tar'\n"
HEADER = "Traceback (most recent call last):\n"
CAUGHT_FILE = (
    "Traceback (most recent call last):\n"
    '  File "data.py", line 31, in load_index\n'
    "    with open(path) as file:\n"
    "         ^^^^^^^^^^\n" + NO_FILE
)
CAUGHT_EVALUATION = (
    "Traceback (most recent call last):\n"
    '  File "train.py", line 61, in train\n'
    "    scores = evaluate(model, held_out)\n"
    '  File "train.py", line 23, in evaluate\n'
    "    return scores[label]\n"
    "KeyError: 'label'\n"
)


def caught_shard(number: int) -> str:
    """The loader's traceback for one file that it could not read, and nothing more."""
    return (
        "Traceback (most recent call last):\n"
        '  File "data.py", line 52, in read_shard\n'
        "    with tarfile.open(path) as tar:\n" + NO_SHARD.format(number)
    )


def steps(count: int, begin: int = 1) -> str:
    """Lines of progress as most programs print them."""
    return "".join(
        f"step {number} | loss {3.0 / number:.3f} | lr 3.0e-04 | 212 ms\n"
        for number in range(begin, begin + count)
    )


def bar(count: int) -> str:
    """A bar of a slow program, which draws it anew in its place each time."""
    return "".join(
        f"\r{number:3d}%|##        | {number}/100 [05:13<01:00,  3.21s/it]"
        for number in range(1, count + 1)
    )


def ranks(numbers: Iterable[int], each: int) -> str:
    """So many steps of some ranks that write to one log, one after another."""
    return "".join(
        f"[{rank}] epoch 2 step {step} loss 1.{rank}{step}\n"
        for step in range(500, 500 + each)
        for rank in numbers
    )


def epochs(count: int, failing: str, each: int = 30) -> str:
    """Epochs at whose ends something fails and is caught."""
    return "".join(
        steps(each, begin=each * epoch + 1) + f"epoch {epoch} done\n" + failing
        for epoch in range(count)
    )


OUTLIVED: tuple[tuple[str, str, int, str], ...] = (
    (
        "a cache that is not there is built, hours later the connection is lost",
        "mpi_runtime_failure",
        1,
        CAUGHT_FILE + "no cache, building it anew\n" + steps(800) + TRACEBACK + LOST,
    ),
    (
        "the logger tells it as an error, hours later a peer dies",
        "mpi_error",
        1,
        "2026-03-02 07:11:01,334 ERROR data: no index\n"
        + CAUGHT_FILE
        + steps(800)
        + TRACEBACK
        + NCCL,
    ),
    (
        "a module-level try prints it, hours later a GPU breaks",
        "cuda_failure",
        1,
        TRACEBACK
        + "ModuleNotFoundError: No module named 'apex'\n"
        + steps(800)
        + TRACEBACK
        + LAUNCH_FAILURE,
    ),
    (
        "the library tells the end, without a traceback",
        "mpi_runtime_failure",
        -6,
        CAUGHT_FILE + steps(800) + WATCHDOG + "SIGABRT\n",
    ),
    (
        "only a launcher tells the end",
        "mpi_runtime_failure",
        137,
        CAUGHT_FILE
        + steps(800)
        + "mpirun noticed that process rank 3 with PID 0 on node n7 exited on signal 9.\n",
    ),
    (
        "somebody ends it from outside without a word",
        "no_signature",
        -9,
        CAUGHT_FILE + steps(800),
    ),
    (
        "the same from a shell",
        "no_signature",
        137,
        CAUGHT_FILE + steps(800),
    ),
    (
        "it crashes without a word",
        "invalid_memory_access",
        139,
        CAUGHT_FILE + steps(800),
    ),
    (
        "an error without a signature ends it",
        "traceback_from_crash",
        1,
        CAUGHT_FILE + steps(800) + TRACEBACK + "deepstuff.Oops: what now\n",
    ),
    (
        "an evaluation fails each epoch, the last time just before a peer dies",
        "mpi_error",
        1,
        epochs(9, CAUGHT_EVALUATION) + steps(12, begin=271) + TRACEBACK + NCCL,
    ),
    (
        "a loader passes over each file that is not there, then the connection is lost",
        "mpi_runtime_failure",
        1,
        "".join(caught_shard(number) + steps(40, begin=40 * number + 1) for number in range(9))
        + caught_shard(9)
        + TRACEBACK
        + LOST,
    ),
    (
        "a loader passes over each file, then its program runs out of memory",
        "gpu_out_of_memory",
        1,
        "".join(caught_shard(number) + steps(40, begin=40 * number + 1) for number in range(9))
        + caught_shard(9)
        + TRACEBACK
        + OOM,
    ),
    (
        "a loader tries one file again and again, and gives up",
        "incorrect_inputs",
        1,
        "".join(caught_shard(7) + steps(40, begin=40 * number + 1) for number in range(9))
        + caught_shard(7)
        + "giving up\n",
    ),
    (
        "what a loop got over ends the program at last",
        "semantic_error",
        1,
        epochs(9, CAUGHT_EVALUATION)
        + TRACEBACK
        + "KeyError: 'label'\n"
        + of_rank(1, TRACEBACK + NCCL)
        + WATCHDOG,
    ),
    (
        "one rank fails, the others print on until they wait for it",
        "semantic_error",
        -6,
        ranks(range(8), 40)
        + of_rank(5, TRACEBACK + "KeyError: 'label'\n")
        + ranks((0, 1, 2, 3, 4, 6, 7), 6)
        + WATCHDOG
        + of_rank(0, TRACEBACK + NCCL)
        + of_rank(1, TRACEBACK + NCCL)
        + "SIGABRT\n",
    ),
    (
        "one rank says what failed and goes, the others print on until they wait for it",
        "incorrect_inputs",
        1,
        ranks(range(8), 40)
        + "2026-03-02 07:11:01,334 ERROR train: rank 5 gives up\n"
        + CAUGHT_FILE
        + ranks((0, 1, 2, 3, 4, 6, 7), 6)
        + WATCHDOG
        + TRACEBACK
        + NCCL,
    ),
    (
        "ranks fail one after another in the same way, the last one loses them",
        "semantic_error",
        1,
        ranks(range(8), 40)
        + "".join(
            of_rank(rank, TRACEBACK + "KeyError: 'label'\n") + ranks((7,), 3) for rank in range(7)
        )
        + of_rank(7, TRACEBACK + NCCL),
    ),
    (
        "what was printed before a crash is flushed after it",
        "semantic_error",
        1,
        TRACEBACK + "KeyError: 'label'\n" + steps(300),
    ),
    (
        "the launcher starts it again, and hours later a peer dies",
        "mpi_error",
        1,
        of_rank(0, TRACEBACK + "KeyError: 'label'\n") + steps(500) + of_rank(0, TRACEBACK + NCCL),
    ),
    (
        "the launcher starts it again, and it fails in the same way",
        "semantic_error",
        1,
        of_rank(0, TRACEBACK + "KeyError: 'label'\n")
        + steps(500)
        + of_rank(0, TRACEBACK + "KeyError: 'label'\n")
        + of_rank(1, TRACEBACK + NCCL),
    ),
    (
        "a program that tells no calls fails again in another way",
        "incorrect_inputs",
        1,
        HEADER + NO_FILE + steps(500) + HEADER + NO_SHARD.format(3) + TRACEBACK + LOST,
    ),
    (
        "it ends with a code of its own",
        "incorrect_inputs",
        255,
        CAUGHT_FILE + steps(800),
    ),
    (
        "a command is not there, a slow program goes on and is ended from outside",
        "no_signature",
        -9,
        "sh: 1: git: command not found\n" + bar(60),
    ),
    (
        "the kernel's word counts, however long it went on",
        "gpu_ecc_error",
        1,
        TRACEBACK
        + "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
        + steps(300)
        + TRACEBACK
        + NCCL,
    ),
)
"""What happened, the reason, the exit code, the log."""
