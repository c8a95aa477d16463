"""The process that runs one SQL statement for the broker, and ends.

It reads the statement and its limits from its standard input, and writes the result as JSON to its standard output. It
reads records over a socket pair whose other end is the broker, as a client with the permissions of the user.

* The statement is not trusted: it can contain whatever a user of the console types. DuckDB is isolated
  (``tables.sql``). If the isolation fails, this process still cannot write a file, and has limits on memory and
  processor time.
* The process ends when its input ends, so it never outlives the broker. The broker cancels it by killing it.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import threading
import time
from codecs import utf_8_decode
from collections.abc import Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from polywire.client.bulk import BulkConnection
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.table_orders import SqlOrder, SqlReply

NICE: Final = 19  # the broker and its clients come first
BATCH_ROWS: Final = 2_048  # the number of rows that DuckDB itself uses
CELL_BYTES_MAX: Final = 64 * 1024  # bytes or characters of one value
NUMBER_MAX: Final = 2**53 - 1  # integers above it are not exact in JavaScript, so they become text
# Memory besides that of DuckDB: of pyarrow, of the result on its way to JSON, and of threads.
FURTHER_BYTES: Final = 512 * 1024 * 1024
DATA_FIELD: Final = 5  # of /proc/self/statm: pages of memory that RLIMIT_DATA limits
CPU_SLACK_S: Final = 5
_SHOWN_CONTROLS: Final = frozenset("\t\n\r")


def restrict(order: SqlOrder) -> None:
    """Set limits of the operating system on this process. They cannot be removed."""
    os.nice(NICE)
    with suppress(OSError):  # Linux only: if memory is short, the system kills a query before the broker
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    statm = Path("/proc/self/statm")  # not on macOS, where nothing enforces RLIMIT_DATA either
    pages = int(statm.read_text(encoding="ascii").split()[DATA_FIELD]) if statm.exists() else 0
    processor_s = int(order.seconds_max * order.threads) + CPU_SLACK_S
    limits = {
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: processor_s,
        resource.RLIMIT_DATA: pages * resource.getpagesize() + order.memory_bytes_max + FURTHER_BYTES,
    }
    for name, limit in limits.items():
        _, hard = resource.getrlimit(name)
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(name, (lowest, lowest))


class JsonRows:
    """Rows as JSON arrays, until a limit is reached.

    Attributes:
        limit: name of the limit that shortened the result; None if it is complete.
        is_cut: whether a value was shortened.
    """

    def __init__(self, rows_max: int, bytes_max: int) -> None:
        self._rows_max: Final = rows_max
        self._bytes_left = bytes_max
        self.rows: Final[list[msgspec.Raw]] = []
        self.limit: str | None = None
        self.is_cut = False

    def add(self, row: list[Any]) -> bool:
        """Add a row. Return False, and set ``limit``, if it does not fit."""
        if len(self.rows) >= self._rows_max:
            self.limit = "rows"
            return False
        json = msgspec.json.encode([self._cell(value) for value in row])
        self._bytes_left -= len(json) + 1
        if self._bytes_left < 0:
            self.limit = "bytes"
            return False
        self.rows.append(msgspec.Raw(json))
        return True

    def _cell(self, value: Any) -> Any:
        """Return a value for JSON: UTF-8 as text, other bytes as ``{"hex": …}``, and numbers that JSON lacks as text."""
        match value:
            case None | bool():
                return value
            case int():
                return value if -NUMBER_MAX <= value <= NUMBER_MAX else str(value)
            case float():
                return value if isfinite(value) else str(value)
            case str():
                return self._text(value)
            case bytes():
                return self._bytes(value)
            case Mapping():
                return {self._text(str(name)): self._cell(item) for name, item in value.items()}
            case Decimal() if value.as_tuple().exponent == 0:  # a HUGEINT, for example a sum
                return self._cell(int(value))
            case list() | tuple():
                return [self._cell(item) for item in value]
            case _:
                return self._text(str(value))

    def _text(self, value: str) -> str:
        if len(value) <= CELL_BYTES_MAX:
            return value
        self.is_cut = True
        return value[:CELL_BYTES_MAX] + "…"

    def _bytes(self, value: bytes) -> str | Mapping[str, str]:
        shown = value[:CELL_BYTES_MAX]
        is_cut = len(shown) < len(value)
        self.is_cut = self.is_cut or is_cut
        end = "…" if is_cut else ""
        with suppress(UnicodeDecodeError):
            text, _ = utf_8_decode(shown, "strict", not is_cut)
            if all(character.isprintable() or character in _SHOWN_CONTROLS for character in text):
                return text + end
        return {"hex": shown.hex() + end}


def _columns(batch: Any) -> list[list[Any]]:
    """Return the values of each column. Times and decimals are text, because JSON has no such values."""
    import pyarrow as pa
    from pyarrow import types

    found = []
    for column in batch.columns:
        kind = column.type
        is_text = (types.is_temporal(kind) and not types.is_interval(kind)) or (
            types.is_decimal(kind) and kind.scale != 0
        )
        try:
            found.append((column.cast(pa.string()) if is_text else column).to_pylist())
        except (pa.ArrowException, ValueError, OverflowError):  # for example a time in nanoseconds within a list
            found.append([_value(scalar) for scalar in column])
    return found


def _value(scalar: Any) -> Any:
    """Return a value, or the name of its type if Python cannot represent it."""
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        return f"({scalar.type})"


def _rows(reader: Any) -> Iterator[list[Any]]:
    for batch in reader:
        columns = _columns(batch)
        yield from ([column[number] for column in columns] for number in range(batch.num_rows))


def answer(source: BulkConnection, order: SqlOrder) -> bytes:
    """Return the result of a statement as JSON. Raises BrokerError."""
    from polywire.tables.sql import EngineLimits, isolated_rows  # imported first, because it reports missing libraries
    from polywire.tables.frames import with_new_snapshot  # isort: skip

    begun = time.monotonic()
    limits = EngineLimits(order.memory_bytes_max, order.threads)

    def result() -> bytes:
        shown = JsonRows(order.rows_max, order.result_bytes_max)
        with isolated_rows(source, order.statement, limits, batch_rows=BATCH_ROWS) as found:
            for row in _rows(found.reader):
                if not shown.add(row):
                    break
        if shown.limit == "bytes" and not shown.rows:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"a row of the result is too large: select fewer columns limit={order.result_bytes_max}",
            )
        columns = [{"name": name, "type": kind} for name, kind in zip(found.names, found.types, strict=True)]
        return msgspec.json.encode(
            {
                "columns": columns,
                "rows": shown.rows,
                "more": shown.limit is not None,
                "limit": shown.limit,
                "cut": shown.is_cut,
                "seconds": round(time.monotonic() - begun, 3),
            }
        )

    return with_new_snapshot(result)


def _reply(source: BulkConnection, order: SqlOrder) -> tuple[SqlReply, bytes]:
    try:
        return SqlReply(), answer(source, order)
    except BrokerError as error:
        return SqlReply(type(error).__name__, error.code.value, error.message), b""
    except MemoryError:
        message = f"query needs too much memory: select fewer rows or columns limit={order.memory_bytes_max}"
        return SqlReply(Invalid.__name__, ErrorCode.INVALID_REQUEST.value, message), b""


def _end_with(source: BinaryIO) -> None:
    """End the process when its input ends, whatever other threads do."""

    def watch() -> None:
        with suppress(OSError):
            source.read()
        os._exit(1)

    threading.Thread(target=watch, name="input", daemon=True).start()


def main(arguments: list[str]) -> int:
    """Run the process. The only argument is the descriptor of the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the broker, which then ends the input
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=SqlOrder)
    _end_with(sys.stdin.buffer)
    with suppress(BrokerError):  # reported below
        import polywire.tables.sql  # noqa: F401 - before the address space is limited, because libraries are large
    restrict(order)
    reply, content = _reply(BulkConnection.over(socket.socket(fileno=int(arguments[0]))), order)
    sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n" + content)
    sys.stdout.buffer.flush()
    os._exit(0)  # does not wait for threads of a query that a limit has ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
