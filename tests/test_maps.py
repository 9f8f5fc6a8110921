"""Maps of the packages that have too many modules to find one's way by their names."""

from __future__ import annotations

import re
from collections import Counter
from pkgutil import iter_modules
from types import ModuleType

import pytest

from coordinator import engine, policies


@pytest.mark.parametrize("package", [engine, policies], ids=["engine", "policies"])
def test_a_map_has_each_module_once_and_nothing_else(package: ModuleType) -> None:
    """Whoever opens the package reads what there is, also after a module came, went or was named
    anew."""
    named = Counter(re.findall(r"`(\w+)`", package.__doc__ or ""))
    assert named == Counter(each.name for each in iter_modules(package.__path__))
