"""`--fake-nvml` and a C library below the real pynvml, from one fleet: one contract for both.

The library also shows the fleet to programs that know nothing of Aryl.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from agent.gpu.child_process import child_starter
from agent.gpu.fake.fleet import FakeFleet, fake_uuid, load_fleet
from agent.gpu.fake.nvml import FakeNvml
from agent.gpu.fake.processes import BUSY_ENV, MEMORY_ENV, VISIBLE_ENV, ProcessTable
from agent.gpu.nvml import GpuProbe
from agent.gpu.reader import GpuReader, ReaderProcess
from agent.gpu.sampler import GpuSampler
from common.clock import SystemClock
from common.errors import Unavailable
from common.messages import GpuHealth, GpuReport
from common.model import GpuUuid
from common.telemetry import instances, whole
from tests.agent.gpu import nvml_library
from tests.harness.node.nvml_machine import InThisProcess, Machine

pytestmark = pytest.mark.slow

CLOCK = SystemClock()
LIMIT_S = 30.0
SHORT_S = 0.5
"""How long a GPU that hangs is waited for."""
LATER_S = 3600.0
"""When something begins in a script, long after a test's first look."""
GIB = 1 << 30
GPUS = f"""
gpu = [
  {{count = 2, model = "NVIDIA A100-SXM4-80GB", memory_bytes = {80 * GIB}, power_limit_w = 400}},
]
"""
PARTED = GPUS.replace("power_limit_w = 400", 'power_limit_w = 400, mig = ["1g.10gb", "3g.40gb"]')
NOT_READ = {"memory_total_bytes", "recovery_action"}
"""Kept from an earlier reading, and told by few drivers."""
FIELDS = [name for name in GpuReport.__struct_fields__ if name not in NOT_READ]
PROGRAMS = Path(sys.executable).parent
"""Where the development dependencies have their commands."""


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of the library of a driver, built once."""
    built: dict[str, Path] = {}

    def library(driver: str) -> Path:
        if driver not in built:
            built[driver] = nvml_library.build(tmp_path_factory.mktemp("nvml"), driver=driver)
        return built[driver]

    return library


class Harness:
    """A fleet as a file, in front of which a library and a fake stand alike."""

    def __init__(self, directory: Path, libraries: Callable[[str], Path]) -> None:
        self.fleet_path = directory / "fleet.toml"
        self.state_path = directory / "state"
        self.proc = directory / "proc"
        self.proc.mkdir()
        """As /proc, with the processes of this test alone."""
        self.fleet: FakeFleet | None = None
        self.api: FakeNvml | None = None
        self.began_at_s = 0.0
        self.ahead_s = 0.0
        """How much time a test let pass at once."""
        self.looked_at_s = 0.0
        """The time of the fake below the table: a hang that began while one is written would never
        let it be done."""
        self._libraries = libraries

    def script(self, text: str, *faults: str, driver: str = "") -> None:
        """This fleet from now on; its script begins."""
        head = f'driver = "{driver}"\n' if driver else ""
        all_faults = "".join(f"\n[[fault]]\n{fault}" for fault in faults)
        self.fleet_path.write_text(head + text + all_faults)
        self.began_at_s = self.looked_at_s = self.now_s()
        self.fleet = load_fleet(self.fleet_path)
        self.api = self.fake(now_s=lambda: self.looked_at_s, pause=lambda _: None)
        self.look()

    def fake(self, *, now_s: Callable[[], float], pause: Callable[[float], None]) -> FakeNvml:
        """A fake NVML of the fleet."""
        fleet = self.fleet
        assert fleet is not None
        processes = ProcessTable(fleet.uuids("n1"), proc=self.proc)
        api = FakeNvml(fleet, node="n1", processes=processes, now_s=now_s, pause=pause)
        api.nvmlInit()
        return api

    def now_s(self) -> float:
        """The time of its script."""
        return CLOCK.now_s() + self.ahead_s

    def uuid(self, index: int) -> GpuUuid:
        """Of one of its GPUs."""
        return fake_uuid("n1", index)

    def look(self) -> None:
        """The library's table as the fleet is now."""
        assert self.api is not None
        assert self.fleet is not None
        self.looked_at_s = self.now_s()
        elapsed_s = self.looked_at_s - self.began_at_s
        nvml_library.write(
            self.state_path, nvml_library.table(self.fleet, self.api, elapsed_s=elapsed_s)
        )

    def environment(self) -> dict[str, str]:
        """Of a program that is to find the library."""
        assert self.fleet is not None
        return {
            "LD_LIBRARY_PATH": str(self._libraries(self.fleet.driver)),
            nvml_library.STATE_ENV: str(self.state_path),
        }

    @contextmanager
    def holder(self, uuid: str, *, busy_ratio: float, memory_bytes: int) -> Iterator[int]:
        """A real process that was given a GPU, or a MIG instance; its pid.

        It has answered: an exec shows no environment yet when Popen returns.
        """
        says = {BUSY_ENV: str(busy_ratio), MEMORY_ENV: str(memory_bytes)}
        process = subprocess.Popen(
            ["cat"],
            env={**os.environ, VISIBLE_ENV: uuid, **says},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        process.stdout.readline()
        (self.proc / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        try:
            yield process.pid
        finally:
            process.kill()
            process.communicate()

    @asynccontextmanager
    async def reader(
        self, below: str, monkeypatch: pytest.MonkeyPatch, *, gpu_deadline_s: float = LIMIT_S
    ) -> AsyncIterator[GpuReader]:
        """The agent's reader: the library is below its child, the fake in this process."""
        released = threading.Event()

        def pause(pause_s: float) -> None:
            """A hang is over with its reader, whose thread would else ask for ever."""
            if released.wait(pause_s):
                raise TimeoutError

        async def in_this_process() -> ReaderProcess:
            fake = self.fake(now_s=self.now_s, pause=pause)
            return InThisProcess(GpuSampler(fake, gpu_deadline_s=gpu_deadline_s))

        with monkeypatch.context() as patch:
            if below == "library":
                for name, value in self.environment().items():
                    patch.setenv(name, value)
            child = child_starter("n1", now_s=CLOCK.now_s, gpu_deadline_s=gpu_deadline_s)
            start = child if below == "library" else in_this_process
            reader = GpuReader(start, CLOCK, deadline_s=LIMIT_S)
            try:
                yield reader
            finally:
                released.set()
                await reader.close()


@pytest.fixture
def harness(tmp_path: Path, libraries: Callable[[str], Path]) -> Harness:
    return Harness(tmp_path, libraries)


@pytest.fixture(params=["fake", "library"])
def below(request: pytest.FixtureRequest) -> str:
    """What is below the NVML API."""
    found: object = request.param
    assert isinstance(found, str)
    return found


async def until(
    reader: GpuReader, harness: Harness, fact: Callable[[tuple[GpuReport, ...]], bool]
) -> tuple[GpuReport, ...]:
    """The first sample of which it is true."""
    async with CLOCK.timeout(LIMIT_S):
        while True:
            harness.look()
            try:
                gpus = await reader.sample()
            except Unavailable:
                gpus = ()
            if gpus and fact(gpus):
                return gpus
            await CLOCK.sleep(0.02)


def pids(gpu: GpuReport) -> list[int] | None:
    return None if gpu.processes is None else [process.pid for process in gpu.processes]


async def first(
    reader: GpuReader, harness: Harness, *, known: Callable[[GpuReport], bool] = lambda _: True
) -> tuple[GpuReport, ...]:
    """A sample in which GPU 0 is as it should be before anything is judged."""
    return await until(reader, harness, lambda gpus: known(gpus[0]))


# --- the contract ------------------------------------------------------------------------------


async def test_a_gpu_is_told_in_si_units(
    harness: Harness, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is on it, how busy, how full, how warm; a neighbour is idle. Nothing is left unread."""
    harness.script(GPUS)
    with harness.holder(harness.uuid(1), busy_ratio=0.5, memory_bytes=3 * GIB) as pid:
        async with harness.reader(below, monkeypatch) as reader:
            idle, busy = await until(
                reader,
                harness,
                lambda gpus: gpus[0].health is GpuHealth.OK and bool(gpus[1].processes),
            )
    assert [gpu.uuid for gpu in (idle, busy)] == [harness.uuid(0), harness.uuid(1)]
    assert (idle.processes, idle.gpu_busy_ratio, idle.memory_used_bytes) == ((), 0.0, 0)
    assert (idle.power_w, idle.temperature_c, idle.is_mig) == (40.0, 30.0, False)
    assert (pids(busy), busy.gpu_busy_ratio, busy.memory_used_bytes) == ([pid], 0.5, 3 * GIB)
    assert (busy.power_w, busy.power_limit_w, busy.temperature_c) == (220.0, 400.0, 50.0)
    assert (busy.gpu_type, busy.memory_total_bytes) == ("NVIDIA A100-SXM4-80GB", 80 * GIB)
    assert (busy.ecc_uncorrected_count, busy.throttle_reasons, busy.xids) == (0, (), ())
    assert reader.error == ""


async def test_a_value_that_no_gpu_can_have_is_not_known(
    harness: Harness, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers write 2**32 - 1 and worse; no such value is told, and the GPU is well."""
    garbage = {
        "utilization": 808334905,
        "memory_used": (1 << 63) - 1,
        "temperature": 4000,
        "power": (1 << 32) - 1,
        "power_limit": (1 << 32) - 1,
        "ecc": (1 << 63) - 1,
        "throttle": (1 << 63) - 1,
    }
    faults = [
        f'kind = "reading"\ngpu = 0\ncall = "{call}"\nvalue = {value}'
        for call, value in garbage.items()
    ]
    harness.script(GPUS, *faults)
    async with harness.reader(below, monkeypatch) as reader:
        odd, sound = await first(reader, harness)
    assert odd == GpuReport(
        uuid=harness.uuid(0),
        index=0,
        gpu_type=sound.gpu_type,
        memory_total_bytes=80 * GIB,
    )
    assert sound.gpu_busy_ratio == 0.0
    assert reader.error == ""


@pytest.mark.parametrize("code", [3, 4, 2, 999])
@pytest.mark.parametrize(
    ("call", "field"),
    [
        ("utilization", "gpu_busy_ratio"),
        ("memory", "memory_used_bytes"),
        ("temperature", "temperature_c"),
        ("power", "power_w"),
        ("power_limit", "power_limit_w"),
        ("ecc", "ecc_uncorrected_count"),
        ("processes", "processes"),
    ],
)
def test_one_value_with_an_error_costs_that_value_alone(call: str, field: str, code: int) -> None:
    """NOT_SUPPORTED, NO_PERMISSION, INVALID_ARGUMENT or UNKNOWN in place of one answer."""
    machine = Machine(f'kind = "error"\ngpu = 0\ncall = "{call}"\nvalue = {code}')
    probe = GpuProbe(machine.api, 0)
    report = probe.read()
    assert report.health is GpuHealth.OK
    assert [name for name in FIELDS if getattr(report, name) is None] == [field]
    if code == 999 or field == "processes":
        assert [what for what in probe.unread if what.startswith("GPU 0: ")] != []


async def test_processes_that_are_not_told_are_not_nobody(
    harness: Harness, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is unknown and the GPU is well; how busy it is shows that somebody is there.

    NOT_SUPPORTED, NO_PERMISSION and FUNCTION_NOT_FOUND, on a GPU each.
    """
    untold = [
        f'kind = "error"\ngpu = {gpu}\ncall = "processes"\nvalue = {code}'
        for gpu, code in enumerate((3, 4, 13))
    ]
    harness.script(GPUS.replace("count = 2", "count = 4"), *untold)
    given = ",".join(harness.uuid(gpu) for gpu in range(len(untold)))
    with harness.holder(given, busy_ratio=0.9, memory_bytes=3 * GIB):
        async with harness.reader(below, monkeypatch) as reader:
            gpus = await first(reader, harness, known=lambda gpu: gpu.gpu_busy_ratio == 0.9)
    assert [gpu.health for gpu in gpus] == [GpuHealth.OK] * 4
    assert [gpu.processes for gpu in gpus] == [None, None, None, ()]
    assert [gpu.gpu_busy_ratio for gpu in gpus] == [0.9, 0.9, 0.9, 0.0]


async def test_a_gpu_of_which_nothing_can_be_read_is_faulty(
    harness: Harness, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, as UUID and name come first, and why is told."""
    calls = ("utilization", "memory", "temperature", "power", "power_limit", "ecc", "throttle")
    all_calls = (*calls, "processes", "mig")
    harness.script(
        GPUS,
        *(f'kind = "error"\ngpu = 0\ncall = "{call}"\nvalue = 999' for call in all_calls),
    )
    async with harness.reader(below, monkeypatch) as reader:
        faulty, sound = await first(reader, harness)
    assert (faulty.health, sound.health) == (GpuHealth.FAULTY, GpuHealth.OK)
    assert faulty.uuid == harness.uuid(0)
    assert "GPU 0 is faulty" in reader.error
    assert "memory: Unknown Error" in reader.error


@pytest.mark.parametrize(
    ("fault", "health"), [("lost", GpuHealth.LOST), ("hang", GpuHealth.UNRESPONSIVE)]
)
async def test_a_gpu_that_goes_keeps_its_name(
    harness: Harness, below: str, fault: str, health: GpuHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost or hanging, one GPU of two: the other one is read on."""
    harness.script(GPUS, f'kind = "{fault}"\ngpu = 1\nat_s = {LATER_S}')
    async with harness.reader(below, monkeypatch, gpu_deadline_s=SHORT_S) as reader:
        await until(reader, harness, lambda gpus: len(gpus) == 2)
        harness.ahead_s = LATER_S
        there, gone = await until(
            reader,
            harness,
            lambda gpus: gpus[1].health == health and gpus[0].health is GpuHealth.OK,
        )
    assert (there.health, there.gpu_busy_ratio) == (GpuHealth.OK, 0.0)
    assert (gone.uuid, gone.gpu_busy_ratio, gone.processes) == (harness.uuid(1), None, None)


async def test_an_xid_is_told_once(
    harness: Harness, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event reaches the GPU's report, one report, and not that of its neighbour."""
    harness.script(GPUS, f'kind = "xid"\ngpu = 1\nvalue = 79\nat_s = {LATER_S}')
    async with harness.reader(below, monkeypatch) as reader:
        await until(reader, harness, lambda gpus: len(gpus) == 2)
        harness.ahead_s = LATER_S
        told = await until(reader, harness, lambda gpus: any(gpu.xids for gpu in gpus))
        harness.look()
        again = await reader.sample()
    assert [gpu.xids for gpu in told] == [(), (79,)]
    assert [gpu.xids for gpu in again] == [(), ()]


@pytest.mark.parametrize("driver", ["470.82", "535.54", "535.98"])
async def test_an_older_driver_tells_what_it_can(
    harness: Harness, below: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its older calls: without version 3 of the process lists, or with one of wider records,
    each process has its own pid and memory, and no GPU is faulty."""
    harness.script(GPUS, driver=driver)
    uuid = harness.uuid(0)
    with (
        harness.holder(uuid, busy_ratio=0.25, memory_bytes=3 * GIB) as one,
        harness.holder(uuid, busy_ratio=0.25, memory_bytes=5 * GIB) as other,
    ):
        async with harness.reader(below, monkeypatch) as reader:
            gpu, _ = await first(reader, harness, known=lambda gpu: gpu.gpu_busy_ratio == 0.5)
    assert {process.pid: process.memory_used_bytes for process in gpu.processes or ()} == {
        one: 3 * GIB,
        other: 5 * GIB,
    }
    assert (gpu.health, gpu.memory_used_bytes, gpu.temperature_c) == (GpuHealth.OK, 8 * GIB, 50.0)
    assert reader.error == ""


@pytest.mark.parametrize("is_told", [True, False])
async def test_mig_instances_are_seen_and_their_gpu_is_no_whole_one(
    harness: Harness, below: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UUID, profile, ids, memory and processes of each; who may not ask for all processes of the
    GPU is told those of its instances. Only what is not in MIG mode can be given out whole."""
    untold = [] if is_told else ['kind = "error"\ngpu = 0\ncall = "processes"\nvalue = 4']
    harness.script(PARTED, *untold)
    assert harness.fleet is not None
    small, large = harness.fleet.parts_of("n1", 0)
    with harness.holder(large.uuid, busy_ratio=0.9, memory_bytes=2 * GIB) as pid:
        async with harness.reader(below, monkeypatch) as reader:
            gpus = await first(reader, harness, known=lambda gpu: pids(gpu) == [pid])
    parted = gpus[0]
    assert (parted.health, parted.is_mig, parted.gpu_busy_ratio) == (GpuHealth.OK, True, None)
    assert [part.uuid for part in parted.mig] == [small.uuid, large.uuid]
    assert [part.gpu_type for part in parted.mig] == [
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
    ]
    assert [(part.gpu_instance_id, part.compute_instance_id) for part in parted.mig] == [
        (0, 0),
        (1, 0),
    ]
    assert [part.memory_total_bytes for part in parted.mig] == [10 * GIB, 40 * GIB]
    assert [pids(part) for part in instances(parted)] == [[], [pid]]
    assert whole(gpus) == ()
    assert reader.error == ""


async def test_both_say_the_same(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one fleet every field is alike, from the pretence and through the real pynvml."""
    harness.script(PARTED.replace("gpu = [", 'gpu = [{count = 1, model = "L4", memory_bytes = 8},'))
    samples = [await _one_sample(harness, below, monkeypatch) for below in ("fake", "library")]
    assert samples[0] == samples[1]
    assert [gpu.is_mig for gpu in samples[0]] == [False, True, True]


async def _one_sample(
    harness: Harness, below: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[GpuReport, ...]:
    async with harness.reader(below, monkeypatch) as reader:
        return await first(reader, harness)


async def test_a_driver_that_does_not_fit_its_library_is_no_gpu(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade without a reboot: it is told why, and a later start finds the GPUs."""
    harness.script(GPUS)
    harness.state_path.write_text("init !18\n")
    async with harness.reader("library", monkeypatch) as reader:
        with pytest.raises(Unavailable, match="mismatch"):
            await reader.sample()
        assert len(await until(reader, harness, lambda gpus: len(gpus) == 2)) == 2


# --- other programs ----------------------------------------------------------------------------


def run(harness: Harness, *command: str) -> str:
    """What a program prints that finds the library where NVML's would be."""
    done = subprocess.run(
        [str(PROGRAMS / command[0]), *command[1:]],
        env={**os.environ, **harness.environment(), "TERM": "dumb", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gpustat_shows_the_fleet(harness: Harness) -> None:
    """A program of others reads names, load, memory and processes from the same description."""
    with harness.holder(harness.uuid(1), busy_ratio=0.5, memory_bytes=3 * GIB) as pid:
        harness.script(GPUS)
        found = json.loads(run(harness, "gpustat", "--json"))
    idle, busy = found["gpus"]
    assert (idle["uuid"], idle["utilization.gpu"], idle["processes"]) == (harness.uuid(0), 0, [])
    assert (busy["name"], busy["utilization.gpu"]) == ("NVIDIA A100-SXM4-80GB", 50)
    assert (busy["memory.used"], busy["memory.total"]) == (3 * 1024, 80 * 1024)
    assert [(one["pid"], one["gpu_memory_usage"]) for one in busy["processes"]] == [(pid, 3 * 1024)]


def test_nvitop_shows_the_fleet(harness: Harness) -> None:
    """Another one, which asks for more."""
    with harness.holder(harness.uuid(1), busy_ratio=0.5, memory_bytes=3 * GIB) as pid:
        harness.script(GPUS)
        shown = run(harness, "nvitop", "-1")
    assert "A100-SXM4-80GB" in shown
    assert "3072MiB / 80.00GiB" in shown
    assert str(pid) in shown
