"""Files, checkpoints and numbers of a shim, without a worker."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from agent.shim import files as shim_files
from agent.shim.status import read_checkpoint, read_number, read_progress

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["step", "total_steps", "loss", "path"]), JSON))
def test_what_a_job_says_fits_or_is_nothing(message: dict[str, object]) -> None:
    """Nothing gets into a report that the wire's types would refuse."""
    progress = read_progress(message)
    if progress is not None:
        step, loss = progress["step"], progress["loss"]
        assert isinstance(step, int)
        assert step >= 0
        assert loss is None or isinstance(loss, float)
    saved = read_checkpoint(message)
    assert saved is None or (saved[0] >= 0 and "\0" not in saved[1])


def test_truth_is_no_number_and_neither_is_infinity() -> None:
    """JSON as Python reads it has more numbers than the contract."""
    assert [read_number(value) for value in (True, float("inf"), float("nan"), "1", None)] == [
        None
    ] * 5
    assert read_number(2) == 2.0


def test_diverged_training_still_advances() -> None:
    """A loss that is not finite does not hide the steps."""
    assert read_progress({"step": 3, "loss": float("nan")}) == {
        "step": 3,
        "total_steps": None,
        "loss": None,
    }


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    """Whoever reads a status sees the old one or the new one."""
    path = str(tmp_path / "file")
    shim_files.write_json(path, {"a": 1}, is_durable=True)
    reader = os.open(path, os.O_RDONLY)
    try:
        shim_files.write_json(path, {"a": 2}, is_durable=False)
        assert os.read(reader, 100) == b'{"a":1}'
    finally:
        os.close(reader)
    assert shim_files.read_json(path) == {"a": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_that_is_no_object_reads_as_none(tmp_path: Path) -> None:
    """Absent, torn or of another shape: there is nothing to go by."""
    path = tmp_path / "file"
    assert shim_files.read_json(str(path)) is None
    for text in ("", "{", "[1]"):
        path.write_text(text)
        assert shim_files.read_json(str(path)) is None


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    """A second shim of a directory finds it taken, until the first has ended."""
    path = str(tmp_path / "lock")
    held = shim_files.take_lock(path)
    assert held is not None
    assert shim_files.take_lock(path) is None
    os.close(held)
    again = shim_files.take_lock(path)
    assert again is not None
    os.close(again)


def test_a_directory_is_as_new_as_its_newest_file(tmp_path: Path) -> None:
    """Empty files and the directory's own times count for nothing."""
    assert shim_files.newest_mtime_ns(str(tmp_path)) == 0
    assert shim_files.newest_mtime_ns(str(tmp_path / "gone")) == 0
    (tmp_path / "inner").mkdir()
    for name, content, mtime_ns in (("a", "x", 5000), ("inner/b", "x", 7000), ("c", "", 9000)):
        (tmp_path / name).write_text(content)
        os.utime(tmp_path / name, ns=(mtime_ns, mtime_ns))
    assert shim_files.newest_mtime_ns(str(tmp_path)) == 7000
    assert shim_files.newest_mtime_ns(str(tmp_path / "a")) == 5000


def test_links_cannot_carry_a_path_out_of_its_root(tmp_path: Path) -> None:
    """Below is meant where the storage has it, not as it is spelled."""
    (tmp_path / "root").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "other")
    root = str(tmp_path / "root")
    assert shim_files.is_below(f"{root}/x", root)
    assert shim_files.is_below(root, root)
    assert not shim_files.is_below(f"{root}/link/x", root)
    assert not shim_files.is_below(f"{root}-2", root)
    assert not shim_files.is_below(f"{root}/../other", root)


def test_this_process_is_its_parent_s_descendant() -> None:
    """The tree of processes is read from the kernel, and the dead are not alive."""
    assert os.getpid() in shim_files.descendants(os.getppid())
    assert os.getpid() not in shim_files.descendants(os.getpid())
    assert shim_files.start_ticks(os.getpid()) > 0
    assert shim_files.start_ticks(2**22 + 1) == 0


def test_a_log_whose_writer_goes_on_at_its_old_place_is_moved_once(tmp_path: Path) -> None:
    """As one does that has opened /dev/stdout: the hole before it is no log that outgrew its size.

    The next move would put that hole in the place of what was moved before.
    """
    path, old = str(tmp_path / "log"), str(tmp_path / "log.1")
    log_fd = shim_files.open_log(path)
    writer = os.open(path, os.O_WRONLY)
    try:
        os.write(writer, b"early\n" * 50_000)
        assert shim_files.cap_log(log_fd, path, old, 100_000)
        os.write(writer, b"late\n")
        assert not shim_files.cap_log(log_fd, path, old, 100_000)
    finally:
        os.close(writer)
        os.close(log_fd)
    assert Path(old).read_bytes().count(b"early\n") == 16_666
    assert Path(path).read_bytes().endswith(b"late\n")
