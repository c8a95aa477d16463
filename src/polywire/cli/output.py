"""Print results to standard output as table, JSON, JSON lines or CSV, and messages to standard error.

* Every message is one line.
* Names and data from a broker cannot control the terminal. Tables, messages and JSON are always escaped. CSV and raw
  values are escaped if standard output is a terminal.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Final

from polywire.escaping import escaped, escaped_json

if TYPE_CHECKING:  # imported with the first message, because that takes a tenth of the start of a command
    from rich.console import Console

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
TABLE_WIDTH_MAX: Final = 1_000  # fits a name of 511 bytes and a few numbers


class Failed(Exception):
    """A failure that the command itself has detected. The message is printed and the exit code is 1."""


class ListFormat(Enum):
    """Format of a printed list."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"


@cache
def notes() -> Console:
    """Return the console of messages, which is standard error."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def note(text: str, *, style: str | None = None) -> None:
    """Print a message to standard error as a single line."""
    notes().print(escaped(text), style=style, markup=False, soft_wrap=True)


def print_list(rows: Sequence[Mapping[str, object]], *, columns: Sequence[str], form: ListFormat) -> None:
    """Print rows to standard output. None is a dash in a table, null in JSON and empty in CSV."""
    match form:
        case ListFormat.TABLE:
            _print_table(rows, columns)
        case ListFormat.JSON:
            sys.stdout.write(escaped_json(json.dumps([dict(row) for row in rows], indent=2)) + "\n")
        case ListFormat.JSONL:
            for row in rows:
                sys.stdout.write(escaped_json(json.dumps(dict(row))) + "\n")
        case ListFormat.CSV:
            writer = csv.DictWriter(sys.stdout, fieldnames=list(columns), lineterminator="\n")
            writer.writeheader()
            writer.writerows([_for_output(row) for row in rows])


def _for_output(row: Mapping[str, object]) -> dict[str, object]:
    if not sys.stdout.isatty():
        return dict(row)
    return {name: escaped(value) if isinstance(value, str) else value for name, value in row.items()}


def _print_table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
    """Print a table whose columns are as wide as their content, because a truncated name could not be copied."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        numeric = bool(rows) and all(isinstance(row[column], int | None) for row in rows)
        table.add_column(column.replace("_", " "), justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text("–" if row[column] is None else escaped(str(row[column]))) for column in columns))
    Console(width=TABLE_WIDTH_MAX, markup=False, highlight=False).print(table)


def format_time(time_us: int) -> str | int:
    """Return a time in microseconds since 1970 as RFC 3339 in UTC.

    A time outside the range of Python's calendar is returned unchanged.
    """
    try:
        return (_EPOCH + timedelta(microseconds=time_us)).isoformat(timespec="microseconds").replace("+00:00", "Z")
    except OverflowError:
        return time_us


def parse_time_us(text: str) -> int:
    """Parse an ISO 8601 time into microseconds since 1970. Without a zone, the time is in UTC.

    Raises ValueError for another text.
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // timedelta(microseconds=1)
