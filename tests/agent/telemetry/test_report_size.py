"""A report is one message: what would make it too long for its coordinator is cut, and told."""

from __future__ import annotations

import pytest
from msgspec import structs

from agent.telemetry.report_size import SHORT_CHARS, encoded
from common.failures import Failure, RetryClass
from common.messages import (
    MAX_MESSAGE_BYTES,
    NodeReport,
    Trespass,
    WorkerPhase,
    WorkerReport,
    decode,
    encode,
)
from common.model import Checkpoint, GpuUuid, NodeRole, Pool
from common.telemetry import GpuProcess
from tests.harness.node.agent import AgentHarness
from tests.harness.node.life import key, order, two_gpus
from tests.harness.node.models import running

OOM = Failure(reason="oom", title="out of memory", retry=RetryClass.NEVER, line="x" * 300)


def make_report(*, errors: int = 0, pids: int = 0, paths: int = 0) -> NodeReport:
    """A report of three workers and two GPUs. errors: characters of each; paths: of each save."""
    workers = tuple(
        WorkerReport(
            key=key(index),
            phase=WorkerPhase.EXITED,
            gpu_uuids=(GpuUuid("GPU-0"),),
            exit_code=index,
            error="e" * errors,
            failure=OOM,
            checkpoint=Checkpoint(step=7, path="p" * paths),
        )
        for index in range(3)
    )
    processes = tuple(GpuProcess(pid=pid) for pid in range(1, pids + 1))
    return NodeReport(
        node="n1",
        boot_id="b",
        sequence=1,
        home_pool=Pool.TRAINING,
        role=NodeRole.TRAINING,
        epoch=1,
        generation=1,
        instance="one",
        period_s=1.0,
        gpus=tuple(structs.replace(gpu, processes=processes) for gpu in two_gpus({})),
        workers=workers,
        trespasses=(Trespass(pid=1, gpu_uuid=GpuUuid("GPU-0")),),
        detail="why it is there",
    )


def test_a_report_that_fits_is_sent_as_it_is() -> None:
    """To the last byte."""
    report = make_report(errors=2000, pids=20, paths=4096)
    size_bytes = len(encode(report))
    assert encoded(report, max_bytes=size_bytes) == encode(report)
    assert encoded(report, max_bytes=size_bytes - 1) != encode(report)


@pytest.mark.parametrize(
    ("errors", "pids", "paths", "kept"),
    [
        (400_000, 20, 4096, {"pids", "paths"}),
        (400_000, 200_000, 4096, {"paths"}),
        (400_000, 200_000, 400_000, set[str]()),
    ],
)
def test_what_is_too_long_goes_without_what_is_missed_least(
    errors: int, pids: int, paths: int, kept: set[str]
) -> None:
    """Every worker, phase, GPU and trespass stays: what is not there counts as gone."""
    report = make_report(errors=errors, pids=pids, paths=paths)
    data = encoded(report)
    assert len(data) <= MAX_MESSAGE_BYTES < len(encode(report))
    sent = decode(data, NodeReport)
    assert [(one.key, one.phase, one.exit_code) for one in sent.workers] == [
        (one.key, one.phase, one.exit_code) for one in report.workers
    ]
    assert [gpu.uuid for gpu in sent.gpus] == [gpu.uuid for gpu in report.gpus]
    assert sent.trespasses == report.trespasses
    assert {one.error for one in sent.workers} == {f"{'e' * SHORT_CHARS}..."}
    assert ("pids" in kept) == (sent.gpus == report.gpus)
    assert {one.checkpoint for one in sent.workers} == (
        {one.checkpoint for one in report.workers} if "paths" in kept else {None}
    )
    assert f"report of {len(encode(report))} bytes cut" in sent.detail
    assert sent.detail.endswith("; why it is there")


async def test_the_words_of_one_worker_silence_no_node() -> None:
    """Its coordinator would drop each report, and give all of its jobs up."""
    async with AgentHarness() as harness:
        await harness.want(NodeRole.TRAINING, order())
        await harness.until(lambda: harness.phase(key()) == WorkerPhase.RUNNING)
        ended = structs.replace(
            running(key()), phase=WorkerPhase.EXITED, exit_code=3, error="e" * 1_200_000
        )
        harness.runner.known[key()] = ended
        await harness.until(lambda: harness.phase(key()) == WorkerPhase.EXITED)
        [worker] = harness.report.workers
        assert worker.exit_code == 3
        assert "cut to 1000000" in harness.report.detail
