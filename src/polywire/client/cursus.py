"""The asynchronous client of the Cursus protocol, in its modern dialect.

* Requests are pipelined over one connection. A fetch that waits for records uses its own connection.
* Records that the protocol does not support are rejected before anything is sent.
* A caller names its member of a group. If it joins again with the same name, it remains the same member for the broker.
* Each error response becomes an exception of ``polywire.errors``, and an invalid response becomes ``Unavailable``.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from struct import Struct
from typing import Final

import msgspec

from polywire.client.base import Ability, Membership, PartitionBounds, Produced, TopicInfo
from polywire.client.connection import FramedConnection, Scope, open_connection
from polywire.client.failures import bare_value, cannot, from_offset
from polywire.errors import BrokerError, Conflict, Denied, ErrorCode, Invalid, Missing, NotOwner, Unavailable
from polywire.protocols.cursus import decoder
from polywire.protocols.cursus.messages import (
    FRAME_BYTES_MAX,
    decoded,
    encoded,
    enveloped,
    frame,
    topic_name,
    topic_word,
)
from polywire.records.columns import Event, Record
from polywire.records.partitioner import partitions_of
from polywire.types import DEFAULT_PARTITION_COUNT, Assignor, KeyHash, Level, TopicName, check_topic_name

WIRE: Final = "Cursus"  # the protocol's name in error messages
_U16: Final = Struct(">H")
_HEAD: Final = Struct(">BQQi")  # idempotent, seqStart, seqEnd, count
_NUMBERS: Final = Struct(">QQ")
_EPOCH: Final = Struct(">qI")
_VERSIONS: Final = Struct(">IQ")
_PARTITION: Final = Struct(">i")
_PRESENT: Final = re.compile(r"(\w+)=(\[[^\]]*\]|\"(?:[^\"\\]|\\.)*\"|\S*)")

# The exception for each error code. Any other code becomes Invalid.
_KINDS: Final[Mapping[str, BrokerError]] = {
    "topic_not_found": Missing(ErrorCode.TOPIC_MISSING, ""),
    "partition_not_found": Missing(ErrorCode.PARTITION_MISSING, ""),
    "group_not_found": Missing(ErrorCode.GROUP_MISSING, ""),
    "member_not_found": Missing(ErrorCode.MEMBER_MISSING, ""),
    "OFFSET_OUT_OF_RANGE": Missing(ErrorCode.OFFSET_OUT_OF_RANGE, ""),
    "GEN_MISMATCH": Conflict(ErrorCode.GENERATION_STALE, ""),
    "NOT_OWNER": Conflict(ErrorCode.PARTITION_NOT_ASSIGNED, ""),
    "producer_fenced": Conflict(ErrorCode.PRODUCER_FENCED, ""),
    "stale_producer_epoch": Conflict(ErrorCode.PRODUCER_FENCED, ""),
    "create_topic_failed": Conflict(ErrorCode.TOPIC_EXISTS, ""),
    "invalid_topic_name": Invalid(ErrorCode.INVALID_TOPIC, ""),
    "invalid_partitions": Invalid(ErrorCode.INVALID_PARTITION_COUNT, ""),
    "invalid_name": Invalid(ErrorCode.INVALID_NAME, ""),
    "batch_decode_failed": Invalid(ErrorCode.INVALID_BATCH, ""),
    "authentication_required": Denied(ErrorCode.DENIED, ""),
    "authentication_failed": Denied(ErrorCode.DENIED, ""),
    "NOT_AUTHORIZED_FOR_OPERATION": Denied(ErrorCode.DENIED, ""),
    "NOT_AUTHORIZED_FOR_TOPIC": Denied(ErrorCode.DENIED, ""),
    "NOT_PARTITION_LEADER": NotOwner(ErrorCode.NOT_OWNER, ""),
    "request_cancelled": Unavailable(ErrorCode.STOPPING, ""),
}
Ask = Callable[[str], Awaitable[bytes]]
OPEN_TIMEOUT_S: Final = 10.0
BATCH_BYTES_MAX: Final = 8 * 1024 * 1024  # limit for the values of one batch; a larger record is sent alone
BATCH_RECORDS_MAX: Final = 10_000
FETCH_RECORDS: Final = 1_000  # records per request; the protocol limits records, not bytes
WAIT_MS_MAX: Final = 25_000  # milliseconds per request; a longer wait takes several requests
MEMBER: Final = "polywire"  # a fetch must name a member, which the broker does not check
ABILITIES: Final = frozenset(
    {
        Ability.EMPTY_VALUES,
        Ability.SAME_HASH,
        Ability.GENERATIONS,
        Ability.KEYS_READ,
        Ability.BINARY_VALUES,
        Ability.WHITE_SPACE_VALUES,
        Ability.CHOOSE_PARTITION,
        Ability.CREATE_TOPIC,
        Ability.DELETE_TOPIC,
        Ability.BOUNDS,
        Ability.LONG_POLL,
        Ability.CONCURRENT_POLLS,
        Ability.LEVELS,
        Ability.GROUPS,
        Ability.AT_ONCE,
        Ability.POSITIONS,
    }
)
_ACKS: Final = {Level.MEMORY: "0", Level.WRITTEN: "1", Level.SYNCED: "-1"}


class _Acknowledgement(msgspec.Struct):
    status: str = ""
    last_offset: int = 0
    error: str = ""


def invalid_response(what: str) -> Unavailable:
    """Return the error for a response that cannot be decoded."""
    return Unavailable(ErrorCode.UNREACHABLE, f"invalid response: {what}")


def error_of(text: str) -> BrokerError:
    """Return the error of a response ``ERROR: …``."""
    code = text.removeprefix("ERROR: ").partition(" ")[0]
    if "does not exist" in text:
        code = "topic_not_found"
    elif "out of range for topic" in text:
        code = "partition_not_found"
    known = _KINDS.get(code, Invalid(ErrorCode.INVALID_REQUEST, ""))
    return type(known)(known.code, text.removeprefix("ERROR: "))


def fields(body: bytes) -> dict[str, str]:
    """Return the fields of a response ``OK k=v …``, including bracketed and quoted values. Raises BrokerError."""
    text = decoded(body)
    if text.startswith("ERROR:"):
        raise error_of(text)
    if not text.startswith("OK"):
        raise invalid_response(text[:80])
    return dict(_PRESENT.findall(text))


def number(reply: Mapping[str, str], key: str) -> int:
    """Return a numeric field. Raises Unavailable."""
    try:
        return int(reply[key])
    except (KeyError, ValueError):
        raise invalid_response(f"no number {key}") from None


def numbers(reply: Mapping[str, str], key: str) -> tuple[int, ...]:
    """Return a field that is a bracketed list of numbers. Raises Unavailable."""
    try:
        return tuple(map(int, reply[key].strip("[]").replace(",", " ").split()))
    except (KeyError, ValueError):
        raise invalid_response(f"no list {key}") from None


def last_offset(body: bytes) -> int:
    """Return the offset of the last acknowledged record. Raises BrokerError."""
    if body.startswith(b"ERROR:"):
        raise error_of(decoded(body))
    try:
        acknowledgement = msgspec.json.decode(body, type=_Acknowledgement)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise invalid_response(decoded(body[:80])) from None
    if acknowledgement.status == "OK":
        return acknowledgement.last_offset
    if "stale_producer_epoch" in acknowledgement.error:
        raise Conflict(ErrorCode.PRODUCER_FENCED, acknowledgement.error)
    if "idempotency" in acknowledgement.error:
        raise Invalid(ErrorCode.SEQUENCE_GAP, acknowledgement.error)
    raise Unavailable(ErrorCode.STORAGE_FAILED, acknowledgement.error)


def encode_batch(topic: str, partition: int, acks: str, records: Sequence[Record], *, producer: bytes = b"") -> bytes:
    """Encode a batch in the current layout. Raises Invalid for records that the protocol does not support.

    A missing key is sent as an empty one. With a ``producer`` id, records get sequence numbers, so that the broker
    stores each record only once.
    """
    parts = [b"\xba\x7c", _text(encoded(topic)), _PARTITION.pack(partition), bytes((len(acks),)), acks.encode()]
    parts.append(_HEAD.pack(bool(producer), 0, 0, len(records)))
    for record in records:
        value = bare_value(WIRE, record, events=True)
        event = record.event or Event("", 0, 0)
        parts += (
            _NUMBERS.pack(0, record.sequence or 0),
            _text(producer),
            _text(record.key or b""),
            _EPOCH.pack(0, len(value)),
            value,
            _text(event.type.encode()),
            _VERSIONS.pack(event.schema_version, event.aggregate_version),
            _text(event.metadata or b""),
        )
    return b"".join(parts)


def _text(text: bytes) -> bytes:
    if len(text) > 65_535:
        raise Invalid(
            ErrorCode.RECORD_TOO_LARGE,
            f"key or event text is longer than the 65535 bytes of this protocol got={len(text)}",
        )
    return _U16.pack(len(text)) + text


def decode_batch(body: bytes) -> list[Record]:
    """Decode a batch in the current layout. Raises Unavailable if the bytes are not a batch."""
    room = len(body) // decoder.MESSAGE_BYTES_MIN + 1
    head = array("q", bytes(8 * decoder.HEAD_WORDS))
    spans, details = array("q", bytes(32 * room)), array("q", bytes(8 * decoder.DETAIL_WORDS * room))
    if body[:2] != b"\xba\x7c" or decoder.scan(body, decoder.MODERN, head, spans, details) != 0:
        raise invalid_response("not a batch")
    return [_record(body, spans, details, row) for row in range(head[decoder.COUNT])]


def _record(body: bytes, spans: array[int], details: array[int], row: int) -> Record:
    key_at, key_size, value_at, value_size = spans[4 * row : 4 * row + 4]
    detail = details[decoder.DETAIL_WORDS * row : decoder.DETAIL_WORDS * (row + 1)]
    offset = int.from_bytes(
        body[detail[decoder.MESSAGE_PRODUCER_AT] - 18 : detail[decoder.MESSAGE_PRODUCER_AT] - 10], "big"
    )
    event = None
    if detail[decoder.TYPE_SIZE] or detail[decoder.SCHEMA_VERSION] or detail[decoder.AGGREGATE_VERSION]:
        metadata = body[detail[decoder.METADATA_AT] : detail[decoder.METADATA_AT] + detail[decoder.METADATA_SIZE]]
        kind = decoded(body[detail[decoder.TYPE_AT] : detail[decoder.TYPE_AT] + detail[decoder.TYPE_SIZE]])
        event = Event(kind, detail[decoder.SCHEMA_VERSION], detail[decoder.AGGREGATE_VERSION], metadata or None)
    return Record(
        value=body[value_at : value_at + value_size],
        key=body[key_at : key_at + key_size] if key_size > 0 else None,
        offset=offset,
        sequence=detail[decoder.SEQUENCE] if detail[decoder.MESSAGE_PRODUCER_SIZE] else None,
        event=event,
    )


class Groups:
    """The group members of one client."""

    __slots__ = ("_ask", "_ids")

    def __init__(self, ask: Ask) -> None:
        self._ask: Final = ask
        self._ids: dict[tuple[str, str, str], str] = {}  # the broker's id of each member that has joined and not left

    async def join(self, group: str, topic: str, member: str) -> Membership:
        """Join, or join again as the same member."""
        key = group, topic, member
        reply = fields(await self._ask(f"JOIN_GROUP topic={topic} group={group} member={self._ids.get(key, member)}"))
        self._ids[key] = reply.get("member", member)
        return Membership(number(reply, "generation"), numbers(reply, "assignments"))

    def _member(self, group: str, topic: str, member: str, generation: int) -> str:
        name = self._ids.get((group, topic, member), member)
        return f"topic={topic} group={group} member={name} generation={generation}"

    async def heartbeat(self, group: str, topic: str, member: str, generation: int) -> Membership:
        """Send a heartbeat. Raises Conflict if the assignment has changed."""
        reply = fields(await self._ask("SYNC_GROUP " + self._member(group, topic, member, generation)))
        return Membership(number(reply, "generation"), numbers(reply, "assignments"))

    async def leave(self, group: str, topic: str, member: str, generation: int) -> None:
        """Leave the group."""
        fields(await self._ask("LEAVE_GROUP " + self._member(group, topic, member, generation)))
        self._ids.pop((group, topic, member), None)

    async def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str, generation: int
    ) -> None:
        """Commit an offset. Without a member, the older command is used, which does not check the generation."""
        if member:
            partition_fields = f"partition={partition} offset={offset}"
            fields(
                await self._ask(f"COMMIT_OFFSET {partition_fields} {self._member(group, topic, member, generation)}")
            )
        else:
            fields(await self._ask(f"COMMIT {topic} {group} {partition} {offset}"))

    async def position(self, group: str, topic: str, partition: int) -> int | None:
        """Return the next offset to read, 0 if nothing was committed, or None if the group does not exist."""
        try:
            reply = fields(await self._ask(f"FETCH_OFFSET topic={topic} partition={partition} group={group}"))
        except Missing as error:
            if error.code is not ErrorCode.GROUP_MISSING:
                raise
            return None
        return number(reply, "offset")


class _Connection(FramedConnection):
    """One connection. A reply is the body of a frame."""

    BODY_BYTES_MAX = FRAME_BYTES_MAX

    async def ask_all(self, bodies: Sequence[bytes]) -> list[bytes]:
        """Send several requests at once, and return the bodies of their replies. Raises Unavailable."""
        return await self.exchange(b"".join(map(frame, bodies)), len(bodies))

    async def ask(self, body: bytes) -> bytes:
        """Send one request, and return the body of its reply. Raises Unavailable."""
        (reply,) = await self.ask_all([body])
        return reply


class CursusClient(Scope):
    """A client that implements ``WireClient`` as far as the protocol supports it. Create one with ``open``.

    The protocol does not distinguish a missing key from an empty one. If a topic is missing, the first ``produce``
    creates it, as in Cursus's own clients.
    """

    __slots__ = ("_address", "_closed", "_connection", "_counts", "_groups", "_idle", "_round_robin", "_waiting")

    def __init__(self, connection: _Connection, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._connection: _Connection = connection
        self._address: Final = host, port, tls
        self._groups: Final = Groups(self._ask)
        self._counts: dict[str, int] = {}
        self._idle: list[_Connection] = []
        self._waiting: set[_Connection] = set()
        self._round_robin = 0
        self._closed = False

    @classmethod
    async def open(cls, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> CursusClient:
        """Connect, within ten seconds.

        Args:
            host: name or address of the broker.
            port: port of its Cursus listener.
            tls: how to verify the broker (``client.address.client_context``); None connects without TLS.

        Raises:
            Unavailable: the broker is not reachable.
        """
        return cls(await _open(host, port, tls), host, port, tls)

    @property
    def abilities(self) -> frozenset[Ability]:
        """The features of the Cursus protocol."""
        return ABILITIES

    async def close(self) -> None:
        """Close all connections. Pending calls fail with Unavailable."""
        self._closed = True
        for connection in (self._connection, *self._idle, *self._waiting):
            connection.fail(Unavailable(ErrorCode.STOPPING, "client was closed"))

    async def _ask(self, text: str) -> bytes:
        return await self._connection.ask(enveloped("", text.encode()))

    async def create_topic(self, topic: str, partition_count: int) -> None:
        """Create a topic. If it exists already with fewer partitions, add partitions."""
        reply = fields(await self._ask(f"CREATE topic={_topic(topic)} partitions={partition_count}"))
        self._counts[topic] = number(reply, "partitions")

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic and its records. Raises Missing(TOPIC_MISSING)."""
        fields(await self._ask(f"DELETE topic={_topic(topic)}"))
        self._counts.pop(topic, None)

    async def topics(self) -> list[TopicInfo]:
        """Return all topics, with one request per topic for its partition count. ``id`` is empty."""
        # Without PROTOCOL_INFO, it is unknown in which dialect the broker replies to LIST.
        replies = await self._connection.ask_all([b"PROTOCOL_INFO", b"LIST"])
        names = fields(replies[-1]).get("topics", "")
        found = []
        for name in map(topic_name, filter(None, names.split(","))):
            try:
                found.append(TopicInfo(name, b"", await self._count(name)))
            except Missing:
                continue  # deleted since it was listed
        return found

    async def _count(self, topic: str) -> int:
        """Return the number of partitions. Raises Missing."""
        return number(fields(await self._ask(f"METADATA topic={_topic(topic)}")), "partitions")

    async def bounds(self, topic: str) -> list[PartitionBounds]:
        """Return the first and next offset of each partition.

        Incarnation and epoch are 0, because the protocol has neither.
        """
        reply = fields(await self._ask(f"LIST_OFFSETS topic={_topic(topic)}"))
        found = []
        for entry in filter(None, reply.get("offsets", "").split(",")):
            partition, *pairs = entry.split(":")
            named = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            first, following = number(named, "earliest"), number(named, "leo")
            found.append(PartitionBounds(number({"P": partition[1:]}, "P"), 0, 0, first, following))
        return found

    async def offset_at(self, topic: str, partition: int, time_us: int) -> int:
        """Raise Invalid(INVALID_REQUEST): the protocol cannot look records up by time."""
        raise cannot(WIRE, "look records up by time")

    async def produce(
        self, topic: str, records: Sequence[Record], *, partition: int | None = None, level: Level = Level.WRITTEN
    ) -> list[Produced]:
        """Append records, and return their offsets. See ``WireClient``.

        A missing topic is created with three partitions. Records without a key are distributed round-robin. Raises
        Invalid for null values, headers, ids and times, which the protocol does not support.
        """
        if not records:
            return []
        for attempt in range(2):
            if topic not in self._counts:
                self._counts[topic] = await self._ensure(topic)
            rows_of = self._split(topic, records, partition)
            try:
                return await self._send(topic, records, rows_of, level)
            except Missing:
                del self._counts[topic]  # the topic was deleted, and perhaps created again with another partition count
                if attempt or len(rows_of) > 1:
                    raise
        raise AssertionError("the second attempt returns or raises")

    async def _ensure(self, topic: str) -> int:
        try:
            return await self._count(topic)
        except Missing:
            await self.create_topic(topic, DEFAULT_PARTITION_COUNT)
            return self._counts[topic]

    def _split(self, topic: str, records: Sequence[Record], partition: int | None) -> dict[int, list[int]]:
        """Return the indexes of the records for each partition. Records without a key are distributed round-robin."""
        if partition is not None:
            return {partition: list(range(len(records)))}
        count = self._counts[topic]
        keys = [record.key or b"" for record in records]
        spans, at = array("q"), 0
        for key in keys:
            spans.extend((at, len(key), 0, 0))
            at += len(key)
        found = partitions_of(b"".join(keys), memoryview(spans), count, KeyHash.FNV32)
        rows_of: dict[int, list[int]] = {}
        for row, (key, chosen) in enumerate(zip(keys, found, strict=True)):
            if not key:
                chosen, self._round_robin = self._round_robin % count, self._round_robin + 1
            rows_of.setdefault(int(chosen), []).append(row)
        return rows_of

    async def _send(
        self, topic: str, records: Sequence[Record], rows_of: dict[int, list[int]], level: Level
    ) -> list[Produced]:
        sent = [(partition, rows) for partition, all_rows in rows_of.items() for rows in _batches(records, all_rows)]
        bodies = [
            encode_batch(_topic(topic), partition, _ACKS[level], [records[row] for row in rows])
            for partition, rows in sent
        ]
        produced = [Produced(0, 0)] * len(records)
        for (partition, rows), reply in zip(sent, await self._connection.ask_all(bodies), strict=True):
            after = last_offset(reply) + 1
            for index, row in enumerate(rows):
                produced[row] = Produced(partition, after - len(rows) + index)
        return produced

    async def fetch(
        self, topic: str, partition: int, offset: int, *, records_max: int = FETCH_RECORDS, wait_ms: int = 0
    ) -> list[Record]:
        """Return records from an offset on. See ``WireClient``. A request with ``wait_ms`` uses its own connection."""
        if records_max < 1:
            return []
        most = min(records_max, 100_000)
        partition_fields = (
            f"CONSUME topic={_topic(topic)} partition={partition} offset={offset} member={MEMBER} batch={most}"
        )
        if wait_ms <= 0:
            return from_offset(_records(await self._ask(partition_fields)), offset)
        end = asyncio.get_running_loop().time() + wait_ms / 1000
        connection = self._idle.pop() if self._idle else await _open(*self._address)
        connection.expect_late_replies()
        self._waiting.add(connection)
        try:
            while True:
                left_ms = int(1000 * (end - asyncio.get_running_loop().time()))
                text = f"{partition_fields} wait_ms={max(0, min(left_ms, WAIT_MS_MAX))}"
                records = from_offset(_records(await connection.ask(enveloped("", text.encode()))), offset)
                if records or left_ms <= WAIT_MS_MAX:
                    self._idle.append(connection)
                    return records
        finally:
            self._waiting.discard(connection)
            if connection not in self._idle or self._closed:
                connection.fail(Unavailable(ErrorCode.STOPPING, "a read was cancelled"))

    async def join(self, group: str, topic: str, member: str, *, assignor: Assignor | None = None) -> Membership:
        """Join a group. See ``WireClient``. The protocol has only the assignor ``range``. Others are rejected."""
        if assignor is not None and assignor is not Assignor.RANGE:
            raise cannot(WIRE, "choose an assignor")
        return await self._groups.join(_word(group), _topic(topic), _word(member))

    async def heartbeat(self, group: str, topic: str, member: str, generation: int) -> Membership:
        """Send a heartbeat, and return the assignment.

        Raises Conflict(GENERATION_STALE) if the assignment has changed: join again.
        """
        return await self._groups.heartbeat(_word(group), _topic(topic), _word(member), generation)

    async def leave(self, group: str, topic: str, member: str, generation: int) -> None:
        """Leave a group. Other members get its partitions."""
        await self._groups.leave(_word(group), _topic(topic), _word(member), generation)

    async def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str = "", generation: int = -1
    ) -> None:
        """Commit a group's next offset to read. See ``WireClient``.

        Without ``member``, the broker does not check the generation.
        """
        await self._groups.commit(_word(group), _topic(topic), partition, offset, member=member, generation=generation)

    async def position(self, group: str, topic: str, partition: int) -> int | None:
        """Return a group's next offset to read.

        The result is 0 if nothing was committed, because the protocol does not distinguish this from offset 0.
        """
        return await self._groups.position(_word(group), _topic(topic), partition)


async def _open(host: str, port: int, tls: ssl.SSLContext | None) -> _Connection:
    return await open_connection(_Connection, host, port, timeout_s=OPEN_TIMEOUT_S, tls=tls)


def _records(reply: bytes) -> list[Record]:
    if reply.startswith(b"ERROR:"):
        raise error_of(decoded(reply))
    return decode_batch(reply)


def _batches(records: Sequence[Record], rows: list[int]) -> list[list[int]]:
    """Split rows into batches of a size that every broker accepts."""
    found: list[list[int]] = [[]]
    size = 0
    for row in rows:
        length = len(records[row].value or b"")
        if found[-1] and (size + length > BATCH_BYTES_MAX or len(found[-1]) >= BATCH_RECORDS_MAX):
            found.append([])
            size = 0
        found[-1].append(row)
        size += length
    return found


def _topic(topic: str) -> str:
    check_topic_name(TopicName.parse(topic))
    return topic_word(topic)


def _word(name: str) -> str:
    if not name or name.split() != [name] or not name.isprintable():
        raise Invalid(ErrorCode.INVALID_NAME, f"name must be one word name={name!r}")
    return name
