"""Reads settings files: TOML to a frozen struct; an error names file, key and the expected value.

An edge: reads files. The structs document the settings themselves.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from msgspec import inspect

from common.decoding import parse_toml
from common.errors import ConfigError
from common.model import MAX_INT

S = TypeVar("S", bound=msgspec.Struct)

_Table = dict[str, Any]
_Key = tuple[str | int, ...]
_UNKNOWN = re.compile(r"unknown field `(?P<field>[^`]+)`")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")
_AT = re.compile(r" - at `(?P<path>\$[^`]*)`$")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\.\.\.|\d+)\]")


class SettingRow(NamedTuple):
    """One line of the reference of a settings file."""

    key: str
    """Dotted; `[]` after a list of tables."""
    type: str
    default: str
    """The value as written in the file; `required` where there is none."""
    meaning: str


def load(path: Path, kind: type[S]) -> S:
    """The settings in `path`, with `path.d/*.toml` laid over them in order of their names.

    A table in a drop-in is merged into the table of the same name; any other value, lists included,
    replaces the one before.

    Raises:
        ConfigError: a file cannot be read or is not TOML, a key is unknown (the nearest valid one
            is named), missing, of the wrong type or out of range, or a text has a zero byte in it.
    """
    merged: _Table = {}
    origins: dict[_Key, Path] = {}
    for file in (path, *drop_ins(path)):
        _merge(merged, _read(file), (), file, origins)
    if (zero := _key_with_zero(merged)) is not None:
        where = _origin(zero, origins, path)
        raise ConfigError(f"{where}: {_dotted(zero)}: holds a zero byte, which no setting may")
    try:
        return msgspec.convert(merged, kind, dec_hook=_decode_custom)
    except msgspec.ValidationError as error:
        key, problem = _explain(str(error), merged, kind)
        where = _origin(key, origins, path)
        raise ConfigError(f"{where}: {_dotted(key) or 'top level'}: {problem}") from error


def describe(kind: type[msgspec.Struct]) -> tuple[SettingRow, ...]:
    """Every key of a settings file, in the order of the struct; made from the struct alone."""
    return tuple(_rows(_struct_info(kind), ""))


# --- reading and merging --------------------------------------------------------------------


def drop_ins(path: Path) -> list[Path]:
    """The files that are laid over a settings file, in their order."""
    return sorted(path.with_name(f"{path.name}.d").glob("*.toml"))


def _read(file: Path) -> _Table:
    try:
        return parse_toml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not TOML: {error}") from error


def _merge(into: _Table, new: _Table, prefix: _Key, file: Path, origins: dict[_Key, Path]) -> None:
    for name, value in new.items():
        key = (*prefix, name)
        origins[key] = file
        old = into.get(name)
        if isinstance(value, dict):
            table = cast("_Table", old) if isinstance(old, dict) else {}
            into[name] = table
            _merge(table, cast("_Table", value), key, file, origins)
        else:
            into[name] = value


def _key_with_zero(value: object, key: _Key = ()) -> _Key | None:
    """The key of a text with a zero byte.

    No path, name or command can hold it, and each would fail late.
    """
    if isinstance(value, str):
        return key if "\0" in value else None
    if isinstance(value, dict):
        items: Iterable[tuple[str | int, object]] = cast("_Table", value).items()
    else:
        items = enumerate(_list(value))
    found = (_key_with_zero(item, (*key, name)) for name, item in items)
    return next((one for one in found if one is not None), None)


def _origin(key: _Key, origins: Mapping[_Key, Path], default: Path) -> Path:
    for length in range(len(key), 0, -1):
        if key[:length] in origins:
            return origins[key[:length]]
    return default


def _decode_custom(kind: type[Any], value: object) -> object:
    if kind is Path:
        if isinstance(value, str):
            return Path(value)
        raise ValueError(f"Expected a path as text, got `{type(value).__name__}`")
    raise NotImplementedError(f"settings cannot hold a {kind.__name__}")


# --- errors ---------------------------------------------------------------------------------


def _explain(text: str, data: _Table, kind: type[msgspec.Struct]) -> tuple[_Key, str]:
    """The key that msgspec's message is about, and its error."""
    at = _AT.search(text)
    steps = _STEP.findall(at["path"]) if at else []
    problem = text[: at.start()] if at else text
    key, info = _locate([name or item for name, item in steps], data, _struct_info(kind))
    unknown = _UNKNOWN.search(problem)
    if unknown:
        return (*key, unknown["field"]), _unknown_text(unknown["field"], info)
    missing = _MISSING.search(problem)
    if missing:
        return (*key, missing["field"]), "is required and missing"
    if problem.startswith("Invalid enum value"):  # msgspec does not name them
        problem += f", expected {_type_text(info)}"
    return key, problem[:1].lower() + problem[1:]


def _locate(steps: list[str], value: object, info: inspect.Type) -> tuple[_Key, inspect.Type]:
    """Follow msgspec's path; it hides the index in a list, so try the items."""
    key: list[str | int] = []
    for step in steps:
        info = _bare(info)
        if isinstance(info, inspect.StructType) and isinstance(value, dict):
            key.append(step)
            value, info = cast("_Table", value).get(step), _field_type(info, step)
            continue
        inner = _bare(info.value_type if isinstance(info, inspect.DictType) else _item_type(info))
        if not isinstance(inner, inspect.StructType):
            break  # a plain value in a list: the message shows which one
        index, value = _first_bad(value, inner)
        key.append(index)
        info = inner
    return tuple(key), _bare(info)


def _first_bad(many: object, info: inspect.StructType) -> tuple[str | int, object]:
    """The first invalid table of a list, or of a table of tables."""
    items = cast("_Table", many).items() if isinstance(many, dict) else enumerate(_list(many))
    for index, item in items:
        try:
            msgspec.convert(item, info.cls, dec_hook=_decode_custom)
        except msgspec.ValidationError:
            return index, item
    return "?", None


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _unknown_text(field: str, info: inspect.Type) -> str:
    valid = [f.encode_name for f in info.fields] if isinstance(info, inspect.StructType) else []
    near = difflib.get_close_matches(field, valid, n=1, cutoff=0.5)
    if near:
        return f"unknown key; did you mean {near[0]!r}?"
    return f"unknown key; expected one of {', '.join(sorted(valid))}"


def _dotted(key: _Key) -> str:
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


# --- the reference --------------------------------------------------------------------------


def _rows(struct: inspect.StructType, prefix: str) -> Iterator[SettingRow]:
    for field in struct.fields:
        key = f"{prefix}{field.encode_name}"
        info = _bare(field.type)
        nested, mark = (_bare(_item_type(info)), "[]") if _is_list(info) else (info, "")
        meaning = _description(field.type)
        if isinstance(nested, inspect.StructType):
            kind = "list of tables" if mark else "table"
            default = "[]" if mark and not field.required else ""
            yield SettingRow(key + mark, kind, default, meaning)
            yield from _rows(nested, f"{key}{mark}.")
        else:
            yield SettingRow(key, _type_text(field.type), _default_text(field), meaning)


def _struct_info(kind: type[msgspec.Struct]) -> inspect.StructType:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return info


def _bare(info: inspect.Type) -> inspect.Type:
    """The type without its metadata, and without the None of an optional value."""
    while isinstance(info, inspect.Metadata):
        info = info.type
    if isinstance(info, inspect.UnionType):
        rest = [t for t in info.types if not isinstance(t, inspect.NoneType)]
        if len(rest) == 1:
            return _bare(rest[0])
    return info


def _is_list(info: inspect.Type) -> bool:
    return isinstance(info, inspect.CollectionType)


def _item_type(info: inspect.Type) -> inspect.Type:
    return info.item_type if isinstance(info, inspect.CollectionType) else inspect.AnyType()


def _field_type(info: inspect.Type, name: str) -> inspect.Type:
    if isinstance(info, inspect.StructType):
        for field in info.fields:
            if field.encode_name == name:
                return field.type
    return inspect.AnyType()


def _description(info: inspect.Type) -> str:
    while isinstance(info, inspect.Metadata):
        schema = cast("dict[str, object]", info.extra_json_schema or {})  # pyright: ignore[reportUnknownMemberType]
        if "description" in schema:
            return str(schema["description"])
        info = info.type
    return ""


def _type_text(info: inspect.Type) -> str:
    info = _bare(info)
    match info:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() | inspect.FloatType():
            return _number_text(info)
        case inspect.StrType():
            return f"text matching {info.pattern}" if info.pattern else "text"
        case inspect.EnumType():
            return "one of " + ", ".join(str(member.value) for member in info.cls)
        case inspect.LiteralType():
            return "one of " + ", ".join(str(value) for value in info.values)
        case inspect.CollectionType():
            return f"list of {_type_text(info.item_type)}"
        case inspect.DictType():
            return f"table of {_type_text(info.value_type)}"
        case inspect.UnionType():
            return " or ".join(_type_text(one) for one in info.types)
        case inspect.CustomType():
            return "path" if info.cls is Path else info.cls.__name__.lower()
        case _:
            return type(info).__name__.removesuffix("Type").lower()


def _number_text(info: inspect.IntType | inspect.FloatType) -> str:
    name = "integer" if isinstance(info, inspect.IntType) else "number"
    bounds = ((">=", info.ge), (">", info.gt), ("<=", info.le), ("<", info.lt))
    limits = [f"{sign} {bound:g}" for sign, bound in bounds if bound not in (None, MAX_INT)]
    return " ".join([name, " and ".join(limits)]).strip()


def _default_text(field: inspect.Field) -> str:
    if field.required:
        return "required"
    value: Any = field.default
    if value is msgspec.NODEFAULT:
        factory: Any = field.default_factory
        # Neither, and not required: UNSET, which is not sent at all.
        value = None if factory is msgspec.NODEFAULT else factory()
    return _toml(value)


def _toml(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return f"{value}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, cast("Sequence[object]", value))) + "]"
    if isinstance(value, dict):
        return "{}" if not value else msgspec.json.encode(value).decode()
    return f'"{value}"'
