"""The NVML child as a real process over its pipe: hangs, garbage, kill -9, its parent's death."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from agent.gpu.child_process import ChildProcess, child_starter
from agent.gpu.reader import GpuReader, ProcessStarter, ReaderProcess
from agent.gpu.sampler import GpuSampler
from agent.gpu.wire import ASK, ChildSettings, Sample, sample_of
from agent.telemetry.page_fetch import page_fetcher
from agent.telemetry.sample import NodeSampler
from common.clock import SystemClock
from common.errors import ConfigError, Unavailable
from common.messages import GpuHealth, GpuReport
from tests.harness.node.life import settings
from tests.harness.node.nvml_machine import InThisProcess, Machine
from tests.harness.node.workers import is_alive, kill

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
CLOCK = SystemClock()
LIMIT_S = 20.0
"""A test that waits this long has failed; nothing here is timed."""
GROUP = '{count = 4, model = "H100", memory_bytes = 85899345920}'
SOUND = f"gpu = [{GROUP}]\n"


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """Four GPUs without a fault; a test may append some."""
    file = tmp_path / "fleet.toml"
    file.write_text(SOUND)
    return file


def write(fleet: Path, text: str) -> None:
    fleet.write_text(text)


def add_fault(fleet: Path, text: str) -> None:
    write(fleet, f"{SOUND}\n[[fault]]\n{text}\n")


@asynccontextmanager
async def reading(
    start: ProcessStarter, *, deadline_s: float = LIMIT_S, restart_after_s: float = LIMIT_S
) -> AsyncGenerator[GpuReader]:
    """A reader on real processes; every child has ended after the block."""
    reader = GpuReader(
        start,
        SystemClock(),
        deadline_s=deadline_s,
        restart_after_s=restart_after_s,
        backoff_s=0.02,
        max_backoff_s=0.1,
    )
    pids: set[int] = set()
    try:
        yield reader
    finally:
        if reader.child_pid is not None:
            pids.add(reader.child_pid)
        await reader.close()
        assert not any(is_alive(pid) for pid in pids)


def starter(fleet: Path | None, *, gpu_deadline_s: float = LIMIT_S) -> ProcessStarter:
    return child_starter(
        "n1", now_s=SystemClock().now_s, fake_fleet=fleet, gpu_deadline_s=gpu_deadline_s
    )


async def until(reader: GpuReader, fact: Callable[[tuple[GpuReport, ...]], bool]) -> None:
    """Sample until a fact holds."""
    async with CLOCK.timeout(LIMIT_S):
        while not fact(await reader.sample()):
            await CLOCK.sleep(0.01)


def are_ok(gpus: tuple[GpuReport, ...]) -> bool:
    return bool(gpus) and all(gpu.health is GpuHealth.OK for gpu in gpus)


async def running_child(reader: GpuReader, *, after: int | None = None) -> int:
    """The child's process id, once there is one other than `after`; a deadline may pass before."""
    async with CLOCK.timeout(LIMIT_S):
        while (pid := reader.child_pid) in (None, after):
            await CLOCK.sleep(0.01)
    assert pid is not None
    return pid


async def until_gone(pid: int) -> None:
    async with CLOCK.timeout(LIMIT_S):
        while is_alive(pid):
            await CLOCK.sleep(0.01)


async def test_a_child_answers_over_its_pipe_and_ends_when_asked(fleet: Path) -> None:
    """Question and answer, again and again, by one process that a close ends with status 0."""
    child = await starter(fleet)()
    for _ in range(3):
        sample = sample_of(await child.ask())
        assert [gpu.index for gpu in sample.gpus] == [0, 1, 2, 3]
        assert are_ok(sample.gpus)
        assert sample.error == ""
    child.close_input()
    async with asyncio.timeout(LIMIT_S):
        assert await child.wait() == 0


async def stand_in() -> ReaderProcess:
    """A child that answers nothing and ends with its input."""
    return ChildProcess(await run("sh", "-c", "exec cat > /dev/null"))


@pytest.mark.parametrize(("turns", "is_real"), [(2, True), *((at, False) for at in range(2, 8))])
async def test_a_reader_closed_while_its_child_starts_leaves_none(
    fleet: Path, turns: int, is_real: bool
) -> None:
    """At whichever turn of the loop: the child ends with status 0, as one that was asked to."""
    started: list[ReaderProcess] = []

    async def noted() -> ReaderProcess:
        started.append(await (starter(fleet) if is_real else stand_in)())
        return started[-1]

    async with reading(noted) as reader:
        sampling = asyncio.create_task(reader.sample(0.0))
        for _ in range(turns):
            await asyncio.sleep(0)
    await asyncio.gather(sampling, return_exceptions=True)
    assert [await child.wait() for child in started] == [0]


async def test_one_hanging_gpu_is_unresponsive_and_hides_no_other(fleet: Path) -> None:
    """The child's own deadline is per sample: three GPUs are read, one is named."""
    add_fault(fleet, 'kind = "hang"\ngpu = 2\nat_s = 50.0')
    now_s = [0.0]
    start = child_starter("n1", now_s=lambda: now_s[0], fake_fleet=fleet, gpu_deadline_s=0.2)
    async with reading(start) as reader:
        await until(reader, are_ok)
        now_s[0] = 100.0  # the next child finds the script that far on
        assert reader.child_pid is not None
        kill(reader.child_pid)
        await until(reader, lambda gpus: sum(gpu.health is GpuHealth.OK for gpu in gpus) == 3)
        gpus = await reader.sample()
        assert [gpu.health for gpu in gpus].count(GpuHealth.OK) == 3
        assert gpus[2].health in (GpuHealth.UNRESPONSIVE, GpuHealth.LOST)
        assert "GPU 2" in reader.error


async def test_a_gpu_that_is_lost_before_its_child_starts_is_named_by_its_index(
    fleet: Path,
) -> None:
    """A whole look of the agent has the index, by which the ledger knows the GPU."""
    add_fault(fleet, 'kind = "lost"\ngpu = 2')
    async with reading(starter(fleet)) as reader:
        sampler = NodeSampler(
            settings(inference=False, collect_deadline_s=LIMIT_S),
            clock=CLOCK,
            reader=reader,
            fetch=page_fetcher(CLOCK),
            is_server_wanted=lambda: False,
        )
        look = await sampler.sample()
    assert [gpu.index for gpu in look.gpus or ()] == [0, 1, 3]
    assert look.lost_indices == (2,)


async def test_a_driver_that_hangs_costs_the_deadline_only(fleet: Path) -> None:
    """The agent hears within its deadline that nothing answers, and can still end the child."""
    add_fault(fleet, 'kind = "hang"')
    async with reading(starter(fleet), deadline_s=0.2) as reader:
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"0\.2 s"):
                await reader.sample()
        pid = await running_child(reader)
        assert is_alive(pid), "a hanging child is waited for, not killed"


async def test_a_hang_that_lasts_brings_a_new_child(fleet: Path) -> None:
    """After `restart_after_s` the stuck process is replaced, and the new one reads."""
    add_fault(fleet, 'kind = "hang"\nfor_s = 50.0')
    now_s = [0.0]
    start = child_starter("n1", now_s=lambda: now_s[0], fake_fleet=fleet, gpu_deadline_s=LIMIT_S)
    async with reading(start, deadline_s=0.2, restart_after_s=0.5) as reader:
        with pytest.raises(Unavailable):
            await reader.sample()
        stuck = await running_child(reader)
        now_s[0] = 100.0
        await running_child(reader, after=stuck)
        await until_gone(stuck)
        async with CLOCK.timeout(LIMIT_S):
            while True:
                try:
                    if are_ok(await reader.sample(LIMIT_S)):
                        return
                except Unavailable:
                    await CLOCK.sleep(0.01)


async def test_kill_9_of_the_child_heals(fleet: Path) -> None:
    """The GPUs are unresponsive for a moment and then read by another process, all of them."""
    async with reading(starter(fleet)) as reader:
        await until(reader, are_ok)
        first = reader.child_pid
        assert first is not None
        kill(first)
        gpus = await reader.sample()
        assert {gpu.health for gpu in gpus} == {GpuHealth.UNRESPONSIVE}
        assert len(gpus) == 4
        await until(reader, are_ok)
        assert reader.child_pid not in (first, None)
        assert reader.error == ""


async def test_the_fakes_script_goes_on_over_a_restart(fleet: Path) -> None:
    """A GPU that is lost 50 s into the script is lost for a child that starts after that."""
    add_fault(fleet, 'kind = "lost"\ngpu = 3\nat_s = 50.0')
    now_s = [1000.0]
    start = child_starter("n1", now_s=lambda: now_s[0], fake_fleet=fleet, gpu_deadline_s=LIMIT_S)
    async with reading(start) as reader:
        await until(reader, are_ok)
        now_s[0] += 100.0
        assert reader.child_pid is not None
        kill(reader.child_pid)
        await until(reader, lambda gpus: gpus[0].health is GpuHealth.OK)
        healths = [gpu.health for gpu in await reader.sample()]
        assert healths == [GpuHealth.OK] * 3 + [GpuHealth.LOST]


# --- garbage -----------------------------------------------------------------------------------


async def run_program(text: str, *arguments: str) -> asyncio.subprocess.Process:
    """A program in Python in place of the child."""
    return await run(sys.executable, "-c", text, *arguments)


async def run(*argv: str) -> asyncio.subprocess.Process:
    """A program in place of the child, with the same pipes."""
    return await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"\xff\xff\xff\xff", id="a length that no sample has"),
        pytest.param(b"\x00\x00\x00\x03\xc1\xc1\xc1", id="no MessagePack"),
        pytest.param(b"\x00\x00\x00\x07\x81\xa4gpus\x05", id="another type"),
        pytest.param(b"\x00\x00\x10\x00short", id="a frame that is cut off"),
    ],
)
async def test_a_child_that_talks_nonsense_is_ended_and_replaced(said: bytes) -> None:
    """Nothing of it reaches a report; the next child is a sound one."""
    octal = "".join(f"\\{byte:03o}" for byte in said)
    processes: list[asyncio.subprocess.Process] = []
    sound = GpuSampler(Machine().api, gpu_deadline_s=LIMIT_S)

    async def start() -> ReaderProcess:
        if processes:
            return InThisProcess(sound)
        processes.append(await run("sh", "-c", f"head -c 4 > /dev/null; printf '{octal}'"))
        return ChildProcess(processes[0])

    async with reading(start) as reader:
        with pytest.raises(Unavailable):
            await reader.sample()
        assert reader.error
        await until_gone(processes[0].pid)
        await running_child(reader, after=processes[0].pid)
        await until(reader, are_ok)
        assert reader.child_pid == InThisProcess.pid


async def test_a_question_that_is_none_ends_the_child(fleet: Path) -> None:
    """A child whose input is out of step says so and goes, rather than answer at random."""
    settings = msgspec.json.encode(
        ChildSettings(node="n1", fake_fleet=str(fleet), gpu_deadline_s=LIMIT_S)
    ).decode()
    child = await run_program("from agent.gpu import nvml_child; nvml_child.main()", settings)
    async with asyncio.timeout(LIMIT_S):
        out, errors = await child.communicate(b"\xff\xff\xff\xff" + ASK)
    assert child.returncode != 0
    assert out == b""
    assert b"frame of 4294967295 bytes" in errors


NOISY = """
import os
from agent.gpu import nvml_child
from agent.gpu.fake import nvml as fake_nvml
class Noisy(fake_nvml.FakeNvml):
    def nvmlDeviceGetCount(self):
        os.write(1, b"a driver that prints")
        {more}
        return super().nvmlDeviceGetCount()
fake_nvml.FakeNvml = Noisy
nvml_child.main()
"""


async def test_what_a_driver_prints_is_not_on_the_wire(fleet: Path) -> None:
    """Libraries write to stdout as they please: it goes to the log, and the frames stay whole."""
    settings = msgspec.json.encode(
        ChildSettings(node="n1", fake_fleet=str(fleet), gpu_deadline_s=LIMIT_S)
    ).decode()
    process = await run_program(NOISY.format(more="pass"), settings)
    child = ChildProcess(process)
    assert are_ok(sample_of(await child.ask()).gpus)
    child.close_input()
    assert process.stderr is not None
    assert b"a driver that prints" in await process.stderr.read()
    assert await child.wait() == 0


async def test_a_defect_of_the_child_is_in_the_log(fleet: Path) -> None:
    """An error that nobody foresaw ends the child with its traceback, not in silence."""
    settings = msgspec.json.encode(
        ChildSettings(node="n1", fake_fleet=str(fleet), gpu_deadline_s=LIMIT_S)
    ).decode()
    process = await run_program(NOISY.format(more="1 / 0"), settings)
    child = ChildProcess(process)
    with pytest.raises(EOFError):
        await child.ask()
    assert process.stderr is not None
    assert b"ZeroDivisionError" in await process.stderr.read()
    assert await child.wait() == 1


# --- ends --------------------------------------------------------------------------------------


PARENT = """
import asyncio, pathlib, sys
from agent.gpu.child_process import child_starter
async def main():
    start = child_starter("n1", now_s=lambda: 0.0, fake_fleet=pathlib.Path(sys.argv[1]))
    child = await start()
    if sys.argv[2] == "answering":
        await child.ask()
    else:
        asyncio.ensure_future(child.ask())
        await asyncio.sleep(0)
    print(child.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["answering", "hanging"])
async def test_the_child_ends_with_its_parent(fleet: Path, state: str) -> None:
    """kill -9 of the agent leaves no reader behind, not even one that hangs in its driver."""
    if state == "hanging":
        add_fault(fleet, 'kind = "hang"')
    parent = await run_program(PARENT, str(fleet), state)
    assert parent.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        pid = int(await parent.stdout.readline())
    try:
        assert is_alive(pid)
        parent.kill()
        await parent.wait()
        await until_gone(pid)
    finally:
        kill(pid)
        await parent.communicate()


async def test_ctrl_c_is_the_parents_business(fleet: Path) -> None:
    """SIGINT, which a terminal sends to all, does not cost the node its GPUs' reader."""
    child = await starter(fleet)()
    await child.ask()
    os.kill(child.pid, signal.SIGINT)
    assert are_ok(sample_of(await child.ask()).gpus)
    child.close_input()
    async with asyncio.timeout(LIMIT_S):
        assert await child.wait() == 0


# --- nothing to read ---------------------------------------------------------------------------


def test_a_bad_fleet_file_is_refused_before_a_child_is_started(tmp_path: Path) -> None:
    """The operator's mistake is told by the agent's start, with the field."""
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(f"gpu = [{GROUP}]\nspeed = 3\n")
    with pytest.raises(ConfigError, match="speed"):
        child_starter("n1", now_s=SystemClock().now_s, fake_fleet=fleet)
    with pytest.raises(ConfigError, match="nothing"):
        child_starter("n1", now_s=SystemClock().now_s, fake_fleet=tmp_path / "nothing")


async def test_a_fleet_file_that_breaks_later_is_told_by_the_child(fleet: Path) -> None:
    """The reason comes over the wire, and the child is tried again until the file is mended."""
    start = starter(fleet)
    write(fleet, "gpu = 7")
    async with reading(start) as reader:
        with pytest.raises(Unavailable, match="fake fleet"):
            await reader.sample()
        write(fleet, SOUND)
        async with CLOCK.timeout(LIMIT_S):
            while True:
                try:
                    assert are_ok(await reader.sample())
                except Unavailable:
                    await CLOCK.sleep(0.01)
                else:
                    return


async def test_a_machine_without_nvml_says_what_is_missing() -> None:
    """No library, no fake: the error names what was not found and asks for the driver."""
    child = await starter(None)()
    try:
        sample = sample_of(await child.ask())
        if sample.gpus:
            pytest.skip("this machine has a GPU")
        assert sample == Sample(error=sample.error)
        assert "driver" in sample.error
    finally:
        child.close_input()
        await child.wait()
