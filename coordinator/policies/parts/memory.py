"""A policy's memory between passes, decoded from the bytes that it wrote."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from common.decoding import UNREADABLE

M = TypeVar("M")


def recalled(memory: bytes, kind: type[M]) -> M:
    """What was remembered; nothing at first, and of what another release wrote otherwise."""
    try:
        return msgspec.msgpack.decode(memory, type=kind)
    except UNREADABLE:
        return kind()
