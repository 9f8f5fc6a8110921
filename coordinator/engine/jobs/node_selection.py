"""Nodes that a job may not use, by the labels and names that it requires and excludes.

A node fits a job if it fits all terms of `require` and none of `exclude`, is one of `require_nodes`
where the job names any, and none of `exclude_nodes`. Policies see the other nodes among those that
the job leaves alone, so that no scheduler knows of labels. `gang_start` refuses a placement on one
of them. A worker that is there already stays, whatever its node's labels become.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from itertools import chain
from typing import NamedTuple

from common.model import JobSpec, NodeName
from common.node_labels import holds
from coordinator.engine.state import mixed_nodes
from coordinator.engine.state.tables import NodeEntry
from coordinator.policies.contract.node_names import NO_NODES, NodeNames, sorted_names
from coordinator.policies.contract.text import counted, some

NAMED = 4
"""Names of nodes in one sentence."""
_FEW = 64
"""Selections that are kept without looking whether a job still has them."""


class Selection(NamedTuple):
    """What a job asks of nodes; jobs of equal selections share one set of nodes."""

    require: tuple[str, ...]
    exclude: tuple[str, ...]
    require_nodes: tuple[str, ...]
    exclude_nodes: tuple[str, ...]

    def __str__(self) -> str:
        parts = [
            *self.require,
            *(f"not {term}" for term in self.exclude),
            *([f"only {some(self.require_nodes, NAMED)}"] if self.require_nodes else []),
            *([f"not {some(self.exclude_nodes, NAMED)}"] if self.exclude_nodes else []),
        ]
        return ", ".join(parts)


def selection_of(spec: JobSpec) -> Selection | None:
    """What a job asks of nodes; None: nothing, as nearly all."""
    asked = (spec.require, spec.exclude, spec.require_nodes, spec.exclude_nodes)
    return Selection(*(each or () for each in asked)) if any(asked) else None


def why_not_on(spec: JobSpec, node: NodeEntry) -> str:
    """Why a job may not use a node; empty if it may."""
    selection = selection_of(spec)
    return "" if selection is None else _why_not(selection, node.name, node.labels.now)


def _why_not(selection: Selection, name: NodeName, labels: Mapping[str, str]) -> str:
    for term in selection.require:
        if not holds(term, labels):
            return f"{name} has no label {term}, which the job requires"
    for term in selection.exclude:
        if holds(term, labels):
            return f"{name} has label {term}, which the job excludes"
    return _why_not_named(selection, name)


def _why_not_named(selection: Selection, name: NodeName) -> str:
    if selection.require_nodes and name not in selection.require_nodes:
        return f"{name} is none of the nodes that the job requires"
    return f"the job excludes {name}" if name in selection.exclude_nodes else ""


_Key = tuple[tuple[str, str], ...]
"""Labels of a node; nodes of equal ones stand in one group."""


class _Seen(NamedTuple):
    """A node as selections see it. parts: names of all its parts."""

    labels: Mapping[str, str]
    parts: tuple[NodeName, ...]


class Excluded:
    """The nodes that each selection excludes, kept while nodes and labels change one by one.

    Derived from the nodes and never saved. Jobs of one selection share one value.
    """

    def __init__(self, nodes: Iterable[NodeEntry] = ()) -> None:
        self._seen: dict[NodeName, _Seen] = {}
        self._groups: dict[_Key, dict[NodeName, tuple[NodeName, ...]]] = {}
        """The parts of the same nodes, by labels: there are few kinds of nodes."""
        self._found: dict[Selection, NodeNames | None] = {}
        """None: it excludes other nodes now."""
        self._part_count = 0
        self._most = _FEW
        for node in nodes:
            self.note(node.name, node, mixed_nodes.names(node))

    def note(self, name: NodeName, node: NodeEntry | None, parts: tuple[NodeName, ...]) -> None:
        """Learn of a node as it is now, None: it is gone, and of the names of its parts."""
        had = self._seen.get(name)
        now = None if node is None else _Seen(node.labels.now, parts)
        if had == now:
            return
        if had is not None:
            del self._seen[name]
            self._part_count -= len(had.parts)
            group = self._groups[_key(had)]
            del group[name]
            if not group:
                del self._groups[_key(had)]
        if now is not None:
            self._seen[name] = now
            self._part_count += len(parts)
            self._groups.setdefault(_key(now), {})[name] = parts
        for selection, found in self._found.items():
            if found is not None and _parts(selection, name, had) != _parts(selection, name, now):
                self._found[selection] = None

    def take_changed(self) -> Set[Selection]:
        """Selections that exclude other nodes than before; the caller looks at their jobs again."""
        changed = {selection for selection, found in self._found.items() if found is None}
        for selection in changed:
            del self._found[selection]
        return changed

    def of(self, spec: JobSpec) -> NodeNames:
        """The nodes that a job may not use, by name and with all their parts."""
        selection = selection_of(spec)
        if selection is None:
            return NO_NODES
        found = self._found.get(selection)
        if found is None:
            found = self._found[selection] = self._make(selection)
        return found

    def keep(self, specs: Iterable[JobSpec]) -> None:
        """Forget selections that none of these jobs has, once there are many: submitters choose
        them."""
        if len(self._found) <= self._most:
            return
        used = {selection_of(spec) for spec in specs}
        self._found = {each: found for each, found in self._found.items() if each in used}
        self._most = max(_FEW, 2 * len(self._found))

    def _make(self, selection: Selection) -> NodeNames:
        found: list[NodeName] = []
        for key, group in self._groups.items():
            if not _fits_labels(selection, dict(key)):
                found.extend(chain.from_iterable(group.values()))
            elif selection.require_nodes or selection.exclude_nodes:
                for name, parts in group.items():
                    found += parts if _why_not_named(selection, name) else ()
        return sorted_names(found)

    # --- in words ---------------------------------------------------------------------------

    def why_none(self, spec: JobSpec) -> str:
        """That no node fits a job, and which label or name is missing; empty if one does."""
        selection = selection_of(spec)
        if selection is None or not self._seen or len(self.of(spec)) < self._part_count:
            return ""
        for term in selection.require:
            if not any(holds(term, dict(key)) for key in self._groups):
                return f"can never run here: no node has {term}, which it requires"
        if selection.require_nodes and not any(n in self._seen for n in selection.require_nodes):
            named = some(selection.require_nodes, NAMED)
            return f"can never run here: no node is called {named}, as it requires"
        return f"can never run here: no node fits what it asks of nodes ({selection})"

    def why_waiting(self, spec: JobSpec, free_gpus: Mapping[NodeName, int]) -> str:
        """How many nodes fit a job that waits, and have room for a worker of it; empty where it
        asks nothing of nodes.

        free_gpus: of each node that takes workers now.
        """
        selection = selection_of(spec)
        if selection is None:
            return ""
        barred = self.of(spec).names
        fitting = [name for name in self._seen if name not in barred]
        free = [name for name in fitting if free_gpus.get(name, 0) >= spec.gpus_per_worker]
        have = counted(spec.gpus_per_worker, "free GPU")
        fit = "fits" if len(fitting) == 1 else "fit"
        room = f"{len(free)} of them with {have}" if free else "all busy, closed or serving"
        return (
            f"{len(fitting)} of {counted(len(self._seen), 'node')} {fit} what it asks of nodes "
            f"({selection}); {room}"
        )


def _parts(selection: Selection, name: NodeName, seen: _Seen | None) -> tuple[NodeName, ...]:
    """Names that a node adds to the nodes that a selection excludes."""
    if seen is None or not _why_not(selection, name, seen.labels):
        return ()
    return seen.parts


def _key(seen: _Seen) -> _Key:
    return tuple(sorted(seen.labels.items()))


def _fits_labels(selection: Selection, labels: Mapping[str, str]) -> bool:
    return all(holds(term, labels) for term in selection.require) and not any(
        holds(term, labels) for term in selection.exclude
    )
