"""Facts about tables that several layers share: messages to and from the processes that write and query them, and file
names.

The messages are JSON lines over the standard input and output of these processes.
"""

from __future__ import annotations

from typing import Final

import msgspec

ICEBERG_METADATA: Final = "metadata/"
ICEBERG_HINT: Final = ICEBERG_METADATA + "version-hint.text"
"""An object with the number of the newest Iceberg metadata, which may be a little old."""


def iceberg_metadata_name(version: int) -> str:
    """Return the name of a version of a table's Iceberg metadata."""
    return f"{ICEBERG_METADATA}v{version}.metadata.json"


class TableOrder(msgspec.Struct, frozen=True):
    """A table to write.

    Attributes:
        topic: full name of the topic.
        topic_id: identifies the topic among all that ever had this name.
        url: where the files of the table are.
        is_latest: whether the table has only the latest record of each key.
        columns: typed columns, in the form of the setting ``table_columns``.
    """

    topic: str
    topic_id: bytes
    url: str
    is_iceberg: bool
    is_latest: bool
    freshness_s: int
    history_hours: int
    columns: str = ""


class Orders(msgspec.Struct, frozen=True):
    """All tables to write. It replaces the tables of earlier messages."""

    tables: list[TableOrder]


class TableReport(msgspec.Struct, frozen=True):
    """The state of a table after an attempt to bring it up to date.

    Attributes:
        version: version of the table; -1 if there is none yet.
        rows: rows of the table.
        size: bytes of its files.
        behind: records of the log that the table does not have.
        skipped: records that retention removed before they were written.
        committed_ms: time of the last commit, in milliseconds since 1970.
        complete_ms: the table has all records that were synced at this time; 0 if it never had.
        commit_s: duration of the last commit, in seconds, with reading and writing its rows.
        error: why the last attempt failed; empty if it succeeded.
        rejected: rows with values that do not fit the typed columns, since the process began to write this table.
        rejected_sample: the reason for the last of these rows, with its partition and offset.
        columns: number of typed columns.
        notes: what the typed columns do differently from the setting.
    """

    topic: str
    version: int
    rows: int
    files: int
    size: int
    behind: int
    skipped: int
    committed_ms: int
    complete_ms: int
    commit_s: float
    error: str = ""
    rejected: int = 0
    rejected_sample: str = ""
    columns: int = 0
    notes: str = ""

    def age_s(self, now_us: int) -> float:
        """Return for how long the table has not had all records of its topic; 0 before it had all for the first time."""
        return max(0.0, now_us / 1e6 - self.complete_ms / 1e3) if self.complete_ms else 0.0


class SqlOrder(msgspec.Struct, frozen=True):
    """An SQL statement to run, and the limits of the process that runs it.

    Attributes:
        rows_max: rows of the result.
        result_bytes_max: bytes of the result as JSON.
        memory_bytes_max: memory of the query.
        seconds_max: time until the process is killed.
        threads: threads that read and calculate.
    """

    statement: str
    rows_max: int
    result_bytes_max: int
    memory_bytes_max: int
    seconds_max: float
    threads: int


class SqlReply(msgspec.Struct, frozen=True):
    """The outcome of a statement. If ``code`` is empty, the result follows as JSON, up to the end of the output.

    Attributes:
        kind: name of the error's class.
        code: value of the error's code; empty if there is a result.
    """

    kind: str = ""
    code: str = ""
    message: str = ""


class DownloadedRow(msgspec.Struct, frozen=True, array_like=True):
    """A record for the process that writes Parquet files for downloads.

    Attributes:
        timestamp_type: 0 if the producer set the time, 1 if the broker did.
        headers: keys and values, numbers as digits.
    """

    partition: int
    offset: int
    timestamp_us: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
