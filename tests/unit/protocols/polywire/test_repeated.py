"""PRODUCE requests that repeat an earlier one of their connection have the same effects and responses as any others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from polywire.broker.settings import AccessList
from polywire.errors import PeerError
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import PREFIX, encode_head
from polywire.protocols.polywire.messages import BY_KEY, Verb
from polywire.protocols.runtime.shapes import SHAPES_MAX
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Buffer
from tests.unit.protocols.polywire.peer import Peer, batch_of

HEAD = messages.Produce("t", 0)
BATCH = bytes(batch_of(b"value"))
DAMAGED = BATCH[:-8] + bytes(8)


class Client:
    """A client that notes which requests were executed as repetitions. Without ``learns``, none is."""

    def __init__(self, *, learns: bool) -> None:
        self.peer = Peer()
        self.learns = learns
        self.repeated: list[bool] = []
        self.answers: list[tuple[int, int, bytes]] = []
        self.broken = False
        self.create()

    def create(self) -> None:
        self.peer.ask(Verb.CREATE_TOPIC, messages.CreateTopic("t", 2)).decode(messages.TopicDescription)

    def send(self, batch: Buffer = BATCH, head: messages.Produce = HEAD) -> None:
        self.send_frame(encode_head(Verb.PRODUCE, len(self.repeated), head, payload_bytes=len(batch)) + bytes(batch))

    def send_frame(self, frame: bytes) -> None:
        session = self.peer.session
        take = session.take_repeated if self.learns else None
        self.repeated.append(False)

        def noted(*given: Any) -> bool:
            assert take is not None, "the client learns"
            self.repeated[-1] = take(*given)
            return self.repeated[-1]

        session.take_repeated = None if take is None else noted
        data = bytearray(frame)
        try:
            session.receive(memoryview(data))
        except PeerError:
            self.broken = True
        data[:] = bytes(len(data))
        self.peer.loop.run_due()
        if take is not None and session.take_repeated is noted:
            session.take_repeated = take
        self.answers += [(answer.correlation, answer.flags, answer.head) for answer in self.peer.frames()]

    def result(self) -> object:
        topic = self.peer.broker.find_topic("t")
        ends = [] if topic is None else [partition.log.next_offset for partition in topic.partitions]
        return self.answers, self.broken, ends


def played(play: Callable[[Client], None]) -> list[bool]:
    """Run a conversation with and without repetitions; return which requests were executed as repetitions."""
    learned, plain = (Client(learns=learns) for learns in (True, False))
    play(learned)
    play(plain)
    assert learned.result() == plain.result()
    assert not any(plain.repeated)
    return learned.repeated


def test_the_same_request_is_repeated() -> None:
    def play(client: Client) -> None:
        for size in (1, 1, 100, 9_000):
            client.send(batch_of(b"v" * size))
        client.send(batch_of(*[b"v"] * 300))

    assert played(play) == [False] + [True] * 4


@pytest.mark.parametrize("level", [0, 1, 2])
def test_each_head_is_learned(level: int) -> None:
    def play(client: Client) -> None:
        for partition in (0, 1, 0, 1):
            client.send(head=messages.Produce("t", partition, level))

    assert played(play) == [False, False, True, True]


def test_refused_batches_get_their_errors() -> None:
    def play(client: Client) -> None:
        for batch in (BATCH, DAMAGED, BATCH[:-8], b"", BATCH + BATCH, BATCH + bytes(8), BATCH):
            client.send(batch)

    assert played(play) == [False] * 6 + [True]


def test_other_requests_are_executed_like_any() -> None:
    stamped = from_records([Record(b"v", b"k")], producer_id=b"p", producer_epoch=1, base_sequence=0)

    def play(client: Client) -> None:
        client.send()
        client.send(stamped)
        client.send(stamped)
        client.send(head=messages.Produce("t", BY_KEY))
        client.send(head=messages.Produce("t", BY_KEY))
        client.send(head=messages.Produce("t", 9))
        client.send(head=messages.Produce("t", 0, 7))
        client.send(head=messages.Produce("new", 0, create=True))
        client.send(head=messages.Produce("new", 0, create=True))
        client.send()

    assert played(play) == [False] * 8 + [True, True]


def test_several_requests_at_once_are_executed_together() -> None:
    def play(client: Client) -> None:
        frames = [encode_head(Verb.PRODUCE, number, HEAD, payload_bytes=len(BATCH)) + BATCH for number in range(3)]
        client.send_frame(b"".join(frames))
        client.send_frame(b"".join(frames))
        client.send_frame(frames[0] + frames[1][:-8] + bytes(8) + frames[2])
        client.send_frame(b"".join(frames) + encode_head(Verb.PING, 8, messages.Head()))

    assert played(play) == [False, True, False, False]


def fetch_head(offset: int, **fields: Any) -> messages.Fetch:
    return messages.Fetch("t", 0, offset, **fields)


def fetches(client: Client, *heads: messages.Fetch) -> None:
    for head in heads:
        client.send_frame(encode_head(Verb.FETCH, len(client.repeated), head))


def test_fetches_that_differ_in_the_offset_are_repetitions() -> None:
    def play(client: Client) -> None:
        client.send(batch_of(*[b"%d" % number for number in range(70_000)]))
        fetches(
            client, *[fetch_head(offset, bytes_max=300) for offset in (127, 128, 255, 129, 256, 69_999, 65_535, 200)]
        )
        fetches(client, fetch_head(65_536, bytes_max=300), fetch_head(69_990, bytes_max=300))

    assert played(play) == [False, False, False, True, True, False, False, True, True, True, True]


def test_many_different_fetches_do_not_replace_each_other_all_the_time() -> None:
    heads = [fetch_head(150, bytes_max=1000 + number) for number in range(SHAPES_MAX + 2)]

    def play(client: Client) -> None:
        client.send(batch_of(*[b"v"] * 300))
        for _ in range(20):
            fetches(client, *heads)

    repeated = played(play)[1:]
    assert not any(repeated[: len(heads)])
    assert sum(repeated) > len(repeated) // 2


def test_other_fetches_are_executed_like_any() -> None:
    def play(client: Client) -> None:
        client.send(batch_of(*[b"v"] * 300))
        fetches(client, fetch_head(200), fetch_head(200, bytes_max=9), fetch_head(200, bytes_max=99), fetch_head(201))
        client.send_frame(encode_head(Verb.FETCH, 5, fetch_head(202)) + encode_head(Verb.PING, 6, messages.Head()))
        client.send_frame(encode_head(Verb.FETCH, 7, fetch_head(203), payload_bytes=1) + b"-")
        fetches(client, fetch_head(255), fetch_head(2**63 - 1), fetch_head(2**63 - 2))

    assert played(play)[:5] == [False, False, False, False, True]


def test_errors_of_repeated_fetches_are_the_same() -> None:
    def play(client: Client) -> None:
        client.send(batch_of(*[b"v"] * 150))
        fetches(client, fetch_head(130, offset_end=150), fetch_head(151, offset_end=150), fetch_head(250))
        waiting = fetch_head(150, wait_ms=1000)
        client.send_frame(encode_head(Verb.FETCH, 77, waiting) + encode_head(Verb.FETCH, 77, waiting))
        broker = client.peer.broker
        topic = broker.topic("t")
        broker.configure_topic(topic, replace(topic.settings, access=AccessList(readers=("root",))))
        fetches(client, fetch_head(140))
        broker.delete_topic(broker.topic("t"))
        fetches(client, fetch_head(141))

    assert played(play)[:3] == [False, False, True]


def test_an_invalid_prefix_closes_the_connection() -> None:
    def play(client: Client) -> None:
        client.send()
        client.send_frame(PREFIX.pack(200, Verb.PRODUCE, 0, 0, 1, 201) + bytes(200))

    assert played(play) == [False, False]


def test_changes_of_the_topic_are_noticed() -> None:
    def configure(client: Client, **changes: Any) -> None:
        broker = client.peer.broker
        topic = broker.topic("t")
        broker.configure_topic(topic, replace(topic.settings, **changes))
        client.peer.loop.run_due()

    def play(client: Client) -> None:
        client.send()
        client.send()
        configure(client, access=AccessList(writers=("root",)))
        client.send()
        configure(client, access=None)
        client.send()
        client.peer.broker.delete_topic(client.peer.broker.topic("t"))
        client.peer.loop.run_due()
        client.send()
        client.create()
        client.send()
        client.send()

    assert played(play) == [False, True, False, True, False, False, True]
