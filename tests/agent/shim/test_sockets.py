"""A job's socket: whole lines, strange bytes, and the folder that it is in, which goes with it."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.shim import files as shim_files
from agent.shim.sockets import (
    FOLDER_NOTE,
    FOLDER_PREFIX,
    MAX_LINE_BYTES,
    JobClient,
    JobSocket,
    parse,
    remove_folder,
)
from agent.workers.directory import make_directory
from agent.workers.record import SHIM_LOST
from agent.workers.spec import Account
from tests.harness.node.workers import kill, make_harness, make_order

JOBS = Account(name="nobody", uid=65534, gid=65534, home="/nonexistent")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")


def with_socket(folder: Path) -> Path:
    """A folder with a socket, as a shim that was killed leaves it."""
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / shim_files.JOB_SOCKET))
    return folder


@pytest.fixture
def folder() -> Generator[Path]:
    """Where a shim would put one; whatever a test leaves there is removed."""
    path = Path(f"{FOLDER_PREFIX}{os.getpid()}-{os.urandom(8).hex()}")
    yield path
    if path.is_symlink() or path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    """A worker's directory."""
    path = tmp_path / "worker"
    path.mkdir()
    return path


def test_a_folder_lets_nobody_else_in(worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is where everybody may make one; the shim's umask is its job's to choose."""
    monkeypatch.chdir(worker)
    before = os.umask(0)
    try:
        job_socket = JobSocket("/too-long-for-a-socket" * 6)
    finally:
        os.umask(before)
    try:
        assert stat.S_IMODE(Path(job_socket.path).parent.stat().st_mode) == 0o700
    finally:
        job_socket.listener.close()
        shutil.rmtree(Path(job_socket.path).parent)


@pytest.mark.slow
async def test_the_folder_of_a_shim_that_was_killed_goes_with_its_worker(tmp_path: Path) -> None:
    """No more than a shim that ends in good order does it leave anything where all can see it."""
    deep = tmp_path.joinpath(*["d" * 60] * 3)
    async for harness in make_harness(deep):
        key = await harness.start(make_order("sh", "-c", "echo $ARYL_CONTROL_SOCKET; sleep 600"))
        await harness.until_said(key, "job.sock")
        used = Path(harness.log(key).strip()).parent
        shim_pid = harness.raw(key)["shim_pid"]
        assert isinstance(shim_pid, int)
        kill(shim_pid)
        status = await harness.until_exited(key)
        assert status.error.startswith(SHIM_LOST)
        assert used.is_dir()
        await harness.runner.forget(key)
        assert not used.exists()
        assert not harness.directory(key).exists()


def test_a_folder_is_named_before_it_is_made(worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed in between has left none that nobody knows; closed, nothing is left."""
    monkeypatch.chdir(worker)
    long = "/too-long-for-a-socket" * 6
    (worker / FOLDER_NOTE).mkdir()  # it cannot be written
    before = set(Path(FOLDER_PREFIX).parent.glob(f"{Path(FOLDER_PREFIX).name}{os.getpid()}-*"))
    with pytest.raises(IsADirectoryError):
        JobSocket(long)
    after = set(Path(FOLDER_PREFIX).parent.glob(f"{Path(FOLDER_PREFIX).name}{os.getpid()}-*"))
    assert after == before
    (worker / FOLDER_NOTE).rmdir()
    job = JobSocket(long)
    assert (worker / FOLDER_NOTE).read_text() == str(Path(job.path).parent)
    job.close()
    assert list(worker.iterdir()) == []
    assert not Path(job.path).parent.exists()


def test_a_folder_that_is_named_is_removed_with_its_socket(worker: Path, folder: Path) -> None:
    """Also where its shim was killed before there was a socket, and again when it is gone."""
    for has_socket in (True, False):
        if has_socket:
            with_socket(folder)
        else:
            folder.mkdir()
        (worker / FOLDER_NOTE).write_text(str(folder))
        remove_folder(str(worker))
        assert not folder.exists()
        remove_folder(str(worker))


@pytest.mark.parametrize("named", ["outside", "inside", "below", "above", "long", "none"])
def test_no_other_name_counts(tmp_path: Path, worker: Path, folder: Path, named: str) -> None:
    """A job can write any there, and root would follow it."""
    with_socket(folder)
    places = {
        "outside": with_socket(tmp_path / "mine"),
        "inside": with_socket(folder / "aryl-1-2"),
        "below": Path(f"{folder}/../{folder.name}"),
        "above": Path(FOLDER_PREFIX).parent,
        "long": Path(f"{folder}{'0' * 200}"),
        "none": Path(),
    }
    (worker / FOLDER_NOTE).write_text(str(places[named]) if named != "none" else "")
    remove_folder(str(worker))
    for path in (places["outside"], places["inside"], folder):
        assert (path / shim_files.JOB_SOCKET).exists()


def test_a_note_that_is_no_file_is_neither_waited_for_nor_followed(
    tmp_path: Path, worker: Path, folder: Path
) -> None:
    """A fifo would hang the agent of its node."""
    with_socket(folder)
    note, other = worker / FOLDER_NOTE, tmp_path / "other"
    os.mkfifo(note)
    remove_folder(str(worker))
    note.unlink()
    other.write_text(str(folder))
    note.symlink_to(other)
    remove_folder(str(worker))
    assert (folder / shim_files.JOB_SOCKET).exists()


def test_a_folder_that_is_a_link_leads_nowhere(tmp_path: Path, worker: Path, folder: Path) -> None:
    """Whatever it leads to is somebody else's."""
    target = with_socket(tmp_path / "target")
    folder.symlink_to(target)
    (worker / FOLDER_NOTE).write_text(str(folder))
    remove_folder(str(worker))
    assert (target / shim_files.JOB_SOCKET).exists()
    assert folder.is_symlink()


def test_what_a_shim_did_not_put_there_stays(worker: Path, folder: Path) -> None:
    """Only a socket of that name is taken out of it, and only an empty folder away."""
    with_socket(folder)
    (folder / "kept").touch()
    (worker / FOLDER_NOTE).write_text(str(folder))
    remove_folder(str(worker))
    assert [path.name for path in folder.iterdir()] == ["kept"]
    (folder / shim_files.JOB_SOCKET).write_text("no socket")
    remove_folder(str(worker))
    assert sorted(path.name for path in folder.iterdir()) == [shim_files.JOB_SOCKET, "kept"]


@needs_root
def test_a_folder_of_another_account_stays(worker: Path, folder: Path) -> None:
    """A job that names it would else have root remove what it could not remove itself."""
    with_socket(folder)
    (worker / FOLDER_NOTE).write_text(str(folder))
    os.chown(worker, JOBS.uid, JOBS.gid)
    remove_folder(str(worker))
    assert (folder / shim_files.JOB_SOCKET).exists()
    os.chown(folder, JOBS.uid, JOBS.gid)
    remove_folder(str(worker))
    assert not folder.exists()


@needs_root
def test_a_directory_that_is_made_anew_takes_its_folder_along(worker: Path, folder: Path) -> None:
    """The shim that comes then has one of its own."""
    with_socket(folder)
    (worker / FOLDER_NOTE).write_text(str(folder))
    for path in (worker, folder):
        os.chown(path, JOBS.uid, JOBS.gid)
    assert make_directory(worker, JOBS)
    assert not folder.exists()
    assert list(worker.iterdir()) == []


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(min_value=1, max_value=50))
def test_lines_arrive_whole_however_they_are_cut(lines: list[bytes], piece: int) -> None:
    """A stream has no messages; only its newlines have."""
    said = b"\n".join(line.replace(b"\n", b"") for line in lines) + b"\n"
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.setblocking(False)
        client, heard = JobClient(mine), list[bytes]()
        for start in range(0, len(said), piece):
            theirs.sendall(said[start : start + piece])
            heard += client.receive()[0]
    assert heard == said[:-1].split(b"\n")


@pytest.mark.parametrize("extra", [1, MAX_LINE_BYTES, 3 * MAX_LINE_BYTES])
def test_a_line_too_long_is_counted_once_and_the_next_is_heard(extra: int) -> None:
    """A rude peer costs bounded memory and no message of its own that fits."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.setblocking(False)
        client = JobClient(mine)
        heard, too_long = list[bytes](), 0
        said = b"x" * (MAX_LINE_BYTES + extra) + b"\nnext\n"
        for start in range(0, len(said), 10_000):
            theirs.sendall(said[start : start + 10_000])
            lines, count, is_there = client.receive()
            heard += lines
            too_long += count
            assert is_there
    assert (heard, too_long) == ([b"next"], 1)


def test_a_peer_that_hung_up_is_gone() -> None:
    """Reading and writing both say so."""
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    theirs.close()
    with mine:
        client = JobClient(mine)
        assert client.receive() == ([], 0, False)
        assert not client.send(b"x\n")


@given(st.binary(max_size=200))
def test_no_bytes_are_too_strange_to_parse(data: bytes) -> None:
    """A message is an object or nothing."""
    message = parse(data)
    assert message is None or all(isinstance(name, str) for name in message)
