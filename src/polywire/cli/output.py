"""How lists are printed: table, json, jsonl, csv.

Promises: results go to standard output, everything said about the work goes to standard error. Must not know: any noun.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from enum import Enum

from rich.console import Console
from rich.table import Table

notes = Console(stderr=True, highlight=False)


class ListFormat(Enum):
    """Form of a printed list."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"


def print_list(rows: Sequence[Mapping[str, object]], *, columns: Sequence[str], form: ListFormat) -> None:
    """Print rows with these columns to standard output."""
    match form:
        case ListFormat.TABLE:
            _print_table(rows, columns)
        case ListFormat.JSON:
            sys.stdout.write(json.dumps([dict(row) for row in rows], indent=2) + "\n")
        case ListFormat.JSONL:
            for row in rows:
                sys.stdout.write(json.dumps(dict(row)) + "\n")
        case ListFormat.CSV:
            writer = csv.DictWriter(sys.stdout, fieldnames=list(columns), lineterminator="\n")
            writer.writeheader()
            writer.writerows([dict(row) for row in rows])


def _print_table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        numeric = bool(rows) and all(isinstance(row[column], int) for row in rows)
        table.add_column(column.replace("_", " "), justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    Console().print(table)
