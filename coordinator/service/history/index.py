"""An index of the history in an SQLite file, made from the stream and made again where it is gone.

The stream is the history. Each coordinator keeps an index of its own, so a standby answers as soon
as it leads. All methods block: callers run them in threads. One thread writes at a time, and one
reads; SQLite's write-ahead log keeps the two apart.

A line is found by words (`facts.words`). Numbers of lines and their instants grow together, so a
span of time is a span of numbers.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from common.decoding import UNREADABLE
from common.errors import Unavailable
from common.history import HistoryLine, JobRecord, StoryKind
from coordinator.service.history.facts import (
    COMMON,
    DAY_S,
    FACT_FIELDS,
    Fact,
    FactKind,
    all_words,
    by_day,
    facts,
    needed,
)
from coordinator.service.history.usage_sum import Sums

log = logging.getLogger(__name__)

FORM = 2
"""Of the tables; a file of another form is made again."""
QUERY_S = 5.0
"""A query that takes longer is given up: a client waits for 10 s."""
_STEPS = 100_000
"""Steps of SQLite's machine between two looks at the time."""
KNOWN_WORDS = 200_000
"""Words whose ids are kept in memory."""
ESTIMATE = 2_000
"""Lines of a word that are counted to find the rarest one."""
DROP_LINES = 2_000
"""Lines that one call of `drop` takes out."""

DAY_FIELDS = ("kind", "tenant", "user", "service", "gpu_type", "pool", "cause")
"""Columns by which whole days are added up as lines come: months are then a small sum."""

_PASSING = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_IOERR_SHMSIZE,
        sqlite3.SQLITE_IOERR_WRITE,
    }
)
"""Errors of a full disk or of a file that another program has locked: its content is whole."""

_TABLES = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE lines (number INTEGER PRIMARY KEY, at_s REAL NOT NULL, kind TEXT NOT NULL,
    data BLOB NOT NULL);
CREATE TABLE words (id INTEGER PRIMARY KEY, word TEXT NOT NULL UNIQUE);
CREATE TABLE places (word INTEGER NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (word, number))
    WITHOUT ROWID;
CREATE TABLE facts (number INTEGER NOT NULL, part INTEGER NOT NULL, day INTEGER NOT NULL,
    {", ".join(FACT_FIELDS)}, PRIMARY KEY (number, part)) WITHOUT ROWID;
CREATE INDEX facts_day ON facts (day);
CREATE TABLE days (day INTEGER NOT NULL, {", ".join(DAY_FIELDS)}, gpu_s REAL NOT NULL,
    span_s REAL NOT NULL, count INTEGER NOT NULL,
    PRIMARY KEY (day, {", ".join(DAY_FIELDS)})) WITHOUT ROWID;
CREATE TABLE jobs (number INTEGER PRIMARY KEY, job_id TEXT NOT NULL, tenant TEXT NOT NULL,
    user TEXT NOT NULL, ended_s REAL NOT NULL, submitted_s REAL NOT NULL,
    job_number INTEGER NOT NULL, array_number INTEGER NOT NULL, data BLOB NOT NULL);
CREATE INDEX jobs_id ON jobs (job_id);
CREATE INDEX jobs_number ON jobs (job_number);
CREATE INDEX jobs_array ON jobs (array_number);
CREATE INDEX jobs_user ON jobs (user, number);
CREATE INDEX jobs_tenant ON jobs (tenant, number);
"""

_line_decoder = msgspec.msgpack.Decoder(HistoryLine)
_job_decoder = msgspec.msgpack.Decoder(JobRecord)
_encoder = msgspec.msgpack.Encoder()


class Position(Struct, frozen=True):
    """How far the index has read the stream.

    identity: of the stream. sequence: the next one to read. number: of the last line.
    """

    identity: str = ""
    sequence: int = 1
    number: int = 0


class Asked(Struct, frozen=True, kw_only=True):
    """The lines that a question is about.

    words: each line has all of them. kinds: and is of one of these; empty: of any.
    after, before: numbers, both excluded. since_s, until_s: engine time; the end is excluded.
    """

    words: tuple[str, ...] = ()
    kinds: frozenset[StoryKind] = frozenset()
    after: int = 0
    before: int | None = None
    since_s: float | None = None
    until_s: float | None = None
    limit: int = 100
    is_newest: bool = True


class HistoryIndex:
    """The index in a file of its own.

    Args:
        path: of the file; made if it is missing, unreadable or of another form. Where another
            process has it, a file with a number is used.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._lock_file = _locked(path)
        self._reading, self._changing = threading.Lock(), threading.Lock()
        self._known: dict[str, int] = {}
        try:
            self._writer = self._read_on()
            self._reader = _connected(self.path)
            self.position = self._position()
        except BaseException:
            os.close(self._lock_file)  # the next try would take it for another process's
            raise

    def _read_on(self) -> sqlite3.Connection:
        """The file as it was left; made again where it cannot be used."""
        try:
            return self._opened()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode in _PASSING:
                raise
            log.warning("history: index %s is made again: %s", self.path, error)
            _remove(self.path)
            return self._opened()

    def _opened(self) -> sqlite3.Connection:
        db = _connected(self.path)
        try:
            form = db.execute("PRAGMA user_version").fetchone()[0]
            if form != FORM:
                if form:
                    db.close()
                    _remove(self.path)
                    db = _connected(self.path)
                db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {FORM}; COMMIT;")
        except BaseException:
            db.close()
            raise
        return db

    def close(self, *, is_broken: bool = False) -> None:
        """Give up what still runs, and leave the file; a broken one is removed."""
        self._reader.interrupt()
        self._writer.interrupt()
        with self._reading, self._changing:
            self._reader.close()
            self._writer.close()
        if is_broken:
            with contextlib.suppress(OSError):  # the next index complains of it
                _remove(self.path)
        os.close(self._lock_file)

    def _position(self) -> Position:
        found = dict(self._writer.execute("SELECT key, value FROM meta"))
        return Position(
            found.get("identity", ""), int(found.get("sequence", 1)), int(found.get("number", 0))
        )

    # --- writing ------------------------------------------------------------------------------

    def clear(self, identity: str) -> None:
        """Begin again, for a stream of this identity."""
        with self._writing():
            for table in ("lines", "words", "places", "facts", "days", "jobs"):
                self._writer.execute(f"DELETE FROM {table}")
            self._known.clear()
            self._move(Position(identity))

    def add(self, found: Sequence[bytes], *, until: int) -> int:
        """Add messages of the stream, in order; all up to the sequence `until` are read.

        A message that no coordinator wrote is passed over, and so is a line that is there already.

        Returns:
            The number of lines added.
        """
        last = self.position.number
        lines: list[tuple[HistoryLine, bytes]] = []
        for data in found:
            line = read_line(data)
            if line is not None and line.number > last:
                lines.append((line, data))
                last = line.number
        with self._writing():
            self._add(lines)
            self._move(Position(self.position.identity, until + 1, last))
        return len(lines)

    def _add(self, lines: Sequence[tuple[HistoryLine, bytes]]) -> None:
        db = self._writer
        found = [(line.number, all_words(line)) for line, _ in lines]
        ids = self._ids(word for _, words in found for word in words)
        amounts: list[tuple[object, ...]] = []
        jobs: list[tuple[object, ...]] = []
        for line, _ in lines:
            if line.detail is None:
                continue
            amounts += [
                (line.number, part, day, *astuple(fact))
                for part, (day, fact) in enumerate(_parts_of(line))
            ]
            if isinstance(line.detail, JobRecord):
                jobs.append(_job_values(line.number, line.detail))
        db.executemany(
            "INSERT OR REPLACE INTO lines VALUES (?, ?, ?, ?)",
            [(line.number, line.at_s, line.kind, data) for line, data in lines],
        )
        db.executemany(
            "INSERT OR IGNORE INTO places VALUES (?, ?)",
            sorted([(ids[word], number) for number, words in found for word in words]),
        )
        self._add_up((line for line, _ in lines), sign=1)
        marks = ", ".join("?" * (3 + len(FACT_FIELDS)))
        db.executemany(f"INSERT OR REPLACE INTO facts VALUES ({marks})", amounts)
        db.executemany("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", jobs)

    def _add_up(self, lines: Iterable[HistoryLine], *, sign: int) -> None:
        """Add the amounts of lines to the sums of their days, or take them out again."""
        sums: dict[tuple[object, ...], list[float]] = {}
        for line in lines:
            for day, fact in _parts_of(line) if line.detail is not None else ():
                key = (day, *(getattr(fact, name) for name in DAY_FIELDS))
                row = sums.setdefault(key, [0.0, 0.0, 0])
                span_s = fact.ended_s - fact.began_s
                row[0] += sign * (fact.gpu_s + fact.gpus * span_s)
                row[1] += sign * span_s
                row[2] += sign
        marks = ", ".join("?" * (4 + len(DAY_FIELDS)))
        key_names = ", ".join(("day", *DAY_FIELDS))
        self._writer.executemany(
            f"INSERT INTO days VALUES ({marks}) ON CONFLICT ({key_names}) DO UPDATE SET "
            "gpu_s = gpu_s + excluded.gpu_s, span_s = span_s + excluded.span_s, "
            "count = count + excluded.count",
            [(*key, *row) for key, row in sums.items()],
        )
        if sign < 0:
            where = " AND ".join(f"{name} = ?" for name in ("day", *DAY_FIELDS))
            self._writer.executemany(f"DELETE FROM days WHERE {where} AND count = 0", list(sums))

    def _ids(self, words: Iterable[str]) -> dict[str, int]:
        """The ids of words; a new word gets the next one, so that the newest stand together."""
        db, known = self._writer, self._known
        found: dict[str, int] = {}
        for word in words:
            if word in found:
                continue
            place = known.get(word)
            if place is None:
                row = db.execute("SELECT id FROM words WHERE word = ?", (word,)).fetchone()
                if row is None:
                    made = db.execute("INSERT INTO words (word) VALUES (?) RETURNING id", (word,))
                    row = made.fetchone()
                place = row[0]
            found[word] = place
        if len(known) > KNOWN_WORDS:
            known.clear()
        known.update(found)
        return found

    def drop(self, before: int) -> bool:
        """Take out some of the lines with lower numbers, the oldest first.

        Returns:
            Whether more are left.
        """
        with self._writing():
            return self._take_out("number < ? ORDER BY number", before) == DROP_LINES

    def go_back(self, number: int, *, sequence: int) -> None:
        """Forget the lines after a number; the stream is read again from a sequence on."""
        with self._writing():
            while self._take_out("number > ? ORDER BY number DESC", number) == DROP_LINES:
                pass
            self._move(Position(self.position.identity, sequence, number))

    def _take_out(self, which: str, number: int) -> int:
        """Take out up to `DROP_LINES` lines and all that was made of them; returns their number."""
        db = self._writer
        query = f"SELECT number, data FROM lines WHERE {which} LIMIT {DROP_LINES}"
        places: list[tuple[str, int]] = []
        rows = db.execute(query, (number,)).fetchall()
        gone: list[HistoryLine] = []
        for place, data in rows:
            line = read_line(data)
            if line is not None:
                gone.append(line)
                places += [(word, place) for word in all_words(line)]
        self._add_up(gone, sign=-1)
        ids = self._ids(word for word, _ in places)
        db.executemany(
            "DELETE FROM places WHERE word = ? AND number = ?",
            sorted((ids[word], place) for word, place in places),
        )
        db.executemany(
            "DELETE FROM words WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM places WHERE word = ?1)",
            [(one,) for one in ids.values()],
        )
        self._known.clear()
        for table in ("lines", "facts", "jobs"):
            db.executemany(f"DELETE FROM {table} WHERE number = ?", [(one,) for one, _ in rows])
        return len(rows)

    @contextlib.contextmanager
    def _writing(self) -> Generator[None]:
        """One transaction."""
        with self._changing:
            db = self._writer
            db.execute("BEGIN IMMEDIATE")
            before = self.position
            try:
                yield
                db.execute("COMMIT")
            except BaseException:
                self.position = before
                self._known.clear()
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    def _move(self, position: Position) -> None:
        values = (
            ("identity", position.identity),
            ("sequence", str(position.sequence)),
            ("number", str(position.number)),
        )
        self._writer.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values)
        self.position = position

    # --- reading ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _looking(self) -> Generator[sqlite3.Connection]:
        """The reader for one question.

        Raises:
            Unavailable: the question takes too long.
        """
        until_s = time.monotonic() + QUERY_S
        with self._reading:
            self._reader.set_progress_handler(lambda: time.monotonic() > until_s, _STEPS)
            try:
                yield self._reader
            except sqlite3.OperationalError as error:
                if "interrupted" not in str(error):
                    raise
                raise Unavailable(
                    f"history: no answer within {QUERY_S:g} s; ask for a shorter time"
                ) from error
            finally:
                self._reader.set_progress_handler(None, 0)

    def first_at_s(self) -> float | None:
        """The instant of the oldest line; None: there is none."""
        with self._looking() as db:
            row = db.execute("SELECT at_s FROM lines ORDER BY number LIMIT 1").fetchone()
        return None if row is None else row[0]

    def lines(self, asked: Asked) -> list[HistoryLine]:
        """Lines in the order of their numbers; of more than the limit the newest or the oldest.

        Raises:
            Unavailable: it takes too long.
        """
        with self._looking() as db:
            low, high = asked.after + 1, asked.before or self.position.number + 1
            if asked.since_s is not None:
                low = max(low, _first_since(db, asked.since_s))
            if asked.until_s is not None:
                high = min(high, _first_since(db, asked.until_s))
            rows: dict[int, bytes] = {}
            for where in _parts(asked):
                rows |= _select(db, where, low, high, asked)
        numbers = sorted(rows)
        kept = numbers[-asked.limit :] if asked.is_newest else numbers[: asked.limit]
        return [_line_decoder.decode(rows[number]) for number in kept]

    def usage(self, sums: Sums, *, tenant: str | None = None, user: str | None = None) -> int:
        """Add the amounts of all lines to a report.

        Returns:
            The number of the last line that is in it.

        Raises:
            Unavailable: it takes too long.
        """
        first, end = math.ceil(sums.since_s / DAY_S), math.floor(sums.until_s / DAY_S)
        spans = [(sums.since_s, sums.until_s)]
        has_days = first < end and set(sums.by) <= set(DAY_FIELDS)
        if has_days:
            spans = [(sums.since_s, first * DAY_S), (end * DAY_S, sums.until_s)]
        columns = ", ".join((*sums.by, "kind", "pool", "cause"))
        whose, values = "", {"tenant": tenant, "user": user, "first": first, "end": end}
        for name, value in (("tenant", tenant), ("user", user)):
            whose += f" AND {name} = :{name}" if value is not None else ""
        rows: list[Any] = []
        with self._looking() as db:
            db.execute("BEGIN")  # all of it is of one moment
            try:
                number = db.execute("SELECT value FROM meta WHERE key = 'number'").fetchone()
                if has_days:
                    query = (
                        f"SELECT {columns}, SUM(gpu_s), SUM(span_s) FROM days "
                        f"WHERE day >= :first AND day < :end{whose} GROUP BY {columns}"
                    )
                    rows += db.execute(query, values)
                for since_s, until_s in spans:
                    if since_s < until_s:
                        rows += _within(db, columns, whose, values, since_s, until_s)
            finally:
                db.execute("ROLLBACK")
        for row in rows:
            *key, kind, pool, cause, gpu_s, span_s = row
            sums.add(tuple(key), FactKind(kind), pool, cause, gpu_s=gpu_s, span_s=span_s)
        return 0 if number is None else int(number[0])

    def ended_jobs(
        self,
        *,
        since_s: float,
        until_s: float,
        tenant: str | None = None,
        user: str | None = None,
        job_ids: Sequence[str] = (),
        job_numbers: Sequence[int] = (),
        submitted_until_s: float | None = None,
        after: int = 0,
        limit: int = 1000,
    ) -> list[tuple[int, JobRecord]]:
        """Jobs that ended in a span of time, oldest first, each with its place for the next page.

        Args:
            since_s, until_s: engine time; the end is excluded.
            tenant, user: whose; None: of any.
            job_ids: only these; empty: any.
            job_numbers: only jobs or tasks of arrays with these numbers; empty: any.
            submitted_until_s: only jobs that were submitted before; None: whenever.
            after: the place of the last one of the page before.

        Raises:
            Unavailable: it takes too long.
        """
        with self._looking() as db:
            low = max(after + 1, _first_since(db, since_s))
            where, values = ["number >= ?", "number < ?"], [low, _first_since(db, until_s)]
            more: list[object] = [*values]
            for name, value in (("tenant", tenant), ("user", user)):
                if value is not None:
                    where.append(f"{name} = ?")
                    more.append(value)
            if job_ids:
                where.append(f"job_id IN ({', '.join('?' * len(job_ids))})")
                more += job_ids
            if job_numbers:
                marks = ", ".join("?" * len(job_numbers))
                where.append(f"(job_number IN ({marks}) OR array_number IN ({marks}))")
                more += (*job_numbers, *job_numbers)
            if submitted_until_s is not None:
                where.append("submitted_s < ?")
                more.append(submitted_until_s)
            rows = db.execute(
                f"SELECT number, data FROM jobs WHERE {' AND '.join(where)} "
                "ORDER BY number LIMIT ?",
                (*more, limit),
            ).fetchall()
        return [(number, _job_decoder.decode(data)) for number, data in rows]


def read_line(data: bytes) -> HistoryLine | None:
    """The line of a message; None for one that no coordinator wrote."""
    try:
        return _line_decoder.decode(data)
    except UNREADABLE:
        return None


def _parts_of(line: HistoryLine) -> list[tuple[int, Fact]]:
    """The amounts of a line, in parts of single days."""
    return [part for fact in facts(line) for part in by_day(fact)]


def _job_values(number: int, job: JobRecord) -> tuple[object, ...]:
    data = _encoder.encode(job)
    whose = (job.job_id, job.tenant, job.user)
    return number, *whose, job.ended_at_s, job.submitted_at_s, job.number, job.array_number, data


def _connected(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=QUERY_S)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA temp_store = MEMORY")
        db.execute("PRAGMA cache_size = -32000")
    except BaseException:
        db.close()
        raise
    return db


def _locked(path: Path) -> tuple[Path, int]:
    """A file that no other process uses, and the lock on it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in range(100):
        own = path if not number else path.with_name(f"{path.stem}-{number}{path.suffix}")
        lock = os.open(f"{own}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            continue
        return own, lock
    raise Unavailable(f"history: {path} and 99 more are in use")


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _within(
    db: sqlite3.Connection,
    columns: str,
    whose: str,
    values: Mapping[str, object],
    since_s: float,
    until_s: float,
) -> list[Any]:
    """The sums of single amounts in a span, each as far as it lies there."""
    span = "MAX(0.0, MIN(ended_s, :until_s) - MAX(began_s, :since_s))"
    query = (
        f"SELECT {columns}, SUM(gpu_s + gpus * {span}), SUM({span}) FROM facts "
        "WHERE day >= :first_day AND day <= :last_day "
        f"AND ended_s >= :since_s AND began_s < :until_s{whose} GROUP BY {columns}"
    )
    days = {"first_day": int(since_s // DAY_S), "last_day": int(until_s // DAY_S)}
    return db.execute(query, {**values, **days, "since_s": since_s, "until_s": until_s}).fetchall()


def _first_since(db: sqlite3.Connection, at_s: float) -> int:
    """The number of the first line that is not before an instant; if none, beyond the last."""
    # One aggregate each: of two at once SQLite scans the table.
    ends = "SELECT (SELECT MIN(number) FROM lines), (SELECT MAX(number) FROM lines)"
    row = db.execute(ends).fetchone()
    if row[0] is None:
        return 1
    low, high = int(row[0]), int(row[1]) + 1
    while low < high:
        middle = (low + high) // 2
        found = db.execute(
            "SELECT number, at_s FROM lines WHERE number >= ? ORDER BY number LIMIT 1", (middle,)
        ).fetchone()
        if found is None or found[1] >= at_s:
            high = middle
        else:
            low = int(found[0]) + 1
    return low


def _parts(asked: Asked) -> list[tuple[tuple[str, ...], tuple[StoryKind, ...]]]:
    """The question as parts: words that a line has, and kinds of which it is."""
    common = tuple(sorted(asked.kinds & COMMON))
    if not asked.kinds:
        return [(asked.words, ())]
    parts: list[tuple[tuple[str, ...], tuple[StoryKind, ...]]] = []
    if common:
        parts.append((asked.words, common))
    parts += [(needed(asked.words, kind), ()) for kind in sorted(asked.kinds - COMMON)]
    return parts


def _select(
    db: sqlite3.Connection,
    where: tuple[tuple[str, ...], tuple[StoryKind, ...]],
    low: int,
    high: int,
    asked: Asked,
) -> dict[int, bytes]:
    """Lines of one part; the rarest word leads the way."""
    words, kinds = where
    found: list[tuple[int, int]] = []
    for word in words:
        row = db.execute("SELECT id FROM words WHERE word = ?", (word,)).fetchone()
        if row is None:
            return {}
        found.append((_count(db, row[0], low, high) if len(words) > 1 else 0, row[0]))
    ids = [place for _, place in sorted(found)]
    order = "DESC" if asked.is_newest else "ASC"
    of_kinds = f"AND l.kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
    if not ids:
        query = (
            "SELECT l.number, l.data FROM lines l WHERE l.number >= ? AND l.number < ? "
            f"{of_kinds} ORDER BY l.number {order} LIMIT ?"
        )
        return dict(db.execute(query, (low, high, *kinds, asked.limit)))
    others = "".join(
        " AND EXISTS (SELECT 1 FROM places o WHERE o.word = ? AND o.number = p.number)"
        for _ in ids[1:]
    )
    query = (
        "SELECT l.number, l.data FROM places p CROSS JOIN lines l ON l.number = p.number "
        f"WHERE p.word = ? AND p.number >= ? AND p.number < ?{others} {of_kinds} "
        f"ORDER BY p.number {order} LIMIT ?"
    )
    return dict(db.execute(query, (ids[0], low, high, *ids[1:], *kinds, asked.limit)))


def _count(db: sqlite3.Connection, word: int, low: int, high: int) -> int:
    """How many lines have a word, up to `ESTIMATE`."""
    query = (
        "SELECT COUNT(*) FROM (SELECT 1 FROM places WHERE word = ? AND number >= ? AND number < ? "
        "LIMIT ?)"
    )
    return int(db.execute(query, (word, low, high, ESTIMATE)).fetchone()[0])
