"""When GPUs may pass from a server to workers, and back to the server. Pure.

The module also tracks foreign GPU processes, which belong to no assigned worker: it reports them
and remembers them while the GPUs change hands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agent.core.state import Facts, Memory
from common.messages import UNTOLD_PID, GpuHealth, GpuReport, Trespass, process_named

MAX_TRESPASSES = 32
"""A report names no more of them: one is enough to send an operator there."""


def told(facts: Facts) -> tuple[Trespass, ...]:
    """The foreign processes seen now, in the form of a report."""
    return tuple(
        Trespass(pid=pid, gpu_uuid=gpu, owner=facts.owners.get(pid, ""))
        for pid, gpu in facts.trespassers[:MAX_TRESPASSES]
    )


def in_words(trespasses: Sequence[Trespass], memory: Memory) -> str:
    """Describe the first foreign process and count the others; empty without any.

    A process that its settings assign to the server, and that outlives a stop of the server, shows
    up here alone.
    """
    if not trespasses:
        return ""
    first, more = trespasses[0], len(trespasses) - 1
    others = f" and {more} more" if more else ""
    is_left = first.pid in memory.left_behind
    seen = ", seen there while the server was stopped" if is_left else ""
    return f"trespass: {process_named(first.pid)} on {first.gpu_uuid}{seen}{others}"


def keep(memory: Memory, pids: Iterable[int]) -> None:
    """Remember foreign processes, and processes that stay on a GPU after their time to leave.

    A process that stays belongs neither to the server nor to a worker, or it will not end.
    """
    memory.left_behind = sorted({*memory.left_behind, *pids} - {UNTOLD_PID})


def known(memory: Memory, facts: Facts) -> frozenset[int]:
    """Processes whose end cannot be foreseen: the server does not wait for them."""
    return frozenset({*memory.left_behind, *(pid for pid, _ in facts.trespassers)})


def forget_gone(memory: Memory, facts: Facts) -> None:
    """Forget remembered processes that have ended.

    Nothing is forgotten while a GPU does not answer or does not list its processes.
    """
    if not memory.left_behind or not facts.gpus:
        return
    if any(gpu.health != GpuHealth.OK or gpu.processes is None for gpu in facts.gpus):
        return
    there = {process.pid for gpu in facts.gpus for process in gpu.processes or ()}
    memory.left_behind = [pid for pid in memory.left_behind if pid in there]


_UNUSABLE = (GpuHealth.LOST, GpuHealth.FAULTY)
IDLE_BUSY_RATIO = 0.05
"""A GPU that is busy for more than this share of the time is in use. Where its processes are not
listed, only this and its memory show that."""


def busy(gpu: GpuReport, *, free_memory_ratio: float) -> str:
    """Why the device's state shows that a GPU is not free for a worker; empty when it is free."""
    return _sick(gpu) or _used(gpu, free_memory_ratio)


def _sick(gpu: GpuReport) -> str:
    return "" if gpu.health == GpuHealth.OK else f"GPU {gpu.uuid} is {gpu.health}"


def parted(gpu: GpuReport) -> str:
    """Why no worker can have the whole GPU (MIG); empty when one worker can."""
    if gpu.is_mig is None:
        return f"GPU {gpu.uuid} does not report its MIG mode"
    return f"GPU {gpu.uuid} is in MIG mode" if gpu.is_mig else ""


def _used(gpu: GpuReport, free_memory_ratio: float, beside: frozenset[int] = frozenset()) -> str:
    for process in gpu.processes or ():
        if process.pid not in beside:
            return f"GPU {gpu.uuid} is used by process {process.pid}"
    return use_by_nobody(gpu, free_memory_ratio)


def use_by_nobody(gpu: GpuReport, free_memory_ratio: float) -> str:
    """How a GPU without listed processes shows that it is in use; empty when it does not."""
    used, busy_ratio = gpu.memory_used_bytes or 0, gpu.gpu_busy_ratio or 0.0
    by = ", and its driver does not report the processes" if gpu.processes is None else ""
    if used > free_memory_ratio * gpu.memory_total_bytes:
        return f"GPU {gpu.uuid} has {used / 2**20:.0f} MiB in use{by}"
    if gpu.processes is None and busy_ratio > IDLE_BUSY_RATIO:
        return f"GPU {gpu.uuid} is {busy_ratio:.0%} busy{by}"
    return ""


def are_unused(gpus: Sequence[GpuReport], *, free_memory_ratio: float) -> bool:
    """True if certainly no process is on any of the GPUs.

    A value that a device withholds is not certain.
    """
    return bool(gpus) and all(
        gpu.memory_used_bytes is not None
        and (gpu.processes is not None or gpu.gpu_busy_ratio is not None)
        and not busy(gpu, free_memory_ratio=free_memory_ratio)
        for gpu in gpus
    )


def unusable(facts: Facts) -> str:
    """A GPU that no worker could have however long it waits, as text; empty when there is none."""
    sick = next((_sick(gpu) for gpu in facts.gpus or () if gpu.health in _UNUSABLE), "")
    if sick or not facts.trespassers:
        return sick
    pid, uuid = facts.trespassers[0]
    return f"GPU {uuid} is used by process {pid}, which is not the server's"


def is_beside(facts: Facts, *, since_s: float) -> bool:
    """True if a sample newer than `since_s` still shows a process that ran alongside the server.

    That process may never exit, so the caller does not wait for it.
    """
    return facts.sampled_at_s > since_s and bool(facts.trespassers)


def to_workers(facts: Facts, *, since_s: float, free_memory_ratio: float) -> str:
    """Why workers cannot have all GPUs yet; a sample from before `since_s` proves nothing."""
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
    """Why the server cannot start: a sample shows another process on a GPU. Else as `to_workers`.

    A GPU that is lost, or that reports nothing more, does not keep the server out: the server may
    manage without it, and its health check shows the result.

    is_patient: wait for GPUs that do not answer, because they may still show a process;
        `unresponsive_gpu_wait_s` bounds the wait.
    beside: processes that the server starts alongside, because their end is unknown; memory in use
        on their GPUs may be theirs.
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
