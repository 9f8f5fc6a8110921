"""When GPUs may go from a server to workers, and back to it. Pure; must not know roles or time
limits.

GPU processes of nobody who was given the GPUs: told, and remembered while the GPUs change hands.
Pure; must not know how whose they are is found out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agent.core.state import Facts, Memory
from common.messages import UNTOLD_PID, GpuHealth, GpuReport, Trespass, process_named

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


_UNUSABLE = (GpuHealth.LOST, GpuHealth.FAULTY)
IDLE_BUSY_RATIO = 0.05
"""A GPU that is busy for more than this share of the time is used, by whomever: one whose processes
are not told shows them by this and by its memory alone."""


def busy(gpu: GpuReport, *, free_memory_ratio: float) -> str:
    """Why a GPU is not free for a worker, by what the device says; empty when it is."""
    return _sick(gpu) or _used(gpu, free_memory_ratio)


def _sick(gpu: GpuReport) -> str:
    return "" if gpu.health == GpuHealth.OK else f"GPU {gpu.uuid} is {gpu.health}"


def parted(gpu: GpuReport) -> str:
    """Why nobody can have the whole of it; empty when one worker can."""
    if gpu.is_mig is None:
        return f"GPU {gpu.uuid} does not report its MIG mode"
    return f"GPU {gpu.uuid} is in MIG mode" if gpu.is_mig else ""


def _used(gpu: GpuReport, free_memory_ratio: float, beside: frozenset[int] = frozenset()) -> str:
    for process in gpu.processes or ():
        if process.pid not in beside:
            return f"GPU {gpu.uuid} is used by process {process.pid}"
    return use_by_nobody(gpu, free_memory_ratio)


def use_by_nobody(gpu: GpuReport, free_memory_ratio: float) -> str:
    """How a GPU shows that it is used, where no process does; empty when it does not."""
    used, busy_ratio = gpu.memory_used_bytes or 0, gpu.gpu_busy_ratio or 0.0
    by = ", and its driver does not report the processes" if gpu.processes is None else ""
    if used > free_memory_ratio * gpu.memory_total_bytes:
        return f"GPU {gpu.uuid} has {used / 2**20:.0f} MiB in use{by}"
    if gpu.processes is None and busy_ratio > IDLE_BUSY_RATIO:
        return f"GPU {gpu.uuid} is {busy_ratio:.0%} busy{by}"
    return ""


def are_unused(gpus: Sequence[GpuReport], *, free_memory_ratio: float) -> bool:
    """Whether it is certain that no process is on any of the GPUs; what a device does not tell is
    not certain."""
    return bool(gpus) and all(
        gpu.memory_used_bytes is not None
        and (gpu.processes is not None or gpu.gpu_busy_ratio is not None)
        and not busy(gpu, free_memory_ratio=free_memory_ratio)
        for gpu in gpus
    )


def unusable(facts: Facts) -> str:
    """Which GPU no worker could have, however long one waits for it; empty when there is none."""
    sick = next((_sick(gpu) for gpu in facts.gpus or () if gpu.health in _UNUSABLE), "")
    if sick or not facts.trespassers:
        return sick
    pid, uuid = facts.trespassers[0]
    return f"GPU {uuid} is used by process {pid}, which is not the server's"


def is_beside(facts: Facts, *, since_s: float) -> bool:
    """Whether somebody is on a GPU who was there beside the server, by a sample after `since_s`: to
    wait for its end could take for ever."""
    return facts.sampled_at_s > since_s and bool(facts.trespassers)


def to_workers(facts: Facts, *, since_s: float, free_memory_ratio: float) -> str:
    """Why workers cannot have all GPUs; a sample from before `since_s` proves nothing."""
    if facts.gpus is None or facts.sampled_at_s <= since_s:
        return "waits for a GPU sample"
    found = (busy(gpu, free_memory_ratio=free_memory_ratio) for gpu in facts.gpus)
    return next((why for why in found if why), "")


def to_server(
    facts: Facts,
    *,
    since_s: float,
    free_memory_ratio: float,
    is_patient: bool = False,
    beside: frozenset[int] = frozenset(),
) -> str:
    """Why the server cannot be started: somebody else is seen on a GPU. Else as `to_workers`.

    A GPU that is lost, and one of which nothing more is told, keep nobody out: the server may do
    without, and its health check says so. is_patient: wait for those that do not answer, which
    `unresponsive_gpu_wait_s` bounds; they may yet tell of somebody. beside: processes that the
    server is started beside, for nobody knows when they end; what memory is in use on their GPUs
    may be theirs.
    """
    if facts.gpus is None or facts.sampled_at_s <= since_s:
        return "waits for a GPU sample"
    for gpu in facts.gpus:
        if is_patient and gpu.health == GpuHealth.UNRESPONSIVE:
            return _sick(gpu)
        if gpu.processes and all(process.pid in beside for process in gpu.processes):
            continue
        if why := _used(gpu, free_memory_ratio, beside):
            return why
    return ""
