"""A rule that a table states: one test looks at every row, and names those that break it.

A case of pytest's own for each row costs more than most rows do: fixtures, reports, and a share of
the collection in every worker. Rows that take long stay cases, so that workers share them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., Any])

OWN_DIRECTORY = "tmp_path"
"""The fixture that no two rows share: each has a directory below it."""


def each_row(
    names: str | Iterable[str], table: Iterable[Any], *, ids: Iterable[str] | None = None
) -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize`, in one case: every row is tried, then those that broke raise.

    The test's other arguments are fixtures, which all rows share but for `tmp_path`. No row may
    skip: that would end the test.

    names: of the arguments that a row gives, as parametrize takes them. ids: what each row is
    called where it breaks; without them it is shown.
    """
    listed = names.split(",") if isinstance(names, str) else names
    found = _Table([name.strip() for name in listed], list(table), ids)

    def decorate(test: Test) -> Test:
        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def every_row_awaited(**fixtures: Any) -> None:
                broken: list[Exception] = []
                for label, arguments in found.calls(fixtures):
                    with _kept(label, broken):
                        await test(**arguments)
                found.tell(broken)

            return found.of(test, every_row_awaited)

        @functools.wraps(test)
        def every_row(**fixtures: Any) -> None:
            broken: list[Exception] = []
            for label, arguments in found.calls(fixtures):
                with _kept(label, broken):
                    test(**arguments)
            found.tell(broken)

        return found.of(test, every_row)

    return decorate


class _Table:
    def __init__(self, names: list[str], rows: list[Any], ids: Iterable[str] | None) -> None:
        values = rows if len(names) > 1 else [(row,) for row in rows]
        labels = map(repr, rows) if ids is None else ids
        self._names = names
        self._rows = [
            (label, dict(zip(names, row, strict=True)))
            for label, row in zip(labels, values, strict=True)
        ]
        if not self._rows:
            raise ValueError("a table without rows states nothing")

    def calls(self, fixtures: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """What each row is called, and the test's arguments for it."""
        for number, (label, given) in enumerate(self._rows):
            arguments = {**fixtures, **given}
            if OWN_DIRECTORY in fixtures:
                directory: Path = fixtures[OWN_DIRECTORY] / f"row{number}"
                directory.mkdir()
                arguments[OWN_DIRECTORY] = directory
            yield label, arguments

    def tell(self, broken: list[Exception]) -> None:
        """Raise what broke, all together."""
        if broken:
            raise ExceptionGroup(f"{len(broken)} of {len(self._rows)} rows", broken)

    def of(self, test: Test, made: Any) -> Test:
        """The test as pytest sees it: what is left of its arguments are fixtures."""
        signature = inspect.signature(test)
        left = [each for name, each in signature.parameters.items() if name not in self._names]
        made.__signature__ = signature.replace(parameters=left)
        found: Test = made
        return found


@contextmanager
def _kept(label: str, broken: list[Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"in the row {label}")
        broken.append(error)
