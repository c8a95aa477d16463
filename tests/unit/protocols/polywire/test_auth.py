"""Logins of the `polywire` protocol, and the permission of each request (spec: polywire#login)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from polywire.broker.access import ConfiguredUser
from polywire.broker.passwords import hash_password
from polywire.broker.permissions import EVERYTHING, Grants, parse_grants
from polywire.broker.settings import BrokerSettings
from polywire.broker.users import LINKS
from polywire.errors import Busy, Denied, ErrorCode, Missing
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import PREFIX_BYTES, encode_head
from polywire.protocols.polywire.messages import Head, Verb
from polywire.types import TopicName
from tests.unit.protocols.polywire.peer import Answer, CapturedOutput, Peer, batch_of

WAIT_S = 60.0
HASH = hash_password("wonderland")
TOKEN = bytes(range(16))
REQUESTS: list[tuple[str, Verb, Head, bytes]] = [
    ("produce", Verb.PRODUCE, messages.Produce("shop.orders", 0), b"batch"),
    ("produce", Verb.STAGE, messages.Stage(TOKEN, "shop.orders", 0), b"batch"),
    ("produce", Verb.PUBLISH, messages.Publish("w", 1, []), b""),
    ("produce", Verb.ABANDON, messages.Abandon([TOKEN]), b""),
    ("produce", Verb.BEGIN_EPOCH, messages.BeginEpoch("w"), b""),
    ("consume", Verb.FETCH, messages.Fetch("shop.orders", 0, 0), b""),
    ("consume", Verb.LOCATE, messages.Locate("shop.orders", 0, 0), b""),
    ("consume", Verb.BOUNDS, messages.AskBounds(["shop.orders"]), b""),
    ("consume", Verb.DESCRIBE, messages.Describe("shop.orders"), b""),
    ("produce", Verb.DESCRIBE, messages.Describe("shop.orders"), b""),
    ("consume", Verb.TOPICS, messages.ListTopics(), b""),
    ("manage_topics", Verb.CREATE_TOPIC, messages.CreateTopic("made", 1, "shop"), b""),
    ("manage_topics", Verb.GROW_TOPIC, messages.GrowTopic("shop.orders", 3), b""),
    ("manage_topics", Verb.CONFIGURE_TOPIC, messages.ConfigureTopic("shop.orders", {}), b""),
    ("manage_topics", Verb.BEGIN_PARTITION, messages.BeginPartition("shop.orders", 0, 1), b""),
    ("manage_servers", Verb.LINK_TOPIC, messages.LinkTopic("shop.orders", "old"), b""),
    ("manage_topics", Verb.PURGE_TOPIC, messages.PurgeTopic("shop.orders"), b""),
    ("manage_topics", Verb.DELETE_TOPIC, messages.DeleteTopic("shop.orders"), b""),
    ("group", Verb.COMMIT, messages.Commit("shop.orders", 0, 1, "g", 0), b""),
    ("consume", Verb.COMMIT, messages.Commit("shop.orders", 0, 0, "c", 0), b""),
    ("group", Verb.POSITION, messages.AskPosition("shop.orders", 0, 1, "g"), b""),
    ("group", Verb.JOIN, messages.Join("g", "shop.orders", "m"), b""),
    ("group", Verb.GROUPS, messages.AskGroups(), b""),
    ("group", Verb.DELETE_GROUP, messages.DeleteGroup("g", "shop.orders"), b""),
    ("group", Verb.QUEUES, messages.AskQueues(), b""),
    ("group", Verb.CONFIGURE_QUEUE, messages.ConfigureQueue("q", "shop.orders"), b""),
    ("group", Verb.RESET_QUEUE, messages.ResetQueue("q", "shop.orders"), b""),
    ("group", Verb.DELETE_QUEUE, messages.DeleteQueue("q", "shop.orders"), b""),
    ("transaction", Verb.TRANSACTIONS, messages.ListEntries(), b""),
    ("transaction", Verb.DELETE_TRANSACTION, messages.DeleteEntry("x"), b""),
    ("produce", Verb.WRITERS, messages.ListEntries(), b""),
    ("produce", Verb.DELETE_WRITER, messages.DeleteEntry("w"), b""),
]
QUEUED = {  # they need permission to consume and to use groups
    Verb.ACQUIRE: messages.Acquire("q", "shop.orders", "m"),
    Verb.ACKNOWLEDGE: messages.Acknowledge("q", "shop.orders", "m", []),
}
ANYWHERE = {
    Verb.PUBLISH,
    Verb.ABANDON,
    Verb.TOPICS,
    Verb.GROUPS,
    Verb.QUEUES,
    Verb.TRANSACTIONS,
    Verb.DELETE_TRANSACTION,
} | {
    Verb.BEGIN_EPOCH,
    Verb.WRITERS,
    Verb.DELETE_WRITER,
}
ALL_BUT = {
    "manage_servers": "produce,consume,manage_topics,read_servers",
    "produce": "consume,group,read_topics,read_streams",
    "consume": "produce,group,transaction",
    "manage_topics": "produce,consume,group,read_streams,manage_users,manage_servers",
    "group": "produce,consume,transaction",
    "transaction": "produce,consume,group",
}


def closed(words: str | None = None, settings: BrokerSettings | None = None) -> Peer:
    """Return a broker with a topic and users: alice with all permissions, bob with these."""
    peer = Peer(settings)
    peer.broker.create_topic(TopicName("shop", "orders"), 2)
    peer.broker.create_topic(TopicName("default", "other"), 1)
    grants = Grants() if words is None else parse_grants(words.split(","))
    peer.broker.access.configure([ConfiguredUser("alice", HASH, EVERYTHING), ConfiguredUser("bob", HASH, grants)])
    peer.loop.run_due()
    return peer


def answers(peer: Peer, count: int) -> list[Answer]:
    """Return that many frames, once passwords have been verified."""
    found: list[Answer] = []
    end = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < end, found
        time.sleep(0.001)
        peer.loop.run_due()
        found += peer.frames()
    return found


def log_in(peer: Peer, name: str, password: str = "wonderland") -> Answer:
    peer.send(Verb.LOGIN, messages.LogIn(name, password))
    return answers(peer, 1)[0]


def payload_of(mark: bytes) -> bytes:
    return bytes(batch_of(b"v")) if mark else b""


def refusal(answer: Answer) -> ErrorCode:
    assert isinstance(answer.error, Denied)
    return answer.error.code


@pytest.mark.parametrize(("permission", "verb", "head", "mark"), REQUESTS)
def test_every_request_needs_its_permission(permission: str, verb: Verb, head: Head, mark: bytes) -> None:
    payload = payload_of(mark)
    unauthenticated = closed()
    assert refusal(unauthenticated.ask(verb, head, payload)) is ErrorCode.LOGIN_REQUIRED
    without = closed(ALL_BUT[permission])
    log_in(without, "bob")
    if verb not in (Verb.DESCRIBE, Verb.BOUNDS, Verb.TOPICS):  # permission to read or to write is enough to see a topic
        assert refusal(without.ask(verb, head, payload)) is ErrorCode.DENIED
    elsewhere = closed(f"{permission}@other")
    log_in(elsewhere, "bob")
    if verb not in ANYWHERE:
        assert refusal(elsewhere.ask(verb, head, payload)) is ErrorCode.DENIED
    for words in (f"{permission}@shop", f"{permission}@shop/orders", permission):
        if (verb is Verb.CREATE_TOPIC and "/" in words) or (verb is Verb.LINK_TOPIC and "@" in words):
            continue
        allowed = closed(words)
        log_in(allowed, "bob")
        answer = allowed.ask(verb, head, payload)
        assert not answer.flags & 2 or isinstance(answer.error, Missing), words


def test_membership_is_checked() -> None:
    peer = closed("consume")
    log_in(peer, "bob")
    for verb in (Verb.SYNC, Verb.HEARTBEAT, Verb.LEAVE):
        assert refusal(peer.ask(verb, messages.Member("g", "shop.orders", "m", 1))) is ErrorCode.DENIED


@pytest.mark.parametrize("verb", QUEUED)
def test_a_queue_needs_two_permissions(verb: Verb) -> None:
    for words in ("consume", "group", "consume,group@other"):
        peer = closed(words)
        log_in(peer, "bob")
        assert refusal(peer.ask(verb, QUEUED[verb])) is ErrorCode.DENIED, words
    peer = closed("consume@shop,group@shop/orders")
    log_in(peer, "bob")
    assert not peer.ask(verb, QUEUED[verb]).flags & 2


def test_every_request_is_covered() -> None:
    asked = {verb for _, verb, _, _ in REQUESTS} | QUEUED.keys() | {Verb.SYNC, Verb.HEARTBEAT, Verb.LEAVE}
    assert asked | {Verb.HELLO, Verb.PING, Verb.CANCEL, Verb.LOGIN} == set(Verb)


def test_lists_contain_only_permitted_topics() -> None:
    peer = closed("consume@shop,group@shop")
    alice = peer.another()
    log_in(alice, "alice")
    for topic in ("shop.orders", "other"):
        assert not alice.ask(Verb.COMMIT, messages.Commit(topic, 0, 1, "g", 0)).flags & 2
    log_in(peer, "bob")
    listed = peer.ask(Verb.TOPICS, messages.ListTopics()).decode(messages.TopicList)
    assert [topic.name for topic in listed.topics] == ["shop.orders"]
    groups = peer.ask(Verb.GROUPS, messages.AskGroups()).decode(messages.GroupList)
    assert [group.name for group in groups.groups] == ["shop.orders"]


def test_producing_creates_a_topic_only_with_permission() -> None:
    peer = closed("produce")
    log_in(peer, "bob")
    made = messages.Produce("new", 0, create=True)
    assert refusal(peer.ask(Verb.PRODUCE, made, bytes(batch_of(b"v")))) is ErrorCode.DENIED
    assert not peer.ask(Verb.PRODUCE, messages.Produce("other", 0, create=True), bytes(batch_of(b"v"))).flags & 2
    alice = peer.another()
    log_in(alice, "alice")
    assert not alice.ask(Verb.PRODUCE, made, bytes(batch_of(b"v"))).flags & 2


def test_a_failed_login_logs_the_connection_out() -> None:
    peer = closed()
    assert not log_in(peer, "alice").flags & 2
    assert refusal(log_in(peer, "alice", "looking-glass")) is ErrorCode.LOGIN_FAILED
    assert refusal(peer.ask(Verb.TOPICS, messages.ListTopics())) is ErrorCode.LOGIN_REQUIRED
    for name, password in (("unknown", "wonderland"), ("iggy", "iggy"), ("alice", ""), ("", "wonderland")):
        assert refusal(log_in(peer, name, password)) is ErrorCode.LOGIN_FAILED
    assert "polywire://name:password@host:port" in peer.ask(Verb.TOPICS, messages.ListTopics()).error.message
    assert not peer.ask(Verb.PING, Head()).flags & 2, "every client may ping the broker"


def frames_of(*requests: tuple[Verb, int, Head]) -> bytearray:
    return bytearray(b"".join(encode_head(verb, correlation, head) for verb, correlation, head in requests))


def login_and_then(peer: Peer, others: Sequence[tuple[Verb, int, Head]]) -> tuple[bytearray, int]:
    """Send a login with requests right after it; return the bytes sent, and how many the session consumed."""
    sent = frames_of((Verb.LOGIN, 1, messages.LogIn("alice", "wonderland")), *others)
    return sent, peer.session.receive(memoryview(sent))


def test_requests_after_a_login_wait_for_it() -> None:
    peer = closed()
    sent, taken = login_and_then(peer, [(Verb.TOPICS, 2, messages.ListTopics())])
    assert taken < len(sent)
    assert peer.session.paused()
    assert [answer.correlation for answer in answers(peer, 1)] == [1]
    assert peer.resumes
    assert not peer.session.paused()
    peer.session.receive(memoryview(sent)[taken:])
    peer.loop.run_due()
    assert not peer.frames()[0].flags & 2


def test_requests_after_a_login_are_answered_for_a_half_closed_client() -> None:
    peer = closed()
    sent, taken = login_and_then(peer, [(Verb.TOPICS, 2, messages.ListTopics()), (Verb.PING, 3, Head())])
    peer.session.finish(memoryview(sent)[taken:])
    found = {answer.correlation: answer.flags for answer in answers(peer, 3)}
    assert found == {1: 0, 2: 0, 3: 0}
    assert peer.output.closed


def test_a_disconnected_client_gets_no_response() -> None:
    peer = closed()
    login_and_then(peer, [])
    peer.session.close()
    other = peer.another()
    assert not log_in(other, "alice").flags & 2
    assert peer.frames() == []


def test_too_many_logins_get_a_retriable_error() -> None:
    peer = closed(settings=BrokerSettings(logins_waiting_max=0))
    assert isinstance(peer.ask(Verb.LOGIN, messages.LogIn("alice", "x")).error, Busy)
    assert not peer.session.paused()


def test_a_token_works_like_a_password() -> None:
    peer = closed()
    token = peer.broker.access.create_token(peer.broker.access.user("bob"), "spark", None)
    assert not log_in(peer, "bob", token).flags & 2
    assert refusal(log_in(peer, "alice", token)) is ErrorCode.LOGIN_FAILED


def test_revoked_permissions_apply_from_the_next_request() -> None:
    peer = closed("consume")
    log_in(peer, "bob")
    assert not peer.ask(Verb.DESCRIBE, messages.Describe("other")).flags & 2
    peer.broker.access.configure([ConfiguredUser("alice", HASH, EVERYTHING)])
    assert refusal(peer.ask(Verb.DESCRIBE, messages.Describe("other"))) is ErrorCode.DENIED


def test_an_open_broker_needs_no_login() -> None:
    peer = Peer()
    peer.broker.create_topic(TopicName("default", "t"), 1)
    assert not peer.ask(Verb.DESCRIBE, messages.Describe("t")).flags & 2
    assert isinstance(peer.ask(Verb.DESCRIBE, messages.Describe("no")).error, Missing)
    assert not log_in(peer, "iggy", "iggy").flags & 2, "the default user, as on other protocols"
    assert not peer.ask(Verb.DESCRIBE, messages.Describe("t")).flags & 2
    assert refusal(log_in(peer, "alice")) is ErrorCode.LOGIN_FAILED


def test_a_malformed_login_gets_an_error() -> None:
    peer = closed()
    frame = bytearray(encode_head(Verb.LOGIN, 7, messages.Cancel(1)))
    assert peer.session.receive(memoryview(frame)) == len(frame) >= PREFIX_BYTES
    (answer,) = peer.frames()
    assert answer.error.code is ErrorCode.INVALID_REQUEST


def test_links_commit_for_any_group_and_own_none() -> None:
    peer = closed("group,consume")
    bob, new = messages.Commit("shop.orders", 0, 1, "bobs", 3), messages.Commit("shop.orders", 0, 1, "new", 4)
    log_in(peer, "bob")
    peer.ask(Verb.COMMIT, bob).decode(Head)
    output = CapturedOutput()
    output.certified = LINKS
    links = peer.another(output)
    for commit in (messages.Commit("shop.orders", 0, 1, "bobs", 5), new):
        links.ask(Verb.COMMIT, commit).decode(Head)
    for commit in (bob, new):  # bob's group is still his, and he may use the new one
        assert not peer.ask(Verb.COMMIT, commit).flags & 2
