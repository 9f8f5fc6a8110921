"""Sends an order to a shim, without waiting for the shim to act."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from agent.shim import files as shim_files
from common.errors import Unavailable
from common.model import WorkerKey


def tell(directory: Path, key: WorkerKey, order: dict[str, object]) -> None:
    """Send a shim an order; a shim that is gone needs none.

    Raises:
        Unavailable: the shim lives and does not listen.
    """
    try:
        directory_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if shim_files.is_disk_error(error):
            return  # it cannot be reached; once its time is over its processes are looked up
        raise
    try:
        # By descriptor, because a socket's path may have 107 bytes at most.
        name = f"/proc/self/fd/{directory_fd}/{shim_files.CONTROL_SOCKET}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as control:
            control.setblocking(False)
            control.sendto(json.dumps(order).encode(), name)
    except (FileNotFoundError, ConnectionRefusedError):
        return  # it has ended; if it should not have, `statuses` shows that
    except OSError as error:  # it is busy; or its job has put something else in that place
        raise Unavailable(f"{key}: its shim does not take orders now: {error}") from None
    finally:
        os.close(directory_fd)
