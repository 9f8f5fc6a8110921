"""The entry point of `aryl`, which answers Ctrl-C from the first moment on.

Commands and their imports take seconds to load on a slow machine. Until then nothing is started, so
nothing has to be stopped. This module imports nothing slow.
"""

from __future__ import annotations

from coordinator.cli.interrupt import importing


def main() -> None:
    """Entry point."""
    with importing():
        from coordinator.cli.app import app
    app(prog_name="aryl")


if __name__ == "__main__":
    main()
