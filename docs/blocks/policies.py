"""Knobs of policies, keys of sweeps and the paper's runs, from the tables that the code reads."""

from __future__ import annotations

from pathlib import Path

from blocks.source import one_line, short_range
from coordinator.policies.aryl.rules import Rules
from coordinator.policies.knob_text import Knob, every, knobs
from coordinator.policies.registry import POLICIES
from coordinator.sim.inputs.sweep import OPTIONS, PARTS
from coordinator.workloads.paper_runs import FAMILIES, SCENES

SHOWN_OF = "aryl"
MOST = " and <= 1e+09"
"""The pages say once that no time is above it."""
PAGES_DIR = Path(__file__).parents[1] / "policies"


def policy_list() -> str:
    """Every policy in one sentence."""
    return "\n".join(
        f"- {_linked(name)}: {made.description}" for name, made in sorted(POLICIES.items())
    )


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _linked(name: str) -> str:
    """A policy's name, and the way to the page of its system where it has one."""
    families = (name, name.partition("-")[0])
    page = next((each for each in families if (PAGES_DIR / f"{each}.md").exists()), None)
    return f"[`{name}`](policies/{page}.md)" if page else f"`{name}`"


def joint_knobs() -> str:
    """Knobs of the policies that decide jointly, with their defaults; one of several once."""
    found: dict[tuple[str, str, str], dict[str, Knob]] = {}
    for name, made in sorted(POLICIES.items()):
        if not isinstance(made.knobs, Rules):
            for knob in knobs(made):
                found.setdefault((knob.name, knob.values, knob.says), {})[name] = knob
    groups: dict[tuple[str, ...], list[str]] = {}
    for of in found.values():
        first = next(iter(of.values()))
        defaults = [_default(first)]
        defaults += [
            f"`{name}`: {_default(knob)}"
            for name, knob in of.items()
            if knob.default != first.default
        ]
        groups.setdefault(tuple(of), []).append(_row(first, "; ".join(defaults)))
    return "\n\n".join(
        "\n".join([f"{_names(list(names))}:", "", *rows]) for names, rows in groups.items()
    )


def knob_table() -> str:
    """Every knob of rules: its values, its value in `aryl` or else by default, the knob that it
    needs, and its description in the source."""
    own = {knob.name: knob for knob in knobs(POLICIES[SHOWN_OF])}
    return "\n".join(
        _row(own.get(each.name, each), _default(own.get(each.name, each)), needs)
        for each, needs in every(Rules)
    )


def _row(knob: Knob, default: str, needs: str = "") -> str:
    values = (
        "" if knob.values == "true, false" else f"{short_range(knob.values.replace(MOST, ''))}; "
    )
    with_it = f"; needs `{needs}`" if needs else ""
    return f"- `{knob.name}` ({values}{default}{with_it}): {one_line(knob.says)}"


def _default(knob: Knob) -> str:
    return f"`{knob.default}`" if knob.default else "none"


def sweep_keys() -> str:
    """Every key of `--sweep`."""
    options = ", ".join(f"`{name}`" for name in sorted(OPTIONS))
    lines = [f"- {options}: the option of that name"]
    meanings = {
        "delays": "how many seconds a step takes, where a run has delays",
        "engine": "a setting of the engine",
        "policy": "a knob of a policy, as above",
        "service": "a setting of every lending service",
        "workload": "a parameter of the [generator](workload-paper.md)",
    }
    for part, (names, _) in sorted(PARTS.items()):
        keys = names if part != "policy" else ["KNOB"]
        dotted = ", ".join(f"`{part}.{name}`" for name in keys)
        lines.append(f"- {dotted}: {meanings[part]}")
    return "\n".join(lines)


def scenario_table() -> str:
    """Every run of the paper, by name."""
    lines: list[str] = []
    rows = [(scene.name, scene.policy, scene.description) for scene in SCENES.values()]
    rows += [(f"{each.name}-N", each.policy, each.description) for each in FAMILIES.values()]
    lines += [f"- `{name}` (`{policy.partition(':')[0]}`): {text}" for name, policy, text in rows]
    return "\n".join(lines)
