"""Detects whether the kernel killed a process of a worker because memory ran out.

The kernel counts such kills for each control group (cgroup-v2, "Memory Interface Files",
`memory.events`; cgroup-v1, `memory.oom_control`), including kills caused by a lack of memory in the
whole machine. Only the group of a worker's own unit counts that worker alone. Without systemd all
workers share a group, which proves nothing.

Standard library only and without `typing`, because a shim must stay under 12 MB.
"""

from __future__ import annotations

UNIT_PREFIX = "aryl-worker-"
"""As `agent.workers.starters.unit_name` begins."""
KILLED = frozenset({-9, 137})
"""Exit codes of a process that the kernel killed, direct and as a launcher or a shell reports
them."""
_PLACES = (("0::", "", "memory.events"), (":memory:", "/memory", "memory.oom_control"))
"""For a line of /proc/self/cgroup: where it names the group, its parent path, and the file that
counts."""


def oom_kills(groups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    """The number of processes of the caller's own unit that were killed so; None if unknown."""
    for line in _text(groups).splitlines():
        for mark, below, name in _PLACES:
            before, found, path = line.partition(mark)
            is_it = found and (not before if mark == "0::" else before.isdigit())
            if not is_it or not path.rpartition("/")[2].startswith(UNIT_PREFIX):
                continue
            for row in _text(f"{root}{below}{path}/{name}").splitlines():
                key, _, count = row.partition(" ")
                if key == "oom_kill" and count.isdigit():
                    return int(count)
    return None


def why_killed(exit_code: int | None, before: int | None, now: int | None) -> str:
    """A text that memory ran out, where the count has grown; else empty."""
    if exit_code not in KILLED or before is None or now is None or now <= before:
        return ""
    return f"out of memory: the kernel killed a process of it (oom_kill {now - before})"


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
