"""Reads a key from a file of its own; the content of the file appears in no error."""

from __future__ import annotations

import os
import stat

from common.errors import Unavailable

MAX_KEY_BYTES = 16_384
OPEN_MODE = 0o027
"""Mode bits that a file with a key may not have. Its group may read it: systemd's ACL for the user
of a unit shows so in the mode of a credential."""


class KeyUnreadableError(Unavailable):
    """The file with a key cannot be used now.

    A credential exists for its unit alone.
    """


def read_key(path: str) -> str:
    """The one line of a key file.

    Raises:
        KeyUnreadableError: it cannot be read, is open to others, or holds no key.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise KeyUnreadableError(f"{path}: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise KeyUnreadableError(f"{path}: is no regular file")
        if found.st_mode & OPEN_MODE:
            mode = stat.S_IMODE(found.st_mode)
            raise KeyUnreadableError(f"{path}: mode {mode:04o} gives others access, expected 0600")
        data = file.read(MAX_KEY_BYTES + 1)
    text = data.decode("latin-1").strip()
    if not text or len(data) > MAX_KEY_BYTES or not (text.isascii() and text.isprintable()):
        raise KeyUnreadableError(f"{path}: expected one line of printable ASCII")
    return text
