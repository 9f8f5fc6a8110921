"""Collects what the client imports into one package, so that it collides with nothing.

`agent`, `common` and `coordinator` are names that a user's environment may have already. In the
wheel `coordinator.client` is `aryl_client`, and the modules of `common` that it needs, directly or
through others, are `aryl_client.common`.
"""

from __future__ import annotations

import ast
import re
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parents[2]
CLIENT, COMMON, PACKAGE = "coordinator.client", "common", "aryl_client"


def new_name(module: str) -> str:
    """The name of a module in the wheel.

    Raises:
        ValueError: the client may not import it.
    """
    for old, new in ((CLIENT, PACKAGE), (COMMON, f"{PACKAGE}.{COMMON}")):
        if module == old or module.startswith(f"{old}."):
            return new + module.removeprefix(old)
    raise ValueError(f"{module}: the client imports only {CLIENT} and {COMMON}")


def file_of(module: str) -> Path | None:
    """The source of a module of this repository; None where there is none, as of another one."""
    path = ROOT.joinpath(*module.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in found if file.is_file()), None)


def imported(source: str) -> set[str]:
    """The modules of this repository that a module imports, wherever it does."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if file_of(name) is not None}


def needed() -> dict[str, Path]:
    """The modules of the wheel, each with its source."""
    found: dict[str, Path] = {}
    rest = {CLIENT, COMMON}
    while rest:
        module = rest.pop()
        file = file_of(module)
        assert file is not None, f"{module} has a source"
        new_name(module)
        found[module] = file
        rest |= imported(file.read_text(encoding="utf-8")) - found.keys() - {"coordinator"}
    return found


def renamed(source: str) -> str:
    """A source with the names that its imports have in the wheel."""

    def line(found: re.Match[str]) -> str:
        return f"{found['indent']}from {new_name(found['module'])} import"

    pattern = r"(?m)^(?P<indent> *)from (?P<module>(?:common|coordinator)(?:\.\w+)*) import"
    return re.sub(pattern, line, source)


class CustomBuildHook(BuildHookInterface):
    """Called by hatchling for the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the package to a place of its own and add it to the wheel."""
        self._work = tempfile.TemporaryDirectory(prefix="aryl-client-")
        package = Path(self._work.name, PACKAGE)
        for module, file in needed().items():
            path = Path(self._work.name, *new_name(module).split("."))
            path = path / "__init__.py" if file.name == "__init__.py" else path.with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(renamed(file.read_text(encoding="utf-8")), encoding="utf-8")
        (package / "py.typed").touch()
        build_data["force_include"][str(package)] = PACKAGE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove that place."""
        self._work.cleanup()
