"""Labels of nodes: what is one, which orders change them, and which terms hold on a node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import node_labels
from common.errors import ConfigError

KEYS, VALUES = st.sampled_from(["rack", "nvlink", "disk"]), st.sampled_from(["", "r7", "r8"])
LABELS = st.dictionaries(KEYS, VALUES)
ALTERNATIVES = st.lists(
    st.tuples(KEYS, st.lists(VALUES.filter(bool), max_size=2, unique=True)), min_size=1, max_size=3
)


@given(labels=LABELS, alternatives=ALTERNATIVES)
def test_a_term_holds_where_one_of_its_alternatives_does(
    labels: dict[str, str], alternatives: list[tuple[str, list[str]]]
) -> None:
    """`key` asks for any value, `key=a,b` for one of these, and `|` for one of its sides."""
    term = " | ".join(
        f"{key}={','.join(values)}" if values else key for key, values in alternatives
    )
    expected = any(
        key in labels and (not values or labels[key] in values) for key, values in alternatives
    )
    assert node_labels.holds(term, labels) == expected


@given(labels=LABELS)
def test_labels_read_back_as_they_are_written(labels: dict[str, str]) -> None:
    """The text of a node's labels is an order that sets them."""
    text = node_labels.labels_text(labels)
    assert not text or node_labels.parse_changes(text.split()) == labels


def test_a_text_that_is_no_label_is_refused() -> None:
    """A name begins with a letter or digit, and ends after 63; behind `=` stands a value."""
    wrong = {
        "changes": ["", "_=a", "a=b c", "a=", "a=-b", "-", "a-b-c--", "k" * 64, f"a={'v' * 64}"],
        "terms": ["", "a|", "a=", "a=b,", "|", "a&b", "a=b=c", "ä", "a b"],
    }

    def is_taken(kind: str, text: str) -> bool:
        if kind == "terms":
            return not node_labels.term_misfit(text)
        try:
            node_labels.parse_changes([text])
        except ConfigError:
            return False
        return True

    taken = [
        (kind, text) for kind, texts in wrong.items() for text in texts if is_taken(kind, text)
    ]
    assert not taken


def test_a_label_named_twice_or_too_many_labels_are_refused() -> None:
    """The order that would count is not said, and a report stays small."""
    with pytest.raises(ConfigError, match="named twice"):
        node_labels.parse_changes(["a=b", "a-"])
    many = {f"k{number}": "" for number in range(node_labels.MAX_LABELS + 1)}
    assert "expected at most" in node_labels.misfit(many)
    assert not node_labels.misfit(dict(list(many.items())[1:]))


def test_a_rack_is_a_label_unless_it_cannot_be() -> None:
    """A label of that name wins."""
    assert node_labels.with_rack({"nvlink": ""}, "r7") == {"rack": "r7", "nvlink": ""}
    assert node_labels.with_rack({"rack": "row-1"}, "r7") == {"rack": "row-1"}
    assert node_labels.with_rack({}, "row 1") == node_labels.with_rack({}, "") == {}
