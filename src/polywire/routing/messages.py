"""Messages between the processes of one broker.

A link opens with ``MAGIC`` and the key that the processes share. Then both sides send frames like those of the `polywire`
protocol: a prefix, a head as MessagePack, and a payload. A request has a correlation id, which its response repeats.
Responses have any order.
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
    """Requests."""

    SUBSCRIBE = 1
    """Send all topics of this shard, and from then on each change. Every response is ``Topics``."""
    FIND = 2
    """Answer after sending the present state of a topic to subscribers."""
    CREATE = 3
    """Create a topic with the default settings, if it does not exist. Answered like FIND."""
    PRODUCE = 4
    FETCH = 5
    BOUNDS = 6
    LOOK_UP = 7
    WAIT = 8
    """Answered when the record at an offset may be readable."""
    CANCEL = 9
    """End a call, which then gets no answer. This has none, either."""
    FORWARD = 10
    """Execute a request of the `polywire` protocol. The payload is its frame, and that of the answer its response."""
    CALL = 11
    """Execute a method of the broker. The payload is its arguments, and that of the answer its result (``calls``)."""
    PROCESS = 12
    """Report where clients reach the process, and its epoch."""

    EXECUTE = 13
    """Execute requests of a client in a session of their protocol. The payload is the requests or their responses."""
    ALL_BOUNDS = 14
    """BOUNDS of several partitions."""
    CREDIT = 15
    """Count bytes of the responses to EXECUTE that the client has taken. This has no answer."""


class Empty(msgspec.Struct, frozen=True, array_like=True):
    """A head without content."""


class Value(msgspec.Struct, frozen=True, array_like=True):
    """A value that a protocol has stored; None if it was removed."""

    wire: str
    key: str
    value: bytes | None


class Topics(msgspec.Struct, frozen=True, array_like=True):
    """States of topics, ids of deleted topics, and values of protocols.

    begins: the first report over a link, which has all values. ends: all topics were reported since then; others do not
    exist any more.
    """

    topics: tuple[TopicState, ...]
    deleted: tuple[bytes, ...] = ()
    begins: bool = False
    ends: bool = False
    values: tuple[Value, ...] = ()


class By(msgspec.Struct, frozen=True, array_like=True):
    """The caller, whom the sending process has authenticated and authorized.

    user: name of the user; empty without one. owner: number of a client's address, if it is no user who owns what the
    client creates. Numbers of users differ between processes. is_broker: the broker itself calls, not a client.
    """

    user: str = ""
    owner: int = UNOWNED
    is_broker: bool = False


NO_USER: Final = By()
BROKER: Final = By(is_broker=True)


class Named(msgspec.Struct, frozen=True, array_like=True):
    """A topic by full name. by: for CREATE, the user who is charged for it."""

    name: str
    by: By = NO_USER


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A partition."""

    topic_id: bytes
    partition: int


class Produce(Place, frozen=True):
    """A stored batch, which is the payload."""

    level: int
    by: By


class Appended(msgspec.Struct, frozen=True, array_like=True):
    """The result of PRODUCE and LOOK_UP."""

    offset: int


class Fetch(Place, frozen=True):
    """A read; see ``PartitionLog.read``."""

    offset: int
    bytes_max: int
    offset_end: int | None


class Wait(Place, frozen=True):
    """A partition, and the offset of the record to wait for."""

    offset: int


class Cancel(msgspec.Struct, frozen=True, array_like=True):
    """The correlation id of a call."""

    correlation: int


class Forward(msgspec.Struct, frozen=True, array_like=True):
    """A request on behalf of a client. sees_files: whether the client may learn where files are stored."""

    by: By
    sees_files: bool


class Process(msgspec.Struct, frozen=True, array_like=True):
    """A process of the broker.

    epoch: number of its start. host: advertised host, empty for the host that a client has connected to. ports: its
    ports by listener, empty until it listens. cluster_id: of the Kafka protocol, empty if unknown.
    """

    epoch: int = 0
    host: str = ""
    ports: dict[str, int] = {}
    cluster_id: str = ""


class Execute(msgspec.Struct, frozen=True, array_like=True):
    """The protocol of requests, and who sent them. in_pieces: whether long responses may be sent in several frames."""

    protocol: str
    sender: Sender
    in_pieces: bool = False


class Credit(msgspec.Struct, frozen=True, array_like=True):
    """The correlation id of an EXECUTE, and the number of bytes."""

    correlation: int
    count: int


class Responses(msgspec.Struct, frozen=True, array_like=True):
    """The head of the answer to EXECUTE. more: other frames with responses follow."""

    more: bool = False


class Call(msgspec.Struct, frozen=True, array_like=True):
    """The name of a method."""

    method: str


class Bounds(msgspec.Struct, frozen=True, array_like=True):
    """The present state of a partition; see ``PartitionLog``."""

    first_offset: int
    next_offset: int
    readable_offset: int
    next_address: int
    stored_bytes: int


class Places(msgspec.Struct, frozen=True, array_like=True):
    """Several partitions."""

    places: tuple[Place, ...]


class AllBounds(msgspec.Struct, frozen=True, array_like=True):
    """The present states of several partitions. It is None for a deleted one."""

    bounds: tuple[Bounds | None, ...]


class Fetched(msgspec.Struct, frozen=True, array_like=True):
    """The result of FETCH: stored batches, which are the payload.

    next_offset: offset after their last record. bounds: the state of the partition after the read.
    """

    next_offset: int
    readable_offset: int
    bounds: Bounds


class Key(IntEnum):
    """The kind of value in a LOOK_UP."""

    TIME = 0
    """The offset at a time."""
    ADDRESS = 1
    """The offset of an address."""
    COVERED_ADDRESS = 2
    """The offset of the record that covers an address."""
    OFFSET = 3
    """The address of an offset."""
    EPOCH = 4
    """The offset at which an epoch ends."""


class LookUp(Place, frozen=True):
    """A search in one partition."""

    key: int
    value: int


REQUESTS: Final[dict[int, type[msgspec.Struct]]] = {
    Verb.SUBSCRIBE: Empty,
    Verb.FIND: Named,
    Verb.CREATE: Named,
    Verb.PRODUCE: Produce,
    Verb.FETCH: Fetch,
    Verb.BOUNDS: Place,
    Verb.LOOK_UP: LookUp,
    Verb.WAIT: Wait,
    Verb.CANCEL: Cancel,
    Verb.FORWARD: Forward,
    Verb.CALL: Call,
    Verb.PROCESS: Empty,
    Verb.EXECUTE: Execute,
    Verb.ALL_BOUNDS: Places,
    Verb.CREDIT: Credit,
}


def encode(verb: int, correlation: int, head: msgspec.Struct, *, payload_bytes: int = 0, flags: int = 0) -> bytes:
    """Return prefix and head of a frame; the payload follows."""
    body = _encoder.encode(head)
    return PREFIX.pack(len(body) + payload_bytes, verb, flags, 0, correlation, len(body)) + body


def decode(head: Buffer, kind: type[_Head]) -> _Head:
    """Decode a head. Raises PeerError(fatal=True) if the other process has another version."""
    try:
        return msgspec.msgpack.decode(head, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"link has an invalid head kind={kind.__name__} reason={error}", fatal=True) from None
