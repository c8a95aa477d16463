"""The response to a Fetch request: its entries while the request is executed, and their encoding.

Fields that are the same in all entries of a version are encoded once, from the table of messages.

This module is compiled.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import cython

from polywire.broker.topics import Partition
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.codec import encode_response_entry
from polywire.protocols.kafka.messages import NO_OFFSET, Api, Request
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.protocols.kafka.structure_encoder import (
        Writer,
        finish,
        put,
        put_length,
        put_raw,
        put_records,
    )
else:
    from polywire.protocols.kafka.structure_encoder import Writer, finish, put, put_length, put_raw, put_records

IDS_SINCE: Final = 13  # first version that names topics by id
SESSIONS_SINCE: Final = 7  # first version with the error and the session in the response
START_SINCE: Final = 5  # first version with the first offset of a partition
_FETCH: Final = Api.FETCH  # read for every response; a module constant is ten times as fast as an attribute
_NUMBERS_BYTES: Final = 30  # an entry's fields from the number of the partition to its first offset
_NO_ERROR: Final = 0


@cython.final
@cython.cclass
class Entry:
    """A partition of a request: what is read from it, and its entry in the response.

    Attributes:
        index: number of the partition.
        offset, bytes_max: what to read.
        partition: the partition; None if it cannot be read.
        in_session: the partition of the fetch session; None outside of sessions.
        error, high_watermark, start, records: the fields of the response; ``start`` is the first offset.
    """

    if not cython.compiled:  # when compiled, fetch_responses.pxd declares the fields
        __slots__ = (
            "bytes_max",
            "error",
            "high_watermark",
            "in_session",
            "index",
            "offset",
            "partition",
            "records",
            "start",
        )

    def __init__(self, index: int, offset: int, bytes_max: int, in_session: Any) -> None:
        self.index = index
        self.offset = offset
        self.bytes_max = bytes_max
        self.in_session = in_session
        self.partition: Partition | None = None
        self.error = 0
        self.high_watermark = self.start = NO_OFFSET
        self.records: Buffer = b""


@cache
def _between(version: int) -> bytes:
    """Return the bytes of a partition's entry between its first offset and the length of its records."""
    request = Request(Api.FETCH, version, 0, None, None)
    *_, entry = encode_response_entry(request, schema.response(Api.FETCH).Responses.Partitions(records=b""))
    assert entry is not None, "the last value is the entry"
    rest = 2 if schema.is_flexible(Api.FETCH, version) else 4  # a length of zero, and tags
    return entry[_NUMBERS_BYTES if version >= START_SINCE else _NUMBERS_BYTES - 8 : -rest]


@cython.final
@cython.cclass
class ResponseWriter:
    """Encodes a response. Its topics, and the entries of each, are added in order."""

    if not cython.compiled:
        __slots__ = ("_between", "_flexible", "_tags", "_version", "_writer")

    def __init__(self, request: Request, session_id: int, topic_count: int) -> None:
        self._version = request.version
        self._flexible = schema.is_flexible(_FETCH, request.version)
        self._tags = b"\0" if self._flexible else b""  # the end of each structure
        self._between = _between(request.version)
        writer: Writer = Writer(256)
        self._writer = writer
        put(writer, 0, 4)  # the length
        put(writer, request.correlation_id, 4)
        put_raw(writer, self._tags)
        put(writer, 0, 4)  # see ``delay``
        if request.version >= SESSIONS_SINCE:
            put(writer, _NO_ERROR, 2)
            put(writer, session_id, 4)
        put_length(writer, topic_count, self._flexible, 4)

    @cython.ccall
    def begin_topic(self, name: str, topic_id: bytes, entry_count: cython.Py_ssize_t) -> cython.void:
        if self._version >= IDS_SINCE:
            put_raw(self._writer, topic_id)
        else:
            encoded: bytes = name.encode()
            put_length(self._writer, len(encoded), self._flexible, 2)
            put_raw(self._writer, encoded)
        put_length(self._writer, entry_count, self._flexible, 4)

    @cython.ccall
    def end_topic(self) -> cython.void:
        put_raw(self._writer, self._tags)

    @cython.ccall
    def add(self, entry: Entry) -> cython.void:
        writer: Writer = self._writer
        put(writer, entry.index, 4)
        put(writer, entry.error, 2)
        put(writer, entry.high_watermark, 8)
        put(writer, entry.high_watermark, 8)  # the last stable offset
        if self._version >= START_SINCE:
            put(writer, entry.start, 8)
        put_raw(writer, self._between)
        put_records(writer, entry.records, self._flexible)
        put_raw(writer, self._tags)

    def size(self) -> int:
        """Return the number of bytes of the response if nothing is added."""
        return self._writer.at + self._writer.outside + len(self._tags)

    def delay(self, delay_ms: int) -> None:
        """Set the time for which quotas delay the client."""
        writer: Writer = self._writer
        at: cython.Py_ssize_t = writer.at
        writer.at = 8 + len(self._tags)
        put(writer, delay_ms, 4)
        writer.at = at

    def finish(self) -> list[Buffer]:
        """Return the response as consecutive buffers. Nothing may be added afterwards."""
        put_raw(self._writer, self._tags)
        return finish(self._writer)
