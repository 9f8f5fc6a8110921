"""The dashboard's server over real sockets, with answers from a table behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from common.api import (
    ApiError,
    ApiErrorCode,
    Describe,
    Description,
    Events,
    GetEvents,
    GetLogs,
    GetStatus,
    Jobs,
    ListJobs,
    ListLoans,
    ListNodes,
    ListServices,
    Loans,
    Logs,
    Nodes,
    SaveRow,
    Services,
)
from common.clock import SystemClock
from common.model import JobState
from coordinator.client import Client
from coordinator.web.address import Address
from coordinator.web.guard import Guard
from coordinator.web.server import Dashboard, serving
from tests.cli.fake_cell import (
    FakeCell,
    job_row,
    loan_row,
    no_answer,
    node_row,
    service_row,
    status,
    story_row,
)

TOKEN = "0123456789abcdef0123"
HOSTILE = '<script>alert("x")</script>'


def cell(changes: dict[Any, Any] | None = None) -> FakeCell:
    """A small cell with hostile names in every free text."""
    job = job_row(name=HOSTILE, state=JobState.PENDING, blockers=(f"no room \x1b[31m{HOSTILE}",))
    answers: dict[Any, Any] = {
        GetStatus: status(),
        ListNodes: Nodes(rows=(node_row(detail=HOSTILE), node_row("t1"))),
        ListJobs: Jobs(rows=(job, job_row("jrun", name=HOSTILE))),
        ListServices: Services(rows=(service_row(),)),
        ListLoans: Loans(rows=(loan_row(reason=HOSTILE),)),
        GetEvents: Events(rows=(story_row(reason=HOSTILE),), last=1),
        GetLogs: Logs(text=f"\x1b[31m{HOSTILE}\x1b[0m\x07\n", node="t0", worker_index=0, attempt=1),
        Describe: Description(
            kind="job", name="jabc", job=job, why=(HOSTILE,), story=(story_row(reason=HOSTILE),),
            saves=(SaveRow(at_s=1.0, step=1, is_verified=True),),
        ),
    }  # fmt: skip
    return FakeCell(answers | (changes or {}))


class Site:
    """A served dashboard and a client of it."""

    def __init__(self, url: str, http: aiohttp.ClientSession, fake: FakeCell) -> None:
        self.url = url.rstrip("/")
        self.http = http
        self.fake = fake

    @contextlib.asynccontextmanager
    async def live(self, path: str = "/live", **headers: str) -> AsyncIterator[Stream]:
        """The updates of a page."""
        async with self.http.get(self.url + path, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            yield Stream(answer)


class Stream:
    """Server-sent events as a browser reads them."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self.last_id = ""

    async def next(self) -> dict[str, Any]:
        """The changes of the next update."""
        data = ""
        async with asyncio.timeout(20):
            while True:
                line = (await self._answer.content.readline()).decode().rstrip("\n")
                if line.startswith("id: "):
                    self.last_id = line[4:]
                elif line.startswith("data: "):
                    data += line[6:]
                elif not line and data:
                    found: dict[str, Any] = json.loads(data)["changes"]
                    return found


@contextlib.asynccontextmanager
async def site(fake: FakeCell | None = None, *, token: str | None = None) -> AsyncIterator[Site]:
    fake = fake or cell()
    client = Client(fake, cell="lab", tenant="ops", user="ada")
    dashboard = Dashboard(client, cell="lab", guard=Guard(token=token), clock=SystemClock())
    jar = aiohttp.CookieJar(unsafe=True)  # of an address, as here
    async with (
        serving(dashboard, Address(port=0)) as url,
        aiohttp.ClientSession(cookie_jar=jar, read_bufsize=1 << 22) as http,
    ):
        yield Site(url, http, fake)


async def test_names_reasons_and_logs_are_text() -> None:
    """A job called `<script>` is text on every page, and control codes are visible characters."""
    async with site() as here:
        for path in ("/live", "/live/job/jabc"):
            async with here.live(path) as stream:
                shown = json.dumps(await stream.next(), ensure_ascii=False)
            assert "&lt;script&gt;" in shown
            assert "<script" not in shown
            assert "\\u001b" not in shown
            assert "\x1b" not in shown


async def test_every_answer_has_the_headers_that_keep_others_out() -> None:
    """Pages, files, streams, refusals and errors; and nothing but the login form is posted."""
    async with site() as here:
        for path in ("/", "/live", "/static/dashboard.js", "/login", "/job/j1", "/none"):
            async with here.http.get(here.url + path) as answer:
                assert answer.headers["X-Content-Type-Options"] == "nosniff", path
                assert "default-src 'self'" in answer.headers["Content-Security-Policy"], path
        async with here.http.get(here.url, headers={"Host": "evil.example"}) as answer:
            assert answer.status == 421
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        for method in ("POST", "PUT", "DELETE"):
            async with here.http.request(method, f"{here.url}/live") as answer:
                assert answer.status == 405
        for path in ("/job/%3Cscript%3E", "/thing/x", "/static/..%2Fserver.py"):
            async with here.http.get(here.url + path) as answer:
                assert answer.status == 404, path


async def test_a_token_is_asked_for_and_a_login_lets_a_browser_in() -> None:
    """Without it nothing of the cell is shown; the cookie is no script's and of this site alone."""
    async with site(token=TOKEN) as here:
        async with here.http.get(f"{here.url}/live") as answer:
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        async with here.live("/live", Authorization=f"Bearer {TOKEN}") as stream:
            assert await stream.next()
        async with here.http.get(here.url, headers={"Accept": "text/html"}) as answer:
            assert answer.url.path == "/login"
        async with here.http.post(f"{here.url}/login", data={"token": TOKEN[:-1]}) as answer:
            assert answer.status == 403
            assert TOKEN[:-1] not in await answer.text()
        async with here.http.post(
            f"{here.url}/login", data={"token": TOKEN}, allow_redirects=False
        ) as answer:
            cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=Strict" in cookie
            assert TOKEN not in cookie
        async with here.live() as stream:
            assert await stream.next()


async def test_a_browser_that_comes_back_gets_only_what_changed() -> None:
    """By the id of its last update; one of another server gets everything."""
    async with site() as here, here.live() as watching:
        first = await watching.next()
        assert first["texts"]["count-queue"] == "1"
        async with here.live("/live", **{"Last-Event-ID": watching.last_id}) as again:
            assert "count-queue" not in (await again.next())["texts"]
        async with here.live("/live", **{"Last-Event-ID": "other.5"}) as other:
            assert (await other.next())["texts"]["count-queue"] == "1"


async def test_without_a_coordinator_the_page_keeps_what_it_shows() -> None:
    """It says since when no coordinator answers, how old the page is, and lives again after."""
    answers = [status(), no_answer(), no_answer(), status(policy="afs")]
    async with site(cell({GetStatus: answers})) as here, here.live() as stream:
        assert "live" in (await stream.next())["texts"]["link"]
        away = (await stream.next())["texts"]["link"]
        assert "no coordinator answers" in away
        assert "old" in away
        again: dict[str, str] = {}
        while "link" not in again:
            update = await stream.next()
            again = update["texts"]
            assert update["lists"] == []  # nothing is taken off the page meanwhile
        assert "live" in again["link"]
        assert "afs" in again["status"]


async def test_a_name_that_is_unknown_is_said() -> None:
    """The coordinator's own words stand where the link's state is."""
    unknown = ApiError(code=ApiErrorCode.NOT_FOUND, message=f"no job {HOSTILE}", field="job")
    async with site(cell({Describe: unknown})) as here, here.live("/live/job/j1") as stream:
        assert "no job &lt;script&gt;" in (await stream.next())["texts"]["link"]


@pytest.mark.parametrize("count", [3, 100])
async def test_a_large_fleet_has_small_tiles(count: int) -> None:
    """Up to some sixty nodes a tile shows its words; of more, only a sign, a name and the GPUs.

    The parts have other names then: a browser that is there keeps no part of the other form.
    """
    rows = tuple(node_row(f"t{number}") for number in range(count))
    async with site(cell({ListNodes: Nodes(rows=rows)})) as here, here.live() as stream:
        lists = {place: items for place, _, items in (await stream.next())["lists"]}
    key = "training-compact" if count > 60 else "training"
    assert len(lists[f"nodes-{key}"]) == count
    assert list(lists["fleet"]) == [key]
    assert ('class="tiles compact"' in lists["fleet"][key]) == (count > 60)
    assert ("8/8 held" in lists[f"nodes-{key}"]["t0"]) == (count <= 60)
