"""A view has the fields of its entry by their names alone."""

from __future__ import annotations

import pytest
from msgspec import Struct

from coordinator.engine.state.copied_fields import copier


class Inner(Struct, frozen=True):
    """A group of an entry."""

    size: int = 3
    name: str = "inner"


class Entry(Struct):
    """An entry of a table."""

    name: str = "entry"
    at_s: float = 1.0
    inner: Inner = Inner()


class View(Struct):
    """What others see of it."""

    name: str
    size: int
    label: str = "computed"


class OtherType(Struct):
    """A view whose field is not that of the entry, though of the same name."""

    at_s: int


def test_a_view_gets_the_fields_of_an_entry_and_of_its_groups() -> None:
    """A name that two places have is open until the maker of the view computes it."""
    assert copier(View, Entry)(Entry()) == {"name": "entry"}
    copied = copier(View, Entry, groups=("inner",), computed=("name",))
    assert copied(Entry(inner=Inner(size=5))) == {"size": 5}
    with pytest.raises(TypeError, match=r"View\.name: name or inner\.name\?"):
        copier(View, Entry, groups=("inner",))


def test_a_field_of_one_name_and_two_types_is_refused() -> None:
    """Else a view would have by chance what it declares as something else."""
    with pytest.raises(TypeError, match=r"OtherType\.at_s: .*int.*, at_s is .*float"):
        copier(OtherType, Entry)
