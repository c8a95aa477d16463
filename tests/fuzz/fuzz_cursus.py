"""Fuzz the Cursus protocol: for any bytes, a session responds or closes as documented, however the stream is split.

Run as ``python -m tests.fuzz.fuzz_cursus``; FUZZ_SECONDS limits it, FUZZ_SEED repeats a run. The seed is printed first.
"""

from __future__ import annotations

import random
import re
import secrets
from array import array
from typing import Final
from unittest.mock import patch

from polywire.client.cursus import decode_batch, fields, last_offset
from polywire.errors import BrokerError, PeerError
from polywire.protocols.cursus import decoder
from polywire.protocols.cursus.compression import algorithm, sniffed
from polywire.protocols.cursus.messages import enveloped, frame
from tests.fuzz.chance import cuts_of, damaged, fuzz
from tests.unit.protocols.cursus.dialogue import Dialogue, World
from tests.unit.protocols.cursus.test_produce import batch, messages

INPUTS: Final = 22  # of a round
FRAMES_MAX: Final = 10
COMMANDS: Final = [
    b"CREATE topic=t partitions=2",
    b"CREATE t 3",
    b"LIST",
    b"LIST topic=t",
    b"DESCRIBE topic=t",
    b"METADATA topic=t",
    b"LIST_OFFSETS topic=t partition=0",
    b"HELP",
    b"PROTOCOL_INFO",
    b"NEGOTIATE version=1 features=*",
    b"PUBLISH topic=t producerId=p partition=0 isIdempotent=true seqNum=1 epoch=2 message=hello there",
    b"PUBLISH t a message",
    b"CONSUME topic=t partition=0 offset=0 member=m wait_ms=100 batch=3",
    b"CONSUME topic=t* partition=0 offset=0 member=m",
    b"CONSUME t 0 0",
    b"STREAM topic=t partition=0 group=g offset=0",
    b"SETGROUP g",
    b"DELETE topic=t",
    b"EXIT",
    b"FOO bar",
    b"JOIN_GROUP topic=t group=g member=A",
    b"JOIN_GROUP topic=t group=g member=A-6410 generation=1",
    b"SYNC_GROUP topic=t group=g member=A-6410 generation=1",
    b"HEARTBEAT t g A A-6410 1",
    b"COMMIT t g 0 5",
    b"COMMIT_OFFSET topic=t partition=0 group=g offset=5 member=A-6410 generation=1",
    b"BATCH_COMMIT topic=t group=g member=A-6410 generation=1 P0:6,P1:7",
    b"FETCH_OFFSET topic=t partition=0 group=g",
    b"LEAVE_GROUP topic=t group=g member=A-6410",
    b"SUBSCRIBE t g",
    b"REGISTER_GROUP topic=t group=h",
    b"LIST_GROUPS",
    b"FIND_COORDINATOR group=g",
    b"CREATE topic=t partitions=2 event_sourcing=true",
    b"APPEND_STREAM topic=t key=k version=1 event_type=T schema_version=2 metadata={} message=event",
    b"APPEND_STREAM topic=t key=k version=2 message=event",
    b"READ_STREAM topic=t key=k from_version=1",
    b"STREAM_VERSION topic=t key=k",
    b"SAVE_SNAPSHOT topic=t key=k version=1 message={}",
    b"READ_SNAPSHOT topic=t key=k",
    b"INIT_PRODUCER_ID transactional_id=T1",
    b"BEGIN_TXN transactional_id=T1 producerId=txn-1f93603db53bfad5 epoch=0",
    b"TXN_PUBLISH transactional_id=T1 topic=t producerId=txn-1f93603db53bfad5 seqNum=1 epoch=0 message=held back",
    b"SEND_OFFSETS_TO_TXN transactional_id=T1 producerId=txn-1f93603db53bfad5 epoch=0 topic=t group=g member=A-6410 generation=1 P0:9",
    b"END_TXN transactional_id=T1 producerId=txn-1f93603db53bfad5 epoch=0 result=commit",
    b"TXN_STATUS txn=T1",
    b"AUTH principal=p token=t",
]
BATCHES: Final = [
    batch("t", 0, messages(1, 2, 3)),
    batch("t", 1, messages(1, epoch=5), acks="all", idempotent=1),
    batch("t", 0, [{"seq": 0, "payload": b"x", "type": "Paid", "schema": 1, "version": 2, "meta": "{}"}], acks="0"),
    batch("t", 0, messages(1, pid="a") + messages(1, pid="b")),
]
ODD: Final = [
    b"=",
    b" ",
    b"message=",
    b"\x00",
    b"\xff",
    b"\xba\x7c",
    b"topic=",
    b"9" * 25,
    b"-1",
    b"\n",
    b"*",
    b"\xe6\x97\xa5",
]


# Pushed batches and a waiting read may come in between.
UNTIMED: Final = re.compile(rb"(?<!_)STREAM|wait_ms", re.IGNORECASE)
LAST: Final = re.compile(rb'"last_offset":[0-9]+,')


def body(chance: random.Random) -> bytes:
    """Return one valid request."""
    match chance.randrange(6):
        case 0 | 1:
            return chance.choice(BATCHES)
        case 2:
            return enveloped(chance.choice(["", "admin", "t"]), chance.choice(COMMANDS))
        case 3:
            return algorithm(chance.choice(["gzip", "lz4", "xerial", "zstd"])).compress(
                chance.choice([*COMMANDS, *BATCHES])
            )
        case _:
            return chance.choice(COMMANDS)


def spoilt(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with some damage, or unchanged."""
    return damaged(data, chance, times_max=chance.choice((0, 1, 4)), odd=ODD)


def converse(stream: bytes, cuts: list[int]) -> tuple[list[bytes], bool]:
    """Send a stream in pieces; return the responses and whether the session closed with an error."""
    world = World()
    world.connect().ask("CREATE topic=t partitions=2")
    peer = Dialogue(world)
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        peer.feed(stream[start:end])
        peer.pass_by()
    world.memory.advance(1.0)
    peer.finish()
    world.memory.advance(0.6 * FRAMES_MAX)  # each write may wait for its topic
    assert peer.closed, "the session did not close after the client's end"
    return peer.take_bodies(), peer.gave_up is not None


def check(chance: random.Random) -> None:
    """Check that responses do not depend on how the stream is split, and that a client decodes or refuses each."""
    bodies = [spoilt(body(chance), chance) for _ in range(chance.randrange(1, FRAMES_MAX))]
    stream = b"".join(map(frame, bodies))
    if chance.randrange(4) == 0:
        stream = spoilt(stream, chance)
    answers, gave_up = converse(stream, [])
    cuts = cuts_of(stream, chance)
    again, gave_up_again = converse(stream, cuts)
    assert gave_up == gave_up_again, f"split at {cuts} the end differs"
    if not any(UNTIMED.search(opened(request)) for request in bodies):
        assert list(map(plain, again)) == list(map(plain, answers)), (
            f"split at {cuts} the responses differ\n{answers}\n{again}"
        )
    for answer in answers:
        understand(answer)


def opened(request: bytes) -> bytes:
    """Decode a request as the session does, as far as possible."""
    packed = sniffed(memoryview(request))
    try:
        return request if packed is None else bytes(packed.expand(memoryview(request), 1 << 20))
    except PeerError:
        return request


def plain(answer: bytes) -> bytes:
    """Remove the end of the partition, which a duplicate is reported as of that moment."""
    return LAST.sub(b"", answer)


def understand(answer: bytes) -> None:
    """Decode with the client's readers, which may raise ``polywire.errors`` only."""
    for read in (decode_batch, fields, last_offset):
        try:
            read(answer)
        except BrokerError:
            continue


def check_scan(chance: random.Random) -> None:
    """Scan damaged bytes in every layout: the result stays within the body."""
    data = spoilt(chance.choice(BATCHES), chance)
    room = len(data) // decoder.MESSAGE_BYTES_MIN + 1
    head, spans = array("q", bytes(8 * decoder.HEAD_WORDS)), array("q", bytes(32 * room))
    details = array("q", bytes(8 * decoder.DETAIL_WORDS * room))
    if len(data) < 6:
        return
    for layout in (decoder.MODERN, decoder.POSITIONAL, decoder.APRIL, decoder.DECEMBER):
        found = decoder.scan(data, layout, head, spans, details)
        assert -len(decoder.FIELDS) <= found <= 1
        if found < 0:
            continue
        for row in range(head[decoder.COUNT]):
            key_at, key_size, value_at, value_size = spans[4 * row : 4 * row + 4]
            assert value_at >= 0 <= value_size <= len(data) - value_at
            assert key_size == -1 or 0 < key_size <= len(data) - key_at


def check_all(chance: random.Random) -> None:
    """Run one round."""
    with patch.object(secrets, "randbelow", lambda _: 6410):  # member ids do not depend on how the stream is split
        check(chance)
    for _ in range(20):
        check_scan(chance)
    understand(spoilt(chance.choice([*BATCHES, b'{"status":"OK","last_offset":3}', b"OK a=[1 2] b="]), chance))


if __name__ == "__main__":
    fuzz(check_all)
