"""The delayed records of all partitions, in the order in which they are due.

The index is a SQLite database. It contains nothing that is not in the log: what is missing is read from the log again.
Several share groups use one index, so it also contains records that do not wait for some of them.

* Each entry belongs to a span of offsets whose delayed records are all in the index, except those that are due at or
  before the partition's floor, and were deleted.
* The index has only records that are synced, so that after a power failure it is never ahead of the log.
* A database that cannot be read is deleted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from polywire.errors import BrokerError, ErrorCode, Unavailable
from polywire.log.base import Completion, Loop

if TYPE_CHECKING:
    from polywire.log.worker import Worker

FILE: Final = "delayed.db"
VERSION: Final = 1
CACHE_KIB: Final = 16 * 1024  # memory of the database
BACKLOG_MAX: Final = 100_000  # entries that wait to be written, above which no further ones should be added
LINGER_S: Final = 0.05  # entries of so long are written together
_SCHEMA: Final = f"""
    PRAGMA journal_mode = WAL;
    PRAGMA synchronous = NORMAL;
    PRAGMA cache_size = -{CACHE_KIB};
    CREATE TABLE IF NOT EXISTS delayed (
        incarnation INTEGER, due_ms INTEGER, offset INTEGER, PRIMARY KEY (incarnation, due_ms, offset)
    ) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS spans (
        incarnation INTEGER, first INTEGER, end INTEGER, PRIMARY KEY (incarnation, first)
    ) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS floors (incarnation INTEGER PRIMARY KEY, due_ms INTEGER);
    PRAGMA user_version = {VERSION};
"""

Entry = tuple[int, int]
"""Due time in milliseconds since 1970, and offset."""


class Due(NamedTuple):
    """Result of a query.

    Attributes:
        entries: records that are due, in order.
        next_ms: when the next one is due, None if there is none.
        missing: offsets that must first be read from the log, (first, end). There are no entries then.
    """

    entries: Sequence[Entry] = ()
    next_ms: int | None = None
    missing: tuple[int, int] | None = None


class _Added(NamedTuple):
    """Entries of one partition to write, and the spans that they complete."""

    spans: list[tuple[int, int]]
    entries: list[Entry]


def delete(path: Path) -> None:
    """Delete a database, which must not be open."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


class DelayStore:
    """The database. All methods block, so a worker calls them."""

    def __init__(self, path: Path | None) -> None:
        """Create the store without opening it. Without a path it is in memory."""
        self._path: Final = path
        self._opened: sqlite3.Connection | None = None

    def _database(self) -> sqlite3.Connection:
        if self._opened is None:
            try:
                self._opened = self._connect()
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:
                self._delete()
                self._opened = self._connect()
        return self._opened

    def _connect(self) -> sqlite3.Connection:
        place = ":memory:" if self._path is None else self._path
        database = sqlite3.connect(place, isolation_level=None, check_same_thread=False)
        try:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError(f"unknown version {version}")
            database.executescript(_SCHEMA)
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _delete(self) -> None:
        self.close()
        if self._path is not None:
            delete(self._path)

    @property
    def is_open(self) -> bool:
        return self._opened is not None

    def close(self) -> None:
        if self._opened is not None:
            database, self._opened = self._opened, None
            with suppress(sqlite3.Error):
                database.close()

    def __del__(self) -> None:
        self.close()  # Python 3.13 and newer warn otherwise, for example about a broker in memory that was not stopped

    def call(self, work: Callable[[sqlite3.Connection], object]) -> object:
        """Call a function in a transaction. Raises Unavailable(STORAGE_FAILED), for example if the disk is full."""
        try:
            database = self._database()
            with database:  # commits, or rolls back after an error
                database.execute("BEGIN IMMEDIATE")
                return work(database)
        except sqlite3.Error as error:
            if not isinstance(error, sqlite3.OperationalError):
                self._delete()
            raise Unavailable(
                ErrorCode.STORAGE_FAILED, f"index of delayed records failed: {error} path={str(self._path)!r}"
            ) from error


def _put(added: dict[int, _Added], database: sqlite3.Connection) -> None:
    for incarnation, (spans, entries) in added.items():
        rows = [(incarnation, due_ms, offset) for due_ms, offset in sorted(entries)]
        database.executemany("INSERT OR IGNORE INTO delayed VALUES (?, ?, ?)", rows)
        before = _spans(database, incarnation)
        after = merged([*before, *spans])
        if after != before:
            database.execute("DELETE FROM spans WHERE incarnation = ?", (incarnation,))
            database.executemany("INSERT INTO spans VALUES (?, ?, ?)", [(incarnation, *span) for span in after])


def _spans(database: sqlite3.Connection, incarnation: int) -> list[tuple[int, int]]:
    return database.execute(
        "SELECT first, end FROM spans WHERE incarnation = ? ORDER BY first", (incarnation,)
    ).fetchall()


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans that overlap or touch."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return found


def _query(
    incarnation: int, span: tuple[int, int], after: Entry, until_ms: int, limit: int, database: sqlite3.Connection
) -> Due:
    floor = database.execute("SELECT due_ms FROM floors WHERE incarnation = ?", (incarnation,)).fetchone()
    if floor is not None and floor[0] > after[0]:  # the clock was set back, and a later time was passed before
        _drop([incarnation], database)
    first, end = span
    for known_first, known_end in _spans(database, incarnation):
        if known_end > first:
            if known_first > first:
                return Due(missing=(first, min(known_first, end)))
            first = known_end
        if first >= end:
            break
    if first < end:
        return Due(missing=(first, end))
    rows = database.execute(
        "SELECT due_ms, offset FROM delayed WHERE incarnation = ? AND (due_ms, offset) > (?, ?)"
        " ORDER BY due_ms, offset LIMIT ?",
        (incarnation, *after, limit + 1),
    ).fetchall()
    entries = [row for row in rows[:limit] if row[0] <= until_ms]
    return Due(entries, rows[len(entries)][0] if len(rows) > len(entries) else None)


def _forget(incarnation: int, due_ms: int, database: sqlite3.Connection) -> None:
    database.execute("DELETE FROM delayed WHERE incarnation = ? AND due_ms < ?", (incarnation, due_ms))
    database.execute(
        "INSERT INTO floors VALUES (?, ?) ON CONFLICT DO UPDATE SET due_ms = max(due_ms, excluded.due_ms)",
        (incarnation, due_ms - 1),
    )


def _drop(incarnations: Iterable[int], database: sqlite3.Connection) -> None:
    for incarnation in incarnations:
        for table in ("delayed", "spans", "floors"):
            database.execute(f"DELETE FROM {table} WHERE incarnation = ?", (incarnation,))


def _retain(incarnations: Collection[int], database: sqlite3.Connection) -> None:
    """Delete the entries of all partitions but these."""
    known = {incarnation for (incarnation,) in database.execute("SELECT DISTINCT incarnation FROM spans")}
    _drop(known - set(incarnations), database)


class DelayIndex:
    """The index, as the event loop uses it. Its database is opened when the first delayed record is added.

    Args:
        path: the database; None for one in memory.
        worker: runs the database's work, in order.
        live: returns the partitions for whose delayed records a group waits. The database may forget all others.
        sync: calls its argument when all records that can be read now are synced.
    """

    __slots__ = (
        "_added",
        "_after",
        "_backlog",
        "_is_closed",
        "_is_syncing",
        "_is_used",
        "_live",
        "_loop",
        "_spacious",
        "_store",
        "_sync",
        "_worker",
    )

    def __init__(
        self,
        path: Path | None,
        *,
        loop: Loop,
        worker: Worker,
        live: Callable[[], Collection[int]],
        sync: Callable[[Completion[int]], None],
    ) -> None:
        self._store: Final = DelayStore(path)
        self._loop: Final = loop
        self._worker: Final = worker
        self._live: Final = live
        self._is_used = False
        self._is_closed = False
        self._sync: Final = sync
        self._added: dict[int, _Added] = {}
        self._backlog = 0
        self._is_syncing = False
        self._after: list[Callable[[], None]] = []  # called when what was added is on its way to the worker
        self._spacious: list[Callable[[], None]] = []

    @property
    def is_full(self) -> bool:
        """Whether so many entries wait to be written that no further ones should be added."""
        return self._backlog >= BACKLOG_MAX

    def on_space(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when ``is_full`` becomes False."""
        self._spacious.append(callback)

    def add(self, incarnation: int, first: int, end: int, entries: Sequence[Entry]) -> None:
        """Add all delayed records of [first, end)."""
        added = self._added.get(incarnation)
        if added is None:
            if not self._added:
                self._loop.call_later(LINGER_S, self._flush)
            added = self._added[incarnation] = _Added([], [])
        added.spans[:] = merged([*added.spans, (first, end)])
        added.entries.extend(entries)
        self._backlog += len(entries)

    def _flush(self) -> None:
        if self._added and not self._is_syncing:
            self._is_syncing = True
            added, self._added = self._added, {}
            try:
                self._sync(partial(self._synced, added))
            except BrokerError as error:
                self._synced(added, error)

    def _synced(self, added: dict[int, _Added], result: int | BrokerError) -> None:
        self._is_syncing = False
        count = sum(len(part.entries) for part in added.values())
        if isinstance(result, BrokerError):  # storage has failed, and the broker is about to stop
            self._written(count, result)
        else:
            self._work(partial(_put, added), partial(self._written, count))
        if self._added:
            self._flush()
        elif self._after:
            after, self._after = self._after, []
            for call in after:
                call()

    def _written(self, count: int, result: object) -> None:
        """Note that entries were written. If that failed, they are missing, and are read from the log when needed."""
        del result
        was_full = self.is_full
        self._backlog -= count
        if was_full and not self.is_full:
            spacious, self._spacious = self._spacious, []
            for callback in spacious:
                callback()

    def _work(self, work: Callable[[sqlite3.Connection], object], done: Completion[object]) -> None:
        if self._is_closed:
            return
        if not self._is_used:
            self._is_used = True
            self._worker.run(partial(self._store.call, partial(_retain, frozenset(self._live()))), _ignore)
        self._worker.run(partial(self._store.call, work), done)

    def _run(self, work: Callable[[sqlite3.Connection], object], done: Completion[object]) -> None:
        """Run work after everything that was added before."""

        def run() -> None:
            self._work(work, done)

        if self._added or self._is_syncing:
            self._after.append(run)
            self._flush()
        else:
            run()

    def due(
        self,
        incarnation: int,
        span: tuple[int, int],
        *,
        after: Entry,
        until_ms: int,
        limit: int,
        then: Completion[Due],
    ) -> None:
        """Call ``then`` with the records after an entry that are due by ``until_ms``, at most ``limit``.

        Args:
            span: (first, end) of the offsets that the index must know.
        """
        self._run(partial(_query, incarnation, span, after, until_ms, limit), then)  # type: ignore[arg-type]

    def forget(self, incarnation: int, due_ms: int) -> None:
        """Delete the entries of a partition that were due before a time."""
        self._run(partial(_forget, incarnation, due_ms), _ignore)

    def drop(self, incarnations: Sequence[int]) -> None:
        """Delete all entries of some partitions."""
        self._run(partial(_drop, list(incarnations)), _ignore)

    def close(self) -> None:
        self._is_closed = True
        if self._store.is_open:
            self._worker.run(self._store.close, _ignore)
        self._worker.stop()


def _ignore(result: object) -> None:
    pass
