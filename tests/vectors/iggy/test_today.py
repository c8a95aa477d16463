"""The examples of the current dialect, with the responses byte for byte (spec: iggy#d3-examples)."""

from __future__ import annotations

from struct import pack_into

import pytest
import xxhash

from polywire.broker.permissions import EVERYTHING
from polywire.protocols.iggy.context import IggySettings
from tests.unit.protocols.iggy.dialogue import Dialogue, World, headered

REGISTER = bytes.fromhex("002c000008727573742d73646b06302e31312e300469676779046967677900000000")
CREATE_STREAM = bytes.fromhex("066f7264657273")
STREAM = bytes(8) + bytes.fromhex("0000a6b92c040600") + bytes(20) + bytes.fromhex("066f726465727300000000")
CREATE_TOPIC = bytes.fromhex(
    "02066f7264657273030000000470616964021a000000636f6e73756d65725f6f66667365745f6475726162696c697479020a0000007265706c696361746564"
    "020a0000006475726162696c697479020a0000007265706c696361746564"
)
FRAME = bytes.fromhex(
    "88345230829016140700000000000000000000000000000000000000000000000000000005000000000000000000000068656c6c6f"
)
SEND = (
    bytes.fromhex("1800000002066f726465727302047061696402040000000001000000")
    + bytes(24)
    + bytes.fromhex("0000a6b92c04060035010000000000001712144b3a120ff001")
    + bytes(207)
    + FRAME
)
SENT = bytes.fromhex("010000000000000000000000000000000000000000000000")
POLL = bytes.fromhex("01020361707002066f726465727302047061696401000000000500000000000000000a00000001")
POLLED = (
    bytes.fromhex("00000000000000000000000001000000")
    + bytes(16)
    + bytes.fromhex("0500a6b92c0406000000a6b92c04060035010000000000008c2a3c880fa766b901")
    + bytes(207)
    + FRAME
)
STORE_GROUP = bytes.fromhex("020202673102066f72646572730204706169640100000000010000000000000001")
SYNC = bytes.fromhex("02066f726465727302047061696402026731")
PING, CLUSTER = 1, 12


def registered() -> Dialogue:
    """Return a client that is logged in."""
    peer = World().connect()
    assert peer.headered(2, code=PING) == (0, b"")
    status, body = peer.headered(1, REGISTER)
    assert status == 0
    assert body[:8] == bytes(8), "no error, and user 0"
    assert int.from_bytes(body[8:16], "little") > 0
    assert body[16:] == bytes.fromhex("002c000005302e392e30")
    return peer


@pytest.fixture
def peer() -> Dialogue:
    peer = registered()
    assert peer.headered(128, CREATE_STREAM, number=1) == (0, STREAM)
    status, body = peer.headered(132, CREATE_TOPIC, number=2)
    assert (status, body[:4]) == (0, bytes(4))
    peer.world.memory.advance(0.000005)
    return peer


def test_the_header_of_a_reply_echoes_the_request() -> None:
    request = bytearray(headered(2, code=PING, number=7))
    request[144:160] = bytes(range(16))
    pack_into("<Q", request, 160, 99)
    reply = World().connect().ask(bytes(request))
    assert len(reply) == 256
    assert reply[:48] == bytes(48)
    assert reply[48:52] == (256).to_bytes(4, "little")
    assert reply[60] == 8
    assert reply[128:144] == bytes(range(16))
    assert reply[160:176] == request[128:144]
    assert reply[192:200] == (99).to_bytes(8, "little")
    assert reply[200:209] == (7).to_bytes(8, "little") + b"\x02"
    assert reply[209:] == bytes(47)


def test_a_message_round_trips(peer: Dialogue) -> None:
    assert peer.headered(160, SEND, number=3) == (0, SENT)
    assert peer.headered(2, POLL, code=100, number=3) == (0, POLLED)
    assert peer.headered(2, POLL, code=100, number=3) == (0, bytes(16)), "auto commit, and nothing more"


def test_a_record_has_its_partition(peer: Dialogue) -> None:
    assert peer.headered(160, SEND[:20] + b"\x02" + SEND[21:], number=3)[0] == 0
    status, body = peer.headered(2, POLL[:21] + b"\x02" + POLL[22:], code=100, number=3)
    record = body[16:]
    assert (status, body[:4], record[:8]) == (0, b"\x02\0\0\0", b"\x02" + bytes(7))
    covered = record[:40] + record[48:52] + record[256:264]
    assert int.from_bytes(record[40:48], "little") == xxhash.xxh3_64_intdigest(covered)


def test_a_part_of_a_batch_is_polled(peer: Dialogue) -> None:
    bodies = [bytes([number]) * 30 for number in range(5)]
    frames = b""
    for number, body in enumerate(bodies):
        rest = number.to_bytes(16, "little") + number.to_bytes(4, "little") + (10 * number).to_bytes(4, "little")
        rest += bytes(4) + len(body).to_bytes(4, "little") + bytes(8) + body
        frames += xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest
    head = bytearray(256)
    pack_into("<QQ", head, 24, 1_693_440_000_000_000, 256 + len(frames))
    pack_into("<I", head, 48, len(bodies))
    sums = b"".join(frames[78 * number : 78 * number + 8] for number in range(5))
    pack_into("<Q", head, 40, xxhash.xxh3_64_intdigest(bytes(head[:40]) + bytes(head[48:52]) + sums))
    assert peer.headered(160, SEND[:28] + bytes(head) + frames, number=3)[0] == 0
    from_two = POLL.replace(bytes.fromhex("05") + bytes(8), b"\x01" + (2).to_bytes(8, "little"))
    from_two = from_two[:-5] + (2).to_bytes(4, "little") + b"\x00"
    status, body = peer.headered(2, from_two, code=100, number=3)
    assert status == 0
    assert body[:16] == bytes.fromhex("00000000040000000000000002000000")
    record = body[16:]
    base = int.from_bytes(record[8:16], "little")
    assert base + int.from_bytes(record[256 + 24 : 256 + 28], "little") == 2, "the first offset"
    assert int.from_bytes(record[32:40], "little") == len(record) == 256 + 2 * 78
    assert int.from_bytes(record[48:52], "little") == 2
    got = [record[256 + 78 * number : 256 + 78 * (number + 1)] for number in range(2)]
    assert [frame[48:] for frame in got] == bodies[2:4]
    for frame in got:
        assert int.from_bytes(frame[:8], "little") == xxhash.xxh3_64_intdigest(frame[8:])
    sums = b"".join(frame[:8] for frame in got)
    assert int.from_bytes(record[40:48], "little") == xxhash.xxh3_64_intdigest(record[:40] + record[48:52] + sums)
    origin = int.from_bytes(record[24:32], "little")
    assert [origin + int.from_bytes(frame[28:32], "little") for frame in got] == [
        1_693_440_000_000_020,
        1_693_440_000_000_030,
    ]


@pytest.mark.parametrize(
    ("place", "error"),
    [
        (28 + 256, 4027),
        (28 + 256 + 48, 4027),
        (28 + 40, 4039),
        (28 + 24, 4039),
        (28 + 60, 4101),
        (28 + 32, 4036),
        (28 + 48, 4036),
    ],
)
def test_damaged_batches(peer: Dialogue, place: int, error: int) -> None:
    damaged = bytearray(SEND)
    damaged[place] ^= 2
    assert peer.headered(160, bytes(damaged), number=3) == (error, b"")
    assert peer.headered(160, SEND, number=4) == (0, SENT), "nothing of it was stored, and the connection stays open"


def test_groups(peer: Dialogue) -> None:
    peer.headered(160, SEND, number=3)
    peer.headered(160, SEND, number=4)
    assert peer.headered(161, STORE_GROUP, number=5) == (0, refusal(5003))
    assert peer.headered(2, SYNC, code=606) == (5003, b"")
    status, body = peer.headered(139, SYNC[:14] + SYNC[15:], number=5)
    assert (status, body[4:]) == (0, bytes.fromhex("000000000300000000000000026731"))
    assert peer.headered(2, SYNC, code=606) == (0, b""), "not a member"
    assert peer.headered(148, SYNC, number=6) == (0, bytes(4))
    status, body = peer.headered(2, SYNC, code=606)
    assert (status, body[8:]) == (0, bytes.fromhex("03000000000000000100000002000000"))
    first = int.from_bytes(body[:8], "little")
    assert peer.headered(161, STORE_GROUP, number=7) == (0, bytes(4))
    other = peer.beside()
    other.headered(1, REGISTER)
    assert other.headered(148, SYNC, number=1) == (0, bytes(4))
    shares = [one.headered(2, SYNC, code=606)[1] for one in (peer, other)]
    assert all(int.from_bytes(share[:8], "little") > first for share in shares)
    owned = [share[12 + 4 * n] for share in shares for n in range(share[8])]
    assert sorted(owned) == [0, 1, 2]
    not_mine = next(number for number in range(3) if number not in [shares[0][12 + 4 * n] for n in range(shares[0][8])])
    poll = bytes.fromhex("0202026731") + POLL[6:20] + b"\x01" + not_mine.to_bytes(4, "little") + POLL[25:]
    assert peer.headered(2, poll, code=100) == (5009, b"")
    mine = shares[0][12]
    stores = [STORE_GROUP[:-13] + number.to_bytes(4, "little") + STORE_GROUP[-9:] for number in (mine, not_mine)]
    assert peer.headered(161, stores[0], number=8) == (0, bytes(4))
    assert peer.headered(161, stores[1], number=9) == (0, refusal(5009)), "it would overwrite the new member's offset"
    other.session.close()
    peer.pass_by()
    assert peer.headered(2, SYNC, code=606)[1][8:] == bytes.fromhex("03000000000000000100000002000000"), (
        "a member again, with one"
    )
    assert peer.headered(149, SYNC, number=8) == (0, bytes(4))
    assert peer.headered(149, SYNC, number=9) == (0, refusal(5006))


def refusal(number: int) -> bytes:
    """Return a result section that refuses."""
    return (1).to_bytes(8, "little") + number.to_bytes(4, "little")


def test_an_existing_name_is_refused(peer: Dialogue) -> None:
    assert peer.headered(128, CREATE_STREAM, number=3) == (0, refusal(1012))
    assert peer.headered(128, CREATE_STREAM, number=3) == (0, refusal(1012)), "a duplicate gets the same response"


def test_a_duplicate_gets_the_earlier_response(peer: Dialogue) -> None:
    before = peer.ask(headered(128, b"\x05other", number=3))
    assert peer.ask(headered(128, b"\x05other", number=3)) == before
    _, streams = peer.headered(2, code=201)
    assert streams.count(b"\x05other") == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (REGISTER.replace(b"\x04iggy\x04iggy", b"\x04iggy\x04eggy"), 9),
        (b"\x00\x34\x00\x00" + REGISTER[4:], 14),
        (b"\x03\x30\x00\x00" + REGISTER[4:], 14),
        (b"\x00\x28\x00\x00" + REGISTER[4:], 14),
        (b"\x00\x30\x00\x00" + REGISTER[4:], 15),
        (REGISTER[:20], 15),
        (REGISTER[:20] + b"\x05token\x00\x00\x00\x00", 10),
        (REGISTER + b"\x00", 15),
        (b"", 15),
    ],
)
def test_logins_that_close_the_connection(body: bytes, reason: int) -> None:
    peer = World().connect()
    assert peer.headered(1, body) == (-reason, b"")


@pytest.mark.parametrize(
    ("operation", "code", "answer"),
    [
        (2, 10, (40, b"")),
        (2, 38, (-15, b"")),
        (2, 44, (-15, b"")),
        (128, 0, (-1, b"")),
        (0, 0, (-4, b"")),
        (64, 0, (-4, b"")),
    ],
)
def test_before_a_login(operation: int, code: int, answer: tuple[int, bytes]) -> None:
    assert World().connect().headered(operation, b"", code=code) == answer


def test_an_eviction_has_the_supported_versions() -> None:
    frame = World().connect().ask(headered(1, b"\x00\x34\x00\x00" + REGISTER[4:]))
    assert frame[144:152] == bytes.fromhex("02300000002c0000")
    assert frame[128:144] == bytes.fromhex("22110000000000000000000000000000")


@pytest.mark.parametrize(("code", "status"), [(14, 3), (103, 3), (104, 3), (123, 3), (999, 3), (11, 5), (102, 5)])
def test_unserved_commands(peer: Dialogue, code: int, status: int) -> None:
    assert peer.headered(2, code=code) == (status, b"")


def test_users_tokens_and_permissions(peer: Dialogue) -> None:
    create = b"\x05alice\x06secret\x01\x00"
    status, body = peer.headered(141, create, number=3)
    assert (status, body[:4]) == (0, bytes(4))
    assert peer.headered(141, create, number=4) == (0, refusal(46))
    alice = peer.beside()
    words = REGISTER[:20] + b"\x05alice\x06secret" + bytes(4)
    assert alice.headered(1, words)[0] == 0
    assert alice.headered(2, POLL, code=100) == (41, b""), "without permissions nothing is allowed"
    assert alice.headered(128, b"\x05other", number=1) == (0, refusal(41))
    user = peer.world.memory.broker.access.user("alice")
    peer.world.memory.broker.access.grant(user, EVERYTHING)
    assert alice.headered(2, POLL, code=100)[0] == 0
    status, body = alice.headered(146, b"\x05token" + bytes(8), number=2)
    raw = body[5:].decode()
    again = peer.beside()
    assert again.headered(1, REGISTER[:20] + bytes((len(raw),)) + raw.encode() + bytes(4))[0] == 0
    assert again.headered(2, code=41)[1] == b"\x05token" + bytes(8)
    assert again.headered(147, b"\x05token", number=1) == (0, bytes(4))
    assert again.headered(147, b"\x05token", number=2) == (0, refusal(53))
    flags = bytes((0, 0, 0, 0, 0, 0, 0, 0, 1, 0)) + b"\x01" + bytes(4) + bytes((0, 0, 0, 0, 0, 1)) + b"\x00\x00"
    update = b"\x02\x05alice\x01" + len(flags).to_bytes(4, "little") + flags
    assert peer.headered(145, update, number=5) == (0, bytes(4))
    details = peer.headered(2, b"\x02\x05alice", code=31)[1]
    assert details.endswith(b"\x01" + len(flags).to_bytes(4, "little") + flags)
    assert alice.headered(160, SEND, number=3)[0] == 0, "sending in the stream was granted"
    assert alice.headered(135, POLL[6:20], number=4) == (0, refusal(41)), "but not purging"


def test_options_of_topics(peer: Dialogue) -> None:
    def entry(key: bytes, kind: int, value: bytes) -> bytes:
        return (
            b"\x02" + len(key).to_bytes(4, "little") + key + bytes((kind,)) + len(value).to_bytes(4, "little") + value
        )

    front = bytes.fromhex("02066f726465727301000000")
    good = entry(b"message_expiry", 2, b"7 days") + entry(b"max_topic_size", 12, (10**9).to_bytes(8, "little"))
    status, _ = peer.headered(132, front + b"\x02t1" + good, number=3)
    assert status == 0
    topic = peer.world.memory.broker.topic("orders.t1")
    assert (topic.settings.retention_age_us, topic.settings.retention_bytes) == (7 * 86_400_000_000, 10**9)
    for number, (block, error) in enumerate(
        [
            (entry(b"colour", 2, b"red"), 4041),
            (entry(b"message_expiry", 2, b"soon"), 4042),
            (good + good, 4042),
            (good[:-1], 4042),
            (entry(b"durability", 2, b"x" * 100_001), 4043),
        ]
    ):
        assert peer.headered(132, front + b"\x02t2" + block, number=4 + number) == (0, refusal(error))


def test_dialects_read_each_others_messages() -> None:
    """Written in the current dialect, read in that of 2025, and vice versa."""
    world = World(iggy=IggySettings())
    new = world.connect()
    new.headered(1, REGISTER)
    new.headered(128, CREATE_STREAM, number=1)
    new.headered(132, CREATE_TOPIC, number=2)
    new.headered(160, SEND, number=3)
    old = world.connect()
    old.classic(38, b"\x04iggy\x04iggy\x05\x00\x00\x000.8.0\x00\x00\x00\x00")
    status, body = old.classic(100, POLL)
    assert (status, body[16:].endswith(b"hello")) == (0, True)


def test_the_catalogue_of_options(peer: Dialogue) -> None:
    status, body = peer.headered(2, b"\x01", code=13)
    assert (status, int.from_bytes(body[:4], "little")) == (0, 10)
    assert body[4:].startswith(b"\x15compression_algorithm\x02\x04\x00\x00\x00none")
    assert peer.headered(2, b"\x02", code=13) == (0, bytes(4))
    assert peer.headered(2, b"\x09", code=13) == (3, b"")


def test_a_duplicate_after_a_send_is_still_a_duplicate(peer: Dialogue) -> None:
    create = headered(128, b"\x05other", number=3)
    first = peer.ask(create)
    peer.feed(headered(160, SEND, number=4) + create)
    peer.pass_by()
    assert peer.take().endswith(first)


def test_a_topic_lists_given_and_default_options() -> None:
    peer = registered()
    peer.headered(128, CREATE_STREAM, number=1)
    week = bytes.fromhex("020e0000006d6573736167655f6578706972790206000000") + b"7 days"
    status, body = peer.headered(132, bytes.fromhex("02066f7264657273010000000470616964") + week, number=2)
    given = bytes.fromhex("020e0000006d6573736167655f6578706972790c08000000") + (7 * 86_400_000_000).to_bytes(
        8, "little"
    )
    assert status == 0
    at = body.index(len(given).to_bytes(4, "little") + given) + 4 + len(given)
    unasked = int.from_bytes(body[at : at + 4], "little")
    assert len(body) == at + 4 + unasked + 40, "the only partition follows the options"
    assert body[at + 4 : at + 4 + unasked].count(b"durability\x02\x0a\x00\x00\x00replicated") == 2
    bad = bytes.fromhex("020a000000") + b"durability" + bytes.fromhex("0204000000") + b"fast"
    status, body = peer.headered(132, bytes.fromhex("02066f72646572730100000001") + b"x" + bad, number=3)
    assert body[-4:] == (4042).to_bytes(4, "little")
