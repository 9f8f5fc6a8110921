"""A machine whose fake NVML, GPU processes and clock a test moves. Knows nothing of agents."""

from __future__ import annotations

import asyncio
import signal

import pytest

from agent.gpu.fake.fleet import fake_uuid, parse_fleet
from agent.gpu.fake.nvml import FakeNvml
from agent.gpu.fake.processes import Holder, Usage
from agent.gpu.nvml import EVENT_XID, TIMEOUT, EventSet, Handle, NvmlFault
from agent.gpu.sampler import GpuSampler
from agent.gpu.wire import HEADER, frame_of

GIB = 1 << 30
FLEET = f"""
gpu = [
  {{count = 2, model = "H100", memory_bytes = {80 * GIB}, power_limit_w = 700}},
  {{count = 1, model = "L4", memory_bytes = {24 * GIB}, power_limit_w = 72}},
]
"""


class Table:
    """Who holds which GPU, as the test says."""

    def __init__(self) -> None:
        self.holders: list[Holder] = []

    def hold(
        self, pid: int, *indices: int, usage: Usage | None = None, is_mps_client: bool = False
    ) -> None:
        """A process with these GPUs."""
        uuids = tuple(fake_uuid("n1", index) for index in indices)
        self.holders.append(
            Holder(pid=pid, uuids=uuids, usage=usage or Usage(), is_mps_client=is_mps_client)
        )

    def scan(self) -> list[Holder]:
        return self.holders


class Machine:
    """A fake NVML on a clock that only the test and the fake's own pauses move."""

    def __init__(self, *faults: str, fleet: str = FLEET, age_s: float = 0.0) -> None:
        self.now_s = 1000.0
        self.pauses_s: list[float] = []
        self.table = Table()
        self.fleet = parse_fleet(fleet + "".join(f"\n[[fault]]\n{fault}" for fault in faults))
        self.api = FakeNvml(
            self.fleet,
            node="n1",
            processes=self.table,
            now_s=lambda: self.now_s,
            pause=self._pause,
            age_s=age_s,
        )
        self.api.nvmlInit()

    def _pause(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)
        self.now_s += pause_s

    def handle(self, index: int = 0) -> Handle:
        return self.api.nvmlDeviceGetHandleByIndex(index)

    def events(self, *indices: int) -> EventSet:
        """An event set that hears of the XIDs of these GPUs."""
        event_set = self.api.nvmlEventSetCreate()
        for index in indices:
            self.api.nvmlDeviceRegisterEvents(self.handle(index), EVENT_XID, event_set)
        return event_set

    def xids(self, event_set: EventSet) -> list[int]:
        """Every event that waits now."""
        codes: list[int] = []
        for _ in range(100):
            try:
                codes.append(self.api.nvmlEventSetWait_v2(event_set, 0).eventData)
            except NvmlFault as error:
                assert error.value == TIMEOUT
                return codes
        raise AssertionError(f"events without end: {codes}")


def code_of(call: object, *arguments: object) -> int:
    """NVML's return code of a call that must fail."""
    assert callable(call)
    with pytest.raises(NvmlFault) as caught:
        call(*arguments)
    return caught.value.value


class InThisProcess:
    """What a child does, without one: `test_nvml_child.py` has the process and its pipe."""

    pid = 0

    def __init__(self, sampler: GpuSampler) -> None:
        self._sampler = sampler
        self._ended = asyncio.Event()

    async def ask(self) -> bytes:
        """As `ReaderProcess.ask`."""
        sample = await asyncio.to_thread(self._sampler.sample)
        return frame_of(sample)[HEADER.size :]

    def close_input(self) -> None:
        """As `ReaderProcess.close_input`."""
        self._ended.set()

    def urge(self, number: signal.Signals) -> None:
        """As `ReaderProcess.urge`."""
        del number
        self._ended.set()

    async def wait(self) -> int:
        """As `ReaderProcess.wait`."""
        await self._ended.wait()
        return 0
