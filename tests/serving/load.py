"""Requests to an OpenAI-compatible server at a rate that can change, each one accounted for."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import aiohttp
from msgspec import Struct

REQUEST_TIMEOUT_S = 120.0
TOKENS = (32, 128)
"""Of an answer; it takes a good part of a second, so that the requests in flight tell the load."""


class Figures(Struct, kw_only=True):
    """What became of the requests of one part of a run."""

    asked: int = 0
    served: int = 0
    streamed: int = 0
    failed: list[str] = []
    latencies_s: list[float] = []


class Load:
    """Poisson arrivals; every second request is streamed.

    Args:
        url: of the router.
        seed: of arrivals and lengths.
    """

    def __init__(self, url: str, *, model: str, seed: int) -> None:
        self.rate_per_s = 0.0
        self.figures = Figures()
        self._url = url
        self._model = model
        self._rng = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def set_rate(self, rate_per_s: float) -> None:
        """From now on."""
        self.rate_per_s = rate_per_s
        self._changed.set()

    def part(self) -> Figures:
        """Begin a new account; requests that are in flight are of the part that they end in."""
        figures, self.figures = self.figures, Figures()
        return figures

    async def run(self) -> None:
        """Ask until cancelled; what is in flight then is waited for."""
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            try:
                while True:
                    await self._pause()
                    task = asyncio.create_task(self._one(session))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            finally:
                await asyncio.gather(*self._tasks)

    async def _pause(self) -> None:
        """Until the next arrival; a rate that changes draws it anew."""
        while True:
            self._changed.clear()
            pause_s = self._rng.expovariate(self.rate_per_s) if self.rate_per_s else None
            try:
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
            except TimeoutError:
                return

    async def _one(self, session: aiohttp.ClientSession) -> None:
        is_streamed = self._rng.random() < 0.5
        tokens = self._rng.randint(*TOKENS)
        body = {
            "model": self._model,
            "prompt": "".join(self._rng.choices("abcdef ", k=20)),
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": is_streamed,
        }
        if is_streamed:
            body["stream_options"] = {"include_usage": True}
        began_s = time.monotonic()
        self.figures.asked += 1
        try:
            async with session.post(f"{self._url}/v1/completions", json=body) as answer:
                text = await answer.text()
                problem = _problem(answer.status, text, is_streamed, tokens)
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            self.figures.failed.append(problem)
            return
        self.figures.served += 1
        self.figures.streamed += is_streamed
        self.figures.latencies_s.append(time.monotonic() - began_s)


def _problem(status: int, text: str, is_streamed: bool, tokens: int) -> str:
    """Empty when all tokens came."""
    if status != 200:
        return f"{status}: {text[:200]}"
    if not is_streamed:
        usage: dict[str, Any] = json.loads(text)["usage"]
        return "" if usage["completion_tokens"] == tokens else f"cut: {usage}"
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        return f"stream cut after {len(lines)} events"
    usage = json.loads(lines[-2])["usage"]
    return "" if usage["completion_tokens"] == tokens else f"cut: {usage}"
