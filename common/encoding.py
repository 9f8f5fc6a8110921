"""Encodes and decodes messages, and holds the protocol version.

Messages are MessagePack written by msgspec; a decoder rejects an invalid message and names the
field.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Struct

from common.decoding import UNREADABLE
from common.errors import ProtocolError

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 1_000_000
"""Larger messages are refused before they are decoded."""


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that crosses the wire; `v` is checked before anything else."""

    v: int = PROTOCOL_VERSION


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A piece of a message."""


M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Message], msgspec.msgpack.Decoder[Message]] = {}


class _VersionOnly(Struct):
    v: int


_version_decoder = msgspec.msgpack.Decoder(_VersionOnly)


def encode(message: Message) -> bytes:
    """One message as MessagePack."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[M]) -> M:
    """One message of the given kind.

    Raises:
        ProtocolError: too large, another version, not MessagePack, or an invalid field; the text
            names the field.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"{kind.__name__}: {len(data)} bytes, expected at most {MAX_MESSAGE_BYTES}"
        )
    try:
        version = _version_decoder.decode(data).v
        if version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"{kind.__name__}: field v: version {version}, expected {PROTOCOL_VERSION}"
            )
        decoder = _decoders.get(kind)
        if decoder is None:
            decoder = _decoders.setdefault(kind, msgspec.msgpack.Decoder(kind))
        message = decoder.decode(data)
    except UNREADABLE as error:
        raise ProtocolError(f"{kind.__name__}: {error}") from error
    assert isinstance(message, kind)
    return message
