"""Settings files: what is read, what is refused, and how an error names its place."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta, Struct

from common.errors import ConfigError
from common.settings import SettingRow, describe, load
from coordinator.service.settings import CoordinatorSettings


class Color(StrEnum):
    """A closed choice."""

    RED = "red"
    GREEN = "green"


class Pump(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An item of a list."""

    name: str
    flow_ratio: Annotated[float, Meta(ge=0, le=1, description="share of full flow")] = 0.5


class Tank(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table."""

    size_bytes: Annotated[int, Meta(ge=1, description="what it holds")] = 10
    color: Color = Color.RED


class Plant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A settings file."""

    cell: Annotated[str, Meta(description="its name")]
    report_period_s: Annotated[float, Meta(gt=0, description="time between reports")] = 1.0
    state_dir: Path = Path("/var/lib/aryl")
    tags: tuple[str, ...] = ()
    limit_s: Annotated[float | None, Meta(description="none for ever")] = None
    tank: Tank = Tank()
    pumps: tuple[Pump, ...] = ()
    zones: dict[str, Tank] = {}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the settings are."""
    return tmp_path / "plant.toml"


def test_a_file_becomes_a_struct(file: Path) -> None:
    """Every kind of value arrives as its type; what is not in the file has its default."""
    file.write_text(
        'cell = "a"\nreport_period_s = 2\nstate_dir = "/x"\ntags = ["t"]\n'
        '[tank]\ncolor = "green"\n[[pumps]]\nname = "p"\n[zones.north]\nsize_bytes = 3\n'
    )
    assert load(file, Plant) == Plant(
        cell="a",
        report_period_s=2.0,
        state_dir=Path("/x"),
        tags=("t",),
        tank=Tank(color=Color.GREEN),
        pumps=(Pump(name="p"),),
        zones={"north": Tank(size_bytes=3)},
    )


def test_drop_ins_are_laid_over_in_order_of_name(file: Path) -> None:
    """The last file wins per key; tables merge, lists are replaced."""
    file.write_text('cell = "a"\ntags = ["x", "y"]\n[tank]\nsize_bytes = 1\ncolor = "green"\n')
    folder = file.with_name("plant.toml.d")
    folder.mkdir()
    (folder / "20-b.toml").write_text('tags = ["z"]\n[tank]\nsize_bytes = 3\n')
    (folder / "10-a.toml").write_text("report_period_s = 9.0\n[tank]\nsize_bytes = 2\n")
    (folder / "30-c.txt").write_text("not = 'read'")
    settings = load(file, Plant)
    assert settings.tank == Tank(size_bytes=3, color=Color.GREEN)
    assert settings.tags == ("z",)
    assert settings.report_period_s == 9.0


@pytest.mark.parametrize(
    ("text", "key", "problem"),
    [
        ("report_perod_s = 1.0", "report_perod_s", "did you mean 'report_period_s'"),
        ("[tank]\nsize = 1", "tank.size", "did you mean 'size_bytes'"),
        ("[tank]\nqqqq = 1", "tank.qqqq", "expected one of color, size_bytes"),
        ("report_period_s = '1 s'", "report_period_s", "expected `float`, got `str`"),
        ("report_period_s = 0", "report_period_s", "expected `float` > 0"),
        ("[tank]\nsize_bytes = true", "tank.size_bytes", "expected `int`, got `bool`"),
        ("[tank]\ncolor = 'blue'", "tank.color", "'blue', expected one of red, green"),
        ("[[pumps]]\nname = 'a'\n[[pumps]]\n", "pumps[1].name", "required and missing"),
        (
            "[[pumps]]\nname = 'a'\n[[pumps]]\nname = 'b'\nflow_ratio = 2",
            "pumps[1].flow_ratio",
            "<= 1",
        ),
        ("[zones.a]\n[zones.b]\nsize_bytes = 0", "zones.b.size_bytes", ">= 1"),
        ("tags = [1]", "tags", "expected `str`, got `int`"),
        ("state_dir = 3", "state_dir", "path"),
    ],
)
def test_an_error_names_file_key_and_expectation(
    file: Path, text: str, key: str, problem: str
) -> None:
    """Unknown, missing, wrong and out of range: each says where it is and what belongs there."""
    file.write_text(f'cell = "a"\n{text}\n')
    with pytest.raises(ConfigError) as error:
        load(file, Plant)
    assert str(error.value).startswith(f"{file}: {key}: ")
    assert problem in str(error.value)


def test_a_missing_key_is_named(file: Path) -> None:
    """A required key that stands nowhere is an error of the main file."""
    file.write_text("report_period_s = 1.0\n")
    with pytest.raises(ConfigError, match=r"plant\.toml: cell: is required"):
        load(file, Plant)


def test_an_error_in_a_drop_in_names_the_drop_in(file: Path) -> None:
    """The operator is sent to the file that holds the bad value."""
    file.write_text('cell = "a"\n[tank]\nsize_bytes = 4\n')
    folder = file.with_name("plant.toml.d")
    folder.mkdir()
    (folder / "bad.toml").write_text("[tank]\nsize_bytes = -1\n")
    with pytest.raises(ConfigError) as error:
        load(file, Plant)
    assert str(error.value).startswith(f"{folder / 'bad.toml'}: tank.size_bytes: ")


@pytest.mark.parametrize(
    ("content", "problem"), [(b"cell = ", "not TOML"), (b"\xff\xfe", "not TOML")]
)
def test_what_is_not_toml_is_refused(file: Path, content: bytes, problem: str) -> None:
    """Broken syntax and broken text name the file."""
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as error:
        load(file, Plant)
    assert str(file) in str(error.value)


def test_a_missing_file_is_the_operators_error(file: Path) -> None:
    """No file: its path and the system's reason."""
    with pytest.raises(ConfigError, match="No such file"):
        load(file, Plant)


def test_the_reference_is_made_from_the_struct() -> None:
    """One row per key with type, default and meaning, nested ones with their path."""
    rows = {row.key: row for row in describe(Plant)}
    assert rows["cell"] == SettingRow("cell", "text", "required", "its name")
    assert rows["report_period_s"] == SettingRow(
        "report_period_s", "number > 0", "1.0", "time between reports"
    )
    assert rows["limit_s"].default == "none"
    assert rows["state_dir"][1:3] == ("path", '"/var/lib/aryl"')
    assert rows["tags"][1:3] == ("list of text", "[]")
    assert rows["tank.color"][1:3] == ("one of red, green", '"red"')
    assert rows["pumps[].flow_ratio"] == SettingRow(
        "pumps[].flow_ratio", "number >= 0 and <= 1", "0.5", "share of full flow"
    )


def test_the_reference_of_the_coordinator_is_a_valid_file(file: Path) -> None:
    """The defaults that the reference prints are the defaults that an empty file has."""
    lines = ['cell = "a"', 'nats_url = "nats://127.0.0.1:4222"']
    tables: dict[str, list[str]] = {}
    for row in describe(CoordinatorSettings):
        assert row.meaning, row.key
        if row.default in ("required", "none", "") or "[]" in row.key:
            continue
        table, _, name = row.key.rpartition(".")
        target = tables.setdefault(table, []) if table else lines
        target.append(f"{name} = {row.default}")
    for table, settings in tables.items():
        lines += [f"[{table}]", *settings]
    file.write_text("\n".join(lines))
    assert load(file, CoordinatorSettings) == CoordinatorSettings(
        cell="a", nats_url="nats://127.0.0.1:4222"
    )
