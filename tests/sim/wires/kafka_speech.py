"""A client of the Kafka protocol, over the client's side of its codec.

Batches of one producer have consecutive sequences over all of its connections.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import decode_batches, encode_batch
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.messages import Api, WireError
from polywire.records.columns import Record
from polywire.types import Level
from tests.sim.promises import require
from tests.sim.wires.ledger import Owner, Place
from tests.sim.wires.speech import ACTS, GAP, Answer, Speech, Words

VERSIONS: Final = {
    Api.API_VERSIONS: 0,
    Api.INIT_PRODUCER_ID: 1,
    Api.PRODUCE: 8,
    Api.FETCH: 11,
    Api.OFFSET_COMMIT: 7,
    Api.OFFSET_FETCH: 5,
    Api.CONSUMER_GROUP_HEARTBEAT: 1,
    Api.SASL_HANDSHAKE: 1,
    Api.SASL_AUTHENTICATE: 1,
}
FENCED: Final = frozenset(
    {
        WireError.UNKNOWN_MEMBER_ID,
        WireError.FENCED_MEMBER_EPOCH,
        WireError.STALE_MEMBER_EPOCH,
        WireError.ILLEGAL_GENERATION,
        WireError.REBALANCE_IN_PROGRESS,
    }
)
LATER: Final = (
    WireError.KAFKA_STORAGE_ERROR,
    WireError.THROTTLING_QUOTA_EXCEEDED,
    WireError.COORDINATOR_LOAD_IN_PROGRESS,
)
ACKS: Final = {Level.WRITTEN: 1, Level.SYNCED: -1}
FETCH_BYTES_MAX: Final = 1 << 20


@dataclass(slots=True)
class Identity:
    """A producer. sequences: the next one by partition. topic_id: of the topic that it reads as a member."""

    number: int | None = None
    sequences: dict[Place, int] = field(default_factory=dict)
    topic_id: bytes = b""

    def begin(self, number: int | None) -> None:
        """Become another producer."""
        self.number = number
        self.sequences.clear()


class KafkaSpeech(Speech):
    """Implements ``Speech``."""

    words = Words("kafka", ACTS | {"look"})

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._buffer = bytearray()
        self._asked: defaultdict[int, deque[tuple[Api, int]]] = defaultdict(deque)
        """Requests by number: the first of several requests has 0."""

    def _request(self, number: int, api: Api, offset: int = 0, /, **fields: Any) -> bytes:
        self._asked[number].append((api, offset))
        return encode_request(api, VERSIONS[api], number, schema.request(api)(**fields), client_id="simulated")

    def level(self, level: Level) -> Level:
        return max(level, Level.WRITTEN)

    def greeting(self) -> bytes:
        if self._identity.number is not None:
            return b""
        return self._request(0, Api.INIT_PRODUCER_ID, transaction_timeout_ms=1000)

    def sequence(self, place: Place, count: int) -> tuple[int, int] | None:
        identity = self._identity
        if identity.number is None:
            return None
        first = identity.sequences.get(place, 0)
        identity.sequences[place] = first + count
        return identity.number, first

    def give_up(self) -> None:
        self._identity.begin(None)

    def produce(
        self, number: int, place: Place, values: Sequence[bytes], level: Level, sequence: tuple[int, int] | None
    ) -> bytes:
        producer, base = (-1, -1) if sequence is None else sequence
        epoch = -1 if sequence is None else 0
        batch = encode_batch(
            [Record(value) for value in values], producer_id=producer, producer_epoch=epoch, base_sequence=base
        )
        topics = schema.request(Api.PRODUCE).Topics
        one = topics(name=place[0], partitions=[topics.Partitions(index=place[1], records=batch)])
        return self._request(number, Api.PRODUCE, acks=ACKS[level], timeout_ms=1000, topics=[one])

    def fetch(self, number: int, place: Place, offset: int, wait_ms: int) -> bytes:
        topics = schema.request(Api.FETCH).Topics
        part = topics.Partitions(partition=place[1], fetch_offset=offset, partition_max_bytes=FETCH_BYTES_MAX)
        one = topics(topic=place[0], partitions=[part])
        fields = {"max_wait_ms": wait_ms, "min_bytes": 1, "max_bytes": FETCH_BYTES_MAX, "session_epoch": -1}
        return self._request(number, Api.FETCH, offset, replica_id=-1, topics=[one], **fields)

    def commit(self, number: int, owner: Owner, place: Place, offset: int) -> bytes:
        topics = schema.request(Api.OFFSET_COMMIT).Topics
        one = topics(name=place[0], partitions=[topics.Partitions(index=place[1], offset=offset)])
        return self._request(number, Api.OFFSET_COMMIT, group_id=owner[1], generation=-1, member_id="", topics=[one])

    def position(self, number: int, owner: Owner, place: Place) -> bytes:
        one = schema.request(Api.OFFSET_FETCH).Topics(name=place[0], indexes=[place[1]])
        return self._request(number, Api.OFFSET_FETCH, group_id=owner[1], topics=[one])

    def ping(self, number: int) -> bytes:
        return self._request(number, Api.API_VERSIONS)

    def take(self, data: bytes) -> Iterator[Answer]:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 4 and len(buffer) >= 4 + (size := int.from_bytes(buffer[:4], "big")):
            frame = bytes(buffer[4 : 4 + size])
            del buffer[: 4 + size]
            number = int.from_bytes(frame[:4], "big")
            require(self._asked[number], "an answer is to a request", number=number)
            api, offset = self._asked[number].popleft()
            _, body = decode_response(api, VERSIONS[api], frame)
            if number:
                yield self._answer(number, api, offset, body)
            else:
                self._greeted(api, body)

    def _answer(self, number: int, api: Api, offset: int, body: Any) -> Answer:
        """Return the answer in the body of a response."""
        return _answer(number, api, offset, body)

    def _greeted(self, api: Api, body: Any) -> None:
        """Handle the response to the first request."""
        if not body.error:
            self._identity.begin(body.producer_id)


def _answer(number: int, api: Api, offset: int, body: Any) -> Answer:
    if api is Api.API_VERSIONS:
        return Answer(number)
    if error := WireError(getattr(body, "error", 0)):
        return Answer(number, error=error.name, later=error in LATER)
    topics = body.responses if api in (Api.PRODUCE, Api.FETCH) else body.topics
    [[entry]] = [topic.partitions for topic in topics]
    error = WireError(entry.error)
    if error is WireError.DUPLICATE_SEQUENCE_NUMBER:  # stored, and its offset is no longer known
        return Answer(number)
    if error is WireError.OUT_OF_ORDER_SEQUENCE_NUMBER:
        return Answer(number, error=GAP)
    if error:
        is_denied = error is WireError.TOPIC_AUTHORIZATION_FAILED
        return Answer(number, error=error.name, later=error in LATER, is_fenced=error in FENCED, is_denied=is_denied)
    if api is Api.PRODUCE:
        return Answer(number, offset=entry.base_offset)
    if api is Api.FETCH:
        records = [(record.offset, record.value) for record in decode_batches(entry.records or b"", offset=offset)]
        return Answer(number, offset=records[-1][0] + 1 if records else offset, records=records)
    if api is Api.OFFSET_FETCH:
        return Answer(number, offset=None if entry.offset < 0 else entry.offset)
    return Answer(number)
