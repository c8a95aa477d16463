"""``polywire sql``: query topics in SQL, with DuckDB in this process.

Binary values are printed as text. Bytes that are not UTF-8 are printed as ``\\xNN``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from decimal import Decimal
from math import isfinite
from typing import Annotated, Final

from cyclopts import App, Parameter

from polywire.cli.connection import ADDRESS_DEFAULT, Address, connect_limit_s
from polywire.cli.output import Failed, ListFormat, print_list
from polywire.cli.progress import reported
from polywire.cli.usage import examples
from polywire.client.bulk import connect

STATEMENT_BYTES_MAX: Final = 1 << 20

app = App(
    name="sql",
    help_epilogue=examples(
        'polywire sql "select partition, count(*) from orders group by all"',
        "polywire sql \"select decode(value)->>'item' as item from orders limit 5\"",
        "polywire sql --output csv < report.sql > report.csv",
    ),
)


@app.default
def run_sql(
    statement: str | None = None,
    /,
    *,
    output: Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")] = ListFormat.TABLE,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Query topics in SQL.
    Parameters
    ----------
    statement
        SQL. Without it, the statement is read from standard input.
    """
    from polywire.tables.sql import query  # needs an extra, and --help does not

    if statement is None:
        statement = _from_stdin()
    with reported("running the statement"), closing(connect(address, reconnect_s=connect_limit_s())) as connection:
        found = query(connection, statement)
    columns = list(_distinct(found.column_names))
    is_nested = output in (ListFormat.JSON, ListFormat.JSONL)
    rows = [
        {name: _printable(value, is_nested=is_nested) for name, value in row.items()}
        for row in found.rename_columns(columns).to_pylist()
    ]
    print_list(rows, columns=columns, form=output)


def _from_stdin() -> str:
    if sys.stdin.isatty():
        raise Failed("statement is missing: pass it as an argument or on standard input")
    statement = sys.stdin.read(STATEMENT_BYTES_MAX + 1)
    if len(statement) > STATEMENT_BYTES_MAX:
        raise Failed(f"statement is too long limit={STATEMENT_BYTES_MAX}")
    return statement


def _distinct(names: Sequence[str]) -> Iterator[str]:
    """Yield the names of columns. A name that occurs again gets a number, such as ``key_1``."""
    used: set[str] = set()
    for name in names:
        number, chosen = 0, name
        while chosen in used:
            number += 1
            chosen = f"{name}_{number}"
        used.add(chosen)
        yield chosen


def _printable(value: object, *, is_nested: bool) -> object:
    """Convert a value to one that JSON can represent. Unless ``is_nested``, lists and structs become JSON text."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if isfinite(value) else str(value)
        case Decimal():
            if value.as_tuple().exponent == 0:
                return int(value)
            number = float(value)
            return number if Decimal(repr(number)) == value else str(value)  # a float may not have all digits
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case Mapping():
            found: object = {str(name): _printable(item, is_nested=True) for name, item in value.items()}
        case list() | tuple():
            found = [_printable(item, is_nested=True) for item in value]
        case _:
            return str(value)
    return found if is_nested else json.dumps(found, ensure_ascii=False)
