"""Users, tokens, logins and permissions, live and after restarts."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from polywire.broker.access import (
    DEFAULT_NAME,
    DEFAULT_PASSWORD,
    KEPT_AS,
    NEXT_ID_KEY,
    ROOT,
    ConfiguredUser,
    Principal,
    User,
)
from polywire.broker.authorization import AuditEvent, Outcome
from polywire.broker.owners import caller_of
from polywire.broker.passwords import ADDRESS_FREE, DELAY_MIN_S, check_password, hash_password
from polywire.broker.permissions import ALL, EVERYTHING, Action, Grants, Permission, opened, parse_grants
from polywire.broker.scram import Mechanism, make_verifier
from polywire.broker.settings import BrokerSettings
from polywire.errors import BrokerError, Busy, Conflict, Denied, ErrorCode, Invalid, Missing
from polywire.share_settings import DEAD_LETTERS, DELIVERIES
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import TopicName

ORDERS = TopicName("shop", "orders")
HASH = hash_password("secret")
ALICE = ConfiguredUser("alice", HASH, EVERYTHING)
NOTHING_GRANTED = Grants()
WAIT_S_MAX = 60.0


def settle(memory: MemoryBroker, reported: list[Any]) -> Any:
    """Return the callback's result, once the hashing thread is done."""
    deadline = time.monotonic() + WAIT_S_MAX
    while not reported:
        assert time.monotonic() < deadline, "no result arrived"
        memory.run()
        time.sleep(0.001)
    return reported.pop()


def log_in(memory: MemoryBroker, name: str, password: str) -> Principal | BrokerError:
    reported: list[Any] = []
    memory.broker.access.log_in(name, password, reported.append)
    assert not reported, "the callback ran inside the call"
    answer: Principal | BrokerError = settle(memory, reported)
    return answer


def create(memory: MemoryBroker, name: str, password: str, grants: Grants | None = None) -> User:
    reported: list[Any] = []
    memory.broker.access.create_user(name, password, grants, done=reported.append)
    user = settle(memory, reported)
    assert isinstance(user, User)
    return user


def refused(answer: Principal | BrokerError) -> ErrorCode:
    assert isinstance(answer, Denied)
    return answer.code


def test_a_new_password_drops_stored_scram_verifiers(memory: MemoryBroker) -> None:
    access = memory.broker.access
    carol = create(memory, "carol", "old")
    kept = make_verifier("old", Mechanism.SHA_256)
    access._store_user(msgspec.structs.replace(carol, verifiers=(kept,)), None)
    assert access.verifier("carol", Mechanism.SHA_256) == kept
    assert access.verifier("carol", Mechanism.SHA_512) != kept
    reported: list[Any] = []
    access.change_password(access.user("carol"), "old", "new", done=reported.append)
    assert isinstance(settle(memory, reported), User)
    assert access.user("carol").verifiers == ()


def test_an_open_broker_lets_everybody_in(memory: MemoryBroker) -> None:
    access = memory.broker.access
    assert access.is_open
    assert access.anonymous() is ROOT
    assert log_in(memory, DEFAULT_NAME, DEFAULT_PASSWORD) is ROOT
    for action in Action:
        access.authorize(ROOT, action, ORDERS)
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
        access.authorize(ROOT, Action.FETCH, ORDERS)
    alice = log_in(memory, "alice", "secret")
    assert isinstance(alice, Principal)
    access.authorize(alice, Action.CLUSTER_ALTER)
    assert access.recall("alice", "secret") == alice
    assert access.recall("alice", "wrong") is None
    assert log_in(memory, "alice", "secret") == alice, "restored from the stored users"
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
    with pytest.raises(Invalid):
        access.configure([])
    assert not access.is_open, "an empty list of users does not open the broker"
    assert [user.name for user in access.users()] == ["bob"]


@pytest.mark.parametrize("snapshot", [False, True])
def test_users_survive_restarts(memory: MemoryBroker, snapshot: bool) -> None:
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
    access.authorize(principal, Action.PRODUCE, ORDERS)
    for action, name in ((Action.FETCH, ORDERS), (Action.PRODUCE, TopicName("shop", "paid"))):
        with pytest.raises(Denied) as caught:
            access.authorize(principal, action, name)
        assert caught.value.code is ErrorCode.DENIED


def test_changes_take_effect_immediately(memory: MemoryBroker) -> None:
    access = memory.broker.access
    user = create(memory, "dave", "first", EVERYTHING)
    principal = Principal(user.id, "dave")
    token = access.create_token(user, "t", None)
    access.grant(access.user("dave"), parse_grants(["consume"]))
    assert access.permits(principal, Action.FETCH, ORDERS)
    assert not access.permits(principal, Action.PRODUCE, ORDERS)
    access.update_user(access.user("dave"), active=False)
    assert not access.permits(principal, Action.FETCH, ORDERS)
    assert refused(log_in(memory, "dave", "first")) is ErrorCode.LOGIN_FAILED
    with pytest.raises(Denied):
        access.log_in_with_token(token)
    access.update_user(access.user("dave"), name="david", active=True)
    assert access.find_user("dave") is None
    assert isinstance(log_in(memory, "david", "first"), Principal)
    reported: list[Any] = []
    access.change_password(access.user("david"), "wrong", "second", done=reported.append)
    assert refused(settle(memory, reported)) is ErrorCode.LOGIN_FAILED
    access.change_password(access.user("david"), "first", "second", done=reported.append)
    assert isinstance(settle(memory, reported), User)
    assert refused(log_in(memory, "david", "first")) is ErrorCode.LOGIN_FAILED
    assert isinstance(log_in(memory, "david", "second"), Principal)
    access.delete_user(access.user("david"))
    assert not access.permits(principal, Action.FETCH, ORDERS)
    with pytest.raises(Missing) as caught:
        access.user("david")
    assert caught.value.code is ErrorCode.USER_MISSING


def test_user_ids_are_never_reused(memory: MemoryBroker) -> None:
    first = create(memory, "first", "x")
    memory.broker.access.delete_user(first)
    memory.run()
    second = create(memory, "second", "x")
    assert second.id > first.id
    memory.broker.access.delete_user(second)
    memory.run()
    memory.log.take_snapshot()
    access = memory.restart().access
    assert create(memory, "third", "x").id > second.id
    access.configure([ALICE])
    alice = access.user("alice").id
    access.configure([ConfiguredUser("bob", HASH, EVERYTHING)])
    access.configure([ALICE, ConfiguredUser("bob", HASH, EVERYTHING)])
    assert access.user("alice").id > access.user("bob").id > alice


def test_user_ids_continue_without_a_stored_counter(memory: MemoryBroker) -> None:
    user = create(memory, "first", "x")
    memory.broker.set_wire_state(KEPT_AS, NEXT_ID_KEY, None)
    memory.run()
    memory.restart()
    assert create(memory, "second", "x").id == user.id + 1


def test_changes_to_a_user_end_its_logins(memory: MemoryBroker) -> None:
    access = memory.broker.access
    ended: list[int] = []
    access.on_end(ended.append)

    def reported_once(user: User) -> None:
        memory.run()
        assert ended == [user.id]
        ended.clear()

    user = create(memory, "mallory", "first", EVERYTHING)
    by_password = log_in(memory, "mallory", "first")
    assert isinstance(by_password, Principal)
    by_token = access.log_in_with_token(access.create_token(user, "one", None))
    other = access.create_token(access.user("mallory"), "two", None)
    by_other = access.log_in_with_token(other)
    access.delete_token(access.user("mallory"), "one")
    reported_once(user)
    assert [access.is_current(login) for login in (by_password, by_token, by_other)] == [True, False, True]
    assert not access.permits(by_token, Action.FETCH, ORDERS)
    answers: list[Any] = []
    access.change_password(access.user("mallory"), "first", "second", done=answers.append)
    assert isinstance(settle(memory, answers), User)
    reported_once(user)
    assert not access.is_current(by_password)
    assert not access.is_current(by_other)
    assert access.is_current(access.renewed(by_password)), "the login that replaced the password stays valid"
    with pytest.raises(Denied):
        access.log_in_with_token(other)
    again = log_in(memory, "mallory", "second")
    assert isinstance(again, Principal)
    access.update_user(access.user("mallory"), active=False)
    reported_once(user)
    access.update_user(access.user("mallory"), active=True)
    memory.run()
    assert not access.is_current(again), "recreating the user does not revive the login"
    again = log_in(memory, "mallory", "second")
    assert isinstance(again, Principal)
    access.delete_user(access.user("mallory"))
    reported_once(user)
    assert not access.is_current(again)
    assert not access.permits_somewhere(again, Action.FETCH)


def test_configured_users_that_change_are_logged_out(memory: MemoryBroker) -> None:
    access = memory.broker.access
    access.configure([ALICE, ConfiguredUser("bob", HASH, EVERYTHING)])
    memory.run()
    ended: list[int] = []
    access.on_end(ended.append)
    bob = access.user("bob")
    access.configure([ALICE, ConfiguredUser("bob", HASH, NOTHING_GRANTED)])
    memory.run()
    assert not ended, "changed permissions apply from the next request"
    access.configure([ALICE, ConfiguredUser("bob", hash_password("other"), EVERYTHING)])
    memory.run()
    access.configure([ALICE])
    memory.run()
    assert ended == [bob.id, bob.id]


def test_tokens_that_have_expired_end_logins(memory: MemoryBroker) -> None:
    access = memory.broker.access
    user = create(memory, "niaj", "x", EVERYTHING)
    principal = access.log_in_with_token(access.create_token(user, "t", memory.clock.now_us() + 1_000_000))
    assert access.is_current(principal)
    memory.advance(1)
    assert not access.is_current(principal)


def test_users_cannot_grant_permissions_they_lack(memory: MemoryBroker) -> None:
    access = memory.broker.access
    access.configure([ALICE])
    clerk_user = create(memory, "clerk", "x", parse_grants(["manage_users", "consume@shop"]))
    create(memory, "boss", "x", EVERYTHING)
    clerk = Principal(clerk_user.id, "clerk")
    alice = Principal(access.user("alice").id, "alice")
    allowed = parse_grants(["read_users", "consume@shop/orders"])
    answers: list[Any] = []
    access.create_user("reader", "x", allowed, by=clerk, done=answers.append)
    assert isinstance(settle(memory, answers), User)
    for words in ("admin", "consume", "produce@shop", "consume@other/orders"):
        grants = parse_grants([words])
        with pytest.raises(Denied):
            access.create_user("more", "x", grants, by=clerk, done=lambda _: None)
        for name in ("reader", "clerk"):
            with pytest.raises(Denied):
                access.grant(access.user(name), grants, by=clerk)
    boss = access.user("boss")
    with pytest.raises(Denied):
        access.grant(boss, None, by=clerk)
    with pytest.raises(Denied):
        access.delete_user(boss, by=clerk)
    with pytest.raises(Denied):
        access.update_user(boss, active=False, by=clerk)
    with pytest.raises(Denied):
        access.change_password(boss, "x", "y", by=clerk, done=lambda _: None)
    access.delete_user(access.user("reader"), by=clerk)
    access.grant(boss, parse_grants(["consume"]), by=alice)
    access.delete_user(access.user("clerk"), by=alice)
    with pytest.raises(Denied):
        access.create_user("late", "x", parse_grants(["read_users"]), by=clerk, done=lambda _: None)


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
    assert len(access.user("eve").tokens) == 1, "the expired token is gone"
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
        access.create_user("", "x", None, done=lambda _: None)
    with pytest.raises(Invalid):
        access.create_user("frank", "", None, done=lambda _: None)
    user = create(memory, "frank", "x")
    for name in ("frank", DEFAULT_NAME):
        with pytest.raises(Conflict):
            access.create_user(name, "x", None, done=lambda _: None)
    with pytest.raises(Busy):
        access.create_user("grace", "x", None, done=lambda _: None)
    access.create_token(user, "one", None)
    with pytest.raises(Busy):
        access.create_token(access.user("frank"), "two", None)
    reported: list[Any] = []
    for _ in range(2):
        access.log_in("frank", "x", reported.append)
    with pytest.raises(Busy):
        access.log_in("frank", "x", reported.append)
    assert isinstance(settle(memory, reported), Principal)
    assert isinstance(settle(memory, reported), Principal)
    assert refused(log_in(memory, "frank", "x" * 2000)) is ErrorCode.LOGIN_FAILED


def test_a_crowd_of_guessers_gives_way_to_another_address() -> None:
    memory = MemoryBroker(BrokerSettings(logins_waiting_max=2))
    access = memory.broker.access
    create(memory, "frank", "x")
    guesses: list[Any] = []
    for port in range(3):
        access.log_in("frank", "wrong", guesses.append, peer=f"10.0.0.1:{port}")
    with pytest.raises(Busy):
        access.log_in("frank", "wrong", guesses.append, peer="10.0.0.1:9")
    reported: list[Any] = []
    access.log_in("frank", "x", reported.append, peer="10.0.0.2:1")
    assert isinstance(settle(memory, reported), Principal)
    memory.run()
    assert sorted(type(guess).__name__ for guess in guesses) == ["Busy", "Denied", "Denied"]


def test_a_guesser_waits_longer_and_longer(memory: MemoryBroker) -> None:
    access = memory.broker.access
    access.configure([ALICE])
    reported: list[Any] = []
    for port in range(ADDRESS_FREE):
        access.log_in("alice", "wrong", reported.append, peer=f"10.0.0.1:{port}")
        assert isinstance(settle(memory, reported), Denied)
    access.log_in("alice", "wrong", reported.append, peer="10.0.0.1:99")
    for _ in range(100):
        memory.run()
    assert not reported
    memory.advance(DELAY_MIN_S)
    assert isinstance(settle(memory, reported), Denied)


def test_concurrent_creation_of_one_user_name_succeeds_once(memory: MemoryBroker) -> None:
    reported: list[Any] = []
    for _ in range(2):
        memory.broker.access.create_user("heidi", "x", None, done=reported.append)
    while len(reported) < 2:
        memory.run()
    assert [isinstance(answer, User) for answer in reported] == [True, False]
    assert reported[1].code is ErrorCode.USER_EXISTS


def test_rights_include_others() -> None:
    assert opened(Permission.MANAGE_STREAMS) & Permission.PRODUCE
    assert opened(Permission.READ_STREAMS) & Permission.GROUP
    assert not opened(Permission.READ_STREAMS) & Permission.PRODUCE
    assert opened(Permission.CONSUME) == Permission.CONSUME
    assert opened(ALL) == ALL


def test_grants_in_words() -> None:
    grants = parse_grants(["read_servers", "consume@shop", "produce@shop/orders", "consume@shop/orders"]).opened()
    assert grants.allow(Permission.READ_SERVERS, None, None)
    assert grants.allow(Permission.CONSUME, "shop", "other")
    assert grants.allow(Permission.CONSUME, "shop", None)
    assert grants.allow(Permission.PRODUCE, "shop", "orders")
    assert not grants.allow(Permission.PRODUCE, "shop", None)
    assert not grants.allow(Permission.CONSUME, "default", "orders")
    for word in ("fly", "consume@", ""):
        with pytest.raises(Invalid):
            parse_grants([word])


def test_hashes() -> None:
    assert check_password(HASH, "secret")
    assert not check_password(HASH, "Secret")
    assert not check_password("rubbish", "secret")


def test_an_ended_login_is_permitted_nothing(memory: MemoryBroker) -> None:
    """Not even the actions that every logged-in user may take."""
    access = memory.broker.access
    access.configure([ALICE])
    user = create(memory, "trent", "first")
    login = log_in(memory, "trent", "first")
    assert isinstance(login, Principal)
    access.authorize(login, Action.TOKEN_CREATE)
    reported: list[Any] = []
    access.change_password(user, "first", "second", done=reported.append)
    assert isinstance(settle(memory, reported), User)
    for action in Action:
        if action is not Action.CONNECT:
            assert not access.permits(login, action), action
            assert not access.permits_somewhere(login, action), action
    with pytest.raises(Denied):
        access.create_token(access.user("trent"), "late", None, by=login)


def test_the_audit_has_logins_refusals_and_administration(memory: MemoryBroker) -> None:
    access = memory.broker.access
    access.configure([ALICE])
    events: list[AuditEvent] = []
    access.audit = events.append
    reported: list[Any] = []
    for password in ("wrong", "secret"):
        access.log_in("alice", password, reported.append, peer="10.0.0.1:5")
        answer = settle(memory, reported)
    assert isinstance(answer, Principal)
    assert answer.peer == "10.0.0.1:5"
    assert (events[0].action, events[0].outcome, events[0].peer) == ("login", Outcome.REFUSED, "10.0.0.1:5")
    reader = create(memory, "reader", "x")
    events.clear()
    access.authorize(answer, Action.TOPIC_DELETE, ORDERS)
    access.authorize(answer, Action.FETCH, ORDERS)
    with pytest.raises(Denied):
        access.authorize(Principal(reader.id, "reader", peer="p:1"), Action.FETCH, ORDERS)
    assert [(event.action, event.outcome, event.user, event.resource) for event in events] == [
        ("topic.delete", Outcome.ALLOWED, "alice", "shop.orders"),
        ("fetch", Outcome.REFUSED, "reader", "shop.orders"),
    ]


def test_only_who_may_write_to_a_topic_may_use_it_for_dead_letters(memory: MemoryBroker) -> None:
    broker = memory.broker
    create(memory, "root2", "pw")
    create(memory, "worker", "pw", parse_grants(["consume"]))
    broker.create_topic(TopicName.parse("payments"), 1)
    worker = log_in(memory, "worker", "pw")
    assert isinstance(worker, Principal)
    by = caller_of(worker, "127.0.0.1:5000")
    for topic in ("payments", "new"):
        with pytest.raises(Denied):
            broker.shares.directory.configure("g", {DEAD_LETTERS: topic}, by=by)
    assert broker.find_topic("new") is None
    broker.shares.directory.configure("g", {DELIVERIES: "3"}, by=by)
