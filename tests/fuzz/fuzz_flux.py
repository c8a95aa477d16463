"""Fuzz the FLUX protocol: a session answers every line or closes, and the client's parser decodes or refuses.

Run as ``python -m tests.fuzz.fuzz_flux``; FUZZ_SECONDS limits it, FUZZ_SEED repeats a run. The seed is printed first.
"""

from __future__ import annotations

import random
from typing import Final

from polywire.client.flux import parse_reply, read_records, split_consumed
from polywire.errors import PeerError
from polywire.protocols.flux.decoder import LINE_BYTES_MAX
from tests.fuzz.chance import cuts_of, damaged, fuzz
from tests.unit.protocols.flux.dialogue import Dialogue, World

STREAMS: Final = 8  # of a round, one after the other to the same broker
INPUTS: Final = 2 * STREAMS
LINES_MAX: Final = 12
GOOD: Final = [
    b"V1|1|PRODUCE|t k:v\n",
    b"V1|2|PRODUCE|t k:v,w acks=0\r\n",
    b"V1|3|PRODUCE|u k:v acks=all\n",
    b"V1|4|CONSUME|t 0 0\n",
    b"V1|5|CONSUME|t 1 0\n",
    b"V1|6|JOIN|g t c assignor=range\n",
    b"V1|7|SYNC|g t c 2\n",
    b"V1|8|HEARTBEAT|g t c 2\n",
    b"V1|9|COMMIT|g t c 2 0 1\n",
    b"V1|10|OFFSET|g t 0\n",
    b"V1|11|LEAVE|g t c 2\n",
    b"V1|12|REPLICA_FETCH|t 0 1 0\n",
    b"V1|13|SET_PARTITION_ROLE|t 0 leader\n",
    b"V1|14|ADMIN_CREATE_TOPIC|w 4 2\n",
    b"V1|15|ADMIN_REGISTER_BROKER|1 h 1\n",
    b"V1|16|ADMIN_BROKER_HEARTBEAT|0\n",
    b"V1|17|ADMIN_SET_PARTITION_LEADER|t 0 0 0,1\n",
    b"V1|18|ADMIN_GET_METADATA|\n",
    b"V1|19|ADMIN_FENCE_BROKER|1\n",
    b"V1|20|ADMIN_UNFENCE_BROKER|1\n",
    b"V1|21|ADMIN_RECONCILE_BROKER_HEALTH|1\n",
    b"V1|22|ADMIN_ELECT_TOPIC_LEADERS|t\n",
    b"V1|23|BROKER_FETCH|t 0 1 0 5\n",
    b"V1|24|BROKER_REPLICA_ACK|t 0 1 0\n",
]
ODD: Final = [
    b"\xc2\xa0",
    b"\xe2\x80\x82",
    b"|",
    b":",
    b" ",
    b"\r",
    b"\n",
    b"\x00",
    b"\xff",
    b"=",
    b",",
    b"-",
    b"9" * 20,
    b"\xe6\x97\xa5",
]


def mutated(chance: random.Random) -> bytes:
    """Return a stream of valid lines with some damage."""
    lines = b"".join(chance.choices(GOOD, k=chance.randrange(1, LINES_MAX)))
    return damaged(lines, chance, times_max=5, odd=ODD)


def converse(world: World, stream: bytes, cuts: list[int]) -> bytes:
    """Send a stream in pieces and close; return the responses."""
    peer = Dialogue(world)
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        peer.feed(stream[start:end])
    peer.finish()
    if not peer.closed:  # a response is delayed
        world.memory.advance(3.0 * LINES_MAX)
    peer.session.close()
    assert peer.closed, "the session did not close after the client's end"
    return peer.take()


def check(stream: bytes, chance: random.Random, whole: World, cut: World) -> None:
    """Check that there is one response per line, in order, however the stream is split."""
    lines = stream.split(b"\n")
    lines = lines[:-1] if not lines[-1] else lines
    assert all(len(line) < LINE_BYTES_MAX for line in lines)
    answers = converse(whole, stream, [])
    reported = answers.split(b"\n")
    assert reported.pop() == b"", "a response without its line ending"
    assert len(reported) == len(lines), (
        f"{len(lines)} lines, {len(reported)} responses lines={lines} responses={reported}"
    )
    cuts = cuts_of(stream, chance)
    assert converse(cut, stream, cuts) == answers, f"split at {cuts} the responses differ"
    for answer in reported:
        reply = parse_reply(answer)
        if reply.payload.startswith(b"messages="):
            read_records(*split_consumed(reply.payload, 0))


def check_client(chance: random.Random) -> None:
    """Decode anything with the client's parser, or get a PeerError."""
    text = chance.choice([b"messages=0:a,1:b hw=1", b"messages= hw=-1", b"messages=5:x,6:y,5:z,6:w hw=6"])
    spoilt = bytearray(text)
    for _ in range(chance.randrange(5)):
        spoilt[chance.randrange(len(spoilt))] = chance.randrange(256)
    try:
        read_records(*split_consumed(bytes(spoilt), 0))
        parse_reply(bytes(spoilt))
    except PeerError:
        return


def check_all(chance: random.Random) -> None:
    """Run one round."""
    whole, cut = World(), World()
    for _ in range(STREAMS):
        stream = mutated(chance)
        if stream:
            check(stream, chance, whole, cut)
        check_client(chance)


if __name__ == "__main__":
    fuzz(check_all)
