"""`aryl` before its commands are there: Ctrl-C in the middle of the imports."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from coordinator.cli.interrupt import EXIT_INTERRUPTED

PATIENCE_S = 60.0

HALTS_AT = """
import importlib.abc, signal, sys

class Halt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            print("importing", flush=True)
            while True: pass

sys.meta_path.insert(0, Halt())
from coordinator.cli.main import main
sys.argv = ["aryl", *{words!r}]
main()
"""
"""The real entry; the import of one module waits for a signal, awake: one that comes right before
`signal.pause` is lost to it, and it waits for ever."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("typer", ["--version"]),
        ("coordinator.cli.session", ["--version"]),
        ("coordinator.cli.up", ["up", "--help"]),
    ],
    ids=["first", "own", "late"],
)
def test_ctrl_c_during_the_imports_is_one_line_and_the_documented_code(
    module: str, words: list[str]
) -> None:
    """No traceback, no death by signal: a script can tell that it was interrupted."""
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    with subprocess.Popen(
        [sys.executable, "-c", heeds + HALTS_AT.format(module=module, words=words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert (process.returncode, err) == (EXIT_INTERRUPTED, "interrupted\n")


@pytest.mark.slow
def test_what_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    """In the background of a shell script Ctrl-C is not meant for it."""
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + HALTS_AT.format(
        module="typer", words=["--version"]
    ).replace("while True: pass", "signal.raise_signal(signal.SIGINT)")
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "aryl" in result.stdout


WATCHED = """
import gc, importlib.abc, sys

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("coordinator.cli.session", "coordinator.cli.policies"):
            print(name, gc.isenabled())

sys.meta_path.insert(0, Watch())
from coordinator.cli.main import main
sys.argv = ["aryl", "policies", "--quiet"]
try:
    main()
finally:
    print("command:", gc.isenabled(), gc.get_freeze_count() > 0)
"""


@pytest.mark.slow
def test_garbage_is_looked_for_in_what_a_command_makes_alone() -> None:
    """Not while its modules are imported, nor among them later on; of the rest as ever."""
    result = subprocess.run(
        [sys.executable, "-c", WATCHED],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    first, late, *names, command = result.stdout.splitlines()
    assert first == "coordinator.cli.session False"
    assert late == "coordinator.cli.policies False"
    assert command == "command: True True"
    assert "aryl" in names
