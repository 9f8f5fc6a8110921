"""An install for a GPU node has every command on its PATH, and only the agent's modules."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
ENTRIES: dict[str, str] = PROJECT["scripts"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if {{name, name.partition(".")[0]}} & {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv = [{program!r}, *{arguments!r}]
import importlib
sys.exit(getattr(importlib.import_module({module!r}), {function!r})())
"""
"""A console script as pip writes it, where some modules are not installed."""


def extras() -> set[str]:
    """Top-level modules that only the extras bring."""
    names = [line.partition("==")[0] for lines in EXTRAS.values() for line in lines]
    parts = [path.parts for name in names for path in distribution(name).files or ()]
    return {first for first, *rest in parts if rest and first.isidentifier()}


def start(program: str, *arguments: str, missing: set[str]) -> subprocess.CompletedProcess[str]:
    """The program of an install that lacks these modules."""
    module, _, function = ENTRIES[program].partition(":")
    text = WITHOUT.format(
        missing=missing, program=program, arguments=arguments, module=module, function=function
    )
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.slow
@pytest.mark.parametrize("program", ["aryl", "aryl-coordinator"])
def test_a_command_that_lacks_its_modules_says_what_to_install(program: str) -> None:
    """One line with the module and the command that installs it, and exit code 2."""
    result = start(program, "--help", missing=extras())
    assert result.returncode == 2, result.stderr
    [line] = result.stderr.splitlines()
    assert line.startswith(f"{program}: module ")
    assert "pip install 'aryl[coordinator]'" in line


@pytest.mark.slow
def test_the_agent_lacks_nothing() -> None:
    """Its own install has all that it needs."""
    assert {"typer", "numpy", "yaml"} <= extras()
    result = start("aryl-agent", "--help", missing=extras())
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["aryl", "aryl-coordinator"])
def test_a_missing_module_of_our_own_is_no_matter_of_extras(program: str) -> None:
    """That is a broken install or a bug: to install more would not help, so it is shown."""
    result = start(program, "--help", missing={"coordinator.policies"})
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "pip install" not in result.stderr
