"""`aryl-route` without a router: what it changes in a file, and which words it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.hooks.route import Refused, main, with_server

ADDRESSES = ("10.0.0.1:8000", "10.0.0.11:8000", "gpu-1.example:8000", "[fd00::1]:8000")


@given(
    address=st.sampled_from(ADDRESSES),
    options=st.lists(st.sampled_from(["weight=3", "down", "backup", "max_fails=1"]), unique=True),
    is_routed=st.booleans(),
)
def test_a_file_keeps_all_but_whether_a_server_is_down(
    address: str, options: list[str], is_routed: bool
) -> None:
    """Other servers, comments and options stay; twice is as once; back is where it began."""
    others = "".join(f"  server {other};\n" for other in ADDRESSES if other != address)
    line = " ".join((address, *options))
    text = f"upstream chat {{\n  # server {address};\n{others}  server {line};  # kept\n}}\n"
    changed = with_server(text, address, is_routed=is_routed)
    assert with_server(changed, address, is_routed=is_routed) == changed
    kept = [option for option in options if option != "down"]
    down = [] if is_routed else ["down"]
    assert changed == text.replace(
        f"server {line};  #", f"server {' '.join((address, *kept, *down))};  #"
    )


@pytest.mark.parametrize("text", ["", "server 10.0.0.1:8000;\nserver 10.0.0.1:8000;\n"])
def test_an_address_that_is_not_there_once_is_refused(text: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(Refused, match="expected one"):
        with_server(text, "10.0.0.1:8000", is_routed=True)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("haproxy", "add", "--socket", "/s", "--backend", "a; shutdown"), "--backend"),
        (("haproxy", "add", "--socket", "/s", "--backend", "b"), "--server"),
        (("haproxy", "add", "--backend", "b"), "--socket"),
        (("nginx", "add", "--upstream", "/f", "--server", "h"), "HOST:PORT"),
        (("haproxy", "add", "--socket", "/s", "--backend", "b", "--timeout-s", "0"), "--timeout-s"),
    ],
)
def test_a_word_that_does_not_fit_is_named(
    words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Before anything is asked of a router."""
    monkeypatch.delenv("ARYL_NODE", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_it_starts_with_the_standard_library_alone() -> None:
    """It also runs on a router's machine, where nothing of Aryl is."""
    path = str(Path(__file__).parents[3] / "agent/hooks")
    code = f"import sys; sys.path.insert(0, {path!r}); import route; print(route.__file__)"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, check=True)
