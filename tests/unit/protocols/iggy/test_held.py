"""Held requests of protocol 0.12: polls that wait without blocking later responses (spec: iggy#d4-held-polls)."""

from __future__ import annotations

from struct import pack, unpack_from
from typing import Final, NamedTuple

import pytest

from polywire.protocols.iggy.client_codec import ident as name_ident
from polywire.protocols.iggy.held import HELD_MAX
from polywire.protocols.iggy.messages import Code
from tests.unit.protocols.iggy.dialogue import Dialogue, headered
from tests.vectors.iggy import test_today as d3
from tests.vectors.iggy.test_protocol_012 import PAID, furnished, incarnation_of

S_US: Final = 1_000_000
GROUP: Final = b"\x02" + name_ident("g1")
SINGLE: Final = b"\x01" + name_ident("app")
BIG: Final = 1 << 20
MESSAGE_BYTES: Final = 256 + 48 + 5  # a record with one message "hello"
PING: Final = headered(2, code=Code.PING, number=99)


def held(
    partition: int = 0,
    *,
    starts: bytes = pack("<BQ", 1, 0),
    wait_s: float = 5,
    least: int = 1,
    most: int = 10,
    size: int = BIG,
    who: bytes = SINGLE,
    commits: int = 0,
) -> bytes:
    """Return a held poll."""
    poll = who + PAID + pack("<BI", 1, partition) + starts + pack("<IB", most, commits)
    return poll + pack("<QIIQ", int(wait_s * S_US), least, size, int((wait_s + 1) * S_US))


def awaited(*targets: tuple[int, int, int], wait_s: float = 5, who: bytes = SINGLE) -> bytes:
    """Return a wait for partitions, each with a strategy."""
    times = pack("<QQI", int(wait_s * S_US), int((wait_s + 1) * S_US), len(targets))
    return who + PAID + times + b"".join(pack("<IBQ", *target) for target in targets)


class Target(NamedTuple):
    """A partition of a fetch."""

    partition: int
    kind: int = 1
    value: int = 0
    size: int = BIG
    incarnation: int = 0
    generation: int = 0


def fetched(
    *targets: Target,
    wait_s: float = 5,
    least: int = 1,
    most: int = 100,
    size: int = BIG,
    commits: int = 0,
    who: bytes = SINGLE,
) -> bytes:
    """Return a fetch of several partitions."""
    times = pack("<QQ", int(wait_s * S_US), int((wait_s + 1) * S_US))
    limits = pack("<IIIBI", least, most, size, commits, len(targets))
    return who + PAID + times + limits + b"".join(pack("<IBQIQQ", *target) for target in targets)


class Section(NamedTuple):
    """A partition of the reply to a fetch."""

    partition: int
    status: int
    newest: int
    messages: int
    incarnation: int
    generation: int
    position: int
    following: int
    size: int


def sections(body: bytes) -> list[Section]:
    """Return the sections of a reply; their records must fill it."""
    found = [Section(*unpack_from("<IIQIQQQQI", body, 4 + 56 * at)) for at in range(unpack_from("<I", body)[0])]
    assert len(body) == 4 + 56 * len(found) + sum(section.size for section in found)
    return found


def beside(peer: Dialogue) -> Dialogue:
    """Open another connection to the same broker, of a client before 0.12."""
    other = Dialogue(peer.world)
    assert other.headered(1, d3.REGISTER)[0] == 0
    return other


def send(peer: Dialogue, partition: int = 0) -> None:
    """Send a message over another connection."""
    body = d3.SEND.replace(b"\x02\x04\0\0\0\0", b"\x02\x04" + pack("<I", partition), 1)
    assert beside(peer).headered(160, body, number=1)[0] == 0


def ask(peer: Dialogue, code: int, body: bytes, *, number: int = 50) -> None:
    """Send a request that is held."""
    peer.feed(headered(2, body, code=code, number=number))
    peer.pass_by()


def replies(peer: Dialogue) -> dict[int, tuple[int, bytes]]:
    """Return the replies that have arrived: status and body by request number."""
    peer.pass_by()
    data, found = peer.take(), {}
    while data:
        size = unpack_from("<I", data, 48)[0]
        assert data[60] == 8
        number = unpack_from("<Q", data, 200)[0]
        assert number not in found
        found[number] = unpack_from("<I", data, 216)[0], data[256:size]
        data = data[size:]
    return found


@pytest.fixture
def peer() -> Dialogue:
    return furnished()


def joined(peer: Dialogue) -> None:
    """Make the client the only member of a group."""
    assert peer.headered(139, PAID + b"\x02g1", number=10)[0] == 0
    assert peer.headered(148, PAID + name_ident("g1"), number=11)[0] == 0


def test_a_message_ends_a_held_poll_and_later_requests_do_not_wait(peer: Dialogue) -> None:
    ask(peer, Code.POLL_HELD, held())
    assert replies(peer) == {}
    assert peer.ask(PING)[200] == 99
    send(peer)
    (number, (status, body)), *rest = replies(peer).items()
    assert (number, status, rest) == (50, 0, [])
    assert unpack_from("<IQI", body) == (0, 0, 1)
    assert len(body) == 40 + MESSAGE_BYTES
    peer.world.memory.advance(10)
    assert replies(peer) == {}, "one reply only"


def test_a_poll_that_times_out_returns_the_available_messages(peer: Dialogue) -> None:
    ask(peer, Code.POLL_HELD, held(least=3, wait_s=2))
    send(peer)
    assert replies(peer) == {}
    peer.world.memory.advance(1.9)
    assert replies(peer) == {}
    peer.world.memory.advance(0.2)
    assert unpack_from("<IQI", replies(peer)[50][1]) == (0, 0, 1)


def test_enough_messages_end_a_held_poll(peer: Dialogue) -> None:
    ask(peer, Code.POLL_HELD, held(least=2, most=5))
    send(peer)
    assert replies(peer) == {}
    send(peer)
    assert unpack_from("<IQI", replies(peer)[50][1]) == (0, 1, 2)


def test_a_poll_without_a_wait(peer: Dialogue) -> None:
    ask(peer, Code.POLL_HELD, held(wait_s=0))
    assert unpack_from("<IQI", replies(peer)[50][1]) == (0, 0, 0)


@pytest.mark.parametrize(
    "strategy", [pack("<BQ", 1, 0), pack("<BQ", 2, 0), pack("<BQ", 3, 0), pack("<BQ", 4, 0), pack("<BQ", 5, 0)]
)
def test_every_polling_strategy(peer: Dialogue, strategy: bytes) -> None:
    send(peer)
    send(peer)
    ask(peer, Code.POLL_HELD, held(starts=strategy))
    assert unpack_from("<IQI", replies(peer)[50][1]) == (0, 1, 2)


def test_polled_messages_are_committed(peer: Dialogue) -> None:
    send(peer)
    for number, count in ((50, 1), (51, 0)):
        ask(peer, Code.POLL_HELD, held(starts=pack("<BQ", 5, 0), commits=1, wait_s=1), number=number)
        peer.world.memory.advance(2)
        assert unpack_from("<I", replies(peer)[number][1], 12)[0] == count


def test_replies_stay_below_the_clients_limit(peer: Dialogue) -> None:
    for _ in range(5):
        send(peer)
    ask(peer, Code.POLL_HELD, held(size=40 + 2 * MESSAGE_BYTES))
    body = replies(peer)[50][1]
    assert unpack_from("<IQI", body) == (0, 4, 2)
    assert len(body) == 40 + 2 * MESSAGE_BYTES
    ask(peer, Code.POLL_HELD, held(size=40 + MESSAGE_BYTES - 1))
    assert replies(peer)[50] == (80, b""), "not even one fits"


def test_a_cancelled_request_is_not_answered(peer: Dialogue) -> None:
    ask(peer, Code.POLL_HELD, held())
    ask(peer, Code.CANCEL, b"")
    ask(peer, Code.CANCEL, b"", number=51)
    send(peer)
    peer.world.memory.advance(10)
    assert replies(peer) == {}
    ask(peer, Code.POLL_HELD, held())
    assert unpack_from("<I", replies(peer)[50][1], 12) == (1,), "the number is free again"


def test_held_requests_per_connection_are_limited(peer: Dialogue) -> None:
    for number in range(HELD_MAX):
        ask(peer, Code.POLL_HELD, held(), number=100 + number)
    ask(peer, Code.POLL_HELD, held(), number=400)
    ask(peer, Code.POLL_HELD, held(), number=100)
    assert replies(peer) == {100: (90, b""), 400: (90, b"")}
    send(peer)
    assert len(replies(peer)) == HELD_MAX


def test_held_partitions_per_connection_are_limited() -> None:
    peer = furnished()
    assert peer.headered(136, PAID + pack("<I", 997), number=9)[0] == 0
    every = fetched(*map(Target, range(1000)))
    for number in range(50, 55):
        ask(peer, Code.FETCH, every, number=number)
    assert replies(peer) == {54: (90, b"")}
    ask(peer, Code.CANCEL, b"", number=50)
    ask(peer, Code.FETCH, every, number=55)
    assert replies(peer) == {}
    send(peer)
    for _ in range(100):
        peer.pass_by()
    assert sorted(replies(peer)) == [51, 52, 53, 55]


def test_a_client_that_does_not_read_gets_no_more_replies(peer: Dialogue) -> None:
    ask(peer, Code.POLL_HELD, held())
    peer.backlog = peer.backlog_max + 1
    send(peer)
    peer.world.memory.advance(10)
    assert replies(peer) == {}, "not even after the timeout"
    peer.backlog = 0
    peer.world.memory.advance(1)
    assert unpack_from("<IQI", replies(peer)[50][1]) == (0, 0, 1)


def test_a_request_number_can_be_held_once(peer: Dialogue) -> None:
    ask(peer, Code.POLL_HELD, held())
    ask(peer, Code.POLL_HELD, held())
    assert replies(peer)[50] == (90, b"")
    send(peer)
    assert replies(peer)[50][0] == 0


def test_a_closed_connection_ends_its_held_requests(peer: Dialogue) -> None:
    for code, body in ((Code.POLL_HELD, held()), (Code.AWAIT, awaited((0, 1, 0))), (Code.FETCH, fetched(Target(0)))):
        ask(peer, code, body, number=code)
    peer.session.close()
    send(peer)
    peer.world.memory.advance(10)
    assert peer.take() == b""


def test_the_end_of_the_stream_ends_held_requests(peer: Dialogue) -> None:
    ask(peer, Code.POLL_HELD, held())
    peer.session.finish(memoryview(b""))
    peer.pass_by()
    assert peer.closed
    assert peer.take() == b""


def test_a_deleted_partition_is_reported(peer: Dialogue) -> None:
    ask(peer, Code.POLL_HELD, held(2), number=50)
    ask(peer, Code.AWAIT, awaited((2, 1, 0)), number=51)
    ask(peer, Code.FETCH, fetched(Target(2), Target(0)), number=52)
    assert beside(peer).headered(137, PAID + pack("<I", 1), number=1)[0] == 0
    found = replies(peer)
    assert (found[50], found[51]) == ((3007, b""), (3007, b""))
    assert [(section.partition, section.status) for section in sections(found[52][1])] == [(2, 3007), (0, 0)]


def test_a_wait_for_several_partitions(peer: Dialogue) -> None:
    ask(peer, Code.AWAIT, awaited((0, 1, 0), (1, 5, 0), (2, 1, 0)))
    assert replies(peer) == {}
    send(peer, 1)
    assert replies(peer)[50] == (0, pack("<II", 1, 1))
    ask(peer, Code.AWAIT, awaited((0, 1, 0), (1, 1, 1), wait_s=1))
    peer.world.memory.advance(1.5)
    assert replies(peer)[50] == (0, bytes(4))


def test_a_fetch_of_several_partitions(peer: Dialogue) -> None:
    send(peer, 0)
    send(peer, 0)
    send(peer, 2)
    ask(peer, Code.FETCH, fetched(Target(2), Target(0, value=1), Target(1)))
    body = replies(peer)[50][1]
    first, second, third = sections(body)
    assert first[:4] == (2, 0, 0, 1)
    assert second[:4] == (0, 0, 1, 1)
    assert third[:4] == (1, 0, 0, 0)
    assert [section.following for section in (first, second, third)] == [1, 2, 0]
    assert [section.incarnation for section in (first, second, third)] == [incarnation_of(peer, at) for at in (2, 0, 1)]
    assert [section.size for section in (first, second, third)] == [MESSAGE_BYTES, MESSAGE_BYTES, 0]
    assert body.count(b"hello") == 2


def test_a_fetch_waits_for_enough_messages_of_all_its_partitions(peer: Dialogue) -> None:
    ask(peer, Code.FETCH, fetched(Target(0), Target(1), least=2))
    send(peer, 0)
    assert replies(peer) == {}
    send(peer, 1)
    assert [section.messages for section in sections(replies(peer)[50][1])] == [1, 1]
    ask(peer, Code.FETCH, fetched(Target(0, value=1), Target(1), least=2, wait_s=1))
    peer.world.memory.advance(1.5)
    assert [section.messages for section in sections(replies(peer)[50][1])] == [0, 1]


def test_limits_of_a_fetch_apply_to_its_whole_reply(peer: Dialogue) -> None:
    for number in range(3, 9):
        send(peer, number % 3)
    ask(peer, Code.FETCH, fetched(Target(0), Target(1), Target(2), most=3))
    assert [section.messages for section in sections(replies(peer)[50][1])] == [2, 1]
    ask(peer, Code.FETCH, fetched(*(Target(at, size=2 * MESSAGE_BYTES) for at in (0, 1, 2)), size=3 * MESSAGE_BYTES))
    body = replies(peer)[50][1]
    assert len(body) - 4 - 56 * len(sections(body)) <= 3 * MESSAGE_BYTES
    assert sections(body)[0].messages == 2


def test_a_fetch_has_a_status_for_each_partition(peer: Dialogue) -> None:
    send(peer)
    ask(peer, Code.FETCH, fetched(Target(0, incarnation=77), Target(9), Target(0 + 1)))
    statuses = [
        (section.partition, section.status, section.messages, section.size)
        for section in sections(replies(peer)[50][1])
    ]
    assert statuses == [(0, 87, 0, 0), (9, 3007, 0, 0), (1, 0, 0, 0)]


def test_fetched_messages_are_committed(peer: Dialogue) -> None:
    send(peer)
    for number, count in ((50, 1), (51, 0)):
        ask(peer, Code.FETCH, fetched(Target(0, kind=5), commits=1, wait_s=0), number=number)
        assert sections(replies(peer)[number][1])[0].messages == count


def test_members_hold_requests_for_their_partitions(peer: Dialogue) -> None:
    joined(peer)
    other = beside(peer)
    assert other.headered(148, PAID + name_ident("g1"), number=1)[0] == 0
    ask(peer, Code.POLL_HELD, held(0, who=GROUP), number=50)
    ask(peer, Code.POLL_HELD, held(1, who=GROUP), number=51)
    ask(peer, Code.AWAIT, awaited((1, 1, 0), who=GROUP), number=52)
    ask(peer, Code.FETCH, fetched(Target(0), Target(1), who=GROUP), number=53)
    found = replies(peer)
    assert sorted(found) == [51, 52, 53]
    assert (found[51], found[52]) == ((5009, b""), (5009, b""))
    assert [section.status for section in sections(found[53][1])] == [0, 5009]
    send(other, 0)
    assert unpack_from("<IQI", replies(peer)[50][1]) == (0, 0, 1)


def test_a_client_outside_a_group_holds_nothing_for_it(peer: Dialogue) -> None:
    assert peer.headered(139, PAID + b"\x02g1", number=10)[0] == 0
    for code, body in (
        (Code.POLL_HELD, held(who=GROUP)),
        (Code.AWAIT, awaited((0, 1, 0), who=GROUP)),
        (Code.FETCH, fetched(Target(0), who=GROUP)),
    ):
        ask(peer, code, body)
        assert replies(peer)[50] == (5006, b"")


def test_a_member_that_lost_its_partition_gets_an_error_when_woken(peer: Dialogue) -> None:
    joined(peer)
    ask(peer, Code.POLL_HELD, held(1, who=GROUP))
    other = beside(peer)
    assert other.headered(148, PAID + name_ident("g1"), number=1)[0] == 0
    send(other, 1)
    assert replies(peer)[50] == (5009, b"")


WHOLE: Final = [
    (Code.POLL_HELD, held(wait_s=0)),
    (Code.AWAIT, awaited((0, 1, 0), (1, 5, 0), wait_s=0)),
    (Code.FETCH, fetched(Target(0), Target(1), wait_s=0)),
]


@pytest.mark.parametrize(("code", "body"), WHOLE)
def test_truncated_requests_are_refused(peer: Dialogue, code: int, body: bytes) -> None:
    ask(peer, code, body)
    assert replies(peer)[50][0] == 0
    for cut in range(len(body)):
        ask(peer, code, body[:cut], number=100 + cut)
        assert replies(peer) == {100 + cut: (3, b"")}, f"truncated at {cut}"
    ask(peer, code, body + b"\0", number=51)
    assert replies(peer) == {51: (3, b"")}


BAD: Final = [
    (Code.POLL_HELD, held(wait_s=601)),
    (Code.POLL_HELD, held(least=0)),
    (Code.POLL_HELD, held(least=11)),
    (Code.POLL_HELD, held(size=343)),
    (Code.POLL_HELD, held()[:-8] + bytes(8)),
    (Code.POLL_HELD, held()[:-8] + pack("<Q", 5 * S_US)),
    (Code.POLL_HELD, held()[:-8] + pack("<Q", 631 * S_US)),
    (Code.AWAIT, awaited((0, 1, 0), (0, 1, 0))),
    (Code.AWAIT, awaited()),
    (Code.AWAIT, awaited((0, 3, 0))),
    (Code.AWAIT, awaited((0, 1, 0), wait_s=601)),
    (Code.AWAIT, awaited(*((number, 1, 0) for number in range(1001)))),
    (Code.FETCH, fetched(Target(0), Target(0))),
    (Code.FETCH, fetched()),
    (Code.FETCH, fetched(Target(0, kind=2))),
    (Code.FETCH, fetched(Target(0, size=343))),
    (Code.FETCH, fetched(Target(0), size=BIG - 1)),
    (Code.FETCH, fetched(Target(0), least=0)),
    (Code.FETCH, fetched(Target(0), least=101)),
    (Code.FETCH, fetched(*map(Target, range(1001)))),
]


@pytest.mark.parametrize(("code", "body"), BAD)
def test_requests_outside_the_limits_are_refused(peer: Dialogue, code: int, body: bytes) -> None:
    ask(peer, code, body)
    assert replies(peer)[50] == (3, b"")


def test_a_fetch_of_the_maximum_number_of_partitions(peer: Dialogue) -> None:
    ask(peer, Code.FETCH, fetched(*map(Target, range(1000)), wait_s=0))
    for _ in range(100):
        peer.pass_by()
    found = sections(replies(peer)[50][1])
    assert len(found) == 1000
    assert [section.status for section in found] == [0] * 3 + [3007] * 997
