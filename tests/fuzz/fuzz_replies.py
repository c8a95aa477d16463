"""Fuzz what clients decode: any response of a broker, or of an impostor, is decoded or refused.

Run as ``python -m tests.fuzz.fuzz_replies``; FUZZ_SECONDS limits it, FUZZ_SEED repeats a run. The seed is printed first.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final

from polywire.client import cursus, flux
from polywire.errors import BrokerError, PeerError
from polywire.protocols.iggy import client_codec as iggy
from polywire.protocols.iggy.messages import Refused
from polywire.protocols.kafka07.messages import parse_error, parse_offsets_answer, split_multifetch_answer
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import PREFIX_BYTES, decode_answer, decode_answer_prefix, encode_head
from polywire.protocols.polywire.messages import Head, Verb
from polywire.records.columns import Record
from tests.fuzz.chance import fuzz
from tests.fuzz.decoders import Decoder, one_of_each

CURSUS_BATCH: Final = cursus.encode_batch("t", 0, "1", [Record(b"v", key=b"k"), Record(b"w" * 300, key=b"")])
FLUX_LINES: Final = (
    b"V1|7|OK|messages=0:a,1:b,2:c,x hw=3",
    b"V1|7|OK|messages= hw=0",
    b"V1|x|ERR|BAD_REQUEST|no such topic",
    b"V1|7|OK|messages=18446744073709551615:a,18446744073709551616:b hw=9",
)
FLUX_FIELDS: Final = (b"generation=3 partitions=[0 1 2] member=m", b"generation=-1 partitions=[]")
CURSUS_FIELDS: Final = (
    b'OK generation=3 offset=12 assignments=[0, 1 2] note="a \\" b"',
    b"OK offset=-1 assignments=[]",
    b"ERROR: topic_not_found t",
)
ACKNOWLEDGEMENTS: Final = (
    b'{"status":"OK","last_offset":5}',
    b'{"status":"ERROR","error":"idempotency: gap"}',
    b'{"status":"OK","last_offset":1e300}',
)
HEADS: Final[tuple[tuple[Verb, Head], ...]] = (
    (Verb.PRODUCE, messages.Produced([messages.Appended(0, 0, 1)])),
    (
        Verb.GROUPS,
        messages.GroupList(
            [messages.GroupEntry("t", "g", 3, "range", [messages.MemberEntry("m", "iggy", 5, [0])], [[0, 7]])], False
        ),
    ),
    (Verb.JOIN, messages.Membership(1, [0, 1])),
    (
        Verb.BOUNDS,
        messages.BoundsList([messages.TopicBounds("t", b"id", [messages.PartitionEntry(0, 1, 2, 3, 4, [5])])]),
    ),
    (Verb.PING, messages.Failure(8, 3, "text", 1, 50)),
)
KINDS: Final = (messages.Produced, messages.GroupList, messages.Membership, messages.BoundsList, messages.Failure)
FRAMES: Final = tuple(encode_head(verb, 7, head) for verb, head in HEADS)
STREAM: Final = Struct("<IQIQQ").pack(1, 5, 1, 100, 3) + b"\6stream"
TOPIC: Final = Struct("<IQIIQQ").pack(1, 5, 2, 0, 100, 3) + b"\5topic"
GROUP: Final = Struct("<IIIIIII").pack(1, 3, 1, 9, 2, 0, 2)
POLLED: Final = Struct("<IQI").pack(1, 9, 1) + Struct("<QBQ16sII").pack(0, 1, 5, bytes(16), 0, 14)
MESSAGE: Final = POLLED + b"\1\0\0\0k\2\4\0\0\0text" + Struct("<I").pack(5) + b"value"
OFFSET: Final = Struct("<IQQ").pack(1, 9, 5)
IGGY_READERS: Final[tuple[Callable[[bytes], object], ...]] = (
    iggy.read_streams,
    iggy.read_stream,
    iggy.read_topics,
    iggy.read_topic,
    iggy.read_group,
    iggy.read_client_id,
    iggy.read_offset,
    iggy.read_polled,
)
OLD_OFFSETS: Final = b"\0\0" + Struct(">iqq").pack(2, 0, 5)
OLD_PARTS: Final = b"\0\0" + Struct(">ih").pack(6, 0) + b"abcd" + Struct(">ih").pack(2, 1)


def read_flux(line: bytes) -> None:
    """Decode a reply line, and the content of a CONSUME's or a group's reply."""
    reply = flux.parse_reply(line)
    if reply.error is None:
        text, hw = flux.split_consumed(reply.payload, 0)
        batch = flux.read_records(text, hw)
        assert batch.next == batch.first + len(batch.values)
        if batch.values:
            flux.resolve_boundary(text, batch.rest)


def read_flux_fields(payload: bytes) -> None:
    """Decode the fields of other replies."""
    flux.number(payload, b"generation")
    flux.items(payload, b"partitions")


def read_cursus(body: bytes) -> None:
    """Decode fields, numbers and lists."""
    reported = cursus.fields(body)
    cursus.number(reported, "offset")
    cursus.numbers(reported, "assignments")


def read_polywire(frame: bytes) -> None:
    """Decode a response's prefix, as soon as there are enough bytes."""
    if len(frame) >= PREFIX_BYTES:
        decode_answer_prefix(frame)


def decoded_as(kind: type[Head]) -> Callable[[bytes], object]:
    """Return a decoder of a response's head as one of its kinds."""
    return lambda frame: decode_answer(frame[PREFIX_BYTES:], kind)


def read_old_error(answer: bytes) -> None:
    """Decode the error of a Kafka 0.7 response."""
    parse_error(answer, 0)


DECODERS: Final = (
    Decoder("flux-reply", read_flux, FLUX_LINES, (PeerError,)),
    Decoder("flux-fields", read_flux_fields, FLUX_FIELDS, (PeerError,)),
    Decoder("cursus-fields", read_cursus, CURSUS_FIELDS, (BrokerError,)),
    Decoder("cursus-acknowledgement", cursus.last_offset, ACKNOWLEDGEMENTS, (BrokerError,)),
    Decoder("cursus-batch", cursus.decode_batch, (CURSUS_BATCH,), (BrokerError,)),
    Decoder("polywire-prefix", read_polywire, FRAMES, (PeerError,)),
    *(Decoder(f"polywire-{kind.__name__.lower()}", decoded_as(kind), FRAMES, (PeerError,)) for kind in KINDS),
    *(
        Decoder(f"iggy-{read.__name__}", read, (STREAM, STREAM + TOPIC, TOPIC, GROUP, MESSAGE, OFFSET), (Refused,))
        for read in IGGY_READERS
    ),
    Decoder("kafka07-error", read_old_error, (OLD_OFFSETS, OLD_PARTS), (PeerError,)),
    Decoder("kafka07-offsets", parse_offsets_answer, (OLD_OFFSETS,), (PeerError,)),
    Decoder("kafka07-parts", split_multifetch_answer, (OLD_PARTS,), (PeerError,)),
)
INPUTS: Final = len(DECODERS)  # of a round
check_all = one_of_each(DECODERS)


if __name__ == "__main__":
    fuzz(check_all)
