"""Subjects and messages as tables, from the types that encode them. Must not know NATS."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from functools import cache
from itertools import groupby
from types import ModuleType

import msgspec
from msgspec import inspect as types

from blocks.source import doc_of, member_notes, one_line
from common import api, messages, plans, subjects
from common.messages import Message
from common.model import MAX_INT, TOKEN_PATTERN, JobSpec, WorkerRange
from common.settings import describe


def anchor(kind: type) -> str:
    """A link to a type's own section on the same page."""
    return f"[{kind.__name__}](#{kind.__name__.lower()})"


_ONLY_WHILE = re.compile(
    r" ?\bOnly [^.:]*"
    r"(?:, as above|: a (?:caller|coordinator) of an older version refuses \w+)(?:\.|$)"
)
"""Why a field is left out at times: the page has it once, for all of them."""

# --- messages -------------------------------------------------------------------------------


def own_fields(kind: type[msgspec.Struct]) -> Iterator[types.Field]:
    """The fields of a struct in order, without the version that every message has."""
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    for item in info.fields:
        if not (issubclass(kind, Message) and item.name == "v"):
            yield item


def bounds(kind: types.IntType | types.FloatType) -> str:
    """The range that a number must lie in; the page says once what all counts are below."""
    high = None if kind.le == MAX_INT else kind.le
    if kind.ge is not None and kind.gt is None and kind.lt is None:
        return f" {kind.ge:g}..{'' if high is None else f'{high:g}'}"
    parts = [
        f"{sign} {limit:g}"
        for sign, limit in ((">=", kind.ge), (">", kind.gt), ("<=", high), ("<", kind.lt))
        if limit is not None
    ]
    return f" {' and '.join(parts)}" if parts else ""


def type_text(kind: types.Type) -> str:
    """A field's type and constraints in words."""
    match kind:
        case types.Metadata(type=inner):
            return type_text(inner)
        case types.EnumType(cls=cls) | types.StructType(cls=cls):
            return anchor(cls)
        case types.VarTupleType(item_type=item, min_length=least):
            return f"{_whole(type_text(item))}[]" + (f", at least {least}" if least else "")
        case types.TupleType(item_types=items):
            return f"({', '.join(type_text(item) for item in items)})"
        case types.DictType(key_type=key, value_type=value):
            return f"{{{type_text(key)}: {type_text(value)}}}"
        case types.UnionType(types=members):
            is_nil = [isinstance(member, types.NoneType) for member in members]
            texts = [type_text(each) for each, nil in zip(members, is_nil, strict=True) if not nil]
            return _whole(" or ".join(texts)) + ("?" if any(is_nil) else "")
        case _:
            return plain_type_text(kind)


def _whole(text: str) -> str:
    """A type's words as one, for a sign behind them."""
    return f"({text})" if " " in text else text


def plain_type_text(kind: types.Type) -> str:
    """A type that is made of no others, in words."""
    match kind:
        case types.IntType():
            return "count" if bounds(kind) == " 0.." else f"int{bounds(kind)}"
        case types.FloatType():
            return f"float{bounds(kind)}"
        case types.StrType(pattern=None):
            return "str"
        case types.StrType(pattern=str(pattern)):
            return "token" if pattern == TOKEN_PATTERN else f"str like `{one_line(pattern)}`"
        case types.BoolType():
            return "bool"
        case types.CustomType(cls=cls) if cls is object:
            return "any"
        case _:
            raise NotImplementedError(f"no words for {kind}")


def default_text(item: types.Field) -> str:
    """A field's default; empty where the field must be there, and where nil is the default."""
    if item.required:
        return "required" if type_text(item.type).endswith("?") else ""
    value = item.default
    if value is msgspec.NODEFAULT:
        if item.default_factory is msgspec.NODEFAULT:
            return "omitted"  # `UNSET`
        value = item.default_factory()
    if value is None:
        return ""
    if isinstance(value, msgspec.Struct):
        return "its defaults"
    if isinstance(value, tuple | list | dict | str) and not value:
        return "empty"
    return f"`{msgspec.json.encode(value).decode()}`"


def struct_section(kind: type[msgspec.Struct]) -> str:
    """One message or part: its tag, what it is, its fields."""
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    text, notes = split_doc(kind)
    tag = "" if info.tag is None else f"`{info.tag}`: "
    lines = [f"### {kind.__name__}", "", tag + text]
    keys = job_file_keys().get(kind, frozenset())
    if keys:
        lines += ["", "Its fields are keys of a [job file](job-contract.md#the-job-file)."]
    notes |= {name: note for name, note in member_notes(kind).items() if note}
    fields = [item for item in own_fields(kind) if item.encode_name not in keys]
    if fields:
        lines += ["", *field_lines(fields, notes)]
    return "\n".join(lines)


def split_doc(kind: type) -> tuple[str, dict[str, str]]:
    """A docstring without its lines about fields, and these by field."""
    doc = doc_of(kind)
    names = {item.name for item in own_fields(kind)}
    notes: dict[str, str] = {}
    rest: list[str] = []
    for line in doc.splitlines():
        heads, colon, note = line.partition(": ")
        named = heads.split(", ")
        if colon and set(named) <= names:
            notes |= dict.fromkeys(named, note)
        else:
            rest.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(rest)).strip(), notes


def field_lines(fields: Iterable[types.Field], notes: Mapping[str, str]) -> Iterator[str]:
    """Fields as a list: names, type, default, note; neighbours without notes share an item, and
    those that differ by name alone a type."""
    plain: list[str] = []
    for (text, note), alike in groupby(
        fields, key=lambda item: (_type_and_default(item), notes.get(item.name, ""))
    ):
        names = ", ".join(f"`{item.encode_name}`" for item in alike)
        if "in full" not in note:
            note = _ONLY_WHILE.sub("", note)
        if note:
            yield from _one_item(plain)
            plain = []
            yield f"- {names}: {text}. {note[0].upper()}{note[1:]}"
        else:
            plain.append(f"{names}: {text}")
    yield from _one_item(plain)


def _one_item(fields: list[str]) -> list[str]:
    return [f"- {'; '.join(fields)}"] if fields else []


def _type_and_default(item: types.Field) -> str:
    default = default_text(item)
    return type_text(item.type) + (f", {default}" if default else "")


def _beyond_the_job_file(kind: type[msgspec.Struct]) -> list[str]:
    keys = job_file_keys()[kind]
    return [item.name for item in own_fields(kind) if item.encode_name not in keys]


@cache
def job_file_keys() -> dict[type, frozenset[str]]:
    """Per struct that a job file is made of the fields that its page describes."""
    rows = {row.key for row in describe(JobSpec)} - {"prerun.gang"}
    parts: dict[str, type[msgspec.Struct]] = {"": JobSpec}
    for item in own_fields(JobSpec):
        for kind in classes_in(item.type):
            if issubclass(kind, msgspec.Struct):
                parts[f"{item.name}."] = kind
    return {
        kind: frozenset(
            item.encode_name for item in own_fields(kind) if f"{prefix}{item.name}" in rows
        )
        for prefix, kind in parts.items()
    }


def enum_section(kind: type[StrEnum]) -> str:
    """One enumeration: its values, those with a note as a list."""
    notes = member_notes(kind)
    bare = [f"`{member.value}`" for member in kind if not notes.get(member.name)]
    lines = [
        f"- `{member.value}`: {notes[member.name]}" for member in kind if notes.get(member.name)
    ]
    lines += [f"- {', '.join(bare)}"] if lines and bare else []
    values = "\n".join(lines) if lines else f"One of {', '.join(bare)}."
    return f"### {kind.__name__}\n\n{doc_of(kind)}\n\n{values}"


def messages_in(module: ModuleType) -> list[type[Message]]:
    """The messages that a module defines, in the order of its text."""
    return [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, Message)
        and kind is not Message
        and kind.__module__ == module.__name__
    ]


def classes_in(kind: types.Type) -> Iterator[type]:
    """Structs and enumerations that a field's type names."""
    match kind:
        case types.Metadata(type=inner):
            yield from classes_in(inner)
        case types.EnumType(cls=cls) | types.StructType(cls=cls):
            yield cls
        case types.VarTupleType(item_type=item):
            yield from classes_in(item)
        case types.DictType(key_type=key, value_type=value):
            yield from classes_in(key)
            yield from classes_in(value)
        case types.UnionType(types=members):
            for member in members:
                yield from classes_in(member)
        case _:
            return


def reachable(roots: list[type[Message]]) -> list[type]:
    """Every class that the fields of these messages lead to, by name; the roots are left out."""
    found: set[type] = set()
    waiting: list[type] = list(roots)
    while waiting:
        kind = waiting.pop()
        if issubclass(kind, msgspec.Struct):
            for item in own_fields(kind):
                new = set(classes_in(item.type)) - found
                found |= new
                waiting += new
    return sorted(found - set(roots), key=lambda kind: kind.__name__)


def node_messages() -> str:
    """Messages between agents and the coordinator."""
    return "\n\n".join(struct_section(kind) for kind in messages_in(messages))


def _of_the_api() -> list[type[Message]]:
    return messages_in(api) + messages_in(plans)


def api_messages() -> str:
    """Requests of the API, then its replies."""
    replies = [kind for kind in _of_the_api() if kind not in api.REQUESTS]
    return "\n\n".join(struct_section(kind) for kind in [*api.REQUESTS, *replies])


def message_parts() -> str:
    """What the messages are made of."""
    sections: list[str] = []
    in_job_files = set(job_file_keys()) - {JobSpec, WorkerRange}
    for kind in reachable(messages_in(messages) + _of_the_api()):
        if kind in in_job_files and not _beyond_the_job_file(kind):
            continue  # the page of the job file has all of it
        if issubclass(kind, StrEnum):
            sections.append(enum_section(kind))
        else:
            assert issubclass(kind, msgspec.Struct)
            sections.append(struct_section(kind))
    return "\n\n".join(sections)


def subject_table() -> str:
    """Every subject of a cell, as the module that builds them writes it."""
    lines = ["| subject | what goes there |", "|---|---|"]
    for _, build in inspect.getmembers(subjects, inspect.isfunction):
        parameters = list(inspect.signature(build).parameters)
        if parameters[:1] != ["cell"] or build.__module__ != subjects.__name__:
            continue
        subject = build(*(f"<{parameter}>" for parameter in parameters))
        lines.append(f"| `{subject}` | {one_line(doc_of(build))} |")
    return "\n".join(lines)
