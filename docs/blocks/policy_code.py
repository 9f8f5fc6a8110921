"""How much code each policy has of its own. Counts, judges nothing.

A policy's own code are the modules of `coordinator.policies.schedulers` that it is made of: the one
that makes it and those that this one imports there. Lines are those with code: no blanks, comments
or docstrings.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages

from coordinator.policies import schedulers
from coordinator.policies.policy import Policy
from coordinator.policies.registry import POLICIES

SHARED = "coordinator.policies."
OWN = schedulers.__name__ + "."
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def policy_code() -> str:
    """Own lines of the published schedulers; the others are made of rules."""
    told: list[str] = []
    for names, modules in _families():
        policies = ", ".join(f"`{name}`" for name in names)
        told.append(f"{policies} {sum(map(code_lines, modules))}")
    return "; ".join(told) + "."


def _families() -> list[tuple[list[str], tuple[str, ...]]]:
    """Policies that are made of the same modules, and those, by the first one's name."""
    made: dict[tuple[str, ...], list[str]] = {}
    for name, modules in _modules_of().items():
        made.setdefault(modules, []).append(name)
    return sorted((sorted(names), modules) for modules, names in made.items())


def _modules_of() -> dict[str, tuple[str, ...]]:
    """The smallest set of modules that makes each policy."""
    found: dict[str, tuple[str, ...]] = {}
    for each in walk_packages(schedulers.__path__, OWN):
        modules = _own(each.name)
        for policy in _made_in(each.name):
            if len(modules) < len(found.get(policy.name, (*modules, ""))):
                found[policy.name] = modules
    return found


def _made_in(module: str) -> list[Policy]:
    """The policies of the table that a module has under a name or in a tuple."""
    names = vars(import_module(module)).values()
    return [
        policy
        for policy in POLICIES.values()
        if any(policy is each or (isinstance(each, tuple) and policy in each) for each in names)
    ]


def _own(module: str) -> tuple[str, ...]:
    """A module and all that it needs beside it."""
    found, open_ = {module}, [module]
    while open_:
        new = {each for each in _imports(open_.pop()) if each.startswith(OWN)} - found
        found |= new
        open_ += sorted(new)
    return tuple(sorted(found))


@cache
def _imports(module: str) -> frozenset[str]:
    """The modules that it imports from."""
    return frozenset(_imported(ast.parse(_path(module).read_text())))


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if _is_module(node.module, inner) else node.module


def _is_module(package: str, name: str) -> bool:
    spec = find_spec(package) if package.startswith(SHARED.removesuffix(".")) else None
    is_package = spec is not None and spec.submodule_search_locations is not None
    return is_package and find_spec(name) is not None


def _path(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return Path(spec.origin)


@cache
def code_lines(module: str) -> int:
    """Lines with code of a module."""
    return code_lines_in(_path(module).read_text())


def code_lines_in(text: str) -> int:
    """Lines of a source text that are no blanks, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            case _:
                pass
    return len(lines)
