"""Log lines: one record, one line, with its fields."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.log import PlainFormatter, Throttle, set_up
from tests.harness.fake_clock import FakeClock


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """`set_up` replaces the root's handlers; the next test gets pytest's back."""
    root = logging.getLogger()
    handlers, level, nats_level = root.handlers[:], root.level, logging.getLogger("nats").level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("nats").setLevel(nats_level)


def test_a_plain_line_is_key_value() -> None:
    """Fields given as `extra` stand in the line; values with blanks are quoted."""
    stream = io.StringIO()
    set_up(stream=stream, has_time=False)
    logging.getLogger("a.b").info("job %s started", "j1", extra={"job": "j1", "gpus": 8})
    assert stream.getvalue() == 'level=info logger=a.b msg="job j1 started" job=j1 gpus=8\n'


def test_a_json_line_is_one_object() -> None:
    """JSON holds the same fields, and what JSON does not know as text."""
    stream = io.StringIO()
    set_up(style="json", stream=stream, has_time=True)
    logging.getLogger("x").warning("hot", extra={"where": {1}, "gpus": 8})
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("+00:00")
    assert line == {"level": "warning", "logger": "x", "msg": "hot", "where": "{1}", "gpus": 8}


@given(text=st.text())
def test_no_message_can_forge_a_line(text: str) -> None:
    """Whatever a job is called, its record stays on one line."""
    record = logging.makeLogRecord({"msg": "%s", "args": (text,), "job": text})
    line = PlainFormatter(has_time=False).format(record)
    assert "\n" not in line
    assert "\r" not in line


def test_an_exception_is_a_field() -> None:
    """A traceback is in the line, not below it."""
    stream = io.StringIO()
    set_up(stream=stream, has_time=False)
    try:
        int("boom")
    except ValueError:
        logging.getLogger("x").exception("failed")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert "ValueError: invalid literal" in lines[0]


def test_the_level_is_obeyed() -> None:
    """What is below the level is not written."""
    stream = io.StringIO()
    set_up(level="warning", stream=stream, has_time=False)
    logging.getLogger("x").info("quiet")
    logging.getLogger("x").warning("loud")
    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()


def test_credentials_are_never_logged_at_debug() -> None:
    """The NATS client logs its CONNECT line, password included, at DEBUG; it stays silent."""
    stream = io.StringIO()
    set_up(level="debug", stream=stream, has_time=False)
    logging.getLogger("nats.aio.client").debug("CONNECT secret")
    logging.getLogger("x").debug("ours")
    assert "secret" not in stream.getvalue()
    assert "ours" in stream.getvalue()


@pytest.mark.parametrize(
    ("level", "style", "name"), [("LOUD", "plain", "log level"), ("INFO", "xml", "log style")]
)
def test_a_wrong_setting_is_named(level: str, style: str, name: str) -> None:
    """A level or style that does not exist is the operator's error."""
    with pytest.raises(ConfigError, match=name):
        set_up(level=level, style=style)


def test_journald_gets_a_priority_and_no_second_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under journald a line begins with its priority, and journald adds the time."""
    monkeypatch.setenv("JOURNAL_STREAM", "8:1234")
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    set_up()
    logging.getLogger("x").error("bad")
    assert capsys.readouterr().err == "<3>level=error logger=x msg=bad\n"


def test_the_harmless_tls_lines_are_dropped() -> None:
    """What asyncio says about each closed TLS connection is not an operator's business."""
    stream = io.StringIO()
    set_up(stream=stream, has_time=False)
    asyncio_log = logging.getLogger("asyncio")
    asyncio_log.warning("returning true from eof_received() has no effect when using ssl")
    asyncio_log.warning("a task was never awaited")
    assert stream.getvalue().count("\n") == 1
    assert "never awaited" in stream.getvalue()


async def test_the_same_text_is_logged_once_per_period() -> None:
    """An outage is a line per period, and another text is not held back by it."""
    clock = FakeClock()
    throttle = Throttle(clock, 30.0)
    assert throttle.is_due("down")
    assert not throttle.is_due("down")
    assert throttle.is_due("other")
    await clock.advance(30.0)
    assert throttle.is_due("down")
