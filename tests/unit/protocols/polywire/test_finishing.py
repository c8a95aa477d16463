"""Requests still waiting when a client closes its side are executed and answered before the connection closes."""

from __future__ import annotations

from itertools import count

import pytest

from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import encode_head
from polywire.protocols.polywire.messages import Head, Verb
from polywire.protocols.polywire.session import REQUESTS_MAX
from polywire.testing.loop import SimulatedClock
from tests.unit.protocols.polywire.peer import Peer, batch_of
from tests.unit.protocols.polywire.test_auth import answers, closed


def pings(amount: int) -> bytes:
    return b"".join(encode_head(Verb.PING, number, Head()) for number in range(amount))


def produces(peer: Peer, amount: int) -> bytes:
    """Return requests whose responses wait until their records are synced."""
    peer.ask(Verb.CREATE_TOPIC, messages.CreateTopic("t", 1)).decode(messages.TopicDescription)
    batch = batch_of(b"x")
    head = messages.Produce("t", 0, level=2)
    return b"".join(
        encode_head(Verb.PRODUCE, number, head, payload_bytes=len(batch)) + batch for number in range(amount)
    )


def send_and_finish(peer: Peer, frames: bytes) -> int:
    """Send requests and close the sending side; return how many bytes had to wait."""
    taken = peer.session.receive(memoryview(frames))
    left = len(frames) - taken
    peer.session.finish(memoryview(frames)[taken:])
    return left


def answered(peer: Peer) -> list[int]:
    return sorted(frame.correlation for frame in peer.frames() if not frame.flags & 2)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each reading of the clock take longer than a quantum, so that every request uses one."""
    times = count()
    monkeypatch.setattr(SimulatedClock, "monotonic", lambda _: float(next(times)))


def test_requests_waiting_at_the_limit_of_pending_responses_are_executed() -> None:
    peer = Peer()
    amount = 3 * REQUESTS_MAX + 5
    assert send_and_finish(peer, produces(peer, amount))
    peer.loop.run_due()
    assert answered(peer) == list(range(amount))
    assert peer.broker.topic("t").partitions[0].log.next_offset == amount
    assert peer.output.closed


@pytest.mark.usefixtures("slow")
def test_requests_waiting_for_a_turn_are_executed() -> None:
    peer = Peer()
    assert send_and_finish(peer, pings(4))
    assert not peer.output.closed, "three requests are not executed yet"
    peer.loop.run_due()
    assert answered(peer) == [0, 1, 2, 3]
    assert peer.output.closed


@pytest.mark.usefixtures("slow")
def test_requests_that_never_started_are_executed() -> None:
    peer = Peer()
    peer.session.finish(memoryview(pings(4)))
    peer.loop.run_due()
    assert answered(peer) == [0, 1, 2, 3]
    assert peer.output.closed


@pytest.mark.usefixtures("slow")
def test_requests_waiting_for_a_login_and_a_turn_are_executed() -> None:
    peer = closed()
    login = encode_head(Verb.LOGIN, 9, messages.LogIn("alice", "wonderland"))
    assert send_and_finish(peer, login + pings(3))
    assert sorted(answer.correlation for answer in answers(peer, 4)) == [0, 1, 2, 9]
    assert peer.output.closed


def test_requests_waiting_for_two_logins_are_executed() -> None:
    peer = closed()
    login = encode_head(Verb.LOGIN, 9, messages.LogIn("alice", "wonderland"))
    assert send_and_finish(peer, login + pings(1) + login.replace(b"alice", b"carol") + pings(1))
    assert sorted(answer.correlation for answer in answers(peer, 4)) == [0, 0, 9, 9]
    assert peer.output.closed


def test_requests_waiting_for_a_slow_reader_are_executed_once_it_reads() -> None:
    peer = Peer()
    peer.output.backlog = peer.output.backlog_max + 1
    peer.session.finish(memoryview(pings(2)))
    assert not peer.frames()
    assert not peer.output.closed
    peer.output.backlog = 0
    peer.session.drained()
    assert answered(peer) == [0, 1]
    assert peer.output.closed
