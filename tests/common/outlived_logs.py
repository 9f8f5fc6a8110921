"""Training logs with exceptions that were caught and printed, and why each program ended; must not
know the rules.

Written for these tests, by what Python's `traceback.print_exc()` and `logger.exception()` print.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.common.failure_logs import NCCL, OOM, TRACEBACK, of_rank

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
