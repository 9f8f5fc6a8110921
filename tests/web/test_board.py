"""Which fragments a browser is sent."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.web.board import Board, Frame

KEYS = st.sampled_from(["a", "b", "c", "d"])
HTML = st.sampled_from(["1", "2"])
FRAMES = st.builds(
    Frame,
    texts=st.dictionaries(st.just("title"), HTML),
    lists=st.dictionaries(
        st.sampled_from(["nodes", "jobs"]),
        st.lists(st.tuples(KEYS, HTML), unique_by=lambda item: item[0]),
    ),
)


class Screen:
    """What a browser shows that takes updates as dashboard.js does."""

    def __init__(self) -> None:
        self.seen = 0
        self.texts: dict[str, str] = {}
        self.lists: dict[str, list[tuple[str, str]]] = {}

    def take(self, board: Board) -> int:
        """Take the latest update; the number of fragments in it."""
        update: dict[str, Any] = json.loads(board.since(self.seen))
        self.seen = board.version
        self.texts |= update["texts"]
        count = len(update["texts"])
        for place, order, items in update["lists"]:
            known = dict(self.lists.get(place, [])) | items
            keys = list(known) if order is None else order
            self.lists[place] = [(key, known[key]) for key in keys]
            count += len(items)
        return count


@given(st.lists(st.tuples(FRAMES, st.booleans()), min_size=1, max_size=8))
def test_a_browser_that_misses_updates_shows_the_last_frame(
    frames: list[tuple[Frame, bool]],
) -> None:
    """Whichever updates it missed, it has all texts and lists of the frame, in their order."""
    board, screen = Board(), Screen()
    for frame, is_taken in [*frames, (frames[-1][0], True)]:
        board.show(frame)
        if is_taken:
            screen.take(board)
    last = frames[-1][0]
    assert {place: screen.texts[place] for place in last.texts} == dict(last.texts)
    for place, items in last.lists.items():
        assert screen.lists[place] == list(items)


def test_only_what_changed_is_sent() -> None:
    """Of a thousand items of which one changed, one is sent; of the same frame again, nothing."""
    board, screen = Board(), Screen()
    items = [(f"n{number}", "idle") for number in range(1000)]
    board.show(Frame(lists={"nodes": items}))
    assert screen.take(board) == 1000
    items[7] = ("n7", "busy")
    assert board.show(Frame(lists={"nodes": items}))
    assert screen.take(board) == 1
    assert not board.show(Frame(lists={"nodes": items}))
    assert screen.take(board) == 0
