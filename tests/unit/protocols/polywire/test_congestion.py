"""A log without room: requests wait in their order, none is refused, lost or doubled, and waiting has an end."""

from __future__ import annotations

from typing import Any

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.errors import Busy, ErrorCode
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.appending import HALT_S_MAX
from polywire.protocols.polywire.codec import encode_head
from polywire.protocols.polywire.messages import Verb
from polywire.records.batch import walk
from polywire.records.rows import to_records
from polywire.testing.loop import ManualLoop
from polywire.testing.memory_log import MemoryLog
from tests.unit.protocols.polywire.peer import Peer, batch_of


class CongestedLog(MemoryLog):
    """Takes ``room`` further batches, then has none until a test makes some."""

    room = 1 << 30

    def append(self, *args: Any, **options: Any) -> None:
        if not self.room:
            raise Busy(ErrorCode.BUSY, "too much waits to be sealed", retry_after_ms=50)
        self.room -= 1
        super().append(*args, **options)


def congested() -> tuple[Peer, CongestedLog]:
    loop = ManualLoop()
    made: list[CongestedLog] = []

    def open_log(replay: Any) -> CongestedLog:
        made.append(CongestedLog(loop, loop.clock, replay))
        return made[0]

    peer = Peer(broker=Broker.over(open_log, settings=BrokerSettings(), loop=loop, clock=loop.clock), loop=loop)
    peer.ask(Verb.CREATE_TOPIC, messages.CreateTopic("t", 2))
    return peer, made[0]


def frame(number: int, *values: bytes, partition: int = 0) -> bytes:
    payload = b"".join(batch_of((b"k" + value, value)) for value in values)
    head = messages.Produce("t", partition)
    return encode_head(Verb.PRODUCE, number, head, payload_bytes=len(payload)) + payload


def stored(peer: Peer, partition: int) -> list[bytes | None]:
    payload = peer.ask(Verb.FETCH, messages.Fetch("t", partition, 0)).payload
    return [record.value for at in walk(payload) for record in to_records(payload, at)]


def offer_again(peer: Peer, rest: bytes, room: CongestedLog, more: int) -> bytes:
    """As the driver does after ``resume``, with the bytes at another place."""
    room.room = more
    resumes = peer.resumes
    peer.loop.advance(0.06)
    assert peer.resumes == resumes + 1
    return rest[peer.session.receive(memoryview(bytearray(rest))) :]


def test_requests_wait_for_room_in_their_order() -> None:
    peer, log = congested()
    rest = frame(1, b"a", b"b", b"c") + frame(2, b"d") + frame(3, b"e", b"f")
    log.room = 2
    rest = rest[peer.session.receive(memoryview(bytearray(rest))) :]
    assert peer.session.paused()
    assert rest == frame(1, b"a", b"b", b"c") + frame(2, b"d") + frame(3, b"e", b"f")
    rest = offer_again(peer, rest, log, 0)
    assert peer.session.paused()
    rest = offer_again(peer, rest, log, 3)
    assert rest == frame(3, b"e", b"f")
    rest = offer_again(peer, rest, log, 9)
    assert rest == b""
    peer.loop.run_due()
    answers = {answer.correlation: answer.decode(messages.Produced) for answer in peer.frames()}
    assert [[a.base_offset for a in answers[number].appended] for number in (1, 2, 3)] == [[0, 1, 2], [3], [4, 5]]
    assert stored(peer, 0) == [b"a", b"b", b"c", b"d", b"e", b"f"]


def test_records_split_by_key_wait_too() -> None:
    peer, log = congested()
    values = [b"%d" % n for n in range(12)]
    payload = batch_of(*[(value, value) for value in values])
    rest = encode_head(Verb.PRODUCE, 1, messages.Produce("t", -1), payload_bytes=len(payload)) + payload
    log.room = 1
    rest = rest[peer.session.receive(memoryview(bytearray(rest))) :]
    assert offer_again(peer, rest, log, 5) == b""
    peer.loop.run_due()
    [answer] = peer.frames()
    assert sum(a.record_count for a in answer.decode(messages.Produced).appended) == 12
    assert sorted(value or b"" for value in stored(peer, 0) + stored(peer, 1)) == sorted(values)


def test_waiting_for_room_ends_with_busy() -> None:
    peer, log = congested()
    rest = frame(1, b"a")
    log.room = 0
    assert peer.session.receive(memoryview(bytearray(rest))) == 0
    peer.loop.advance(HALT_S_MAX + 1)
    assert peer.resumes == 1
    assert peer.session.receive(memoryview(bytearray(rest))) == len(rest)
    [answer] = peer.frames()
    assert isinstance(answer.error, Busy)


def test_a_peer_that_finishes_while_it_waits_is_answered() -> None:
    peer, log = congested()
    log.room = 0
    rest = frame(1, b"a")
    assert peer.session.receive(memoryview(bytearray(rest))) == 0
    peer.session.finish(memoryview(rest))
    [answer] = peer.frames()
    assert isinstance(answer.error, Busy)
    assert peer.output.closed


def test_closing_while_waiting_leaves_no_timer() -> None:
    peer, log = congested()
    log.room = 0
    peer.session.receive(memoryview(bytearray(frame(1, b"a"))))
    peer.session.close()
    peer.loop.advance(60.0)
    assert (peer.resumes, bytes(peer.output.written)) == (0, b"")
