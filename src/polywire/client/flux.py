"""The asynchronous client of the FLUX protocol.

* Requests are pipelined over one connection.
* A record that does not fit a line is rejected before anything is sent.
* Commas in values are not escaped in CONSUME replies. If a reply is ambiguous, the client reads again in a way that is
  not.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from polywire.client.base import Ability, Membership, PartitionBounds, Produced, TopicInfo
from polywire.client.connection import PipelinedConnection, Scope, open_connection, understood
from polywire.client.failures import bare_value, cannot, cannot_name, from_offset
from polywire.errors import BrokerError, Conflict, ErrorCode, Invalid, NotOwner, PeerError, Unavailable
from polywire.protocols.flux.decoder import LINE_BYTES_MAX
from polywire.protocols.flux.messages import (
    VERSION,
    Acks,
    Refused,
    WireCode,
    bytes_of,
    has_white,
    named,
    topic_name,
    topic_word,
)
from polywire.records.columns import Record
from polywire.types import PARTITION_COUNT_MAX, Assignor, Level

CAPPED_BYTES_MIN: Final = 1024 * 1024  # only replies above this size can be shortened by a broker

_BORDER: Final = re.compile(rb",([0-9]+):")
WIRE: Final = "FLUX"  # the protocol's name in error messages
OPEN_TIMEOUT_S: Final = 10.0
REPLY_BYTES_MAX: Final = 256 * 1024 * 1024  # older brokers have no limit for a response
FETCH_BYTES: Final = 1024 * 1024  # bytes per request
# records per response; in practice bytes limit a response, so all decoded records are returned
FETCH_RECORDS: Final = 1_000_000
PIPELINE_RECORDS: Final = 1_000  # records of one ``produce`` in flight
RESOLVED_MAX: Final = 16  # ambiguous record boundaries that one ``fetch`` resolves; the next call continues
OFFSET_MAX: Final = 2**63 - 1
ABILITIES: Final = frozenset(
    {
        Ability.EMPTY_VALUES,
        Ability.SAME_HASH,
        Ability.CREATE_TOPIC,
        Ability.GROUPS,
        Ability.AT_ONCE,
        Ability.GENERATIONS,
        Ability.POSITIONS,
    }
)
_ACKS: Final = {Level.MEMORY: Acks.NONE, Level.WRITTEN: Acks.LEADER, Level.SYNCED: Acks.ALL}


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply line: the id of the request, and a payload or an error."""

    id: bytes
    payload: bytes
    error: BrokerError | None


def parse_reply(line: bytes) -> Reply:
    """Parse a line without its ending. Raises PeerError."""
    version, _, rest = line.removesuffix(b"\r").partition(b"|")
    correlation, _, rest = rest.partition(b"|")
    status, _, rest = rest.partition(b"|")
    if version != VERSION or status not in (b"OK", b"ERR"):
        raise PeerError(f"not a FLUX response line={line[:80]!r}", fatal=True)
    if status == b"OK":
        return Reply(correlation, rest, None)
    code, _, message = rest.partition(b"|")
    return Reply(correlation, b"", _error(code, message.decode("utf-8", "replace")))


def _error(code: bytes, message: str) -> BrokerError:
    match code:
        case WireCode.NOT_LEADER.value:
            return NotOwner(ErrorCode.NOT_OWNER, message)
        case WireCode.REPLICATION_TIMEOUT.value:
            return Unavailable(ErrorCode.REPLICATION_TIMEOUT, message)
        case WireCode.GENERATION_MISMATCH.value:
            return Conflict(ErrorCode.GENERATION_STALE, message)
        case _:
            return Invalid(ErrorCode.INVALID_REQUEST, message)


def field(payload: bytes, name: bytes) -> bytes:
    """Return the text of ``name=…`` up to the next space, or to the closing bracket of a list. Raises PeerError."""
    for part in re.finditer(rb"(?:^| )([a-z_]+)=(\[[^\]]*\]|[^ ]*)", payload):
        if part[1] == name:
            return part[2]
    raise PeerError(f"response lacks a field field={name.decode()} payload={payload[:80]!r}", fatal=True)


def number(payload: bytes, name: bytes) -> int:
    """Return an integer field. Raises PeerError."""
    text = field(payload, name)
    if re.fullmatch(rb"-?[0-9]{1,19}", text) is None:
        raise PeerError(f"field is not a number field={name.decode()} text={text[:40]!r}", fatal=True)
    return int(text)


def items(payload: bytes, name: bytes) -> list[bytes]:
    """Return a list field. Raises PeerError."""
    return field(payload, name).strip(b"[]").split()


@dataclass(frozen=True, slots=True)
class Batch:
    """The records of a CONSUME reply, up to the first ambiguous boundary between two records.

    Attributes:
        first: offset of the first value.
        values: values at consecutive offsets.
        rest: text after the ambiguous boundary; empty if there is none.
    """

    first: int
    values: list[bytes]
    rest: bytes
    hw: int

    @property
    def next(self) -> int:
        """Offset after the last value."""
        return self.first + len(self.values)


def split_consumed(payload: bytes, first: int) -> tuple[bytes, int]:
    """Return the text of the records, and the high watermark (``hw``), of a CONSUME reply. Raises PeerError."""
    text, found, hw = payload.rpartition(b" hw=")
    shown = re.match(rb"(-?[0-9]{1,19})(?: |$)", hw)
    if not found or not text.startswith(b"messages=") or shown is None:
        raise PeerError(f"not a response to CONSUME offset={first} payload={payload[:80]!r}", fatal=True)
    return text.removeprefix(b"messages="), int(shown[1])


def read_records(text: bytes, hw: int) -> Batch:
    """Split the text of a reply into records, up to the first ambiguous boundary. Raises PeerError.

    Offsets are consecutive, so the boundary after record n is ``,n+1:``. If each of these texts occurs only once, the
    split is unambiguous. A long reply may have been shortened. Then its last boundary may be part of a value.
    """
    head, colon, _ = text.partition(b":")
    if not text:
        return Batch(0, [], b"", hw)
    if not colon or re.fullmatch(rb"[0-9]{1,19}", head) is None:
        raise PeerError(f"record does not begin with an offset text={text[:80]!r}", fatal=True)
    first = int(head)
    borders: dict[int, list[int]] = {}
    for border in _BORDER.finditer(text):
        offset = int(border[1]) if len(border[1]) < 20 else -1
        if first < offset <= hw and str(offset).encode() == border[1]:
            borders.setdefault(offset, []).append(border.start())
    values: list[bytes] = []
    at, offset = 0, first
    whole = len(text) < CAPPED_BYTES_MIN
    while True:
        positions = borders.get(offset + 1, [])
        start = at + len(str(offset)) + 1
        last = not positions
        if (
            len(positions) > 1
            or (positions and positions[0] < start)
            or (last and not whole and offset < hw and _BORDER.search(text, at))
        ):
            return Batch(first, values, text[at:], hw)
        values.append(text[start:] if last else text[start : positions[0]])
        if last:
            return Batch(first, values, b"", hw)
        at, offset = positions[0] + 1, offset + 1


def resolve_boundary(text: bytes, following: bytes) -> bytes | None:
    """Return the value of the first record in ``text``; None if its end is still ambiguous.

    ``following`` is the text of another reply, which begins with the next record.
    """
    head, _, _ = text.partition(b":")
    border = b",%d:" % (int(head) + 1)
    start = len(head) + 1
    at = text.find(border, start)
    while at >= 0:
        if following.startswith(text[at + 1 :]):
            return text[start:at]
        at = text.find(border, at + 1)
    return text[start:] if not following else None


class _Connection(PipelinedConnection[Reply]):
    """A connection on which requests and replies are lines. A reply must have the id of the oldest pending request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._asked = 0
        self._reply_count = 0
        self._searched = 0  # bytes at the beginning of the buffer that have been searched for a line ending

    def _end_of(self, data: bytearray, at: int) -> int:
        end = data.find(b"\n", at + self._searched) + 1
        self._searched = 0 if end else len(data) - at
        if self._searched > REPLY_BYTES_MAX:
            raise PeerError(f"response is too long limit={REPLY_BYTES_MAX}", fatal=True)
        return end

    def _reply(self, data: bytearray, at: int, end: int) -> Reply:
        reply = parse_reply(bytes(memoryview(data)[at : end - 1]))
        self._reply_count += 1
        if reply.id != b"%d" % self._reply_count and reply.error is None:
            raise PeerError(
                f"response to another request id={reply.id[:40]!r} expected={self._reply_count}", fatal=True
            )
        return reply

    async def ask_all(self, requests: Sequence[bytes]) -> list[Reply]:
        """Send requests (``COMMAND|args``), and return their replies, which can be errors. Raises Unavailable."""
        ids = range(self._asked + 1, self._asked + len(requests) + 1)
        self._asked += len(requests)
        lines = [b"V1|%d|%b\n" % pair for pair in zip(ids, requests, strict=True)]
        return await self.exchange(b"".join(lines), len(lines))

    async def ask(self, request: bytes) -> bytes:
        """Send one request, and return the payload of its reply. Raises BrokerError."""
        (reply,) = await self.ask_all([request])
        if reply.error is not None:
            raise reply.error
        return reply.payload


class FluxClient(Scope):
    """A client that implements ``WireClient`` as far as the protocol supports it. Create one with ``open``.

    A key is sent, but the protocol does not return it to consumers. A missing key is sent as an empty one.

    ``Level.SYNCED`` is sent as ``acks=all``. A broker without followers stores such a record but reports a failure,
    which raises Unavailable(REPLICATION_TIMEOUT).
    """

    __slots__ = ("_connection", "_limit")

    def __init__(self, connection: _Connection) -> None:
        self._connection: _Connection = connection
        # size limit in a CONSUME request; empty if the broker does not support it
        self._limit = b" max=%d" % FETCH_BYTES

    @classmethod
    async def open(
        cls, host: str, port: int, *, timeout_s: float = OPEN_TIMEOUT_S, tls: ssl.SSLContext | None = None
    ) -> FluxClient:
        """Connect.

        Args:
            host: name or address of the broker.
            port: port of its FLUX listener.
            timeout_s: time limit, in seconds.
            tls: how to verify the broker (``client.address.client_context``); None connects without TLS.

        Raises:
            Unavailable: the broker is not reachable.
        """
        return cls(await open_connection(_Connection, host, port, timeout_s=timeout_s, tls=tls))

    @property
    def abilities(self) -> frozenset[Ability]:
        """The features of the FLUX protocol."""
        return ABILITIES

    async def close(self) -> None:
        """Close the connection. Pending calls fail with Unavailable."""
        self._connection.fail(Unavailable(ErrorCode.STOPPING, "client was closed"))

    async def create_topic(self, topic: str, partition_count: int) -> None:
        """Create a topic. See ``WireClient``. Raises Invalid(INVALID_TOPIC) for a name that does not fit a line."""
        payload = await self._connection.ask(b"ADMIN_CREATE_TOPIC|%b %d 1" % (_topic(topic), partition_count))
        understood(field, payload, b"topic")

    async def delete_topic(self, topic: str) -> None:
        """Raise Invalid(INVALID_REQUEST): the protocol cannot delete topics."""
        raise cannot(WIRE, "delete topics")

    async def topics(self) -> list[TopicInfo]:
        """Return all topics. ``id`` is empty. Counting the partitions takes several requests per topic."""
        payload = await self._connection.ask(b"ADMIN_GET_METADATA|")
        names = [named(name) for name in understood(items, payload, b"topics")]
        return [TopicInfo(name, b"", await self._count_partitions(name)) for name in names]

    async def _count_partitions(self, topic: str) -> int:
        """Find the first partition that does not exist, by binary search.

        The reads are at offsets without records, so they are cheap.
        """
        low, high = 0, 1
        while high < PARTITION_COUNT_MAX and await self._has_partition(topic, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if await self._has_partition(topic, middle):
                low = middle
            else:
                high = middle
        return high

    async def _has_partition(self, topic: str, partition: int) -> bool:
        (reply,) = await self._connection.ask_all([b"CONSUME|%b %d %d" % (_topic(topic), partition, OFFSET_MAX)])
        return reply.error is None

    async def bounds(self, topic: str) -> list[PartitionBounds]:
        """Raise Invalid(INVALID_REQUEST): the protocol does not report first offsets."""
        raise cannot(WIRE, "report first offsets")

    async def offset_at(self, topic: str, partition: int, time_us: int) -> int:
        """Raise Invalid(INVALID_REQUEST): the protocol cannot look records up by time."""
        raise cannot(WIRE, "look records up by time")

    async def produce(
        self, topic: str, records: Sequence[Record], *, partition: int | None = None, level: Level = Level.WRITTEN
    ) -> list[Produced]:
        """Append records with pipelined requests, one per record, and return their offsets. See ``WireClient``.

        Raises Invalid(INVALID_REQUEST) if ``partition`` is set, and for null values, white space, headers, ids or
        times: the protocol does not support these. Raises Invalid(RECORD_TOO_LARGE) for a record that does not fit a
        line.
        """
        if partition is not None:
            raise cannot(WIRE, "choose a partition")
        tail = b" acks=" + _ACKS[level].value
        name = _topic(topic)
        requests = [b"PRODUCE|%b %b" % (name, _message(record)) + tail for record in records]
        longest = max(map(len, requests), default=0) + len(b"V1||\n") + len(str(OFFSET_MAX))
        if longest > LINE_BYTES_MAX:
            raise Invalid(
                ErrorCode.RECORD_TOO_LARGE, f"record does not fit a FLUX line bytes={longest} limit={LINE_BYTES_MAX}"
            )
        produced: list[Produced] = []
        for start in range(0, len(requests), PIPELINE_RECORDS):
            for reply in await self._connection.ask_all(requests[start : start + PIPELINE_RECORDS]):
                if reply.error is not None:
                    raise reply.error
                payload = reply.payload
                produced.append(
                    Produced(understood(number, payload, b"partition"), understood(number, payload, b"offset"))
                )
        return produced

    async def fetch(
        self, topic: str, partition: int, offset: int, *, records_max: int = FETCH_RECORDS, wait_ms: int = 0
    ) -> list[Record]:
        """Return records from an offset on, without keys. See ``WireClient``.

        The protocol cannot wait, so ``wait_ms`` is ignored.
        """
        text, hw = await self._consume(topic, partition, offset)
        records: list[Record] = []
        for _ in range(RESOLVED_MAX):
            batch = understood(read_records, text, hw)
            records += _records(batch)
            if not batch.rest or len(records) >= records_max:
                break
            following, hw = await self._consume(topic, partition, batch.next + 1)
            value = resolve_boundary(batch.rest, following)
            if value is None:
                break
            records.append(Record(value, offset=batch.next))
            text = following
        if not records and text:
            raise Unavailable(
                ErrorCode.STORAGE_FAILED,
                f"record boundaries are ambiguous partition={partition} offset={offset}",
            )
        return from_offset(records[:records_max], offset)

    async def _consume(self, topic: str, partition: int, offset: int) -> tuple[bytes, int]:
        request = b"CONSUME|%b %d %d" % (_topic(topic), partition, offset)
        try:
            payload = await self._connection.ask(request + self._limit)
        except Invalid:
            if not self._limit:
                raise
            payload = await self._connection.ask(request)
            self._limit = b""
        return understood(split_consumed, payload, offset)

    async def join(self, group: str, topic: str, member: str, *, assignor: Assignor | None = None) -> Membership:
        """Join a group. See ``WireClient``."""
        suffix = b"" if assignor is None else b" assignor=" + assignor.value.encode()
        payload = await self._connection.ask(b"JOIN|%b %b %b" % (_word(group), _topic(topic), _word(member)) + suffix)
        return _membership(payload)

    async def heartbeat(self, group: str, topic: str, member: str, generation: int) -> Membership:
        """Send a heartbeat, and return the assignment.

        Raises Conflict(GENERATION_STALE) if the assignment has changed: join again.
        """
        payload = await self._connection.ask(b"SYNC|" + _member(group, topic, member, generation))
        return _membership(payload)

    async def leave(self, group: str, topic: str, member: str, generation: int) -> None:
        """Leave a group. Other members get its partitions."""
        await self._connection.ask(b"LEAVE|" + _member(group, topic, member, generation))

    async def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str = "", generation: int = -1
    ) -> None:
        """Commit a group's next offset to read. See ``WireClient``.

        Raises Invalid without ``member``, which the protocol requires.
        """
        if not member:
            raise cannot(WIRE, "store a position without being a member")
        await self._connection.ask(b"COMMIT|%b %d %d" % (_member(group, topic, member, generation), partition, offset))

    async def position(self, group: str, topic: str, partition: int) -> int | None:
        """Return a group's next offset to read.

        The result is 0 if nothing was committed, because the protocol does not distinguish this from offset 0.
        """
        payload = await self._connection.ask(b"OFFSET|%b %b %d" % (_word(group), _topic(topic), partition))
        return understood(number, payload, b"offset")


def _topic(topic: str) -> bytes:
    name = bytes_of(topic_word(topic))
    try:
        topic_name(name)
    except Refused:
        raise cannot_name(WIRE, topic) from None
    return name


def _word(name: str) -> bytes:
    text = name.encode("utf-8", "surrogateescape")
    if not text or has_white(text):
        raise Invalid(ErrorCode.INVALID_NAME, f"name must be one word name={name!r}")
    return text


def _member(group: str, topic: str, member: str, generation: int) -> bytes:
    return b"%b %b %b %d" % (_word(group), _topic(topic), _word(member), generation)


def _message(record: Record) -> bytes:
    """Encode a record as ``key:value``. Raises Invalid for a record that cannot be sent as one line."""
    value = bare_value(WIRE, record)
    key = record.key or b""
    if b":" in key or has_white(key):
        raise Invalid(ErrorCode.INVALID_REQUEST, "FLUX keys must not contain white space or a colon")
    if has_white(value):
        raise Invalid(ErrorCode.INVALID_REQUEST, "FLUX values must not contain white space")
    return key + b":" + value


def _membership(payload: bytes) -> Membership:
    partitions = understood(items, payload, b"assigned")
    return Membership(understood(number, payload, b"generation"), tuple(map(int, partitions)))


def _records(batch: Batch) -> list[Record]:
    return [Record(value, offset=batch.first + index) for index, value in enumerate(batch.values)]
