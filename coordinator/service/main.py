"""`aryl-coordinator`: the entry, which says what an install lacks. Must not know the daemon's part.

Must import nothing itself that a GPU node has not got.
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
