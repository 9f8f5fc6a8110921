"""What the child that reads NVML sends its agent: all that a device can say."""

from __future__ import annotations

import pytest

from agent.gpu.wire import HEADER, Sample, frame_of, sample_of
from common.messages import GpuHealth, GpuReport
from common.model import GpuUuid


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
