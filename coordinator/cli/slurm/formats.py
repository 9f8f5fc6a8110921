"""Slurm's output formats: `%.18i %R` (`-o`) and `JobID:12,State` (`-O`). Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from common.slurm.options import OptionError

T = TypeVar("T")

_PIECE = re.compile(r"%(?P<right>\.)?(?P<size>\d*|#)(?P<letter>[A-Za-z])", re.ASCII)
FITTED = -1
"""The size of a field that is as wide as its longest text: `%#P`."""
_NAMED = re.compile(
    r"(?P<name>[A-Za-z_-]+)(?::(?P<right>\.)?(?P<left>-)?(?P<size>\d*)(?P<suffix>.*))?", re.ASCII
)
NAMED_SIZE = 20
MAX_SIZE = 10_000


@dataclass(frozen=True)
class Field(Generic[T]):
    """A column: its heading, and its text for a row."""

    heading: str
    text: Callable[[T], str]


@dataclass(frozen=True)
class Piece(Generic[T]):
    """A field in its place. size: 0: as long as its text; before: the text before the field."""

    field: Field[T]
    before: str = ""
    size: int = 0
    is_right: bool = False

    def put(self, text: str) -> str:
        """The text, cut and filled to its size."""
        if not self.size:
            return self.before + text
        cut = text[: self.size]
        return self.before + (cut.rjust(self.size) if self.is_right else cut.ljust(self.size))


@dataclass(frozen=True)
class Format(Generic[T]):
    """A line of output. after: the text behind the last field."""

    pieces: tuple[Piece[T], ...]
    after: str = ""

    def fitted(self, rows: Sequence[T]) -> Format[T]:
        """The same with a width for each field that is as wide as its longest text."""

        def sized(piece: Piece[T]) -> Piece[T]:
            texts = [piece.field.heading, *(piece.field.text(row) for row in rows)]
            width = max(map(len, texts)) if piece.size == FITTED else piece.size
            return replace(piece, size=width)

        return replace(self, pieces=tuple(map(sized, self.pieces)))

    def heading(self) -> str:
        """The line of headings."""
        return self._line(piece.field.heading for piece in self.pieces)

    def line(self, row: T) -> str:
        """The line of a row."""
        return self._line(piece.field.text(row) for piece in self.pieces)

    def _line(self, texts: Iterable[str]) -> str:
        pairs = zip(self.pieces, texts, strict=True)
        return ("".join(piece.put(text) for piece, text in pairs) + self.after).rstrip(" ")


def of_letters(text: str, fields: Mapping[str, Field[T]]) -> Format[T]:
    """The format of `-o`.

    Raises:
        OptionError: a letter that stands for no field.
    """
    pieces: list[Piece[T]] = []
    end = 0
    for found in _PIECE.finditer(text):
        field = fields.get(found["letter"])
        if field is None:
            known = " ".join(f"%{letter}" for letter in sorted(fields))
            raise OptionError(f"Invalid format specification: {found[0]}; there are {known}")
        is_fitted = found["size"] == "#"
        size = FITTED if is_fitted else min(int(found["size"] or 0), MAX_SIZE)
        pieces.append(Piece(field, text[end : found.start()], size, bool(found["right"])))
        end = found.end()
    return Format(tuple(pieces), text[end:])


def of_names(text: str, fields: Mapping[str, Field[T]]) -> Format[T]:
    """The format of `-O`: names with `:[.]SIZE`, 20 without.

    Raises:
        OptionError: a name that stands for no field.
    """
    by_name = {name.lower(): field for name, field in fields.items()}
    pieces: list[Piece[T]] = []
    between = ""
    for part in text.split(","):
        found = _NAMED.fullmatch(part.strip())
        field = None if found is None else by_name.get(found["name"].lower())
        if found is None or field is None:
            known = ", ".join(sorted(fields))
            raise OptionError(f"Invalid job format specification: {part}; there are {known}")
        size = min(int(found["size"] or NAMED_SIZE), MAX_SIZE)
        pieces.append(Piece(field, between, size, bool(found["right"])))
        between = found["suffix"] or ""
    return Format(tuple(pieces), between)


def table(pieces: Sequence[Piece[T]], rows: Iterable[T], *, has_heading: bool) -> list[str]:
    """Columns as `sacct` shows them: headings, a line of dashes, and one line for each row."""
    lines: list[str] = []
    if has_heading:
        lines.append(_joined(piece.put(piece.field.heading) for piece in pieces))
        lines.append(_joined("-" * piece.size for piece in pieces))
    return lines + [
        _joined(_marked(piece, piece.field.text(row)) for piece in pieces) for row in rows
    ]


def _marked(piece: Piece[T], text: str) -> str:
    """A text that is cut ends with `+`."""
    return piece.put(text if len(text) <= piece.size else text[: piece.size - 1] + "+")


def _joined(texts: Iterable[str]) -> str:
    return " ".join(texts) + " "
