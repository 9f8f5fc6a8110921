"""Reads the fleet file, which describes fake GPUs and their faults."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path

import msgspec
from msgspec import Struct

from common.decoding import parse_toml
from common.errors import ConfigError
from common.model import (
    GpuUuid,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Ratio,
)


class FaultKind(StrEnum):
    """The kinds of fault of a GPU.

    `hang`: calls do not return. `lost`: fell off the bus. `xid`: one XID event with code `value`.
    `ecc`: `value` uncorrected errors. `wrong_count`: NVML reports `value` GPUs. `throttle`: slowed
    down; `value` is the bit mask of reasons, hardware heat if there is none. `error`: the call
    named by `call` fails with NVML's error `value`. `reading`: that call returns `value` in NVML's
    own unit, whatever that means. `recovery`: NVML's recovery action `value`; without that fault
    the driver reports none.
    """

    HANG = "hang"
    LOST = "lost"
    XID = "xid"
    ECC = "ecc"
    WRONG_COUNT = "wrong_count"
    THROTTLE = "throttle"
    ERROR = "error"
    READING = "reading"
    RECOVERY = "recovery"


class NvmlCall(StrEnum):
    """A call to a GPU, where a fault affects that call alone."""

    HANDLE = "handle"
    UUID = "uuid"
    NAME = "name"
    PCI = "pci"
    UTILIZATION = "utilization"
    MEMORY = "memory"
    MEMORY_USED = "memory_used"
    TEMPERATURE = "temperature"
    POWER = "power"
    POWER_LIMIT = "power_limit"
    ECC = "ecc"
    THROTTLE = "throttle"
    PROCESSES = "processes"
    MIG = "mig"
    EVENTS = "events"


class XidTold(StrEnum):
    """The source of an XID: an NVML event, a line of the fake kernel log, or both."""

    NVML = "nvml"
    KERNEL_LOG = "kernel_log"
    BOTH = "both"


_OF_A_CALL = frozenset({FaultKind.ERROR, FaultKind.READING})
_NEEDS_VALUE = _OF_A_CALL | {
    FaultKind.XID,
    FaultKind.ECC,
    FaultKind.WRONG_COUNT,
    FaultKind.RECOVERY,
}
_HAS_NO_READING = frozenset(
    {
        NvmlCall.HANDLE,
        NvmlCall.UUID,
        NvmlCall.NAME,
        NvmlCall.PCI,
        NvmlCall.PROCESSES,
        NvmlCall.EVENTS,
    }
)
_MIG_PROFILE = re.compile(r"[1-9][0-9]*g\.([1-9][0-9]*)gb")
_HAS_NO_VALUE = frozenset({FaultKind.HANG, FaultKind.LOST})


class Driver(Struct, frozen=True):
    """The calls that a driver of this version supports; an empty version is a current driver."""

    version: tuple[int, ...] = ()

    def _is(self, *least: int) -> bool:
        return not self.version or self.version >= least

    @property
    def has_mig(self) -> bool:
        return self._is(450)

    @property
    def has_memory_v2(self) -> bool:
        return self._is(510)

    @property
    def has_processes_v3(self) -> bool:
        """535.98 removed it for some releases (nvitop#88)."""
        return self._is(510) and not (535, 98) <= self.version < (535, 104)

    @property
    def has_wide_processes(self) -> bool:
        """The first releases of 535 fill the list of version 3 with records of 32 bytes."""
        return (535, 0) <= self.version < (535, 98)

    @property
    def has_event_reasons(self) -> bool:
        return self._is(535)

    @property
    def has_temperature_v(self) -> bool:
        return self._is(565)


class MigPart(Struct, frozen=True):
    """A MIG instance of a GPU: its place there, and its profile, such as `1g.10gb`."""

    index: int
    profile: str
    uuid: GpuUuid

    @property
    def memory_bytes(self) -> int:
        """The memory that its profile gives it."""
        found = _MIG_PROFILE.fullmatch(self.profile)
        assert found is not None
        return int(found[1]) << 30


class GpuGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` identical GPUs; the defaults are of a process that states no usage itself.

    mig: profiles of the MIG instances of each; an empty list: in MIG mode without any.
    """

    count: PositiveInt
    model: str
    memory_bytes: PositiveInt
    power_limit_w: PositiveFloat = 700.0
    default_busy_ratio: Ratio = 0.9
    default_memory_used_bytes: NonNegativeInt = 1_000_000_000
    mig: tuple[str, ...] | None = None


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault; without `gpu` it affects all GPUs, without `for_s` it stays.

    `told_by` is for an XID only, `call` for the kinds that name one.
    """

    kind: FaultKind
    gpu: NonNegativeInt | None = None
    value: NonNegativeInt | None = None
    at_s: NonNegativeFloat = 0.0
    for_s: PositiveFloat | None = None
    told_by: XidTold = XidTold.NVML
    call: NvmlCall | None = None

    def is_active(self, elapsed_s: float) -> bool:
        """True if the fault is on, this long after the start."""
        return self.at_s <= elapsed_s < self.end_s

    def concerns(self, index: int) -> bool:
        """True if the fault affects this GPU."""
        return self.gpu is None or self.gpu == index

    @property
    def end_s(self) -> float:
        """When the fault is over, in seconds since the start."""
        return float("inf") if self.for_s is None else self.at_s + self.for_s


class FakeFleet(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The GPUs of one machine, in the order of their indices, and their faults.

    A process is seen on the GPUs whose UUIDs it was given, wherever it came from. Two cells on one
    machine with equal node names therefore need fleets of different `name`.

    driver: the version of an older driver, such as `535.98`: it lacks later features.
    """

    gpu: tuple[GpuGroup, ...]
    name: str = ""
    driver: str = ""
    fault: tuple[Fault, ...] = ()

    @property
    def gpu_count(self) -> int:
        """GPUs that are really there, whatever a fault reports."""
        return sum(group.count for group in self.gpu)

    def uuid_of(self, node: str, index: int) -> GpuUuid:
        """UUID of a node's GPU: the same for the same fleet name, node and index, everywhere."""
        return fake_uuid(node, index, fleet=self.name)

    def parts_of(self, node: str, index: int) -> tuple[MigPart, ...]:
        """The MIG instances of a node's GPU."""
        profiles = tuple(self.groups_by_index())[index].mig or ()
        return tuple(
            MigPart(at, profile, _mig_uuid(self.uuid_of(node, index), at))
            for at, profile in enumerate(profiles)
        )

    def uuids(self, node: str) -> list[GpuUuid]:
        """All UUIDs that a process may be given on a node: GPUs and MIG instances."""
        indices = range(self.gpu_count)
        found = [self.uuid_of(node, index) for index in indices]
        return found + [part.uuid for at in indices for part in self.parts_of(node, at)]

    @property
    def known_driver(self) -> Driver:
        """The calls that its driver supports."""
        return Driver(tuple(int(part) for part in self.driver.split(".")) if self.driver else ())

    @property
    def has_kernel_log(self) -> bool:
        """True if the machine has a kernel log that shows its XIDs."""
        return any(fault.told_by != XidTold.NVML for fault in self.fault)

    def groups_by_index(self) -> Iterator[GpuGroup]:
        """The group of each GPU, by index."""
        for group in self.gpu:
            for _ in range(group.count):
                yield group

    def check(self) -> None:
        """Check what types cannot express.

        Raises:
            ConfigError: names the field.
        """
        if self.driver and not re.fullmatch(r"[0-9]+(\.[0-9]+){0,2}", self.driver):
            raise ConfigError(f"driver: {self.driver!r}, expected a version such as 535.98")
        _check_profiles(self.gpu)
        for number, fault in enumerate(self.fault):
            where = f"fault[{number}]"
            _check_call(fault, where)
            if fault.gpu is not None and fault.gpu >= self.gpu_count:
                raise ConfigError(
                    f"{where}.gpu: {fault.gpu}, but there are {self.gpu_count} GPUs from index 0"
                )
            if fault.value is None and fault.kind in _NEEDS_VALUE:
                raise ConfigError(f"{where}.value: a fault of kind {fault.kind} needs one")
            if fault.value is not None and fault.kind in _HAS_NO_VALUE:
                raise ConfigError(f"{where}.value: a fault of kind {fault.kind} has none")
            if fault.told_by != XidTold.NVML and fault.kind != FaultKind.XID:
                raise ConfigError(f"{where}.told_by: a fault of kind {fault.kind} has none")
            if fault.kind == FaultKind.WRONG_COUNT and (fault.value or 0) > self.gpu_count:
                raise ConfigError(
                    f"{where}.value: {fault.value}, but there are {self.gpu_count} GPUs;"
                    " wrong_count can only hide some"
                )
            if fault.kind == FaultKind.WRONG_COUNT and fault.gpu is not None:
                raise ConfigError(f"{where}.gpu: wrong_count is of the machine, not of one GPU")


def _check_profiles(groups: Iterable[GpuGroup]) -> None:
    for number, group in enumerate(groups):
        for profile in group.mig or ():
            if not _MIG_PROFILE.fullmatch(profile):
                raise ConfigError(
                    f"gpu[{number}].mig: {profile!r}, expected a profile such as 1g.10gb"
                )


def _check_call(fault: Fault, where: str) -> None:
    if (fault.call is not None) != (fault.kind in _OF_A_CALL):
        has = "has none" if fault.call is not None else "needs one"
        raise ConfigError(f"{where}.call: a fault of kind {fault.kind} {has}")
    if fault.kind == FaultKind.READING and fault.call in _HAS_NO_READING:
        raise ConfigError(f"{where}.call: {fault.call} has no reading; its fault is an error")


def _mig_uuid(gpu: GpuUuid, at: int) -> GpuUuid:
    return GpuUuid(f"MIG-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{at}.mig.{gpu}.aryl')}")


def pci_address_of(index: int) -> tuple[int, int, int]:
    """Domain, bus and device of a fake GPU; buses count from 1, 255 to a domain."""
    domain, bus = divmod(index, 255)
    return domain, bus + 1, 0


def parse_fleet(text: str) -> FakeFleet:
    """A fleet from TOML.

    Raises:
        ConfigError: not TOML, an unknown key, or an invalid value; names the field.
    """
    try:
        fleet = msgspec.convert(parse_toml(text), FakeFleet)
    except ValueError as error:
        raise ConfigError(f"fake fleet: {error}") from error
    fleet.check()
    return fleet


def load_fleet(path: Path) -> FakeFleet:
    """A fleet from a TOML file.

    Raises:
        ConfigError: unreadable, or as for `parse_fleet`.
    """
    try:
        return parse_fleet(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"fake fleet {path}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def fake_uuid(node: str, index: int, *, fleet: str = "") -> GpuUuid:
    """UUID of a fake GPU: the same for the same fleet, node and index, on every machine."""
    name = f"{index}.gpu.{node}.{fleet}.aryl" if fleet else f"{index}.gpu.{node}.aryl"
    return GpuUuid(f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, name)}")
