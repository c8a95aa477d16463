"""Fuzz the Kafka 0.7 protocol: a session responds or closes, the same however the stream is split.

The client's parsers decode or refuse.

Run as ``python -m tests.fuzz.fuzz_kafka07``; FUZZ_SECONDS limits it, FUZZ_SEED repeats a run. The seed is printed
first.
"""

from __future__ import annotations

import random
import struct
from typing import Final

from polywire.errors import PeerError
from polywire.protocols.kafka07 import decoder
from polywire.protocols.kafka07.compression import Expander, wrap
from polywire.protocols.kafka07.messages import (
    CompressionCodec,
    FetchEntry,
    encode_fetch,
    encode_message,
    encode_multifetch,
    encode_multiproduce,
    encode_offsets,
    encode_produce,
    encode_set,
    parse_offsets_answer,
    split_multifetch_answer,
)
from tests.fuzz.chance import cuts_of, damaged, fuzz
from tests.unit.protocols.kafka07.dialogue import World

STREAMS: Final = 8  # of a round, one after the other to the same broker
INPUTS: Final = 2 * STREAMS
FRAMES_MAX: Final = 10
PLAIN: Final = encode_set([b"one", b"", b"three" * 20]) + encode_message(b"old", 0)
SETS: Final = [
    PLAIN,
    b"",
    encode_message(b"x", 0),
    wrap(PLAIN, CompressionCodec.GZIP),
    wrap(PLAIN, CompressionCodec.SNAPPY),
    wrap(PLAIN + wrap(PLAIN, CompressionCodec.SNAPPY), CompressionCodec.GZIP),
]
ODD: Final = [struct.pack(">i", number) for number in (-1, 0, 1, 5, 2**31 - 1, 1_000_001)] + [b"\xff", b"\0", b"\1\1"]


def good(chance: random.Random) -> bytes:
    """Return one well-formed frame."""
    topic, partition = chance.choice([b"t", b"u", b"some.topic"]), chance.randrange(3)
    address, size = chance.choice([0, 13, 500, -1, 2**40]), chance.choice([0, 3, 20, 1000, 1 << 20])
    match chance.randrange(6):
        case 0 | 1:
            return encode_produce(topic, partition, chance.choice(SETS))
        case 2:
            return encode_multiproduce([(topic, number % 3, chance.choice(SETS)) for number in range(3)])
        case 3:
            return encode_fetch(topic, partition, address, size)
        case 4:
            return encode_multifetch([FetchEntry(topic, number, address, size) for number in range(4)])
        case _:
            return encode_offsets(topic, partition, chance.choice([-1, -2, 0, 10**12, 2**62]), chance.randrange(3))


def mutated(chance: random.Random) -> bytes:
    """Return a stream of valid frames with some damage, or none."""
    frames = b"".join(good(chance) for _ in range(chance.randrange(1, FRAMES_MAX)))
    return damaged(frames, chance, times_max=chance.choice((0, 2, 5)), odd=ODD)


def converse(world: World, stream: bytes, cuts: list[int]) -> tuple[bytes, bytes]:
    """Send a stream in pieces and close; return the responses, and what another client reads afterwards."""
    peer = world.connect()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        peer.feed(stream[start:end])
        world.memory.run()
    peer.finish()
    world.memory.run()
    assert peer.closed, "the session did not close after the client's end"
    other = world.connect()
    topics = (b"t", b"u", b"some.topic")
    found = other.ask(encode_multifetch([FetchEntry(t, number, 0, 1 << 20) for t in topics for number in range(3)]))
    for code, part in split_multifetch_answer(found[4:]):
        assert code == 0
        assert decoder.survey(part, 0, len(part))[0], "a broken record was stored"
    return peer.take(), found


def check(stream: bytes, chance: random.Random, whole: World, cut: World) -> None:
    """Check that responses and stored records do not depend on how the stream is split."""
    answers, stored = converse(whole, stream, [])
    at = 0
    while at < len(answers):
        (size,) = struct.unpack_from(">i", answers, at)
        assert size >= 2
        at += 4 + size
    assert at == len(answers), "a response was truncated"
    cuts = cuts_of(stream, chance)
    assert converse(cut, stream, cuts) == (answers, stored), (
        f"split at {cuts} the responses differ stream={stream.hex()}"
    )


def check_parsers(chance: random.Random) -> None:
    """Decode anything with the client's parsers, or get a PeerError, within the limit of expansion."""
    spoilt = bytearray(
        chance.choice([*SETS[3:], struct.pack(">hi", 0, 2) + bytes(16), bytes.fromhex("0000000000060000aabbccdd")])
    )
    for _ in range(chance.randrange(5)):
        spoilt[chance.randrange(len(spoilt))] = chance.randrange(256)
    for parse in (parse_offsets_answer, split_multifetch_answer):
        try:
            parse(bytes(spoilt))
        except PeerError:
            continue
    try:
        Expander(4096).open_set(bytes(spoilt), 0, len(spoilt))
    except PeerError:
        return


def check_all(chance: random.Random) -> None:
    """Run one round."""
    whole, cut = World(), World()
    for _ in range(STREAMS):
        stream = mutated(chance)
        if stream and b"\xff\xff\xff\xff" not in stream:  # a partition of -1 is random
            check(stream, chance, whole, cut)
        elif stream:
            converse(World(), stream, [])
        check_parsers(chance)


if __name__ == "__main__":
    fuzz(check_all)
