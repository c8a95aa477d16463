"""Who gets a place, who has to go, and whose login is over."""

from __future__ import annotations

import pytest

from polywire.broker.access import Principal
from polywire.errors import Busy
from polywire.server.logins import LOGIN_SECONDS_MAX, Logins

USER = Principal(1, "user")
OTHER = Principal(2, "other")
BOSS = Principal(3, "boss")


class Users:
    """Who may log in."""

    def __init__(self) -> None:
        self.is_open = False
        self.over: set[Principal] = set()

    def is_current(self, principal: Principal, /) -> bool:
        return principal not in self.over

    def is_administrator(self, principal: Principal, /) -> bool:
        return principal is BOSS

    def certified(self, name: str) -> Principal | None:
        return None


class Peer:
    """A connection."""

    def __init__(self, wire: str = "polywire") -> None:
        self.wire = wire
        self.peer = "127.0.0.1:1"
        self.is_waiting = False
        self.gone = ""

    def abort(self, reason: str) -> None:
        self.gone = reason

    def end(self, reason: str) -> None:
        self.gone = reason


@pytest.fixture
def users() -> Users:
    return Users()


@pytest.fixture
def logins(users: Users) -> Logins:
    return Logins(users, 16)


def enter(logins: Logins, count: int, principal: Principal | None = None) -> list[Peer]:
    peers = [Peer() for _ in range(count)]
    for peer in peers:
        assert logins.enter(peer)
        logins.identify(peer, principal)
    return peers


def gone(peers: list[Peer]) -> list[bool]:
    return [bool(peer.gone) for peer in peers]


def test_nobody_takes_the_places_of_users(logins: Logins) -> None:
    assert (logins.nobody_max, logins.administrators_reserved) == (10, 2)
    silent = enter(logins, 10)
    known = enter(logins, 3, USER)
    assert gone(silent) == [True] + [False] * 9, "who was nobody longest gave way, to all who then logged in"
    assert gone(known) == [False] * 3


def test_who_is_logging_in_stays(logins: Logins) -> None:
    silent = enter(logins, 10)
    silent[0].is_waiting = True
    enter(logins, 1)
    assert gone(silent) == [False, True] + [False] * 8
    for peer in silent:
        peer.is_waiting = True
    enter(logins, 1)
    waiting = Peer()
    waiting.is_waiting = True
    for _ in range(9):
        logins.enter(waiting)


def test_users_leave_places_for_administrators(logins: Logins) -> None:
    enter(logins, 14, USER)
    late = Peer()
    assert logins.enter(late)
    with pytest.raises(Busy):
        logins.identify(late, OTHER)
    logins.identify(late, BOSS)
    enter(logins, 1, BOSS)
    assert not logins.enter(Peer()), "every place is taken by somebody"


def test_a_login_takes_ten_seconds_at_most(logins: Logins, users: Users) -> None:
    silent, other_wire, busy = Peer(), Peer("flux"), Peer()
    busy.is_waiting = True
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
    assert known.gone, "who has logged out is asked again"


def test_logins_that_are_over_end(logins: Logins, users: Users) -> None:
    mine, others = enter(logins, 2, USER), enter(logins, 1, OTHER)
    logins.end(USER.user_id)
    assert gone([*mine, *others]) == [False] * 3, "what counts still counts"
    users.over.add(USER)
    logins.identify(mine[1], OTHER)
    logins.end(USER.user_id)
    logins.end(99)
    assert gone([*mine, *others]) == [True, False, False]


def test_tokens_end_by_themselves(logins: Logins, users: Users) -> None:
    token = Principal(4, "robot", expires_at_us=1)
    (peer,) = enter(logins, 1, token)
    logins.sweep()
    assert not peer.gone
    users.over.add(token)
    logins.sweep()
    assert peer.gone


def test_an_open_broker_asks_nobody(logins: Logins, users: Users) -> None:
    users.is_open = True
    peers = enter(logins, 40)
    for _ in range(3 * LOGIN_SECONDS_MAX):
        logins.sweep()
    assert not any(gone(peers))
    for peer in peers:
        logins.leave(peer)
