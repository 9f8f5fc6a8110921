"""`aryl`: the entry, which answers Ctrl-C from the first moment on. Must not know any command.

Commands and what they need take seconds to import on a slow machine; until then nothing is
started, so nothing has to be stopped. Must import nothing itself that takes time.
"""

from __future__ import annotations

from coordinator.cli.interrupt import leaving_at_once
from coordinator.service.extras import needing_extras


def main() -> None:
    """Entry point."""
    with leaving_at_once(), needing_extras("aryl"):
        from coordinator.cli.app import app
    app(prog_name="aryl")


if __name__ == "__main__":
    main()
