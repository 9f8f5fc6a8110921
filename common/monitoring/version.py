"""The version of Aryl that runs."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


@cache
def version() -> str:
    """As installed; `source` where Aryl is not installed."""
    try:
        return installed_version("aryl")
    except PackageNotFoundError:
        return "source"
