"""What a coordinator's journal holds of a policy's memory, read by whoever is installed over it.

The recordings are never written anew. Where a policy remembers something more, one that has it goes
beside those that are there: `qos.2.msgpack` beside `qos.msgpack`, and its values into `named.json`.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import GenericAlias
from typing import Any, cast

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields, replace

from common.model import JobState
from coordinator.policies import schedulers
from coordinator.policies.contract.decisions import Reject
from coordinator.policies.parts.memory import recalled
from coordinator.policies.registry import POLICIES
from tests.harness.builders import (
    NOW_S,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.tables import each_row

STORED = Path(__file__).parents[1] / "data" / "memory"


KINDS = {
    "afs-p": ("afs.policy", "_Memory"),
    "gandiva": ("gandiva.policy", "Memory"),
    "gandiva-sets": ("gandiva.sets", "Memory"),
    "las": ("gavel.policy", "Rounds"),
    "mesos": ("mesos.policy", "Memory"),
    "philly": ("philly.policy", "Attempted"),
    "pollux": ("pollux.policy", "_Memory"),
    "qos": ("qos.policy", "Memory"),
    "qos-elasticflow": ("qos.elasticflow", "_Memory"),
    "themis": ("themis.policy", "Memory"),
    "themis-simple": ("themis.simple", "SimpleMemory"),
    "tiresias": ("tiresias.policy", "Memory"),
    "yarn-fair": ("yarn", "_Starved"),
}
"""Where what one policy of each module with a memory remembers is declared, public or not."""


NAMED: dict[str, Any] = json.loads((STORED / "named.json").read_text())
"""What was recorded, by file; fields by name, also where the bytes hold no names."""


LATEST = {recording.split(".")[0]: recording for recording in sorted(NAMED)}
"""The last recording of each policy."""


def kind_of(recording: str) -> Any:
    """What its bytes are read as."""
    policy = recording.split(".")[0]
    module, name = KINDS[policy]
    found = vars(import_module(f"{schedulers.__name__}.{module}"))[name]
    return GenericAlias(dict, (str, found)) if policy == "philly" else found


def parts(value: Any) -> dict[str, Any]:
    """What a value is made of, by the name of a field, a key, or the place in an array."""
    if isinstance(value, Struct):
        return {field: getattr(value, field) for field in value.__struct_fields__}
    if isinstance(value, dict):
        return cast("dict[str, Any]", value)
    if isinstance(value, tuple | list):
        return {str(at): each for at, each in enumerate(cast("Sequence[Any]", value))}
    return {}


def leaves(value: Any, where: str = "memory") -> dict[str, Any]:
    """All that it says, by where it does."""
    inner = parts(value)
    if not inner:
        return {where: value}
    found: dict[str, Any] = {}
    for name, each in inner.items():
        found |= leaves(each, f"{where}.{name}")
    return found


def lost(before: Any, after: Any) -> list[str]:
    """Where one value says what the other does not say there; it may say more elsewhere."""
    told = leaves(after)
    return [where for where, leaf in leaves(before).items() if told.get(where) != leaf]


def at_default(value: Any, where: str = "memory") -> list[str]:
    """Fields that are as they would be if nothing had been read."""
    inner, defaults = parts(value), dict[str, Any]()
    if isinstance(value, Struct):
        for field in fields(value):
            makes = field.default_factory
            defaults[field.name] = field.default if makes is NODEFAULT else makes()
    found = [f"{where}.{name}" for name, default in defaults.items() if inner[name] == default]
    return found + [
        path for name, each in inner.items() for path in at_default(each, f"{where}.{name}")
    ]


def read(recording: str) -> Any:
    """A recording, as its policy reads it."""
    return recalled((STORED / f"{recording}.msgpack").read_bytes(), kind_of(recording))


@each_row("recording", sorted(NAMED))
def test_what_an_earlier_release_remembered_is_read_whole(recording: str) -> None:
    """Every field that its bytes set is found again, with its value and under its name."""
    assert lost(NAMED[recording], read(recording)) == []


@each_row("recording", sorted(NAMED))
def test_what_is_remembered_is_stored_where_it_was(recording: str) -> None:
    """What was read is written with all that was there, for whoever reads it as it was."""
    memory = (STORED / f"{recording}.msgpack").read_bytes()
    after = msgspec.msgpack.decode(msgspec.msgpack.encode(read(recording)))
    assert lost(msgspec.msgpack.decode(memory), after) == []


@each_row("policy", sorted(KINDS))
def test_every_field_of_a_memory_is_recorded(policy: str) -> None:
    """In the last recording, with a value other than its default: else it could not be missed."""
    memory = read(LATEST[policy])
    assert leaves(memory) == leaves(NAMED[LATEST[policy]])
    assert at_default(memory) == []


def test_every_memory_is_recorded() -> None:
    """Each module that reads one has bytes of it here, and each file is read."""
    modules = {
        each.name: import_module(each.name)
        for each in pkgutil.walk_packages(schedulers.__path__, f"{schedulers.__name__}.")
        if not each.ispkg
    }
    reading = {name for name, module in modules.items() if vars(module).get("recalled") is recalled}
    assert reading == {f"{schedulers.__name__}.{module}" for module, _ in KINDS.values()}
    assert {path.name.removesuffix(".msgpack") for path in STORED.glob("*.msgpack")} == {*NAMED}
    assert LATEST.keys() == KINDS.keys()


def test_a_promise_of_an_earlier_release_is_kept() -> None:
    """Who was promised a deadline that it cannot meet any more is not refused for it."""
    plans: dict[str, Any] = {
        "a": [[NOW_S, NOW_S + 1000.0, 1]],
        "b": [[NOW_S + 1000.0, NOW_S + 2000.0, 1]],
    }
    stored: list[Any] = [plans, NOW_S, NOW_S + 60.0, NOW_S + 1000.0, [], {}, {}]
    placed = (make_worker_view("a", 0, "n0", gpus=8),)
    first = make_job_view(
        "a", gpus_per_worker=8, state=JobState.RUNNING, placed=placed, remaining_work_s=100.0
    )
    second = make_job_view("b", gpus_per_worker=8, remaining_work_s=1000.0, submitted_at_s=NOW_S)
    jobs = (
        replace(first, submitted_at_s=NOW_S, deadline_at_s=NOW_S + 1100.0),
        replace(second, deadline_at_s=NOW_S + 2300.0),
    )
    late = make_snapshot(
        nodes=(make_node_view("n0", workers=placed),), jobs=jobs, now_s=NOW_S + 1500.0
    )
    allocate = POLICIES["qos-elasticflow"].allocate
    refused = [made for made in allocate(late, b"").decisions if isinstance(made, Reject)]
    assert [made.job_id for made in refused] == ["b"]
    assert allocate(late, msgspec.msgpack.encode(stored)).decisions == ()


def test_a_turn_that_an_earlier_release_gave_lasts_its_slice() -> None:
    """Sets are shared out again a slice after the look that it remembered, not at once."""
    placed = (make_worker_view("a", 0, "n0", gpus=8),)
    running = make_job_view("a", gpus_per_worker=8, state=JobState.RUNNING, placed=placed)
    waiting = make_job_view("b", gpus_per_worker=8)
    snapshot = make_snapshot(nodes=(make_node_view("n0", workers=placed),), jobs=(running, waiting))
    gangs = [[8, snapshot.nodes[0].gpu_type, 8], ["n0"], ["a", "b"]]
    stored = {"sets": [gangs], "came_at_s": NOW_S - 20.0, "looked_at_s": NOW_S - 20.0}
    allocate = POLICIES["gandiva-sets"].allocate
    assert allocate(snapshot, msgspec.msgpack.encode(stored)).wake_at_s == NOW_S + 40.0
