"""What imports nats-py costs no HTTP client, and takes none from whoever wants one."""

from __future__ import annotations

import subprocess
import sys


def says(code: str) -> str:
    """What another interpreter, which has imported nothing yet, prints of this."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_neither_daemons_nor_commands_wait_for_an_http_client() -> None:
    """They begin without aiohttp where that is installed, and whoever wants it then has it."""
    daemons = "import sys, agent.daemon, coordinator.service.daemon, coordinator.cli.app"
    has = "print('aiohttp' in sys.modules)"
    assert says(f"{daemons}; {has}; import aiohttp; {has}") == "False\nTrue"


def test_whoever_had_an_http_client_keeps_it() -> None:
    """What was imported before the bus stays what it is."""
    before = "import sys, aiohttp, common.bus; print(sys.modules['aiohttp'] is aiohttp)"
    assert says(before) == "True"
