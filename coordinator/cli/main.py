"""The entry point of `aryl`, which answers Ctrl-C from the first moment on.

Commands and their imports take seconds to load on a slow machine. Until then nothing is started, so
nothing has to be stopped. This module imports nothing slow.
"""

from __future__ import annotations

import gc

from coordinator.cli.interrupt import leaving_at_once
from coordinator.service.optional_deps import needing_extras


def main() -> None:
    """Entry point."""
    gc.disable()  # imports leave next to no garbage, and looking for it is a quarter of their time
    with leaving_at_once(), needing_extras("aryl"):
        from coordinator.cli.app import app
    gc.freeze()  # imported objects stay to the end, so later collections need not look through them
    gc.enable()
    app(prog_name="aryl")


if __name__ == "__main__":
    main()
