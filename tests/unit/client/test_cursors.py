"""A broker that repeats one response: every client loop that follows the broker's cursor ends with an error.

Each stub would respond for ever; ``_Limit`` ends a loop that requests too often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec
import pytest

from polywire.client import copying
from polywire.client.bulk import _Progress
from polywire.client.copying import CopyState
from polywire.client.cursus import CursusClient
from polywire.client.failures import beyond, from_offset
from polywire.client.flux import FluxClient
from polywire.client.iggy import IggyClient
from polywire.client.iggy_today import IggyTodayClient
from polywire.client.kafka07 import Fetched, Kafka07Client
from polywire.client.polywire import PolywireClient
from polywire.errors import Corrupt
from polywire.protocols.iggy.client_codec import Polled
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.messages import Verb
from polywire.records.columns import Record

ANSWERS_MAX: Final = 100  # a loop with more requests does not end


class _Limit:
    """Counts responses. Raises AssertionError after ``ANSWERS_MAX``."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        assert self.count <= ANSWERS_MAX, "the loop does not end"


def _stub(kind: type[Any], **attributes: object) -> Any:
    """Return a client without a connection, with some of its methods replaced."""

    class Stub(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            self._connection = None

    for name, value in attributes.items():
        setattr(Stub, name, value)
    return Stub()


def _answering(answer: object) -> Callable[..., Coroutine[Any, Any, Any]]:
    limit = _Limit()

    async def answered(*_: object, **__: object) -> object:
        limit()
        return answer

    return answered


def _group() -> messages.GroupEntry:
    return messages.GroupEntry("orders", "billing", 1, None, [], [])


def test_paged_lists() -> None:
    groups = _stub(PolywireClient, _ask=_answering(messages.GroupList([_group()], more=True)))
    with pytest.raises(Corrupt, match="does not advance"):
        asyncio.run(groups.groups())
    writers = messages.EntryList([messages.WriterEntry("nightly", 7, 0, "")], more=True)
    with pytest.raises(Corrupt, match="does not advance"):
        asyncio.run(_stub(PolywireClient, _ask=_answering(writers)).writers())


class _Repeats:
    """The connection of the `polywire` protocol, whose FETCH repeats one response."""

    def __init__(self, next_offset: int) -> None:
        self._answer = _answering((messages.Fetched(next_offset, 100), [b"batch"]))

    async def ask(self, verb: Verb, head: object, *, bytes_max: int = 0) -> Any:
        fetched, parts = await self._answer()
        return msgspec.msgpack.encode(fetched), parts


@pytest.mark.parametrize("next_offset", [3, 5])
def test_batches_of_the_polywire_protocol(next_offset: int) -> None:
    client = _stub(PolywireClient)
    client._connection = _Repeats(next_offset)
    with pytest.raises(Corrupt, match="asked=5"):
        asyncio.run(client.fetch_batches("orders", 0, 5, bytes_max=1))


def test_chunks_of_a_bulk_read() -> None:
    at = _Progress("orders", 0, 5, -1, -1, bodies=True)
    chunk = at.advance(memoryview(b"x"), 6)
    assert chunk is not None
    assert at.advance(memoryview(b""), 6) is None
    with pytest.raises(Corrupt):
        at.advance(memoryview(b"x"), 6)


@pytest.mark.parametrize("kind", [IggyClient, IggyTodayClient])
def test_polls_of_iggy(kind: type[IggyClient]) -> None:
    client = _stub(kind, _poll=_answering(Polled(0, 9, (Record(b"x", offset=2, id=b"i" * 16),))))
    with pytest.raises(Corrupt):
        asyncio.run(client.fetch("orders", 0, 3))
    with pytest.raises(Corrupt):
        asyncio.run(client._scan("orders", 0, b"j" * 16, 3, 9))


def test_offsets_of_kafka07() -> None:
    client = _stub(Kafka07Client, read=_answering(Fetched([], [], 100, is_cut=False)))
    with pytest.raises(Corrupt):
        asyncio.run(client._search("orders", 0, 0, 100, 200, [b"x"]))


def test_reads_of_cursus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polywire.client.cursus._records", lambda _: [Record(b"x", offset=2)])
    with pytest.raises(Corrupt):
        asyncio.run(_stub(CursusClient, _ask=_answering(b"")).fetch("orders", 0, 3))


def test_reads_of_flux(monkeypatch: pytest.MonkeyPatch) -> None:
    client = _stub(FluxClient, _consume=_answering((b"x", 9)))

    class Batch:
        rest = b""

    monkeypatch.setattr("polywire.client.flux.read_records", lambda *_: Batch())
    monkeypatch.setattr("polywire.client.flux._records", lambda _: [Record(b"x", offset=2)])
    with pytest.raises(Corrupt):
        asyncio.run(client.fetch("orders", 0, 3))


class _Still:
    """A topic's partition that reports records up to 9 but returns none, or only the first one again and again."""

    def __init__(self, records: list[Record]) -> None:
        self._records = records
        self._limit = _Limit()

    async def partition_count(self) -> int:
        return 1

    async def first(self, partition: int) -> int:
        return 0

    async def end(self, partition: int) -> int:
        return 9

    async def read(self, partition: int, place: int) -> tuple[list[Record], int]:
        self._limit()
        return self._records, self._records[-1].offset if self._records else place


@pytest.mark.parametrize("records", [[], [Record(b"x", offset=0)]])
def test_a_copy_from_a_source_that_makes_no_progress(records: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "reader_of", lambda *_: _Still(records))
    copy = copying.Copy(
        copying.End("polywire://a", "t"),
        copying.End("polywire://b", "t"),
        CopyState("a", "b"),
        span=copying.Span(),
    )
    session = copying._Session(copy, _stub(PolywireClient), _stub(PolywireClient))
    with pytest.raises(Corrupt):
        asyncio.run(session._copy_partition(0, 9))


def test_cursors_that_advance_are_returned() -> None:
    assert beyond(3, 4, "offset") == 4
    assert beyond(("a", "z"), ("b", "a"), "group") == ("b", "a")
    assert from_offset([], 3) == []
    compacted = [Record(b"x", offset=2), Record(b"y", offset=7)]
    assert from_offset(compacted, 3) == compacted
