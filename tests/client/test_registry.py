"""The cell of this machine: one at a time, found while it lives, forgotten when it is dead."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from common.api import ApiErrorCode
from common.errors import ConfigError
from common.procfs import start_ticks
from coordinator.cli.session import exit_code
from coordinator.client import EXIT_CODES, registry
from coordinator.client.registry import CellInfo


def info(**changes: object) -> CellInfo:
    """A cell whose process is this one."""
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    values: dict[str, object] = {
        "cell": "demo",
        "nats_url": "nats://127.0.0.1:4222",
        "pid": os.getpid(),
        "start_ticks": ticks,
        "run_dir": "/run/aryl",
        "started_at_s": 1.0,
    }
    return CellInfo(**{**values, **changes})  # type: ignore[arg-type]  # checked by the tests


def test_a_cell_is_found_while_it_is_registered(tmp_path: Path) -> None:
    """Found inside the block, gone after it."""
    assert registry.find(tmp_path / "none") is None
    with registry.register(info(), tmp_path):
        assert registry.find(tmp_path) == info()
    assert registry.find(tmp_path) is None


def test_a_cell_that_is_being_started_is_not_found_but_leaves_its_trace(tmp_path: Path) -> None:
    """Nobody can talk to it yet; a second one is refused, and killed now it has left processes."""
    with registry.register(info(nats_url=""), tmp_path) as entry:
        assert registry.find(tmp_path) is None
        assert registry.left_behind(tmp_path) is None
        refused = pytest.raises(ConfigError, match="runs here already")
        with refused, registry.register(info(), tmp_path):
            pass
        entry.show(nats_url="nats://127.0.0.1:4222")
        assert registry.find(tmp_path) == info()
        killed = info(nats_url="", start_ticks=1)
        (tmp_path / "cell.json").write_bytes(msgspec.json.encode(killed))
        assert registry.left_behind(tmp_path) == killed


def test_a_second_cell_is_told_which_process_runs_the_first(tmp_path: Path) -> None:
    """The error names the cell, its pid and how to stop it, its exit code is that of a conflict,
    and the first one stays found."""
    with registry.register(info(), tmp_path):
        with (
            pytest.raises(
                ConfigError, match=rf"cell demo runs here already.*kill {os.getpid()}"
            ) as caught,
            registry.register(info(cell="other"), tmp_path),
        ):
            pass
        assert exit_code(caught.value) == EXIT_CODES[ApiErrorCode.CONFLICT]
        found = registry.find(tmp_path)
        assert found is not None
        assert found.cell == "demo"


def test_the_place_is_free_again_after_a_failure(tmp_path: Path) -> None:
    """A cell that crashes in its block leaves neither the lock nor the file."""
    with pytest.raises(RuntimeError, match="boom"), registry.register(info(), tmp_path):
        raise RuntimeError("boom")
    with registry.register(info(cell="next"), tmp_path):
        pass


def test_the_file_of_a_dead_process_counts_as_none(tmp_path: Path) -> None:
    """Neither an ended process nor a later one with the same pid is taken for the cell."""
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                           capture_output=True, text=True, check=True)  # fmt: skip
    tmp_path.chmod(0o700)
    for dead in (info(pid=int(child.stdout)), info(start_ticks=info().start_ticks + 1)):
        (tmp_path / "cell.json").write_bytes(msgspec.json.encode(dead))
        assert registry.find(tmp_path) is None
        with registry.register(info(), tmp_path):
            assert registry.find(tmp_path) == info()


def test_a_broken_file_counts_as_none(tmp_path: Path) -> None:
    """Half a file, or one of another program, is no cell and no traceback."""
    tmp_path.chmod(0o700)
    (tmp_path / "cell.json").write_text('{"cell": "de')
    assert registry.find(tmp_path) is None


@pytest.mark.parametrize("version", [0, 2, "1"])
def test_a_cell_of_another_version_is_named_and_not_guessed_at(
    tmp_path: Path, version: object
) -> None:
    """Its fields may mean something else; nothing is done to it, and nothing is started beside."""
    tmp_path.chmod(0o700)
    shown = tmp_path / "cell.json"
    said = msgspec.to_builtins(info()) | {"schema_version": version}
    shown.write_bytes(msgspec.json.encode(said))
    if isinstance(version, str):  # no version of anything
        assert registry.find(tmp_path) is None
        return
    for look in (registry.find, registry.left_behind):
        with pytest.raises(ConfigError, match=f"cell.json: field schema_version: {version}, expec"):
            look(tmp_path)
    assert msgspec.json.decode(shown.read_bytes()) == said


def test_a_file_without_a_version_is_of_the_first_one(tmp_path: Path) -> None:
    """It was left out where it is what everybody writes."""
    tmp_path.chmod(0o700)
    said = msgspec.to_builtins(info())
    del said["schema_version"]
    (tmp_path / "cell.json").write_bytes(msgspec.json.encode(said))
    assert registry.find(tmp_path) == info()


def test_the_directory_is_ours_alone(tmp_path: Path) -> None:
    """It is made with mode 0700; one that others can write to is refused, and so is a link."""
    home = tmp_path / "aryl"
    with registry.register(info(), home):
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
    home.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 700"):
        registry.find(home)
    home.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(home)
    with pytest.raises(ConfigError, match="ARYL_HOME"), registry.register(info(), link):
        pass


def test_the_directory_follows_the_environment() -> None:
    """ARYL_HOME wins over XDG_RUNTIME_DIR, which wins over /tmp."""
    assert registry.home({"ARYL_HOME": "/a", "XDG_RUNTIME_DIR": "/x"}) == Path("/a")
    assert registry.home({"XDG_RUNTIME_DIR": "/x"}) == Path("/x/aryl")
    assert registry.home({}) == Path(f"/tmp/aryl-{os.getuid()}")


def test_start_ticks_survive_an_odd_process_name() -> None:
    """A process may call itself `) 1 2 (`; its start time is still read from the right field."""
    name = "import ctypes; ctypes.CDLL(None).prctl(15, b') 1 2 ('); "
    code = name + "print(open('/proc/self/stat').read()); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        line = child.stdout.readline()
        assert ") 1 2 (" in line
        assert start_ticks(child.pid) == int(line.rpartition(")")[2].split()[19])
        child.communicate("\n")


def test_a_cell_whose_process_was_killed_is_left_behind_and_not_found(tmp_path: Path) -> None:
    """Its file says where its processes are; one that lives, or none at all, left nothing."""
    assert registry.left_behind(tmp_path) is None
    with registry.register(info(), tmp_path):
        assert registry.left_behind(tmp_path) is None
        killed = info(start_ticks=1)
        (tmp_path / "cell.json").write_bytes(msgspec.json.encode(killed))
        assert registry.left_behind(tmp_path) == killed
        assert registry.find(tmp_path) is None
