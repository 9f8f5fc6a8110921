"""The same sampling code on a real GPU and on the fake: run with `pytest -m gpu` where one is."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from agent.gpu.child_process import child_starter
from agent.gpu.fake.fleet import FakeFleet, GpuGroup
from agent.gpu.fake.nvml import FakeNvml
from agent.gpu.fake.processes import Holder
from agent.gpu.nvml import NvmlApi, real_api
from agent.gpu.reader import GpuReader
from agent.gpu.sampler import GpuSampler
from agent.gpu.wire import Sample, frame_of
from common.clock import SystemClock
from common.errors import Unavailable
from common.messages import GpuHealth, GpuReport

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

LIMIT_S = 60.0
"""The first context on a GPU may take seconds."""
BLOCK_BYTES = 1 << 30


@pytest.fixture(scope="module")
def real() -> NvmlApi:
    """NVML of this machine; where there is none, the tests say why they did not run."""
    try:
        api = real_api()
    except Unavailable as error:
        pytest.skip(f"no GPU: {error}")
    if api.nvmlDeviceGetCount() == 0:
        pytest.skip("no GPU: NVML counts none")
    return api


class Nobody:
    """No process holds a fake GPU."""

    def scan(self) -> list[Holder]:
        return []


def sample_of(api: NvmlApi) -> Sample:
    """One sample by the production code."""
    return GpuSampler(api, gpu_deadline_s=LIMIT_S).sample()


def fake_twin(sample: Sample) -> NvmlApi:
    """A fake machine with as many GPUs, of the same models and sizes."""
    groups = tuple(
        GpuGroup(count=1, model=gpu.gpu_type, memory_bytes=gpu.memory_total_bytes)
        for gpu in sample.gpus
    )
    api = FakeNvml(
        FakeFleet(gpu=groups),
        node="n1",
        processes=Nobody(),
        now_s=time.monotonic,
        pause=time.sleep,
    )
    api.nvmlInit()
    return api


def shape(gpu: GpuReport) -> dict[str, type]:
    """Which fields say something, and with what type."""
    values = {name: getattr(gpu, name) for name in gpu.__struct_fields__}
    return {name: type(value) for name, value in values.items() if value is not None}


def test_a_real_gpu_is_read_without_a_fault(real: NvmlApi) -> None:
    """Every GPU of this machine is named, healthy and within what physics allows."""
    sample = sample_of(real)
    assert sample.error == ""
    assert len(sample.gpus) == real.nvmlDeviceGetCount()
    for gpu in sample.gpus:
        assert gpu.health is GpuHealth.OK
        assert gpu.uuid.startswith("GPU-")
        assert gpu.memory_total_bytes > 1 << 30
        assert gpu.memory_used_bytes is None or gpu.memory_used_bytes <= gpu.memory_total_bytes
        assert gpu.gpu_busy_ratio is None or 0.0 <= gpu.gpu_busy_ratio <= 1.0
        assert gpu.power_w is None or 0.0 < gpu.power_w < 3000.0
        assert gpu.temperature_c is None or 0.0 < gpu.temperature_c < 120.0


def test_fake_and_real_have_the_same_shape(real: NvmlApi) -> None:
    """The same fields with the same types: what a real GPU says, the fake says too.

    A consumer card leaves some fields out (ECC, say); it may say less than the fake, never more.
    """
    sample = sample_of(real)
    twin = sample_of(fake_twin(sample))
    assert len(twin.gpus) == len(sample.gpus)
    for gpu, fake in zip(sample.gpus, twin.gpus, strict=True):
        assert shape(gpu).items() <= shape(fake).items()
        assert (gpu.gpu_type, gpu.memory_total_bytes) == (fake.gpu_type, fake.memory_total_bytes)


def test_a_real_sample_passes_the_wire(real: NvmlApi) -> None:
    """What NVML says fits the message types: it is decoded as strictly as it is in the parent."""
    sample = sample_of(real)
    assert msgspec.msgpack.decode(frame_of(sample)[4:], type=Sample) == sample


@pytest.fixture
async def reader(real: NvmlApi) -> AsyncIterator[GpuReader]:
    """The agent's reader with its real child process."""
    clock = SystemClock()
    found = GpuReader(child_starter("n1", now_s=clock.now_s), clock, deadline_s=LIMIT_S)
    yield found
    await found.close()


async def test_the_child_process_reads_the_same_gpus(real: NvmlApi, reader: GpuReader) -> None:
    """Over the pipe comes what was read here, GPU by GPU."""
    gpus = await reader.sample()
    assert [gpu.uuid for gpu in gpus] == [gpu.uuid for gpu in sample_of(real).gpus]
    assert reader.error == ""


HOLD = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def check(status):
    if status:
        sys.exit(f"CUDA status {status}")
check(cuda.cuInit(0))
device = ctypes.c_int()
check(cuda.cuDeviceGet(ctypes.byref(device), 0))
context = ctypes.c_void_p()
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
check(cuda.cuCtxSetCurrent(context))
block = ctypes.c_uint64()
check(cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(int(sys.argv[1]))))
print("held", flush=True)
sys.stdin.read()
"""
"""A process that holds device memory, on the CUDA driver alone."""


async def until_memory(reader: GpuReader, uuid: str, fact: Callable[[int], bool]) -> None:
    """Sample until the memory used on a GPU is as wanted."""
    clock = SystemClock()
    async with clock.timeout(LIMIT_S):
        while True:
            [gpu] = [gpu for gpu in await reader.sample() if gpu.uuid == uuid]
            assert gpu.memory_used_bytes is not None
            if fact(gpu.memory_used_bytes):
                return
            await clock.sleep(0.1)


async def test_memory_of_a_process_is_seen_and_seen_to_go(reader: GpuReader) -> None:
    """What the end of a loan waits for: a GPU given by UUID fills, and is free after the kill."""
    gpu = (await reader.sample())[0]
    if gpu.memory_used_bytes is None:
        pytest.skip("this GPU does not tell its memory")
    before_bytes = gpu.memory_used_bytes
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", HOLD, str(BLOCK_BYTES)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            if not await process.stdout.readline():
                pytest.skip("no CUDA driver beside NVML")
        await until_memory(reader, gpu.uuid, lambda used: used >= before_bytes + BLOCK_BYTES)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
    await until_memory(reader, gpu.uuid, lambda used: used < before_bytes + BLOCK_BYTES)


def test_a_real_gpu_s_pci_address_is_the_kernel_s(real: NvmlApi) -> None:
    """The kernel log names a GPU as sysfs does: by the address that the sample has for its UUID."""
    sample = sample_of(real)
    assert set(sample.uuid_by_pci_address.values()) == {gpu.uuid for gpu in sample.gpus}
    for address in sample.uuid_by_pci_address:
        vendor = Path("/sys/bus/pci/devices") / f"{address}.0" / "vendor"
        assert vendor.read_text().strip() == "0x10de"
