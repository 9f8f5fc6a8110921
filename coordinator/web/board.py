"""What a page shows now, in fragments, and what of it changed since an update. Pure.

A page is made of texts, each of one place, and of lists, whose items have keys. A browser that
missed updates gets the latest of each fragment once: nothing is queued for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct, field


class Frame(Struct, frozen=True, kw_only=True):
    """All fragments of a page at one instant, as HTML.

    texts: by the id of its place.
    lists: items as (key, HTML) by the id of their place. A list within an item stands behind the
        list of that item.
    """

    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    lists: Mapping[str, Sequence[tuple[str, str]]] = field(
        default_factory=dict[str, Sequence[tuple[str, str]]]
    )


class _List(Struct):
    """One list: its items with the versions in which they changed."""

    order: tuple[str, ...] = ()
    order_version: int = 0
    items: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])


class Board:
    """The fragments of a page with the version in which each changed last."""

    def __init__(self) -> None:
        self.version = 0
        self._texts: dict[str, tuple[int, str]] = {}
        self._lists: dict[str, _List] = {}

    def show(self, frame: Frame) -> bool:
        """Show a frame from now on; whether anything differs from the one before."""
        version = self.version + 1
        is_new = self._show_texts(frame.texts, version)
        for place in self._lists.keys() - frame.lists.keys():
            del self._lists[place]  # with the item that it stood in
        for place, items in frame.lists.items():
            known = self._lists.setdefault(place, _List())
            is_new |= _show_list(known, items, version)
        # A list behind the list of its item, whichever came first.
        self._lists = {place: self._lists[place] for place in frame.lists}
        if is_new:
            self.version = version
        return is_new

    def _show_texts(self, texts: Mapping[str, str], version: int) -> bool:
        is_new = False
        self._texts = {place: known for place, known in self._texts.items() if place in texts}
        for place, html in texts.items():
            known = self._texts.get(place)
            if known is None or known[1] != html:
                self._texts[place] = (version, html)
                is_new = True
        return is_new

    def since(self, version: int) -> bytes:
        """What changed after a version, as JSON in one line; 0 gives everything.

        `texts` has places with their HTML. `lists` has [place, order, items]: `order` the keys in
        their order, or null where it is the same; `items` the HTML of those that changed.
        """
        texts = {place: html for place, (at, html) in self._texts.items() if at > version}
        lists: list[tuple[str, tuple[str, ...] | None, dict[str, str]]] = []
        for place, known in self._lists.items():
            items = {key: html for key, (at, html) in known.items.items() if at > version}
            order = known.order if known.order_version > version else None
            if items or order is not None:
                lists.append((place, order, items))
        return msgspec.json.encode({"texts": texts, "lists": lists})


def _show_list(known: _List, items: Sequence[tuple[str, str]], version: int) -> bool:
    before, known.items = known.items, {}
    is_new = False
    for key, html in items:
        old = before.get(key)
        if old is not None and old[1] == html:
            known.items[key] = old
        else:
            known.items[key] = (version, html)
            is_new = True
    order = tuple(known.items)
    if order != known.order or known.order_version == 0:
        known.order, known.order_version = order, version
        is_new = True
    return is_new
