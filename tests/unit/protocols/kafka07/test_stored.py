"""Requests after produced sets are answered once the sets are stored, or not at all."""

from __future__ import annotations

import struct

import pytest

from polywire.broker.settings import BrokerSettings
from polywire.protocols.kafka07.messages import (
    encode_fetch,
    encode_message,
    encode_offsets,
    encode_produce,
    parse_offsets_answer,
)
from polywire.testing.memory_log import MemoryLog
from polywire.types import Level
from tests.unit.protocols.kafka07.dialogue import World

A, B = encode_message(b"aaaa"), encode_message(b"bb", 0)


@pytest.mark.parametrize("asked", [encode_offsets(b"t", 0, -1, 1), encode_fetch(b"t", 0, 0, 1 << 20)])
def test_requests_after_sets_that_cannot_be_stored_get_no_response(
    asked: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = World().connect()
    peer.feed(encode_produce(b"t", 0, A))
    monkeypatch.setattr(MemoryLog, "write", MemoryLog.fail)
    assert peer.exchange(encode_produce(b"t", 0, B) + asked) == b""
    assert peer.closed
    assert peer.gave_up is not None
    assert "storage failed" in peer.gave_up.message


def test_requests_after_sets_wait_for_the_durability_of_the_broker() -> None:
    world = World(BrokerSettings(durability=Level.SYNCED))
    asked = encode_produce(b"t", 0, A) + encode_fetch(b"t", 0, 0, 1 << 20) + encode_offsets(b"t", 0, -1, 1)
    reported = world.connect().exchange(asked)
    assert reported.startswith(struct.pack(">ih", 2 + len(A), 0) + A)
    assert parse_offsets_answer(reported[10 + len(A) :]) == [len(A)]


def test_a_client_that_disconnects_while_its_sets_are_synced() -> None:
    world = World(BrokerSettings(durability=Level.SYNCED))
    peer = world.connect()
    peer.feed(encode_produce(b"t", 0, A) + encode_offsets(b"t", 0, -1, 1))
    peer.session.close()
    peer.pass_by()
    assert peer.take() == b""
    assert world.connect().ask(encode_fetch(b"t", 0, 0, 1 << 20))[6:] == A
