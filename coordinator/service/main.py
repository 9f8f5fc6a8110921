"""`aryl-coordinator`: the entry point, which names the packages that an install lacks.

It imports nothing that a GPU node does not have.
"""

from __future__ import annotations

import sys

from coordinator.service.optional_deps import needing_extras


def main() -> int:
    """Entry point; returns the exit status."""
    with needing_extras("aryl-coordinator"):
        from coordinator.service import daemon
    return daemon.main()


if __name__ == "__main__":
    sys.exit(main())
