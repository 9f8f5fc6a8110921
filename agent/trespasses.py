"""GPU processes of nobody who was given the GPUs: told, and remembered while the GPUs change hands.
Pure; must not know how whose they are is found out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agent.state import Facts, Memory
from common.messages import UNTOLD_PID, GpuHealth, Trespass, process_named

MAX_TRESPASSES = 32
"""A report names no more of them: one is enough to send somebody there."""


def told(facts: Facts) -> tuple[Trespass, ...]:
    """Those that are seen now, as a report has them."""
    return tuple(
        Trespass(pid=pid, gpu_uuid=gpu, owner=facts.owners.get(pid, ""))
        for pid, gpu in facts.trespassers[:MAX_TRESPASSES]
    )


def in_words(trespasses: Sequence[Trespass], memory: Memory) -> str:
    """The first of them and how many more; empty without any. One that its settings call the
    server's, and that no stop of it ends, can be told by this alone."""
    if not trespasses:
        return ""
    first, more = trespasses[0], len(trespasses) - 1
    others = f" and {more} more" if more else ""
    is_left = first.pid in memory.left_behind
    seen = ", seen there while the server was stopped" if is_left else ""
    return f"trespass: {process_named(first.pid)} on {first.gpu_uuid}{seen}{others}"


def keep(memory: Memory, pids: Iterable[int]) -> None:
    """Remember strangers, or whoever is on a GPU after the time that a server or a worker has to
    leave it: it is none of either, or one that will not end."""
    memory.left_behind = sorted({*memory.left_behind, *pids} - {UNTOLD_PID})


def known(memory: Memory, facts: Facts) -> frozenset[int]:
    """Processes whose end nobody can know: a server is not kept waiting for them."""
    return frozenset({*memory.left_behind, *(pid for pid, _ in facts.trespassers)})


def forget_gone(memory: Memory, facts: Facts) -> None:
    """Forget who was left behind and has ended; a GPU that does not answer, or does not tell who is
    on it, shows nobody."""
    if not memory.left_behind or not facts.gpus:
        return
    if any(gpu.health != GpuHealth.OK or gpu.processes is None for gpu in facts.gpus):
        return
    there = {process.pid for gpu in facts.gpus for process in gpu.processes or ()}
    memory.left_behind = [pid for pid in memory.left_behind if pid in there]
