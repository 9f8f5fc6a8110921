"""A process that waits for a line on its input and then becomes a command.

It keeps the environment unchanged. It does the same as `agent.hooks.runner.WAITS`, for an
environment that a shell would change. It imports no other module of Aryl, because
`agent.hooks.runner` runs it by its path.
"""

import errno
import os
import signal
import sys


def main(argv: list[str]) -> None:
    """Become the command; return if the input ends without a line.

    Raises:
        OSError: it cannot be run.
    """
    if not os.read(0, 1):
        return
    # The environment as the process got it: an interpreter adds LC_CTYPE where no locale is set.
    with open("/proc/self/environ", "rb") as file:  # noqa: PTH123 - pathlib costs half the start
        pairs = [text.partition(b"=") for text in file.read().split(b"\0") if text]
    environment = {name: value for name, _, value in pairs}
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.close(null_fd)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # an interpreter ignores it, and passes that on
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
    os.execve("/bin/sh", ["/bin/sh", *argv], environment)  # a script without an interpreter line


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}")
