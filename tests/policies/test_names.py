"""Who may name a policy: neither the engine nor the simulator. And each part has several users."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import grimp

from coordinator.policies.names import DEFAULT, YARDSTICK
from coordinator.policies.registry import POLICIES
from coordinator.sim.inputs.failure_sources import FailureSource
from tests.tables import each_row

ROOT = Path(__file__).parents[2] / "coordinator"


SOURCES = sorted(path for floor in ("engine", "sim") for path in (ROOT / floor).rglob("*.py"))


NO_POLICIES = {("failure_sources.py", FailureSource.PHILLY.value)}
"""What is spelled like a policy and is none: the table of failures of the Philly study."""


def names_in(source: str) -> Iterator[str]:
    """Texts of a module that name a policy, with or without knobs, and imports of schedulers."""
    tree = ast.parse(source)
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in said:
                if text.partition(":")[0] in POLICIES:
                    yield text
            case ast.ImportFrom(module=str(module)):
                if module.startswith("coordinator.policies.schedulers"):
                    yield module
            case _:
                pass


@each_row("path", SOURCES)
def test_no_engine_and_no_simulator_names_a_policy(path: Path) -> None:
    """One that is added, renamed or brought by a plug-in changes nothing there."""
    found = {(path.name, name) for name in names_in(path.read_text())}
    assert found <= NO_POLICIES


@each_row(
    "source",
    [
        'if policy == "themis":\n    pass',
        'made = policy("pollux:round_s=300")',
        'name = f"aryl{knobs}"',
        "from coordinator.policies.schedulers.themis import policy",
    ],
)
def test_a_name_is_found_where_there_is_one(source: str) -> None:
    """As a value, with knobs, as a part of a text, and as an import of its module."""
    assert list(names_in(source))


def test_a_docstring_may_name_policies() -> None:
    """Explaining by an example is not deciding by a name."""
    assert not list(names_in('"""fifo"""\n\ndef f():\n    """sjf"""'))


def test_the_policies_that_drivers_mean_exist() -> None:
    """The one that decides where nothing is said, and the one that others are measured by."""
    assert {DEFAULT, YARDSTICK} <= POLICIES.keys()


PARTS = "coordinator.policies.parts"


def test_a_part_has_at_least_two_users() -> None:
    """A module that one scheduler alone imports belongs into that scheduler's folder."""
    graph = grimp.build_graph("coordinator", include_external_packages=False, cache_dir=None)
    users = {
        part: graph.find_modules_that_directly_import(part) for part in graph.find_children(PARTS)
    }
    assert users
    assert {part: sorted(found) for part, found in users.items() if len(found) < 2} == {}
