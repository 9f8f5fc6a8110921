"""A full task limit, which a job may leave to its account: no process and no thread can start."""

from __future__ import annotations

import os

# No task limit counts for root: the process is another account's, with root's rights to files.
_AS_ACCOUNT = ("setpriv", "--ruid=54321", "--bounding-set=-sys_resource,-sys_admin")

WITHOUT_TASKS = (*(_AS_ACCOUNT if os.geteuid() == 0 else ()), "prlimit", "--nproc=0:")
"""Words before the command of a process that runs and can start nothing."""
