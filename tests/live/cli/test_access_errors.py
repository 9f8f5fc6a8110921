"""Who cannot reach the coordinator hears why: each cause, on a real nats-server with TLS."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from common.access import AccessError
from common.api import ApiErrorCode
from common.bus import connect_nats
from common.clock import SystemClock
from common.model import NatsAccess
from common.permissions import Login, of_node, of_user, users_file
from common.subjects import user_inbox
from coordinator.cli.app import app
from coordinator.cli.session import EXIT_UNREACHABLE, Surroundings
from coordinator.client import EXIT_CODES
from coordinator.demo.nats_server import find_binary
from coordinator.service.leadership.jetstream_key import NatsKey
from tests.harness.node.daemon import DaemonHarness
from tests.harness.servers import client_url

pytestmark = [pytest.mark.nats, pytest.mark.slow]

PATIENCE_S = 60.0
DENIED = EXIT_CODES[ApiErrorCode.DENIED]
TLS = Path(__file__).parents[2] / "data/tls"
CA = str(TLS / "cert.pem")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Host and port of a server that demands TLS and knows Ada and the node n1."""
    directory = tmp_path_factory.mktemp("nats")
    logins = [
        Login(name="ada", password="right", permissions=of_user("c1", "ops", "ada")),
        Login(name="n1", password="right", permissions=of_node("c1", "n1")),
    ]
    config = directory / "nats.conf"
    cert, key = json.dumps(CA), json.dumps(str(TLS / "key.pem"))
    config.write_text(
        f'listen: "127.0.0.1:-1"\nports_file_dir: {json.dumps(str(directory))}\n'
        f"tls {{ cert_file: {cert}, key_file: {key} }}\n{users_file(logins)}\n"
    )
    server = subprocess.Popen([str(find_binary()), "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        url = asyncio.run(client_url(directory))
        yield url.rpartition("/")[2]
    finally:
        server.terminate()
        server.wait()


class Case(NamedTuple):
    """How somebody asks, and what they hear."""

    code: int
    said: str
    advice: str
    login: str = "ada:right"
    tenant: str = "ops"
    has_ca: bool = True
    is_there: bool = True


CASES = {
    "no server": Case(
        EXIT_UNREACHABLE, "no NATS server answers at", "check host and port", is_there=False
    ),
    "no CA": Case(
        EXIT_UNREACHABLE, "speaks no TLS that can be trusted", "tls_ca_path must", has_ca=False
    ),
    "password": Case(DENIED, "refuses user ada: ", "compare user and password", login="ada:wrong"),
    "user": Case(DENIED, "refuses user eve: ", "compare user and password", login="eve:right"),
    "no user": Case(
        DENIED, "refuses a client without user and key", "compare user and password", login=""
    ),
    "permission": Case(
        DENIED,
        "team/ada (NATS user ada) has no permission to ",
        "compare cell, node, tenant and user",
        tenant="team",
    ),
    "no coordinator": Case(
        EXIT_UNREACHABLE,
        "no coordinator of cell c1 answers",
        "`systemctl status aryl-coordinator`",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_person_hears_what_is_wrong_and_what_to_do_in_a_fleet(
    address: str, tmp_path: Path, case: Case
) -> None:
    """The cause and its own advice; neither a secret, nor how to start a cell of one machine."""
    (tmp_path / "aryl").mkdir()
    access = f"[access]\ntls_ca_path = {json.dumps(CA)}\n" if case.has_ca else ""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but it does not listen
        host = address if case.is_there else f"127.0.0.1:{taken.getsockname()[1]}"
        login = f"{case.login}@" if case.login else ""
        (tmp_path / "aryl/config.toml").write_text(
            f'nats_url = "tls://{login}{host}"\ncell = "c1"\ntenant = "{case.tenant}"\n'
            f'user = "ada"\n{access}'
        )
        around = Surroundings.real()
        environ = {"XDG_CONFIG_HOME": str(tmp_path), "ARYL_HOME": str(tmp_path / "none")}
        here = Surroundings(
            environ=environ,
            connect=around.connect,
            clock=around.clock,
            is_interactive=lambda: False,
        )
        # A refusal comes at once: with this patience the test would else never end.
        done = CliRunner().invoke(app, ["--timeout", "3600", "status"], obj=here)
    assert done.exit_code == case.code, done.stderr
    assert case.said in done.stderr
    assert f"next: {case.advice}" in done.stderr
    assert not [word for word in ("right", "wrong", "aryl up", "Traceback") if word in done.stderr]


@pytest.mark.parametrize(
    ("login", "said", "advice"),
    [
        ("ada:wrong", "refuses user ada: ", "compare user and password"),
        ("ada:right", "coordinator (NATS user ada) has no permission to ", "compare cell, node"),
    ],
    ids=["password", "permission"],
)
def test_a_coordinator_that_nats_refuses_ends_and_says_why(
    address: str, tmp_path: Path, login: str, said: str, advice: str
) -> None:
    """Its last line names cause and identity; systemd starts it again."""
    config = tmp_path / "coordinator.toml"
    config.write_text(
        f'cell = "c1"\nnats_url = "tls://{login}@{address}"\nrebuild_wait_s = 0.0\n'
        f"[access]\ntls_ca_path = {json.dumps(CA)}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "coordinator.service.daemon", "--config", str(config)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, said in last, advice in last) == (2, True, True), done.stderr


async def test_a_call_of_jetstream_that_nats_refuses_fails_at_once(address: str) -> None:
    """The journal and the leader's key say which right is missing, and wait for no timeout."""
    clock, access = SystemClock(), NatsAccess(tls_ca_path=CA)
    url, inbox = f"tls://ada:right@{address}", user_inbox("c1", "ops", "ada")
    bus = await connect_nats(url, identity="c", clock=clock, access=access, inbox=inbox)
    try:
        key = NatsKey(bus, cell="c1", timeout_s=3600.0)
        with pytest.raises(
            AccessError, match=r"leader lease: .* to \$JS\.API\.STREAM\.INFO\.KV_lea"
        ):
            await key.get()
    finally:
        await bus.close()


@pytest.fixture
async def harness(tmp_path: Path, address: str) -> AsyncIterator[DaemonHarness]:
    """Where an agent runs."""
    harness = DaemonHarness(tmp_path, nats_url=f"tls://n1:wrong@{address}")
    yield harness
    await harness.close()


@pytest.mark.parametrize(
    ("login", "node", "said", "advice"),
    [
        ("n1:wrong", "n1", "Authorization Violation", "compare user and password"),
        ("n1:right", "n2", "n2 (NATS user n1) has no permission to ", "compare cell, node"),
    ],
    ids=["password", "permission"],
)
async def test_an_agent_that_nats_refuses_goes_on_and_says_why(
    harness: DaemonHarness, address: str, login: str, node: str, said: str, advice: str
) -> None:
    """A node goes home without NATS, so its agent stays; its log names the cause."""
    config = harness.config(node=node, nats_url=f"tls://{login}@{address}")
    with config.open("a") as file:
        file.write(f"[access]\ntls_ca_path = {json.dumps(CA)}\n")
    agent = await harness.spawn("--config", str(config), "--fake-nvml", str(harness.fleet))
    assert agent.stderr is not None
    lines: list[str] = []
    async with asyncio.timeout(PATIENCE_S):
        while not any(said in line for line in lines):
            line = await agent.stderr.readline()
            assert line, lines
            lines.append(line.decode())
    assert advice in lines[-1]
    assert agent.returncode is None
