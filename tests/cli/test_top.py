"""`aryl top`: one frame in its place, and leaving on `q` with the terminal as it was."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs
from rich.cells import cell_len

from common.api import GetStatus, Jobs, ListJobs, ListLoans, ListNodes, Loans, NodeRow, Nodes
from common.messages import Message
from common.model import JobState, NodeRole
from coordinator.cli.top import View, frame, shares
from tests.cli.fake_cell import (
    NOW_S,
    FakeCell,
    aryl,
    job_row,
    loan_row,
    no_answer,
    node_row,
    status,
)
from tests.tables import each_row


def view(nodes: int = 2, **changes: Any) -> View:
    """A cell with some nodes, one loan and two jobs."""
    values: dict[str, Any] = {
        "status": status(),
        "nodes": Nodes(rows=tuple(node_row(f"t{n}") for n in range(nodes))),
        "loans": Loans(rows=(loan_row(),)),
        "jobs": Jobs(rows=(job_row("jrun"), job_row("jwait", state=JobState.PENDING))),
        "now_s": NOW_S,
    }
    return View(**{**values, **changes})


@each_row("width", [60, 80, 200])
@each_row("height", [8, 24, 60])
@each_row("nodes", [0, 2, 300])
def test_a_frame_fits_the_screen(width: int, height: int, nodes: int) -> None:
    """No line is too long and no frame too high, in a small cell and a large one."""
    lines = frame(view(nodes), width=width, height=height)
    assert len(lines) <= height
    assert all(cell_len(str(line)) <= width for line in lines)


def test_a_large_fleet_leaves_room_for_the_queue() -> None:
    """300 nodes are cut and counted; loans and jobs are still on the screen."""
    text = "\n".join(str(line) for line in frame(view(300), width=80, height=40))
    assert "nodes (300)" in text
    assert " more" in text
    for job_or_loan in ("l7", "jrun", "jwait"):
        assert job_or_loan in text


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(-3, 200))
@example([1, 1], 1)
def test_shares_use_the_room_and_no_more(wanted: list[int], room: int) -> None:
    """Nobody gets more than it wants, all together no more than there is, and none is wasted."""
    limits = shares(wanted, room)
    assert all(0 <= limit <= want for limit, want in zip(limits, wanted, strict=True))
    assert sum(limits) == min(sum(wanted), max(room, 0))


def test_a_node_is_shown_with_its_gpus_as_bars() -> None:
    """Half of the GPUs held is half a bar; an unknown busy ratio is no bar of zero."""
    row = node_row("t0", gpus_held=4, gpu_busy_ratio=None, role=NodeRole.TRAINING)
    assert any("█████████░" in str(line) for line in frame(view(), width=120))
    [line] = [str(x) for x in frame(_of(row), width=120) if str(x).startswith("t0")]
    assert "█████░░░░░" in line
    assert "··········" in line
    [line] = [str(x) for x in frame(_of(row), width=120, is_ascii=True) if str(x)[:2] == "t0"]
    assert "#####-----" in line


def _of(row: NodeRow) -> View:
    """A cell of one node."""
    return structs.replace(view(), nodes=Nodes(rows=(row,)))


ANSWERS: dict[type[Message], Message] = {
    GetStatus: status(),
    ListNodes: Nodes(rows=(node_row(),)),
    ListLoans: Loans(rows=(loan_row(),)),
    ListJobs: Jobs(rows=(job_row("jrun"), job_row("jwait", state=JobState.PENDING))),
}


def test_one_frame_is_printed_on_request() -> None:
    """`--once` prints nodes, loans, running jobs and the queue at 80 columns, and leaves."""
    run = aryl(FakeCell(ANSWERS), "top", "--once", environ={"COLUMNS": "80"})
    assert run.code == 0
    for title in ("nodes (1)", "loans (1)", "running (1)", "queue (1)"):
        assert title in run.out
    assert max(len(line) for line in run.out.splitlines()) <= 80


def test_top_without_a_coordinator_is_an_error_of_its_kind() -> None:
    """The first frame cannot be drawn: exit 7, no traceback."""
    run = aryl(FakeCell({GetStatus: no_answer()}), "top", "--once")
    assert run.code == 7


LIMIT_S = 30.0
"""A test that waits this long has failed; nothing here is timed."""
LIVE = """
import fcntl, signal, termios
signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup and some builders ignore it
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from tests.cli.fake_cell import ENVIRON, FakeCell
from tests.cli.test_top import ANSWERS
from common.clock import SystemClock
from coordinator.cli.app import app
from coordinator.cli.session import Surroundings
environ = {key: value for key, value in ENVIRON.items() if key != "COLUMNS"}
app(["top"], obj=Surroundings(environ=environ, connect=FakeCell(ANSWERS).connect,
    clock=SystemClock(), is_interactive=lambda: True), prog_name="aryl")
"""


@pytest.mark.slow
@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_a_key_leaves_and_the_terminal_is_as_it_was(key: bytes) -> None:
    """On a real terminal: frames are drawn, `q` and Ctrl-C end it with 0, echo is on again."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(ours)
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", LIVE],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=root,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": str(root), "PYTHONUTF8": "1"},
    )
    try:
        seen = read_until(ours, lambda seen: b"jwait" in seen or child.poll() is not None)
        os.write(ours, key)
        seen += read_until(ours, lambda _: child.poll() is not None)
    finally:
        child.kill()
        child.wait()
    after = termios.tcgetattr(ours)
    os.close(ours)
    os.close(theirs)
    assert child.returncode == 0, seen.decode(errors="replace")
    assert after == before
    assert b"\x1b[?1049h" in seen
    assert b"\x1b[?1049l" in seen


def read_until(terminal: int, is_enough: Callable[[bytes], bool]) -> bytes:
    """What was drawn until it is enough, and what had been drawn by then."""
    seen, end_s = b"", time.monotonic() + LIMIT_S
    while not is_enough(seen):
        assert time.monotonic() < end_s, f"not so in {LIMIT_S:g} s: {seen.decode(errors='replace')}"
        seen += read(terminal)
    return seen + read(terminal)


def read(terminal: int) -> bytes:
    """What was drawn, if anything was within a moment."""
    return os.read(terminal, 65_536) if select.select([terminal], [], [], 0.05)[0] else b""
