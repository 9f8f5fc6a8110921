"""The agent as it is shipped: a process of its own, a real nats-server, real workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent.daemon import main
from agent.storage.ledger import Ledger
from common.clock import SystemClock
from common.messages import WorkerPhase
from common.model import JobId, NodeRole, WorkerKey
from tests.harness.node.daemon import (
    KEY,
    WAITING,
    DaemonHarness,
    end,
    kill_9,
    lend,
    let_go,
    make_daemon_harness,
    order,
    pids,
)
from tests.harness.node.workers import PATIENCE_S, is_alive
from tests.harness.programs import ended

P, R = WorkerPhase, NodeRole
pytestmark = [pytest.mark.nats, pytest.mark.slow]
harness = pytest.fixture(make_daemon_harness)


async def waiting_worker(harness: DaemonHarness) -> int:
    """Bring a worker to run that waits; its pid."""
    await harness.want(R.TRAINING, order(harness, WAITING))
    await harness.until_phase(KEY, P.RUNNING)
    await harness.until(lambda: bool(pids(harness)), "the worker has begun")
    return pids(harness)[0]


# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"report_perod_s": 1.0}, ("report_perod_s", "report_period_s")),
        ({"step_period_s": -1.0}, ("step_period_s",)),
        ({"node": "two words"}, ("node",)),
        ({"state_dir": None}, ("state_dir",)),
        ({"home_pool": "inference"}, ("service", "inference")),
        ({"kept_logs_count": "many"}, ("kept_logs_count",)),
        ({"hung_after_s": 1.5}, ("hung_after_s", "at least 2")),
        ({"stranger_after_s": 61.0}, ("stranger_after_s", "at most 60")),
        ({"home_pool": "traning"}, ("home_pool", "'traning', expected one of training, inference")),
    ],
)
async def test_a_mistake_in_the_settings_names_the_field_and_ends_with_2(
    harness: DaemonHarness, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    """Before anything is touched: no state directory, no lock, no message."""
    config = harness.config(**changes)
    status, text = ended(main, "--config", str(config), "--fake-nvml", str(harness.fleet))
    assert status == 2
    assert "Traceback" not in text
    assert all(word in text for word in (*words, str(config)))
    assert not harness.state_dir.exists()
    assert harness.reports == []


async def test_checking_the_settings_starts_nothing(harness: DaemonHarness) -> None:
    """`--check` is for whoever writes the file."""
    good = harness.config(name="good")
    bad = harness.config(name="bad", report_perod_s=1.0)
    assert await harness.run("--check", "--config", str(good)) == (0, "")
    status, text = await harness.run("--check", "--config", str(good), "--config", str(bad))
    assert status == 2
    assert "bad.toml" in text
    assert not harness.state_dir.exists()


async def test_checking_reads_the_fake_fleet_too(harness: DaemonHarness, tmp_path: Path) -> None:
    """A misspelt key among the pretend GPUs is found before anything is started."""
    fleet = tmp_path / "misspelt.toml"
    fleet.write_text("[[gpu]]\ncuont = 8\nmodel = 'H100'\nmemory_bytes = 1000\n")
    config = str(harness.config())
    for check in (("--check",), ()):
        status, text = ended(main, *check, "--config", config, "--fake-nvml", str(fleet))
        assert status == 2
        assert "misspelt.toml" in text
        assert "cuont" in text
    assert await harness.run("--check", "--config", config, "--fake-nvml", str(harness.fleet)) == (
        0,
        "",
    )
    assert not harness.state_dir.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nats_url": "nats://192.0.2.1:4222"}, "insecure"),
        ({"nats_url": "http://127.0.0.1"}, "nats_url"),
        ({"nats_url": ""}, "nats_url: expected it or mqtt_url"),
        ({"mqtt_url": "mqtt://127.0.0.1"}, "nats_url: expected it or mqtt_url"),
        ({"nats_url": "", "mqtt_url": "mqtt://192.0.2.1:1883"}, "insecure"),
    ],
)
async def test_an_address_that_does_not_fit_ends_the_agent_with_2(
    harness: DaemonHarness, changes: dict[str, Any], words: str
) -> None:
    """Plain text off loopback is refused, and so is what is no NATS URL; `--check` says the same.

    Nothing is touched before.
    """
    config = harness.config(**changes)
    for check in (("--check",), ()):
        arguments = (*check, "--config", str(config), "--fake-nvml", str(harness.fleet))
        status, text = ended(main, *arguments)
        assert status == 2
        assert "Traceback" not in text
        assert words in text
        assert str(config) in text
    assert not harness.state_dir.exists()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('health_url = "http', 'health_url = "htp', "server.health_url: 'htp"),
        ('metrics_url = "http', 'metrics_url = "htp', "server.metrics_url: 'htp"),
        ("[server]", '[server]\nengine = "vlm"', "engine: 'vlm' is not known"),
        ("[server]", '[server]\nunits = ["vllm"]', "server.units: 'vllm' is no unit's name"),
        ("[server]", 'failure_rules = "/nowhere"\n[server]', "failure rules: /nowhere"),
    ],
)
async def test_checking_finds_what_an_agent_would_find_later_or_never(
    harness: DaemonHarness, before: str, after: str, words: str
) -> None:
    """A page that can never be fetched is no server that is down, and is said at once."""
    config = harness.config(inference=True)
    text = config.read_text()
    assert before in text
    config.write_text(text.replace(before, after))
    for check in (("--check",), ()):
        arguments = (*check, "--config", str(config), "--fake-nvml", str(harness.fleet))
        status, said = ended(main, *arguments)
        assert (status, words in said) == (2, True), said
        assert str(config) in said
    assert not harness.state_dir.exists()


async def test_a_file_of_fake_gpus_that_does_not_fit_ends_the_agent_with_2(
    harness: DaemonHarness,
) -> None:
    """The file and the field are named."""
    harness.fleet.write_text('[[gpu]]\ncout = 2\nmodel = "H100"\nmemory_bytes = 1\n')
    status, text = await harness.run(
        "--config", str(harness.config()), "--fake-nvml", str(harness.fleet)
    )
    assert status == 2
    assert "Traceback" not in text
    assert "cout" in text or "count" in text


# --- a worker's life --------------------------------------------------------------------------


async def test_it_runs_a_real_worker_to_its_end_and_still_has_its_log(
    harness: DaemonHarness,
) -> None:
    """On the GPU that it was given; its directory goes when its end is acknowledged."""
    await harness.start(harness.config())
    await harness.want(R.TRAINING, order(harness, 'echo "on $CUDA_VISIBLE_DEVICES"; exit 3'))
    await harness.until_phase(KEY, P.EXITED)
    worker = harness.worker(KEY)
    assert worker is not None
    assert (worker.exit_code, worker.error) == (3, "")
    text = f"on {harness.gpu()}\n"
    assert (await harness.log(KEY)).text == text
    await harness.want(R.TRAINING, acknowledged=(KEY,))
    await harness.until_phase(KEY, None)
    await harness.until(
        lambda: not harness.workers.directory(KEY).exists(), "its directory is gone"
    )
    assert (await harness.log(KEY)).text == text
    assert (await harness.log(WorkerKey(JobId("job-9"), 1, 0))).error


async def test_kill_9_of_the_agent_during_a_job_loses_nothing(harness: DaemonHarness) -> None:
    """The worker never notices; the next agent adopts that very process and reports its end."""
    config = harness.config()
    agent = await harness.start(config)
    pid = await waiting_worker(harness)
    await kill_9(agent)
    assert is_alive(pid)
    await harness.start(config)
    await harness.until_phase(KEY, P.RUNNING)
    assert is_alive(pid)
    await let_go(harness)
    await harness.until_phase(KEY, P.EXITED)
    worker = harness.worker(KEY)
    assert worker is not None
    assert (worker.exit_code, worker.error) == (5, "")
    assert pids(harness) == [pid]


async def test_an_agent_that_sees_another_boot_id_ends_nothing_that_runs(
    harness: DaemonHarness,
) -> None:
    """A living worker proves that the machine has not booted: the node goes on under the boot of
    its ledger, so that nobody starts the job elsewhere."""
    config = harness.config()
    agent = await harness.start(config)
    pid = await waiting_worker(harness)
    await kill_9(agent)
    ledger = Ledger(harness.state_dir)
    memory = ledger.load()
    assert memory is not None
    memory.boot_id = "the container's"
    await ledger.save(memory)
    ledger.close()
    seen = len(harness.reports)
    await harness.start(config)
    await harness.until(lambda: len(harness.reports) > seen + 2, "the next agent reports")
    report = harness.reports[-1]
    assert report.boot_id == "the container's"
    assert [worker.phase for worker in report.workers] == [P.RUNNING]
    assert pids(harness) == [pid]
    await let_go(harness)
    await harness.until_phase(KEY, P.EXITED)


async def test_a_job_that_ends_while_no_agent_runs_is_reported_by_the_next_one(
    harness: DaemonHarness,
) -> None:
    """Exit status and log are on disk, in the care of its shim."""
    config = harness.config()
    agent = await harness.start(config)
    pid = await waiting_worker(harness)
    await kill_9(agent)
    await let_go(harness)
    assert not is_alive(pid)
    await harness.start(config)
    await harness.until_phase(KEY, P.EXITED)
    worker = harness.worker(KEY)
    assert worker is not None
    assert worker.exit_code == 5
    assert (await harness.log(KEY)).text == "bye\n"


async def test_a_worker_that_ends_while_nats_is_dead_is_told_until_it_is_acknowledged(
    harness: DaemonHarness,
) -> None:
    """Nothing is told of that time but by a report of now: one that a client had kept would say
    what was, and count as told without being heard."""
    assert harness.nats is not None
    await harness.start(harness.config())
    pid = await waiting_worker(harness)
    await harness.nats.kill()
    killed_at_s, before = harness.clock.now_s(), len(harness.reports)
    await let_go(harness)
    assert not is_alive(pid)
    some_periods_s = 1.0
    await harness.until(lambda: harness.clock.now_s() > killed_at_s + some_periods_s, "time passes")
    back_at_s = harness.clock.now_s()
    await harness.nats.start()
    await harness.until_phase(KEY, P.EXITED)
    await harness.until(lambda: len(harness.reports) > before + 3, "reports go on")
    worker = harness.worker(KEY)
    assert worker is not None
    assert (worker.phase, worker.exit_code) == (P.EXITED, 5)
    assert all(report.sequence >= int(back_at_s * 1000) for report in harness.reports[before:])
    await harness.want(R.TRAINING, acknowledged=(KEY,))
    await harness.until_phase(KEY, None)


async def test_sigterm_ends_the_agent_with_0_and_touches_no_worker(harness: DaemonHarness) -> None:
    """An upgrade of the agent costs no job anything."""
    agent = await harness.start(harness.config())
    pid = await waiting_worker(harness)
    assert await end(agent) == 0
    assert is_alive(pid)


async def test_a_relative_state_directory_is_as_good_as_any(harness: DaemonHarness) -> None:
    """Shims run in a directory of their own; what they are told must not depend on it."""
    harness.use_state_dir(harness.directory / "here" / "state")
    await harness.start(harness.config(state_dir="here/state"), cwd=harness.directory)
    await harness.want(R.TRAINING, order(harness, "exit 4"))
    await harness.until_phase(KEY, P.EXITED)
    worker = harness.worker(KEY)
    assert worker is not None
    assert (worker.exit_code, worker.error) == (4, "")


async def test_each_server_command_is_told_its_node_service_and_gpus(
    harness: DaemonHarness,
) -> None:
    """By its environment: there is no shell that could put them into its words."""
    told = 'printf "%s %s %s" "$ARYL_NODE" "$ARYL_SERVICE" "$ARYL_GPU_UUIDS" >'
    config = harness.config(inference=True)
    text = config.read_text()
    for command, does in (("start", "touch"), ("route", "touch"), ("unroute", "rm -f")):
        line = next(line for line in text.splitlines() if line.startswith(f"{command} = "))
        saying = json.dumps(f"{told} {harness.mark(command)}; {does}")[1:-1]
        text = text.replace(line, line.replace(f'"{does}', f'"{saying}'))
    config.write_text(text)
    await harness.start(config)
    await harness.until_role(R.SERVING)
    await harness.want(R.ON_LOAN, ttl_s=30.0)
    await harness.until_role(R.ON_LOAN)
    gpus = ",".join(gpu.uuid for gpu in harness.reports[-1].gpus)
    assert gpus.count(",") == 1
    for command in ("start", "route", "unroute"):
        assert harness.mark(command).read_text() == f"n1 chat {gpus}"


# --- one agent per node -----------------------------------------------------------------------


async def test_a_second_agent_of_a_node_waits_until_the_first_is_gone(
    harness: DaemonHarness,
) -> None:
    """Two never work on one node; the second takes over without anybody's help."""
    config = harness.config()
    first = await harness.start(config)
    arguments = ("--config", str(config), "--fake-nvml", str(harness.fleet))
    second = await harness.spawn(*arguments)
    assert second.stderr is not None
    async with SystemClock().timeout(PATIENCE_S):
        while b"another agent works on this node" not in await second.stderr.readline():
            pass
    await kill_9(first)
    seen = len(harness.reports)
    await harness.until(lambda: len(harness.reports) > seen + 2, "the second one reports")
    assert second.returncode is None


async def test_a_state_directory_of_another_node_is_refused(harness: DaemonHarness) -> None:
    """Two nodes that share one would run each other's jobs."""
    assert await end(await harness.start(harness.config())) == 0
    other = harness.config(name="other", node="n2")
    status, text = await harness.run("--config", str(other), "--fake-nvml", str(harness.fleet))
    assert status == 2
    assert "state_dir" in text
    assert "n1" in text


# --- the way home -----------------------------------------------------------------------------


async def test_a_lent_node_whose_agent_and_coordinator_are_dead_comes_home(
    harness: DaemonHarness,
) -> None:
    """Nobody is left but what the last renewal armed: the worker ends, the server is routed."""
    agent = await harness.start(harness.config(inference=True))
    pid = await lend(harness, ttl_s=6.0)
    harness.is_renewing = False
    await kill_9(agent)
    assert is_alive(pid)
    await harness.until(lambda: harness.mark("routed").exists(), "the node is routed again")
    assert harness.mark("up").exists()
    assert not is_alive(pid)


async def test_go_home_leaves_a_node_that_is_not_away_as_it_is(harness: DaemonHarness) -> None:
    """It says so and succeeds, so that nobody tries again."""
    config = harness.config(inference=True)
    agent = await harness.start(config)
    await harness.until_role(R.SERVING)
    assert await end(agent) == 0
    harness.mark("routed").unlink()
    arguments = ("--go-home", "--config", str(config), "--fake-nvml", str(harness.fleet))
    status, text = await harness.run(*arguments)
    assert status == 0
    assert "not away" in text
    assert not harness.mark("routed").exists()


async def test_go_home_beside_a_living_agent_does_nothing_and_ends_with_2(
    harness: DaemonHarness,
) -> None:
    """The agent brings its node home by itself; whoever called tries again later."""
    config = harness.config(inference=True)
    await harness.start(config)
    pid = await lend(harness, ttl_s=30.0)
    arguments = ("--go-home", "--config", str(config), "--fake-nvml", str(harness.fleet))
    status, text = await harness.run(*arguments)
    assert status == 2
    assert "another agent" in text
    assert is_alive(pid)


async def test_go_home_before_the_lease_is_over_does_nothing_and_ends_with_2(
    harness: DaemonHarness,
) -> None:
    """Then it brings the node home as soon as the lease is over, called again and again."""
    config = harness.config(inference=True)
    agent = await harness.start(config)
    pid = await lend(harness, ttl_s=600.0)
    await kill_9(agent)
    arguments = ("--go-home", "--config", str(config), "--fake-nvml", str(harness.fleet))
    status, text = await harness.run(*arguments)
    assert status == 2
    assert "valid for another" in text
    assert is_alive(pid)
    memory = harness.memory()
    assert memory is not None
    assert memory.role == R.ON_LOAN
