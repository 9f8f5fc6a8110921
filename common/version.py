"""The version of Aryl that runs."""

from __future__ import annotations

from functools import cache


@cache
def version() -> str | None:
    """The version as installed; None where Aryl runs from source."""
    from importlib.metadata import PackageNotFoundError  # only here: most commands never ask
    from importlib.metadata import version as installed_version

    try:
        return installed_version("aryl")
    except PackageNotFoundError:
        return None
