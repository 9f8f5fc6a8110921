"""Which jobs a command means: by number, user, state, name, account, partition. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from common import arrays
from common.api import ArrayRow, JobRow
from common.errors import ConfigError
from common.slurm.options import OptionError
from coordinator.cli.slurm import words
from coordinator.cli.slurm.cell import number_of

_JOB = re.compile(r"(?P<number>\d+)(?:_(?P<tasks>\d+|\[[\d,%:-]+\]))?(?:\.\w+)?", re.ASCII)
_LIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING")


class Choice:
    """The filters of a command; a job passes if all of them let it pass.

    Args:
        given: options by name, each with the values that it was given, in order.
        user: the user who calls, for `--me`.
        live_only: without `--states`, jobs that have ended do not pass.
        state: the state of a job as the command shows it.
    """

    def __init__(
        self,
        given: list[tuple[str, str]],
        *,
        user: str,
        live_only: bool,
        state: Callable[[JobRow], str] = words.state,
    ) -> None:
        self._state = state
        self.numbers = _many(given, "jobs") | _many(given, "job") | _many(given, "jobid")
        self._users = _many(given, "user")
        if ("me", "") in given:
            self._users.add(user)
        self._names = _many(given, "name")
        self._accounts = {name.lower() for name in _many(given, "account")}
        self._partitions = {name.lower() for name in _many(given, "partition")}
        self.states = states(_many(given, "states") | _many(given, "state"))
        if not self.states and live_only:
            self.states = frozenset(_LIVE)

    @property
    def wants_ended(self) -> bool:
        """Whether jobs that have ended may pass."""
        return not self.states or bool(self.states - set(_LIVE))

    def are_all_known(self, rows: Iterable[JobRow]) -> bool:
        """Whether jobs were named and rows of the cell show them all: an array may have tasks that
        have none.
        """
        single = [row for row in rows if not isinstance(row.array, ArrayRow)]
        known = {str(row.number) for row in single} | {number_of(row) for row in single}
        return bool(self.numbers) and known.issuperset(self.numbers)

    def asked_numbers(self) -> list[int]:
        """The numbers of the jobs and arrays that were named; empty: none was, or one by its id."""
        names = [main_number(name) for name in self.numbers]
        return sorted(map(int, names)) if all(map(str.isdecimal, names)) else []

    def one_user(self) -> str:
        """The user whose jobs alone may pass; empty: those of several may."""
        return next(iter(self._users)) if len(self._users) == 1 else ""

    def is_named(self, row: JobRow) -> bool:
        """Whether a job goes by one of the names that were given."""
        return any(_names(name, row) for name in self.numbers)

    def passes(self, row: JobRow, *, of_any_state: bool = False) -> bool:
        """Whether a job is meant, in its present state or in any."""
        return (
            (not self.numbers or self.is_named(row))
            and (not self._users or row.user in self._users)
            and (not self._names or not {row.name, words.title(row)}.isdisjoint(self._names))
            and (not self._accounts or row.tenant.lower() in self._accounts)
            and (not self._partitions or self._is_in(row))
            and (of_any_state or not self.states or self._state(row) in self.states)
        )

    def _is_in(self, row: JobRow) -> bool:
        return not self._partitions.isdisjoint(words.partitions(row).lower().split(","))


def _many(given: Iterable[tuple[str, str]], option: str) -> set[str]:
    """The values of an option that may be repeated, and has commas between."""
    texts = [value for name, value in given if name == option]
    return {part.strip() for text in texts for part in _split(text) if part.strip()}


def _split(text: str) -> list[str]:
    """Parts between commas; those in brackets belong to an array."""
    return re.split(r",(?![^\[]*\])", text)


def states(names: Iterable[str]) -> frozenset[str]:
    """States by their long or short names; `all` is none.

    Raises:
        OptionError: a name that Slurm does not know.
    """
    by_short = {short: long for long, short in words.COMPACT.items()}
    found: set[str] = set()
    for name in names:
        long = by_short.get(name.upper(), name.upper())
        if long == "ALL":
            return frozenset(words.COMPACT)
        if long not in words.COMPACT:
            known = ",".join(words.COMPACT)
            raise OptionError(
                f"Invalid job state specified: {name}\nValid job states include: {known}"
            )
        found.add(long)
    return frozenset(found)


def _names(name: str, row: JobRow) -> bool:
    """Whether a job goes by a name: `17`, `17_3`, `17_[0-9]`, or Aryl's own id.

    A job that is no array has no tasks, so that its number with any task names it.
    """
    shown = number_of(row)
    if name in (shown, str(row.number), row.job_id):
        return True
    wanted, own = _JOB.fullmatch(name), _JOB.fullmatch(shown)
    if wanted is None or own is None:
        return False
    if wanted["number"] != own["number"]:
        return not own["tasks"] and wanted["number"] == str(row.number)
    if not wanted["tasks"] or not own["tasks"]:
        return True
    return not _indices(wanted["tasks"]).isdisjoint(_indices(own["tasks"]))


def _indices(tasks: str) -> frozenset[int]:
    """The indices in `3` or `[0-9,20%2]`; empty: they are none."""
    try:
        return frozenset(arrays.indices(tasks.strip("[]").partition("%")[0]))
    except ConfigError:
        return frozenset()


def main_number(text: str) -> str:
    """The number of a job or of an array, without its task or its step."""
    found = _JOB.fullmatch(text)
    return text if found is None else found["number"]
