"""The response to a Fetch request: its entries while the request is executed, and their encoding.

* Bytes that are the same in all responses of a version are encoded once, from the table of messages.
* Records of at least ``PART_BYTES_MIN`` bytes become separate buffers and are not copied.

This module is compiled.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import cython

from polywire.broker.topics import Partition
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.codec import encode_response, encode_response_entry
from polywire.protocols.kafka.messages import NO_OFFSET, Api, Request
from polywire.protocols.kafka.structure_encoder import PART_BYTES_MIN
from polywire.types import Buffer

IDS_SINCE: Final = 13  # first version that names topics by id
SESSIONS_SINCE: Final = 7  # first version with the error and the session in the response
START_SINCE: Final = 5  # first version with the first offset of a partition
_FETCH: Final = Api.FETCH  # read for every response; a module constant is ten times as fast as an attribute

_PART_MIN = cython.declare(cython.Py_ssize_t, PART_BYTES_MIN)


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
def _fixed_bytes(version: int) -> tuple[bytes, bytes]:
    """Return a response before the number of topics, and the entry of a partition before the length of its records.

    In every version, both begin with the numbers that ``ResponseWriter`` replaces.
    """
    request = Request(Api.FETCH, version, 0, None, None)
    response = schema.response(Api.FETCH)
    *_, entry = encode_response_entry(request, response.Responses.Partitions(records=b""))
    assert entry is not None, "the last value is the entry"
    rest = 2 if schema.is_flexible(Api.FETCH, version) else 4  # a length of zero, and tags
    return b"".join(encode_response(request, response(responses=[])))[:-rest], entry[:-rest]


@cython.cfunc
def _put(out: bytearray, at: cython.Py_ssize_t, value: cython.longlong, size: cython.Py_ssize_t) -> cython.void:
    i: cython.Py_ssize_t
    for i in range(size):
        out[at + i] = (value >> (8 * (size - 1 - i))) & 255


@cython.final
@cython.cclass
class ResponseWriter:
    """Encodes a response. Its topics, and the entries of each, are added in order."""

    if not cython.compiled:
        __slots__ = ("_entry", "_out", "_parts", "_tags", "_version")

    def __init__(self, request: Request, topic_count: int) -> None:
        self._version = request.version
        self._tags = b"\0" if schema.is_flexible(_FETCH, request.version) else b""  # the end of each structure
        body, self._entry = _fixed_bytes(request.version)
        self._parts: list[Any] = []
        self._out = bytearray(body)
        _put(self._out, 4, request.correlation_id, 4)
        self._put_length(topic_count, 4)

    @cython.cfunc
    def _put_length(self, length: cython.longlong, size: cython.Py_ssize_t) -> cython.void:
        out: bytearray = self._out
        if not self._tags:
            while size > 0:
                size -= 1
                out.append((length >> (8 * size)) & 255)
            return
        length += 1
        while length > 127:
            out.append((length & 127) | 128)
            length >>= 7
        out.append(length)

    @cython.ccall
    def begin_topic(self, name: str, topic_id: bytes, entry_count: cython.Py_ssize_t) -> cython.void:
        if self._version >= IDS_SINCE:
            self._out += topic_id
        else:
            encoded: bytes = name.encode()
            self._put_length(len(encoded), 2)
            self._out += encoded
        self._put_length(entry_count, 4)

    @cython.ccall
    def end_topic(self) -> cython.void:
        self._out += self._tags

    @cython.ccall
    def add(self, entry: Entry) -> cython.void:
        at: cython.Py_ssize_t = len(self._out)
        size: cython.Py_ssize_t = len(entry.records)
        self._out += self._entry
        _put(self._out, at, entry.index, 4)
        _put(self._out, at + 4, entry.error, 2)
        _put(self._out, at + 6, entry.high_watermark, 8)
        _put(self._out, at + 14, entry.high_watermark, 8)  # the last stable offset
        if self._version >= START_SINCE:
            _put(self._out, at + 22, entry.start, 8)
        self._put_length(size, 4)
        if size < _PART_MIN:
            self._out += entry.records
        else:
            self._parts += (self._out, entry.records)
            self._out = bytearray()
        self._out += self._tags

    @cython.ccall
    def finish(self, session_id: cython.longlong) -> list:  # type: ignore[type-arg]
        """Return the response as consecutive buffers."""
        first: bytearray
        size: cython.Py_ssize_t = 0
        self._out += self._tags
        if len(self._out):
            self._parts.append(self._out)
        first = self._parts[0]
        for part in self._parts:
            size += len(part)
        _put(first, 0, size - 4, 4)
        if self._version >= SESSIONS_SINCE:
            _put(first, 14 + len(self._tags), session_id, 4)
        return self._parts

    def delay(self, delay_ms: cython.longlong) -> None:
        """Set the time for which quotas delay the client, in a finished response."""
        _put(self._parts[0], 8 + len(self._tags), delay_ms, 4)
