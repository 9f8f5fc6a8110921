"""One valid value of any msgspec type, made from the type alone: what a fuzzer begins with."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect

_TEXT_BY_PATTERN_START = {"^[A-Za-z0-9_-]": "a-1", "^[a-z0-9_]": "a_1", "^(job": "job"}


def example(kind: Any, *, is_full: bool) -> Any:
    """A value that a decoder of this type takes, as plain values.

    Args:
        kind: a type that msgspec can decode.
        is_full: give every optional field and one entry to every collection.
    """
    return _of(inspect.type_info(kind), is_full, 0)


def encoded(kind: Any, *, is_full: bool) -> bytes:
    """The same as MessagePack; read back once, so that a wrong example is no silent seed."""
    data = msgspec.msgpack.encode(example(kind, is_full=is_full))
    msgspec.msgpack.decode(data, type=kind)
    return data


def _of(info: inspect.Type, is_full: bool, depth: int) -> Any:
    match info:
        case inspect.Metadata(type=inner):
            return _of(inner, is_full, depth)
        case inspect.StructType():
            return _struct(info, is_full, depth)
        case inspect.EnumType(cls=cls):
            return next(iter(cls)).value
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.UnionType(types=types):
            return _of(_choice(types, is_full), is_full, depth)
        case inspect.CollectionType(item_type=item) | inspect.VarTupleType(item_type=item):
            wanted = is_full or bool(getattr(info, "min_length", 0))
            return [_of(item, is_full, depth + 1)] if wanted and depth < 12 else []
        case inspect.TupleType(item_types=items):
            return [_of(item, is_full, depth + 1) for item in items]
        case inspect.DictType(key_type=key, value_type=value):
            if not is_full or depth >= 12:
                return {}
            return {_of(key, is_full, depth + 1): _of(value, is_full, depth + 1)}
        case _:
            return _scalar(info)


def _struct(info: inspect.StructType, is_full: bool, depth: int) -> Any:
    values = {
        field.encode_name: _of(field.type, is_full, depth + 1)
        for field in info.fields
        if field.required or is_full
    }
    if info.array_like:
        tag = [] if info.tag is None else [info.tag]
        return [*tag, *values.values()]
    if info.tag is not None:
        assert info.tag_field is not None
        values = {info.tag_field: info.tag, **values}
    # Versions are looked at first, and only the present one goes on.
    versions = [one for one in info.fields if one.encode_name in ("v", "version")]
    values |= {one.encode_name: one.default for one in versions if not one.required}
    return values


def _choice(types: tuple[inspect.Type, ...], is_full: bool) -> inspect.Type:
    nothing = [one for one in types if isinstance(one, inspect.NoneType)]
    something = [one for one in types if not isinstance(one, inspect.NoneType)]
    return something[0] if is_full or not nothing else nothing[0]


def _scalar(info: inspect.Type) -> Any:
    match info:
        case inspect.BoolType():
            return True
        case inspect.IntType(ge=ge, gt=gt):
            return max(1, ge or 0, (gt or 0) + 1)
        case inspect.FloatType(ge=ge, le=le):
            least = max(1.0, ge or 0.0)
            return least if le is None else min(least, le)
        case inspect.StrType(pattern=pattern):
            starts = _TEXT_BY_PATTERN_START.items()
            return next((text for start, text in starts if (pattern or "").startswith(start)), "a")
        case inspect.BytesType():
            return b"a"
        case inspect.RawType():
            return msgspec.Raw(b"\xc0")
        case _:
            return None
