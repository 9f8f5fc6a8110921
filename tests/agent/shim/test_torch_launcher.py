"""What the launcher makes of the members of a rendezvous; `tests/training` runs it with PyTorch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.shim.torch_launcher import (
    EX_NO_TORCH,
    Meeting,
    Order,
    describe,
    first_failure,
    main,
)
from tests.tables import each_row


class Store:
    """A round's store, as far as members count in it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, key: str, more: int) -> int:
        """The sum, as `torch.distributed.Store.add` gives it."""
        self.counts[key] += more
        return self.counts[key]


class Handler:
    """torchrun's rendezvous handler of the member `a`, with the list that it last saw."""

    def __init__(self, *, nodes: tuple[int, int] = (1, 3)) -> None:
        self.settings = SimpleNamespace(min_nodes=nodes[0], max_nodes=nodes[1])
        self.store = self._store = Store()
        self._this_node = "a"
        state = SimpleNamespace(participants={"a": 0, "b": 1}, last_heartbeats={"b": 1})
        self._state_holder = SimpleNamespace(state=state)
        self.waiting_count = 0

    @property
    def participants(self) -> dict[str, int]:
        """Who is on the list."""
        found: dict[str, int] = self._state_holder.state.participants
        return found

    def get_run_id(self) -> str:
        """The id of the gang."""
        return "j-1"

    def next_rendezvous(self) -> Any:
        """A round with those on the list."""
        return SimpleNamespace(store=self.store)

    def num_nodes_waiting(self) -> int:
        """How many wait to join; looks at the list, and hears of `b`."""
        self._state_holder.state.last_heartbeats["b"] += 1
        return self.waiting_count


def met(handler: Handler, tmp_path: Path) -> Meeting:
    """A member that has met the others."""
    meeting = Meeting(handler, Order(str(tmp_path)), worker_index="0", starting=1)
    meeting.next_rendezvous()
    return meeting


def test_who_joins_leaves_or_dies_explains_a_failure_and_who_failed_does_not(
    tmp_path: Path,
) -> None:
    """A failure beside a change is none; one beside another failure is one."""
    for change in ("joins", "told to leave", "dies"):
        handler = Handler()
        meeting = met(handler, tmp_path)
        if change == "joins":
            handler.waiting_count = 1
        elif change == "told to leave":
            handler.store.add("aryl/leaving", 1)
        else:
            del handler.participants["b"]
        assert meeting.explanation(0.0), change
    handler = Handler()
    meeting = met(handler, tmp_path)
    handler.store.add("aryl/failed", 1)
    handler.store.add("aryl/ended", 1)
    del handler.participants["b"]
    assert not meeting.explanation(0.0)


def test_a_gang_of_one_size_never_changes(tmp_path: Path) -> None:
    """Whoever is gone from it has failed, and the job with him."""
    handler = Handler(nodes=(2, 2))
    meeting = met(handler, tmp_path)
    handler.waiting_count = 1
    del handler.participants["b"]
    assert not meeting.explanation(0.0)


def test_ranks_start_anew_when_a_member_is_gone_but_not_after_a_freeze(tmp_path: Path) -> None:
    """A gang that was frozen as a whole finds nobody's heartbeat new, and nothing has changed."""
    handler = Handler()
    meeting = met(handler, tmp_path)
    assert meeting.num_nodes_waiting() == 0
    del handler.participants["b"]
    assert meeting.num_nodes_waiting() == 1
    handler.participants.clear()
    assert meeting.num_nodes_waiting() == 0


def test_who_was_asked_to_leave_tells_the_others_and_meets_nobody_again(tmp_path: Path) -> None:
    """It reads of its order where the shim writes it."""
    (tmp_path / "status.json").write_text(json.dumps({"stop_reason": "release"}))
    handler = Handler()
    meeting = met(handler, tmp_path)
    handler.waiting_count = 1
    assert meeting.num_nodes_waiting() == 0
    assert handler.store.counts["aryl/leaving"] == 1


def test_who_ends_right_after_its_order_leaves(tmp_path: Path) -> None:
    """Its ranks may end before the next look: the others, which failed for it, are told."""
    handler = Handler()
    meeting = met(handler, tmp_path)
    assert not meeting.is_leaving()
    (tmp_path / "status.json").write_text(json.dumps({"stop_reason": "release"}))
    handler.store.add("aryl/failed", 1)
    meeting.wait_for_others()
    assert handler.store.counts["aryl/leaving"] == 1


@each_row("text", ["", "[]", "{}", '{"stop_reason": null}', "\x00"])
def test_a_status_that_says_nothing_is_no_order(text: str, tmp_path: Path) -> None:
    """Half written, of another version, or of a worker that may stay."""
    (tmp_path / "status.json").write_text(text)
    assert not Order(str(tmp_path)).is_to_stop()


def test_the_rank_that_failed_first_is_named() -> None:
    """By the time of its failure; a signal's number is told as one."""
    late = SimpleNamespace(timestamp=20, exitcode=1)
    killed = SimpleNamespace(timestamp=10, exitcode=-9)
    assert first_failure({0: late, 3: killed}) == (3, -9)
    assert describe(3, -9) == "rank 3 was ended by signal 9"


def test_a_python_without_torch_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """This one has none: what the job's owner has to change is in the log."""
    assert main(["train.py"]) == EX_NO_TORCH
    assert "first on the job's env.PATH" in capsys.readouterr().err
