"""All GPUs in one sample, each read by a thread: what one of them does costs no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from agent.gpu.fake.fleet import FakeFleet, GpuGroup, fake_uuid
from agent.gpu.fake.nvml import FakeNvml
from agent.gpu.fake.processes import Holder
from agent.gpu.nvml import (
    GPU_IS_LOST,
    TIMEOUT,
    UNINITIALIZED,
    Handle,
    LibraryFailed,
    NvmlApi,
    nvml_error,
)
from agent.gpu.sampler import GpuSampler
from agent.gpu.wire import HEADER, Sample, frame_of, payload_bytes, sample_of
from common.errors import Unavailable
from common.messages import GpuHealth, GpuReport
from common.model import GpuUuid

FLEET = FakeFleet(gpu=(GpuGroup(count=3, model="H100", memory_bytes=80),))
SHORT_S = 0.05
"""A deadline that a test lets pass."""
LONG_S = 20.0
"""A deadline that no test reaches."""


class Nobody:
    """No process holds a GPU."""

    def scan(self) -> list[Holder]:
        return []


class Troubled(FakeNvml):
    """A fake driver whose answers for the UUIDs of GPU 0 and GPU 1 are the test's."""

    def __init__(self) -> None:
        super().__init__(
            FLEET, node="n1", processes=Nobody(), now_s=time.monotonic, pause=time.sleep
        )
        self.trouble: Callable[[], object] = lambda: None
        self.first_trouble: Callable[[], object] = lambda: None
        self.asked = 0
        self.readers: dict[str, str] = {}
        """By UUID: the thread that read it last."""
        self.nvmlInit()

    def nvmlDeviceGetUUID(self, handle: Handle, /) -> str:  # noqa: N802 - NVML's own name
        uuid = super().nvmlDeviceGetUUID(handle)
        self.readers[uuid] = threading.current_thread().name
        if uuid == fake_uuid("n1", 0):
            self.first_trouble()
        if uuid == fake_uuid("n1", 1):
            self.asked += 1
            self.trouble()
        return uuid


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Ends every hang of a test; a thread that still hangs would outlive it."""
    event = threading.Event()
    yield event
    event.set()


def sampler_of(api: NvmlApi, *, gpu_deadline_s: float = LONG_S) -> GpuSampler:
    return GpuSampler(api, gpu_deadline_s=gpu_deadline_s)


def healths(sample: Sample) -> list[GpuHealth]:
    return [gpu.health for gpu in sample.gpus]


def raising(error: Exception) -> Callable[[], object]:
    def trouble() -> object:
        raise error

    return trouble


OK = GpuHealth.OK


def test_a_gpu_that_hangs_is_named_and_no_second_thread_is_spent_on_it(
    release: threading.Event,
) -> None:
    """Others are read, sample after sample; the hanging call is not made again until it returns."""
    api = Troubled()
    sampler = sampler_of(api, gpu_deadline_s=SHORT_S)
    while healths(sampler.sample()) != [OK, OK, OK]:
        pass  # on a busy machine a first read may take longer than the deadline
    asked, threads = api.asked, threading.active_count()
    api.trouble = release.wait
    for _ in range(3):
        sample = sampler.sample()
        assert healths(sample)[1] is GpuHealth.UNRESPONSIVE
        assert sample.gpus[1].uuid == fake_uuid("n1", 1)
        assert sample.gpus[1].gpu_busy_ratio is None
        assert "GPU 1 does not answer" in sample.error
    assert api.asked == asked + 1
    assert threading.active_count() == threads


def test_a_gpu_that_hung_is_read_again_when_its_driver_returns(release: threading.Event) -> None:
    """The late answer is thrown away, and the next one is of now."""
    api = Troubled()
    sampler = sampler_of(api, gpu_deadline_s=SHORT_S)
    api.trouble = release.wait
    sampler.sample()
    release.set()
    end_s = time.monotonic() + LONG_S
    while (sample := sampler.sample()).error:
        assert time.monotonic() < end_s, sample.error
    assert healths(sample) == [OK, OK, OK]


def read_by_one(api: Troubled, sampler: GpuSampler) -> None:
    """Sample until one thread has read all GPUs: it is tried where all have answered."""
    end_s = time.monotonic() + LONG_S
    while set(api.readers.values()) != {"gpus"}:
        assert time.monotonic() < end_s, api.readers
        sampler.sample()


def test_one_thread_reads_all_gpus_that_answer() -> None:
    """A thread to wake for each GPU and sample costs more CPU time than the reading."""
    api = Troubled()
    sampler = sampler_of(api)
    sampler.sample()
    assert set(api.readers.values()) == {"gpu-0", "gpu-1", "gpu-2"}, "devices open at once"
    read_by_one(api, sampler)


def test_gpus_behind_one_that_hangs_are_read_by_their_own_threads(
    release: threading.Event,
) -> None:
    """The one thread hangs with GPU 0; GPU 1 has its turn all the same, within the same sample."""
    api = Troubled()
    sampler = sampler_of(api, gpu_deadline_s=10 * SHORT_S)
    read_by_one(api, sampler)
    by: list[str] = []

    def read_gpu_1() -> None:
        by.append(threading.current_thread().name)
        release.set()

    api.first_trouble, api.trouble = release.wait, read_gpu_1
    end_s = time.monotonic() + LONG_S
    while healths(sampler.sample()) != [OK, OK, OK]:
        assert time.monotonic() < end_s, api.readers
    assert by[0] == "gpu-1"


def test_a_gpu_never_seen_is_an_error_and_no_invention() -> None:
    """Without a UUID there is nobody to report; the reason is told, and which index is lost."""
    api = Troubled()
    api.trouble = raising(nvml_error(GPU_IS_LOST))
    sampler = sampler_of(api)
    sample = sampler.sample()
    assert [gpu.index for gpu in sample.gpus] == [0, 2]
    assert "GPU 1 was never seen" in sample.error
    assert sample.lost_indices == (1,)
    api.trouble = raising(nvml_error(TIMEOUT))
    assert sampler.sample().lost_indices == (), "it may yet answer"


def test_a_driver_that_fails_as_a_whole_is_not_three_lost_gpus() -> None:
    """NVML has to be opened anew: that is said, so that the child ends and another one does it."""
    api = Troubled()
    sampler = sampler_of(api)
    assert healths(sampler.sample()) == [OK, OK, OK]
    api.trouble = raising(nvml_error(UNINITIALIZED))
    with pytest.raises(LibraryFailed, match="Uninitialized"):
        sampler.sample()
    api.trouble = lambda: None
    assert healths(sampler.sample()) == [OK, OK, OK]


def test_a_read_that_nobody_waited_for_has_not_hung(release: threading.Event) -> None:
    """The sample that GPU 0's failure ended did not wait for GPU 1: its turn comes in the next."""
    api, looks = Troubled(), 0

    def now_s() -> float:
        """GPU 1's driver returns once the sampler has looked at its clock for GPU 1's turn."""
        nonlocal looks
        looks += 1
        if looks == 3:  # one look for the end of all turns, one for each turn
            release.set()
        return time.monotonic()

    sampler = GpuSampler(api, gpu_deadline_s=LONG_S, monotonic_s=now_s)
    api.trouble, api.first_trouble = release.wait, raising(nvml_error(UNINITIALIZED))
    with pytest.raises(LibraryFailed, match="Uninitialized"):
        sampler.sample()
    api.first_trouble, looks = lambda: None, 0
    assert healths(sampler.sample()) == [OK, OK, OK]


def test_a_defect_of_a_reader_is_a_fault_of_its_gpu_and_heals() -> None:
    """An unforeseen error names the GPU, leaves the others, and does not end the thread."""
    api = Troubled()
    sampler = sampler_of(api)
    sampler.sample()
    api.trouble = raising(ZeroDivisionError("seven"))
    sample = sampler.sample()
    assert healths(sample) == [OK, GpuHealth.FAULTY, OK]
    assert "GPU 1: ZeroDivisionError('seven')" in sample.error
    api.trouble = lambda: None
    assert healths(sampler.sample()) == [OK, OK, OK]


def test_an_nvml_that_does_not_count_is_no_sample() -> None:
    """Zero GPUs is an answer; none is not."""
    api = Troubled()
    sampler = sampler_of(api)
    api.nvmlShutdown()
    with pytest.raises(Unavailable, match="number of GPUs"):
        sampler.sample()


def test_a_frame_comes_back_as_it_was_written() -> None:
    """The wire between child and parent keeps every field of a report."""
    sample = sampler_of(Troubled()).sample()
    frame = frame_of(sample)
    assert payload_bytes(frame[: HEADER.size]) == len(frame) - HEADER.size
    assert sample_of(frame[HEADER.size :]) == sample


@pytest.mark.parametrize("count", [0, 2**53 + 1, 2**64 - 1])
def test_a_counter_of_a_device_may_say_anything(count: int) -> None:
    """A device with a nonsense counter is one bad device; the node and its others are read."""
    gpu = GpuReport(
        uuid=GpuUuid("GPU-0"),
        index=0,
        gpu_type="H100",
        memory_total_bytes=1000,
        health=GpuHealth.OK,
        memory_used_bytes=0,
        ecc_uncorrected_count=count,
    )
    sample = Sample(gpus=(gpu,))
    assert sample_of(frame_of(sample)[HEADER.size :]) == sample
