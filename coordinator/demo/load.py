"""An open-loop client of one service: requests arrive as in the trace, whatever the answers are.

The client sees one URL, as users do. It sends the next request on time even if the service is slow.
Every request that is not answered with 200 counts as refused.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
from msgspec import Struct

from common.errors import ConfigError
from coordinator.demo.plan import ANSWER_TIMEOUT_S
from coordinator.demo.serving import set_up_log, stop_event, write_json
from coordinator.demo.traces import LOAD_FACTOR, find, ratios, read_load
from coordinator.workloads.records import LoadSeries

log = logging.getLogger(__name__)

STATS_PERIOD_S = 1.0
RECENT = 1000
"""The percentiles cover this many latencies, the last ones."""

LAST_S = 10.0
"""How long the end waits for answers under way."""


class LoadSettings(Struct, frozen=True, kw_only=True):
    """One driver.

    speed: trace seconds of load per second.
    peak_req_per_s: real rate where the trace is highest.
    cycles: how often the slice is played; 0: until stopped.
    most_in_flight: a bound on this process, far above what a working service leaves open; requests
        beyond it count as refused.
    """

    router_url: str
    speed: float
    peak_req_per_s: float
    seed: int = 1
    cycles: int = 0
    most_in_flight: int = 1000
    timeout_s: float = ANSWER_TIMEOUT_S


def arrivals(
    load: LoadSeries, *, speed: float, peak_req_per_s: float, seed: int, cycles: int = 1
) -> Iterator[float]:
    """Instants of a Poisson process whose rate follows the slice, in real seconds from its start.

    By inversion: unit exponentials are laid end to end along the integral of the rate (Cinlar,
    Introduction to Stochastic Processes, 1975, chapter 4.7), so no draw is thrown away.
    """
    rng = random.Random(seed)
    step_s = load.step_s / speed
    shares = ratios(load)
    missing = rng.expovariate(1.0)
    step = 0
    while cycles == 0 or step < cycles * len(shares):
        rate_per_s = shares[step % len(shares)] * peak_req_per_s
        at_s = step * step_s
        left = rate_per_s * step_s
        while missing <= left:
            at_s += missing / rate_per_s
            left -= missing
            yield at_s
            missing = rng.expovariate(1.0)
        missing -= left
        step += 1


class LoadDriver:
    """Sends, counts, writes its figures."""

    def __init__(
        self, settings: LoadSettings, load: LoadSeries, *, stats_path: Path | None = None
    ) -> None:
        self._settings = settings
        self._load = load
        self._stats_path = stats_path
        self._latencies_s: deque[float] = deque(maxlen=RECENT)
        self._max_s = 0.0
        self._started_at_s = 0.0
        self.sent_total = 0
        self.ok_total = 0
        self.refused_total = 0
        self.in_flight = 0

    def stats(self, *, is_finished: bool = False) -> dict[str, object]:
        """The figures so far; seconds and requests per second; latencies of the last thousand."""
        elapsed_s = asyncio.get_running_loop().time() - self._started_at_s
        trace_t_s = (elapsed_s * self._settings.speed) % self._load.length_s
        ratio = ratios(self._load)[int(trace_t_s // self._load.step_s)]
        ordered = sorted(self._latencies_s)
        return {
            "sent_total": self.sent_total,
            "ok_total": self.ok_total,
            "refused_total": self.refused_total,
            "in_flight": self.in_flight,
            "offered_req_per_s": ratio * self._settings.peak_req_per_s,
            "latency_p50_s": percentile(ordered, 0.5),
            "latency_p99_s": percentile(ordered, 0.99),
            "latency_max_s": self._max_s,
            "elapsed_s": elapsed_s,
            "trace_t_s": trace_t_s,
            "is_finished": is_finished,
        }

    async def run(self, stop: asyncio.Event) -> None:
        """Play the slice until its end or `stop`; then wait for the answers under way."""
        self._started_at_s = asyncio.get_running_loop().time()
        timeout = ClientTimeout(total=self._settings.timeout_s)
        async with (
            ClientSession(connector=TCPConnector(limit=0), timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            writing = group.create_task(self._write_stats(), name="stats")
            sent = await self._play(session, stop)
            if sent:
                _, late = await asyncio.wait(sent, timeout=LAST_S)
                for request in late:
                    request.cancel()
                await asyncio.gather(*late, return_exceptions=True)
            writing.cancel()
        self._write(is_finished=True)

    async def _play(self, session: ClientSession, stop: asyncio.Event) -> set[asyncio.Task[None]]:
        """Send each request when it is due; the ones that are not answered yet."""
        loop = asyncio.get_running_loop()
        sent: set[asyncio.Task[None]] = set()
        stopping = asyncio.ensure_future(stop.wait())
        instants = arrivals(
            self._load,
            speed=self._settings.speed,
            peak_req_per_s=self._settings.peak_req_per_s,
            seed=self._settings.seed,
            cycles=self._settings.cycles,
        )
        try:
            for at_s in instants:
                delay_s = self._started_at_s + at_s - loop.time()
                # Even when it is late: a driver that cannot keep up must still read its answers,
                # and its stop.
                await asyncio.wait((stopping,), timeout=max(0.0, delay_s))
                if stop.is_set():
                    break
                self.sent_total += 1
                # Not `in_flight`: a request counts there only once it has begun to run.
                if len(sent) >= self._settings.most_in_flight:
                    self.refused_total += 1
                    continue
                request = asyncio.create_task(self._request(session), name="request")
                sent.add(request)
                request.add_done_callback(sent.discard)
        finally:
            stopping.cancel()
        return sent

    async def _request(self, session: ClientSession) -> None:
        """One request; anything but 200 in time is a refusal."""
        loop = asyncio.get_running_loop()
        url = f"{self._settings.router_url}/v1/completions"
        self.in_flight += 1
        begun_at_s = loop.time()
        is_served = False
        try:
            async with session.post(url, json={"prompt": "demo", "max_tokens": 64}) as reply:
                await reply.read()
                is_served = reply.status == 200
        except (ClientError, OSError, TimeoutError) as error:
            log.debug("refused error=%s", type(error).__name__)
        finally:
            self.in_flight -= 1
            if is_served:
                latency_s = loop.time() - begun_at_s
                self._latencies_s.append(latency_s)
                self._max_s = max(self._max_s, latency_s)
                self.ok_total += 1
            else:
                self.refused_total += 1

    async def _write_stats(self) -> None:
        while True:
            self._write()
            await asyncio.sleep(STATS_PERIOD_S)

    def _write(self, *, is_finished: bool = False) -> None:
        if self._stats_path is not None:
            write_json(self._stats_path, self.stats(is_finished=is_finished))


def percentile(ordered: Sequence[float], ratio: float) -> float | None:
    """The nearest-rank percentile of sorted values; None of none."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(ratio * len(ordered)) - 1)]


async def run(settings: LoadSettings, load: LoadSeries, *, stats_path: Path | None) -> LoadDriver:
    """Drive until the slice or SIGTERM ends it; the driver with its counts."""
    stop = stop_event()
    driver = LoadDriver(settings, load, stats_path=stats_path)
    await driver.run(stop)
    return driver


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m coordinator.demo.load`; 2 when the slice cannot be used."""
    parser = argparse.ArgumentParser(prog="coordinator.demo.load", description=__doc__)
    parser.add_argument("--router", required=True, help="http://host:port")
    parser.add_argument("--slice", help="load trace instead of the packaged one")
    parser.add_argument("--model", default="m-small", help="series of that trace")
    parser.add_argument("--speed", type=float, default=120.0, help="speed of the jobs' clock")
    parser.add_argument(
        "--load-factor", type=float, default=LOAD_FACTOR, help="ratio of load to jobs"
    )
    parser.add_argument("--peak-req-per-s", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cycles", type=int, default=0, help="number of cycles; 0: until stopped")
    parser.add_argument("--stats", type=Path, help="JSON file for figures, written every second")
    given = parser.parse_args(arguments)
    if min(given.speed, given.load_factor, given.peak_req_per_s) <= 0 or given.cycles < 0:
        parser.error(
            "--speed, --load-factor and --peak-req-per-s must be above 0, --cycles not below"
        )
    set_up_log()
    try:
        load = read_load(find(given.slice) if given.slice else None, model=given.model)
    except ConfigError as error:
        log.error("%s", error)
        return 2
    settings = LoadSettings(
        router_url=given.router.rstrip("/"),
        speed=given.speed * given.load_factor,
        peak_req_per_s=given.peak_req_per_s,
        seed=given.seed,
        cycles=given.cycles,
    )
    driver = asyncio.run(run(settings, load, stats_path=given.stats))
    log.info(
        "stopped sent=%d ok=%d refused=%d",
        driver.sent_total,
        driver.ok_total,
        driver.refused_total,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
