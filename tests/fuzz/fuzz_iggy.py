"""Fuzz the Iggy protocol in every dialect: a session answers every frame or closes, and the codec's results are sound.

Run as ``python -m tests.fuzz.fuzz_iggy``; FUZZ_SECONDS limits it, FUZZ_SEED repeats a run. The seed is printed first.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from struct import pack_into
from typing import Final

from polywire.protocols.iggy import decoder, encoder, today_codec
from polywire.protocols.iggy.dialect import FRAMED, Dialect
from polywire.protocols.iggy.factory import COMMANDS
from polywire.protocols.iggy.messages import Code, Refused
from polywire.protocols.iggy.options import encode_option
from polywire.protocols.iggy.vsr import OPERATIONS
from polywire.records.batch import stamp, validate
from polywire.records.rows import to_records
from tests.fuzz.chance import cuts_of, damaged, fuzz
from tests.unit.protocols.iggy import test_held as held
from tests.unit.protocols.iggy.dialogue import Dialogue, World, classic, headered
from tests.vectors.iggy import test_classic as d2
from tests.vectors.iggy import test_protocol_012 as d4
from tests.vectors.iggy import test_today as d3

REPLIES: Final[list[tuple[Callable[[bytes, Dialect], object], bytes]]] = [
    (today_codec.read_polled, d3.POLLED),
    (today_codec.read_polled, d3.POLLED[:16] + bytes(24) + d3.POLLED[16:]),
    (today_codec.read_streams, d3.STREAM[4:]),
    (today_codec.read_streams, d3.STREAM[4:] + bytes(4)),
    (today_codec.read_topics, b"\1\0\0\0" + bytes(32) + b"\4paid" + bytes(8)),
    (today_codec.read_topic, bytes(49) + b"\4paid" + bytes(8)),
]
INPUTS: Final = 24  # of a round
FRAMES_MAX: Final = 10
CLASSIC: Final = [
    d2.CREATE_STREAM_D1,
    d2.CREATE_TOPIC_D1C,
    d2.CREATE_TOPIC_D1D,
    d2.POLL_D1,
    d2.CREATE_STREAM_D2,
    d2.CREATE_TOPIC_D2,
    d2.SEND_56,
    d2.SEND_64,
    d2.SEND_64_HEADER,
    d2.POLL_D2,
    d2.POLL_GROUP,
    d2.STORE,
    d2.CREATE_GROUP,
    d2.JOIN,
    d2.STREAM,
    bytes.fromhex("4c0000006500000002066f72646572730204706169640306757365722d31")
    + bytes(16)
    + bytes.fromhex("15000000050000006b65792d31020700000056616c756520310500000068656c6c6f"),
]
LOGINS: Final = [b"", d2.LOGIN_OLD, d2.LOGIN_NEW]
TODAY: Final = [
    headered(128, d3.CREATE_STREAM, number=1),
    headered(132, d3.CREATE_TOPIC, number=2),
    headered(160, d3.SEND, number=3),
    headered(2, d3.POLL, code=100),
    headered(139, d3.SYNC[:14] + d3.SYNC[15:], number=4),
    headered(148, d3.SYNC, number=5),
    headered(2, d3.SYNC, code=606),
    headered(161, d3.STORE_GROUP, number=6),
]
TODAY_012: Final = [
    *TODAY,
    headered(160, d4.produced(), number=7),
    headered(2, d4.PAID + bytes(4), code=Code.GET_ROUTE),
    headered(2, held.held(wait_s=1), code=Code.POLL_HELD),
    headered(2, held.held(wait_s=0), code=Code.POLL_HELD),
    headered(2, held.awaited((0, 1, 0), (1, 5, 0), wait_s=1), code=Code.AWAIT),
    headered(2, held.fetched(held.Target(0), held.Target(1), wait_s=1), code=Code.FETCH),
    headered(2, held.fetched(held.Target(0), wait_s=0, commits=1), code=Code.FETCH),
    headered(2, code=Code.CANCEL),
    headered(150, d4.patch(b"\1" + d4.PAID, encode_option(b"name", 2, b"owed"), resets=("message_expiry",)), number=8),
]


def frame_of_012(chance: random.Random, number: int) -> bytes:
    """Return a valid or invalid request of protocol 0.12 with this number; its size is right."""
    frame = bytearray(damaged(chance.choice(TODAY_012), chance, times_max=3, front=256))
    pack_into("<I", frame, 48, len(frame))
    pack_into("<Q", frame, 168, number)
    if chance.random() < 0.1:
        pack_into("<Q", frame, 200, chance.randrange(5))
    return bytes(frame)


def classic_frame(chance: random.Random) -> bytes:
    """Return a valid or invalid classic request; its length is right."""
    if chance.random() < 0.2:
        return classic(chance.choice([*COMMANDS, 0, 7, 999]), chance.randbytes(chance.randrange(60)))
    frame = damaged(chance.choice(CLASSIC), chance, times_max=3, front=8)
    return (len(frame) - 4).to_bytes(4, "little") + frame[4:]


def headered_frame(chance: random.Random) -> bytes:
    """Return a valid or invalid headered request; its size is right."""
    if chance.random() < 0.2:
        operation = chance.choice([*OPERATIONS, 2, 2, 2])
        return headered(operation, chance.randbytes(chance.randrange(80)), code=chance.choice([*COMMANDS]))
    frame = damaged(chance.choice(TODAY), chance, times_max=3, front=256)
    return frame[:48] + len(frame).to_bytes(4, "little") + frame[52:]


def converse(frames: list[bytes], cuts: list[int]) -> bytes:
    """Send frames in pieces and close; return the responses."""
    peer = Dialogue(World())
    stream = b"".join(frames)
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        peer.feed(stream[start:end])
        peer.pass_by()
    peer.world.memory.advance(3.0)
    peer.finish()
    peer.world.memory.advance(3.0)
    assert peer.closed, "the session did not close after the client's end"
    return peer.take()


def answers_of(reported: bytes, *, framed: bool) -> int:
    """Return the number of responses, which must be complete."""
    count = at = 0
    while at < len(reported):
        if framed:
            at += int.from_bytes(reported[at + 48 : at + 52], "little")
        else:
            at += 8 + int.from_bytes(reported[at + 4 : at + 8], "little")
        count += 1
    assert at == len(reported), "an incomplete response"
    return count


def check_session(chance: random.Random) -> None:
    """Check that there is one response per frame, however the stream is split; only evictions end it early."""
    framed = chance.random() < 0.5
    count = chance.randrange(1, FRAMES_MAX)
    if framed:
        frames = [headered(1, d3.REGISTER), *(headered_frame(chance) for _ in range(count))]
    else:
        frames = [frame for frame in (chance.choice(LOGINS), *(classic_frame(chance) for _ in range(count))) if frame]
    reported = converse(frames, [])
    evicted = framed and reported[-256 + 60] == 13
    assert answers_of(reported, framed=framed) == len(frames) or evicted
    again = converse(frames, cuts_of(b"".join(frames), chance))
    assert answers_of(again, framed=framed) == answers_of(reported, framed=framed)
    converse([chance.randbytes(chance.randrange(600))], [])


def check_held(chance: random.Random) -> None:
    """Check that responses of protocol 0.12 are complete, and that each request sent has at most one."""
    numbers = range(1, chance.randrange(2, FRAMES_MAX))
    frames = [headered(1, d4.REGISTER), *(frame_of_012(chance, number) for number in numbers)]
    replies = converse(frames, cuts_of(b"".join(frames), chance))
    answers_of(replies, framed=True)
    at, answered = 0, []
    while at < len(replies):
        if replies[at + 60] == 8:
            answered.append(int.from_bytes(replies[at + 200 : at + 208], "little"))
        at += int.from_bytes(replies[at + 48 : at + 52], "little")
    assert set(answered) <= {0, *numbers}
    assert len(set(answered)) == len(answered), "a request has one response"


def check_client(chance: random.Random) -> None:
    """Decode a damaged reply with the client, or see it refused."""
    dialect = chance.choice(FRAMED)
    read, sample = chance.choice(REPLIES)
    with suppress(Refused):
        read(damaged(sample, chance, times_max=3, front=0), dialect)
    with suppress(Refused):
        today_codec.read_route(damaged(bytes(25), chance, times_max=2, front=0))


def check_codec(chance: random.Random) -> None:
    """Check that accepted messages form a valid batch that every layout can encode."""
    source, start, head = chance.choice(
        [
            (d2.SEND_56[8:], 28, 56),
            (d2.SEND_64_HEADER[8:], 28, 64),
            (d3.SEND, 28, 48),
            (d4.produced(), 28, 48),
            (CLASSIC[-1][8:], 22, 24),
        ]
    )
    spoilt = bytearray(source)
    for _ in range(chance.randrange(3)):
        spoilt[chance.randrange(start, len(spoilt))] = chance.randrange(256)
    match head:
        case 48:
            batch = decoder.from_frames(spoilt, start, len(spoilt))
        case 24:
            batch = decoder.from_flat(spoilt, start, len(spoilt), b"key")
        case _:
            batch = decoder.from_indexed(spoilt, start, len(spoilt), 1, head, None)
    if isinstance(batch, int):
        return
    validate(batch)
    stamp(batch, 0, 1, 1, 10, 0, 1_693_440_000_000_000)
    for form in (encoder.FLAT, encoder.D2A, encoder.D2B, encoder.D2C, encoder.D3):
        state = encoder.new_state()
        state[encoder.LEFT], state[encoder.CAP], state[encoder.LAST] = 10, 4096, -1
        out = bytearray(4096)
        assert encoder.put_chunk(batch, 0, out, state, form) == encoder.DONE
        assert state[encoder.LAST] == 10
        if form == encoder.D3:
            reported = decoder.from_frames(out, 0, state[encoder.AT])
            assert not isinstance(reported, int)
            assert [record.value for record in to_records(reported)] == [record.value for record in to_records(batch)]


def check_all(chance: random.Random) -> None:
    """Run one round."""
    check_session(chance)
    check_held(chance)
    check_client(chance)
    for _ in range(20):
        check_codec(chance)


if __name__ == "__main__":
    fuzz(check_all)
