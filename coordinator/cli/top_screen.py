"""The live screen of `aryl top`, on textual: sheets to sort, filter and scroll, and why a row is
as it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, OptionList, Static, Tab, Tabs
from textual.widgets.option_list import Option

from common.api import Description
from common.clock import Clock
from common.errors import ArylError, Unavailable
from coordinator import plain_text
from coordinator.cli import describe, render
from coordinator.cli.top_sheets import JOBS, LOANS, NODES, NOW, Sheet, View

REFRESH_S = 1.0
SHEETS: tuple[Sheet[Any], ...] = (NOW, JOBS, NODES, LOANS)
GLANCE_LINES = 7
"""Lines about the whole cell above the sheet."""


class Why(ModalScreen[None]):
    """Everything about one thing, over the sheet."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q", "dismiss", "Back"),
    ]

    def __init__(self, title: str, lines: list[Text]) -> None:
        super().__init__()
        self._title, self._lines = title, lines

    def compose(self) -> ComposeResult:
        """Title, text, keys."""
        with VerticalScroll(id="why"):
            yield Static(Text(self._title, style="bold"))
            yield Static(Group(*self._lines))
        yield Footer()


class Rows(OptionList):
    """The rows of a sheet; a letter moves as in other pagers."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select", "Why"),
        Binding("j", "cursor_down", show=False),
        Binding("k", "cursor_up", show=False),
        Binding("g", "first", show=False),
        Binding("G", "last", show=False),
    ]


class Titles(Tabs, can_focus=False):
    """The titles of the sheets; keys go to the rows."""


class Top(App[None]):
    """One frame after another until `q`.

    look: asks for the contents of a frame. explain: asks for one thing, by kind and name.
    """

    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = "#rows"
    CSS = """
    #glance, #note, #order { height: auto; padding: 0 1; }
    #order { color: $text-muted; }
    #note { color: $text-error; text-style: bold; }
    #heading { height: 1; padding: 0 1; text-style: bold; }
    #filter { height: 1; border: none; padding: 0 1; }
    Rows { height: 1fr; border: none; padding: 0; }
    Rows > .option-list--option { padding: 0 1; }
    Why { align: center middle; }
    #why { width: 95%; height: 90%; border: round $accent; background: $surface; padding: 0 1; }
    .hidden { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("tab", "turn(1)", "Next sheet", priority=True),
        Binding("shift+tab", "turn(-1)", show=False, priority=True),
        *(Binding(str(n), f"turn_to({n - 1})", show=False) for n in range(1, len(SHEETS) + 1)),
        Binding("slash", "filter", "Filter"),
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse"),
        Binding("escape", "clear", show=False),
    ]

    def __init__(
        self,
        look: Callable[[], Awaitable[View]],
        explain: Callable[[str, str], Awaitable[Description]],
        *,
        clock: Clock,
    ) -> None:
        super().__init__()
        self._look, self._explain, self._clock = look, explain, clock
        self._view: View | None = None
        self._place = 0
        self._text = ""
        self._heading = ""
        self._is_reversed = False
        self._subjects: dict[str, tuple[str, str]] = {}
        self._prompts: dict[str, Text] = {}
        # Held here: a query finds only what is on the screen in front, and that may be a `Why`.
        self._glance = Static(id="glance")
        self._note = Static(id="note", classes="hidden")
        self._tabs = {sheet.title: Tab(sheet.title, id=sheet.title) for sheet in SHEETS}
        self._filter = Input(
            id="filter", placeholder="rows that contain", classes="hidden", compact=True
        )
        self._order = Static(id="order", classes="hidden")
        self._head = Static(id="heading")
        self._rows = Rows(id="rows")

    def compose(self) -> ComposeResult:
        """The cell at a glance, the sheets, and the keys."""
        yield self._glance
        yield self._note
        yield Titles(*self._tabs.values())
        yield self._filter
        yield self._order
        yield self._head
        yield self._rows
        yield Footer()

    def on_mount(self) -> None:
        """Begin to ask."""
        self.run_worker(self._refresh(), exit_on_error=True)

    async def _refresh(self) -> None:
        """Ask and redraw; while the coordinator is away the last rows stay, with a note."""
        while True:
            try:
                self._view = await self._look()
                self._say("")
            except Unavailable as error:
                self._say(f"not up to date: {error}")
            self._draw()
            await self._clock.sleep(REFRESH_S)

    def _say(self, text: str) -> None:
        self._note.update(Text(plain_text.plain(text)))
        self._note.set_class(not text, "hidden")

    # --- drawing ------------------------------------------------------------------------------

    @property
    def _sheet(self) -> Sheet[Any]:
        return SHEETS[self._place]

    def _draw(self) -> None:
        view = self._view
        if view is None or not self.is_running:  # it leaves
            return
        self._glance.update(Group(*_glance(view, self.size.width - 2)))
        for sheet in SHEETS:
            label = f"{sheet.title} {len(sheet.rows(view))}"
            self._tabs[sheet.title].label = label
        rows = self._sheet.chosen(
            view, text=self._text, heading=self._heading, is_reversed=self._is_reversed
        )
        lines = list(
            render.table(rows, self._sheet.columns(view.now_s), width=max(20, self.size.width - 4))
        )
        self._head.update(lines[0])
        order = f"sorted by {self._heading}" if self._heading else ""
        order += ("; " if order else "") + "the last one first" if self._is_reversed else ""
        self._order.update(order)
        self._order.set_class(not order, "hidden")
        self._subjects = {}
        prompts: dict[str, Text] = {}
        for row, line in zip(rows, lines[1:], strict=True):
            subject = self._sheet.subject(row)
            key = f"{subject[0]} {subject[1]}"
            while key in prompts:  # a node that comes home and is in trouble has two rows
                key += "'"
            self._subjects[key], prompts[key] = subject, line
        self._show(prompts)

    def _show(self, prompts: dict[str, Text]) -> None:
        """Put the rows on the screen, and keep the highlighted one."""
        rows = self._rows
        if list(prompts) == list(self._prompts):
            for key, prompt in prompts.items():
                if prompt != self._prompts[key]:
                    rows.replace_option_prompt(key, prompt)
        else:
            at = rows.highlighted
            held = None if at is None else rows.get_option_at_index(at).id
            scroll = rows.scroll_offset
            rows.clear_options()
            rows.add_options([Option(prompt, id=key) for key, prompt in prompts.items()])
            if held in prompts:
                rows.highlighted = list(prompts).index(held)
            elif prompts:
                rows.highlighted = min(at or 0, len(prompts) - 1)
            rows.scroll_to(scroll.x, scroll.y, animate=False)
        self._prompts = prompts

    def _redraw(self) -> None:
        """From the first row again."""
        self._prompts = {}
        self._rows.clear_options()
        self._draw()

    def on_resize(self) -> None:
        """Columns fit the new width."""
        self._draw()

    # --- keys ---------------------------------------------------------------------------------

    def action_turn(self, step: int) -> None:
        """The next sheet, or the one before."""
        self.action_turn_to((self._place + step) % len(SHEETS))

    def action_turn_to(self, place: int) -> None:
        """A sheet by its place."""
        if isinstance(self.screen, Why):
            return
        self.query_one(Tabs).active = SHEETS[place].title

    def on_tabs_tab_activated(self, event: Tabs.TabActivated) -> None:
        """Another sheet, by key or mouse: its own order, and the same filter."""
        self._place = [sheet.title for sheet in SHEETS].index(str(event.tab.id))
        self._heading, self._is_reversed = "", False
        self._redraw()

    def action_sort(self) -> None:
        """By the next column; after the last one, in the order of the sheet."""
        headings = ["", *self._sheet.headings()]
        self._heading = headings[(headings.index(self._heading) + 1) % len(headings)]
        self._redraw()

    def action_reverse(self) -> None:
        """The last row first."""
        self._is_reversed = not self._is_reversed
        self._redraw()

    def action_filter(self) -> None:
        """Type a text that rows must contain."""
        self._filter.remove_class("hidden")
        self._filter.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Rows follow each letter."""
        self._text = event.value
        self._draw()

    def on_input_submitted(self) -> None:
        """Back to the rows; the filter stays."""
        self._filter.set_class(not self._text, "hidden")
        self._rows.focus()

    def action_clear(self) -> None:
        """No filter."""
        self._filter.value = ""
        self._filter.add_class("hidden")
        self._rows.focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Enter or a click on a row."""
        subject = self._subjects.get(str(event.option.id))
        if subject is not None:
            self.run_worker(self._open(*subject))

    async def _open(self, kind: str, name: str) -> None:
        """Show why something is as it is."""
        try:
            found = await self._explain(kind, name)
        except ArylError as error:
            self._say(str(error))
            return
        width = max(20, int(self.size.width * 0.95) - 6)
        lines = describe.explanation(found, self._clock.wall_s(), width=width)
        await self.push_screen(Why(f"{kind} {plain_text.plain(name)}", lines))


def _glance(view: View, width: int) -> list[Text]:
    lines: list[Text] = []
    for name, value in plain_text.glance(view.status)[:GLANCE_LINES]:
        line = Text(f"{name:<10}", style="bold")
        line.append(plain_text.plain(value), style="red" if "FROZEN" in value else "not bold")
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines
