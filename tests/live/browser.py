"""A real browser for tests: headless Chromium, driven by its DevTools protocol over a websocket.

https://chromedevtools.github.io/devtools-protocol/ has the commands. Must not know what is shown.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.harness.sockets import short_path

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-port=0",
)
PATIENCE_S = 60.0
"""How long a test waits for what must come; nothing is measured by it."""
LOOK_S = 0.1


class Page:
    """One tab. requests: the URLs that it has asked for; errors: what its console complained of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def read(self) -> None:
        """Take answers and events until the tab is closed."""
        async for message in self._socket:
            found: dict[str, Any] = json.loads(message.data)
            if "id" in found:
                self._answers.pop(found["id"]).set_result(found)
                continue
            values = found["params"]
            match found["method"]:
                case "Network.requestWillBeSent":
                    self.requests.append(values["request"]["url"])
                case "Log.entryAdded" if values["entry"]["level"] == "error":
                    self.errors.append(f"{values['entry']['text']} {values['entry'].get('url')}")
                case "Runtime.exceptionThrown":
                    self.errors.append(str(values["exceptionDetails"]))
                case _:
                    pass  # the protocol has many events

    async def do(self, method: str, **values: Any) -> dict[str, Any]:
        """One command; its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": values})
        async with asyncio.timeout(PATIENCE_S):
            found = await answer
        assert "error" not in found, f"{method}: {found['error']}"
        result: dict[str, Any] = found["result"]
        return result

    async def open(self, url: str) -> None:
        """Go to a page."""
        found = await self.do("Page.navigate", url=url)
        assert "errorText" not in found, f"{url}: {found['errorText']}"

    async def value(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = await self.do("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, f"{script}: {found['exceptionDetails']}"
        return found["result"].get("value")

    async def text(self, selector: str = "body") -> str:
        """What a person reads in an element; empty without one."""
        found = await self.value(f"document.querySelector({json.dumps(selector)})?.innerText")
        return str(found or "")

    async def until_text(self, selector: str, *parts: str, within_s: float = PATIENCE_S) -> str:
        """Wait until a person reads all parts in an element; its whole text."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + within_s
        text = ""
        while loop.time() < end_s:
            text = await self.text(selector)
            if all(part in text for part in parts):
                return text
            await asyncio.sleep(LOOK_S)
        raise AssertionError(f"{selector} never had {parts}, but: {text!r}; {self.errors}")

    async def press(self, key: str, code: int) -> None:
        """Press and release a key, named as KeyboardEvent.key; code: its Windows key code."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.do(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text
            )

    async def look_as(self, *, width: int, height: int, scheme: str = "light") -> None:
        """A window of this size, of a person who prefers this color scheme."""
        await self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.do("Emulation.setEmulatedMedia", features=[feature])

    async def picture(self) -> bytes:
        """What the window shows, as PNG."""
        found = await self.do("Page.captureScreenshot", format="png")
        return base64.b64decode(found["data"])


class Browser:
    """A running Chromium."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    @contextlib.asynccontextmanager
    async def page(self) -> AsyncIterator[Page]:
        """A tab for the block, 1280 by 800."""
        async with self._session.put(f"{self._url}/json/new?about:blank") as answer:
            found = await answer.json(content_type=None)
        async with self._session.ws_connect(
            found["webSocketDebuggerUrl"], max_msg_size=64 << 20
        ) as socket:
            page = Page(socket)
            reading = asyncio.create_task(page.read())
            try:
                for domain in ("Page", "Runtime", "Network", "Log"):
                    await page.do(f"{domain}.enable")
                await page.look_as(width=1280, height=800)
                yield page
            finally:
                async with self._session.get(f"{self._url}/json/close/{found['id']}"):
                    pass
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


@contextlib.asynccontextmanager
async def chromium(directory: Path) -> AsyncIterator[Browser]:
    """A browser with its profile in a directory, and no process of it afterwards."""
    assert CHROMIUM is not None, "the caller skips without Chromium"
    profile = directory / "profile"
    with short_path(directory) as short:  # Chromium has a socket in TMPDIR
        process = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "HOME": str(directory), "TMPDIR": str(short)},
            start_new_session=True,  # its helpers are of its group, and end with it
        )
        try:
            port = await _port(profile / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                yield Browser(session, f"http://127.0.0.1:{port}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    """The port that Chromium chose, which it writes into its profile."""
    async with asyncio.timeout(PATIENCE_S):
        while process.returncode is None:
            with contextlib.suppress(FileNotFoundError):
                if lines := await asyncio.to_thread(file.read_text):
                    return int(lines.splitlines()[0])
            await asyncio.sleep(LOOK_S)
    raise AssertionError(f"Chromium ended with {process.returncode}")
