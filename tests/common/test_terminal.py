"""No control code of a job, a node or a file reaches a terminal."""

from __future__ import annotations

import io
import json
import logging

from hypothesis import example, given
from hypothesis import strategies as st
from rich.text import Text

from common.log import JsonFormatter, PlainFormatter
from common.terminal import UNSAFE, escaped, visible, visible_log
from coordinator.cli.session import PlainConsole

HOSTILE = "\x1b]0;owned\x07 \x1b[2J \x9b31m \x7f \u202egnp.exe \r\n\tend"
"""A window's title, a cleared screen, a code of one byte, and a text that runs backwards."""

texts = st.text() | st.text(st.sampled_from("a\x1b[]0m\r\n\t\x07\x9b\u202e ="))


@example(HOSTILE)
@given(texts)
def test_visible_text_has_no_control_codes(text: str) -> None:
    """Line ends and tabs stay, and every other character stays or is shown by one character."""
    assert not UNSAFE.search(visible(text))
    assert not UNSAFE.search(visible_log(text))
    assert len(visible(text)) == len(text)
    assert visible(visible(text)) == visible(text)


def test_a_log_keeps_its_lines_and_loses_its_colors() -> None:
    """A progress bar's carriage return begins a line, as its next state does."""
    assert visible_log("\x1b[31mred\x1b[0m\r\n 10%\r 20%\x1b[K") == "red\n 10%\n 20%␛[K"


@example(HOSTILE)
@given(texts)
def test_escaped_json_means_the_same(text: str) -> None:
    """A program reads what was there, and the line itself is safe to print."""
    line = escaped(json.dumps(text, ensure_ascii=False))
    assert json.loads(line) == text
    assert not UNSAFE.search(line)


@example(HOSTILE)
@given(texts)
def test_a_console_obeys_only_its_own_codes(text: str) -> None:
    """Text goes out without codes, in colors as well as without."""
    out = io.StringIO()
    console = PlainConsole(file=out, force_terminal=True, width=80, markup=False, highlight=False)
    console.print(Text(text, style="red"))
    console.print(text)
    own = out.getvalue().replace("\x1b[31m", "").replace("\x1b[0m", "")
    assert not UNSAFE.search(own)


@example(HOSTILE)
@given(texts)
def test_a_log_line_is_one_safe_line(text: str) -> None:
    """Daemons log names and errors of others, and people read these logs in a terminal."""
    record = logging.LogRecord("a", logging.INFO, "a.py", 1, "%s", (text,), None)
    for formatter in (PlainFormatter(has_time=False), JsonFormatter(has_time=False)):
        line = formatter.format(record)
        assert not UNSAFE.search(line)
        assert "\n" not in line
