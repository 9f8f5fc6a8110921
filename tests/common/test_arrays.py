"""Texts of indices, against plain sets of numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common import arrays
from common.errors import ConfigError
from common.jobspec import misfit
from common.model import ArraySpec, CheckpointSpec
from tests.harness.builders import make_spec

PARTS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 60), st.integers(1, 7)), min_size=1, max_size=6
)


@given(PARTS)
def test_a_text_names_the_set_of_its_parts(parts: list[tuple[int, int, int]]) -> None:
    """Each index once, in order; its text names the same again, and places are positions."""
    text = ",".join(f"{first}-{first + length}:{step}" for first, length, step in parts)
    wanted = {n for first, length, step in parts for n in range(first, first + length + 1, step)}
    found = arrays.indices(text)
    assert list(found) == sorted(wanted)
    assert len(found) == len(wanted)
    assert (found.first, found.last) == (min(wanted), max(wanted))
    assert list(arrays.indices(str(found))) == sorted(wanted)
    assert [found.at(place) for place in range(len(found))] == sorted(wanted)
    places = {index: place for place, index in enumerate(sorted(wanted))}
    assert all(found.place(index) == places.get(index) for index in range(300))


@pytest.mark.parametrize(
    ("text", "named"),
    [("0-99", "0-99"), ("1,3,7", "1,3,7"), ("0-100:4", "0-100:4"), ("0-5,3-8", "0-8"),
     ("7", "7"), ("4,2,3", "2-4"), ("0-9:4", "0-8:4"), ("0-9998,4000000", "0-9998,4000000")],
)  # fmt: skip
def test_indices_are_written_as_few_ranges(text: str, named: str) -> None:
    """Overlaps and order of a text make no difference."""
    assert str(arrays.indices(text)) == named


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "expected indices"), ("a", "expected indices"), ("1-", "expected indices"),
     ("-1", "expected indices"), ("1,,2", "expected indices"), ("5-3", "FIRST at most LAST"),
     ("1-9:0", "step of 1"), ("0-10000", "at most 10000"), ("0-9999,0-9999", "at most 10000"),
     ("4000001", "up to 4000000"), ("0-5%2", "expected indices"), ("1-999999999", "up to 4000000"),
     ("9" * 12, "expected indices")],
)  # fmt: skip
def test_other_texts_are_refused_with_what_was_expected(text: str, said: str) -> None:
    """A text that names no indices, or too many, never becomes an array."""
    with pytest.raises(ConfigError, match=said):
        arrays.indices(text)


@pytest.mark.parametrize("text", ["0-9%0", "0-9%", "0-9%x", "0-9%10001", "0-9%-1"])
def test_a_throttle_is_a_count(text: str) -> None:
    """Nothing else may stand behind the percent sign."""
    with pytest.raises(ConfigError, match="expected a count"):
        arrays.spec_of(text)
    assert arrays.spec_of("0-9%4") == ArraySpec(indices="0-9", throttle=4)


@pytest.mark.parametrize(
    ("path", "is_shared"),
    [("save", True), ("save-{index}", False), ("{index}/last", False), (None, False),
     ("saves/{index}/../last", True), ("{Index}", True)],
)  # fmt: skip
def test_no_two_tasks_may_share_a_checkpoint(path: str | None, is_shared: bool) -> None:
    """An array whose tasks would save at one place is refused by the field."""
    spec = make_spec(checkpoint=CheckpointSpec(path=path), workdir="/work")
    assert misfit(spec) is None
    found = misfit(replace(spec, array=ArraySpec(indices="0-3")))
    assert (found is not None and found.field == "checkpoint.path") == is_shared
