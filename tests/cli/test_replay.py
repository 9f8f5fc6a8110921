"""`aryl replay`: what is refused before a journal is read. Replays themselves: tests/plan."""

from __future__ import annotations

from pathlib import Path

from tests.cli.fake_cell import FakeCell, aryl
from tests.tables import each_row

WRONG = {
    "no journal": ((), "expected the journal of one cell, found none"),
    "a change without a value": (("--set", "lease_ttl_s"), "expected NAME=VALUE"),
    "an unknown policy": (("--policy", "nosuch"), "--policy: 'nosuch' is not one of"),
    "an unknown setting": (("--set", "foo=1"), "--set: 'foo', expected a setting of [engine]"),
    "a knob of another policy": (
        ("--policy", "tetris", "--set", "reclaim=random"),
        "--set: 'reclaim', expected a setting of [engine] or a knob of tetris",
    ),
    "a knob's value": (("--policy", "aryl", "--set", "reclaim=x"), "--set: "),
    "a setting's value": (("--set", "lease_ttl_s=soon"), "--set: lease_ttl_s=soon: "),
    "the policy as a setting": (("--set", "policy=fifo"), "--policy names another one"),
    "a name": (("-o", "name"), "a replay has no name"),
}


@each_row("why", WRONG)
def test_a_replay_that_cannot_be_says_why(why: str, tmp_path: Path) -> None:
    """Exit code 2, with the option and what was expected."""
    words, text = WRONG[why]
    run = aryl(FakeCell({}), "replay", "--journal", str(tmp_path), *words)
    assert run.code == 2
    assert text in run.err


def test_a_directory_with_two_journals_needs_a_name(tmp_path: Path) -> None:
    """The cells are listed; --cell picks one of them."""
    for cell in ("east", "west"):
        (tmp_path / "jetstream" / f"ARYL_JOURNAL_{cell}").mkdir(parents=True)
    run = aryl(FakeCell({}), "replay", "--journal", str(tmp_path))
    assert (run.code, "east, west" in run.err) == (2, True)
