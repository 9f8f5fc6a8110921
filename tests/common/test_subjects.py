"""Subjects: one place builds them, and what it builds can be taken apart again."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import subjects
from common.errors import ConfigError
from common.model import Token
from tests.fakes import matches

TOKENS = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)


@given(cell=TOKENS, node=TOKENS)
def test_a_nodes_subjects_name_the_node(cell: str, node: str) -> None:
    """The node can be read off each of its subjects, and reports match the wildcard."""
    built = [
        subjects.node_report(cell, node),
        subjects.node_desired(cell, node),
        subjects.node_renew(cell, node),
        subjects.node_ledger(cell, node),
        subjects.node_logs(cell, node),
    ]
    assert [subjects.node_of(subject) for subject in built] == [node] * len(built)
    assert len(set(built)) == len(built)
    assert matches(subjects.node_report(cell), subjects.node_report(cell, node))
    assert matches(subjects.node_renew(cell), subjects.node_renew(cell, node))
    assert not matches(subjects.node_report(cell), subjects.node_renew(cell, node))


@given(cell=TOKENS, tenant=TOKENS, user=TOKENS, verb=TOKENS)
def test_an_api_subject_says_who_calls(cell: str, tenant: str, user: str, verb: str) -> None:
    """Tenant, user and verb come back, and the coordinator's wildcard hears it."""
    subject = subjects.api(cell, tenant, user, verb)
    assert subjects.api_caller(subject) == (tenant, user, verb)
    assert matches(subjects.api_all(cell), subject)


@given(cell=TOKENS, other=TOKENS, node=TOKENS)
def test_cells_do_not_hear_each_other(cell: str, other: str, node: str) -> None:
    """A wildcard of one cell never matches a subject of another."""
    assert matches(subjects.node_report(cell), subjects.node_report(other, node)) == (cell == other)


@given(identity=TOKENS, other=TOKENS)
def test_an_inbox_belongs_to_one_identity(identity: str, other: str) -> None:
    """Whoever may read below its own prefix cannot read another's replies."""
    reply = f"{subjects.inbox(identity)}.x"
    assert matches(f"{subjects.inbox(other)}.>", reply) == (identity == other)


@pytest.mark.parametrize("bad", ["", "a.b", "a b", "*", ">", "ä", "a" * 65, "a\x00", "a\n"])
def test_what_is_no_token_is_refused(bad: str) -> None:
    """Dots, blanks, wildcards and length: the error names what the value was for."""
    with pytest.raises(ConfigError, match="cell"):
        subjects.token(bad, what="cell")
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(bad, Token)


@given(name=TOKENS)
def test_a_token_passes_unchanged(name: str) -> None:
    """A good name is returned as it is."""
    assert subjects.token(name, what="cell") == name
