"""What a metrics page says, engine by engine, and what is refused."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.settings import MetricsSettings
from agent.telemetry.engine_page_parser import (
    MAX_STANDS,
    PageReader,
    Reading,
    checked_metrics,
    parse_metrics,
)
from agent.telemetry.engine_series import ENGINES
from agent.telemetry.page_fetch import MAX_PAGE_BYTES, fetch_page, page_fetcher
from common.clock import SystemClock
from common.errors import ConfigError, ProtocolError, Unavailable
from common.messages import InferenceReport
from common.model import MAX_INT
from tests.harness.fake_clock import FakeClock
from tests.tables import each_row

PAGES = Path(__file__).parents[2] / "data/metrics"


def page(name: str) -> str:
    return (PAGES / f"{name}.txt").read_text()


@each_row(
    ("name", "engine", "running", "waiting", "success", "kv_cache"),
    [
        ("vllm", "vllm", 7, 1, 123, 0.5),
        ("vllm_old", "vllm", 4, 15, 12, 0.75),
        ("vllm_idle", "vllm", 0, 0, 0, None),
        ("sglang", "sglang", 12, 3, 4096, 0.375),
        ("triton", "triton", 0, 5, 75, None),
        ("triton_trtllm", "triton", 8, 0, 900, 0.0625),
        ("vllm_ray", "vllm", 5, 1, 16, 0.25),
        ("vllm_ray_fresh", "vllm", 5, 1, 0, 0.25),
        ("sglang_ranks", "sglang", 9, 2, 17, 0.5),
        ("sglang_decode", "sglang", 0, 7, 7, None),
        ("sglang_prefill", "sglang", 1, 10, 9, None),
        ("triton_ensemble", "triton", 8, 33, 50, 0.5),
        ("triton_vllm", "triton", 8, 26, 100, 0.75),
        ("trtllm", "trtllm", 3, 2, 6, 0.125),
        ("dynamo", "dynamo", 4, 0, 20, None),
        ("dynamo_frontend", "dynamo", 6, 0, 32, None),
        ("nim", "nim", 3, 1, 11, 0.5),
        ("vllm", "nim", 7, 1, 123, 0.5),
        ("llamacpp", "llamacpp", 1, 2, 1700, None),
        ("tgi", "tgi", 6, 2, 40, None),
        ("tgi_fresh", "tgi", 0, 0, 0, None),
    ],
)
def test_each_engine_is_read_by_its_own_names(
    name: str, engine: str, running: float, waiting: float, success: float, kv_cache: float | None
) -> None:
    """Counts are sums over label sets, and the KV cache is that of the fullest one."""
    assert parse_metrics(page(name), engine) == InferenceReport(
        running_count=running,
        waiting_count=waiting,
        success_total=success,
        kv_cache_used_ratio=kv_cache,
    )


@each_row("engine", sorted(ENGINES))
def test_a_page_that_is_no_metrics_page_names_what_it_lacks(engine: str) -> None:
    """An HTML page is refused for every engine, with the name of a series that was expected."""
    metrics = ENGINES[engine][0].metrics
    expected = next(one.series[0] for one in metrics.running + metrics.waiting if not one.optional)
    with pytest.raises(ProtocolError, match=expected):
        parse_metrics("<html><body>502 Bad Gateway</body></html>", engine)


def test_only_what_is_missing_is_named() -> None:
    """A page without its success counter is refused for that alone."""
    text = "\n".join(line for line in page("vllm").splitlines() if "request_success" not in line)
    with pytest.raises(ProtocolError, match="request_success_total") as caught:
        parse_metrics(text, "vllm")
    assert "num_requests_running" not in str(caught.value)


def test_a_counter_that_the_page_does_not_even_declare_is_missing() -> None:
    """Only a family without samples is one without events: a page without it is another one."""
    lines = [line for line in page("vllm_idle").splitlines() if "request_success" not in line]
    with pytest.raises(ProtocolError, match="no vllm:request_success_total"):
        parse_metrics("\n".join(lines), "vllm")


def test_a_page_of_another_engine_is_refused() -> None:
    """SGLang's numbers are never taken for vLLM's."""
    with pytest.raises(ProtocolError, match="vllm:num_requests_running"):
        parse_metrics(page("sglang"), "vllm")


@each_row("value", ["NaN", "-1", "+Inf", "1e300", "1e17"])
def test_a_number_that_cannot_be_a_count_is_refused(value: str) -> None:
    """Load that no counter counts to would poison a forecast, so the page is refused."""
    text = page("tgi").replace("tgi_queue_size 2", f"tgi_queue_size {value}")
    with pytest.raises(ProtocolError, match="tgi_queue_size"):
        parse_metrics(text, "tgi")


def test_counts_whose_sum_is_none_are_refused() -> None:
    """Each label set may be a count, and all of them together none that a coordinator takes."""
    largest = f"{MAX_INT}.0"
    running = "tgi_batch_current_size 1\n"
    one = f'tgi_queue_size{{shard="0"}} {largest}\n{running}'
    assert parse_metrics(one, "tgi").waiting_count == MAX_INT
    with pytest.raises(ProtocolError, match=r"tgi_queue_size: 1\.8.*e\+16, expected a number"):
        parse_metrics(f'{one}tgi_queue_size{{shard="1"}} {largest}\n', "tgi")


def test_an_unknown_engine_is_the_operators_mistake() -> None:
    """A name that is in no table is a ConfigError that says which names are."""
    with pytest.raises(ConfigError, match="sglang, tgi, triton, trtllm, vllm"):
        parse_metrics("", "llama")


# --- values that are no counts ---------------------------------------------------------------


def dropping(text: str, engine: str = "vllm") -> Reading:
    return PageReader.of(engine).read(text)


def test_one_bad_value_is_dropped_and_its_page_is_not() -> None:
    """The other ranks count, and what was dropped is told."""
    reading = dropping(page("vllm_nan"))
    assert reading.load().running_count == 2
    assert 'num_requests_running{engine="0",model_name="tiny-chat"} NaN' in reading.warning()


@each_row("bad", ["NaN", "two", "-1", "+Inf", "1e300"])
def test_the_last_good_value_stands_for_one_that_is_dropped(bad: str) -> None:
    """A counter would fall without it, and a load would be lower than it is."""
    reader = PageReader.of("vllm")
    good = page("vllm")
    before = reader.read(good).load()
    spoilt = re.sub(r"(num_requests_running|request_success_total)({.*}) .*", rf"\1\2 {bad}", good)
    assert spoilt != good
    for _ in range(2):
        reading = reader.read(spoilt)
        assert reading.load() == before
        assert reading.warning()
    assert not reader.read(good).warning()


def test_a_counter_whose_value_stays_away_is_unknown_and_does_not_stand_still() -> None:
    """Else a busy server would look idle for ever, and be lent; what runs is still told."""
    reader = PageReader.of("vllm")
    good = page("vllm")
    spoilt = re.sub(r"(num_requests_running{.*}) .*", r"\1 NaN", good)
    spoilt = re.sub(r'(request_success_total{engine="0",.*stop.*}) .*', r"\1 NaN", spoilt)
    assert spoilt.count("NaN") == 3
    before = reader.read(good).load()
    for _ in range(MAX_STANDS):
        assert reader.read(spoilt).load() == before
    for _ in range(2):
        reading = reader.read(spoilt)
        assert reading.running.value == before.running_count
        with pytest.raises(ProtocolError, match=r"request_success_total.*NaN, expected a number"):
            reading.load()
    assert reader.read(good).load() == before


def test_a_counter_of_which_a_value_was_never_read_is_unknown() -> None:
    """The value would come later as if all of it had arrived at once."""
    spoilt = re.sub(r'(request_success_total{engine="1".*}) .*', r"\1 NaN", page("vllm"))
    with pytest.raises(ProtocolError, match="request_success_total"):
        dropping(spoilt).load()


@pytest.mark.parametrize(
    "name", ["num_requests_running", "num_requests_waiting", "request_success"]
)
def test_a_number_of_which_no_value_is_good_is_unknown_and_not_zero(name: str) -> None:
    """Where nothing was read before, nothing stands for it."""
    spoilt = re.sub(rf"({name}\S*) .*", r"\1 NaN", page("vllm"))
    with pytest.raises(ProtocolError, match=name):
        dropping(spoilt).load()


def test_a_broken_line_costs_itself_only() -> None:
    """Labels that do not end, an exemplar, a time: each line is read by itself."""
    text = (
        'vllm:num_requests_running{engine="0 3.0\n'
        'vllm:num_requests_running{engine="1"} 4.0 1795909999.123\n'
        'vllm:num_requests_waiting{engine="1"} 1.0\n'
        'vllm:request_success_total{engine="1"} 10.0 # {trace_id="a"} 1.0 1795909999.1\n'
    )
    reading = dropping(text)
    load = reading.load()
    assert (load.running_count, load.waiting_count, load.success_total) == (4, 1, 10)
    assert len(reading.dropped) == 1


# --- a site's own names ----------------------------------------------------------------------


def named(text: str) -> MetricsSettings:
    """Settings as in a file."""
    metrics = msgspec.toml.decode(text, type=MetricsSettings)
    checked_metrics(metrics, "server.metrics")
    return metrics


OWN = """
running = [{ series = ["gone", "busy"], labels = { kind = "llm-*", shadow = "" } }]
waiting = [{ series = ["queue"], combine = "max" }, { series = ["late"], optional = true }]
succeeded = [{ series = ["done_total"], copies = ["rank"] }]
"""
OWN_PAGE = """
busy{kind="llm-a"} 2
busy{kind="llm-b"} 3
busy{kind="llm-b",shadow="yes"} 100
busy{kind="other"} 100
busy_total{kind="llm-a"} 100
queue{level="1"} 4
queue{level="2"} 6
done_total{model="a",rank="0"} 10
done_total{model="a",rank="1"} 9
done_total{model="b",rank="0"} 5
"""


def test_a_site_s_own_series_are_filtered_and_put_together_as_it_says() -> None:
    """By name and labels; the sum or the largest; copies once."""
    load = PageReader.of("vllm", named(OWN)).read(OWN_PAGE).load()
    assert load == InferenceReport(running_count=5, waiting_count=6, success_total=15)


JSON = """
running = [{ path = "/models/*/busy" }]
waiting = [{ path = "/queues/0/a~1b", combine = "max" }]
succeeded = [{ path = "/done" }]
"""


def test_a_json_document_is_read_by_pointers() -> None:
    """`*` is each item; what is no number is dropped like any other value."""
    text = '{"models": {"a": {"busy": 1}, "b": {"busy": 2}}, "queues": [{"a/b": 4}], "done": 9}'
    reader = PageReader.of("vllm", named(JSON))
    assert reader.read(text).load() == InferenceReport(
        running_count=3, waiting_count=4, success_total=9
    )
    reading = reader.read(text.replace("9}", '"nine"}'))
    assert reading.load().success_total == 9
    assert "/done" in reading.warning()
    with pytest.raises(ProtocolError, match="JSON"):
        reader.read("<html>")
    with pytest.raises(ProtocolError, match="no /done"):
        reader.read('{"models": [{"busy": 1}], "queues": [{"a/b": 0}]}').load()


@each_row(
    ("text", "words"),
    [
        ("running = []", "running: is required"),
        ('command = ["a"]\nrunning = [{ series = ["a"] }]', "command: prints"),
        ("running = [{}]\nsucceeded = [{}]", r"running\[0\]: expected a series or a path"),
        ('running = [{ path = "a" }]\nsucceeded = [{ path = "/a" }]', "JSON pointer"),
        ('running = [{ path = "/a" }]\nsucceeded = [{ series = ["a"] }]', "not both"),
        ('running = [{ series = ["a"], by = ["b"] }]\nsucceeded = [{ path = "/" }]', "by: a sum"),
    ],
)
def test_names_that_could_never_be_read_are_refused(text: str, words: str) -> None:
    """The error names the field."""
    with pytest.raises(ConfigError, match=words):
        named(text)


@given(text=st.text(alphabet='tgi_queue_szbachrn{}="\\ \n#019.e+-', max_size=80))
def test_no_text_makes_the_parser_fail_in_another_way(text: str) -> None:
    """Whatever a page says, the answer is a report or a ProtocolError."""
    try:
        report = parse_metrics(f"tgi_queue_size{text}\ntgi_batch_current_size 1\n", "tgi")
    except ProtocolError:
        return
    assert report.waiting_count >= 0


class Handler(BaseHTTPRequestHandler):
    """A server that misbehaves as its path says."""

    bodies: ClassVar[dict[str, bytes]] = {
        "/metrics": b"tgi_queue_size 1\n",
        "/large": b"x" * (MAX_PAGE_BYTES + 1),
        "/binary": b"\xff\xfe",
    }

    def do_GET(self) -> None:
        """200 with a body, a redirect, or 404."""
        places = {"/moved": "/metrics", "/round": "/round"}
        if self.path in places:
            self.send_response(302)
            self.send_header("Location", places[self.path])
            self.end_headers()
            return
        body = self.bodies.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a test's output is for its failures."""


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """A real HTTP server on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_page_is_fetched_over_http(base_url: str) -> None:
    """The text of a page is what its server sent."""
    assert await fetch_page(f"{base_url}/metrics", 5.0, clock=SystemClock()) == "tgi_queue_size 1\n"


@pytest.mark.parametrize("path", ["/nothing", "/round"])
async def test_no_page_is_unavailable(base_url: str, path: str) -> None:
    """Neither an error page nor a redirect without end is parsed."""
    with pytest.raises(Unavailable, match=path):
        await fetch_page(base_url + path, 5.0, clock=SystemClock())


async def test_a_page_that_is_too_large_is_refused(base_url: str) -> None:
    """One byte over the cap is too much: a page must not fill the agent's memory."""
    with pytest.raises(ProtocolError, match=str(MAX_PAGE_BYTES)):
        await fetch_page(f"{base_url}/large", 5.0, clock=SystemClock())


async def test_a_page_that_is_not_text_is_refused(base_url: str) -> None:
    """Bytes that are not UTF-8 are the server's fault, and said to be."""
    with pytest.raises(ProtocolError, match="UTF-8"):
        await fetch_page(f"{base_url}/binary", 5.0, clock=SystemClock())


async def test_no_server_is_unavailable() -> None:
    """A refused connection is a state of the world, not a crash."""
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        await fetch_page("http://127.0.0.1:1/metrics", 5.0, clock=SystemClock())


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://node/metrics", "metrics"])
async def test_only_http_is_fetched(url: str) -> None:
    """A setting cannot make the agent read a file."""
    with pytest.raises(ConfigError, match="http"):
        await fetch_page(url, 5.0, clock=SystemClock())


async def test_the_time_of_a_page_is_the_clock_s() -> None:
    """A server that hangs is given up when the clock that was passed in says so."""
    clock = FakeClock()
    fetch = page_fetcher(clock)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        asking = asyncio.ensure_future(fetch(f"http://127.0.0.1:{silent.getsockname()[1]}/", 60.0))
        await clock.advance(59.0)
        assert not asking.done()
        await clock.advance(2.0)
        with pytest.raises(Unavailable, match="within 60 s"):
            await asyncio.wait_for(asking, 10.0)
