"""The examples of the classic dialects after the documented one, with the responses byte for byte.

spec: iggy#d1-examples, iggy#d2-examples
"""

from __future__ import annotations

import pytest

from polywire.protocols.iggy.context import IggySettings
from tests.unit.protocols.iggy.dialogue import Dialogue, World, classic

EMPTY = bytes(8)
LOGIN_OLD = bytes.fromhex("0e0000002600000004696767790469676779")
LOGIN_NEW = bytes.fromhex("1d000000260000000469676779046967677907000000302e362e32303200000000")
CREATE_STREAM_D1 = bytes.fromhex("0f000000ca00000000000000066f7264657273")
CREATE_TOPIC_D1C = bytes.fromhex("250000002e010000010401000000000000000300000001000000000000000000000000010470616964")
CREATE_TOPIC_D1D = bytes.fromhex(
    "2b0000002e01000002066f726465727300000000030000000100000000000000000000000000000000010470616964"
)
POLL_D1 = bytes.fromhex("2a0000006400000001020361707002066f7264657273020470616964010000000500000000000000000a00000001")

CREATE_STREAM_D2 = bytes.fromhex("0b000000ca000000066f7264657273")
CREATE_TOPIC_D2 = bytes.fromhex(
    "270000002e01000002066f7264657273030000000100000000000000000000000000000000010470616964"
)
SEND_56 = bytes.fromhex(
    "6d000000650000001800000002066f726465727302047061696402040000000001000000000000003d00000000000000000000000000000000000000"
    "07000000000000000000000000000000000000000000000000000000000000000000a6b92c040600000000000500000068656c6c6f"
)
SEND_64 = bytes.fromhex(
    "75000000650000001800000002066f726465727302047061696402040000000001000000000000004500000000000000000000000000000000000000"
    "07000000000000000000000000000000000000000000000000000000000000000000a6b92c0406000000000005000000000000000000000068656c6c"
    "6f"
)
SEND_64_HEADER = bytes.fromhex(
    "88000000650000001800000002066f726465727302047061696402040000000001000000000000005800000000000000000000000000000000000000"
    "08000000000000000000000000000000000000000000000000000000000000000000a6b92c0406001600000002000000000000000000000068690205"
    "0000006b65792d31020700000056616c75652031"
)
POLL_D2 = bytes.fromhex(
    "2b0000006400000001020361707002066f726465727302047061696401000000000500000000000000000a00000001"
)
POLL_GROUP = bytes.fromhex(
    "2a00000064000000020202673102066f726465727302047061696400000000000500000000000000000a00000001"
)
POLLED_D2C = bytes.fromhex(
    "000000005500000000000000000000000000000001000000dfa1334a56a9264607000000000000000000000000000000000000000000000005"
    "00a6b92c0406000000a6b92c0406000000000005000000000000000000000068656c6c6f"
)
POLLED_D2B = bytes.fromhex(
    "000000004d00000000000000000000000000000001000000109e2b83ee5effd607000000000000000000000000000000000000000000000005"
    "00a6b92c0406000000a6b92c040600000000000500000068656c6c6f"
)
POLLED_D2A = bytes.fromhex(
    "000000004d00000001000000000000000000000001000000323a09c50000000007000000000000000000000000000000000000000000000005"
    "00a6b92c0406000000a6b92c040600000000000500000068656c6c6f"
)
STORE = bytes.fromhex("26000000790000000101040700000002066f726465727302047061696401000000000100000000000000")
CREATE_GROUP = bytes.fromhex("150000005a02000002066f7264657273020470616964026731")
GROUP = bytes.fromhex("000000000f000000000000000300000000000000026731")
JOIN = bytes.fromhex("160000005c02000002066f726465727302047061696402026731")
STREAM = bytes.fromhex("0c000000c800000002066f7264657273")


def modern(dialect: str) -> Dialogue:
    """Return a client that has logged in as the clients of D2 do, with a topic of three partitions."""
    peer = World(iggy=IggySettings(dialect)).connect()
    assert peer.ask(LOGIN_NEW)[:8] == bytes.fromhex("0000000004000000")
    assert peer.ask(CREATE_STREAM_D2)[:4] == bytes(4)
    assert peer.ask(CREATE_TOPIC_D2)[:4] == bytes(4)
    return peer


def test_login_and_creations_of_d1() -> None:
    peer = World().connect()
    assert peer.ask(LOGIN_OLD) == bytes.fromhex("000000000400000001000000")
    assert peer.ask(CREATE_STREAM_D1) == EMPTY
    assert peer.ask(CREATE_TOPIC_D1C) == EMPTY
    assert peer.ask(POLL_D1) == bytes.fromhex("0000000010000000") + bytes.fromhex("01000000000000000000000000000000")


def test_login_and_creations_of_d1d() -> None:
    peer = World().connect()
    assert peer.ask(LOGIN_NEW) == bytes.fromhex("000000000400000001000000")
    assert peer.ask(CREATE_STREAM_D1)[:4] == bytes(4)
    assert peer.ask(CREATE_TOPIC_D1D)[:4] == bytes(4)
    assert peer.ask(POLL_D1) == bytes.fromhex("0000000010000000") + bytes.fromhex("01000000000000000000000000000000")


def test_the_form_of_requests_overrides_the_version_of_a_login() -> None:
    """A client in use logs in as 0.6 and continues as 0.8."""
    peer = World().connect()
    peer.ask(LOGIN_NEW)
    assert peer.ask(CREATE_STREAM_D2)[:4] == bytes(4)
    assert peer.ask(CREATE_TOPIC_D2)[:4] == bytes(4)
    assert peer.ask(POLL_D2) == bytes.fromhex("0000000010000000") + bytes(16), "partition 0, where 0.6 has 1"
    peer.world.memory.advance(0.000005)
    assert peer.ask(SEND_56) == EMPTY
    assert peer.ask(POLL_D2) == POLLED_D2B


@pytest.mark.parametrize(
    ("dialect", "send", "poll", "polled"),
    [
        ("0.10", SEND_64, POLL_D2, POLLED_D2C),
        ("0.8", SEND_56, POLL_D2, POLLED_D2B),
        ("0.10", SEND_64_HEADER, POLL_D2, None),
    ],
)
def test_a_message_round_trips(dialect: str, send: bytes, poll: bytes, polled: bytes | None) -> None:
    peer = World(iggy=IggySettings(dialect)).connect()
    peer.ask(LOGIN_NEW)
    peer.ask(CREATE_STREAM_D2)
    peer.ask(CREATE_TOPIC_D2)
    peer.world.memory.advance(0.000005)
    assert peer.ask(send) == EMPTY
    answer = peer.ask(poll)
    if polled is not None:
        assert answer == polled
    else:
        assert answer.endswith(SEND_64_HEADER[-24:]), "payload and typed header are unchanged"
    assert peer.ask(poll) == bytes.fromhex("0000000010000000") + bytes(16), "auto commit"


def test_a_message_is_encoded_as_in_d2a() -> None:
    world = World(iggy=IggySettings("0.7"))
    peer = world.connect()
    peer.ask(LOGIN_NEW)
    peer.ask(CREATE_STREAM_D1)
    peer.ask(CREATE_TOPIC_D1D)
    world.memory.advance(0.000005)
    assert peer.ask(SEND_56[:28] + b"\x01" + SEND_56[29:]) == EMPTY, "to partition 1, the first one"
    assert peer.ask(POLL_D1) == POLLED_D2A


def test_groups_and_offsets_of_d2() -> None:
    peer = modern("0.10")
    assert peer.ask(POLL_GROUP)[:4] == (5003).to_bytes(4, "little")
    assert peer.ask(CREATE_GROUP) == GROUP
    assert peer.ask(CREATE_GROUP)[:4] == (5004).to_bytes(4, "little")
    assert peer.ask(POLL_GROUP)[:4] == (5006).to_bytes(4, "little")
    assert peer.ask(JOIN) == EMPTY
    assert peer.ask(POLL_GROUP)[:8] == bytes.fromhex("0000000010000000")
    assert peer.ask(STORE)[:4] == (4100).to_bytes(4, "little"), "above the newest offset"
    peer.ask(SEND_64)
    peer.ask(SEND_64)
    assert peer.ask(STORE) == EMPTY
    consumer = bytes.fromhex("0101040700000002066f726465727302047061696401") + bytes(4)
    assert peer.classic(120, consumer) == (0, bytes.fromhex("0000000001000000000000000100000000000000"))
    assert peer.classic(122, consumer) == (0, b"")
    assert peer.classic(120, consumer) == (0, b"")
    assert peer.classic(122, consumer) == (3021, b"")


def test_the_cluster_is_the_connected_node() -> None:
    peer = modern("0.10")
    _, body = peer.classic(12)
    name = b"polywire"
    node = bytes.fromhex("060000006e6f64652d30090000003132372e302e302e319a1f") + bytes(8)
    assert body == len(name).to_bytes(4, "little") + name + (1).to_bytes(4, "little") + node


def test_details_of_a_stream() -> None:
    peer = modern("0.10")
    body = peer.ask(STREAM)
    expected = bytes.fromhex(
        "000000005e000000000000000000a6b92c04060001000000"
        "00000000000000000000000000000000066f7264657273"
        "000000000000a6b92c04060003000000ffffffffffffffff01ffffffffffffffff010000000000000000"
        "00000000000000000470616964"
    )
    assert body == expected


@pytest.mark.parametrize("frame", [LOGIN_NEW, CREATE_STREAM_D2, SEND_64, POLL_D2])
def test_frames_can_arrive_in_pieces(frame: bytes) -> None:
    whole, parts = modern("0.10"), modern("0.10")
    expected = whole.ask(frame)
    for at in range(len(frame) - 1):
        parts.feed(frame[at : at + 1])
    assert parts.take() == b""
    assert parts.ask(frame[-1:]) == expected


def test_many_requests_in_one_write() -> None:
    peer = modern("0.10")
    peer.feed(SEND_64 * 20 + classic(1) + POLL_D2)
    peer.pass_by()
    answer = peer.take()
    assert answer[: 21 * 8] == EMPTY * 21
    assert answer[21 * 8 + 8 :][:16] == bytes.fromhex("0000000013000000000000000a000000")
