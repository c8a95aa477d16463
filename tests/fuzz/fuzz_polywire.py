"""Fuzz the `polywire` protocol: for any bytes, a session responds or raises PeerError, and so does a client's decoder.

Run as ``python -m tests.fuzz.fuzz_polywire``; FUZZ_SECONDS limits it, FUZZ_SEED repeats a run. The seed is printed
first.
"""

from __future__ import annotations

import random
from typing import Final

from polywire.errors import PeerError
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import PREFIX_BYTES, decode_prefix, encode_head
from polywire.protocols.polywire.messages import Head, Verb
from polywire.records.columns import Header, Record
from polywire.records.rows import from_records
from polywire.types import Assignor
from tests.fuzz.chance import damaged, fuzz
from tests.unit.protocols.polywire.peer import Peer, batch_of

INPUTS: Final = 8  # connections of a round, one after the other to the same broker
TOKEN: Final = b"0123456789abcdef"
FRAMES_MAX: Final = 12
ODD: Final = (b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x80\x00\x00\x01")


def samples() -> list[bytes]:
    """Return one valid frame of every verb."""
    batch = bytes(batch_of((b"k", b"value"), (None, b"")))
    produced = bytes(from_records([Record(b"v"), Record(b"w")], producer_id=b"p", producer_epoch=1, base_sequence=3))
    headed = bytes(from_records([Record(b"v", headers=(Header(b"h", b"x"),), id=b"i" * 16)]))
    requests: list[tuple[Verb, Head, bytes]] = [
        (Verb.PING, Head(), b""),
        (Verb.CANCEL, messages.Cancel(3), b""),
        (Verb.TOPICS, messages.ListTopics(True), b""),
        (Verb.CREATE_TOPIC, messages.CreateTopic("u", 2, settings={"key_hash": "xxh32"}), b""),
        (Verb.DESCRIBE, messages.Describe("t"), b""),
        (Verb.GROW_TOPIC, messages.GrowTopic("t", 4), b""),
        (Verb.CONFIGURE_TOPIC, messages.ConfigureTopic("t", {"compaction": 1}), b""),
        (Verb.LINK_TOPIC, messages.LinkTopic("t", "old"), b""),
        (Verb.PURGE_TOPIC, messages.PurgeTopic("t"), b""),
        (Verb.DELETE_TOPIC, messages.DeleteTopic("u"), b""),
        (Verb.BEGIN_PARTITION, messages.BeginPartition("t", 2, 7), b""),
        (Verb.BOUNDS, messages.AskBounds(["t"], [5]), b""),
        (Verb.FETCH, messages.Fetch("t", 0, 0, wait_ms=1000), b""),
        (Verb.FETCH, messages.Fetch("t", 0, 0, bodies=False), b""),
        (Verb.GROUPS, messages.AskGroups(None, ["t", "g"]), b""),
        (Verb.FETCH, messages.Fetch("t", 1, 0, 5, 1, 1, 100), b""),
        (Verb.PRODUCE, messages.Produce("t", 0), batch + headed),
        (Verb.PRODUCE, messages.Produce("t", -1), batch),
        (Verb.PRODUCE, messages.Produce("t", 1), produced),
        (Verb.STAGE, messages.Stage(TOKEN, "t", -1), headed),
        (Verb.PUBLISH, messages.Publish("w", 1, [TOKEN]), b""),
        (Verb.PUBLISH, messages.Publish("w", 2, [], [messages.GroupOffsets("t", "g", "m", 1, {0: 5})], 1), b""),
        (Verb.BEGIN_EPOCH, messages.BeginEpoch("w"), b""),
        (Verb.ABANDON, messages.Abandon([TOKEN]), b""),
        (Verb.COMMIT, messages.Commit("t", 0, 1, "g", 5), b""),
        (Verb.POSITION, messages.AskPosition("t", 0, 1, "g"), b""),
        (Verb.JOIN, messages.Join("g", "t", "m", Assignor.RANGE.value), b""),
        (Verb.HEARTBEAT, messages.Member("g", "t", "m", 1), b""),
        (Verb.LEAVE, messages.Member("g", "t", "m", 1), b""),
        (Verb.CONFIGURE_QUEUE, messages.ConfigureQueue("q", "t", {"share.auto.offset.reset": "earliest"}), b""),
        (Verb.ACQUIRE, messages.Acquire("q", "t", "m", 5, wait_ms=1000), b""),
        (Verb.ACQUIRE, messages.Acquire("q", "t", "m", 5, runs=[messages.AcknowledgedRun(0, 0, 1, 1)]), b""),
        (Verb.ACKNOWLEDGE, messages.Acknowledge("q", "t", "m", [messages.AcknowledgedRun(0, 0, 1, 3, 0, "bad")]), b""),
        (Verb.QUEUES, messages.AskQueues(), b""),
        (Verb.RESET_QUEUE, messages.ResetQueue("q", "t"), b""),
        (Verb.DELETE_QUEUE, messages.DeleteQueue("q", "t"), b""),
    ]
    return [
        encode_head(verb, number, head, payload_bytes=len(payload)) + payload
        for number, (verb, head, payload) in enumerate(requests, 1)
    ]


FRAMES: Final = samples()


def mutated(chance: random.Random) -> bytes:
    """Return a stream of valid frames with some damage."""
    return damaged(b"".join(chance.choices(FRAMES, k=chance.randrange(1, FRAMES_MAX))), chance, times_max=5, odd=ODD)


def feed(chance: random.Random, peer: Peer, stream: bytes) -> None:
    """Give a session the stream in pieces, as a connection would."""
    buffer = bytearray()
    while stream or buffer:
        size = chance.randrange(1, 400)
        buffer += stream[:size]
        fed = len(stream[:size])
        stream = stream[size:]
        taken = peer.session.receive(memoryview(buffer))
        assert 0 <= taken <= len(buffer), "a session consumes what it was given"
        buffer = buffer[taken:]
        if chance.random() < 0.5:
            peer.loop.run_due()
        if not fed:
            break


def check_answers(written: bytes) -> None:
    """Assert that the output consists of complete frames."""
    at = 0
    while at < len(written):
        at += PREFIX_BYTES + decode_prefix(written, at, length_max=1 << 30).length
    assert at == len(written), "a frame was written in part"


def converse(chance: random.Random, peer: Peer) -> None:
    """Run one connection. Raises every error that is no documented response."""
    try:
        feed(chance, peer, mutated(chance))
    except PeerError as error:
        if not error.fatal:  # only a fatal error may leave a session
            raise
    peer.loop.advance(2.0)
    check_answers(bytes(peer.output.written))
    if chance.random() < 0.5:
        peer.session.finish(memoryview(b""))
    peer.session.close()


def check_all(chance: random.Random) -> None:
    """Run one round."""
    first = Peer()
    first.ask(Verb.CREATE_TOPIC, messages.CreateTopic("t", 3))
    for _ in range(INPUTS):
        converse(chance, first.another())
    first.loop.advance(70.0)


if __name__ == "__main__":
    fuzz(check_all)
