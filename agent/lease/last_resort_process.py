"""The process that brings a lent node home when its agent is dead and the node has no systemd.

    python -I -S agent/lease/last_resort_process.py [--detach] FILE

It runs a command at a given instant unless the agent postpones that instant. It uses the standard
library only and no `typing`, so it costs next to nothing while it waits.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time

DETACH_FLAG = "--detach"
LONGEST_NAP_S = 1.0
"""How late a disarm may be noticed; an expiry is met exactly."""
RETRY_S = 5.0
"""Pause before a command that failed is run again: no other process is left to try."""


class Orders:
    """The content of the keeper's file: run `argv` at an instant of this boot."""

    def __init__(self, boot_id: str, fire_at_s: float, argv: list[str]) -> None:
        self.boot_id = boot_id
        self.fire_at_s = fire_at_s
        self.argv = argv


def boot_id() -> str:
    """The kernel's name for this boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def read_orders(path: str) -> Orders | None:
    """The orders in a file; None when it is gone or holds nothing valid.

    Raises:
        OSError: the file is there and cannot be read, as without a free descriptor.
    """
    try:
        with open(path, "rb") as file:
            value: dict[str, object] = json.loads(file.read())
        argv, fire_at_s = value["argv"], value["fire_at_s"]
        named_boot_id = value["boot_id"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(argv, list) or not argv or not isinstance(fire_at_s, int | float):
        return None
    words = [str(word) for word in argv]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return Orders(str(named_boot_id), float(fire_at_s), words)


def nap_s(orders: Orders | None, this_boot_id: str, now_s: float) -> float | None:
    """Seconds until the next look: 0 to fire, None to leave because nothing is due.

    Orders of another boot are void: their instants mean nothing, and a boot ended the loan anyway.
    """
    if orders is None or orders.boot_id != this_boot_id:
        return None
    return min(LONGEST_NAP_S, max(0.0, orders.fire_at_s - now_s))


def take_lock(path: str) -> int | None:
    """A descriptor that holds the file's keeper lock; None while another keeper has it."""
    lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        return None
    return lock_fd


def keep(path: str) -> None:
    """Be the one keeper of a file until nothing is due.

    The last look comes after the lock is released. An agent that arms writes first and looks at the
    lock then. So either the agent sees the lock free, or this process sees what the agent wrote.

    The file is found by its directory, even if that is moved: the lock moves along, and an agent
    that arms there takes it for the lock of a keeper that will see its file.
    """
    directory_fd = os.open(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    path = f"/proc/self/fd/{directory_fd}/{os.path.basename(path)}"
    this_boot_id = boot_id()
    while True:
        lock_fd = take_lock(path)
        if lock_fd is None:
            return
        _wait_and_fire(path, this_boot_id)
        os.close(lock_fd)
        if nap_s(_look(path, None), this_boot_id, 0.0) is None:
            return


def _look(path: str, known: Orders | None) -> Orders | None:
    """The present orders; those that are known stand while a file that is there cannot be read.

    A machine that has no descriptor left, or a disk that fails once, disarms nothing.
    """
    while True:
        try:
            return read_orders(path)
        except OSError:
            if known is not None:
                return known
            time.sleep(LONGEST_NAP_S)


def _wait_and_fire(path: str, this_boot_id: str) -> None:
    orders = None
    while True:
        orders = _look(path, orders)
        wait_s = nap_s(orders, this_boot_id, time.clock_gettime(time.CLOCK_BOOTTIME))
        if wait_s is None or orders is None:
            return
        if wait_s > 0:
            time.sleep(wait_s)
        elif run(orders.argv) != 0:
            time.sleep(RETRY_S)
        else:
            _remove_done(path, orders)


def _remove_done(path: str, orders: Orders) -> None:
    """Remove orders that are done; orders that an agent armed meanwhile stay.

    The file is moved aside before it is read: a file that replaces it after the read is another
    file, which this does not remove.
    """
    aside = f"{path}.done"
    try:
        os.rename(path, aside)
    except FileNotFoundError:  # an agent disarmed while the command ran
        return
    if _is_same(orders, _look(aside, orders)):
        os.unlink(aside)
    else:  # at worst over newer orders: too early an instant does less harm than none
        os.rename(aside, path)


def _is_same(before: Orders, now: Orders | None) -> bool:
    return now is not None and (now.fire_at_s, now.argv) == (before.fire_at_s, before.argv)


def run(argv: list[str]) -> int:
    """Run a command in a session of its own; its exit code, 127 when there is none.

    A full task limit, as of an account whose job starts thousands of threads, is no end: the caller
    tries again.
    """
    try:
        pid = os.fork()
    except OSError as error:
        os.write(2, f"{argv[0]}: {error}\n".encode())
        return 127
    if pid == 0:
        try:
            os.setsid()
            os.execvp(argv[0], argv)
        except OSError as error:
            os.write(2, f"{argv[0]}: {error}\n".encode())
        finally:
            os._exit(127)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def main(arguments: list[str]) -> int:
    """Exit status 0 when there is nothing left to wait for; 2 for a wrong call."""
    if not arguments or arguments[-1].startswith("-"):
        os.write(2, b"usage: last_resort_process.py [--detach] FILE\n")
        return 2
    if DETACH_FLAG in arguments:
        if os.fork():
            return 0
        os.setsid()
    keep(arguments[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
