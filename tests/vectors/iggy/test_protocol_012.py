"""Protocol 0.12: frames of the Python SDK 0.9.1.dev5 with the responses byte for byte (spec: iggy#d4-protocol-012)."""

from __future__ import annotations

from struct import pack, pack_into, unpack_from

import pytest
import xxhash

from polywire.protocols.iggy.client_codec import ident as name_ident
from polywire.protocols.iggy.client_codec import name
from polywire.protocols.iggy.context import IggySettings
from polywire.protocols.iggy.messages import Code
from polywire.protocols.iggy.options import encode_option
from tests.unit.protocols.iggy.dialogue import Dialogue, World, headered
from tests.vectors.iggy import test_today as d3

# As the SDK sent it; the 32 bytes after its version are its secret.
REGISTER = bytes.fromhex(
    "0030000008727573742d73646b0d302e31312e312d656467652e35c108e6bf3ea0be2d66ba0f3c64e91afebd44dc82a6b2d199285b09af1fa5d14c"
    "0469676779046967677900000000"
)
REGISTER_2 = b"\x02" + REGISTER[1:]  # as 0.12.2
ORDERS = name_ident("orders")
PAID = ORDERS + name_ident("paid")
GROUP = b"\x02" + name_ident("g1")
SINGLE = b"\x01" + name_ident("app")
T = bytes.fromhex("0000a6b92c040600")
TEXT, U64 = 2, 12
OF_TOPIC, OF_STREAM, OF_USER = b"\x01", b"\x02", b"\x03"
PATCH = 150


def register(body: bytes = REGISTER) -> Dialogue:
    """Return a client that has logged in."""
    peer = World().connect()
    status, reply = peer.headered(1, body)
    assert (status, reply[:8]) == (0, bytes(8)), "no error, and user 0"
    assert unpack_from("<Q", reply, 8)[0] > 0
    assert reply[16:] == body[:4] + b"\x060.10.0"
    return peer


def furnished(body: bytes = REGISTER) -> Dialogue:
    """Return a client with a stream and a topic of three partitions."""
    peer = register(body)
    assert peer.headered(128, d3.CREATE_STREAM, number=1)[0] == 0
    assert peer.headered(132, d3.CREATE_TOPIC, number=2)[0] == 0
    peer.world.memory.advance(0.000005)
    return peer


@pytest.fixture
def peer() -> Dialogue:
    return furnished()


def with_context(frame: bytes, incarnation: int) -> bytes:
    """Return a request that names a history."""
    data = bytearray(frame)
    pack_into("<Q", data, 200, incarnation)
    return bytes(data)


def incarnation_of(peer: Dialogue, partition: int = 0) -> int:
    status, route = peer.headered(2, PAID + pack("<I", partition), code=Code.GET_ROUTE)
    assert status == 0
    return int(unpack_from("<Q", route)[0])


def test_logins_of_each_version() -> None:
    for body in (REGISTER, b"\x01" + REGISTER[1:], REGISTER_2):
        peer = World().connect()
        status, reply = peer.headered(1, body)
        assert status == 0
        assert reply[16:20] in (REGISTER[:4], REGISTER_2[:4])
    assert World().connect().headered(1, d3.REGISTER)[1][16:] == d3.REGISTER[:4] + b"\x050.9.0"


@pytest.mark.parametrize("cut", range(len(REGISTER)))
def test_truncated_logins(cut: int) -> None:
    peer = World().connect()
    status, _ = peer.headered(1, REGISTER[:cut])
    assert status in (-15, -10), "malformed, or an unknown token"
    assert peer.closed


@pytest.mark.parametrize(
    ("dialect", "body", "status"),
    [
        ("vsr", d3.REGISTER, 0),
        ("vsr", REGISTER, -14),
        ("vsr-0.12", REGISTER, 0),
        ("vsr-0.12", d3.REGISTER, -14),
        ("vsr-0.12.2", REGISTER_2, 0),
    ],
)
def test_a_configured_dialect_accepts_its_own_versions(dialect: str, body: bytes, status: int) -> None:
    assert World(iggy=IggySettings(dialect=dialect)).connect().headered(1, body)[0] == status


def test_a_client_whose_connection_was_reset_logs_in_again() -> None:
    body = REGISTER[: 4 + 9 + 14] + d3.REGISTER[:16] + pack("<QQ", 7, 0) + bytes(32)
    peer = World().connect()
    assert peer.headered(2, body, code=Code.BIND_SESSION) == (40, b"")
    assert peer.headered(1, REGISTER)[0] == 0


def test_headers_of_replies_say_what_is_final(peer: Dialogue) -> None:
    request = bytearray(with_context(headered(129, ORDERS + name("other"), number=3), 77))
    request[144:160] = bytes(range(1, 17))
    reply = peer.ask(bytes(request))
    assert reply[128:144] == bytes(range(1, 17))
    position, commit = unpack_from("<QQ", reply, 176)
    assert position == commit == peer.world.memory.broker.clock.now_us()
    assert reply[216:224] == bytes(4) + b"\1\0\0\0", "final"
    assert unpack_from("<Q", reply, 224)[0] == 77
    assert reply[232:256] == bytes(24)
    assert peer.ask(headered(2, b"", code=Code.PING))[220:224] == bytes(4)
    assert peer.ask(headered(130, ORDERS, number=4))[220] == 1, "a refusal is final, too"


def test_streams_topics_users_and_nodes() -> None:
    peer = register()
    status, stream = peer.headered(128, d3.CREATE_STREAM, number=1)
    assert (status, stream) == (0, d3.STREAM + bytes(4))
    status, topic = peer.headered(132, d3.CREATE_TOPIC, number=2)
    assert topic[:36] == bytes(8) + T + b"\x03\0\0\0" + bytes(16), "the result, id, time, partitions, sizes"
    assert topic[36:41] == b"\x04paid"
    given, at = unpack_from("<I", topic, 41)[0], 45
    derived = unpack_from("<I", topic, at + given)[0]
    partitions = topic[at + given + 4 + derived :]
    assert len(partitions) == 3 * 64
    assert [unpack_from("<I", partitions, 64 * number)[0] for number in range(3)] == [0, 1, 2]
    contexts = [unpack_from("<QQQ", partitions, 64 * number + 40) for number in range(3)]
    assert len({context[0] for context in contexts} - {0}) == 3
    assert {context[1:] for context in contexts} == {(0, 0)}
    users = peer.headered(2, code=Code.GET_USERS)[1]
    assert users.endswith(b"\x04iggy" + bytes(8))
    cluster = peer.headered(2, code=Code.GET_CLUSTER)[1]
    assert cluster == bytes.fromhex("08000000706f6c79776972650100000000060000006e6f64652d30") + (
        bytes.fromhex("09000000") + b"127.0.0.1" + bytes.fromhex("9a1f") + bytes(8)
    )


def test_partitions_name_their_nodes_since_0_12_2() -> None:
    first, second = (furnished(body).headered(2, PAID, code=Code.GET_TOPIC)[1] for body in (REGISTER, REGISTER_2))
    assert len(second) == len(first) + 3 * 4
    assert second.endswith(first[-24:] + b"\1\0\1\0")


def test_routes(peer: Dialogue) -> None:
    status, route = peer.headered(2, PAID + pack("<I", 1), code=Code.GET_ROUTE)
    incarnation, position, view, partitions, primary = unpack_from("<QQIIB", route)
    assert (status, len(route)) == (0, 25)
    assert incarnation > 0
    assert position >= peer.world.memory.broker.clock.now_us()
    assert (view, partitions, primary) == (0, 3, 0)
    assert peer.headered(2, PAID + pack("<I", 3), code=Code.GET_ROUTE) == (3007, b"")
    assert peer.headered(2, ORDERS + name_ident("none") + bytes(4), code=Code.GET_ROUTE) == (2011, b"")
    assert peer.headered(2, PAID + bytes(5), code=Code.GET_ROUTE) == (3, b"")


def test_polls_return_the_context(peer: Dialogue) -> None:
    incarnation = incarnation_of(peer)
    assert peer.headered(160, d3.SEND, number=3) == (0, d3.SENT)
    status, polled = peer.headered(2, d3.POLL, code=Code.POLL, number=4)
    assert status == 0
    assert polled[:40] == pack("<IQIQQQ", 0, 0, 1, incarnation, 0, 0)
    assert polled[40:] == d3.POLLED[16:]
    assert peer.headered(2, d3.POLL, code=Code.POLL, number=5)[1] == pack("<IQIQQQ", 0, 0, 0, incarnation, 0, 0)


def test_requests_for_an_earlier_history_are_refused(peer: Dialogue) -> None:
    old = incarnation_of(peer, 2)
    send = d3.SEND.replace(b"\x02\x04\0\0\0\0", b"\x02\x04\x02\0\0\0", 1)
    poll = d3.POLL.replace(b"\x01\0\0\0\0\x05", b"\x01\x02\0\0\0\x05", 1)
    store = SINGLE + PAID + pack("<BIQB", 1, 2, 0, 1)
    requests = [
        headered(160, send, number=3),
        headered(2, poll, code=Code.POLL, number=4),
        headered(161, store, number=5),
        headered(162, store[:-9] + b"\1", number=6),
    ]
    for frame in requests[:3]:
        assert unpack_from("<I", peer.ask(with_context(frame, old)), 216)[0] == 0
    assert peer.headered(137, PAID + pack("<I", 1), number=7)[0] == 0
    assert peer.headered(136, PAID + pack("<I", 1), number=8)[0] == 0
    assert incarnation_of(peer, 2) != old
    for frame in requests:
        reply = peer.ask(with_context(frame, old))
        status = unpack_from("<I", reply, 264)[0] if frame[176] > 160 else unpack_from("<I", reply, 216)[0]
        assert status == 87
    assert unpack_from("<I", peer.ask(with_context(requests[0], incarnation_of(peer, 2))), 216)[0] == 0


def patch(target: bytes, *entries: bytes, resets: tuple[str, ...] = ()) -> bytes:
    return target + bytes((len(resets),)) + b"".join(map(name, resets)) + b"".join(entries)


def test_patches(peer: Dialogue) -> None:
    expiry = encode_option(b"message_expiry", U64, pack("<Q", 5_000_000))
    assert peer.headered(PATCH, patch(OF_TOPIC + PAID, expiry), number=3) == (0, bytes(4))
    topic = peer.world.memory.broker.find_topic("orders.paid")
    assert topic is not None
    assert topic.settings.retention_age_us == 5_000_000
    renamed = encode_option(b"name", TEXT, b"owed")
    body = patch(OF_TOPIC + PAID, renamed, resets=("message_expiry",))
    assert peer.headered(PATCH, body, number=4) == (0, bytes(4))
    assert not topic.settings.retention_age_us
    assert peer.headered(2, ORDERS + name_ident("owed"), code=Code.GET_TOPIC)[1]
    assert peer.headered(PATCH, patch(OF_STREAM + ORDERS, encode_option(b"name", TEXT, b"sold")), number=5)[0] == 0
    assert peer.headered(2, name_ident("sold"), code=Code.GET_STREAM)[1]
    assert peer.headered(141, name("alice") + name("secret") + b"\x01\x00", number=6)[0] == 0
    user = [encode_option(b"username", TEXT, b"alicia"), encode_option(b"status", TEXT, b"inactive")]
    assert peer.headered(PATCH, patch(OF_USER + name_ident("alice"), *user), number=7) == (0, bytes(4))
    assert peer.headered(2, name_ident("alicia"), code=Code.GET_USER)[1][12] == 2


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (patch(OF_TOPIC + PAID), 3),
        (patch(b"\x04" + PAID, resets=("message_expiry",)), 3),
        (patch(OF_TOPIC + PAID, resets=("message_expiry", "message_expiry")), 3),
        (patch(OF_TOPIC + PAID, encode_option(b"max_topic_size", U64, bytes(8)), resets=("max_topic_size",)), 3),
        (patch(OF_TOPIC + PAID, resets=("segment_size",)), 4104),
        (patch(OF_STREAM + ORDERS, resets=("name",)), 4104),
        (patch(OF_TOPIC + PAID, encode_option(b"segment_size", U64, bytes(8))), 4103),
        (patch(OF_TOPIC + PAID, encode_option(b"compression_algorithm", TEXT, b"gzip")), 4103),
        (patch(OF_TOPIC + PAID, encode_option(b"colour", TEXT, b"red")), 4041),
        (patch(OF_STREAM + ORDERS, encode_option(b"colour", TEXT, b"red")), 4041),
        (patch(OF_USER + name_ident("iggy"), encode_option(b"colour", TEXT, b"red")), 4041),
        (patch(OF_USER + name_ident("iggy"), encode_option(b"status", TEXT, b"asleep")), 4042),
        (patch(OF_STREAM + ORDERS, encode_option(b"name", TEXT, b"")), 4042),
        (patch(OF_STREAM + ORDERS, encode_option(b"name", TEXT, b"\xff")), 4042),
        (patch(OF_STREAM + ORDERS, encode_option(b"name", U64, bytes(8))), 4042),
        (patch(OF_STREAM + ORDERS, encode_option(b"name", TEXT, b"a" * 256)), 4042),
    ],
)
def test_refused_patches(peer: Dialogue, body: bytes, error: int) -> None:
    status, reply = peer.headered(PATCH, body, number=3)
    assert (status, reply) == (0, pack("<III", 1, 0, error))
    assert peer.headered(2, PAID, code=Code.GET_TOPIC)[1]


def test_a_truncated_patch_is_refused(peer: Dialogue) -> None:
    whole = patch(OF_TOPIC + PAID, encode_option(b"name", TEXT, b"owed"), resets=("message_expiry", "max_topic_size"))
    for cut in range(len(whole)):
        status, reply = peer.headered(PATCH, whole[:cut], number=3 + cut)
        assert (status, len(reply)) in ((0, 12), (0, 4))
        if len(reply) == 4:  # the patch ends before an option: it resets the options
            assert whole[cut:].startswith(encode_option(b"name", TEXT, b"owed"))
    assert peer.headered(2, PAID, code=Code.GET_TOPIC)[1], "its name did not change"


def test_older_clients_have_no_patches() -> None:
    peer = d3.registered()
    assert peer.headered(PATCH, patch(OF_STREAM + ORDERS, encode_option(b"name", TEXT, b"sold")), number=1) == (-4, b"")


@pytest.mark.parametrize("code", [Code.GET_ROUTE, Code.POLL_HELD, Code.AWAIT, Code.FETCH])
def test_older_clients_have_none_of_the_commands(code: int) -> None:
    assert d3.registered().headered(2, PAID + bytes(4), code=code) == (3, b"")
    assert World().connect().classic(code, PAID + bytes(4)) == (3, b"")


def test_a_topic_of_fixed_partitions(peer: Dialogue) -> None:
    fixed = encode_option(b"partition_resize_policy", TEXT, b"fixed") + encode_option(
        b"replication_factor", 11, pack("<I", 3)
    )
    assert peer.headered(132, ORDERS + pack("<I", 2) + name("fast") + fixed, number=3)[0] == 0
    fast = ORDERS + name_ident("fast") + pack("<I", 1)
    for operation, number in ((136, 4), (137, 5)):
        assert peer.headered(operation, fast, number=number) == (0, pack("<III", 1, 0, 2023))
    assert fixed in peer.headered(2, ORDERS + name_ident("fast"), code=Code.GET_TOPIC)[1]


def test_options_are_described_with_their_permitted_changes(peer: Dialogue) -> None:
    body = peer.headered(2, b"\x01", code=Code.DESCRIBE_OPTIONS)[1]
    found, at = {}, 4
    for _ in range(unpack_from("<I", body)[0]):
        key = body[at + 1 : at + 1 + body[at]]
        at += 1 + body[at]
        found[key] = body[at + 1]
        for begin in (2, 0):
            at += begin
            at += 4 + unpack_from("<I", body, at)[0]
    assert at == len(body)
    assert {key for key, flags in found.items() if flags == 3} == {b"message_expiry", b"max_topic_size"}
    assert b"partition_resize_policy" in found
    assert b"enforce_fsync" not in found
    assert peer.headered(2, b"\x02", code=Code.DESCRIBE_OPTIONS)[1] == bytes(4)


def test_statistics_end_with_open_files(peer: Dialogue) -> None:
    opened, limit = unpack_from("<QQ", peer.headered(2, code=Code.GET_STATS)[1][-16:])
    assert 0 < opened < limit


def produced(
    *, producer: int = 5, epoch: int = 0, sequence: int = 0, partitioning: bytes = b"\x02\x04\0\0\0\0"
) -> bytes:
    """Return a send of one message of an idempotent producer."""
    section = pack("<B3xQHxxI", 1, producer, epoch, sequence)
    head = bytes(24) + T + pack("<Q", 256 + len(d3.FRAME))
    hashed = head + pack("<I", 1) + pack("<BQHI", 1, producer, epoch, sequence) + d3.FRAME[:8]
    batch = head + pack("<QI", xxhash.xxh3_64_intdigest(hashed), 1) + section + bytes(184) + d3.FRAME
    metadata = PAID + partitioning + pack("<I", 1)
    return pack("<I", len(metadata)) + metadata + batch


def sent_at(peer: Dialogue, body: bytes, number: int) -> int:
    """Return the offset of a send, or its negative status."""
    status, reply = peer.headered(160, body, number=number)
    return -status if status else int(unpack_from("<Q", reply, 16)[0])


def test_a_producers_batch_is_stored_once(peer: Dialogue) -> None:
    assert [sent_at(peer, produced(sequence=number), 10 + number) for number in range(3)] == [0, 1, 2]
    other = Dialogue(peer.world)
    assert other.headered(1, REGISTER)[0] == 0
    assert sent_at(other, produced(sequence=1), 1) == 1, "it was stored before, over another connection"
    assert sent_at(other, produced(sequence=4), 2) == -92
    assert sent_at(other, produced(epoch=1), 3) == 3
    assert sent_at(peer, produced(sequence=3), 20) == -93
    assert sent_at(peer, produced(producer=6), 21) == 4
    assert unpack_from("<I", peer.headered(2, d3.POLL, code=Code.POLL, number=22)[1], 12) == (5,)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (produced(partitioning=b"\x01\0"), 95),
        (produced(partitioning=b"\x03\x01k"), 95),
        (produced(producer=2**63), 3),
        (produced(epoch=2**15), 3),
        (produced(sequence=2**31), 3),
        (produced().replace(pack("<B3xQ", 1, 5), pack("<B3xQ", 2, 5)), 4101),
        (produced().replace(pack("<B3xQHH", 1, 5, 0, 0), pack("<B3xQHH", 1, 5, 0, 9)), 4101),
        (produced().replace(pack("<B3xQHH", 1, 5, 0, 0), pack("<B3xQHH", 1, 6, 0, 0)), 4039),
        (produced()[: -len(d3.FRAME) - 8] + b"\1" + bytes(7) + d3.FRAME, 4101),
    ],
)
def test_refused_producers(peer: Dialogue, body: bytes, status: int) -> None:
    assert sent_at(peer, body, 3) == -status


def test_older_clients_have_no_producers() -> None:
    peer = d3.registered()
    assert peer.headered(128, d3.CREATE_STREAM, number=1)[0] == 0
    assert peer.headered(132, d3.CREATE_TOPIC, number=2)[0] == 0
    assert sent_at(peer, produced(), 3) == -4101
