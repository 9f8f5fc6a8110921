"""Knobs of policies, keys of sweeps and the paper's runs, from the tables that the code reads."""

from __future__ import annotations

import re
from enum import StrEnum
from inspect import getdoc

from blocks.source import one_line
from coordinator.policies.bundles import KNOBS, POLICIES
from coordinator.policies.passes import Rules
from coordinator.sim.scenarios import FAMILIES, SCENES
from coordinator.sim.sweep import OPTIONS, PARTS

SHOWN_OF = "aryl"


def knob_table() -> str:
    """Every knob, what it may be, what it is in `aryl`, and what the source says of it."""
    rules, notes = POLICIES[SHOWN_OF].rules, _notes()
    assert rules is not None
    lines = [f"| knob | values | of `{SHOWN_OF}` | says |", "|---|---|---|---|"]
    for name, kind in KNOBS.items():
        value = _value(getattr(rules, name))
        lines.append(f"| `{name}` | {_values(kind)} | {value} | {one_line(notes[name])} |")
    return "\n".join(lines)


def _notes() -> dict[str, str]:
    """The docstring's `name: text`, several of which may share a line."""
    doc = getdoc(Rules) or ""
    names = "|".join((*KNOBS, "order"))
    parts = re.split(rf"\b({names}): ", doc.partition("\n\n")[2])
    return {
        name: text.strip().rstrip(".") for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def _values(kind: object) -> str:
    if kind is bool:
        return "`true`, `false`"
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return ", ".join(f"`{member.value}`" for member in kind)
    text = str(kind)
    what = "whole number" if "int" in text else "number"
    least = " >= 0" if "ge=0" in text else ""
    most = " and <= 1" if "le=1" in text else ""
    return f"{what}{least}{most}" + (", `null`" if "Optional" in text else "")


def _value(value: object) -> str:
    match value:
        case bool():
            return f"`{str(value).lower()}`"
        case StrEnum():
            return f"`{value.value}`"
        case None:
            return "`null`"
        case _:
            return f"`{value:g}`"


def sweep_keys() -> str:
    """Every key of `--sweep`."""
    lines = ["| key | is |", "|---|---|"]
    options = ", ".join(f"`{name}`" for name in sorted(OPTIONS))
    lines.append(f"| {options} | the option of that name |")
    meanings = {
        "delays": "how many seconds a step takes, where a run has delays",
        "engine": "a setting of the engine",
        "policy": "a knob, as above",
        "service": "a setting of every lending service",
        "workload": "a parameter of the [generator](workload-paper.md)",
    }
    for part, (names, _) in sorted(PARTS.items()):
        dotted = ", ".join(f"`{part}.{name}`" for name in names)
        lines.append(f"| {dotted} | {meanings[part]} |")
    return "\n".join(lines)


def scenario_table() -> str:
    """Every run of the paper, by name."""
    lines = ["| scenario | policy | is |", "|---|---|---|"]
    rows = [(scene.name, scene.policy, scene.description) for scene in SCENES.values()]
    rows += [(f"{each.name}-N", each.policy, each.description) for each in FAMILIES.values()]
    lines += [
        f"| `{name}` | `{policy.partition(':')[0]}` | {text} |" for name, policy, text in rows
    ]
    return "\n".join(lines)
