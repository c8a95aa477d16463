"""Batches that begin like an earlier one: the same responses and records as from a session that compares nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from polywire.broker.settings import AccessList, BrokerSettings
from polywire.errors import Busy, ErrorCode
from polywire.protocols.cursus.session import CursusSession
from polywire.protocols.runtime.shapes import SHAPES_MAX, Shapes
from tests.unit.protocols.cursus.dialogue import Dialogue, World
from tests.unit.protocols.cursus.test_produce import batch, messages, stored

ACKS = ["0", "1", "-1", "all", "ALL"]
Play = Callable[["Client"], None]


class Client:
    """One connection that sends batches."""

    def __init__(self, *, learns: bool, broker: BrokerSettings | None = None) -> None:
        self.world = World(broker=broker)
        self.peer: Dialogue = self.world.connect()
        self.ask("CREATE topic=t partitions=2")
        if not learns:
            self.session.shapes = Shapes(0)  # type: ignore[misc]
        self.repeated: list[bool] = []
        self.answers: list[bytes] = []

    @property
    def session(self) -> CursusSession:
        session = self.peer.session
        assert isinstance(session, CursusSession)
        return session

    def ask(self, text: str) -> None:
        self.peer.ask(text, "t")

    def send(self, sequences: Any, *, partition: int = 0, acks: str = "1", idempotent: int = 0, **more: Any) -> None:
        found = messages(*sequences, **{name: more.pop(name) for name in ("pid", "epoch") if name in more})
        self.send_body(batch("t", partition, [one | more for one in found], acks=acks, idempotent=idempotent))

    def send_body(self, body: bytes) -> None:
        take = self.session.take_repeated
        self.repeated.append(False)
        if take is not None:

            def noted(*given: Any) -> bool:
                self.repeated[-1] = take(*given)
                return self.repeated[-1]

            self.session.take_repeated = noted
        self.answers += self.peer.say(body)
        if take is not None:
            self.session.take_repeated = take


def played(play: Play) -> list[bool]:
    """Run a conversation with and without repetitions; return which batches were stored as repetitions."""
    learned, plain = Client(learns=True), Client(learns=False)
    play(learned)
    play(plain)
    assert learned.answers == plain.answers
    assert not any(plain.repeated)
    if learned.world.memory.broker.find_topic("t") is not None:
        for partition in range(2):
            assert stored(learned.world, "t", partition) == stored(plain.world, "t", partition)
    return learned.repeated


@pytest.mark.parametrize("acks", ACKS)
def test_a_batch_like_the_last_one_is_repeated(acks: str) -> None:
    def play(client: Client) -> None:
        for sequences in ((1,), (2, 3, 4), range(5, 100), (1,)):
            client.send(sequences, acks=acks, key="k")
        client.send((7,), acks=acks, pid="other")
        client.send((0,), acks=acks, pid="")

    assert played(play) == [False] + [True] * 5


def test_other_batches_are_stored_like_any() -> None:
    def play(client: Client) -> None:
        client.send((1,))
        client.send((1,), partition=1)
        client.send((2,), partition=7)
        client.send((1,), idempotent=1)
        client.send((2, 5))
        client.send((6,), epoch=3)
        client.send((7,), epoch=-1)
        client.send((8,), type="created", version=1)
        client.send((8,), pid="long" * 100)
        client.send(())
        client.send_body(batch("t", 0, messages(1, pid="a") + messages(1, pid="b")))
        client.send((9,), partition=1)
        client.send((9,))

    assert played(play) == [False] * 11 + [True] * 2


def test_damaged_batches_are_refused() -> None:
    body = batch("t", 0, messages(1, 2))

    def play(client: Client) -> None:
        client.send_body(body)
        for size in range(6, len(body)):
            client.send_body(body[:size])
        client.send_body(body + b"more")
        client.send_body(body)

    repeated = played(play)
    assert repeated[-1]
    assert not any(repeated[:-1])


def test_changes_of_the_topic_are_noticed() -> None:
    def configure(client: Client, **changes: Any) -> None:
        broker = client.world.memory.broker
        topic = broker.topic("t")
        broker.configure_topic(topic, replace(topic.settings, **changes))
        client.world.memory.run()

    def play(client: Client) -> None:
        client.send((1,))
        configure(client, idempotent=True)
        client.send((1,))
        configure(client, idempotent=False, access=AccessList(writers=("root",)))
        client.send((2,))
        configure(client, access=None)
        client.send((3,))
        client.ask("DELETE topic=t")
        client.ask("CREATE topic=t partitions=2")
        client.send((5,))
        client.send((6,))

    assert played(play) == [False, False, False, True, False, True]


def test_a_batch_waits_for_space_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(learns=True)
    client.send((1,))
    produce, full = client.world.memory.broker.produce, [True]

    def busy(*given: Any, **more: Any) -> None:
        if full:
            raise Busy(ErrorCode.BUSY, "full")
        produce(*given, **more)

    monkeypatch.setattr(type(client.world.memory.broker), "produce", lambda _, *given, **more: busy(*given, **more))
    client.send((2,))
    assert len(client.answers) == 1
    full.clear()
    client.world.memory.advance(1.0)
    client.peer.pass_by()
    client.answers += client.peer.take_bodies()
    assert [b'"status":"OK"' in answer for answer in client.answers] == [True, True]


def test_a_failed_append_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Any] = []

    def play(client: Client) -> None:
        broker = client.world.memory.broker
        client.send((1,))
        with monkeypatch.context() as patch:
            fail = lambda _, *given, done, **more: broker.loop.call_soon(done, Busy(ErrorCode.BUSY, "full"))  # noqa: E731
            patch.setattr(type(broker), "produce", fail)
            client.send((2, 3))
        failed.append(client.answers[-1])

    assert played(play) == [False, True]
    assert b'"status":"ERROR"' in failed[0]


def test_a_connection_remembers_few_batches() -> None:
    client = Client(learns=True)
    client.ask(f"CREATE topic=wide partitions={3 * SHAPES_MAX}")
    for partition in range(3 * SHAPES_MAX):
        client.send_body(batch("wide", partition, messages(1)))
    client.send_body(batch("wide" * 200, 0, messages(1)))
    assert len(client.session.shapes) == SHAPES_MAX
