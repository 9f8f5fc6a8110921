"""Which processes are the inference server's: real ones, and a /proc of other machines' making."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from agent.telemetry.server_processes import ServerProcesses, checked_units
from common.errors import ConfigError
from tests.tables import each_row

LISTENS = """
import socket, subprocess, sys
sock = socket.create_server(("127.0.0.1", 0))
child = subprocess.Popen(["sleep", "600"], start_new_session=len(sys.argv) > 1)
print(sock.getsockname()[1], child.pid, flush=True)
child.wait()
"""
"""A server with a child, which is a session leader of its own if an argument is given."""


LAUNCHES = """
import subprocess, sys
compute = subprocess.Popen(["sleep", "600"])
code = "import socket, time; s = socket.create_server(('127.0.0.1', 0));"
code += "print(s.getsockname()[1], flush=True); time.sleep(600)"
router = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
print(int(router.stdout.readline()), compute.pid, flush=True)
try:
    sys.stdin.read()
finally:
    compute.kill()
    router.kill()
"""
"""One that starts what listens and what computes beside each other."""


@contextmanager
def running(*command: str) -> Generator[subprocess.Popen[str]]:
    """A process in a session of its own."""
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def server(*arguments: str) -> Generator[tuple[str, int, int]]:
    """Its URL, its pid and its child's."""
    with running(sys.executable, "-c", LISTENS, *arguments) as process:
        assert process.stdout is not None
        port, child = map(int, process.stdout.readline().split())
        try:
            yield f"http://127.0.0.1:{port}/health", process.pid, child
        finally:
            os.kill(child, 9)


@pytest.mark.parametrize("arguments", [(), ("leads",)])
def test_the_listener_its_session_and_its_descendants_are_the_servers(
    arguments: tuple[str, ...],
) -> None:
    """Whoever else is there is not: neither a child of the same parent, nor another server."""
    seen = ServerProcesses()
    with server(*arguments) as (url, pid, child), running("sleep", "600") as stranger:
        pids = {pid, child, stranger.pid}
        for _ in range(2):
            assert seen.beside(pids, urls=[url], units=()) == {stranger.pid}
        with server() as (other_url, other, _):
            assert seen.beside({*pids, other}, urls=[url], units=()) == {stranger.pid, other}
            assert seen.beside({pid, other}, urls=[other_url], units=()) == {pid}


def test_who_computes_beside_who_listens_is_the_servers() -> None:
    """Both were started by a launcher, whose session they share."""
    launcher = subprocess.Popen(
        (sys.executable, "-c", LAUNCHES), start_new_session=True, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with running("sleep", "600") as stranger:
        try:
            assert launcher.stdout is not None
            port, compute = map(int, launcher.stdout.readline().split())
            url = f"http://127.0.0.1:{port}/health"
            pids = {compute, stranger.pid}
            assert ServerProcesses().beside(pids, urls=[url], units=()) == {stranger.pid}
        finally:
            launcher.communicate("")


def test_who_has_ended_is_nobody() -> None:
    """A sample is of a moment ago."""
    seen = ServerProcesses()
    with server() as (url, pid, _):
        with running("sleep", "600") as stranger:
            pass
        assert seen.beside({pid, stranger.pid}, urls=[url], units=()) == set()


def test_another_server_at_the_same_port_is_found_in_its_place() -> None:
    """What was known of the one before is looked at again: a restart."""
    seen = ServerProcesses()
    with ExitStack() as stack:
        url, pid, _ = stack.enter_context(server())
        assert seen.beside({pid}, urls=[url], units=()) == set()
        stack.pop_all().close()
        port = url.rpartition(":")[2].removesuffix("/health")
        code = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); "
        code += "print('up', flush=True); time.sleep(600)"
        with running(sys.executable, "-c", code) as again, running("sleep", "600") as stranger:
            assert again.stdout is not None
            assert again.stdout.readline() == "up\n"
            assert seen.beside({again.pid, stranger.pid}, urls=[url], units=()) == {stranger.pid}


def test_nobody_is_accused_where_the_server_has_no_gpu_process_that_we_see() -> None:
    """Nobody listens there, or a proxy does: the server itself was not found."""
    seen = ServerProcesses()
    with running("sleep", "600") as somebody:
        with server() as (url, _, _):
            assert seen.beside({somebody.pid}, urls=[url], units=()) is None
        assert seen.beside({somebody.pid}, urls=[url], units=()) is None


# --- of other machines ------------------------------------------------------------------------


class Proc:
    """A /proc: processes with a session of their own each, and who listens at port 8000."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "net").mkdir()
        (path / "net" / "tcp").write_text("head\n   0: 0100007F:1F40 0:0 0A 0:0 0:0 0 0 0 77 1\n")
        self.add(os.getpid(), "/system.slice/aryl-agent.service")
        (path / "self").symlink_to(str(os.getpid()))

    def add(self, pid: int, group: str, *, name: str = "python", holds: str = "") -> None:
        """A process in a control group; holds: what its file 3 is."""
        home = self.path / str(pid)
        (home / "fd").mkdir(parents=True)
        (home / "stat").write_text(f"{pid} ({name}) S 1 {pid} {pid} 0")
        (home / "comm").write_text(f"{name}\n")
        (home / "cgroup").write_text(f"5:cpuset:/system.slice\n1:name=systemd:{group}\n0::/\n")
        if holds:
            (home / "fd" / "3").symlink_to(holds)

    def beside(
        self, *pids: int, units: tuple[str, ...] = (), seen: ServerProcesses | None = None
    ) -> set[int] | None:
        """Those of these that are not the server's."""
        seen = seen or ServerProcesses(proc=self.path)
        return seen.beside(pids, urls=["http://127.0.0.1:8000/health"], units=units)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    """An agent under systemd, and the processes of two services and of a person."""
    found = Proc(tmp_path)
    found.add(50, "/system.slice/vllm.service", holds="socket:[77]")
    found.add(51, "/system.slice/vllm.service")
    found.add(60, "/system.slice/other.service")
    found.add(70, "/user.slice/user-1000.slice/session-3.scope")
    return found


def test_the_rest_of_a_listeners_unit_is_the_servers(proc: Proc) -> None:
    """By where systemd has put it; that other controllers put all services into one slice says
    nothing."""
    assert proc.beside(50, 51, 60, 70) == {60, 70}


def test_an_agent_that_may_not_see_who_listens_is_told_the_units(proc: Proc) -> None:
    """Without them it accuses nobody; with them, whoever is in none. A slice names all in it."""
    (proc.path / "50" / "fd" / "3").unlink()
    assert proc.beside(50, 51, 60, 70) is None
    assert proc.beside(50, 51, 60, 70, units=("vllm.service",)) == {60, 70}
    assert proc.beside(50, 51, 60, 70, units=("system.slice",)) == {70}
    assert proc.beside(60, 70, units=("vllm.service",)) is None


@each_row(
    "unit", ["", "vllm", ".service", "vllm.socket", "/system.slice/vllm.service", "a b.service"]
)
def test_what_is_no_units_name_is_refused(unit: str) -> None:
    """It would be found nowhere; the field and the name are told."""
    with pytest.raises(ConfigError, match=f"server.units: {unit!r} is no unit's name"):
        checked_units(("vllm.service", unit))


def test_names_of_units_that_have_processes_are_taken() -> None:
    """A service, also of a template, a container's scope, a slice."""
    checked_units(("vllm@0.service", "docker-0a1b.scope", "machine.slice"))


def test_a_server_that_was_not_found_is_looked_for_ever_less_often(proc: Proc) -> None:
    """To look through all processes each second would cost more than all else that an agent does;
    one that appears is found all the same, and so is another one after a restart, at once."""
    seen, held = ServerProcesses(proc=proc.path), proc.path / "50" / "fd" / "3"
    held.unlink()
    for _ in range(5):  # it searches at the first, second, third and fifth of them
        assert proc.beside(50, 60, seen=seen) is None
    held.symlink_to("socket:[77]")
    assert [proc.beside(50, 60, seen=seen) for _ in range(4)] == [None, None, None, {60}]
    held.unlink()
    (proc.path / "60" / "fd" / "3").symlink_to("socket:[77]")
    assert proc.beside(50, 60, seen=seen) == {50}


def test_a_group_that_the_agent_is_in_tells_nobody_from_others(proc: Proc) -> None:
    """In a container all share one."""
    proc.add(90, "/system.slice/aryl-agent.service", holds="socket:[77]")
    proc.add(91, "/system.slice/aryl-agent.service")
    assert proc.beside(90, 91) == {91}
