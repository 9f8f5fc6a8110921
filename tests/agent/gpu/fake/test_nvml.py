"""The fake NVML answers as NVML does: its units, its errors, its events. No driver here."""

from __future__ import annotations

import pynvml
import pytest

from agent.gpu.fake.fleet import FakeFleet, fake_uuid, parse_fleet
from agent.gpu.fake.nvml import (
    BUSY_TEMPERATURE_C,
    IDLE_POWER_RATIO,
    IDLE_TEMPERATURE_C,
    FakeNvml,
)
from agent.gpu.fake.processes import Usage
from agent.gpu.nvml import (
    ECC_UNCORRECTED,
    ECC_VOLATILE,
    GPU_IS_LOST,
    INVALID_ARGUMENT,
    MEMORY_V2,
    NOT_SUPPORTED,
    RECOVERY_FIELD,
    TEMPERATURE_GPU,
    THROTTLE_REASONS,
    TIMEOUT,
    UNINITIALIZED,
    GpuProbe,
    NvmlApi,
)
from common.errors import ConfigError
from common.messages import GpuHealth, RecoveryAction
from tests.harness.node.nvml_machine import FLEET, GIB, Machine, code_of
from tests.tables import each_row

MORE_ARGUMENTS: dict[str, tuple[object, ...]] = {
    "nvmlDeviceGetFieldValues": ([RECOVERY_FIELD],),
    "nvmlDeviceGetTemperature": (TEMPERATURE_GPU,),
    "nvmlDeviceGetTemperatureV": (TEMPERATURE_GPU,),
    "nvmlDeviceGetTotalEccErrors": (ECC_UNCORRECTED, ECC_VOLATILE),
}
"""Of the calls that take more than a handle."""


def test_it_has_every_function_that_the_agent_calls() -> None:
    """What `NvmlApi` names exists in pynvml and in the fake: neither side can drift unseen."""
    names = [name for name in vars(NvmlApi) if name.startswith("nvml")]
    assert len(names) > 15
    assert [name for name in names if not hasattr(pynvml, name)] == []
    assert [name for name in names if not hasattr(FakeNvml, name)] == []


def test_an_idle_gpu() -> None:
    """Nobody on it: no busy share, no memory, no process, idle power and temperature."""
    machine = Machine()
    api, handle = machine.api, machine.handle()
    assert api.nvmlDeviceGetName(handle) == "H100"
    assert api.nvmlDeviceGetUUID(handle) == fake_uuid("n1", 0)
    assert api.nvmlDeviceGetUtilizationRates(handle).gpu == 0
    assert api.nvmlDeviceGetMemoryInfo(handle).used == 0
    assert api.nvmlDeviceGetMemoryInfo(handle, MEMORY_V2).total == 80 * GIB
    assert api.nvmlDeviceGetComputeRunningProcesses_v3(handle) == []
    assert api.nvmlDeviceGetPowerUsage(handle) == round(700 * IDLE_POWER_RATIO * 1000)
    assert api.nvmlDeviceGetTemperature(handle, TEMPERATURE_GPU) == IDLE_TEMPERATURE_C
    assert api.nvmlDeviceGetTotalEccErrors(handle, ECC_UNCORRECTED, ECC_VOLATILE) == 0
    assert api.nvmlDeviceGetCurrentClocksEventReasons(handle) == 0


def test_a_mixed_fleet_is_numbered_in_the_order_of_its_file() -> None:
    """Indices go through the groups in order, and each GPU has its own model and limit."""
    machine = Machine()
    assert machine.api.nvmlDeviceGetCount() == 3
    handles = [machine.handle(index) for index in range(3)]
    assert [machine.api.nvmlDeviceGetName(handle) for handle in handles] == ["H100", "H100", "L4"]
    limits_mw = [machine.api.nvmlDeviceGetEnforcedPowerLimit(handle) for handle in handles]
    assert limits_mw == [700_000, 700_000, 72_000]


def test_a_busy_gpu_shows_it_in_percent_bytes_milliwatts_and_degrees() -> None:
    """NVML's own units, as pynvml gives them: a unit mistake above must show on the fake too."""
    machine = Machine()
    machine.table.hold(42, 0, usage=Usage(busy_ratio=0.5, memory_bytes=3 * GIB))
    api, handle = machine.api, machine.handle()
    assert api.nvmlDeviceGetUtilizationRates(handle).gpu == 50
    assert api.nvmlDeviceGetMemoryInfo(handle).used == 3 * GIB
    assert api.nvmlDeviceGetPowerUsage(handle) == 385_000
    halfway_c = (IDLE_TEMPERATURE_C + BUSY_TEMPERATURE_C) / 2
    assert api.nvmlDeviceGetTemperatureV(handle, TEMPERATURE_GPU) == halfway_c
    [process] = api.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    assert (process.pid, process.usedGpuMemory) == (42, 3 * GIB)


def test_a_gpu_cannot_be_fuller_or_busier_than_it_is() -> None:
    """Processes that together claim more than there is fill the GPU, and no more."""
    machine = Machine()
    for pid in (1, 2):
        machine.table.hold(pid, 0, 1, usage=Usage(busy_ratio=0.75, memory_bytes=60 * GIB))
    for handle in (machine.handle(0), machine.handle(1)):
        assert machine.api.nvmlDeviceGetUtilizationRates(handle).gpu == 100
        memory = machine.api.nvmlDeviceGetMemoryInfo(handle)
        assert memory.used == memory.total
        assert len(machine.api.nvmlDeviceGetComputeRunningProcesses_v3(handle)) == 2
    assert machine.api.nvmlDeviceGetComputeRunningProcesses_v3(machine.handle(2)) == []


def test_a_process_that_says_nothing_has_the_models_defaults() -> None:
    """An unchanged training job, which knows no fake, is busy and uses memory all the same."""
    machine = Machine()
    machine.table.hold(42, 0)
    group = machine.fleet.gpu[0]
    rates = machine.api.nvmlDeviceGetUtilizationRates(machine.handle())
    memory = machine.api.nvmlDeviceGetMemoryInfo(machine.handle())
    assert rates.gpu == round(group.default_busy_ratio * 100)
    assert memory.used == group.default_memory_used_bytes


def test_a_process_that_uses_nothing_is_not_on_the_gpu() -> None:
    """A launcher that only passes its variables on must not keep a device from being free."""
    machine = Machine()
    machine.table.hold(42, 0, usage=Usage(busy_ratio=0.0, memory_bytes=0))
    assert machine.api.nvmlDeviceGetComputeRunningProcesses_v3(machine.handle()) == []


def test_one_look_at_the_processes_serves_a_sample_but_not_the_next_one() -> None:
    """Within a quarter second the list is the same one; after it a process that left is gone."""
    machine = Machine()
    machine.table.hold(42, 0)
    machine.api.nvmlDeviceGetUtilizationRates(machine.handle())
    machine.table.holders = []
    machine.now_s += 0.2
    assert machine.api.nvmlDeviceGetUtilizationRates(machine.handle()).gpu == 90
    machine.now_s += 0.1
    assert machine.api.nvmlDeviceGetUtilizationRates(machine.handle()).gpu == 0


def test_calls_before_init_and_after_shutdown_are_refused() -> None:
    """As the library does: UNINITIALIZED, for the count, for handles and for a device's values."""
    machine = Machine()
    handle = machine.handle()
    machine.api.nvmlShutdown()
    assert code_of(machine.api.nvmlDeviceGetCount) == UNINITIALIZED
    assert code_of(machine.api.nvmlDeviceGetHandleByIndex, 0) == UNINITIALIZED
    assert code_of(machine.api.nvmlDeviceGetUUID, handle) == UNINITIALIZED


@pytest.mark.parametrize("index", [-1, 3, 1000])
def test_an_index_out_of_range_is_an_invalid_argument(index: int) -> None:
    """As the library does; and never another GPU's handle, as a negative index would give."""
    assert code_of(Machine().api.nvmlDeviceGetHandleByIndex, index) == INVALID_ARGUMENT


@each_row(
    "name",
    sorted(
        name
        for name in vars(NvmlApi)
        if name.startswith("nvmlDeviceGet")
        and not any(of_other in name for of_other in ("Count", "Handle", "InstanceId"))
    ),
)
def test_every_call_on_a_lost_gpu_says_so(name: str) -> None:
    """GPU_IS_LOST for each value, also with a handle from before; the neighbours go on."""
    machine = Machine("kind = 'lost'\ngpu = 1\nat_s = 5.0")
    handle, call = machine.handle(1), getattr(machine.api, name)
    arguments = MORE_ARGUMENTS.get(name, ())
    call(handle, *arguments)
    machine.now_s += 5.0
    assert code_of(call, handle, *arguments) == GPU_IS_LOST
    assert code_of(machine.api.nvmlDeviceGetHandleByIndex, 1) == GPU_IS_LOST
    call(machine.handle(0), *arguments)
    assert code_of(call, object(), *arguments) == INVALID_ARGUMENT


def test_a_lost_gpu_comes_back_when_its_fault_ends() -> None:
    """A fault with `for_s` is over after it, to the instant."""
    machine = Machine("kind = 'lost'\ngpu = 0\nat_s = 1.0\nfor_s = 2.0")
    machine.now_s += 2.9
    assert code_of(machine.api.nvmlDeviceGetHandleByIndex, 0) == GPU_IS_LOST
    machine.now_s += 0.1
    assert machine.api.nvmlDeviceGetUUID(machine.handle()) == fake_uuid("n1", 0)


def test_a_hanging_gpu_answers_when_its_hang_is_over() -> None:
    """The call does not return before; then it has its answer. Other GPUs do not wait."""
    machine = Machine("kind = 'hang'\ngpu = 0\nat_s = 1.0\nfor_s = 30.0")
    handle = machine.handle()
    machine.now_s += 2.0
    machine.api.nvmlDeviceGetUUID(machine.handle(1))
    assert machine.pauses_s == []
    assert machine.api.nvmlDeviceGetUUID(handle) == fake_uuid("n1", 0)
    assert sum(machine.pauses_s) == pytest.approx(29.0)


def test_a_hang_of_all_is_one_of_the_driver() -> None:
    """Without a `gpu` not even the number of GPUs is told before it is over."""
    machine = Machine("kind = 'hang'\nfor_s = 7.0")
    assert machine.api.nvmlDeviceGetCount() == 3
    assert sum(machine.pauses_s) == pytest.approx(7.0)


def test_an_xid_is_told_once_and_to_its_gpus_listeners_only() -> None:
    """Each event set hears an event once, and none of GPUs that it was not registered for."""
    machine = Machine("kind = 'xid'\ngpu = 1\nvalue = 79\nat_s = 3.0")
    mine, others = machine.events(1), machine.events(0, 2)
    assert machine.xids(mine) == []
    machine.now_s += 3.0
    assert machine.xids(mine) == [79]
    assert machine.xids(mine) == machine.xids(others) == []
    assert machine.xids(machine.events(1)) == [79]


def test_an_event_of_before_this_reader_is_not_told_again() -> None:
    """A child that was started anew 10 s into the script hears what comes, not what was."""
    machine = Machine(
        "kind = 'xid'\ngpu = 0\nvalue = 13\nat_s = 3.0",
        "kind = 'xid'\ngpu = 0\nvalue = 48\nat_s = 12.0",
        age_s=10.0,
    )
    events = machine.events(0)
    assert machine.xids(events) == []
    machine.now_s += 2.0
    assert machine.xids(events) == [48]


def test_waiting_for_an_event_takes_the_time_that_was_asked_for() -> None:
    """Milliseconds, as NVML counts them, and TIMEOUT at their end."""
    machine = Machine()
    assert code_of(machine.api.nvmlEventSetWait_v2, machine.events(0), 250) == TIMEOUT
    assert machine.pauses_s == [0.25]


def test_ecc_errors_stay_counted_and_other_counters_are_not_supported() -> None:
    """Uncorrected errors add up, over faults that are over too; no other kind is counted."""
    machine = Machine(
        "kind = 'ecc'\ngpu = 0\nvalue = 2\nat_s = 1.0\nfor_s = 1.0",
        "kind = 'ecc'\nvalue = 3\nat_s = 2.0",
    )
    count = machine.api.nvmlDeviceGetTotalEccErrors
    machine.now_s += 1.0
    assert count(machine.handle(0), ECC_UNCORRECTED, ECC_VOLATILE) == 2
    machine.now_s += 9.0
    assert count(machine.handle(0), ECC_UNCORRECTED, ECC_VOLATILE) == 5
    assert count(machine.handle(1), ECC_UNCORRECTED, ECC_VOLATILE) == 3
    corrected = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
    assert code_of(count, machine.handle(0), corrected, ECC_VOLATILE) == NOT_SUPPORTED


def test_throttling_is_heat_unless_said_otherwise() -> None:
    """The bits are NVML's; several faults on one GPU are several bits."""
    power = THROTTLE_REASONS["sw_power_cap"]
    machine = Machine("kind = 'throttle'\ngpu = 0", f"kind = 'throttle'\ngpu = 0\nvalue = {power}")
    bits = machine.api.nvmlDeviceGetCurrentClocksEventReasons(machine.handle(0))
    assert bits == power | THROTTLE_REASONS["hw_thermal_slowdown"]
    assert machine.api.nvmlDeviceGetCurrentClocksEventReasons(machine.handle(1)) == 0


def test_a_wrong_count_hides_the_last_gpus() -> None:
    """NVML then knows neither their number nor their indices."""
    machine = Machine("kind = 'wrong_count'\nvalue = 1")
    assert machine.api.nvmlDeviceGetCount() == 1
    assert code_of(machine.api.nvmlDeviceGetHandleByIndex, 1) == INVALID_ARGUMENT


def test_a_probe_reads_the_fake_in_si_units() -> None:
    """The production code above NVML: watts, ratios and bytes, a sorted process list, no fault."""
    machine = Machine()
    machine.table.hold(9, 2, usage=Usage(busy_ratio=0.25, memory_bytes=GIB))
    machine.table.hold(7, 2, usage=Usage(busy_ratio=0.25, memory_bytes=GIB))
    report = GpuProbe(machine.api, 2).read()
    assert (report.gpu_type, report.index, report.health) == ("L4", 2, GpuHealth.OK)
    assert report.gpu_busy_ratio == 0.5
    assert report.memory_used_bytes == 2 * GIB
    assert report.power_limit_w == 72.0
    assert report.power_w == pytest.approx(39.6)
    assert [process.pid for process in report.processes or ()] == [7, 9]


def test_a_probe_tells_clients_of_mps_among_the_processes() -> None:
    """NVML has them in a list of their own; without it a job would hide behind their server."""
    machine = Machine()
    machine.table.hold(9, 0)
    machine.table.hold(7, 0, is_mps_client=True)
    compute = machine.api.nvmlDeviceGetComputeRunningProcesses_v3(machine.handle())
    clients = machine.api.nvmlDeviceGetMPSComputeRunningProcesses_v3(machine.handle())
    assert ([one.pid for one in compute], [one.pid for one in clients]) == ([9], [7])
    assert [one.pid for one in GpuProbe(machine.api, 0).read().processes or ()] == [7, 9]


def test_a_probe_names_a_gpu_that_fell_off_the_bus_and_why() -> None:
    """LOST under its UUID, with the XID that told of it, and no stale values."""
    machine = Machine(
        "kind = 'xid'\ngpu = 0\nvalue = 79\nat_s = 1.0", "kind = 'lost'\ngpu = 0\nat_s = 1.0"
    )
    probe = GpuProbe(machine.api, 0)
    first = probe.read()
    machine.now_s += 1.0
    lost = probe.read()
    assert (lost.uuid, lost.health, lost.xids) == (first.uuid, GpuHealth.LOST, (79,))
    assert lost.gpu_busy_ratio is None
    assert lost.power_w is None
    assert probe.read().xids == ()


# --- the file ----------------------------------------------------------------------------------


@each_row(
    ("text", "said"),
    [
        ("gpu = 3", "gpu"),
        ("gpu = []\nspeed = 1", "speed"),
        ("gpu = [{count = 0, model = 'x', memory_bytes = 1}]", "count"),
        (f"{FLEET}[[fault]]\nkind = 'lost'\ngpu = 3", r"fault\[0\].gpu: 3"),
        (f"{FLEET}[[fault]]\nkind = 'xid'\ngpu = 0", r"fault\[0\].value"),
        (f"{FLEET}[[fault]]\nkind = 'hang'\nvalue = 1", r"fault\[0\].value"),
        (f"{FLEET}[[fault]]\nkind = 'wrong_count'\nvalue = 4", "only hide"),
        (f"{FLEET}[[fault]]\nkind = 'wrong_count'\nvalue = 1\ngpu = 0", r"fault\[0\].gpu"),
        (f"{FLEET}[[fault]]\nkind = 'melt'", "melt"),
        ("gpu = [", "fake fleet"),
    ],
)
def test_a_bad_fleet_file_is_refused_by_field(text: str, said: str) -> None:
    """Each mistake is the operator's and is named."""
    with pytest.raises(ConfigError, match=said):
        parse_fleet(text)


def test_uuids_differ_by_node_and_index_and_never_change() -> None:
    """Two agents on one machine never share a GPU, and a restart finds the same ones."""
    uuids = {fake_uuid(node, index) for node in ("n1", "n2") for index in range(8)}
    assert len(uuids) == 16
    assert fake_uuid("n1", 0) == fake_uuid("n1", 0)
    assert isinstance(parse_fleet(FLEET), FakeFleet)


@pytest.mark.parametrize("number, action", [(1, "gpu_reset"), (2, "node_reboot"), (99, "unknown")])
def test_the_driver_s_recovery_action_is_read(number: int, action: str) -> None:
    """None where it tells of none, `none` while it asks for nothing, and what it asks for then; one
    that nobody knows is something, too."""
    machine = Machine(f"kind = 'recovery'\ngpu = 1\nvalue = {number}\nat_s = 5.0\nfor_s = 5.0")
    silent, asking = GpuProbe(machine.api, 0), GpuProbe(machine.api, 1)
    assert silent.read().recovery_action is None
    said = [asking.read().recovery_action]
    for _ in range(2):
        machine.now_s += 5.0
        said.append(asking.read().recovery_action)
    assert said == [RecoveryAction.NONE, RecoveryAction(action), RecoveryAction.NONE]
