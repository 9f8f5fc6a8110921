"""A signal to a child: it reaches the child or nobody, and takes no exit status away."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from msgspec import Struct

from common import children

STATUS = 7
ROOT = Path(__file__).parents[2]
PRODUCT = ("agent", "common", "coordinator")
ASYNCIO_S_OWN = frozenset({"kill", "send_signal", "terminate"})
"""Methods of asyncio's processes; `os.kill` is another matter, and so is what is awaited."""


class Known(Struct):
    """A process by its number, as a loop knows it that was not told of its end."""

    pid: int
    returncode: int | None = None


@pytest.fixture(params=["by descriptor", "by number"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to send: with a descriptor of the process, and where there is none to be had."""

    def refuses(pid: int, flags: int = 0) -> int:
        raise OSError(24, "Too many open files")

    if request.param == "by number":
        monkeypatch.setattr(os, "pidfd_open", refuses)
    return str(request.param)


@pytest.fixture
def stranger() -> Generator[int]:
    """A process that is nobody's child here: its parent has left."""
    script = "sleep 1000 >/dev/null & echo $!"
    said = subprocess.run(("sh", "-c", script), stdout=subprocess.PIPE, check=True, timeout=30)
    pid = int(said.stdout)
    yield pid
    os.kill(pid, signal.SIGKILL)


def is_untouched(pid: int) -> bool:
    """Whether a process lives, and no signal is on its way to it."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    status = {name: words.split() for name, _, words in (line.partition(":") for line in lines)}
    pending = int(status["SigPnd"][0], 16) | int(status["ShdPnd"][0], 16)
    return status["State"][0] not in "ZX" and pending == 0


def ended_child() -> subprocess.Popen[bytes]:
    """A child that has ended and was not waited for."""
    child = subprocess.Popen(("sh", "-c", f"exit {STATUS}"))
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return child


@pytest.mark.usefixtures("way")
def test_a_child_that_runs_gets_the_signal() -> None:
    """Whichever signal it is."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        child = subprocess.Popen(("sleep", "1000"))
        children.send_signal(Known(child.pid), number)
        assert child.wait(30) == -number


@pytest.mark.usefixtures("way")
def test_the_exit_status_of_a_child_that_has_ended_is_left_to_its_loop() -> None:
    """Whoever looks for it later finds what the child said, and not that it was taken away."""
    child = ended_child()
    children.send_signal(Known(child.pid), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == STATUS
    child.returncode = STATUS


@pytest.mark.usefixtures("way")
def test_a_number_that_another_process_has_by_now_gets_nothing(stranger: int) -> None:
    """A child may be reaped before its loop is told, and its number be given away."""
    children.send_signal(Known(stranger), signal.SIGKILL)
    assert is_untouched(stranger)


@pytest.mark.usefixtures("way")
def test_a_number_that_nobody_has_is_no_error() -> None:
    """The child has ended, which is what its signal was for."""
    child = ended_child()
    child.wait()
    children.send_signal(Known(child.pid), signal.SIGKILL)


def test_a_child_whose_end_is_known_is_not_looked_for() -> None:
    """Its number means nothing any more."""
    with subprocess.Popen(("sleep", "1000")) as child:
        try:
            children.send_signal(Known(child.pid, returncode=0), signal.SIGKILL)
            assert is_untouched(child.pid)
        finally:
            child.kill()


def sent_otherwise(text: str) -> list[str]:
    """Uses of a process's own methods in a module, as `line: what`."""
    if not any(name in text for name in ASYNCIO_S_OWN):
        return []  # as in most modules: to parse them all takes a second
    tree = ast.parse(text)
    awaited = {
        node.value.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Await) and isinstance(node.value, ast.Call)
    }
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ASYNCIO_S_OWN
        and node not in awaited
        and "process" in ast.unparse(node.value).lower()
    ]


def test_no_module_sends_a_child_a_signal_by_asyncio_s_own_ways() -> None:
    """They may take away its exit status, or send to a number that is another process's by then."""
    found = {
        str(path.relative_to(ROOT)): lines
        for name in PRODUCT
        for path in sorted((ROOT / name).rglob("*.py"))
        if (lines := sent_otherwise(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_a_child_is_waited_for_without_a_thread() -> None:
    """A process that can start no further thread still starts children and hears of their end."""
    script = f"""
import asyncio, threading
from common.children import watch_without_threads

def refuse(thread):
    raise RuntimeError("can't start new thread")

async def main():
    child = await asyncio.create_subprocess_exec("sh", "-c", "exit {STATUS}")
    print(await child.wait())

threading.Thread.start = refuse
watch_without_threads()
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(STATUS)), done.stderr
