"""CUDA's Multi-Process Service: finds the GPU processes that only compute for others, in /proc.

From the Volta generation on, NVML lists an MPS server's clients as processes of their own, so no
client hides behind the server. On older GPUs only memory use shows the clients.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from msgspec import structs

from agent.proc.process_tree import PROC
from common.messages import GpuReport
from common.procfs import first_bytes

SERVER = "nvidia-cuda-mps"
"""The name of a server, cut to the length that the kernel keeps (15 bytes)."""
MAX_NAME_BYTES = 64


def without_servers(gpus: Iterable[GpuReport], *, proc: Path = PROC) -> tuple[GpuReport, ...]:
    """The GPUs without the MPS servers among their processes.

    An MPS server belongs to the owner of its clients, ends with none of them, and takes the next
    ones. The memory that it uses still shows.
    """
    return tuple(
        structs.replace(
            gpu,
            processes=tuple(one for one in gpu.processes if not _is_server(one.pid, proc)),
        )
        if gpu.processes
        else gpu
        for gpu in gpus
    )


def _is_server(pid: int, proc: Path) -> bool:
    # Read at each look: a process may change its name while its number and its start stay.
    try:
        name = first_bytes(f"{proc}/{pid}/comm", MAX_NAME_BYTES)
    except OSError:  # it has ended, or is in an invisible namespace
        return False
    return name.startswith(SERVER.encode())
