"""Rows of a text table, with the position of each value.

Every fault of a file becomes one `ConfigError` that names the file, the line and, where there is
one, the column: the value found and the value expected.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from common.errors import ConfigError
from common.model import MAX_INT, MAX_JOB_S

GZIP_MAGIC = b"\x1f\x8b"

MAX_CLOCK_S = MAX_INT / 1e6
"""The limit of an instant: 285 years, so Unix time fits. A float distinguishes microseconds up to
here; a later instant is mostly a clock in milliseconds.
"""

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Characters that no table has; a binary file has them at its beginning."""

SHOWN_COLUMNS = 30
SHOWN_CHARACTERS = 60
"""The length of a header, and of a value, in an error: a longer one is most often no table."""


def read_text(path: Path) -> str:
    """A text file; gzip is recognized by its first bytes, not by the file's name.

    Raises:
        ConfigError: unreadable, no text in UTF-8, or compressed data that are cut off or damaged;
            then the line is the last one that could be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    if data.startswith(GZIP_MAGIC):
        data = _unpacked(path, data)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise ConfigError(
            f"{path}: line {line}: column {column} (bytes): not UTF-8 text: {error.reason}"
        ) from None
    if (control := CONTROL.search(text)) is not None:
        line = text.count("\n", 0, control.start()) + 1
        column = control.start() - text.rfind("\n", 0, control.start())
        raise ConfigError(
            f"{path}: line {line}: column {column} (characters): {control[0]!r}: no text, expected "
            "a table"
        )
    return text


def _unpacked(path: Path, data: bytes) -> bytes:
    try:
        return gzip.decompress(data)
    except (EOFError, OSError, zlib.error) as error:
        whole = _whole_part(data)
        line = whole.count(b"\n") + 1
        column = len(whole) - (whole.rfind(b"\n") + 1) + 1
        raise ConfigError(
            f"{path}: line {line}: column {column} (bytes): compressed data end or are damaged "
            f"here: {error}"
        ) from None


def _whole_part(data: bytes) -> bytes:
    """The readable part of a damaged file, unpacked byte by byte to lose nothing before it."""
    unpack = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    whole = bytearray()
    # The rows before the damage are read first.
    with contextlib.suppress(zlib.error):
        for start in range(len(data)):
            whole += unpack.decompress(data[start : start + 1])
    return bytes(whole)


def shown(text: str) -> str:
    """A value as an error shows it: quoted, and cut where it is too long to be one."""
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..")


def listed(columns: Sequence[str]) -> str:
    """A header as an error shows it."""
    more = [".."] if len(columns) > SHOWN_COLUMNS else []
    return ", ".join([column[:SHOWN_CHARACTERS] for column in columns[:SHOWN_COLUMNS]] + more)


def digits(text: str) -> str:
    """The text of a number as other tools read it too.

    Raises:
        ValueError: Python alone takes `1_00` for 100, and digits of other scripts.
    """
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return text


class Row:
    """One row: its values by column, checked as they are read."""

    __slots__ = ("_fields", "_table", "line")

    def __init__(self, table: Table, line: int, fields: Sequence[str]) -> None:
        self._table = table
        self._fields = fields
        self.line = line

    def text(self, column: str) -> str:
        """A field as it stands, blanks around it cut.

        Raises:
            ConfigError: the row ends before that column.
        """
        index = self._table.index[column]
        if index >= len(self._fields):
            raise self.wrong(column, "missing: the row ends before it")
        return self._fields[index].strip()

    def optional(self, column: str) -> str:
        """A field that may be absent, from the table or from the row; then it is empty."""
        return self.text(column) if column in self._table.index else ""

    def named(self, column: str) -> str:
        """A field that must not be empty."""
        text = self.text(column)
        if not text:
            raise self.wrong(column, "empty, expected a name")
        return text

    def number(
        self, column: str, *, least: float | None = None, most: float | None = None
    ) -> float:
        """A finite number, neither below `least` nor above `most`.

        Raises:
            ConfigError: anything else; NaN and infinities are no numbers.
        """
        text = self.text(column)
        try:
            value = float(digits(text))
        except ValueError:
            raise self.wrong(column, f"{shown(text)} is not a number") from None
        if value - value != 0.0:
            raise self.wrong(column, f"{shown(text)} is not a number")
        return self._bounded(column, value, least, most)

    def seconds(self, column: str, *, unit_s: float = 1.0) -> float:
        """A length of time that a job may have, given in units of `unit_s`, in seconds."""
        return self.number(column, least=0, most=MAX_JOB_S / unit_s) * unit_s

    def clock_s(self, column: str, *, unit_s: float = 1.0) -> float:
        """An instant on the file's own clock, which nothing comes before, in seconds."""
        return self.number(column, least=0, most=MAX_CLOCK_S / unit_s) * unit_s

    def whole(self, column: str, *, least: int = 0, most: int = MAX_INT) -> int:
        """A whole number, neither below `least` nor above `most`."""
        text = self.text(column)
        try:
            value = int(digits(text))
        except ValueError:
            raise self.wrong(column, f"{shown(text)} is not a whole number") from None
        self._bounded(column, value, least, most)
        return value

    def count(self, column: str) -> float:
        """How many of something: a number from 0 to the last one that floats can count to."""
        return self.number(column, least=0, most=MAX_INT)

    def instant(self, column: str) -> float:
        """A date and time as seconds since 1970; one without a zone is taken as UTC.

        Public traces write local wall time without a zone; only differences of it mean anything.
        Digits below a microsecond are dropped.
        """
        text = self.text(column)
        try:
            value = datetime.fromisoformat(text)
        except ValueError:
            raise self.wrong(column, f"{shown(text)} is not a date and time") from None
        at_s = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if at_s < 0:
            raise self.wrong(column, f"{text}, expected 1970 or later")
        return at_s

    def wrong(self, column: str, what: str) -> ConfigError:
        """The error to raise for a field of this row."""
        return ConfigError(f"{self._table.name}: line {self.line}: column {column}: {what}")

    def _bounded(self, column: str, value: float, least: float | None, most: float | None) -> float:
        if least is not None and value < least:
            raise self.wrong(column, f"{self._plain(column)}, expected at least {least:g}")
        if most is not None and value > most:
            raise self.wrong(column, f"{self._plain(column)}, expected at most {most:g}")
        return value

    def _plain(self, column: str) -> str:
        """The number as it stands."""
        return shown(self.text(column)).strip("'")


class Table:
    """A text table: its columns by name, and its rows with their line numbers.

    Args:
        name: what errors call it; a path.
        columns: the names, for a table that has no header; else the first line is the header.
    """

    def __init__(
        self, name: str, text: str, *, columns: Sequence[str] = (), separator: str = ","
    ) -> None:
        self.name = name
        self._text = text
        self._separator = separator
        self._reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        self._line = 0
        self.has_header = not columns
        self.columns = tuple(columns)
        if self.has_header:
            self.columns = tuple(self._header())
        self.index = {column: index for index, column in enumerate(self.columns)}
        if len(self.index) < len(self.columns):
            twice = next(c for c in self.columns if self.columns.count(c) > 1)
            raise self.wrong(f"column {twice}: is given twice")

    @classmethod
    def open(cls, path: Path) -> Table:
        """The CSV file at a path, its header read."""
        return cls(str(path), read_text(path))

    def wrong(self, what: str) -> ConfigError:
        """The error to raise for the header."""
        return ConfigError(f"{self.name}: line 1: {what}")

    def require(self, columns: Sequence[str]) -> None:
        """Raises:
        ConfigError: a column is not there.
        """
        for column in columns:
            if column not in self.index:
                raise self.wrong(f"column {column}: missing; there are: {listed(self.columns)}")

    def rows(self) -> Iterator[Row]:
        """Each row; blank lines are left out.

        Raises:
            ConfigError: no row at all, a row longer than the header, or no CSV.
        """
        is_empty = True
        while (row := self._next()) is not None:
            is_empty = False
            yield row
        if is_empty:
            raise ConfigError(
                f"{self.name}: line {1 + self.has_header}: column {self.columns[0]}: no rows, "
                "expected at least one"
            )

    def _header(self) -> list[str]:
        fields = self._fields()
        if not fields or not any(field.strip() for field in fields):
            raise self.wrong("column 1: empty file; expected a header")
        return [field.strip() for field in fields]

    def _next(self) -> Row | None:
        while (fields := self._fields()) is not None:
            if any(field.strip() for field in fields):
                row = Row(self, self._line, fields)
                if len(fields) > len(self.columns):
                    more = f"{len(fields)} values, expected {len(self.columns)}"
                    raise row.wrong(str(len(self.columns) + 1), more)
                return row
        return None

    def _fields(self) -> list[str] | None:
        self._line = self._reader.line_num + 1
        try:
            return next(self._reader, None)
        except csv.Error as error:
            number = self._broken_field()
            column = self.columns[number] if number < len(self.columns) else number + 1
            raise ConfigError(
                f"{self.name}: line {self._line}: column {column}: no CSV, are its quotes closed? "
                f"{error}"
            ) from None

    def _broken_field(self) -> int:
        """Which field, from 0, of the row that begins at the present line is none."""
        separator = re.escape(self._separator)
        whole = re.compile(
            rf'(?:"[^"]*(?:""[^"]*)*"|[^"{separator}\r\n][^{separator}\r\n]*)?{separator}'
        )
        rest = "".join(islice(io.StringIO(self._text, newline=""), self._line - 1, None))
        number = at = 0
        while (field := whole.match(rest, at)) is not None:
            number, at = number + 1, field.end()
        return number
