"""`aryl-coordinator`: a settings file that does not fit is named before anything is started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.demo.supervise import TERM_S
from coordinator.service.daemon import main, run
from coordinator.service.settings import CoordinatorSettings
from tests.harness.programs import ended
from tests.harness.servers import running_nats
from tests.tables import each_row

GOOD = 'cell = "c"\nnats_url = "nats://127.0.0.1:4222"\n'


def check(path: Path) -> subprocess.CompletedProcess[str]:
    """The real program on a file, with `--check`: it ends without touching the network."""
    return subprocess.run(
        [sys.executable, "-m", "coordinator.service.daemon", "--config", str(path), "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@each_row(
    ("text", "names"),
    [
        (GOOD + "pass_periods_s = 3\n", ["pass_periods_s", "pass_period_s"]),
        (GOOD + "[engine]\nlease_ttl = 3\n", ["engine.lease_ttl", "lease_ttl_s"]),
        (
            GOOD + '[[engine.services]]\nname = "a"\ncapacity_per_nodes = 3\n',
            ["services[0]", "capacity_per_node"],
        ),
        ('nats_url = "nats://127.0.0.1:4222"\n', ["cell", "missing"]),
        (GOOD + "coalesce_s = -1\n", ["coalesce_s", ">= 0"]),
        (GOOD + 'leader_ttl_s = "long"\n', ["leader_ttl_s", "float"]),
        (GOOD + "leader_margin_s = 9\n", ["leader_margin_s", "6"]),
        (GOOD + '[engine]\npolicy = "aril"\n', ["engine.policy: 'aril'", "aryl"]),
        (GOOD + '[engine]\npolicy = "aryl:knob=1"\n', ["engine.policy aryl: ", "knob"]),
        (
            GOOD + 2 * '[[engine.services]]\nname = "a"\ncapacity_per_node = 3\n',
            ["engine.services", "a is listed twice"],
        ),
        ('cell = "c"\nnats_url = "nats://10.0.0.1:4222"\n', ["10.0.0.1", "insecure"]),
        (
            'cell = "c"\nnats_url = "nats://127.0.0.1:1, nats://10.0.0.1:4222"\n',
            ["10.0.0.1", "insecure"],
        ),
        (
            GOOD + '[[engine.services]]\nname = "a"\ncapacity_per_node = 3\nmode = "observ"\n',
            ["services[0].mode", "'observ', expected one of observe, recommend, act"],
        ),
        (GOOD + "cell =\n", ["not TOML"]),
    ],
    ids=[
        "typo",
        "typo in a table",
        "typo in a list",
        "missing",
        "negative",
        "wrong type",
        "margin above the TTL",
        "policy",
        "knob of a policy",
        "a service twice",
        "plain text off loopback",
        "plain text off loopback, the second of two",
        "no such mode",
        "no TOML",
    ],
)
def test_a_typo_in_the_settings_is_named(tmp_path: Path, text: str, names: list[str]) -> None:
    """Exit 2; the error has the file, the field and what was expected or the nearest valid key."""
    path = tmp_path / "coordinator.toml"
    path.write_text(text, encoding="utf-8")
    status, said = ended(main, "--config", str(path), "--check")
    assert status == 2, said
    assert "Traceback" not in said
    for name in (f"{path}: ", *names):
        assert name in said
    assert len(said.splitlines()) == 1


@pytest.mark.slow
def test_settings_that_fit_pass(tmp_path: Path) -> None:
    """Exit 0 and not a word."""
    path = tmp_path / "coordinator.toml"
    path.write_text(GOOD, encoding="utf-8")
    result = check(path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_plain_url_with_certificates_of_its_own_passes(tmp_path: Path) -> None:
    """As for the client, which asks its server for TLS then; only what it refuses is refused."""
    path = tmp_path / "coordinator.toml"
    url = 'cell = "c"\nnats_url = "nats://10.0.0.1:4222"\n'
    path.write_text(f'{url}[access]\ntls_ca_path = "/etc/aryl/ca.pem"\n', encoding="utf-8")
    assert ended(main, "--config", str(path), "--check") == (0, "")


def test_a_service_that_can_never_lend_is_told_of(tmp_path: Path) -> None:
    """Its file fits, so it is a warning: with the sum, its parts, and the deadline below it."""
    path = tmp_path / "coordinator.toml"
    path.write_text(
        f"{GOOD}[engine]\nlease_ttl_s = 8\n"
        '[[engine.services]]\nname = "slow"\ncapacity_per_node = 3\nreclaim_deadline_s = 20\n'
        "max_grace_s = 5\ndevice_free_p99_s = 3\nwarm_up_p99_s = 4.5\n"
        '[[engine.services]]\nname = "quick"\ncapacity_per_node = 3\nreclaim_deadline_s = 20\n'
        "max_grace_s = 5\ndevice_free_p99_s = 3\nwarm_up_p99_s = 4\n",
        encoding="utf-8",
    )
    status, said = ended(main, "--config", str(path), "--check")
    assert status == 0
    [line] = said.splitlines()
    assert "level=warning" in line.lower()
    assert "engine.services: slow never lends a node" in line
    for part in ("20.5 s", "lease_ttl_s 8 +", "max_grace_s 5 +", "device_free_p99_s 3 +"):
        assert part in line
    assert "warm_up_p99_s 4.5" in line
    assert "reclaim_deadline_s, which is 20" in line


@pytest.mark.slow
def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Exit 2 and the path."""
    result = check(tmp_path / "nowhere.toml")
    assert result.returncode == 2
    assert "nowhere.toml" in result.stderr


@pytest.mark.nats
@pytest.mark.slow
async def test_the_number_of_copies_reaches_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server on its own cannot keep three, and says so; with one the coordinator leads."""
    caplog.set_level("INFO")
    async with running_nats(tmp_path / "nats") as server:
        for replicas, said in ((3, "replicas"), (1, "leading")):
            settings = CoordinatorSettings(
                cell=f"c{replicas}",
                nats_url=server.url,
                journal_replicas=replicas,
                rebuild_wait_s=0.0,
            )
            caplog.clear()
            running = asyncio.create_task(run(settings))
            try:
                async with asyncio.timeout(20.0):
                    while not running.done() and said not in caplog.text:  # noqa: ASYNC110 - a log has no event
                        await asyncio.sleep(0.05)
                assert said in caplog.text
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)


@pytest.mark.nats
@pytest.mark.slow
async def test_a_coordinator_told_to_end_while_nats_hangs_ends(tmp_path: Path) -> None:
    """Before whoever supervises it loses patience, and with a record on its way."""
    async with running_nats(tmp_path / "nats") as server:
        path = tmp_path / "coordinator.toml"
        path.write_text(
            f'cell = "c"\nnats_url = "{server.url}"\nrebuild_wait_s = 0.0\npass_period_s = 0.2\n'
            "leader_ttl_s = 60.0\n"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "coordinator.service.daemon", "--config", str(path),
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        pid = server.pid
        assert pid is not None
        assert process.stderr is not None
        try:
            await until_said(process.stderr, b"msg=leading")
            os.kill(pid, signal.SIGSTOP)
            await until_said(process.stderr, b"journal: no answer in time")
            process.terminate()
            async with asyncio.timeout(TERM_S):
                assert await process.wait() == 0
        finally:
            os.kill(pid, signal.SIGCONT)
            if process.returncode is None:
                process.kill()
                await process.wait()


async def until_said(stream: asyncio.StreamReader, words: bytes) -> None:
    """Read until a line has the words."""
    async with asyncio.timeout(60.0):
        while words not in await stream.readline():
            assert not stream.at_eof()
