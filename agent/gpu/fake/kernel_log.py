"""A kernel log of fake GPUs: prints the XIDs of a fleet file when due, in journalctl's format.

Run as `python -m agent.gpu.fake.kernel_log SETTINGS`, SETTINGS being `FakeLogSettings` as JSON. The
process ends when its stdin closes.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from agent.gpu.fake.fleet import FakeFleet, FaultKind, XidTold, load_fleet, pci_address_of
from agent.gpu.wire import pci_address
from common.model import NonNegativeFloat

BANNER = "Linux version 0.0-fake: the kernel log of GPUs that are not there"


class FakeLogSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process's one argument.

    fleet: TOML file of the fake GPUs.
    age_s: how much of its script is over already.
    place: cursor of the last line that was read; empty for none.
    """

    fleet: str
    age_s: NonNegativeFloat = 0.0
    place: str = ""


class FakeLine(Struct, frozen=True):
    """One line of the log, due `at_s` after the script began."""

    at_s: float
    cursor: int
    message: str

    def as_json(self) -> str:
        """The line as `journalctl --output=json --output-fields=MESSAGE` prints it."""
        return json.dumps({"__CURSOR": f"fake={self.cursor}", "MESSAGE": self.message})


def lines_of(fleet: FakeFleet) -> tuple[FakeLine, ...]:
    """The whole log of a fleet's script, in order of time."""
    due = sorted(
        (fault.at_s, number, index)
        for number, fault in enumerate(fleet.fault)
        if fault.kind == FaultKind.XID and fault.told_by != XidTold.NVML
        for index in range(fleet.gpu_count)
        if fault.concerns(index)
    )
    lines = [FakeLine(0.0, 0, BANNER)]
    for at_s, number, index in due:
        address = pci_address(*pci_address_of(index))
        code = fleet.fault[number].value
        # Half of the driver's lines name a process and half do not: so do these.
        process = ", pid='<unknown>', name=<unknown>" if len(lines) % 2 else ""
        text = f"NVRM: Xid (PCI:{address}): {code}{process}, as the fleet file says."
        lines.append(FakeLine(at_s, len(lines), text))
    return tuple(lines)


def written(
    lines: tuple[FakeLine, ...], settings: FakeLogSettings, wait: Callable[[float], bool]
) -> Iterator[str]:
    """The lines that a reader of these settings gets, each when it is due.

    As with journalctl, a reader without a place first gets the last older line, then the new ones.

    Args:
        wait: waits some seconds; False when the reader has gone.
    """
    elapsed_s = settings.age_s
    if settings.place:
        first = int(settings.place.removeprefix("fake=")) + 1
    else:
        first = max((line.cursor for line in lines if line.at_s < elapsed_s), default=0)
    for line in lines[first:]:
        if line.at_s > elapsed_s:
            if not wait(line.at_s - elapsed_s):
                return
            elapsed_s = line.at_s
        yield line.as_json()
    while wait(3600.0):
        pass


def main() -> None:
    """Write until stdin ends."""
    settings = msgspec.json.decode(sys.argv[1], type=FakeLogSettings)
    fleet = load_fleet(Path(settings.fleet))

    def wait(delay_s: float) -> bool:
        end_s = time.monotonic() + delay_s
        while (left_s := end_s - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left_s)[0]:
                return False
        return True

    for line in written(lines_of(fleet), settings, wait):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
