"""`--constraint`, `--nodelist` and `--exclude` -> the fields of a job that select nodes. Pure.

A feature is a label, `key` or `key=value`. Features joined by `&` must all hold, and of those
joined by `|` one must. Both in one text need parentheses around the alternatives.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from common import node_labels
from common.errors import ConfigError
from common.slurm.nodelists import compress, expand

_FORM = (
    "expected features joined by & or by |, such as nvlink&rack=r7 or (rack=r7|rack=r8)&nvlink; "
    "there are no counts (*), ! and []"
)


def selected(asked: Mapping[str, str], nodes: tuple[int, int]) -> dict[str, list[str]]:
    """The fields `require`, `require_nodes` and `exclude_nodes`, as far as options ask for them.

    nodes: the fewest and the most nodes of the job.

    Raises:
        ConfigError: names the option and what was expected.
    """
    found: dict[str, list[str]] = {}
    if asked.get("constraint"):
        found["require"] = terms(asked["constraint"])
    if asked.get("nodelist"):
        names = _names("nodelist", asked["nodelist"])
        if len(names) < nodes[0]:
            raise ConfigError(
                f"--nodelist: {asked['nodelist']!r} names {len(names)}, and the job has "
                f"{nodes[0]} nodes: it runs on no others, expected at least as many"
            )
        found["require_nodes"] = names
    if asked.get("exclude"):
        found["exclude_nodes"] = _names("exclude", asked["exclude"])
    return found


def note(asked: Mapping[str, str], nodes: tuple[int, int]) -> str:
    """The difference to Slurm, where a list names more nodes than the job has; else empty."""
    names = expand(asked.get("nodelist", ""))
    if len(names) <= nodes[1]:
        return ""
    return f"the job runs on {nodes[1]} of the {len(names)} nodes of --nodelist (use --nodes)"


def unknown(asked: Mapping[str, str], known: Collection[str]) -> list[str]:
    """A note for each list that names nodes that the cell does not have."""
    found: list[str] = []
    for option in ("nodelist", "exclude"):
        names = [name for name in expand(asked.get(option, "")) if name not in known]
        if names:
            found.append(f"--{option}: the cell has no node {compress(names)}")
    return found


def terms(text: str) -> list[str]:
    """The terms of `--constraint`; ConfigError names it."""
    parts = [part.strip() for part in re.split(r"&(?![^(]*\))", text)]
    found: list[str] = []
    for part in parts:
        inside = part[1:-1] if part.startswith("(") and part.endswith(")") else part
        is_mixed = len(parts) > 1 and "|" in inside and inside is part
        if is_mixed or re.search(r"[][()*!&,]", inside) or node_labels.term_misfit(inside):
            raise ConfigError(f"--constraint: {text!r}, {_FORM}")
        found.append(inside)
    return found


def features(require: Sequence[str]) -> str:
    """Terms as `terms` reads them; `(null)` without any."""
    parts = [f"({term})" if "|" in term and len(require) > 1 else term for term in require]
    return "&".join(parts) or "(null)"


def _names(option: str, text: str) -> list[str]:
    if "/" in text:
        raise ConfigError(f"--{option}: {text!r}, expected names of nodes; no file is read")
    try:
        return expand(text)
    except ValueError as error:
        raise ConfigError(f"--{option}: {error}") from None
