"""The dashboard of a live cell, as a person sees it: real processes, and a real browser."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from common.api import Cancel, Done, Jobs, ListJobs, ListNodes, Nodes, Operate
from common.model import JobState, NodeRole
from coordinator.demo.cell import COORDINATOR
from coordinator.demo.plan import CELL
from coordinator.plain_text import duration
from tests.cli.fake_cell import job_row, node_row
from tests.harness.live.cell import LiveHarness, running_cell
from tests.live.browser import CHROMIUM, Browser, chromium
from tests.web.test_server import cell as answers
from tests.web.test_server import site

pytestmark = [
    pytest.mark.nats,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    """One Chromium for all tests here."""
    async with chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[LiveHarness, str]]:
    """A cell that lends, and `aryl web` of it as a process of its own; the cell and the URL."""
    directory = tmp_path_factory.mktemp("cell")
    async with (
        running_cell(directory, training_nodes=1, inference_nodes=3, gpus_per_node=2) as found,
        served(found) as url,
    ):
        yield found, url


@contextlib.asynccontextmanager
async def served(harness: LiveHarness) -> AsyncIterator[str]:
    """`aryl web` of a cell, for the block; its URL as it prints it."""
    options = ("--nats-url", harness.cell.nats.url, "--cell", CELL)
    web = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator.cli.main", *options,
        "--tenant", "ops", "--user", "watch", "--timeout", "2", "web", "--listen", "127.0.0.1:0",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert web.stderr is not None
        line = (await web.stderr.readline()).decode()
        assert line.startswith("dashboard: http://127.0.0.1:"), line
        yield line.split()[1]
    finally:
        web.terminate()
        assert await web.wait() == 0, "SIGTERM ends it as Ctrl-C does"


async def test_a_person_sees_the_fleet_and_nothing_comes_from_elsewhere(
    harness: tuple[LiveHarness, str], browser: Browser
) -> None:
    """Every node with its role, at both sizes and in both schemes; all comes from its server."""
    cell, url = harness
    async with browser.page() as page:
        await page.open(url)
        nodes = (await cell.client.ask(ListNodes(), Nodes)).rows
        assert len(nodes) == 4
        shown = await page.until_text("[data-list=fleet]", *(row.node for row in nodes))
        assert "● serving" in shown
        assert "■ training" in shown
        await page.until_text("#link", "live")
        colors: set[str] = set()
        for width, height in ((1280, 800), (390, 844)):
            for scheme in ("light", "dark"):
                await page.look_as(width=width, height=height, scheme=scheme)
                assert await page.value("document.documentElement.scrollWidth <= innerWidth")
                colors.add(await page.value("getComputedStyle(document.body).backgroundColor"))
        assert len(colors) == 2
        assert {one for one in page.requests if not one.startswith(url)} == set()
        assert page.errors == []


async def test_lengths_of_time_read_as_in_the_terminal(
    harness: tuple[LiveHarness, str], browser: Browser
) -> None:
    """The browser counts on from instants, in the words of `aryl top`."""
    _, url = harness
    seconds = [0, 1, 59, 60, 61, 200, 3600, 3660, 7500, 86_400, 90_061, 349_200, -5]
    async with browser.page() as page:
        await page.open(url)
        await page.until_text("#link", "live")
        shown = {number: await page.value(f"duration({number})") for number in seconds}
    assert shown == {number: duration(number) for number in seconds}


async def test_a_person_sees_why_a_job_waits_and_how_a_node_comes_home(
    harness: tuple[LiveHarness, str], browser: Browser
) -> None:
    """A job waits for a reason, another runs on a lent node, which counts down when revoked."""
    cell, url = harness
    async with browser.page() as page:
        await page.open(url)
        big = await cell.submit(cell.shell("toobig", "true", worker_count=40, gpus=2))
        await page.until_text(".queue", "toobig", "2 GPUs", big)
        why = (await cell.job(big)).blockers[0]
        await page.until_text(".queue", why.split(";")[0])
        fills = await cell.submit(cell.training("fills", work_s=500, workers=(1, 1), gpus=2))
        lent = await cell.submit(cell.training("lent", work_s=500, workers=(1, 1), gpus=2))
        await cell.until_state(lent, JobState.RUNNING)
        (node,) = {*(await cell.job(lent)).nodes} or {""}
        await page.until_text("[data-list=out]", node, "on loan")
        await page.until_text("[data-list=running]", "lent", "running", node)
        await cell.client.ask(Operate(action="revoke_loan", target=node, reason="a test"), Done)
        await page.until_text("[data-list=going]", node, "left", "deadline 15s")
        assert await page.value(
            "parseFloat(document.querySelector('[data-list=going] rect.now').getAttribute('width'))"
        )
        home = await page.until_text("[data-list=home]", node, "returned in", "server_ready")
        assert "of 15s" in home
        await page.until_text("[data-list=events]", "home again", "revoke_loan")
        await cell.client.ask(Operate(action="freeze", reason="a test"), Done)
        await page.until_text("#alerts", "frozen", "aryl freeze --off")
        await cell.client.ask(Operate(action="thaw", reason="a test"), Done)
        for job_id in (big, fills, lent):
            await cell.client.ask(Cancel(job_id=job_id), Done)
        await page.until_text(".queue", "no job waits")
        assert page.errors == []


async def test_a_person_follows_a_job_by_the_keyboard_and_its_log_is_text(
    harness: tuple[LiveHarness, str], browser: Browser
) -> None:
    """From its link by Enter to its time line, saves and log; markup in the log is text."""
    cell, url = harness
    job = await cell.submit(cell.training("told", work_s=400, save_every_s=0.5))
    log = await cell.submit(cell.shell("markup", f"echo {shlex.quote(HOSTILE)}; sleep 300"))
    async with browser.page() as page:
        await page.open(url)
        await page.until_text("[data-list=running]", "told")
        await page.press("Tab", 9)
        assert await page.value("document.activeElement.className") == "skip"
        link = f"document.activeElement.getAttribute('href') == '/job/{job}'"
        for _ in range(300):
            if await page.value(link):
                break
            await page.press("Tab", 9)
        assert await page.value(link)
        await page.press("Enter", 13)
        await page.until_text(".title", "job told", "running")
        await page.until_text("figcaption", "1 stretch of running")
        await page.until_text("[data-text=facts]", "ops/test")

        async def has_saved() -> bool:
            return bool(await page.value("document.querySelectorAll('line.mark.save').length"))

        await cell.until("a save is on the time line", has_saved)
        await page.open(f"{url}job/{log}")
        await page.until_text("pre", HOSTILE)
        assert "owned" not in await page.value("document.title")
        assert page.errors == []


async def test_a_person_sees_that_no_coordinator_answers(
    harness: tuple[LiveHarness, str], browser: Browser
) -> None:
    """The page says so and keeps what it shows, and is live again with the next leader."""
    cell, url = harness
    async with browser.page() as page:
        await page.open(url)
        await page.until_text("#link", "live")
        await cell.cell.units.kill(COORDINATOR)
        await page.until_text("#link", "no coordinator answers", "old")
        assert "serving" in await page.text("[data-list=fleet]")
        cell.cell.start_coordinator("second")
        await page.until_text("#link", "live")


async def test_markup_in_any_text_of_the_cell_is_text(browser: Browser) -> None:
    """Whatever a job, a node or a reason is called, its characters are shown and nothing runs."""
    job = job_row(name=HOSTILE, state=JobState.PENDING, blockers=(HOSTILE,))
    changes = {
        ListJobs: Jobs(rows=(job,)),
        ListNodes: Nodes(rows=(node_row("t0", detail=HOSTILE, role=NodeRole.QUARANTINED),)),
    }
    async with site(answers(changes)) as here, browser.page() as page:
        await page.open(here.url)
        await page.until_text(".queue", HOSTILE)
        await page.until_text(".look-at", HOSTILE)
        assert await page.value("document.title") == "Aryl lab"
        assert page.errors == []


async def test_a_person_logs_in_with_the_token(browser: Browser) -> None:
    """A wrong token is refused in words; the right one shows the cell."""
    token = "0123456789abcdef0123"
    async with site(token=token) as here, browser.page() as page:
        await page.open(here.url)
        for given, selector, words in (
            ("wrong", ".alert", "not the token"),
            (token, "#link", "live"),
        ):
            await page.until_text("label", "Token of this dashboard")
            await page.value(f"document.getElementById('token').value = '{given}'; 0")
            await page.value("document.querySelector('button').click(); 0")
            await page.until_text(selector, words)
