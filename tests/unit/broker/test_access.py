"""Users, tokens and permissions: who is let in, what they may do, and that it outlives restarts."""

from __future__ import annotations

import time
from typing import Any

import pytest

from polywire.broker.access import DEFAULT_NAME, DEFAULT_PASSWORD, ROOT, ConfiguredUser, Principal, User
from polywire.broker.passwords import check_password, hash_password
from polywire.broker.permissions import ALL, EVERYTHING, Grants, Permission, opened, parse_grants
from polywire.broker.settings import BrokerSettings
from polywire.errors import BrokerError, Busy, Conflict, Denied, ErrorCode, Invalid, Missing
from polywire.testing.broker import MemoryBroker
from polywire.types import TopicName

ORDERS = TopicName("shop", "orders")
HASH = hash_password("secret")
ALICE = ConfiguredUser("alice", HASH, EVERYTHING)
WAIT_S_MAX = 10.0


def settle(memory: MemoryBroker, told: list[Any]) -> Any:
    """What a callback was told, once the thread that hashes is done."""
    deadline = time.monotonic() + WAIT_S_MAX
    while not told:
        assert time.monotonic() < deadline, "nobody answered"
        memory.run()
        time.sleep(0.001)
    return told.pop()


def log_in(memory: MemoryBroker, name: str, password: str) -> Principal | BrokerError:
    told: list[Any] = []
    memory.broker.access.log_in(name, password, told.append)
    assert not told, "never from inside the call"
    answer: Principal | BrokerError = settle(memory, told)
    return answer


def create(memory: MemoryBroker, name: str, password: str, grants: Grants | None = None) -> User:
    told: list[Any] = []
    memory.broker.access.create_user(name, password, grants, done=lambda user, error: told.append((user, error)))
    user, error = settle(memory, told)
    assert error is None
    assert isinstance(user, User)
    return user


def refused(answer: Principal | BrokerError) -> ErrorCode:
    assert isinstance(answer, Denied)
    return answer.code


def test_an_open_broker_lets_everybody_in(memory: MemoryBroker) -> None:
    access = memory.broker.access
    assert access.is_open
    assert access.anonymous() is ROOT
    assert log_in(memory, DEFAULT_NAME, DEFAULT_PASSWORD) is ROOT
    for permission in Permission:
        access.check(ROOT, permission, ORDERS)
    assert refused(log_in(memory, DEFAULT_NAME, "other")) is ErrorCode.LOGIN_FAILED
    assert refused(log_in(memory, "other", DEFAULT_PASSWORD)) is ErrorCode.LOGIN_FAILED


def test_configured_users_close_the_broker(memory: MemoryBroker) -> None:
    access = memory.broker.access
    access.configure([ALICE])
    assert not access.is_open
    with pytest.raises(Denied) as caught:
        access.anonymous()
    assert caught.value.code is ErrorCode.LOGIN_REQUIRED
    assert refused(log_in(memory, DEFAULT_NAME, DEFAULT_PASSWORD)) is ErrorCode.LOGIN_FAILED
    with pytest.raises(Denied):
        access.check(ROOT, Permission.CONSUME, ORDERS)
    alice = log_in(memory, "alice", "secret")
    assert isinstance(alice, Principal)
    access.check(alice, Permission.MANAGE_SERVERS)
    assert access.recall("alice", "secret") == alice
    assert access.recall("alice", "wrong") is None
    assert log_in(memory, "alice", "secret") == alice, "and from what is remembered"
    with pytest.raises(Denied):
        access.delete_user(access.user("alice"))
    with pytest.raises(Denied):
        access.grant(access.user("alice"), None)


def test_configured_users_follow_their_file(memory: MemoryBroker) -> None:
    access = memory.broker.access
    made = create(memory, "bob", "builder")
    access.configure([ALICE, ConfiguredUser("bob", HASH, EVERYTHING)])
    assert access.user("bob").id == made.id
    assert isinstance(log_in(memory, "bob", "secret"), Principal)
    memory.run()
    access = memory.restart().access
    assert not access.is_open, "users stay when the next start names no file"
    access.configure([ConfiguredUser("bob", HASH, EVERYTHING)])
    assert [user.name for user in access.users()] == ["bob"]
    access.configure([])
    assert access.is_open
    assert [user.name for user in access.users()] == [DEFAULT_NAME]


@pytest.mark.parametrize("snapshot", [False, True])
def test_users_outlive_restarts(memory: MemoryBroker, snapshot: bool) -> None:
    user = create(memory, "carol", "sing", parse_grants(["produce@shop/orders"]))
    token = memory.broker.access.create_token(user, "ci", None)
    memory.run()
    if snapshot:
        memory.log.take_snapshot()
    access = memory.restart().access
    principal = Principal(user.id, "carol")
    assert access.user(user.id).name == "carol"
    assert log_in(memory, "carol", "sing") == principal
    assert access.log_in_with_token(token) == principal
    access.check(principal, Permission.PRODUCE, ORDERS)
    for permission, name in ((Permission.CONSUME, ORDERS), (Permission.PRODUCE, TopicName("shop", "paid"))):
        with pytest.raises(Denied) as caught:
            access.check(principal, permission, name)
        assert caught.value.code is ErrorCode.DENIED


def test_changes_count_at_once(memory: MemoryBroker) -> None:
    access = memory.broker.access
    user = create(memory, "dave", "first", EVERYTHING)
    principal = Principal(user.id, "dave")
    token = access.create_token(user, "t", None)
    access.grant(access.user("dave"), parse_grants(["consume"]))
    assert access.allows(principal, Permission.CONSUME, ORDERS)
    assert not access.allows(principal, Permission.PRODUCE, ORDERS)
    access.update_user(access.user("dave"), active=False)
    assert not access.allows(principal, Permission.CONSUME, ORDERS)
    assert refused(log_in(memory, "dave", "first")) is ErrorCode.LOGIN_FAILED
    with pytest.raises(Denied):
        access.log_in_with_token(token)
    access.update_user(access.user("dave"), name="david", active=True)
    assert access.find_user("dave") is None
    assert isinstance(log_in(memory, "david", "first"), Principal)
    told: list[Any] = []
    access.change_password(access.user("david"), "wrong", "second", done=lambda *answer: told.append(answer))
    assert refused(settle(memory, told)[1]) is ErrorCode.LOGIN_FAILED
    access.change_password(access.user("david"), "first", "second", done=lambda *answer: told.append(answer))
    assert settle(memory, told)[1] is None
    assert refused(log_in(memory, "david", "first")) is ErrorCode.LOGIN_FAILED
    assert isinstance(log_in(memory, "david", "second"), Principal)
    access.delete_user(access.user("david"))
    assert not access.allows(principal, Permission.CONSUME, ORDERS)
    with pytest.raises(Missing) as caught:
        access.user("david")
    assert caught.value.code is ErrorCode.USER_MISSING


def test_tokens(memory: MemoryBroker) -> None:
    access = memory.broker.access
    user = create(memory, "eve", "apple", EVERYTHING)
    token = access.create_token(user, "short", memory.clock.now_us() + 1_000_000)
    with pytest.raises(Conflict) as exists:
        access.create_token(access.user("eve"), "short", None)
    assert exists.value.code is ErrorCode.TOKEN_EXISTS
    assert access.log_in_with_token(token).name == "eve"
    memory.advance(1)
    for wrong in (token, token[:-1], "", "\ud800"):
        with pytest.raises(Denied):
            access.log_in_with_token(wrong)
    again = access.create_token(access.user("eve"), "short", None)
    assert len(access.user("eve").tokens) == 1, "the expired one is gone"
    access.delete_token(access.user("eve"), "short")
    with pytest.raises(Denied):
        access.log_in_with_token(again)
    with pytest.raises(Missing) as missing:
        access.delete_token(access.user("eve"), "short")
    assert missing.value.code is ErrorCode.TOKEN_MISSING


def test_limits() -> None:
    memory = MemoryBroker(BrokerSettings(users_max=1, tokens_max=1, logins_waiting_max=1))
    access = memory.broker.access
    with pytest.raises(Invalid):
        access.create_user("", "x", None, done=lambda *_: None)
    with pytest.raises(Invalid):
        access.create_user("frank", "", None, done=lambda *_: None)
    user = create(memory, "frank", "x")
    for name in ("frank", DEFAULT_NAME):
        with pytest.raises(Conflict):
            access.create_user(name, "x", None, done=lambda *_: None)
    with pytest.raises(Busy):
        access.create_user("grace", "x", None, done=lambda *_: None)
    access.create_token(user, "one", None)
    with pytest.raises(Busy):
        access.create_token(access.user("frank"), "two", None)
    told: list[Any] = []
    access.log_in("frank", "x", told.append)
    with pytest.raises(Busy):
        access.log_in("frank", "x", told.append)
    assert isinstance(settle(memory, told), Principal)
    assert refused(log_in(memory, "frank", "x" * 2000)) is ErrorCode.LOGIN_FAILED


def test_two_who_want_one_name(memory: MemoryBroker) -> None:
    told: list[Any] = []
    for _ in range(2):
        memory.broker.access.create_user("heidi", "x", None, done=lambda *answer: told.append(answer))
    while len(told) < 2:
        memory.run()
    assert [error is None for _, error in told] == [True, False]
    assert told[1][1].code is ErrorCode.USER_EXISTS


def test_rights_include_others() -> None:
    assert opened(Permission.MANAGE_STREAMS) & Permission.PRODUCE
    assert opened(Permission.READ_STREAMS) & Permission.GROUP
    assert not opened(Permission.READ_STREAMS) & Permission.PRODUCE
    assert opened(Permission.CONSUME) == Permission.CONSUME
    assert opened(ALL) == ALL


def test_grants_in_words() -> None:
    grants = parse_grants(["read_servers", "consume@shop", "produce@shop/orders", "consume@shop/orders"]).opened()
    assert grants.allow(Permission.READ_SERVERS, None, None)
    assert grants.allow(Permission.CONSUME, TopicName("shop", "other"), None)
    assert grants.allow(Permission.CONSUME, None, "shop")
    assert grants.allow(Permission.PRODUCE, ORDERS, None)
    assert not grants.allow(Permission.PRODUCE, None, "shop")
    assert not grants.allow(Permission.CONSUME, TopicName("default", "orders"), None)
    for word in ("fly", "consume@", ""):
        with pytest.raises(Invalid):
            parse_grants([word])


def test_hashes() -> None:
    assert check_password(HASH, "secret")
    assert not check_password(HASH, "Secret")
    assert not check_password("rubbish", "secret")
