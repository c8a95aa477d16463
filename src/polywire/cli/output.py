"""How results are printed, lists as table, json, jsonl or csv, and how people are told about the work.

Promises: results go to standard output, everything said about the work goes to standard error, one line each; nothing that others have
named or sent controls the terminal: tables, notes and JSON are escaped, and what else is written to a terminal. Must not know: any noun.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polywire.escaping import escaped, escaped_json

TABLE_WIDTH_MAX: Final = 1_000  # a name has at most 511 bytes, a row a few numbers beside
notes = Console(stderr=True, highlight=False)


class Failed(Exception):
    """What was asked for did not come about; the message says why, and no broker has answered a code."""


class ListFormat(Enum):
    """Form of a printed list."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"


def note(text: str, *, style: str | None = None) -> None:
    """Tell people something, on one line, whatever the text holds and however narrow the terminal is."""
    notes.print(escaped(text), style=style, markup=False, soft_wrap=True)


def print_list(rows: Sequence[Mapping[str, object]], *, columns: Sequence[str], form: ListFormat) -> None:
    """Print rows with these columns to standard output; None is a dash in a table, null in JSON and empty in CSV."""
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
            writer.writerows([_shown(row) for row in rows])


def _shown(row: Mapping[str, object]) -> dict[str, object]:
    """As it is for another program, escaped for a terminal."""
    if not sys.stdout.isatty():
        return dict(row)
    return {name: escaped(value) if isinstance(value, str) else value for name, value in row.items()}


def _print_table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
    """Columns as wide as their content: a name cut to fit a terminal could not be copied."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        numeric = bool(rows) and all(isinstance(row[column], int | None) for row in rows)
        table.add_column(column.replace("_", " "), justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text("–" if row[column] is None else escaped(str(row[column]))) for column in columns))
    Console(width=TABLE_WIDTH_MAX, markup=False, highlight=False).print(table)
