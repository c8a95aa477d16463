"""Connection slots by login: which connections get one, which are evicted, and which logins end."""

from __future__ import annotations

from itertools import count

import pytest

from polywire.broker.access import Principal
from polywire.errors import Busy
from polywire.server.logins import GRACE_TICKS, LOGIN_SECONDS_MAX, QUIET_TICKS, Logins, Standing

USER = Principal(1, "user")
OTHER = Principal(2, "other")
ANONYMOUS = Principal(4, "anonymous")
BOSS = Principal(3, "boss")


PORTS = count(1)


class Users:
    """The users who may log in."""

    def __init__(self) -> None:
        self.is_open = False
        self.over: set[Principal] = set()
        self.verifying: set[str] = set()

    def is_current(self, principal: Principal, /) -> bool:
        return principal not in self.over

    def is_administrator(self, principal: Principal, /) -> bool:
        return principal is BOSS

    def is_verifying(self, peer: str, /) -> bool:
        return peer in self.verifying

    def certified(self, name: str) -> Principal | None:
        return None


class Peer:
    """A connection."""

    def __init__(self, wire: str = "polywire") -> None:
        self.wire = wire
        self.peer = f"127.0.0.1:{next(PORTS)}"
        self.seen_tick = 0
        self.gone = ""

    def abort(self, reason: str) -> None:
        self.gone = reason

    def free_slot(self) -> None:
        assert self.gone

    def end(self, reason: str) -> None:
        self.gone = reason


@pytest.fixture
def users() -> Users:
    return Users()


@pytest.fixture
def logins(users: Users) -> Logins:
    return Logins(users, 16)


def enter(logins: Logins, number: int, principal: Principal | None = None, *, wire: str = "polywire") -> list[Peer]:
    peers = [Peer(wire) for _ in range(number)]
    for peer in peers:
        assert logins.enter(peer)
        logins.identify(peer, principal)
    return peers


def gone(peers: list[Peer]) -> list[bool]:
    return [bool(peer.gone) for peer in peers]


def test_strangers_do_not_take_the_slots_of_users(logins: Logins) -> None:
    assert (logins.strangers_max, logins.administrators_reserved) == (10, 2)
    silent = enter(logins, 10)
    known = enter(logins, 3, USER)
    assert gone(silent) == [True] + [False] * 9, (
        "the longest unauthenticated connections were evicted for those that log in"
    )
    assert gone(known) == [False] * 3


def test_a_connection_whose_login_is_being_verified_is_not_evicted(logins: Logins, users: Users) -> None:
    strangers = enter(logins, 10)
    users.verifying.add(strangers[0].peer)
    (late,) = enter(logins, 1)
    assert gone(strangers) == [False, True] + [False] * 8
    users.verifying |= {peer.peer for peer in (*strangers, late)}
    assert not logins.enter(Peer())
    assert gone([*strangers, late]) == [False, True] + [False] * 9


def test_strangers_on_protocols_with_a_login_are_evicted_first(logins: Logins) -> None:
    nameless = enter(logins, 8, wire="flux")
    strangers = enter(logins, 2)
    for _ in range(GRACE_TICKS):
        logins.sweep()
    enter(logins, 2, wire="kafka07")
    assert gone([*nameless, *strangers]) == [False] * 8 + [True] * 2
    enter(logins, 1, wire="kafka07")
    assert gone(nameless) == [True] + [False] * 7


def test_a_new_connection_has_time_to_log_in(logins: Logins) -> None:
    nameless = enter(logins, 9, wire="flux")
    (late, *_) = enter(logins, 3)
    assert gone([*nameless, late]) == [True] * 2 + [False] * 8


@pytest.mark.parametrize("wire", ["flux", "kafka07"])
def test_connections_served_as_anonymous_are_not_evicted_for_strangers(logins: Logins, wire: str) -> None:
    served = enter(logins, 3, ANONYMOUS, wire=wire)
    assert {logins.standing(peer) for peer in served} == {Standing.ANONYMOUS}
    assert {logins.name_of(peer) for peer in served} == {"anonymous"}
    enter(logins, 40)
    assert gone(served) == [False] * 3


def test_anonymous_leaves_slots_for_logins(logins: Logins) -> None:
    assert logins.anonymous_max == 5
    served = enter(logins, 9, ANONYMOUS, wire="flux")
    assert [logins.standing(peer) for peer in served] == [Standing.ANONYMOUS] * 5 + [Standing.UNKNOWN] * 4
    known = enter(logins, 6, USER)
    assert not any(gone(known))
    assert gone(served) == [False] * 9, "there was one slot for logins"
    enter(logins, 2)
    assert gone(served) == [False] * 5 + [True] + [False] * 3


def test_a_quiet_connection_of_anonymous_gives_its_slot_to_another(logins: Logins) -> None:
    served = enter(logins, 5, ANONYMOUS, wire="flux")
    for _ in range(QUIET_TICKS):
        logins.sweep()
    for peer in (*served[:2], *served[3:]):
        peer.seen_tick = logins.tick
    late = enter(logins, 2, ANONYMOUS, wire="flux")
    assert [logins.standing(peer) for peer in (served[2], *late)] == [
        Standing.UNKNOWN,
        Standing.ANONYMOUS,
        Standing.UNKNOWN,
    ]
    assert not any(gone([*served, *late])), "every connection is served as long as there are slots"


def test_administrators_find_a_slot_among_users_and_anonymous(logins: Logins) -> None:
    served = enter(logins, 2, ANONYMOUS, wire="flux")
    enter(logins, 14, USER)
    served[0].seen_tick = 1
    for _ in range(3):
        (late,) = enter(logins, 1)
    assert gone(served) == [False, True], "one slot is enough for unauthenticated connections, which evict each other"
    logins.identify(late, BOSS)
    assert logins.standing(late) is Standing.ADMINISTRATOR


def test_users_leave_slots_for_administrators(logins: Logins) -> None:
    enter(logins, 14, USER)
    late = Peer()
    assert logins.enter(late)
    with pytest.raises(Busy):
        logins.identify(late, OTHER)
    logins.identify(late, BOSS)
    enter(logins, 1, BOSS)
    assert not logins.enter(Peer()), "every slot is taken by a login"


def test_a_login_takes_ten_seconds_at_most(logins: Logins, users: Users) -> None:
    silent, other_wire, busy = Peer(), Peer("flux"), Peer()
    users.verifying.add(busy.peer)
    for peer in (silent, other_wire, busy):
        logins.enter(peer)
    for _ in range(LOGIN_SECONDS_MAX):
        logins.sweep()
    (known,) = enter(logins, 1, USER)
    assert gone([silent, other_wire, busy, known]) == [False] * 4
    logins.sweep()
    assert gone([silent, other_wire, busy, known]) == [True, False, False, False]
    logins.identify(known, None)
    for _ in range(LOGIN_SECONDS_MAX + 1):
        logins.sweep()
    assert known.gone, "a client that logged out must log in again"


def test_connections_of_invalid_logins_are_closed(logins: Logins, users: Users) -> None:
    mine, others = enter(logins, 2, USER), enter(logins, 1, OTHER)
    logins.end(USER.user_id)
    assert gone([*mine, *others]) == [False] * 3, "valid logins stay"
    users.over.add(USER)
    logins.identify(mine[1], OTHER)
    logins.end(USER.user_id)
    logins.end(99)
    assert gone([*mine, *others]) == [True, False, False]


def test_connections_of_expired_tokens_are_closed(logins: Logins, users: Users) -> None:
    token = Principal(4, "robot", expires_at_us=1)
    (peer,) = enter(logins, 1, token)
    logins.sweep()
    assert not peer.gone
    users.over.add(token)
    logins.sweep()
    assert peer.gone


def test_a_broker_without_users_has_no_logins(logins: Logins, users: Users) -> None:
    users.is_open = True
    peers = enter(logins, 40)
    for _ in range(3 * LOGIN_SECONDS_MAX):
        logins.sweep()
    assert not any(gone(peers))
    for peer in peers:
        logins.leave(peer)
