"""The cursor behind ``async for`` returns each record once and keeps no references."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from polywire.client.rows import Cursor


def cursor_over(*chunks: list[Any]) -> Cursor:
    waiting = list(chunks)

    async def more() -> Any:
        await asyncio.sleep(0)
        if not waiting:
            raise StopAsyncIteration
        cursor.records, cursor.row = waiting.pop(0), 1
        return cursor.records[0]

    cursor = Cursor(more)
    return cursor


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await work()

    asyncio.run(whole())


def test_each_record_is_returned_once_and_in_order() -> None:
    async def scenario() -> None:
        chunks = [[(number, b"x") for number in range(size)] for size in (3, 1, 5)]
        cursor = cursor_over(*chunks)
        found = []
        async for record in cursor:
            found.append(record)
            assert cursor.records[cursor.row - 1] is record
        assert found == [record for chunk in chunks for record in chunk]

    run(scenario)


def test_it_resumes_where_a_loop_broke_off() -> None:
    async def scenario() -> None:
        cursor = cursor_over([(1,), (2,), (3,)])
        async for record in cursor:
            if record == (2,):
                break
        assert [record async for record in cursor] == [(3,)]

    run(scenario)


def test_records_of_any_type_can_be_awaited_in_any_way() -> None:
    async def scenario() -> None:
        odd: list[Any] = [None, (), (1, 2), StopIteration(7), "text"]
        cursor = cursor_over(list(odd))
        found = [await anext(cursor), await asyncio.wait_for(anext(cursor), 120), await cursor.__anext__()]
        try:
            raise KeyError("being handled")
        except KeyError:
            found += [record async for record in cursor]
        assert all(one is other for one, other in zip(found, odd, strict=True))

    run(scenario)


def test_a_kept_stop_iteration_keeps_its_value() -> None:
    cursor = cursor_over()
    cursor.records = [(1,), (2,), (3,)]
    kept = []
    for _ in range(3):
        try:
            next(cursor.__await__())
        except StopIteration as end:
            kept.append(end)
    assert [end.value for end in kept] == [(1,), (2,), (3,)]


def test_references_are_released() -> None:
    async def scenario() -> None:
        records = [object() for _ in range(10)]
        before = [sys.getrefcount(record) for record in records]
        for _ in range(100):
            cursor = cursor_over(list(records))
            assert len([record async for record in cursor]) == 10
        del cursor
        gc.collect()  # the cursor and its source refer to each other
        assert [sys.getrefcount(record) for record in records] == before

    run(scenario)
