"""The file that describes fake GPUs and their faults. Must not know NVML, time or processes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
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
    """What can go wrong with a GPU.

    `hang`: calls do not return. `lost`: fell off the bus. `xid`: one XID event with code `value`.
    `ecc`: `value` uncorrected errors. `wrong_count`: NVML says there are `value` GPUs.
    `throttle`: slowed down; `value` is the bit mask of reasons, hardware heat if there is none.
    `recovery`: NVML's recovery action `value`; without such a fault the driver tells of none.
    """

    HANG = "hang"
    LOST = "lost"
    XID = "xid"
    ECC = "ecc"
    WRONG_COUNT = "wrong_count"
    THROTTLE = "throttle"
    RECOVERY = "recovery"


class XidTold(StrEnum):
    """Who tells of an XID: an NVML event, a line of the fake kernel log, or both of them."""

    NVML = "nvml"
    KERNEL_LOG = "kernel_log"
    BOTH = "both"


_NEEDS_VALUE = frozenset({FaultKind.XID, FaultKind.ECC, FaultKind.WRONG_COUNT, FaultKind.RECOVERY})
_HAS_NO_VALUE = frozenset({FaultKind.HANG, FaultKind.LOST})


class GpuGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` GPUs that are alike; the defaults are of a process that does not say itself."""

    count: PositiveInt
    model: str
    memory_bytes: PositiveInt
    power_limit_w: PositiveFloat = 700.0
    default_busy_ratio: Ratio = 0.9
    default_memory_used_bytes: NonNegativeInt = 1_000_000_000


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault; without `gpu` it is of all of them, without `for_s` it stays.

    `told_by` is for an XID only.
    """

    kind: FaultKind
    gpu: NonNegativeInt | None = None
    value: NonNegativeInt | None = None
    at_s: NonNegativeFloat = 0.0
    for_s: PositiveFloat | None = None
    told_by: XidTold = XidTold.NVML

    def is_active(self, elapsed_s: float) -> bool:
        """Whether it is on, this long after the start."""
        return self.at_s <= elapsed_s < self.end_s

    def concerns(self, index: int) -> bool:
        """Whether it is a fault of this GPU."""
        return self.gpu is None or self.gpu == index

    @property
    def end_s(self) -> float:
        """When it is over, in seconds since the start."""
        return float("inf") if self.for_s is None else self.at_s + self.for_s


class FakeFleet(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The GPUs of one machine, in the order of their indices, and what happens to them.

    A process is seen on the GPUs whose UUIDs it was given, wherever it came from. Two cells on one
    machine whose nodes are called alike therefore need fleets of different `name`.
    """

    gpu: tuple[GpuGroup, ...]
    name: str = ""
    fault: tuple[Fault, ...] = ()

    @property
    def gpu_count(self) -> int:
        """GPUs that are really there, whatever a fault says."""
        return sum(group.count for group in self.gpu)

    def uuid_of(self, node: str, index: int) -> GpuUuid:
        """UUID of a node's GPU: the same for the same fleet name, node and index, everywhere."""
        return fake_uuid(node, index, fleet=self.name)

    @property
    def has_kernel_log(self) -> bool:
        """Whether the machine has a kernel log that tells of its XIDs."""
        return any(fault.told_by != XidTold.NVML for fault in self.fault)

    def groups_by_index(self) -> Iterator[GpuGroup]:
        """The group of each GPU, by index."""
        for group in self.gpu:
            for _ in range(group.count):
                yield group

    def check(self) -> None:
        """What types cannot say.

        Raises:
            ConfigError: names the field.
        """
        for number, fault in enumerate(self.fault):
            where = f"fault[{number}]"
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


def pci_address_of(index: int) -> tuple[int, int, int]:
    """Domain, bus and device of a fake GPU; buses count from 1, 255 to a domain."""
    domain, bus = divmod(index, 255)
    return domain, bus + 1, 0


def parse_fleet(text: str) -> FakeFleet:
    """A fleet from TOML.

    Raises:
        ConfigError: not TOML, an unknown key, or a value that does not fit; names the field.
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
