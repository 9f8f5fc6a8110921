"""Who is known to have ended, looked at on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from coordinator.service.leadership.process import ProcessId, has_ended, this_process

SAYS_WHO_IT_IS = """
import sys, msgspec
from coordinator.service.leadership.process import this_process
sys.stdout.buffer.write(msgspec.json.encode(this_process()) + b"\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which says who it is and ends when its input does."""
    with subprocess.Popen(
        [sys.executable, "-c", SAYS_WHO_IT_IS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def said(process: subprocess.Popen[bytes]) -> ProcessId:
    """Who it says it is."""
    assert process.stdout is not None
    return msgspec.json.decode(process.stdout.readline(), type=ProcessId)


def me() -> ProcessId:
    """This process; where the kernel says it, as it does wherever these tests run."""
    process = this_process()
    assert process is not None
    return process


def test_a_process_that_runs_has_not_ended(other: subprocess.Popen[bytes]) -> None:
    """Neither this one nor another one beside it, which say different names."""
    process = said(other)
    assert process != me()
    assert not has_ended(process)
    assert not has_ended(me())


def test_a_process_that_was_killed_has_ended_even_as_a_zombie(
    other: subprocess.Popen[bytes],
) -> None:
    """Before its parent has asked for its status and afterwards."""
    process = said(other)
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(process)
    other.wait()
    assert has_ended(process)


def test_a_pid_that_is_used_again_is_another_process() -> None:
    """Its start tells them apart."""
    earlier = msgspec.structs.replace(me(), start_ticks=me().start_ticks - 1)
    assert has_ended(earlier)


@pytest.mark.parametrize("elsewhere", [{"boot_id": "another"}, {"pid_namespace": "pid:[1]"}])
def test_nothing_is_known_of_another_machine_or_container(elsewhere: dict[str, str]) -> None:
    """A pid that is free here may be a leader's there: it is waited out."""
    gone = msgspec.structs.replace(me(), start_ticks=me().start_ticks - 1)
    assert not has_ended(msgspec.structs.replace(gone, **elsewhere))
