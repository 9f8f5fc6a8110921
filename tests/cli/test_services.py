"""`aryl service describe` and `explain`: what an operator reads of a service."""

from __future__ import annotations

import re

import pytest

from common.api import (
    Describe,
    Description,
    GetStatus,
    ListNodes,
    ListServices,
    Nodes,
    Services,
    UnknownLoadRow,
)
from common.model import NodeRole
from tests.cli.fake_cell import NOW_S, FakeCell, aryl, loan_row, node_row, service_row, status


def test_a_service_shows_its_nodes_its_loans_and_how_its_returns_went() -> None:
    """What an operator asks first: who serves, what is out, was the promise kept."""
    row = service_row(
        running_requests=3.0, waiting_requests=1.0, reclaims=4, reclaims_late=1,
        last_reclaim_s=12.5, last_returned_at_s=NOW_S - 300.0,
    )  # fmt: skip
    answer = Description(
        kind="service", name="chat", service=row, nodes=(node_row("i0"), node_row("i1")),
        loans=(loan_row(),), why=("chat: 0 spare",),
    )  # fmt: skip
    run = aryl(FakeCell({Describe: answer}), "service", "describe", "chat")
    assert re.search(r"^requests +3 running, 1 waiting$", run.out, re.MULTILINE)
    assert re.search(
        r"^reclaims +4, 1 late; the last took 12s, home 5m ago$", run.out, re.MULTILINE
    )
    assert re.findall(r"^i\d", run.out, re.MULTILINE) == ["i0", "i1"]
    assert re.search(r"^l7 +i0 +chat +on loan ", run.out, re.MULTILINE)
    assert "- chat: 0 spare" in run.out


def test_a_service_of_which_little_is_known_says_so_in_words() -> None:
    """No number stands for what no server told and for what never happened."""
    answer = Description(kind="service", name="chat", service=service_row())
    run = aryl(FakeCell({Describe: answer}), "service", "describe", "chat")
    assert re.search(r"^requests +no server reports its load$", run.out, re.MULTILINE)
    assert re.search(r"^reclaims +none yet$", run.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ({"lapses": 2, "lapses_late": 2}, ["reclaims +none yet", "lapses +2, 2 late"]),
        ({"turn_backs": 2, "turn_backs_late": 1}, ["turned back +2, 1 late"]),
        ({"reclaims": 1, "reclaims_late": 1}, ["reclaims +1, 1 late; none is home yet"]),
    ],
)
def test_every_promise_that_was_broken_is_told(counts: dict[str, int], shown: list[str]) -> None:
    """Also where no node was ordered home, and where one never came."""
    answer = Description(kind="service", name="chat", service=service_row(**counts))
    run = aryl(FakeCell({Describe: answer}), "service", "describe", "chat")
    assert [line for line in shown if not re.search(f"^{line}$", run.out, re.MULTILINE)] == []
    assert bool(re.search("^lapses", run.out, re.MULTILINE)) == ("lapses" in counts)


@pytest.mark.parametrize("words", ["explain service chat", "service explain chat"])
def test_a_service_can_be_explained(words: str) -> None:
    """Why, and no table: both ways to ask are one."""
    answer = Description(
        kind="service", name="chat", service=service_row(), nodes=(node_row("i0"),),
        why=("chat: 0 spare",),
    )  # fmt: skip
    cell = FakeCell({Describe: answer})
    run = aryl(cell, *words.split())
    assert cell.asked == [Describe(kind="service", name="chat")]
    assert run.out == "service chat is in mode act\n- chat: 0 spare\n"


UNKNOWN = UnknownLoadRow(
    unknown_s=60.0,
    why="i0: status 401 Unauthorized",
    last_load_per_s=12.5,
    nodes=("i0",),
    serving=3,
)


def test_a_load_that_is_unknown_is_told_in_every_list() -> None:
    """Since when, the last known load and why; nowhere does it stand as a plain number."""
    service = service_row(load_unknown=UNKNOWN)
    node = node_row("i0", role=NodeRole.SERVING, load_unknown=UNKNOWN)
    cell = FakeCell(
        {
            ListServices: Services(rows=(service,)),
            ListNodes: Nodes(rows=(node,)),
            GetStatus: status(loads_unknown=("chat (1 of 3 nodes)",)),
            Describe: [
                Description(kind="service", name="chat", service=service, nodes=(node,)),
                Description(kind="node", name="i0", node=node),
            ],
        }
    )
    assert "12.5 (1 of 3 unknown)" in aryl(cell, "service", "list").out
    assert "serving (load unknown)" in aryl(cell, "node", "list").out
    assert "LOAD UNKNOWN: chat (1 of 3 nodes)" in aryl(cell, "status").out
    why = "i0: status 401 Unauthorized"
    said = f"last known 12.5 requests/s; unknown of 1 of 3 serving nodes for 1m: {why}"
    assert said in aryl(cell, "service", "describe", "chat").out
    said = f"unknown for 1m, last known 12.5 requests/s: {why}"
    assert said in aryl(cell, "node", "describe", "i0").out
    assert '"last_load_per_s":12.5' in aryl(cell, "service", "list", "-o", "json").out


def test_a_load_of_which_nothing_is_known_is_marked_so() -> None:
    """No node that serves can be read."""
    whole = UnknownLoadRow(
        unknown_s=1.0, why="late", last_load_per_s=None, nodes=("i0",), serving=1
    )
    cell = FakeCell({ListServices: Services(rows=(service_row(load_unknown=whole),))})
    assert "12.5 (unknown)" in aryl(cell, "service", "list").out
