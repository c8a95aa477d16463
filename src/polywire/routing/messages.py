"""Messages that the processes of one broker send to each other.

A link begins with ``MAGIC`` and the shared key of the processes. Then both sides send frames like those of the
`polywire` protocol: a prefix, a head in MessagePack, and a payload. A response has the correlation id of its request.
Responses can arrive in any order.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, TypeVar

import msgspec

from polywire.broker.changes import TopicState
from polywire.broker.owners import UNOWNED
from polywire.errors import PeerError
from polywire.protocols.polywire.codec import FRAME_BYTES_MAX, PREFIX
from polywire.protocols.runtime.forwarded import Sender
from polywire.types import Buffer

MAGIC: Final = b"\xf3LINK\0\0\1"
# limit for a request: the longest frame of a client, whose head may become longer, and the head before it
REQUEST_BYTES_MAX: Final = FRAME_BYTES_MAX + 64 * 1024

_encoder: Final = msgspec.msgpack.Encoder()
_Head = TypeVar("_Head", bound=msgspec.Struct)


class Verb(IntEnum):
    """Types of requests. Each gets one response, unless stated otherwise."""

    SUBSCRIBE = 1
    """Report all topics of this shard, and from then on each change. Each report is a response with ``Topics``."""
    FIND = 2
    """Report the state of a topic to subscribers, and then respond."""
    CREATE = 3
    """Create a topic with the default settings if it does not exist, report it to subscribers, and then respond."""
    PRODUCE = 4
    FETCH = 5
    BOUNDS = 6
    LOOK_UP = 7
    WAIT = 8
    """Respond when the record at an offset can be read, or earlier."""
    CANCEL = 9
    """Cancel a call. Neither the call nor this request gets a response."""
    FORWARD = 10
    """Execute a request of the `polywire` protocol.

    The payload is its frame; the payload of the response is the response's frame.
    """
    CALL = 11
    """Call a method of the broker. The payloads are the arguments and the result (``calls``)."""
    PROCESS = 12
    """Report the address and the start number of the process."""

    EXECUTE = 13
    """Execute requests of a client in a session of their protocol. The payload is the requests, or the responses."""
    ALL_BOUNDS = 14
    """Report the ``Bounds`` of several partitions."""
    CREDIT = 15
    """Allow more bytes of responses to an EXECUTE, because the client has taken as many. This has no response."""
    APPLIED = 16
    """Confirm that this process has applied the values of the oldest unconfirmed report. This has no response."""


class Empty(msgspec.Struct, frozen=True, array_like=True):
    pass


class Subscribe(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of SUBSCRIBE.

    Attributes:
        values: whether the reports are to have values, too (``Value``).
    """

    values: bool


class Value(msgspec.Struct, frozen=True, array_like=True):
    """One value of a protocol's state (``wire_state``). ``value`` is None if it was removed."""

    wire: str
    key: str
    value: bytes | None


class Topics(msgspec.Struct, frozen=True, array_like=True):
    """A report about the topics of a shard, and the state of protocols.

    Attributes:
        topics: topics that were created or changed.
        deleted: ids of deleted topics.
        begins: whether this is the first report over the link. It has all ``values``.
        ends: whether all topics were reported since ``begins``. Topics that were not reported do not exist any more.
        values: values of protocols' state that were stored or removed.
    """

    topics: tuple[TopicState, ...]
    deleted: tuple[bytes, ...] = ()
    begins: bool = False
    ends: bool = False
    values: tuple[Value, ...] = ()


class By(msgspec.Struct, frozen=True, array_like=True):
    """The client on whose behalf a call is made. The sending process has authenticated and authorized it.

    Attributes:
        user: name of the user; empty if there is none.
        owner: who is charged for created objects: the id of the user, or the number of the client's address.
        is_broker: whether the broker itself makes the call.
    """

    user: str = ""
    owner: int = UNOWNED
    is_broker: bool = False


NO_USER: Final = By()
BROKER: Final = By(is_broker=True)


class Named(msgspec.Struct, frozen=True, array_like=True):
    """A topic by full name. ``by`` is the client for which CREATE creates it."""

    name: str
    by: By = NO_USER


class PartitionId(msgspec.Struct, frozen=True, array_like=True):
    """A partition: id of the topic, and partition number."""

    topic_id: bytes
    partition: int


class Produce(PartitionId, frozen=True):
    """A batch to append to a partition. The payload is the batch as it is stored."""

    level: int
    by: By


class Appended(msgspec.Struct, frozen=True, array_like=True):
    """An offset: of the first appended record, or the result of LOOK_UP."""

    offset: int


class Fetch(PartitionId, frozen=True):
    """A read from a partition; see ``PartitionLog.read``."""

    offset: int
    bytes_max: int
    offset_end: int | None


class Wait(PartitionId, frozen=True):
    """A partition, and the offset of the record to wait for."""

    offset: int


class Cancel(msgspec.Struct, frozen=True, array_like=True):
    """The correlation id of the call to cancel."""

    correlation: int


class Forward(msgspec.Struct, frozen=True, array_like=True):
    """The client of a forwarded request. ``sees_files`` is whether it may learn the paths of segment files."""

    by: By
    sees_files: bool


class Process(msgspec.Struct, frozen=True, array_like=True):
    """A process of the broker.

    Attributes:
        epoch: number of its start.
        host: host that clients connect to; empty if they use the host of their present connection.
        ports: ports that clients connect to, by listener; empty until the process listens.
        cluster_id: cluster id of the Kafka protocol; empty if unknown.
    """

    epoch: int = 0
    host: str = ""
    ports: dict[str, int] = {}
    cluster_id: str = ""


class Execute(msgspec.Struct, frozen=True, array_like=True):
    """The protocol and the client of the requests in the payload.

    If ``in_pieces``, long responses may be split into several frames.
    """

    protocol: str
    sender: Sender
    in_pieces: bool = False


class Credit(msgspec.Struct, frozen=True, array_like=True):
    """The correlation id of an EXECUTE, and how many more bytes may be sent."""

    correlation: int
    count: int


class Responses(msgspec.Struct, frozen=True, array_like=True):
    """The head of a response to EXECUTE. If ``more``, further frames follow."""

    more: bool = False


class Call(msgspec.Struct, frozen=True, array_like=True):
    """The name of the method to call."""

    method: str


class Bounds(msgspec.Struct, frozen=True, array_like=True):
    """Offsets and size of a partition; see ``PartitionLog``."""

    first_offset: int
    next_offset: int
    readable_offset: int
    next_address: int
    stored_bytes: int


class PartitionIds(msgspec.Struct, frozen=True, array_like=True):
    ids: tuple[PartitionId, ...]


class AllBounds(msgspec.Struct, frozen=True, array_like=True):
    """The bounds of the requested partitions, in the same order. They are None for a deleted partition."""

    bounds: tuple[Bounds | None, ...]


class Fetched(msgspec.Struct, frozen=True, array_like=True):
    """The result of a FETCH. The payload is batches as they are stored.

    Attributes:
        next_offset: offset after the last record in the payload.
        readable_offset: end of the readable records at the time of the read.
        bounds: the partition after the read.
    """

    next_offset: int
    readable_offset: int
    bounds: Bounds


class Key(IntEnum):
    """The kinds of searches in a partition."""

    TIME = 0
    """Return the first offset at or after a time."""
    ADDRESS = 1
    """Return the offset of the record at an address."""
    COVERED_ADDRESS = 2
    """Return the offset of the record that contains an address."""
    OFFSET = 3
    """Return the address of the record at an offset."""
    EPOCH = 4
    """Return the offset after the last record of an epoch."""


class LookUp(PartitionId, frozen=True):
    """A search in a partition. ``key`` is a ``Key``."""

    key: int
    value: int


REQUESTS: Final[dict[int, type[msgspec.Struct]]] = {
    Verb.SUBSCRIBE: Subscribe,
    Verb.FIND: Named,
    Verb.CREATE: Named,
    Verb.PRODUCE: Produce,
    Verb.FETCH: Fetch,
    Verb.BOUNDS: PartitionId,
    Verb.LOOK_UP: LookUp,
    Verb.WAIT: Wait,
    Verb.CANCEL: Cancel,
    Verb.FORWARD: Forward,
    Verb.CALL: Call,
    Verb.PROCESS: Empty,
    Verb.EXECUTE: Execute,
    Verb.ALL_BOUNDS: PartitionIds,
    Verb.CREDIT: Credit,
    Verb.APPLIED: Empty,
}


def encode(verb: int, correlation: int, head: msgspec.Struct, *, payload_bytes: int = 0, flags: int = 0) -> bytes:
    """Return the prefix and the head of a frame. The caller sends the payload after them."""
    body = _encoder.encode(head)
    return PREFIX.pack(len(body) + payload_bytes, verb, flags, 0, correlation, len(body)) + body


def decode(head: Buffer, kind: type[_Head]) -> _Head:
    """Decode a head.

    Raises PeerError(fatal=True) if it is invalid, for example because the other process has another version.
    """
    try:
        return msgspec.msgpack.decode(head, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"link has an invalid head kind={kind.__name__} reason={error}", fatal=True) from None
