"""Parse batch frames in all their layouts, and format acknowledgements (spec: cursus#batches, cursus#writing).

A frame does not say which layout it has, so the layouts are tried in order (spec: cursus#older-batch-layouts).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from struct import Struct
from typing import Final

from polywire.protocols.cursus import decoder
from polywire.protocols.cursus.messages import PREFIX_BYTES, Refused, decoded, encoded, quote, topic_name
from polywire.protocols.cursus.scratch import ScratchArrays
from polywire.types import Buffer, Level

LEVELS: Final = {"": Level.WRITTEN, "0": Level.MEMORY, "1": Level.WRITTEN, "-1": Level.SYNCED, "all": Level.SYNCED}
"""Durability levels by ``acks`` in lower case (concepts: durability#levels)."""

DIGITS_MAX: Final = 10  # digits of a partition number

_OLDER: Final = (decoder.APRIL, decoder.DECEMBER)
_LAYOUTS: Final = (decoder.MODERN, decoder.POSITIONAL, *_OLDER)
_UNSIGNED: Final = (1 << 64) - 1
_RANGE: Final = Struct(">QQi")  # seqStart, seqEnd, count
ACKED: Final = b'{"status":"OK","last_offset":%d,"producer_epoch":%d,"producer_id":%b,"seq_start":%d,"seq_end":%d,"leader":"%b","error":""}'


@dataclass(frozen=True, slots=True)
class Batch:
    """The fields of a batch, and properties that all of its messages share. The messages are in the scratch arrays.

    Attributes:
        producer, epoch: those of the first message.
        last_producer, last_epoch: those of the last message, for the acknowledgement.
        first_sequence, last_sequence: sequence numbers, for the acknowledgement.
    """

    topic: str
    partition: int
    acks: str
    idempotent: bool
    count: int
    traits: int
    producer: bytes
    epoch: int
    first_sequence: int
    last_sequence: int
    last_producer: bytes
    last_epoch: int


def read_batch(body: Buffer, scratch: ScratchArrays) -> Batch:
    """Decode a batch in the first layout that fits, the current one or an older one (spec: cursus#older-batch-layouts).

    Raises Refused ``batch_decode_failed`` if no layout fits.
    """
    scratch.reserve(len(body))
    layouts = (decoder.POSITIONAL, decoder.MODERN, *_OLDER) if _begins_positional(body) else _LAYOUTS
    for layout in layouts:
        if not decoder.scan(body, layout, scratch.head, scratch.spans, scratch.details) and _plausible(
            body, scratch.head
        ):
            return _batch(body, scratch.head)
    fault = decoder.scan(body, decoder.MODERN, scratch.head, scratch.spans, scratch.details)
    if fault < 0:
        raise Refused("batch_decode_failed", f"reason={quote(_fault(-1 - fault, scratch.head[decoder.FAULT_MESSAGE]))}")
    return _batch(body, scratch.head)


def _begins_positional(body: Buffer) -> bool:
    """Return whether the partition field consists of decimal digits, as in the layout of older clients.

    In the current layout, these bytes would be a partition number above 65,536, which no topic has.
    """
    view = memoryview(body)
    at = 4 + int.from_bytes(view[2:4], "big")
    size = int.from_bytes(view[at : at + 2], "big")
    return 1 <= size <= DIGITS_MAX and bytes(view[at + 2 : at + 2 + size]).isdigit()


def _plausible(body: Buffer, head: memoryview) -> bool:
    return head[decoder.IDEMPOTENT] <= 1 and _text(body, head, decoder.ACKS_AT).lower() in LEVELS


def _fault(field: int, message: int) -> str:
    if field == decoder.COUNT_FAULT:
        return f"invalid message count: 0 to {decoder.RECORDS_MAX} messages"
    place = f"message[{message}] " if message >= 0 else ""
    name = decoder.FIELDS[field]
    length = " length" if name in ("topic", "acks", "producer ID", "key", "payload", "event type", "metadata") else ""
    return f"failed to read {place}{name}{length}: unexpected EOF"


def _batch(body: Buffer, head: memoryview) -> Batch:
    return Batch(
        topic=topic_name(_text(body, head, decoder.TOPIC_AT)),
        partition=head[decoder.PARTITION],
        acks=_text(body, head, decoder.ACKS_AT),
        idempotent=head[decoder.IDEMPOTENT] != 0,
        count=head[decoder.COUNT],
        traits=head[decoder.TRAITS],
        producer=_bytes(body, head, decoder.PRODUCER_AT),
        epoch=head[decoder.EPOCH],
        first_sequence=head[decoder.FIRST_SEQUENCE] & _UNSIGNED,
        last_sequence=head[decoder.LAST_SEQUENCE] & _UNSIGNED,
        last_producer=_bytes(body, head, decoder.LAST_AT),
        last_epoch=head[decoder.LAST_EPOCH],
    )


def _bytes(body: Buffer, head: memoryview, word: int) -> bytes:
    return bytes(memoryview(body)[head[word] : head[word] + head[word + 1]])


def _text(body: Buffer, head: memoryview, word: int) -> str:
    return decoded(_bytes(body, head, word))


class Status(Enum):
    """How much of a batch was stored: all, the messages before a rejected one, or nothing."""

    OK = "OK"
    PARTIAL = "PARTIAL"
    ERROR = "ERROR"


def quoted(producer: bytes) -> bytes:
    """Return a producer's id as acknowledgements contain it."""
    return encoded(quote(decoded(producer)))


def acknowledged(
    status: Status,
    *,
    last_offset: int,
    epoch: int,
    producer: bytes,
    first_sequence: int,
    last_sequence: int,
    leader: str,
    error: str = "",
) -> bytes:
    """Return the acknowledgement of a batch (spec: cursus#acknowledgement).

    Args:
        last_offset, last_sequence: those of the last message that was stored.
        error: why messages were not stored; empty if all were.
    """
    if status is Status.OK:
        return ACKED % (last_offset, epoch, quoted(producer), first_sequence, last_sequence, encoded(leader))
    reply = {
        "status": status.value,
        "last_offset": last_offset,
        "producer_epoch": epoch,
        "producer_id": decoded(producer),
        "seq_start": first_sequence,
        "seq_end": last_sequence,
        "leader": leader,
        "error": error,
    }
    return encoded(json.dumps(reply, separators=(",", ":"), ensure_ascii=False))


def opening(topic: str, partition: int, *, positional: bool) -> bytes:
    """Return the beginning of a batch for a consumer, up to its sequence numbers (spec: cursus#consume).

    The layout is that of older clients if ``positional``, otherwise the current one.
    """
    if positional:
        number = encoded(str(partition))
        between = len(number).to_bytes(2, "big") + number + b"\0\x011"
    else:
        between = partition.to_bytes(4, "big", signed=True) + b"\x011"
    name = encoded(topic)
    return b"\xba\x7c" + len(name).to_bytes(2, "big") + name + between + b"\0"


def head_bytes(begin: bytes) -> int:
    """Return the number of bytes before the messages of a batch that begins with ``begin``, with the frame's length."""
    return PREFIX_BYTES + len(begin) + _RANGE.size


def put_head(out: bytearray, begin: bytes, *, size: int, first: int, last: int, count: int) -> None:
    """Write everything before the messages of a batch. Its messages are already in ``out``.

    Args:
        begin: the result of ``opening``.
        size: size of the frame in bytes.
        first, last: sequence numbers of the first and last message.
    """
    out[:PREFIX_BYTES] = (size - PREFIX_BYTES).to_bytes(4, "big")
    end = PREFIX_BYTES + len(begin)
    out[PREFIX_BYTES:end] = begin
    _RANGE.pack_into(out, end, first & _UNSIGNED, last & _UNSIGNED, count)


def empty_batch(begin: bytes) -> bytes:
    return begin + bytes(_RANGE.size)
