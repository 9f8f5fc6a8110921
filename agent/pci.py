"""The one spelling of a PCI address that NVML's and the kernel's are compared in. Pure."""

from __future__ import annotations


def pci_address(domain: int, bus: int, device: int) -> str:
    """`0000:3b:00`; without the function, which is always 0 of a GPU."""
    return f"{domain:04x}:{bus:02x}:{device:02x}"
