"""Which cell is meant: flags, environment, file, the cell of this machine, in this order."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from common.errors import ConfigError, Unavailable
from coordinator.cli.session import EXIT_UNREACHABLE, exit_code
from coordinator.client.registry import CellInfo
from coordinator.client.target import Choice, Target, login_token, over_nats, resolve

HERE = CellInfo(
    cell="demo", nats_url="nats://127.0.0.1:9", pid=1, start_ticks=1, run_dir="/r", started_at_s=0.0
)
FILE = 'nats_url = "tls://file:1"\ncell = "filecell"\ntenant = "filetenant"\nuser = "fileuser"\n'
ENVIRON = {
    "ARYL_NATS_URL": "tls://env:1",
    "ARYL_CELL": "envcell",
    "ARYL_TENANT": "envtenant",
    "ARYL_USER": "envuser",
}
FLAGS = Choice(nats_url="tls://flag:1", cell="flagcell", tenant="flagtenant", user="flaguser")


def config(tmp_path: Path, text: str) -> dict[str, str]:
    """An environment whose configuration file says this."""
    (tmp_path / "aryl").mkdir()
    (tmp_path / "aryl" / "config.toml").write_text(text)
    return {"XDG_CONFIG_HOME": str(tmp_path)}


def test_each_source_wins_over_the_next(tmp_path: Path) -> None:
    """Flags over the environment over the file over the cell that runs here."""
    file = config(tmp_path, FILE)
    assert resolve(FLAGS, {**file, **ENVIRON}, lambda: HERE).cell == "flagcell"
    assert resolve(Choice(), {**file, **ENVIRON}, lambda: HERE).cell == "envcell"
    assert resolve(Choice(), file, lambda: HERE) == Target(
        nats_url="tls://file:1", cell="filecell", tenant="filetenant", user="fileuser"
    )
    here = resolve(Choice(), {"XDG_CONFIG_HOME": "/nonexistent"}, lambda: HERE)
    assert here == Target(
        nats_url=HERE.nats_url,
        cell="demo",
        tenant="ops",
        user=login_token(),
        is_of_this_machine=True,
    )


def test_a_source_may_say_a_part(tmp_path: Path) -> None:
    """A tenant of the environment and the rest of a file make one target."""
    environ = {**config(tmp_path, FILE), "ARYL_TENANT": "other", "ARYL_INSECURE": "1"}
    found = resolve(Choice(user="me"), environ, lambda: None)
    assert (found.cell, found.tenant, found.user) == ("filecell", "other", "me")
    assert found.insecure


def test_half_a_cell_is_not_completed_by_another() -> None:
    """A URL without a cell's name is an error, even though a cell runs here."""
    environ = {"XDG_CONFIG_HOME": "/nonexistent", "ARYL_NATS_URL": "tls://env:1"}
    with pytest.raises(ConfigError, match=r"field cell is missing; give --cell, set ARYL_CELL"):
        resolve(Choice(tenant="t"), environ, lambda: HERE)


def test_no_cell_at_all_says_how_to_name_one() -> None:
    """The error names the command that starts one and every way to name one."""
    with pytest.raises(ConfigError, match=r"`aryl up`.*--nats-url.*ARYL_CELL.*config\.toml"):
        resolve(Choice(), {"XDG_CONFIG_HOME": "/nonexistent"}, lambda: None)


def test_the_cell_of_this_machine_may_be_named() -> None:
    """Its name alone is enough: it is found, and its server with it."""
    found = resolve(Choice(cell="demo"), {"XDG_CONFIG_HOME": "/nonexistent"}, lambda: HERE)
    assert (found.cell, found.nats_url, found.tenant) == ("demo", HERE.nats_url, "ops")


@pytest.mark.parametrize(("runs", "said"), [(HERE, "cell demo does"), (None, "no cell does")])
def test_another_cell_than_that_of_this_machine_needs_its_server(
    runs: CellInfo | None, said: str
) -> None:
    """The error is about the cell that was named, and says what runs here instead."""
    with pytest.raises(ConfigError, match=rf"cell other does not run .*, {said}.*--nats-url"):
        resolve(Choice(cell="other"), {"XDG_CONFIG_HOME": "/nonexistent"}, lambda: runs)


def test_a_cell_that_is_no_name_is_named_before_its_server_is_missed() -> None:
    """What was written wrong is the error, not what is missing beside it."""
    with pytest.raises(ConfigError, match="cell: 'a b'"):
        resolve(Choice(cell="a b"), {"XDG_CONFIG_HOME": "/nonexistent"}, lambda: HERE)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("nats_url = 7", "field nats_url: Expected `str"),
        ('nats = "x"', "unknown field nats; did you mean nats_url"),
        ("nats_url", "is not TOML"),
    ],
)
def test_a_bad_file_is_named_with_its_field(tmp_path: Path, text: str, error: str) -> None:
    """The error names the file and the field."""
    with pytest.raises(ConfigError, match=rf"config\.toml.*{error}"):
        resolve(Choice(), config(tmp_path, text), lambda: HERE)


@pytest.mark.parametrize("field", ["cell", "tenant", "user"])
def test_a_name_that_is_no_token_is_refused(field: str) -> None:
    """A dot or a wildcard would change the subject, and with it who speaks."""
    with pytest.raises(ConfigError, match=f"{field}: 'a.b'"):
        resolve(structs.replace(FLAGS, **{field: "a.b"}), ENVIRON, lambda: None)


def test_an_odd_switch_is_refused() -> None:
    """ARYL_INSECURE is 0 or 1; anything else is not taken for yes."""
    with pytest.raises(ConfigError, match="ARYL_INSECURE: 'true', expected 0 or 1"):
        resolve(Choice(), {**ENVIRON, "ARYL_INSECURE": "true"}, lambda: None)


def test_a_login_name_becomes_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a subject cannot hold becomes a hyphen."""
    monkeypatch.setenv("LOGNAME", "ada.lovelace@lab")
    assert login_token() == "ada-lovelace-lab"


async def test_a_server_that_is_not_there_is_unreachable_and_keeps_its_password() -> None:
    """Nobody was asked, so nothing may still happen; and a terminal is no place for a secret."""
    target = Target(nats_url="nats://ada:secret@127.0.0.1:1", cell="c", tenant="ops", user="ada")
    with pytest.raises(Unavailable, match="no NATS server answers at nats://127") as caught:
        async with over_nats(target, timeout_s=0.05):
            raise AssertionError("there is nobody at port 1")
    assert exit_code(caught.value) == EXIT_UNREACHABLE
    assert "secret" not in str(caught.value)
