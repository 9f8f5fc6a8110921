"""Detects whether the kernel killed a process of a worker because memory ran out.

The kernel counts these kills for each control group (cgroup-v2, "Memory Interface Files",
`memory.events`; cgroup-v1, `memory.oom_control`), including kills caused by a lack of memory in the
whole machine. Only the group of a worker's own unit counts that worker alone. Without systemd all
workers share a group, which proves nothing.

A worker that came to its own limit would come to it everywhere. One that the kernel chose when the
machine had no memory left may have met a neighbour that was too large.

Standard library only and without `typing`, because a shim must stay under 12 MB.
"""

from __future__ import annotations

UNIT_PREFIX = "aryl-worker-"
"""As `agent.workers.starters.unit_name` begins."""
KILLED = frozenset({-9, 137})
"""Exit codes of a process that the kernel killed, direct and as a launcher or a shell reports
them."""
_PLACES = (("0::", "", "memory.events"), (":memory:", "/memory", "memory.oom_control"))
"""Where a line of /proc/self/cgroup names the group, below what it lies, and which file counts."""
_LIMIT_HITS = "/memory.failcnt"
"""Of version 1, how often the group came to its own limit; version 2 has it as `oom` beside."""


def oom_kills(
    groups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup"
) -> tuple[int, int] | None:
    """How many processes of the caller's own unit were ended so, and how often it had come to its
    own limit with no way on; None where that is unknown."""
    for line in _text(groups).splitlines():
        for mark, below, name in _PLACES:
            before, found, path = line.partition(mark)
            is_it = found and (not before if mark == "0::" else before.isdigit())
            if not is_it or not path.rpartition("/")[2].startswith(UNIT_PREFIX):
                continue
            group = f"{root}{below}{path}"
            counts: dict[str, int] = {}
            for row in _text(f"{group}/{name}").splitlines():
                key, _, count = row.partition(" ")
                counts[key] = int(count) if count.isdigit() else 0
            if "oom_kill" in counts:
                hits = _text(group + _LIMIT_HITS).strip() if below else ""
                return counts["oom_kill"], int(hits or counts.get("oom", 0))
    return None


def why_killed(
    exit_code: int | None, before: tuple[int, int] | None, now: tuple[int, int] | None
) -> str:
    """In words, that it was for want of memory, and whose, where the count has grown; else empty.

    before, now: as `oom_kills` returns them.
    """
    if exit_code not in KILLED or before is None or now is None or now[0] <= before[0]:
        return ""
    if now[1] <= before[1]:
        return "the node had no memory left, and the kernel killed a process of this worker"
    return f"out of memory: the kernel killed a process of it (oom_kill {now[0] - before[0]})"


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
