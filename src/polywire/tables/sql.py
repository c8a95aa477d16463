"""Query topics in SQL with DuckDB, including records that were appended a moment ago.

* A statement refers to a topic by its full name: ``orders``, ``stream.topic`` or ``"stream.topic"``.
* A topic with a table is a view of its files and of the records that only the log has. Any other topic is read from the
  log.
* Each statement sees the records that were synced when it began.
* An isolated statement is a single SELECT over topics that the user may consume. It reaches nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from polywire.choices import listed, missing
from polywire.client.bulk import BulkConnection, connect
from polywire.errors import BrokerError, Denied, ErrorCode, Invalid, Missing
from polywire.extras import required
from polywire.types import DEFAULT_STREAM, TopicName

if TYPE_CHECKING:
    import duckdb
    from pyarrow import RecordBatch

try:
    import pyarrow as pa

    from polywire.tables.frames import with_new_snapshot
    from polywire.tables.reading import (
        PATH,
        ROW,
        Snapshot,
        deleted_rows,
        newest_of_tail,
        removed,
        scan_files,
        scan_tail,
        snapshot,
    )
except ImportError as error:
    raise Invalid(ErrorCode.INVALID_REQUEST, "SQL needs pyarrow (pip install 'polywire[duckdb]')") from error

ADDRESS_DEFAULT: Final = "127.0.0.1:9555"
TOPICS_MAX: Final = 100  # in one statement
BATCH_ROWS: Final = 50_000
MEMORY_ADVICE: Final = "read fewer records, aggregate them, or sort fewer rows"
_IDENTIFIER: Final = re.compile(r'"((?:[^"]|"")*)"|([^\W\d]\w*)')
_BARE_OFFSET: Final = re.compile(r'(?<!")\boffset\b(?!\s*\d)', re.IGNORECASE)
_MISSING_TABLE: Final = re.compile(r"Table with name (.+?) does not exist")
_ROW_NUMBER: Final = "file_row_number"  # the name of DuckDB for the number of a row in its file
_GLOB: Final = re.compile(r"[*?\[]")


def sql(statement: str, *, address: str = ADDRESS_DEFAULT) -> pa.Table:
    """Return the result of an SQL statement over topics as an Arrow table.

    Topics have the columns ``partition``, ``offset``, ``timestamp``, ``timestamp_type``, ``key``, ``value`` and
    ``headers``, and the typed columns of their table. Keys and values are bytes: ``decode(value)`` returns text, and
    ``decode(value)::JSON`` parses it. If files of a table are deleted meanwhile, a single statement is repeated once.

    Args:
        statement: SQL of DuckDB. It may also use files and databases of this machine. Of several statements, separated
            by semicolons, the last one returns the result.
        address: ``host:port`` or URL of the `polywire` protocol, as for ``polywire.connect``.

    Raises:
        Invalid: the statement is wrong, or DuckDB is not installed.
        Missing: TOPIC_MISSING.
        Unavailable: the broker or the files of a table cannot be reached.

    Example:
        print(sql("select decode(key), count(*) from orders group by all", address="127.0.0.1:9555"))
    """
    with closing(connect(address)) as connection:
        return query(connection, statement)


def query(broker: BulkConnection, statement: str, *, isolated: bool = False) -> pa.Table:
    """Do the same as ``sql`` over a connection.

    If ``isolated``, the statement must be a single SELECT, and no other file or database can be reached.
    """

    def result() -> pa.Table:
        return _query(broker, statement, isolated=isolated)

    return with_new_snapshot(result) if _is_atomic(statement) else result()


def _is_atomic(statement: str) -> bool:
    """Return whether a text is a single statement, which has no effect if it fails, so it can be repeated."""
    library = _duckdb()
    try:
        return len(library.extract_statements(statement)) == 1
    except library.Error:
        return False


def _query(broker: BulkConnection, statement: str, *, isolated: bool) -> pa.Table:
    if isolated:
        with isolated_rows(broker, statement) as rows:
            return rows.reader.read_all()
    with _duckdb().connect(":memory:") as engine, Topics(broker, engine) as topics:
        topics.define(statement)
        return topics.run(statement)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of DuckDB. A query that needs more memory fails, because it writes no temporary files."""

    memory_bytes_max: int
    threads: int


@dataclass(frozen=True, slots=True)
class SqlRows:
    """The result of a statement, which is calculated while it is read. The reader raises the same errors as ``query``.

    Attributes:
        types: types of the columns, as DuckDB names them.
    """

    names: Sequence[str]
    types: Sequence[str]
    reader: pa.RecordBatchReader


@contextmanager
def isolated_rows(
    broker: BulkConnection, statement: str, limits: EngineLimits | None = None, *, batch_rows: int = BATCH_ROWS
) -> Iterator[SqlRows]:
    """Run a single SELECT that can read only topics that the client may consume, and return its rows as a stream.

    Raises the same errors as ``query``. Topics that the client may not consume do not exist.
    """
    library = _duckdb()
    with library.connect(":memory:") as engine, Topics(broker, engine, is_isolated=True) as topics:
        try:
            statements = library.extract_statements(statement)
            if [found.type for found in statements] != [library.StatementType.SELECT]:
                raise Invalid(ErrorCode.INVALID_REQUEST, "only a single SELECT statement is allowed")
            topics.define(statement)
            topics.isolate(limits)
            yield topics.stream(statement, batch_rows)
        except library.Error as error:
            raise topics.translated(error, statement) from error
        except pa.ArrowException as error:  # an error of DuckDB, or of a reader, while rows are read
            raise topics.translated(error, statement) from error


class Topics:
    """The topics of a broker as views of a DuckDB connection. The views are valid while the context is entered."""

    def __init__(self, broker: BulkConnection, engine: duckdb.DuckDBPyConnection, *, is_isolated: bool = False) -> None:
        """If ``is_isolated``, topics that the client may not consume do not exist."""
        self._broker: Final = broker
        self._is_isolated: Final = is_isolated
        self._engine: Final = engine
        self._library: Final = _duckdb()
        self._tails: Final[dict[str, _Rows]] = {}
        self._registered: Final[list[str]] = []
        self._known: Sequence[str] = ()
        self._failures: Final[list[BrokerError | KeyboardInterrupt]] = []
        self._snapshots: Final[list[Snapshot]] = []
        self._limits: EngineLimits | None = None
        # each stream is a schema; DuckDB's own default, main, can be the name of another stream
        engine.execute(f"CREATE SCHEMA {_quoted(DEFAULT_STREAM)}")
        engine.execute(f"SET schema = {_literal(DEFAULT_STREAM)}")
        engine.execute("SET TimeZone = 'UTC'")
        engine.execute("SET python_enable_replacements = false")  # variables of this module are no tables

    def __enter__(self) -> Topics:
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self._tails, *self._registered):
            self._engine.unregister(name)

    def define(self, statement: str) -> None:
        """Create a view for each topic whose name occurs in a statement.

        Raises Invalid if there are too many, or if names differ only in case.
        """
        self._known = [topic.name for topic in self._broker.topics()]
        names = _mentioned(statement, self._known)
        if len(names) > TOPICS_MAX:
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"too many topics in one statement topics={len(names)} limit={TOPICS_MAX}"
            )
        _check_case(names)
        for name in names:
            try:
                if self._is_isolated:
                    _check_consumable(self._broker, name)
                self._create(name, snapshot(self._broker, name, required=False))
            except Denied as error:
                if self._is_isolated:
                    self._known = [other for other in self._known if other != name]
                else:
                    self._failures.append(error)
            except BrokerError as error:  # the error matters only if the statement refers to the topic
                self._failures.append(error)
            except self._library.Error as error:
                self._failures.append(self.translated(error, statement))

    def _create(self, topic: str, found: Snapshot) -> None:
        self._snapshots.append(found)
        newest = newest_of_tail(self._broker, found)
        rows = _Rows(self._broker, found, newest)
        number = len(self._tails)
        name = f"polywire_rows_{number}"
        self._tails[name] = rows
        self._engine.register(name, rows)
        names = found.schema.names
        selected = [f"SELECT {', '.join(map(_quoted, names))} FROM {name}"]
        if rows.has_files:
            files = ", ".join(_literal(_GLOB.sub(r"[\g<0>]", path)) for path in found.paths)
            options = ""
            if found.columns:  # otherwise DuckDB opens one file only to find the columns of all files
                options += ", union_by_name = true"
            if found.has_deleted:
                options += f", filename = {_literal(PATH)}, {_ROW_NUMBER} = true"
            source = f"read_parquet([{files}]{options})"
            if found.has_deleted:
                self._register(f"polywire_deleted_{number}", deleted_rows(found))
                source += (
                    f" files ANTI JOIN polywire_deleted_{number} deleted"
                    f" ON files.{_quoted(PATH)} = deleted.{_quoted(PATH)} AND files.{_ROW_NUMBER} = deleted.{_quoted(ROW)}"
                )
            if newest is not None:
                self._register(f"polywire_newest_{number}", newest)
                source = f"(SELECT * FROM {source}) ANTI JOIN polywire_newest_{number} USING (partition, key)"
            columns = ", ".join(
                _quoted(item) if item in found.present else f"NULL AS {_quoted(item)}" for item in names
            )
            selected.insert(0, f"SELECT {columns} FROM {source}")
        views = [_quoted(topic)]
        parts = TopicName.parse(topic)
        if parts.stream != DEFAULT_STREAM:
            self._engine.execute(f"CREATE SCHEMA IF NOT EXISTS {_quoted(parts.stream)}")
            views.append(f"{_quoted(parts.stream)}.{_quoted(parts.topic)}")
        for view in views:
            self._engine.execute(f"CREATE VIEW {view} AS {' UNION ALL '.join(selected)}")

    def _register(self, name: str, rows: pa.Table) -> None:
        self._engine.register(name, rows)
        self._registered.append(name)

    def isolate(self, limits: EngineLimits | None) -> None:
        """Restrict the connection permanently to the files of the views.

        Other files, extensions, settings and the network cannot be used.
        """
        paths = ", ".join(_literal(path) for found in self._snapshots if found.is_local for path in found.paths)
        self._limits = limits
        if limits is not None:
            self._engine.execute(f"SET memory_limit = '{limits.memory_bytes_max} bytes'")
            self._engine.execute(f"SET threads = {limits.threads}")
        for statement in (
            "SET temp_directory = ''",
            "SET autoinstall_known_extensions = false",
            "SET autoload_known_extensions = false",
            f"SET allowed_paths = [{paths}]",
            "SET enable_external_access = false",
            "SET lock_configuration = true",
        ):
            self._engine.execute(statement)

    def run(self, statement: str) -> pa.Table:
        """Return the result of a statement, or of the last of several. It is empty if the statement has no result."""
        try:
            relation: Any = self._engine.sql(statement)
            result: pa.Table = pa.table({}) if relation is None else relation.to_arrow_table()
        except self._library.Error as error:
            raise self.translated(error, statement) from error
        return result

    def stream(self, statement: str, batch_rows: int) -> SqlRows:
        """Return the result of a SELECT without calculating all of it."""
        relation: Any = self._engine.sql(statement)
        read = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader  # before DuckDB 1.5
        return SqlRows(list(relation.columns), [str(kind) for kind in relation.types], read(batch_rows))

    def translated(self, error: Exception, statement: str) -> BrokerError | KeyboardInterrupt:
        """Return an error of DuckDB as an error of this package, or as the interrupt that caused it."""
        for rows in self._tails.values():
            if rows.errors:
                return rows.errors[0]
        if isinstance(error, self._library.OutOfMemoryException) and self._limits is not None:
            limit = self._limits.memory_bytes_max
            return Invalid(ErrorCode.INVALID_REQUEST, f"query needs too much memory: {MEMORY_ADVICE} limit={limit}")
        if isinstance(error, self._library.CatalogException):
            if self._failures:
                return self._failures[0]
            absent = _MISSING_TABLE.search(str(error))
            if absent is not None:
                return missing(ErrorCode.TOPIC_MISSING, "topic", absent[1], self._known)
        lost = next((found for found in self._snapshots if _is_lost(error, found)), None)
        if lost is not None:
            return removed(lost, error)
        is_offset = isinstance(error, self._library.ParserException) and _BARE_OFFSET.search(statement)
        advice = ' (offset is a keyword: write "offset" for the column)' if is_offset else ""
        return Invalid(ErrorCode.INVALID_REQUEST, f"query failed: {_reason(error)}{advice}")


@dataclass(slots=True)
class _Rows:
    """The rows of a snapshot that DuckDB does not read from files itself. Each scan of DuckDB reads them again."""

    broker: BulkConnection
    found: Snapshot
    newest: pa.Table | None
    errors: list[BrokerError | KeyboardInterrupt] = field(default_factory=list)

    @property
    def has_files(self) -> bool:
        """Whether DuckDB reads the files of the snapshot itself.

        It cannot number the rows of files that have a column ``file_row_number``.
        """
        cannot_number = self.found.has_deleted and any(
            name.casefold() == _ROW_NUMBER for name in self.found.schema.names
        )
        return self.found.is_local and bool(self.found.files) and not cannot_number

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        reader: Any = pa.RecordBatchReader.from_batches(self.found.schema, self._batches())
        return reader.__arrow_c_stream__(requested_schema)

    def _batches(self) -> Iterator[RecordBatch]:
        try:
            if not self.has_files:
                yield from scan_files(self.found, newest=self.newest)
            yield from scan_tail(self.broker, self.found, newest=self.newest)
        except (BrokerError, KeyboardInterrupt) as error:  # DuckDB replaces it by an error of its own
            self.errors.append(error)
            raise


def _check_consumable(broker: BulkConnection, topic: str) -> None:
    """Raise Denied if the client may not consume a topic.

    The description of a topic is not enough, because clients that may only produce get it, too. LOCATE needs the
    permission to consume, and for an empty range it does nothing else.
    """
    try:
        broker.locate(topic, 0, offset_end=0)
    except Invalid:  # permitted, but the log is in memory
        pass
    except Missing as error:  # permitted, but there is no such offset or partition
        if error.code is ErrorCode.TOPIC_MISSING:
            raise


def _mentioned(statement: str, topics: Iterable[str]) -> list[str]:
    """Return the topics whose names occur in a statement.

    If a word is a topic's name but means something else, its view is not used.
    """
    words = {(quoted or word).replace('""', '"') for quoted, word in _IDENTIFIER.findall(statement)}
    found = []
    for topic in topics:
        parts = TopicName.parse(topic)
        if topic in words or (parts.stream in words and parts.topic in words):
            found.append(topic)
    return found


def _check_case(topics: Iterable[str]) -> None:
    """Raise Invalid if the names of two topics differ only in case, because DuckDB ignores it."""
    seen: dict[str, str] = {}
    for topic in topics:
        other = seen.setdefault(topic.casefold(), topic)
        if other != topic:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"one statement cannot use topics whose names differ only in case topics={listed((other, topic))}",
            )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _is_lost(error: Exception, found: Snapshot) -> bool:
    """Return whether DuckDB did not find a file of a snapshot."""
    text = str(error)
    is_missing = "No files found" in text or "Cannot open file" in text
    return is_missing and any(file.path in text for file in found.files)


def _reason(error: Exception) -> str:
    """Return DuckDB's message as one line, without the excerpt of the statement."""
    text = str(error).split("\n\n")[0]
    return " ".join(text.split())


def _duckdb() -> Any:
    return required("duckdb", "SQL needs DuckDB", "duckdb")
