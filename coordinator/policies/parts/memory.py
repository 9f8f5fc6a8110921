"""A policy's memory between passes, decoded from the bytes that it wrote."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from common.decoding import UNREADABLE

M = TypeVar("M")


def recalled(memory: bytes, kind: type[M]) -> M:
    """The decoded memory; empty at first, and if another release wrote it differently."""
    try:
        return msgspec.msgpack.decode(memory, type=kind)
    except UNREADABLE:
        return kind()
