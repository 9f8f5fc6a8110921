"""Subjects: one place builds them, and what it builds can be taken apart again."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common import streams, subjects
from common.errors import ConfigError
from common.model import Token
from tests.harness.fakes import matches
from tests.tables import each_row

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


INBOXES = st.one_of(
    st.builds(subjects.coordinator_inbox, TOKENS),
    st.builds(subjects.node_inbox, TOKENS, TOKENS),
    st.builds(subjects.user_inbox, TOKENS, TOKENS, TOKENS),
)


@given(own=INBOXES, other=INBOXES)
def test_an_inbox_belongs_to_one_identity(own: str, other: str) -> None:
    """Below its own prefix an identity reads no answer to another."""
    assert matches(f"{other}.>", f"{own}.x") == (own == other)


@example(cell="c", first="a_b", second="c", other_first="a", other_second="b_c")
@given(cell=TOKENS, first=TOKENS, second=TOKENS, other_first=TOKENS, other_second=TOKENS)
def test_two_persons_or_a_person_and_a_node_share_no_inbox(
    cell: str, first: str, second: str, other_first: str, other_second: str
) -> None:
    """No two names, however they are put together, make one inbox."""
    one, other = (first, second), (other_first, other_second)
    same = subjects.user_inbox(cell, *one) == subjects.user_inbox(cell, *other)
    assert same == (one == other)
    assert subjects.node_inbox(cell, f"{first}_{second}") != subjects.user_inbox(cell, *one)


class Sent(NamedTuple):
    """A subject, and the inbox of the one identity that sends on it."""

    subject: str
    inbox: str


@st.composite
def sent(draw: st.DrawFn) -> Sent:
    """Any message that may ask for an answer."""
    cell, name, user = draw(TOKENS), draw(TOKENS), draw(TOKENS)
    s = subjects
    by_node, by_coordinator = s.node_inbox(cell, name), s.coordinator_inbox(cell)
    return draw(
        st.sampled_from(
            [
                Sent(s.node_report(cell, name), by_node),
                Sent(s.node_renew(cell, name), by_node),
                Sent(s.node_desired(cell, name), by_coordinator),
                Sent(s.node_ledger(cell, name), by_coordinator),
                Sent(s.node_logs(cell, name), by_coordinator),
                Sent(s.api(cell, name, user, "submit"), s.user_inbox(cell, name, user)),
            ]
        )
    )


HOSTILE = st.one_of(
    INBOXES.map(lambda inbox: f"{inbox}.x"),
    st.builds(subjects.journal, TOKENS),
    st.builds(streams.leader_subject, TOKENS),
    st.builds(lambda cell: f"$JS.API.STREAM.DELETE.{streams.journal(cell)}", TOKENS),
    st.text(max_size=40),
)


@given(message=sent(), reply=HOSTILE, rest=st.text(max_size=20))
def test_an_answer_goes_only_to_the_inbox_of_the_sender(
    message: Sent, reply: str, rest: str
) -> None:
    """Whatever subject a message names for its answer, only a token below its sender's inbox is
    taken."""
    own = f"{message.inbox}."
    assert subjects.reply_inbox(message.subject) == message.inbox
    assert subjects.may_answer(message.subject, f"{own}x1")
    assert subjects.may_answer(message.subject, reply) == reply.startswith(own)
    is_plain = all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", token) for token in rest.split("."))
    assert subjects.may_answer(message.subject, own + rest) == is_plain


@each_row("reply", ["x", "aryl.v1.c.inbox.user.t.u.x", ""])
@each_row(
    "subject",
    ["echo", "aryl.v1.c.journal", "aryl.v1.c.api.t.u", "aryl.v2.c.api.t.u.v", "aryl.v1.c.node.n.x"],
)
def test_a_subject_on_which_nobody_asks_has_no_answers(subject: str, reply: str) -> None:
    """What is no question is never answered."""
    assert subjects.reply_inbox(subject) is None
    assert not subjects.may_answer(subject, reply)


@each_row("bad", ["", "a.b", "a b", "*", ">", "ä", "a" * 65, "a\x00", "a\n"])
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
