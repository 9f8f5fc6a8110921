"""Messages made from their types alone: a valid one of each, and every way to spoil it."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from common.messages import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, Message

_PLAIN = {inspect.BoolType: False, inspect.BytesType: b"", inspect.AnyType: None}


def example(kind: type[Message]) -> dict[str, Any]:
    """A message that its decoder takes, with every field that it has, as plain values."""
    return deepcopy(_example(kind))


@cache
def _example(kind: type[Message]) -> dict[str, Any]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    plain = _struct(info)
    msgspec.convert(plain, kind)  # or the spoilt ones below would prove nothing
    return plain


def _struct(info: inspect.StructType) -> dict[str, Any]:
    plain = {field.encode_name: _value(field.type) for field in info.fields}
    if info.tag_field is not None:
        plain[info.tag_field] = info.tag
    if "v" in plain:
        plain["v"] = PROTOCOL_VERSION
    return plain


def _value(info: inspect.Type) -> Any:
    match info:
        case inspect.Metadata():
            return _value(info.type)
        case inspect.UnionType():
            return _value(next(t for t in info.types if not isinstance(t, inspect.NoneType)))
        case inspect.StructType():
            return _struct(info)
        case inspect.EnumType():
            return next(iter(info.cls)).value
        case inspect.IntType() | inspect.FloatType():
            return int(info.ge or 0) or int((info.gt or 0) + 1)
        case inspect.StrType():
            return "job" if info.pattern and "job" in info.pattern else "x"
        case inspect.VarTupleType():
            return [_value(info.item_type)]
        case inspect.TupleType():
            return [_value(item) for item in info.item_types]
        case inspect.DictType():
            return {"x": _value(info.value_type)}
        case _:
            return _PLAIN[type(info)]


class Spoilt(NamedTuple):
    """Bytes that no decoder may take, and what the error must name."""

    why: str
    data: bytes
    names: str = ""


def spoilt(kind: type[Message]) -> Iterator[Spoilt]:
    """Garbage, truncated, oversized, of another version, and each field in turn wrong."""
    good = example(kind)
    data = msgspec.msgpack.encode(good)
    yield Spoilt("empty", b"")
    yield Spoilt("garbage", b"\xc1\xff\x00garbage")
    yield Spoilt("text", b"submit please")
    yield Spoilt("no object", msgspec.msgpack.encode([1, 2, 3]))
    yield Spoilt("nested", b"\x91" * 100_000)
    yield Spoilt(
        "not UTF-8", data[:1].replace(data[:1], bytes([data[0] + 1])) + b"\xa1\xff" + data[1:]
    )
    for length in (1, len(data) // 3, len(data) // 2, len(data) - 1):
        yield Spoilt(f"cut at {length}", data[:length])
    yield Spoilt("trailing bytes", data + b"\x00")
    too_much = {**good, "padding": b"x" * MAX_MESSAGE_BYTES}
    yield Spoilt("oversized", msgspec.msgpack.encode(too_much), f"at most {MAX_MESSAGE_BYTES}")
    for version in (0, PROTOCOL_VERSION + 1, "1", None):
        other = msgspec.msgpack.encode({**good, "v": version})
        yield Spoilt(f"version {version!r}", other, "v")
    yield Spoilt("no version", _without(good, "v"), "v")
    yield Spoilt("another kind", msgspec.msgpack.encode({**good, "type": "nonsense"}), "type")
    yield Spoilt("unknown field", msgspec.msgpack.encode({**good, "typo_x": 1}), "typo_x")
    for name in good:
        if name not in ("v", "type"):
            wrong = {**good, name: {"not": [1]}}
            if isinstance(good[name], dict):
                wrong[name] = 7.5
            yield Spoilt(f"wrong {name}", msgspec.msgpack.encode(wrong), name)


def _without(plain: dict[str, Any], name: str) -> bytes:
    return msgspec.msgpack.encode({key: value for key, value in plain.items() if key != name})
