"""A server that stalls is not at rest: it is not stopped, and its node goes back into service."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.inference_server import SAMPLES_AT_REST
from agent.core.state import HookKind
from agent.gpu.reader import GpuReader, ReaderProcess
from agent.telemetry.page_fetch import page_fetcher
from agent.telemetry.sample import NO_SERVER, NodeSampler, Sample
from common.clock import SystemClock
from common.messages import GpuHealth, GpuReport, InferenceReport
from common.model import NodeRole
from tests.harness.node.life import SERVER, LifeHarness, lease, page, two_gpus
from tests.harness.node.life import settings as agent_settings
from tests.harness.node.page_server import PageServer, make_pages
from tests.tables import each_row

R, H = NodeRole, HookKind
CLOCK = SystemClock()


def draining(*, unread_page_timeout_s: float = 60.0) -> LifeHarness:
    """A node that drains, with 48 requests in flight."""
    harness = LifeHarness(unread_page_timeout_s=unread_page_timeout_s)
    harness.serve()
    harness.page = page(running=8, waiting=40)
    harness.want(R.ON_LOAN, lease=lease(ttl_s=1000.0))
    harness.steps(2)
    assert (harness.role(), harness.hooks) == (R.DRAINING, [H.UNROUTE])
    return harness


def test_a_page_and_a_health_check_that_are_both_late_show_no_rest() -> None:
    """The server has its requests still; what it waits for is told, and its end is waited for."""
    harness = draining()
    harness.page, harness.is_healthy = None, False
    harness.steps(20)
    assert (harness.role(), harness.hooks) == (R.DRAINING, [H.UNROUTE])
    assert "metrics page, which cannot be read" in harness.life.detail
    harness.page = page(running=8, waiting=40)
    harness.steps(1)
    assert "48 requests" in harness.life.detail
    harness.page = page(success=58)
    harness.steps(SAMPLES_AT_REST)
    assert harness.hooks == [H.UNROUTE, H.STOP]


def test_a_drain_whose_page_stays_unread_turns_back_without_a_stop() -> None:
    """At its limit the server is routed again as it is, and the reason is told."""
    harness = draining(unread_page_timeout_s=30.0)
    harness.page, harness.is_healthy = None, False
    harness.steps(28)
    assert harness.role() == R.DRAINING
    harness.steps(6)
    assert (harness.role(), harness.hooks) == (R.SERVING, [H.UNROUTE, H.ROUTE])
    assert harness.memory.lease is None
    turned_back = harness.memory.turned_back
    assert turned_back is not None
    assert "could not be read for 30 s" in turned_back.reason


LOOKS = st.sampled_from([page(success=10), page(running=1), page(success=11), None])


@pytest.mark.slow
@given(looks=st.lists(st.tuples(LOOKS, st.booleans()), max_size=25))
@settings(max_examples=60, deadline=None)
def test_a_server_is_stopped_only_after_two_readable_pages_in_a_row_without_requests(
    looks: list[tuple[InferenceReport | None, bool]],
) -> None:
    """Whatever its health check says, and whatever cannot be read in between."""
    harness = draining()
    before: list[InferenceReport | None] = []
    for seen, is_healthy in looks:
        harness.page, harness.is_healthy = seen, is_healthy
        harness.step()
        before.append(seen)
        is_at_rest = len(before) >= SAMPLES_AT_REST and all(
            one is not None and one.running_count == 0 for one in before[-SAMPLES_AT_REST:]
        )
        if H.STOP in harness.hooks:
            assert is_at_rest
            return


# --- what a look at a real server says ---------------------------------------------------------


class Gpus(GpuReader):
    """GPUs as a test sets them."""

    def __init__(self, gpus: tuple[GpuReport, ...]) -> None:
        super().__init__(_no_child, CLOCK)
        self.gpus = gpus

    async def sample(self, deadline_s: float | None = None) -> tuple[GpuReport, ...]:
        return self.gpus


async def _no_child() -> ReaderProcess:
    raise OSError("no child in this test")


FREE = two_gpus({})
USED = two_gpus({0: 77})
NOT_TOLD = tuple(msgspec.structs.replace(gpu, memory_used_bytes=None) for gpu in FREE)
SICK = two_gpus({}, health=GpuHealth.UNRESPONSIVE)


pages = pytest.fixture(make_pages)


async def look(url: str, path: str, gpus: tuple[GpuReport, ...], health: str) -> Sample:
    """One look of an agent at a server and its GPUs."""
    server = msgspec.structs.replace(
        SERVER, health_url=f"{url}/{health}", metrics_url=f"{url}/{path}"
    )
    sampler = NodeSampler(
        agent_settings(server=server, collect_deadline_s=0.5),
        clock=CLOCK,
        reader=Gpus(gpus),
        fetch=page_fetcher(CLOCK),
        is_server_wanted=lambda: True,
    )
    try:
        return await sampler.sample()
    finally:
        await sampler.close()


@pytest.mark.parametrize("path", ["silent", "drip", "denied", "error", "renamed", "html"])
@pytest.mark.parametrize("health", ["vllm", "silent"])
@pytest.mark.slow
async def test_a_page_that_cannot_be_read_tells_no_load(
    pages: PageServer, path: str, health: str
) -> None:
    """Slow, denied, renamed, or beside a health check that is late too: the load is not zero."""
    seen = await look(pages.url, path, FREE, health)
    assert seen.inference is None
    assert seen.is_healthy == (health == "vllm")


@each_row(
    ("gpus", "is_gone"),
    [(FREE, True), (USED, False), (NOT_TOLD, False), (SICK, False)],
    ids=["free", "a process", "memory not told", "GPU does not answer"],
)
async def test_a_server_is_gone_only_where_its_port_refuses_and_its_gpus_are_empty(
    gpus: tuple[GpuReport, ...], is_gone: bool
) -> None:
    """One that ends lets go of its port first, and has its requests until its process ends."""
    server = PageServer()
    await server.open()
    url = server.url
    await server.close()
    seen = await look(url, "vllm", gpus, "vllm")
    assert seen.inference == (NO_SERVER if is_gone else None)
    assert not seen.is_healthy
