"""How pages are asked for: keys, certificates, redirects, commands, several servers; --probe."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import ssl
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from msgspec import structs

from agent.core.inference_server import SAMPLES_AT_REST
from agent.core.state import HookKind
from agent.daemon import main
from agent.proc.process_tree import thread_states
from agent.settings import InstanceSettings, MetricsSettings, PageAccess
from agent.settings_file import checked, way_home
from agent.telemetry.collectors import Collected, InferenceCollector, collect_all
from agent.telemetry.metrics_command import MAX_OUTPUT_BYTES, output_of
from agent.telemetry.page_fetch import NO_ACCESS, page_fetcher
from common.clock import SystemClock
from common.errors import ConfigError, ProtocolError, Unavailable
from common.messages import InferenceReport
from common.model import NodeRole
from tests.harness.node.life import SERVER, LifeHarness, lease, page
from tests.harness.node.page_server import LIMIT_S, VLLM
from tests.tables import each_row

CLOCK = SystemClock()
FETCH = page_fetcher(CLOCK)
TLS = Path(__file__).parents[2] / "data/tls"
SECRET = "s3cret-word"
LONG_S = 20.0


class Handler(BaseHTTPRequestHandler):
    """Leads elsewhere, or says who asked, as its path says."""

    places: ClassVar[dict[str, str]] = {}
    seen: ClassVar[list[tuple[str, str | None]]] = []
    body: ClassVar[bytes] = VLLM

    def do_GET(self) -> None:
        """A redirect, 401 without a key at `/locked`, else the body."""
        who = self.headers.get("Authorization")
        self.seen.append((self.path, who))
        place = self.places.get(self.path)
        is_locked = self.path.startswith("/locked") and who is None
        self.send_response(307 if place else 401 if is_locked else 200)
        if place:
            self.send_header("Location", place)
        self.send_header("Content-Length", "0" if place else str(len(self.body)))
        self.end_headers()
        if not place:
            self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a test's output is for its failures."""


@contextlib.contextmanager
def serving(*, tls: bool = False) -> Generator[tuple[str, type[Handler]]]:
    """A real HTTP server on a free port, and its handler."""

    class Own(Handler):
        places: ClassVar[dict[str, str]] = {}
        seen: ClassVar[list[tuple[str, str | None]]] = []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}", Own
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    """A file with this text and mode."""
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A file with a key, for its owner alone."""
    return write(tmp_path / "key", f"{SECRET}\n")


# --- keys, certificates, redirects ---------------------------------------------------------------


async def test_a_key_is_sent_as_its_file_says(key: Path, tmp_path: Path) -> None:
    """As a bearer, or as user and password; a key that changes is read anew."""
    pair = write(tmp_path / "pair", "aryl:open sesame", 0o400)
    with serving() as (url, handler):
        with pytest.raises(Unavailable, match="401"):
            await FETCH(f"{url}/locked", LONG_S)
        await FETCH(f"{url}/locked", LONG_S, PageAccess(bearer_path=str(key)))
        await FETCH(f"{url}/locked", LONG_S, PageAccess(basic_path=str(pair)))
        write(key, "another")
        await FETCH(f"{url}/locked", LONG_S, PageAccess(bearer_path=str(key)))
    assert [who for _, who in handler.seen[1:]] == [
        f"Bearer {SECRET}",
        "Basic YXJ5bDpvcGVuIHNlc2FtZQ==",
        "Bearer another",
    ]


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (SECRET, 0o644, "mode 0644 gives others access"),
        (SECRET, 0o620, "mode 0620"),
        (f"{SECRET}\nX-Other: 1", 0o600, "one line"),
        (f"{SECRET}\u00e9", 0o600, "printable ASCII"),
        ("", 0o600, "one line"),
        (SECRET, 0o440, ""),  # a credential of systemd: its ACL shows as the group's right
    ],
)
async def test_a_file_that_is_open_or_holds_no_key_is_refused_without_telling_it(
    key: Path, text: str, mode: int, words: str
) -> None:
    """The path is told, what it holds is not."""
    write(key, text, mode)
    with serving() as (url, handler):
        asking = FETCH(f"{url}/locked?token={SECRET}", LONG_S, PageAccess(bearer_path=str(key)))
        if not words:
            await asking
            return
        with pytest.raises(Unavailable, match=words) as caught:
            await asking
    assert str(key) in str(caught.value)
    assert SECRET not in str(caught.value)
    assert handler.seen == []


async def test_no_error_tells_the_query_of_a_url() -> None:
    """It may hold a key, and errors are for every reader of the cell."""
    with serving() as (url, _), pytest.raises(Unavailable, match=r"/locked\?\.\.\.: status 401"):
        await FETCH(f"{url}/locked?key={SECRET}", LONG_S)


async def test_a_redirect_is_followed_on_the_same_host_and_the_key_stays_at_its_port(
    key: Path,
) -> None:
    """vLLM leads from /metrics to /metrics/; another port on this host is somebody else's."""
    access = PageAccess(bearer_path=str(key))
    with serving() as (url, handler), serving() as (other, other_handler):
        handler.places["/metrics"] = "/metrics/"
        handler.places["/away"] = f"{other}/page"
        assert "num_requests_running" in await FETCH(f"{url}/metrics", LONG_S, access)
        assert handler.seen[-1] == ("/metrics/", f"Bearer {SECRET}")
        await FETCH(f"{url}/away", LONG_S, access)
        assert other_handler.seen == [("/page", None)]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (
            f"http://other.example/metrics?key={SECRET}",
            "another host: http://other.example/metrics",
        ),
        ("file:///etc/passwd", "leads to no page"),
        (f"http://a:{SECRET}@127.0.0.1/", "leads to no page"),
    ],
)
async def test_a_redirect_elsewhere_is_told_and_not_followed(place: str, words: str) -> None:
    """Whoever answers there is not this node's server."""
    with serving() as (url, handler):
        handler.places["/metrics"] = place
        with pytest.raises(Unavailable, match=words) as caught:
            await FETCH(f"{url}/metrics", LONG_S)
    assert SECRET not in str(caught.value)


async def test_a_page_behind_tls_is_trusted_by_its_ca_and_leads_nowhere_else() -> None:
    """A certificate that nobody named is refused, and so is a way out of TLS."""
    access = PageAccess(tls_ca_path=str(TLS / "cert.pem"))
    with serving(tls=True) as (url, handler):
        assert "vllm" in await FETCH(f"{url}/metrics", LONG_S, access)
        with pytest.raises(Unavailable, match="certificate"):
            await FETCH(f"{url}/metrics", LONG_S, NO_ACCESS)
        handler.places["/plain"] = url.replace("https", "http") + "/metrics"
        with pytest.raises(Unavailable, match="out of TLS"):
            await FETCH(f"{url}/plain", LONG_S, access)


# --- commands ------------------------------------------------------------------------------------

NUMBERS = '{"running": 2, "waiting": 1, "succeeded": 30}'


def shell(text: str) -> tuple[str, ...]:
    return "/bin/sh", "-c", text


async def collect(
    *pages: InstanceSettings, metrics: MetricsSettings | None = None, deadline_s: float = LONG_S
) -> Collected:
    """One round of the inference collector."""
    server = structs.replace(SERVER, metrics=metrics, instances=pages)
    collector = InferenceCollector(
        server.all_instances(), timeout_s=deadline_s, fetch=FETCH, clock=CLOCK
    )
    return await collect_all((collector,), CLOCK, deadline_s)


async def test_a_command_tells_a_load_by_what_it_prints() -> None:
    """Three numbers in a JSON object; what it says beside that on standard error is not read."""
    collected = await collect(
        metrics=MetricsSettings(command=shell(f"echo note >&2; echo '{NUMBERS}'"))
    )
    assert collected.inference == InferenceReport(
        running_count=2, waiting_count=1, success_total=30
    ), collected.collectors


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("echo broken >&2; exit 3", Unavailable, "exited with 3: broken"),
        ("printf '\\377'", ProtocolError, "no UTF-8"),
    ],
)
async def test_a_command_that_fails_says_why(text: str, error: type[Exception], words: str) -> None:
    """Its status and its last words."""
    with pytest.raises(error, match=words):
        await output_of(shell(text), clock=CLOCK, timeout_s=LONG_S)


async def test_no_such_command_is_unavailable() -> None:
    """A state of the machine, which may pass."""
    with pytest.raises(Unavailable, match="No such file"):
        await output_of(("/nowhere/command",), clock=CLOCK, timeout_s=LONG_S)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["sleep 1000 & echo $$ >{pid}; wait", "echo $$ >{pid}; yes"])
async def test_a_command_that_overruns_is_killed_with_what_it_began(
    text: str, tmp_path: Path
) -> None:
    """One that hangs, and one that prints without end."""
    pid_file = tmp_path / "pid"
    with pytest.raises((Unavailable, ProtocolError), match=f"within 1 s|{MAX_OUTPUT_BYTES} bytes"):
        await output_of(shell(text.format(pid=pid_file)), clock=CLOCK, timeout_s=1.0)
    assert not thread_states(int(pid_file.read_text()))


async def test_what_a_command_leaves_behind_keeps_nobody_waiting() -> None:
    """A daemon that holds the pipe open is its own business."""
    async with asyncio.timeout(LIMIT_S):
        text = await output_of(
            shell(f"sleep {LIMIT_S + 1} & echo '{NUMBERS}'"), clock=CLOCK, timeout_s=LIMIT_S
        )
    assert json.loads(text)["running"] == 2


# --- several servers, and a page with a hole -----------------------------------------------------


def instance(url: str, *, engine: str | None = None) -> InstanceSettings:
    return InstanceSettings(health_url=url, metrics_url=url, engine=engine)


async def test_the_load_of_several_servers_is_the_sum_and_one_unread_leaves_it_unknown() -> None:
    """A sum without one of them would be too low."""
    with serving() as (url, _):
        both = await collect(instance(f"{url}/a"), instance(f"{url}/b"))
        assert both.inference == InferenceReport(running_count=6, waiting_count=4, success_total=84)
        one = await collect(instance(f"{url}/a"), instance(f"{url}/locked"))
        assert one.inference is None
        assert "/locked" in one.collectors[0].error
        other = await collect(instance(f"{url}/a"), instance(f"{url}/b", engine="tgi"))
        assert other.inference is None
        assert "no tgi_batch_current_size" in other.collectors[0].error


def test_a_page_of_which_a_value_was_dropped_shows_no_rest() -> None:
    """What stands for it may be wrong: the server is not stopped, and the reason is told."""
    harness = LifeHarness()
    harness.serve()
    harness.page = page()
    harness.is_page_whole = False
    harness.want(NodeRole.ON_LOAN, lease=lease(ttl_s=1000.0))
    harness.steps(10)
    assert harness.hooks == [HookKind.UNROUTE]
    assert "values that are no counts" in harness.life.detail
    harness.is_page_whole = True
    harness.steps(SAMPLES_AT_REST)
    assert harness.hooks == [HookKind.UNROUTE, HookKind.STOP]


# --- settings, and what --probe shows ------------------------------------------------------------

HEAD = """
cell = "c1"
node = "n1"
home_pool = "inference"
nats_url = "nats://127.0.0.1:4222"
state_dir = "{state_dir}"
service = "chat"
worker_starter = "detached"
last_resort = "detached"
is_root_allowed = true
[server]
start = ["true"]
stop = ["true"]
route = ["true"]
unroute = ["true"]
"""


def config(tmp_path: Path, text: str) -> Path:
    """An agent's file with this in its `[server]`."""
    path = tmp_path / "agent.toml"
    path.write_text(HEAD.format(state_dir=tmp_path / "state") + text)
    return path


URL = "http://127.0.0.1:1"
PAGES = f'health_url = "{URL}/health"\nmetrics_url = "{URL}/metrics"\n'


@each_row(
    ("text", "words"),
    [
        ("", "server.health_url: is required and missing"),
        (f'health_url = "{URL}"', "server.metrics_url: is required and missing"),
        (PAGES.replace("//", f"//user:{SECRET}@"), "server.health_url: holds a user or password"),
        (PAGES.replace("http://127", f"http://a:{SECRET}@[127"), "holds a user or password"),
        (PAGES + f'[[server.instances]]\nhealth_url = "{URL}"', "stands in each of"),
        (f'[[server.instances]]\nhealth_url = "{URL}"', r"server.instances[0].metrics_url: is"),
        (PAGES + "[server.metrics]\nrunning = []", "server.metrics.running: is required"),
        (PAGES + '[server.metrics]\ncommand = ["a"]', "metrics.command is asked instead"),
        (PAGES + '[server.access]\nbearer_path = "a"\nbasic_path = "b"', "takes one of them"),
        (
            PAGES.replace("127.0.0.1", "gpu7") + '[server.access]\nbearer_path = "a"',
            "access.bearer_path: http://gpu7:1/health is plain text off loopback",
        ),
        (PAGES + '[server.access]\ntls_ca_path = "/nowhere"', "access.tls_ca_path: /nowhere"),
    ],
)
def test_a_file_whose_pages_could_never_be_asked_is_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    """The field is named, and no secret."""
    with pytest.raises(ConfigError) as caught:
        checked(config(tmp_path, text))
    assert words in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_key_that_others_can_read_is_refused_and_one_of_the_unit_alone_is_not(
    tmp_path: Path, key: Path
) -> None:
    """A credential is there only while its unit runs."""
    access = '[server.access]\nbearer_path = "{}"'
    checked(config(tmp_path, PAGES + access.format(key)))
    checked(config(tmp_path, PAGES + access.format("/run/credentials/nobody/key")))
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"access\.bearer_path: .* gives others access"):
        checked(config(tmp_path, PAGES + access.format(key)))


def test_a_way_home_goes_on_with_what_can_be_used(tmp_path: Path) -> None:
    """A password in a URL, which was accepted once, must not keep a lent node away."""
    text = PAGES.replace("//", f"//user:{SECRET}@") + "[server.metrics]\nrunning = []\n"
    server = way_home(config(tmp_path, text), state_dir=None).server
    assert server is not None
    assert (server.health_url, server.metrics_url) == (f"{URL}/health", "")
    assert server.metrics is None


def probed(path: Path, *more: str) -> tuple[int, str]:
    """Status and output of `--check --probe`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = main(["--config", str(path), "--check", "--probe", *more])
    return status, out.getvalue()


def test_probe_shows_each_page_and_what_is_understood_of_it(tmp_path: Path, key: Path) -> None:
    """URL, names, series and values, what was dropped, and the load; 1 where one tells none."""
    with serving() as (url, handler):
        page_of = f'[[server.instances]]\nhealth_url = "{url}"\nmetrics_url = "{url}'
        access = f'\n[server.instances.access]\nbearer_path = "{key}"\n'
        good = f'{page_of}/locked?key={SECRET}"{access}'
        handler.body = VLLM + b'vllm:num_requests_running{model_name="n"} NaN\n'
        status, text = probed(config(tmp_path, good))
        assert status == 0
        for words in (
            f"n1: {url}/locked?...",
            "names of   vLLM",
            'counted  vllm:num_requests_waiting{model_name="m"} 2.0',
            'dropped  vllm:num_requests_running{model_name="n"} NaN: is no count',
            "3 running, 2 waiting, 42 succeeded; requests per second unknown",
        ):
            assert words in text, text
        status, text = probed(config(tmp_path, f'{good}{page_of}/locked"\n'), "-o", "json")
        assert status == 1
        first, second = json.loads(text)
        assert (first["is_understood"], first["running"], first["rate"]) == (True, 3.0, None)
        assert first["counts"]["running"][0]["dropped"]
        assert (second["is_understood"], "401" in second["status"]) == (False, True)
        assert SECRET not in text
        status, text = probed(config(tmp_path, f'engine = "sglang"\n{page_of}/metrics"\n'))
        assert (status, "unknown: no sglang:num_running_reqs" in text) == (1, True), text


def test_probe_runs_a_command_once_and_names_its_program_only(tmp_path: Path) -> None:
    """Its arguments may hold a secret; a real process says it."""
    mark = tmp_path / "mark"
    argv = json.dumps(shell(f"echo {SECRET} >>{mark}; echo '{NUMBERS}'"))
    path = config(tmp_path, f'health_url = "{URL}"\n[server.metrics]\ncommand = {argv}\n')
    status, text = probed(path)
    assert (status, "2 running, 1 waiting, 30 succeeded" in text) == (0, True), text
    assert mark.read_text() == f"{SECRET}\n"
    assert SECRET not in text
