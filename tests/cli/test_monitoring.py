"""`aryl monitoring export`."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from coordinator.cli.app import app
from coordinator.cli.monitoring import IN_A_CHECKOUT


def run(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and output of `aryl monitoring export`."""
    result = CliRunner().invoke(app, ["monitoring", "export", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_files_are_written_and_written_again(tmp_path: Path) -> None:
    """Boards, alerts and configuration as they are in the repository; twice is as good as once."""
    directory = tmp_path / "new" / "monitoring"
    for _ in range(2):
        code, said = run(directory)
        assert (code, "promise.json" in said) == (0, True), said
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == {
        path.name: path.read_bytes() for path in IN_A_CHECKOUT.iterdir()
    }


def test_alerts_lead_to_the_site_that_is_named(tmp_path: Path) -> None:
    """Each link of a rule is then a URL."""
    assert run(tmp_path, "--docs-url", "https://docs.example/aryl/")[0] == 0
    lines = [
        line.strip()
        for line in (tmp_path / "alerts.yml").read_text().splitlines()
        if "runbook_url" in line
    ]
    assert len(lines) > 20
    assert all(line.startswith("runbook_url: https://docs.example/aryl/") for line in lines)


def test_a_file_of_a_site_is_not_replaced_unasked(tmp_path: Path) -> None:
    """Changed thresholds stay, and nothing at all is written."""
    (tmp_path / "alerts.yml").write_text("mine")
    code, said = run(tmp_path)
    assert (code, "alerts.yml" in said, "--force" in said) == (2, True, True)
    assert [path.name for path in tmp_path.iterdir()] == ["alerts.yml"]
    assert run(tmp_path, "--force")[0] == 0
    assert (tmp_path / "alerts.yml").read_text() != "mine"
