"""SEND_MESSAGES that repeat an earlier one of their connection have the same effects and responses as any others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from polywire.broker.settings import AccessList
from polywire.protocols.iggy.client_codec import by_key, ident, messages, name, request, to_partition
from polywire.protocols.iggy.context import IggySettings
from polywire.protocols.iggy.messages import U32, Code
from polywire.protocols.iggy.session import IggySession
from polywire.protocols.runtime.shapes import Shapes
from polywire.records.columns import Record
from tests.unit.protocols.iggy.dialogue import World
from tests.vectors.iggy import test_classic as classic

TOPIC = ident("s") + ident("t")
BALANCED = b"\x01\0"
CREATE_STREAM = request(Code.CREATE_STREAM, U32.pack(1) + name("s"))
CREATE_TOPIC = request(Code.CREATE_TOPIC, ident(1) + U32.pack(1) + U32.pack(3) + U32.pack(0) + name("t"))
RENAME_STREAM = request(Code.UPDATE_STREAM, ident(1) + name("other"))
RENAME_TOPIC = request(Code.UPDATE_TOPIC, ident(1) + ident(1) + U32.pack(0) + name("other"))


def sending(values: Sequence[bytes], topic: bytes = TOPIC, to: bytes = to_partition(1)) -> bytes:
    return request(Code.SEND, topic + to + messages([Record(value) for value in values]))


class Client:
    """A client that notes which requests were executed as repetitions. Without ``learns``, none is."""

    def __init__(self, dialect: str = "auto", *, learns: bool) -> None:
        self.peer = World(iggy=IggySettings(dialect)).connect()
        self.session = self.peer.session
        assert isinstance(self.session, IggySession)
        if not learns:
            self.session.shapes = Shapes(0)  # type: ignore[misc]
        self.repeated: list[bool] = []
        self.answers: list[bytes] = []

    def create(self) -> None:
        self.ask(CREATE_STREAM, CREATE_TOPIC)

    def ask(self, *frames: bytes) -> None:
        self.answers += map(self.peer.ask, frames)

    def send(self, *frames: bytes) -> None:
        assert isinstance(self.session, IggySession)
        for frame in frames:
            take = self.session.take_repeated
            self.repeated.append(False)

            def noted(*given: Any, take: Any = take) -> bool:
                self.repeated[-1] = take(*given)
                return self.repeated[-1]

            if take is not None:
                self.session.take_repeated = noted
            self.ask(frame)
            if take is not None:
                self.session.take_repeated = take

    def result(self) -> object:
        topics = self.peer.world.memory.broker.topics()
        return self.answers, [part.log.next_offset for topic in topics for part in topic.partitions]


def played(play: Callable[[Client], None], dialect: str = "auto") -> list[bool]:
    """Run a conversation with and without repetitions; return which requests were executed as repetitions."""
    learned, plain = (Client(dialect, learns=learns) for learns in (True, False))
    play(learned)
    play(plain)
    assert learned.result() == plain.result()
    assert not any(plain.repeated)
    return learned.repeated


@pytest.mark.parametrize("topic", [TOPIC, ident(1) + ident(1), ident("s") + ident(1)])
@pytest.mark.parametrize("to", [to_partition(1), to_partition(3), BALANCED])
def test_the_same_beginning_is_repeated(topic: bytes, to: bytes) -> None:
    def play(client: Client) -> None:
        client.create()
        for values in ([b"v"], [b"v"], [b"w" * 9_000], [b"v"] * 300):
            client.send(sending(values, topic, to))

    assert played(play) == [False] + [True] * 3


def test_balanced_requests_use_each_partition() -> None:
    def play(client: Client) -> None:
        client.create()
        client.send(*[sending([b"v"], to=BALANCED)] * 4, sending([], to=BALANCED), *[sending([b"v"], to=BALANCED)] * 3)

    assert played(play) == [False] + [True] * 3 + [False] + [True] * 3


def test_other_requests_are_executed_like_any() -> None:
    whole = sending([b"value"])

    def play(client: Client) -> None:
        client.create()
        client.send(whole)
        client.send(sending([]), sending([b"v"], to=by_key(b"k")), sending([b"v"], to=by_key(b"k")))
        client.send(sending([b"v"], to=to_partition(4)), sending([b"v"], ident("s") + ident("u")))
        for size in range(9, len(whole)):
            client.send(U32.pack(size - 4) + whole[4:size])
        client.send(whole)

    repeated = played(play)
    assert repeated[-1]
    assert not any(repeated[:-1])


@pytest.mark.parametrize("change", [RENAME_STREAM, RENAME_TOPIC])
def test_old_names_are_refused(change: bytes) -> None:
    def play(client: Client) -> None:
        client.create()
        client.send(sending([b"v"]), sending([b"v"]))
        client.ask(change)
        client.send(sending([b"v"]))
        client.send(sending([b"v"], ident(1) + ident(1)), sending([b"v"], ident(1) + ident(1)))

    assert played(play) == [False, True, False, False, True]


def test_a_name_of_other_protocols_can_get_another_meaning() -> None:
    def play(client: Client) -> None:
        client.create()
        client.ask(RENAME_STREAM)  # other protocols still call it "s"
        client.send(sending([b"v"]), sending([b"v"]))

    assert played(play) == [False, False]


def test_changes_of_the_topic_are_noticed() -> None:
    def configure(client: Client, **changes: Any) -> None:
        broker = client.peer.world.memory.broker
        (topic,) = broker.topics()
        broker.configure_topic(topic, replace(topic.settings, **changes))
        client.peer.world.memory.run()

    def play(client: Client) -> None:
        client.create()
        client.send(sending([b"v"]), sending([b"v"]))
        configure(client, access=AccessList(writers=("another",)))
        client.send(sending([b"v"]), sending([b"v"]))
        configure(client, access=None)
        client.send(sending([b"v"]), sending([b"v"]))
        client.ask(request(Code.DELETE_STREAM, ident(1)))
        client.send(sending([b"v"]))
        client.create()
        client.send(sending([b"v"]), sending([b"v"]))

    assert played(play) == [False, True, False, False, False, True, False, False, True]


@pytest.mark.parametrize(("dialect", "frame"), [("0.10", classic.SEND_64), ("0.8", classic.SEND_56)])
def test_messages_with_an_index_are_repeated(dialect: str, frame: bytes) -> None:
    def play(client: Client) -> None:
        client.ask(classic.LOGIN_NEW, classic.CREATE_STREAM_D2, classic.CREATE_TOPIC_D2)
        client.send(frame, frame)
        for size in range(9, len(frame)):
            client.send(U32.pack(size - 4) + frame[4:size])
        client.send(frame)
        client.ask(classic.POLL_D2)

    repeated = played(play, dialect)
    assert repeated[1]
    assert repeated[-1]
    assert not any(repeated[2:-1])


def test_a_connection_whose_dialect_is_found_out_later() -> None:
    def play(client: Client) -> None:
        client.ask(classic.LOGIN_NEW, classic.CREATE_STREAM_D2, classic.CREATE_TOPIC_D2)
        client.send(classic.SEND_56, classic.SEND_56)
        client.ask(classic.POLL_D2)
        client.send(classic.SEND_56, classic.SEND_56)
        client.ask(classic.LOGIN_NEW)
        client.send(classic.SEND_56, classic.SEND_56)

    assert played(play)[1]
