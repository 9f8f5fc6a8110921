"""A comparison that is ended from outside leaves nothing behind that computes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.cli.interrupt import EXIT_INTERRUPTED, EXIT_TERMINATED
from tests.harness.plugged import distribution

PATIENCE_S = 60.0
ENDLESS = """
import os, signal
from msgspec import Struct
from coordinator.policies.contract.decisions import Allocation
from coordinator.policies.policy import Parts, joint

class Knobs(Struct, frozen=True, kw_only=True):
    take: int = 1

def allocate(knobs, snapshot, memory):
    os.write(1, b"computes\\n")
    signal.pause()

def pending_reasons(knobs, snapshot, memory):
    return ()

POLICY = joint("endless", "never decides", knobs=Knobs(), allocate=allocate,
               pending_reasons=pending_reasons,
               parts=Parts(order="none", size="none", place="none"))
"""
TRACE = Path(__file__).parents[1] / "data" / "sim" / "itp_slice.csv"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, EXIT_TERMINATED), (signal.SIGINT, EXIT_INTERRUPTED)],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_who_ends_a_comparison_ends_all_that_compute_for_it(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """A service manager or `kill` tells one process alone. Its output ends with the last of them,
    which hold it as well."""
    entries = {"endless": "endless_policy:POLICY"}
    place = distribution(tmp_path, "endless", entries, module="endless_policy", source=ENDLESS)
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "from coordinator.cli.main import main; main()"
    runs = ("--cluster", "8x8", "--policy", "endless,endless:take=2", "--cores", "2")
    with subprocess.Popen(
        [sys.executable, "-c", program, "simulate", "--workload", str(TRACE), *runs],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(place), *sys.path])},
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert [process.stdout.readline() for _ in range(2)] == ["computes\n"] * 2
            process.send_signal(number)
            process.communicate(timeout=PATIENCE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # as it should be: nobody is left
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == status
