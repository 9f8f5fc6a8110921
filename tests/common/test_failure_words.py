"""Whose words a line has: what one class of exceptions or one parser says is not another's."""

from __future__ import annotations

import pytest

from common.failure_rules import read_rules
from tests.common.failure_logs import OOM, TRACEBACK

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


@pytest.mark.parametrize(
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
