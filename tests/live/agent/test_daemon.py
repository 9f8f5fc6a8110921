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
from tests.agent.daemon_house import (
    KEY,
    WAITING,
    DaemonHouse,
    end,
    kill_9,
    lend,
    let_go,
    make_daemon_house,
    order,
    pids,
)
from tests.agent.worker_house import PATIENCE_S, is_alive
from tests.programs import ended

P, R = WorkerPhase, NodeRole
pytestmark = [pytest.mark.nats, pytest.mark.slow]
house = pytest.fixture(make_daemon_house)


async def waiting_worker(house: DaemonHouse) -> int:
    """Bring a worker to run that waits; its pid."""
    await house.want(R.TRAINING, order(house, WAITING))
    await house.until_phase(KEY, P.RUNNING)
    await house.until(lambda: bool(pids(house)), "the worker has begun")
    return pids(house)[0]


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
    house: DaemonHouse, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    """Before anything is touched: no state directory, no lock, no message."""
    config = house.config(**changes)
    status, text = ended(main, "--config", str(config), "--fake-nvml", str(house.fleet))
    assert status == 2
    assert "Traceback" not in text
    assert all(word in text for word in (*words, str(config)))
    assert not house.state_dir.exists()
    assert house.reports == []


async def test_checking_the_settings_starts_nothing(house: DaemonHouse) -> None:
    """`--check` is for whoever writes the file."""
    good = house.config(name="good")
    bad = house.config(name="bad", report_perod_s=1.0)
    assert await house.run("--check", "--config", str(good)) == (0, "")
    status, text = await house.run("--check", "--config", str(good), "--config", str(bad))
    assert status == 2
    assert "bad.toml" in text
    assert not house.state_dir.exists()


async def test_checking_reads_the_fake_fleet_too(house: DaemonHouse, tmp_path: Path) -> None:
    """A misspelt key among the pretend GPUs is found before anything is started."""
    fleet = tmp_path / "misspelt.toml"
    fleet.write_text("[[gpu]]\ncuont = 8\nmodel = 'H100'\nmemory_bytes = 1000\n")
    config = str(house.config())
    for check in (("--check",), ()):
        status, text = ended(main, *check, "--config", config, "--fake-nvml", str(fleet))
        assert status == 2
        assert "misspelt.toml" in text
        assert "cuont" in text
    assert await house.run("--check", "--config", config, "--fake-nvml", str(house.fleet)) == (
        0,
        "",
    )
    assert not house.state_dir.exists()


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
    house: DaemonHouse, changes: dict[str, Any], words: str
) -> None:
    """Plain text off loopback is refused, and so is what is no NATS URL; `--check` says the same.

    Nothing is touched before.
    """
    config = house.config(**changes)
    for check in (("--check",), ()):
        arguments = (*check, "--config", str(config), "--fake-nvml", str(house.fleet))
        status, text = ended(main, *arguments)
        assert status == 2
        assert "Traceback" not in text
        assert words in text
        assert str(config) in text
    assert not house.state_dir.exists()


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
    house: DaemonHouse, before: str, after: str, words: str
) -> None:
    """A page that can never be fetched is no server that is down, and is said at once."""
    config = house.config(inference=True)
    text = config.read_text()
    assert before in text
    config.write_text(text.replace(before, after))
    for check in (("--check",), ()):
        arguments = (*check, "--config", str(config), "--fake-nvml", str(house.fleet))
        status, said = ended(main, *arguments)
        assert (status, words in said) == (2, True), said
        assert str(config) in said
    assert not house.state_dir.exists()


async def test_a_file_of_fake_gpus_that_does_not_fit_ends_the_agent_with_2(
    house: DaemonHouse,
) -> None:
    """The file and the field are named."""
    house.fleet.write_text('[[gpu]]\ncout = 2\nmodel = "H100"\nmemory_bytes = 1\n')
    status, text = await house.run("--config", str(house.config()), "--fake-nvml", str(house.fleet))
    assert status == 2
    assert "Traceback" not in text
    assert "cout" in text or "count" in text


# --- a worker's life --------------------------------------------------------------------------


async def test_it_runs_a_real_worker_to_its_end_and_still_has_its_log(house: DaemonHouse) -> None:
    """On the GPU that it was given; its directory goes when its end is acknowledged."""
    await house.start(house.config())
    await house.want(R.TRAINING, order(house, 'echo "on $CUDA_VISIBLE_DEVICES"; exit 3'))
    await house.until_phase(KEY, P.EXITED)
    worker = house.worker(KEY)
    assert worker is not None
    assert (worker.exit_code, worker.error) == (3, "")
    text = f"on {house.gpu()}\n"
    assert (await house.log(KEY)).text == text
    await house.want(R.TRAINING, acknowledged=(KEY,))
    await house.until_phase(KEY, None)
    await house.until(lambda: not house.workers.directory(KEY).exists(), "its directory is gone")
    assert (await house.log(KEY)).text == text
    assert (await house.log(WorkerKey(JobId("job-9"), 1, 0))).error


async def test_kill_9_of_the_agent_during_a_job_loses_nothing(house: DaemonHouse) -> None:
    """The worker never notices; the next agent adopts that very process and reports its end."""
    config = house.config()
    agent = await house.start(config)
    pid = await waiting_worker(house)
    await kill_9(agent)
    assert is_alive(pid)
    await house.start(config)
    await house.until_phase(KEY, P.RUNNING)
    assert is_alive(pid)
    await let_go(house)
    await house.until_phase(KEY, P.EXITED)
    worker = house.worker(KEY)
    assert worker is not None
    assert (worker.exit_code, worker.error) == (5, "")
    assert pids(house) == [pid]


async def test_an_agent_that_sees_another_boot_id_ends_nothing_that_runs(
    house: DaemonHouse,
) -> None:
    """A living worker proves that the machine has not booted: the node goes on under the boot of
    its ledger, so that nobody starts the job elsewhere."""
    config = house.config()
    agent = await house.start(config)
    pid = await waiting_worker(house)
    await kill_9(agent)
    ledger = Ledger(house.state_dir)
    memory = ledger.load()
    assert memory is not None
    memory.boot_id = "the container's"
    await ledger.save(memory)
    ledger.close()
    seen = len(house.reports)
    await house.start(config)
    await house.until(lambda: len(house.reports) > seen + 2, "the next agent reports")
    report = house.reports[-1]
    assert report.boot_id == "the container's"
    assert [worker.phase for worker in report.workers] == [P.RUNNING]
    assert pids(house) == [pid]
    await let_go(house)
    await house.until_phase(KEY, P.EXITED)


async def test_a_job_that_ends_while_no_agent_runs_is_reported_by_the_next_one(
    house: DaemonHouse,
) -> None:
    """Exit status and log are on disk, in the care of its shim."""
    config = house.config()
    agent = await house.start(config)
    pid = await waiting_worker(house)
    await kill_9(agent)
    await let_go(house)
    assert not is_alive(pid)
    await house.start(config)
    await house.until_phase(KEY, P.EXITED)
    worker = house.worker(KEY)
    assert worker is not None
    assert worker.exit_code == 5
    assert (await house.log(KEY)).text == "bye\n"


async def test_a_worker_that_ends_while_nats_is_dead_is_told_until_it_is_acknowledged(
    house: DaemonHouse,
) -> None:
    """Nothing is told of that time but by a report of now: one that a client had kept would say
    what was, and count as told without being heard."""
    assert house.nats is not None
    await house.start(house.config())
    pid = await waiting_worker(house)
    await house.nats.kill()
    killed_at_s, before = house.clock.now_s(), len(house.reports)
    await let_go(house)
    assert not is_alive(pid)
    some_periods_s = 1.0
    await house.until(lambda: house.clock.now_s() > killed_at_s + some_periods_s, "time passes")
    back_at_s = house.clock.now_s()
    await house.nats.start()
    await house.until_phase(KEY, P.EXITED)
    await house.until(lambda: len(house.reports) > before + 3, "reports go on")
    worker = house.worker(KEY)
    assert worker is not None
    assert (worker.phase, worker.exit_code) == (P.EXITED, 5)
    assert all(report.sequence >= int(back_at_s * 1000) for report in house.reports[before:])
    await house.want(R.TRAINING, acknowledged=(KEY,))
    await house.until_phase(KEY, None)


async def test_sigterm_ends_the_agent_with_0_and_touches_no_worker(house: DaemonHouse) -> None:
    """An upgrade of the agent costs no job anything."""
    agent = await house.start(house.config())
    pid = await waiting_worker(house)
    assert await end(agent) == 0
    assert is_alive(pid)


async def test_a_relative_state_directory_is_as_good_as_any(house: DaemonHouse) -> None:
    """Shims run in a directory of their own; what they are told must not depend on it."""
    house.use_state_dir(house.directory / "here" / "state")
    await house.start(house.config(state_dir="here/state"), cwd=house.directory)
    await house.want(R.TRAINING, order(house, "exit 4"))
    await house.until_phase(KEY, P.EXITED)
    worker = house.worker(KEY)
    assert worker is not None
    assert (worker.exit_code, worker.error) == (4, "")


async def test_each_server_command_is_told_its_node_service_and_gpus(house: DaemonHouse) -> None:
    """By its environment: there is no shell that could put them into its words."""
    told = 'printf "%s %s %s" "$ARYL_NODE" "$ARYL_SERVICE" "$ARYL_GPU_UUIDS" >'
    config = house.config(inference=True)
    text = config.read_text()
    for command, does in (("start", "touch"), ("route", "touch"), ("unroute", "rm -f")):
        line = next(line for line in text.splitlines() if line.startswith(f"{command} = "))
        saying = json.dumps(f"{told} {house.mark(command)}; {does}")[1:-1]
        text = text.replace(line, line.replace(f'"{does}', f'"{saying}'))
    config.write_text(text)
    await house.start(config)
    await house.until_role(R.SERVING)
    await house.want(R.ON_LOAN, ttl_s=30.0)
    await house.until_role(R.ON_LOAN)
    gpus = ",".join(gpu.uuid for gpu in house.reports[-1].gpus)
    assert gpus.count(",") == 1
    for command in ("start", "route", "unroute"):
        assert house.mark(command).read_text() == f"n1 chat {gpus}"


# --- one agent per node -----------------------------------------------------------------------


async def test_a_second_agent_of_a_node_waits_until_the_first_is_gone(house: DaemonHouse) -> None:
    """Two never work on one node; the second takes over without anybody's help."""
    config = house.config()
    first = await house.start(config)
    arguments = ("--config", str(config), "--fake-nvml", str(house.fleet))
    second = await house.spawn(*arguments)
    assert second.stderr is not None
    async with SystemClock().timeout(PATIENCE_S):
        while b"another agent works on this node" not in await second.stderr.readline():
            pass
    await kill_9(first)
    seen = len(house.reports)
    await house.until(lambda: len(house.reports) > seen + 2, "the second one reports")
    assert second.returncode is None


async def test_a_state_directory_of_another_node_is_refused(house: DaemonHouse) -> None:
    """Two nodes that share one would run each other's jobs."""
    assert await end(await house.start(house.config())) == 0
    other = house.config(name="other", node="n2")
    status, text = await house.run("--config", str(other), "--fake-nvml", str(house.fleet))
    assert status == 2
    assert "state_dir" in text
    assert "n1" in text


# --- the way home -----------------------------------------------------------------------------


async def test_a_lent_node_whose_agent_and_coordinator_are_dead_comes_home(
    house: DaemonHouse,
) -> None:
    """Nobody is left but what the last renewal armed: the worker ends, the server is routed."""
    agent = await house.start(house.config(inference=True))
    pid = await lend(house, ttl_s=6.0)
    house.is_renewing = False
    await kill_9(agent)
    assert is_alive(pid)
    await house.until(lambda: house.mark("routed").exists(), "the node is routed again")
    assert house.mark("up").exists()
    assert not is_alive(pid)


async def test_go_home_leaves_a_node_that_is_not_away_as_it_is(house: DaemonHouse) -> None:
    """It says so and succeeds, so that nobody tries again."""
    config = house.config(inference=True)
    agent = await house.start(config)
    await house.until_role(R.SERVING)
    assert await end(agent) == 0
    house.mark("routed").unlink()
    arguments = ("--go-home", "--config", str(config), "--fake-nvml", str(house.fleet))
    status, text = await house.run(*arguments)
    assert status == 0
    assert "not away" in text
    assert not house.mark("routed").exists()


async def test_go_home_beside_a_living_agent_does_nothing_and_ends_with_2(
    house: DaemonHouse,
) -> None:
    """The agent brings its node home by itself; whoever called tries again later."""
    config = house.config(inference=True)
    await house.start(config)
    pid = await lend(house, ttl_s=30.0)
    arguments = ("--go-home", "--config", str(config), "--fake-nvml", str(house.fleet))
    status, text = await house.run(*arguments)
    assert status == 2
    assert "another agent" in text
    assert is_alive(pid)


async def test_go_home_before_the_lease_is_over_does_nothing_and_ends_with_2(
    house: DaemonHouse,
) -> None:
    """Then it brings the node home as soon as the lease is over, called again and again."""
    config = house.config(inference=True)
    agent = await house.start(config)
    pid = await lend(house, ttl_s=600.0)
    await kill_9(agent)
    arguments = ("--go-home", "--config", str(config), "--fake-nvml", str(house.fleet))
    status, text = await house.run(*arguments)
    assert status == 2
    assert "valid for another" in text
    assert is_alive(pid)
    memory = house.memory()
    assert memory is not None
    assert memory.role == R.ON_LOAN
