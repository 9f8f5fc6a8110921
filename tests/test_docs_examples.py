"""What the documentation tells people to write, tried. Must not know what a page says in words."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
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
from common.model import ArraySpec, JobId, Launcher, StopReason, WorkerRange
from common.settings import describe, load
from coordinator.cli.submit import SubmitFlags, job_spec
from coordinator.demo.nats_server import find_binary
from coordinator.engine.jobs import array_tasks, numbers
from coordinator.engine.state.array_entry import ArrayEntry
from coordinator.service.settings import CoordinatorSettings
from tests.harness.node.workers import WorkerHarness, make_harness, make_order
from tests.tables import each_row

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
INSTALL = (DOCS / "install.md").read_text()
REFERENCE = (DOCS / "reference.md").read_text()
INFERENCE_SERVERS = (DOCS / "inference-servers.md").read_text()
CONTRACT = (DOCS / "job-contract.md").read_text()
FENCED = re.compile(r"^( *)```\w+\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
STUBS = ("groupadd", "systemctl", "systemd-sysusers", "aryl-agent", "aryl-coordinator")
"""Commands of the install page that change more than files, or look at the site's own machines."""


def blocks(page: str) -> list[str]:
    """The indented and the fenced blocks of a page, without their indent."""
    indented = re.findall(r"(?:^    .*\n|^\n(?=    ))+", re.sub(FENCED, "", page), re.MULTILINE)
    found = [*indented, *(block for _, block in re.findall(FENCED, page))]
    return [textwrap.dedent(block).strip() for block in found]


def block_with(page: str, word: str) -> str:
    """The one block of a page that has this line or beginning of a line."""
    [found] = [block for block in blocks(page) if re.search(rf"^{re.escape(word)}", block, re.M)]
    return found


def section_of(page: str, heading: str) -> str:
    """What stands below a heading, down to the next one of its rank."""
    [section] = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return str(section)


def file_of(page: str, path: str) -> str:
    """The text that the one block with this here-document writes to `path`."""
    text = "\n".join(blocks(page))
    [found] = re.findall(rf"/dev/stdin {re.escape(path)} <<'EOF'\n(.*?)^EOF$", text, re.M | re.S)
    return str(found)


def test_the_coordinator_s_example_is_a_settings_file(tmp_path: Path) -> None:
    """What an operator copies starts a coordinator, and keeps its own promise."""
    file = tmp_path / "coordinator.toml"
    file.write_text(file_of(INSTALL, "/etc/aryl/coordinator.toml"))
    settings = load(file, CoordinatorSettings)
    [service] = settings.engine.services
    assert settings.engine.return_s(service) <= service.reclaim_deadline_s


@each_row("added", ["", "[server.metrics]", "[[server.instances]]", "[server.access]"])
@each_row("machine", ["A training node", "An inference node"])
def test_the_agents_examples_are_settings_files(tmp_path: Path, machine: str, added: str) -> None:
    """Each node's file as it stands; an inference node's with what a page adds to it."""
    text = file_of(section_of(INSTALL, machine), "/etc/aryl/agent.toml")
    if added:
        if "[server]" not in text:
            return
        text += block_with(INFERENCE_SERVERS, added)
    if added == "[[server.instances]]":
        text = re.sub(r"^(?:health|metrics)_url = .*\n", "", text, count=2, flags=re.MULTILINE)
    file = tmp_path / "agent.toml"
    file.write_text(text)
    load(file, AgentSettings).check()


@pytest.mark.parametrize("machine", ["A training node", "An inference node"])
def test_jobs_of_a_node_as_it_is_installed_are_nobody_of_aryl_s(
    tmp_path: Path, machine: str
) -> None:
    """Who follows the page has the drop-in, the account and the setting, and no rule that lets the
    agent's account manage units."""
    section = section_of(INSTALL, machine)
    file = tmp_path / "agent.toml"
    file.write_text(file_of(section, "/etc/aryl/agent.toml"))
    accounts = (ROOT / "systemd/aryl-agent.sysusers").read_text()
    assert f"\nu {load(file, AgentSettings).job_user} " in accounts
    [install] = [block for block in blocks(section) if "aryl-agent.sysusers" in block]
    assert "/etc/systemd/system/aryl-agent.service.d/jobs-apart.conf" in install
    assert "50-aryl-agent.rules" not in install


@pytest.mark.nats
def test_the_nats_example_is_a_configuration(tmp_path: Path) -> None:
    """The server itself accepts it, and every write is synced; TLS files are the site's own."""
    text = file_of(INSTALL, "/etc/aryl/nats.conf")
    (tmp_path / "users.conf").write_text(block_with(REFERENCE, "authorization {"))
    assert "sync_interval: always" in text
    file = tmp_path / "nats.conf"
    for added in ("", block_with(INSTALL, "cluster {")):
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


def paste(section: str, root: Path) -> None:
    """Run the blocks of a section as one shell would, with `root` in place of `/`. Owners are left
    out: the accounts of a node are not on every machine."""
    programs = root / "stubs"
    programs.mkdir()
    for name in STUBS:
        (programs / name).write_text("#!/bin/sh\n")
    (programs / "aryl").write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m coordinator.cli.main "$@"\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    script = "\n".join(block for block in blocks(section) if not block.startswith("sed "))
    script = re.sub(r" -[og] \S+", "", script)
    script = re.sub(r"(?<=[ >])/(?=opt/|etc/|usr/lib/|var/lib/|root/)", f"{root}/", script)
    done = subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=root,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
@pytest.mark.parametrize(
    ("machine", "count"),
    [
        ("The NATS machine", 4),
        ("The coordinator machine", 1),
        ("A training node", 1),
        ("An inference node", 1),
    ],
)
def test_a_pasted_machine_has_every_file_where_its_unit_looks_for_it(
    tmp_path: Path, machine: str, count: int
) -> None:
    """Each path below /etc/aryl that unit or configuration names is there, but for credentials of
    which a drop-in empties the list."""
    for name in ("usr/lib/sysusers.d", "etc/systemd/system", "opt/aryl", "root"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "opt/aryl/src").symlink_to(ROOT)
    paste(section_of(INSTALL, machine), tmp_path)
    system = tmp_path / "etc/systemd/system"
    [unit] = system.glob("*.service")
    drop_ins = [path.read_text() for path in system.glob("*.service.d/*.conf")]
    text = re.sub(r"^#.*$", "", unit.read_text(), flags=re.MULTILINE)
    if any("\nLoadCredential=\n" in drop_in for drop_in in drop_ins):
        text = re.sub(r"^LoadCredential=.*$", "", text, flags=re.MULTILINE)
    config = tmp_path / "etc/aryl/nats.conf"
    wanted = set(re.findall(r"/etc/aryl/[a-z./]+", text))
    if config.exists():
        users = config.parent / "users.conf"
        assert "jetstream" in config.read_text()
        assert 'user: "chat-3"' in users.read_text()
        wanted |= {"/etc/aryl/users.conf", *re.findall(r"/etc/aryl/[a-z./]+", config.read_text())}
        wanted = {path.replace(str(tmp_path), "") for path in wanted}
    assert len(wanted) == count, wanted
    assert [path for path in sorted(wanted) if not (tmp_path / path[1:]).is_file()] == []
    assert (tmp_path / "etc/aryl").stat().st_mode & 0o777 == 0o755
    for secret in ("nats.key", "agent.toml"):
        for path in (tmp_path / "etc/aryl").rglob(secret):
            assert path.stat().st_mode & 0o777 == 0o600
    for path in (tmp_path / "etc/aryl").glob("credentials"):
        assert path.stat().st_mode & 0o777 == 0o700


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
        job = numbers.ordered(job, 1)
        order = structs.replace(order, spec=job, worker_count=2)
        spec = shim_spec(order, endpoint="n1:29400", directory="/w")
        given |= msgspec.convert(spec["env"], dict[str, str]).keys()
    job = structs.replace(make_order("x").spec, array=ArraySpec(indices="0-9"))
    array = ArrayEntry(array_id=JobId("x"), spec=job, tenant="t", user="u", submitted_at_s=0.0)
    given |= array_tasks.task_spec(array, 0).env.keys()
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
async def harness(tmp_path: Path) -> AsyncGenerator[WorkerHarness, None]:
    """A run directory with a runner."""
    async for harness in make_harness(tmp_path / "workers"):
        yield harness


@pytest.mark.slow
async def test_the_example_goes_on_where_it_was_stopped(
    harness: WorkerHarness, tmp_path: Path
) -> None:
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
    first = await harness.start(order)

    def has_begun(status: WorkerStatus) -> bool:
        return status.progress is not None and status.progress.step >= 1

    await harness.until_status(first, has_begun, "its first step")
    await harness.runner.stop(first, StopReason.PREEMPT, 10.0)
    ended = await harness.until_status(
        first, lambda status: status.phase == WorkerPhase.EXITED, "its end"
    )
    assert ended.exit_code == 0
    assert ended.checkpoint is not None
    assert ended.checkpoint.is_verified
    key = msgspec.structs.replace(order.key, attempt=2)
    second = await harness.start(msgspec.structs.replace(order, key=key))
    await harness.until_said(second, f"attempt 2 begins at step {ended.checkpoint.step}\n")


@pytest.mark.slow
@pytest.mark.parametrize(("attempt", "says"), [(1, "begins at step 0\n"), (2, "leaves at step")])
async def test_the_example_can_be_submitted_again(
    harness: WorkerHarness, tmp_path: Path, attempt: int, says: str
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
    started = await harness.start(msgspec.structs.replace(order, key=key))
    await harness.until_said(started, says)


@pytest.mark.slow
async def test_a_lost_attempt_of_the_example_is_not_followed_by_the_end_of_another_run(
    harness: WorkerHarness, tmp_path: Path
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
    first = await harness.start(order)
    await harness.until_said(first, "attempt 1 begins at step 0\n")
    key = msgspec.structs.replace(order.key, attempt=2)
    second = await harness.start(msgspec.structs.replace(order, key=key))
    await harness.until_said(second, "attempt 2 begins at step 0\n")


@pytest.mark.slow
async def test_every_base_worker_of_the_example_leaves_by_itself(
    harness: WorkerHarness, tmp_path: Path
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
    first = [await harness.start(order) for order in orders]
    await harness.until_said(first[0], "begins at step 0\n")
    await harness.until_said(first[1], "stands by\n")
    saved = checkpoint.with_suffix(".new")
    saved.write_text(json.dumps({"step": total_steps - 1}))
    saved.replace(checkpoint)
    keys = [
        msgspec.structs.replace(order.key, job_id=JobId("job-2"), attempt=2) for order in orders
    ]
    told_at_s = SystemClock().now_s()
    for order, key in zip(orders, keys, strict=True):
        await harness.start(msgspec.structs.replace(order, key=key))
    for key in (*keys, first[1]):
        ended = await harness.until_status(
            key, lambda status: status.phase == WorkerPhase.EXITED, "its end"
        )
        assert ended.exit_code == 0, harness.log(key)
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
