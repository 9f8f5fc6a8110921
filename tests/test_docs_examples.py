"""What the documentation tells people to write, tried. Must not know what a page says in words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from agent.settings import AgentSettings
from agent.workers.runner import WorkerStatus
from agent.workers.spec import shim_spec
from common.clock import SystemClock
from common.messages import WorkerPhase
from common.model import JobId, Launcher, StopReason, WorkerRange
from common.settings import describe, load
from coordinator.cli.submit import SubmitFlags, job_spec
from coordinator.demo.nats_server import find_binary
from coordinator.service.settings import CoordinatorSettings
from tests.agent.worker_house import WorkerHouse, make_house, make_order

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
OPERATIONS = (DOCS / "operations.md").read_text()
CONTRACT = (DOCS / "job-contract.md").read_text()


def blocks(page: str) -> list[str]:
    """The indented blocks of a page, without their indent."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", page, re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE).strip() for block in found]


def block_with(page: str, word: str) -> str:
    """The one block of a page that has this line or beginning of a line."""
    [found] = [block for block in blocks(page) if re.search(rf"^{re.escape(word)}", block, re.M)]
    return found


def test_the_coordinator_s_example_is_a_settings_file(tmp_path: Path) -> None:
    """What an operator copies starts a coordinator, and keeps its own promise."""
    file = tmp_path / "coordinator.toml"
    file.write_text(block_with(OPERATIONS, "[[engine.services]]"))
    settings = load(file, CoordinatorSettings)
    [service] = settings.engine.services
    assert settings.engine.return_s(service) <= service.reclaim_deadline_s


def test_the_agents_examples_are_settings_files(tmp_path: Path) -> None:
    """A training node as it stands; an inference node with what the page adds to it."""
    training = block_with(OPERATIONS, 'home_pool = "training"')
    inference = training.replace('"training"', '"inference"')
    for text in (training, f"{inference}\n{block_with(OPERATIONS, '[server]')}"):
        file = tmp_path / "agent.toml"
        file.write_text(text)
        load(file, AgentSettings).check()


def test_jobs_of_a_node_as_it_is_installed_are_nobody_of_aryl_s(tmp_path: Path) -> None:
    """Who follows the page has the drop-in, the account and the setting, and no rule that lets the
    agent's account manage units."""
    file = tmp_path / "agent.toml"
    file.write_text(block_with(OPERATIONS, 'home_pool = "training"'))
    accounts = (ROOT / "systemd/aryl-agent.sysusers").read_text()
    assert f"\nu {load(file, AgentSettings).job_user} " in accounts
    [install] = [block for block in blocks(OPERATIONS) if "aryl-agent.sysusers" in block]
    assert "/etc/systemd/system/aryl-agent.service.d/jobs-apart.conf" in install
    assert "50-aryl-agent.rules" not in install


@pytest.mark.nats
def test_the_nats_example_is_a_configuration(tmp_path: Path) -> None:
    """The server itself accepts it, and every write is synced; TLS files are the site's own."""
    text = block_with(OPERATIONS, "jetstream")
    (tmp_path / "users.conf").write_text(block_with(OPERATIONS, "authorization {"))
    assert "sync_interval: always" in text
    file = tmp_path / "nats.conf"
    for added in ("", block_with(OPERATIONS, "cluster {")):
        config = re.sub(r"^ *tls .*$", "", f"{text}\n{added}", flags=re.MULTILINE)
        file.write_text(config)
        done = subprocess.run(
            [find_binary(), "-t", "-c", file],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr


def test_the_units_block_puts_every_file_where_the_units_look_for_it(tmp_path: Path) -> None:
    """Followed line by line on a machine that has only Debian's own directories. Owners are left
    out: the accounts of a node are not on every machine."""
    [block] = [block for block in blocks(OPERATIONS) if "aryl-agent.sysusers" in block]
    commands = [line for line in block.splitlines() if line.startswith("install ")]
    root, here = tmp_path / "root", tmp_path / "here"
    for name in ("usr/lib/sysusers.d", "etc/polkit-1/rules.d", "etc/systemd/system"):
        (root / name).mkdir(parents=True)
    here.mkdir()
    (here / "systemd").symlink_to(ROOT / "systemd")
    for name in re.findall(r"(?<= )[a-z]+\.(?:toml|conf|crt|key|nk)(?= )", block):
        (here / name).touch()
    for command in commands:
        words = command.partition("#")[0].partition("&&")[0]
        words = re.sub(r" -[og] \S+", "", words).replace(" /", f" {root}/")
        done = subprocess.run(
            ["sh", "-c", words], cwd=here, capture_output=True, text=True, check=False, timeout=30
        )
        assert done.returncode == 0, (command, done.stderr)
    units = [path.read_text() for path in (root / "etc/systemd/system").glob("*.service")]
    text = "\n".join(re.sub(r"^#.*$", "", unit, flags=re.MULTILINE) for unit in units)
    wanted = set(re.findall(r"/etc/aryl/[a-z./]+", text)) | {"/etc/aryl/nats.crt"}
    assert len(units) == 3
    assert len(wanted) == 7
    assert [path for path in sorted(wanted) if not (root / path[1:]).is_file()] == []
    assert (root / "etc/aryl").stat().st_mode & 0o777 == 0o755
    assert (root / "etc/aryl/credentials").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "kind", [AgentSettings, CoordinatorSettings], ids=lambda kind: kind.__name__
)
def test_every_setting_has_its_meaning(kind: type[msgspec.Struct]) -> None:
    """A key that nobody explains is a key that nobody dares to touch."""
    assert [row.key for row in describe(kind) if not row.meaning] == []


def test_the_contract_names_the_variables_that_a_worker_gets() -> None:
    """No more and no fewer, but for those of any login."""
    given = {"ARYL_CONTROL_SOCKET"}
    for launcher in Launcher:
        order = make_order("x")
        job = structs.replace(order.spec, launcher=launcher, workers=WorkerRange(min=2, max=2))
        order = structs.replace(order, spec=job, worker_count=2)
        spec = shim_spec(order, endpoint="n1:29400", directory="/w")
        given |= msgspec.convert(spec["env"], dict[str, str]).keys()
    given -= {"HOME", "PATH", "LANG", "USER", "LOGNAME"}
    environment = CONTRACT.split("\n## Environment\n")[1].split("\n### ")[0]
    table = [line for line in environment.splitlines() if line.startswith("| `")]
    named = {name for line in table for name in re.findall(r"`([A-Z_]+)`", line.split("|")[1])}
    assert named == given


def test_the_example_s_file_is_a_job() -> None:
    """It is submitted as the page says."""
    spec = job_spec(EXAMPLES / "train.toml", SubmitFlags(), (), here=ROOT)
    assert spec.is_elastic
    assert (EXAMPLES / spec.command[-1]).is_file()


def test_the_example_in_yaml_is_the_same_job(tmp_path: Path) -> None:
    """The page's YAML and the example's TOML say one thing."""
    file = tmp_path / "train.yaml"
    file.write_text(block_with(CONTRACT, "name: train"))
    toml, yaml = (
        job_spec(path, SubmitFlags(), (), here=ROOT) for path in (EXAMPLES / "train.toml", file)
    )
    assert yaml == toml


@pytest.fixture
async def house(tmp_path: Path) -> AsyncGenerator[WorkerHouse, None]:
    """A run directory with a runner."""
    async for house in make_house(tmp_path / "workers"):
        yield house


@pytest.mark.slow
async def test_the_example_goes_on_where_it_was_stopped(house: WorkerHouse, tmp_path: Path) -> None:
    """Asked to leave it saves what the shim can verify; the next attempt begins at that step."""
    saves = tmp_path / "saves"
    saves.mkdir()
    order = make_order(
        sys.executable,
        "-u",
        str(EXAMPLES / "train.py"),
        workdir=tmp_path,
        checkpoint=saves / "train.json",
    )
    first = await house.start(order)

    def has_begun(status: WorkerStatus) -> bool:
        return status.progress is not None and status.progress.step >= 1

    await house.until_status(first, has_begun, "its first step")
    await house.runner.stop(first, StopReason.PREEMPT, 10.0)
    ended = await house.until_status(
        first, lambda status: status.phase == WorkerPhase.EXITED, "its end"
    )
    assert ended.exit_code == 0
    assert ended.checkpoint is not None
    assert ended.checkpoint.is_verified
    key = msgspec.structs.replace(order.key, attempt=2)
    second = await house.start(msgspec.structs.replace(order, key=key))
    await house.until_said(second, f"attempt 2 begins at step {ended.checkpoint.step}\n")


@pytest.mark.slow
@pytest.mark.parametrize(("attempt", "says"), [(1, "begins at step 0\n"), (2, "leaves at step")])
async def test_the_example_can_be_submitted_again(
    house: WorkerHouse, tmp_path: Path, attempt: int, says: str
) -> None:
    """A checkpoint of a run that has ended is where another job does not begin, and where a later
    attempt of the same job has nothing left to do."""
    checkpoint = tmp_path / "saves" / "train.json"
    checkpoint.parent.mkdir()
    total_steps, _ = example_steps()
    checkpoint.write_text(json.dumps({"step": total_steps}))
    order = make_order(
        sys.executable,
        "-u",
        str(EXAMPLES / "train.py"),
        workdir=tmp_path,
        checkpoint=checkpoint,
    )
    key = msgspec.structs.replace(order.key, attempt=attempt)
    started = await house.start(msgspec.structs.replace(order, key=key))
    await house.until_said(started, says)


@pytest.mark.slow
async def test_a_lost_attempt_of_the_example_is_not_followed_by_the_end_of_another_run(
    house: WorkerHouse, tmp_path: Path
) -> None:
    """The first attempt is lost before it has done anything; the second has all of it to do."""
    checkpoint = tmp_path / "saves" / "train.json"
    checkpoint.parent.mkdir()
    total_steps, _ = example_steps()
    checkpoint.write_text(json.dumps({"step": total_steps}))
    order = make_order(
        sys.executable, "-u", str(EXAMPLES / "train.py"),
        workdir=tmp_path, checkpoint=checkpoint,
    )  # fmt: skip
    first = await house.start(order)
    await house.until_said(first, "attempt 1 begins at step 0\n")
    key = msgspec.structs.replace(order.key, attempt=2)
    second = await house.start(msgspec.structs.replace(order, key=key))
    await house.until_said(second, "attempt 2 begins at step 0\n")


@pytest.mark.slow
async def test_every_base_worker_of_the_example_leaves_by_itself(
    house: WorkerHouse, tmp_path: Path
) -> None:
    """A job has succeeded when all of them have exited with 0, and nobody tells them to leave. The
    checkpoint of a run that has ended is no end of this one."""
    checkpoint = tmp_path / "saves" / "train.json"
    checkpoint.parent.mkdir()
    total_steps, _ = example_steps()
    checkpoint.write_text(json.dumps({"step": total_steps}))
    orders = [
        make_order(
            sys.executable, "-u", str(EXAMPLES / "train.py"),
            workdir=tmp_path, checkpoint=checkpoint, workers=(2, 2), index=index,
        )
        for index in range(2)
    ]  # fmt: skip
    first = [await house.start(order) for order in orders]
    await house.until_said(first[0], "begins at step 0\n")
    await house.until_said(first[1], "stands by\n")
    saved = checkpoint.with_suffix(".new")
    saved.write_text(json.dumps({"step": total_steps - 1}))
    saved.replace(checkpoint)
    keys = [
        msgspec.structs.replace(order.key, job_id=JobId("job-2"), attempt=2) for order in orders
    ]
    told_at_s = SystemClock().now_s()
    for order, key in zip(orders, keys, strict=True):
        await house.start(msgspec.structs.replace(order, key=key))
    for key in (*keys, first[1]):
        ended = await house.until_status(
            key, lambda status: status.phase == WorkerPhase.EXITED, "its end"
        )
        assert ended.exit_code == 0, house.log(key)
        assert ended.stop_reason is None
        assert ended.ended_at_s is not None
        assert ended.ended_at_s > told_at_s


def example_steps() -> tuple[int, float]:
    """How many steps the example takes, and how long one is with one worker, seconds."""
    text = (EXAMPLES / "train.py").read_text()
    steps = re.search(r"^TOTAL_STEPS = (\d+)$", text, re.MULTILINE)
    step_s = re.search(r"^STEP_S = ([\d.]+)$", text, re.MULTILINE)
    assert steps
    assert step_s
    return int(steps[1]), float(step_s[1])


def test_the_example_lasts_while_somebody_reads_on() -> None:
    """Also with all its workers something is left to drain and to explain; what it declares is
    what it takes."""
    spec = job_spec(EXAMPLES / "train.toml", SubmitFlags(), (), here=ROOT)
    steps, step_s = example_steps()
    assert steps * step_s == spec.expected_runtime_s
    assert steps * step_s / spec.workers.max >= 240


def test_the_picture_stands_alone() -> None:
    """It is an SVG that loads nothing from elsewhere, and it shows a node on loan."""
    picture = DOCS / "picture.svg"
    text = "".join(ET.parse(picture).getroot().itertext())
    assert not re.search(r"url\(['\"]?http|href=['\"]http|@import|@font-face", picture.read_text())
    assert "on_loan" in text
