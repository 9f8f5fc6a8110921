"""The protocol between the agent and its NVML child, and the common spelling of PCI addresses.

A frame is four bytes of length, big-endian, and a MessagePack payload. An empty frame asks for a
sample; a `Sample` answers. At most one question is under way. Pure.

NVML and the kernel spell PCI addresses differently; both are compared in the spelling defined here.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from common.decoding import UNREADABLE
from common.errors import ProtocolError
from common.messages import GpuReport
from common.model import GpuUuid, NonNegativeFloat, PositiveFloat


def pci_address(domain: int, bus: int, device: int) -> str:
    """The address as `0000:3b:00`, without the function, which is always 0 for a GPU."""
    return f"{domain:04x}:{bus:02x}:{device:02x}"


HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 1_000_000
ASK = HEADER.pack(0)


class Sample(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """All GPUs once; `error` is the reason for any part that could not be read.

    unread: values for which NVML returned an error or nonsense, and why; they are reported as
        unknown.
    lost_indices: GPUs that NVML reports as lost, and that this child cannot name.
    uuid_by_pci_address: as the kernel log names them, where NVML gives it; spelled as in
        `agent.gpu.wire`.
    """

    gpus: tuple[GpuReport, ...] = ()
    error: str = ""
    unread: dict[str, str] = {}
    uuid_by_pci_address: dict[str, GpuUuid] = {}
    lost_indices: tuple[int, ...] = ()


class ChildSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The child's one argument, as JSON."""

    node: Annotated[str, Meta(description="node name, part of the fake GPUs' UUIDs")]
    fake_fleet: Annotated[str, Meta(description="TOML file of fake GPUs; empty: real NVML")] = ""
    fake_age_s: Annotated[
        NonNegativeFloat, Meta(description="time already passed in the script of the fake GPUs")
    ] = 0.0
    gpu_deadline_s: Annotated[
        PositiveFloat, Meta(description="a GPU that takes longer to answer is unresponsive")
    ] = 0.5


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Sample)


def frame_of(sample: Sample) -> bytes:
    """A sample with its header."""
    payload = _encoder.encode(sample)
    return HEADER.pack(len(payload)) + payload


def payload_bytes(header: bytes) -> int:
    """Length of the payload that follows this header.

    Raises:
        ProtocolError: larger than any sample can be; the stream is out of step.
    """
    length = int.from_bytes(header, "big")
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {length} bytes, expected at most {MAX_FRAME_BYTES}")
    return length


def sample_of(payload: bytes) -> Sample:
    """The sample in a payload.

    Raises:
        ProtocolError: not a sample; the text names the field.
    """
    try:
        return _decoder.decode(payload)
    except UNREADABLE as error:
        raise ProtocolError(f"Sample: {error}") from error
