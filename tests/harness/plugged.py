"""Distributions for tests that offer policies, as an installer leaves them: metadata and a module.

The policy is the one of the documentation, so that what people copy is what is tried.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
MODULE = "acme_smallest"


def block(kind: str) -> str:
    """The one block of a language on the page of policies."""
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


def acme(directory: Path) -> Path:
    """The distribution of the documentation, its entry points as its pyproject.toml has them."""
    project = tomllib.loads(block("toml"))["project"]
    entries = project["entry-points"]["aryl.policies"]
    return distribution(
        directory,
        project["name"],
        entries,
        version=project["version"],
        module=MODULE,
        source=block("python"),
    )


def distribution(
    directory: Path,
    name: str,
    entries: Mapping[str, str],
    *,
    module: str = "",
    source: str = "",
    version: str = "1.2",
) -> Path:
    """An installed distribution with entry points `name = value` of `aryl.policies`; its place."""
    place = directory / name
    info = place / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = "".join(f"{key} = {value}\n" for key, value in entries.items())
    (info / "entry_points.txt").write_text(f"[aryl.policies]\n{lines}")
    if module:
        (place / f"{module}.py").write_text(source)
    return place
