"""Options of `aryl web`: what would show a cell to a network is refused, and says how it may."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.cli.session import EXIT_USAGE
from tests.cli.fake_cell import FakeCell, aryl

BAD = {
    ("--listen", "0.0.0.0:0"): "--token-file FILE",
    ("--listen", "lab.example:0"): "--token-file FILE",
    ("--listen", "0.0.0.0:0", "--token-file", "TOKEN"): "--tls-cert and --tls-key, or --insecure",
    ("--listen", "here"): "--listen: 'here'",
    ("--tls-cert", "c.pem"): "--tls-cert and --tls-key",
    ("--tls-cert", "/none.pem", "--tls-key", "/none.pem", "--listen", "0"): "--tls-cert /none.pem",
    ("--token-file", "/none"): "--token-file /none",
}


@pytest.mark.parametrize("arguments", BAD, ids=" ".join)
def test_what_is_not_safe_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Another address needs a token, and that needs TLS; the error names the option."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    given = [str(token) if each == "TOKEN" else each for each in arguments]
    run = aryl(FakeCell({}), "web", *given)
    assert run.code == EXIT_USAGE
    assert BAD[arguments] in run.err
    assert "0123456789abcdef" not in run.err
