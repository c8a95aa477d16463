"""Endpoints for read-only SQL over topics.

Statements run in other processes (``server.queries``), so they do not occupy the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from polywire.broker.permissions import Action
from polywire.errors import ErrorCode, Invalid, Missing, Unavailable
from polywire.http.endpoints import ApiCall, Endpoint
from polywire.http.process import Process

SQL_BYTES_MAX: Final = 64 * 1024  # SQL of one statement
SQL_ROWS_MAX: Final = 10_000  # rows of a result; the first ones are returned
SQL_ID_CHARS_MAX: Final = 100  # characters of the id that a client chooses for a query


class Sql:
    """The endpoints for SQL."""

    def __init__(self, process: Process) -> None:
        self._process: Final = process

    def table(self) -> Sequence[Endpoint]:
        query = {
            "statement": "a SELECT of DuckDB over topics with the permission consume; others do not exist",
            "rows": f"maximum number of rows, up to {SQL_ROWS_MAX:,}",
            "id": "text to cancel the query with",
        }
        return [
            Endpoint("POST", "/sql", Action.QUERY, "Query topics in SQL", self._query, query),
            Endpoint("DELETE", "/sql/{query}", Action.QUERY, "Cancel a query of your own", self._cancel),
        ]

    async def _query(self, call: ApiCall) -> Any:
        statement, name, rows_max = call.text("statement"), call.body.get("id", ""), call.body.get("rows", SQL_ROWS_MAX)
        size = len(statement.encode(errors="replace"))
        if size > SQL_BYTES_MAX:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"statement is too long bytes={size} limit={SQL_BYTES_MAX}")
        if not isinstance(name, str) or len(name) > SQL_ID_CHARS_MAX:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"id must be text of at most {SQL_ID_CHARS_MAX} characters")
        if type(rows_max) is not int or not 1 <= rows_max <= SQL_ROWS_MAX:
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"rows must be a number from 1 to {SQL_ROWS_MAX} got={rows_max!r:.40}"
            )
        queries = self._process.queries
        if queries is None:
            raise Unavailable(ErrorCode.STOPPING, "this broker does not serve queries yet: try again")
        return msgspec.Raw(await queries.run(call.caller, statement, rows_max=rows_max, name=name))

    async def _cancel(self, call: ApiCall) -> Any:
        queries, name = self._process.queries, call.path["query"]
        if queries is None or not queries.cancel(call.caller, name):
            raise Missing(ErrorCode.TOPIC_MISSING, f"no such query is running id={name[:SQL_ID_CHARS_MAX]!r}")
        return {"id": name}
