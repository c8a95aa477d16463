"""Requests about topics of several shards over Iggy: responses match a single process, at every process."""

from __future__ import annotations

import time
from functools import partial
from itertools import product
from struct import pack, unpack_from

import pytest

from polywire.broker.access import ConfiguredUser
from polywire.broker.broker import Broker
from polywire.broker.passwords import hash_password
from polywire.broker.permissions import EVERYTHING, parse_grants
from polywire.broker.settings import TopicSettings
from polywire.protocols.iggy import directory, errors
from polywire.protocols.iggy.client_codec import name
from polywire.protocols.iggy.directory import CHOSEN_MAX, numbers_from
from polywire.protocols.iggy.messages import Code
from polywire.protocols.iggy.routed import SKIPPED_S
from polywire.protocols.runtime.shards import LinkPeer
from polywire.routing import broker as routed_broker
from polywire.types import TopicName
from tests.unit.protocols.iggy.dialogue import classic, headered
from tests.unit.protocols.iggy.sharded import WAIT_S, Conversation, MemoryShards, ident, log_in, make_shards
from tests.unit.protocols.iggy.test_held import Target, awaited, fetched, held
from tests.unit.protocols.shards_in_memory import MemoryLink
from tests.vectors.iggy.test_protocol_012 import REGISTER as REGISTER_012
from tests.vectors.iggy.test_today import CREATE_STREAM, CREATE_TOPIC, REGISTER, SEND

TOPICS = ("a", "bb", "ccc", "dddd")
D2 = "0.8"  # ids from 0, chosen by the broker


def connect(shards: MemoryShards, own: int = 0) -> Conversation:
    conversation = Conversation(shards, own)
    log_in(conversation)
    return conversation


def create_stream(conversation: Conversation, stream: str) -> tuple[int, bytes]:
    return conversation.ask(Code.CREATE_STREAM, name(stream))


def create_topic(conversation: Conversation, stream: int | str, topic: str, partitions: int = 1) -> tuple[int, bytes]:
    fields = pack("<IBQQB", partitions, 1, 0, 0, 1)
    return conversation.ask(Code.CREATE_TOPIC, ident(stream) + fields + name(topic))


def message(value: bytes) -> bytes:
    return bytes(40) + bytes(8) + pack("<II", 0, len(value)) + value


def sent(stream: int | str, topic: int | str, *values: bytes, partition: int = 0) -> bytes:
    """Return the payload of a SEND to a partition."""
    front = ident(stream) + ident(topic) + pack("<BBI", 2, 4, partition) + pack("<I", len(values))
    messages = [message(value) for value in values]
    ends, end = [], 0
    for one in messages:
        end += len(one)
        ends.append(pack("<IIQ", 0, end, 0))
    return pack("<I", len(front)) + front + b"".join(ends) + b"".join(messages)


def send(conversation: Conversation, stream: int | str, topic: int | str, *values: bytes) -> int:
    return conversation.ask(Code.SEND, sent(stream, topic, *values))[0]


def polling(consumer: bytes, stream: int | str, topic: int | str, kind: int = 1, commit: int = 0) -> bytes:
    named = consumer + ident(stream) + ident(topic)
    return named + pack("<BI", 0 if consumer[0] == 2 else 1, 0) + pack("<BQIB", kind, 0, 100, commit)


SINGLE = b"\1" + ident(1)


def poll(conversation: Conversation, stream: int | str, topic: int | str) -> list[bytes]:
    status, body = conversation.ask(Code.POLL, polling(SINGLE, stream, topic))
    assert status == 0, status
    return values_of(body)


def values_of(body: bytes) -> list[bytes]:
    found, at = [], 16
    while at < len(body):
        headers, size = unpack_from("<II", body, at + 48)
        found.append(body[at + 56 : at + 56 + size])
        at += 56 + size + headers
    return found


@pytest.fixture
def shards() -> MemoryShards:
    return make_shards(3, dialect=D2)


def names_of(body: bytes, head: int) -> list[str]:
    """Return the names of a list whose elements have ``head`` bytes before the name."""
    found, at = [], 0
    while at < len(body):
        size = body[at + head]
        found.append(body[at + head + 1 : at + head + 1 + size].decode())
        at += head + 1 + size
    return found


def shown(shards: MemoryShards, *topics: str) -> list[Conversation]:
    """Return a connection to each process, and create a stream ``s`` with topics in all shards."""
    peers = [connect(shards, own) for own in range(shards.count)]
    assert create_stream(peers[1], "s")[0] == 0
    for topic in topics:
        assert create_topic(peers[2], "s", topic)[0] == 0
    return peers


def test_every_process_finds_every_topic(shards: MemoryShards) -> None:
    peers = shown(shards, *TOPICS)
    assert sorted(len(broker.topics()) for broker in shards.brokers) == [1, 1, 2]
    for number, peer in enumerate(peers):
        for topic in TOPICS:
            assert send(peer, "s", topic, b"%d" % number) == 0
    for peer in peers:
        for topic in TOPICS:
            assert poll(peer, "s", topic) == [b"0", b"1", b"2"]


def test_streams_and_topics_have_the_same_ids_everywhere(shards: MemoryShards) -> None:
    peers = shown(shards, *TOPICS)
    lists = [peer.ask(Code.GET_STREAM, ident("s")) for peer in peers]
    assert lists[0][0] == 0
    assert lists == lists[:1] * 3
    assert unpack_from("<I", lists[0][1]) == (0,)
    assert unpack_from("<I", lists[0][1], 12) == (4,)
    listed = {peer.ask(Code.GET_TOPICS, ident(0)) for peer in peers}
    assert len(listed) == 1
    topics = [peer.ask(Code.GET_TOPIC, ident("s") + ident(topic))[1] for peer in peers for topic in TOPICS]
    numbers = [unpack_from("<I", topic)[0] for topic in topics]
    assert numbers[:4] * 3 == numbers
    assert len(set(numbers)) == 4
    for topic, number in zip(TOPICS, numbers, strict=False):
        assert (
            numbers_from(shard_with(shards, f"s.{topic}"))
            <= number
            < numbers_from(shard_with(shards, f"s.{topic}") + 1)
        )
        for peer in peers:
            assert send(peer, 0, number, b"x") == 0
            assert peer.ask(Code.GET_TOPIC, ident(0) + ident(number))[1][:4] == pack("<I", number)


def test_topics_of_other_protocols_are_in_their_streams(shards: MemoryShards) -> None:
    for number, topic in enumerate(("x.a", "x.b", "plain")):
        shards.brokers[number].create_topic(TopicName.parse(topic))
    peers = [connect(shards, own) for own in (2, 0, 1)]
    assert send(peers[0], "x", "a", b"first") == 0
    for peer in peers:
        assert poll(peer, "x", "a") == [b"first"]
        assert sorted(names_of(peer.ask(Code.GET_STREAMS)[1], 32)) == ["default", "x"]
        assert peer.ask(Code.GET_STREAM, ident("x")) == peers[0].ask(Code.GET_STREAM, ident(0))
    assert create_stream(peers[0], "x")[0] == errors.STREAM_NAME_TAKEN


def test_missing_topics_get_the_same_error_as_with_one_process(shards: MemoryShards) -> None:
    alone = connect(make_shards(1, dialect=D2))
    assert create_stream(alone, "s")[0] == 0
    streams: tuple[int | str, ...] = ("s", "t", 0, 7, 2**32 - 2)
    topics: tuple[int | str, ...] = ("a", 0, CHOSEN_MAX, CHOSEN_MAX * 3, CHOSEN_MAX * 70, 2**32 - 1)
    asked = [(code, payload) for code in (Code.GET_STREAM, Code.DELETE_STREAM) for payload in (b"", b"\7\7")]
    for code in (Code.GET_STREAM, Code.DELETE_STREAM, Code.GET_TOPICS):
        asked += [(code, ident("t")), (code, ident(9))]
    for stream, topic in product(streams, topics):
        named = ident(stream) + ident(topic)
        asked += [(code, named) for code in (Code.GET_TOPIC, Code.DELETE_TOPIC, Code.GET_GROUPS)]
        asked += [(Code.POLL, polling(SINGLE, stream, topic)), (Code.SEND, sent(stream, topic, b"x"))]
    for peer, (code, payload) in product(shown(shards), asked):
        assert peer.ask(code, payload) == alone.ask(code, payload)


def test_a_deleted_stream_loses_its_topics_in_every_shard(shards: MemoryShards) -> None:
    peers = shown(shards, *TOPICS)
    for peer in peers:
        assert send(peer, 0, "dddd", b"x") == 0  # each process knows where it is
    assert peers[0].ask(Code.PURGE_STREAM, ident("s"))[0] == 0
    assert [poll(peer, "s", "dddd") for peer in peers] == [[], [], []]
    assert peers[0].ask(Code.DELETE_STREAM, ident("s"))[0] == 0
    assert [len(broker.topics()) for broker in shards.brokers] == [0, 0, 0]
    assert [peer.ask(Code.GET_STREAMS) for peer in peers] == [(0, b"")] * 3
    assert create_stream(peers[1], "t")[0] == 0  # gets the id of the deleted one
    assert create_topic(peers[1], "t", "dddd")[0] == 0
    for peer in peers:
        assert send(peer, 0, "dddd", b"y") == 0
        assert send(peer, "s", "dddd", b"y") == errors.NO_STREAM_NAME
    assert poll(peers[0], "t", "dddd") == [b"y"] * 3


def test_renamed_streams_and_topics_are_found_everywhere(shards: MemoryShards) -> None:
    peers = shown(shards, *TOPICS)
    for peer in peers:
        assert send(peer, "s", "bb", b"0") == 0
    assert peers[1].ask(Code.UPDATE_STREAM, ident("s") + name("other"))[0] == 0
    update = pack("<BQQB", 1, 0, 0, 1)
    for named, new in (("bb", "a"), ("a", "bb"), ("dddd", "ccc")):
        assert peers[0].ask(Code.UPDATE_TOPIC, ident("other") + ident(named) + update + name(new))[0] == 2013
    for named, new in (("bb", "bb"), ("bb", "renamed"), ("a", "once-more")):
        assert peers[2].ask(Code.UPDATE_TOPIC, ident("other") + ident(named) + update + name(new))[0] == 0
    for peer in peers:
        assert send(peer, "other", "renamed", b"1") == 0
        assert send(peer, "other", "bb", b"1") == errors.NO_TOPIC_NAME
        assert names_of(peer.ask(Code.GET_STREAMS)[1], 32) == ["other"]
        assert create_topic(peer, "other", "renamed")[0] == errors.TOPIC_NAME_TAKEN
        assert create_stream(peer, "other")[0] == errors.STREAM_NAME_TAKEN
    assert poll(peers[0], "other", "renamed") == [b"0", b"0", b"0", b"1", b"1", b"1"]


def test_groups_and_offsets_belong_to_the_shard_of_the_topic(shards: MemoryShards) -> None:
    peers = shown(shards, *TOPICS)
    for number, topic in enumerate(TOPICS):
        named = ident("s") + ident(topic)
        assert send(peers[0], "s", topic, b"0", b"1") == 0
        assert peers[1].ask(Code.CREATE_GROUP, named + name("g"))[0] == 0
        assert [peer.ask(Code.JOIN_GROUP, named + ident("g"))[0] for peer in peers[:2]] == [0, 0]
        details = {peer.ask(Code.GET_GROUP, named + ident("g")) for peer in peers}
        assert len(details) == 1
        body = details.pop()[1]
        assert unpack_from("<III", body) == (0, 1, 2)
        members = {unpack_from("<I", body, 14)[0], unpack_from("<I", body, 14 + 8 + 4 * body[18])[0]}
        assert members == {number_of(peer) for peer in peers[:2]}
        of_group = b"\2" + ident("g")
        polled = [values_of(peer.ask(Code.POLL, polling(of_group, "s", topic, 5, 1))[1]) for peer in peers[:2]]
        assert sorted(polled) == [[], [b"0", b"1"]]
        assert peers[2].ask(Code.POLL, polling(of_group, "s", topic, 5, 1))[0] == errors.NO_MEMBER
        stored = of_group + named + pack("<BI", 1, 0)
        assert {peer.ask(Code.GET_OFFSET, stored) for peer in peers} == {(0, pack("<IQQ", 0, 1, 1))}
        assert peers[1].ask(Code.LEAVE_GROUP, named + ident("g"))[0] == 0
        assert unpack_from("<III", peers[2].ask(Code.GET_GROUP, named + ident("g"))[1]) == (0, 1, 1)
        assert joined(peers[0]) == number + 1
    peers[0].close()
    for topic in TOPICS:
        found = peers[2].ask(Code.GET_GROUP, ident("s") + ident(topic) + ident("g"))
        assert unpack_from("<III", found[1]) == (0, 1, 0)


def number_of(peer: Conversation) -> int:
    number: int = unpack_from("<I", peer.ask(Code.GET_ME)[1])[0]
    return number


def joined(peer: Conversation) -> int:
    """Return a client's number of groups, as reported to itself, in the list, and to others."""
    details = peer.ask(Code.GET_ME)[1]
    at = 13 + unpack_from("<I", details, 9)[0]
    count: int = unpack_from("<I", details, at)[0]
    assert len(details) == at + 4 + 12 * count
    other = connect(peer.shards, 2)
    assert other.ask(Code.GET_CLIENT, details[:4]) == (0, details)
    listed = other.ask(Code.GET_CLIENTS)[1]
    assert details[: at + 4] in listed
    other.close()
    return count


def test_clients_and_statistics_cover_all_processes(shards: MemoryShards) -> None:
    peers = shown(shards, *TOPICS)
    assert len({number_of(peer) for peer in peers}) == 3
    lists = [peer.ask(Code.GET_CLIENTS) for peer in peers]
    assert lists == lists[:1] * 3
    for peer in peers:
        assert all(pack("<I", number_of(other)) in lists[0][1] for other in peers)
        status, stats = peer.ask(Code.GET_STATS)
        assert status == 0
        assert unpack_from("<IIIIQII", stats, 12 + 8 * 8 + 4 - 4)[:3] == (1, 4, 4)


def logged_in(shards: MemoryShards, own: int, user: str, password: str) -> Conversation:
    peer = Conversation(shards, own)
    assert peer.ask(Code.LOGIN, name(user) + name(password))[0] == 0
    return peer


def test_users_and_tokens_are_those_of_all_processes(shards: MemoryShards) -> None:
    peers = shown(shards)
    payload = name("alice") + name("wonderland") + b"\1\0"
    assert peers[2].ask(Code.CREATE_USER, payload)[0] == 0
    assert peers[1].ask(Code.CREATE_USER, payload)[0] == errors.USER_EXISTS
    lists = [peer.ask(Code.GET_USERS)[1] for peer in peers]
    assert lists == lists[:1] * 3
    assert names_of(lists[0], 13) == ["iggy", "alice"]
    alices = [logged_in(shards, own, "alice", "wonderland") for own in range(3)]
    status, token = alices[0].ask(Code.CREATE_TOKEN, name("tok") + bytes(8))
    assert status == 0
    for own in range(3):
        assert names_of(alices[own].ask(Code.GET_TOKENS)[1] + bytes(1), 0)[0] == "tok"
        assert Conversation(shards, own).ask(Code.LOGIN_TOKEN, token)[0] == 0
    assert alices[1].ask(Code.DELETE_TOKEN, name("tok"))[0] == 0
    for own in range(3):
        assert Conversation(shards, own).ask(Code.LOGIN_TOKEN, token)[0] == errors.BAD_TOKEN
    assert peers[0].ask(Code.UPDATE_USER, ident("alice") + b"\1" + name("alicia") + b"\0")[0] == 0
    assert peers[2].ask(Code.DELETE_USER, ident("alicia"))[0] == 0
    for peer in peers:
        assert names_of(peer.ask(Code.GET_USERS)[1], 13) == ["iggy"]
    for peer in alices:
        assert peer.ask(Code.GET_TOKENS)[0] != 0


@pytest.mark.parametrize("own", range(3))
def test_a_user_that_changes_its_password_stays_logged_in_on_this_connection(shards: MemoryShards, own: int) -> None:
    root = connect(shards, 0)
    assert root.ask(Code.CREATE_USER, name("alice") + name("wonderland") + b"\1\0")[0] == 0
    alice, other = logged_in(shards, own, "alice", "wonderland"), logged_in(shards, 1, "alice", "wonderland")
    assert alice.ask(Code.CHANGE_PASSWORD, ident("alice") + name("wrong") + name("second"))[0] != 0
    assert alice.ask(Code.CHANGE_PASSWORD, ident("alice") + name("wonderland") + name("second"))[0] == 0
    assert alice.ask(Code.GET_TOKENS) == (0, b"")
    assert not shards.brokers[1].access.is_current(other.session.principal)  # type: ignore[attr-defined]
    logged_in(shards, 2, "alice", "second")
    assert Conversation(shards, 0).ask(Code.LOGIN, name("alice") + name("wonderland"))[0] == errors.BAD_CREDENTIALS


def test_requests_of_a_deleted_user_that_wait_are_refused(shards: MemoryShards) -> None:
    peers = shown(shards, *TOPICS)
    topic = next(topic for topic in TOPICS if shard_with(shards, f"s.{topic}") == 2)
    shards.brokers[0].access.configure([ConfiguredUser("root", hash_password("wonderland"), EVERYTHING)])
    for peer in peers:
        peer.pass_by()
    root = logged_in(shards, 0, "root", "wonderland")
    made: list[object] = []
    shards.brokers[0].access.create_user("alice", "wonderland", EVERYTHING, done=made.append)
    end = time.monotonic() + WAIT_S
    while not made:
        assert time.monotonic() < end
        root.pass_by()
    alice = logged_in(shards, 1, "alice", "wonderland")
    assert alice.ask(Code.GET_GROUPS, ident("s") + ident(topic))[0] == 0
    [link] = links_of(shards, alice, 2)
    link.pause()
    alice.feed(classic(Code.GET_GROUPS, ident("s") + ident(topic)))
    assert alice.session.paused()
    assert root.ask(Code.DELETE_USER, ident("alice"))[0] == 0
    link.resume()
    alice.pass_by()
    assert unpack_from("<I", alice.take())[0] in (errors.NOT_LOGGED_IN, errors.NOT_ALLOWED)


def test_client_chosen_ids_are_unique() -> None:
    shards = make_shards(3, dialect="0.1")
    peers = [connect(shards, own) for own in range(3)]
    assert peers[0].ask(Code.CREATE_STREAM, pack("<I", 7) + name("s"))[0] == 0

    def create(peer: Conversation, number: int, topic: str) -> bytes:
        del peer
        return ident(7) + pack("<IIIQB", number, 1, 0, 0, 1) + name(topic)

    assert [peers[1].ask(Code.CREATE_TOPIC, create(peers[1], 5, topic))[0] for topic in TOPICS] == [0, 2012, 2012, 2012]
    assert peers[2].ask(Code.CREATE_TOPIC, create(peers[2], CHOSEN_MAX + 1, "bb"))[0] == errors.BAD_TOPIC_ID
    assert peers[2].ask(Code.CREATE_TOPIC, create(peers[2], 0, "bb"))[0] == 0
    at_once = [create(peers[0], 6, "ccc"), create(peers[1], 6, "dddd")]
    for peer, payload in zip(peers, at_once, strict=False):
        peer.take()
        peer.feed(classic(Code.CREATE_TOPIC, payload))
    for peer in peers:
        peer.pass_by()
    statuses = sorted(unpack_from("<I", peer.take())[0] for peer in peers[:2])
    assert statuses == [0, errors.TOPIC_ID_TAKEN]
    for peer in peers:
        assert len(names_of(peer.ask(Code.GET_TOPICS, ident(7))[1], 45)) == 3
        assert peer.ask(Code.GET_TOPIC, ident(7) + ident(6))[0] == 0


def links_of(shards: MemoryShards, peer: Conversation, to: int) -> list[MemoryLink]:
    """Return the link of a client's process to a shard, unless it is lost."""
    routed = peer.session.broker  # type: ignore[attr-defined]
    return [link for link in shards.links if link._peer is routed._links[to]]


def break_links(shards: MemoryShards, peer: Conversation, to: int) -> None:
    """End the process of a shard: the link of a client's process to it is lost."""
    for link in links_of(shards, peer, to):
        link.break_off()


def shard_with(shards: MemoryShards, topic: str) -> int:
    found = shards.shard_of(topic)
    assert found is not None
    return found


def test_a_lost_send_closes_the_connection_and_other_requests_fail(shards: MemoryShards) -> None:
    peers = shown(shards, *TOPICS)
    topic = next(topic for topic in TOPICS if shard_with(shards, f"s.{topic}") == 1)
    poll(peers[0], "s", topic)
    for code, payload in ((Code.POLL, polling(SINGLE, "s", topic)), (Code.GET_TOPIC, ident("s") + ident(topic))):
        peers[0].feed(classic(code, payload))
        break_links(shards, peers[0], 1)
        peers[0].pass_by()
        assert peers[0].take() == pack("<II", errors.ERROR, 0)
        assert poll(peers[0], "s", topic) == []  # over another link
    peers[0].feed(classic(Code.SEND, sent("s", topic, b"x")))
    break_links(shards, peers[0], 1)
    peers[0].pass_by()
    assert peers[0].take() == b""
    assert peers[0].output.failed is not None


def test_a_member_survives_the_loss_of_its_link(shards: MemoryShards) -> None:
    peers = shown(shards, *TOPICS)
    topic = next(topic for topic in TOPICS if shard_with(shards, f"s.{topic}") == 1)
    named = ident("s") + ident(topic)
    assert send(peers[0], "s", topic, b"0") == 0
    assert peers[0].ask(Code.CREATE_GROUP, named + name("g"))[0] == 0
    assert peers[0].ask(Code.JOIN_GROUP, named + ident("g"))[0] == 0
    break_links(shards, peers[0], 1)
    assert values_of(peers[0].ask(Code.POLL, polling(b"\2" + ident("g"), "s", topic, 5, 1))[1]) == [b"0"]
    assert joined(peers[0]) == 1


class Gone:
    """A shard whose process has ended: links to it are lost immediately."""

    def __init__(self, shards: MemoryShards, gone: int, peers: list[Conversation]) -> None:
        self._connect = type(shards).connect
        self.gone: int | None = gone
        for peer in peers:
            break_links(shards, peer, gone)
            seen = peer.session.broker.shards  # type: ignore[attr-defined]
            seen.connect = partial(self.connect, seen)

    def connect(self, shards: MemoryShards, shard: int, peer: LinkPeer) -> MemoryLink:
        link = self._connect(shards, shard, peer)
        if shard == self.gone:
            shards.loop.call_soon(link.break_off)
        return link


def test_a_lost_shard_affects_only_its_own_topics(shards: MemoryShards) -> None:
    peers = shown(shards, *TOPICS)
    (mine,) = [topic for topic in TOPICS if shard_with(shards, f"s.{topic}") == 2][:1]
    others = [topic for topic in TOPICS if shard_with(shards, f"s.{topic}") != 2]
    gone = Gone(shards, 2, peers[:2])
    for peer in peers[:2]:
        for topic in others:
            assert send(peer, "s", topic, b"x") == 0
            assert send(peer, 0, topic, b"x") == 0
        assert peer.ask(Code.GET_TOPIC, ident("s") + ident(mine)) == (errors.ERROR, b"")
        assert peer.ask(Code.GET_STREAMS) == (errors.ERROR, b"")
    assert peers[1].ask(Code.DELETE_STREAM, ident("s")) == (errors.ERROR, b"")
    assert 0 < sum(len(broker.topics()) for broker in shards.brokers) < len(TOPICS)
    gone.gone = None
    assert names_of(peers[0].ask(Code.GET_STREAMS)[1], 32) == ["s"]
    assert peers[0].ask(Code.DELETE_STREAM, ident("s"))[0] == 0
    assert [len(broker.topics()) for broker in shards.brokers] == [0, 0, 0]
    assert peers[1].ask(Code.GET_STREAMS) == (0, b"")


def test_streams_are_found_by_name_without_the_first_shard(shards: MemoryShards) -> None:
    peers = shown(shards, *TOPICS)
    Gone(shards, 0, peers[1:])
    for topic in TOPICS:
        if shard_with(shards, f"s.{topic}") != 0:
            for peer in peers[1:]:
                assert send(peer, "s", topic, b"x") == 0
    late = connect(shards, 1)
    Gone(shards, 0, [late])
    assert late.ask(Code.GET_STREAM, ident(0)) == (errors.ERROR, b"")
    assert create_stream(late, "new") == (errors.ERROR, b"")


def test_a_login_applies_in_every_shard(shards: MemoryShards) -> None:
    hashed = hash_password("wonderland")
    reader = parse_grants(["read_streams", "read_topics", "consume@s"])
    for broker in shards.brokers:
        broker.access.configure([ConfiguredUser("root", hashed, EVERYTHING), ConfiguredUser("reader", hashed, reader)])
    root = Conversation(shards, 1)
    assert create_stream(root, "s")[0] == errors.NOT_LOGGED_IN
    assert root.ask(Code.LOGIN, name("root") + name("wonderland"))[0] == 0
    assert create_stream(root, "s")[0] == 0
    for topic in TOPICS:
        assert create_topic(root, "s", topic)[0] == 0
        assert send(root, "s", topic, b"x") == 0
    peer = Conversation(shards, 2)
    assert peer.ask(Code.LOGIN, name("reader") + name("wonderland"))[0] == 0
    for topic in TOPICS:
        assert poll(peer, "s", topic) == [b"x"]
        assert send(peer, "s", topic, b"x") == errors.NOT_ALLOWED
        assert peer.ask(Code.DELETE_TOPIC, ident("s") + ident(topic))[0] == errors.NOT_ALLOWED
    for code, payload in ((Code.DELETE_STREAM, ident("s")), (Code.PURGE_STREAM, ident("s")), (Code.GET_STATS, b"")):
        assert peer.ask(code, payload)[0] == errors.NOT_ALLOWED
    assert create_stream(peer, "t")[0] == errors.NOT_ALLOWED
    assert create_topic(peer, "s", "new")[0] == errors.NOT_ALLOWED
    assert peer.ask(Code.LOGOUT)[0] == 0
    assert peer.ask(Code.POLL, polling(SINGLE, "s", TOPICS[0]))[0] == errors.NOT_LOGGED_IN


def test_the_newest_dialect_returns_the_topic_of_sent_messages() -> None:
    shards = make_shards(3)
    peers = [Conversation(shards, own) for own in range(3)]
    for peer in peers:
        assert peer.headered(1, REGISTER)[0] == 0
    assert peers[2].headered(128, CREATE_STREAM, number=1)[0] == 0
    topics = ("paid", "open", "void", "back")
    for number, topic in enumerate(topics):
        body = CREATE_TOPIC.replace(b"paid", topic.encode())
        assert peers[1].headered(132, body, number=number + 1)[0] == 0
    assert sorted(len(broker.topics()) for broker in shards.brokers) == [1, 1, 2]
    for peer in peers:
        details = [peer.headered(2, ident("orders") + ident(topic), code=Code.GET_TOPIC)[1] for topic in topics]
        assert len({topic[:4] for topic in details}) == 4
        for topic, reported in zip(topics, details, strict=True):
            status, body = peer.headered(160, SEND.replace(b"paid", topic.encode()))
            assert (status, body[:12]) == (0, pack("<II", 1, 0) + reported[:4])


def test_held_polls_of_topics_in_every_shard() -> None:
    """A poll waits for records of every process."""
    shards = make_shards(3)
    peers = [Conversation(shards, own) for own in range(3)]
    for peer in peers:
        assert peer.headered(1, REGISTER_012)[0] == 0
    assert peers[0].headered(128, CREATE_STREAM, number=1)[0] == 0
    for number, name_of in enumerate(("paid", "open", "void")):
        body = CREATE_TOPIC.replace(b"paid", name_of.encode())
        assert peers[0].headered(132, body, number=number + 2)[0] == 0
    for topic in (b"paid", b"open", b"void"):
        for code, body in (
            (Code.POLL_HELD, held()),
            (Code.AWAIT, awaited((0, 1, 0))),
            (Code.FETCH, fetched(Target(0))),
        ):
            peers[1].say(headered(2, body.replace(b"paid", topic), code=code, number=code))
        peers[1].pass_by(0.5)
        assert not peers[1].output.written
        assert peers[1].headered(2, code=Code.PING, number=1)[0] == 0, "later requests are executed"
        assert peers[2].headered(160, SEND.replace(b"paid", topic), number=50)[0] == 0
        peers[1].pass_by()
        answers = peers[1].take()
        assert answers.count(b"hello") == 2
        assert len(answers) == 3 * 256 + (40 + 309) + 8 + (4 + 56 + 309)


# Members


def member(shards: MemoryShards, own: int, topic: str, *values: bytes) -> tuple[Conversation, bytes]:
    """Return a connection that has joined the group ``g`` of a topic with two partitions, and the polled consumer."""
    peer = connect(shards, own)
    assert create_stream(peer, "s")[0] in (0, errors.STREAM_NAME_TAKEN)
    assert create_topic(peer, "s", topic, 2)[0] == 0
    for number, value in enumerate(values):
        assert peer.ask(Code.SEND, sent("s", topic, value, partition=number % 2))[0] == 0
    named = ident("s") + ident(topic)
    assert peer.ask(Code.CREATE_GROUP, named + name("g"))[0] == 0
    assert peer.ask(Code.JOIN_GROUP, named + ident("g"))[0] == 0
    return peer, b"\2" + ident("g")


@pytest.fixture(params=(0, 1), ids=("own topic", "topic of another process"))
def own(request: pytest.FixtureRequest, shards: MemoryShards) -> int:
    """Return the number of a process; the next topic is created in the first shard."""
    del shards
    number: int = request.param
    return number


def test_a_member_polls_its_partitions_in_turn_and_commits(shards: MemoryShards, own: int) -> None:
    peer, group = member(shards, own, "a", b"0", b"1", b"2", b"3")
    assert shard_with(shards, "s.a") == 0
    polled = [values_of(peer.ask(Code.POLL, polling(group, "s", "a", 5, 1))[1]) for _ in range(4)]
    assert polled == [[b"0", b"2"], [b"1", b"3"], [], []]
    named = ident("s") + ident("a")
    for partition in range(2):
        stored = group + named + pack("<BI", 1, partition)
        assert peer.ask(Code.GET_OFFSET, stored) == (0, pack("<IQQ", partition, 1, 1))
    assert peer.ask(Code.STORE_OFFSET, group + named + pack("<BIQ", 1, 0, 2))[0] == errors.BAD_OFFSET
    assert peer.ask(Code.STORE_OFFSET, group + named + pack("<BIQ", 1, 0, 0))[0] == 0
    assert peer.ask(Code.DELETE_OFFSET, group + named + pack("<BI", 1, 1))[0] == 0
    polled = [values_of(peer.ask(Code.POLL, polling(group, "s", "a", 5, 1))[1]) for _ in range(2)]
    assert polled == [[b"2"], [b"1", b"3"]]


def test_a_group_is_polled_by_its_number(shards: MemoryShards, own: int) -> None:
    peer, group = member(shards, own, "a", b"0")
    assert values_of(peer.ask(Code.POLL, polling(b"\2" + ident(0), "s", "a", 5, 1))[1]) == [b"0"]
    assert peer.ask(Code.POLL, polling(b"\2" + ident(7), "s", "a", 5, 1))[0] == errors.NO_GROUP_ID
    assert peer.ask(Code.POLL, polling(b"\2" + ident("h"), "s", "a", 5, 1))[0] == errors.NO_GROUP_NAME
    assert peer.ask(Code.POLL, polling(group, "s", "a", 9, 1))[0] == errors.UNKNOWN_COMMAND


def test_members_leave_with_the_link_of_their_process_and_return(shards: MemoryShards) -> None:
    peer, group = member(shards, 1, "a", b"0")
    assert peer.ask(Code.POLL, polling(group, "s", "a", 5))[0] == 0
    members = partial(members_of, shards.brokers[0], "s.a")
    for _ in range(2):
        assert len(members()) == 1
        break_links(shards, peer, 0)
        shards.loop.run_due()
        assert members() == []
        assert peer.ask(Code.POLL, polling(group, "s", "a", 5))[0] == 0
    peer.close()
    assert members() == []


def members_of(broker: Broker, topic: str) -> list[str]:
    view = broker.groups.view("g", topic)
    assert view is not None
    return [found.id for found in view.members]


def test_a_group_that_another_protocol_deletes_is_gone_for_its_members(shards: MemoryShards, own: int) -> None:
    peer, group = member(shards, own, "a", b"0")
    shards.brokers[0].groups.delete("g", "s.a")
    assert peer.ask(Code.POLL, polling(group, "s", "a", 5))[0] == errors.NO_GROUP_NAME
    shards.brokers[0].groups.create("k", "s.a")
    assert peer.ask(Code.GET_GROUP, ident("s") + ident("a") + ident("k"))[0] == 0
    assert members_of_list(peer) == ["k"]


def members_of_list(peer: Conversation) -> list[str]:
    return names_of(peer.ask(Code.GET_GROUPS, ident("s") + ident("a"))[1], 12)


def test_a_deleted_group_is_gone_in_every_process(shards: MemoryShards, own: int) -> None:
    peer, group = member(shards, own, "a", b"0")
    other = connect(shards, 2)
    assert other.ask(Code.DELETE_GROUP, ident("s") + ident("a") + ident("g"))[0] == 0
    assert peer.ask(Code.POLL, polling(group, "s", "a", 5))[0] == errors.NO_GROUP_NAME
    assert joined(peer) == 0
    assert other.ask(Code.CREATE_GROUP, ident("s") + ident("a") + name("g"))[0] == 0
    assert other.ask(Code.CREATE_GROUP, ident("s") + ident("a") + name("g"))[0] == errors.GROUP_NAME_TAKEN


def test_an_error_of_a_commit_replaces_the_messages(shards: MemoryShards, own: int) -> None:
    hashed = hash_password("wonderland")
    for broker in shards.brokers:
        broker.access.configure([ConfiguredUser(user, hashed, EVERYTHING) for user in ("alice", "bob")])
    peers = []
    for user in ("alice", "bob"):
        peer = Conversation(shards, own)
        assert peer.ask(Code.LOGIN, name(user) + name("wonderland"))[0] == 0
        peers.append(peer)
    assert create_stream(peers[0], "s")[0] == 0
    assert create_topic(peers[0], "s", "a")[0] == 0
    assert send(peers[0], "s", "a", b"0") == 0
    shards.brokers[0].access.configure(
        [ConfiguredUser("alice", hashed, EVERYTHING), ConfiguredUser("bob", hashed, parse_grants(["consume@s"]))]
    )
    assert peers[0].ask(Code.POLL, polling(SINGLE, "s", "a", 1, 1))[0] == 0
    status, _ = peers[1].ask(Code.POLL, polling(SINGLE, "s", "a", 1, 1))
    assert status == peers[1].ask(Code.STORE_OFFSET, SINGLE + ident("s") + ident("a") + pack("<BIQ", 1, 0, 0))[0]


# Topics and streams of other protocols


def test_a_topic_keeps_its_number_when_another_protocol_drops_it(shards: MemoryShards, own: int) -> None:
    peers = [connect(shards, own), connect(shards, 2)]
    assert create_stream(peers[0], "s")[0] == 0
    assert create_topic(peers[0], "s", "a")[0] == 0
    number = peers[1].ask(Code.GET_TOPIC, ident("s") + ident("a"))[1][:4]
    topic = shards.brokers[0].topic("s.a")
    shards.brokers[0].configure_topic(topic, TopicSettings(retention_bytes=1 << 30))
    shards.loop.run_due()
    for peer in peers:
        assert send(peer, "s", "a", b"x") == 0
    assert peers[1].ask(Code.GET_TOPIC, ident("s") + ident("a"))[1][:4] == number


def test_a_changed_topic_keeps_groups_that_were_created_meanwhile(shards: MemoryShards) -> None:
    peer, other = connect(shards, 1), connect(shards, 0)
    assert create_stream(peer, "s")[0] == 0
    assert create_topic(peer, "s", "a")[0] == 0
    named = ident("s") + ident("a")
    (link,) = links_of(shards, peer, 0)
    link.pause()
    for group in ("z", "a"):  # so that numbers show the order of creation
        assert other.ask(Code.CREATE_GROUP, named + name(group))[0] == 0
    peer.feed(classic(Code.UPDATE_TOPIC, named + pack("<BQQB", 1, 0, 0, 1) + name("b")))
    peer.pass_by()
    link.resume()
    peer.pass_by()
    assert peer.take() == bytes(8)
    for found in (peer, other):
        assert names_of(found.ask(Code.GET_GROUPS, ident("s") + ident("b"))[1], 12) == ["z", "a"]


def test_many_topics_of_other_protocols_are_numbered_in_their_processes(
    shards: MemoryShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "UNSEEN_MAX", 4)
    peers = [connect(shards, own) for own in range(3)]
    for number in range(60):
        shards.brokers[number % 3].create_topic(TopicName.parse(f"x{number % 2}.t{number}"))
    shards.loop.run_due()
    numbers = set()
    for peer in peers:
        listed = peer.ask(Code.GET_STREAMS)[1]
        assert sorted(names_of(listed, 32)) == ["x0", "x1"]
        assert [unpack_from("<I", listed, at + 12)[0] for at in (0, 35)] == [30, 30]
        numbers |= {peer.ask(Code.GET_TOPIC, ident("x1") + ident(f"t{number}"))[1][:4] for number in range(1, 60, 2)}
    assert len(numbers) == 30


def test_a_process_that_is_gone_hides_only_its_own_new_topics(shards: MemoryShards) -> None:
    peers = shown(shards, *TOPICS)
    shards.brokers[2].create_topic(TopicName.parse("s.new"))
    shards.brokers[1].create_topic(TopicName.parse("s.old"))
    shards.loop.run_due()
    gone = Gone(shards, 2, peers[:2])
    for peer in peers[:2]:
        assert send(peer, "s", "old", b"x") == 0
        assert send(peer, "s", "new", b"x") == errors.NO_TOPIC_NAME
    gone.gone = None
    peers[0].pass_by(SKIPPED_S)
    for peer in peers[:2]:
        assert send(peer, "s", "new", b"x") == 0


def test_a_deleted_stream_is_not_created_again_by_a_process_that_knows_its_topics(shards: MemoryShards) -> None:
    peers = shown(shards, *TOPICS)
    break_links(shards, peers[1], 2)
    assert peers[0].ask(Code.DELETE_STREAM, ident("s"))[0] == 0
    assert [peer.ask(Code.GET_STREAMS) for peer in peers] == [(0, b"")] * 3


def test_a_topic_is_deleted_and_created_elsewhere_while_requests_wait(shards: MemoryShards) -> None:
    peer, other = connect(shards, 1), connect(shards, 0)
    assert create_stream(peer, "s")[0] == 0
    assert create_topic(peer, "s", "a")[0] == 0
    peer.feed(classic(Code.SEND, sent("s", "a", b"1")) + classic(Code.GET_TOPIC, ident("s") + ident("a")))
    topic = shards.brokers[0].topic("s.a")
    shards.brokers[0].delete_topic(topic)
    shards.brokers[2].create_topic(TopicName.parse("s.a"))
    peer.pass_by()
    answers = peer.take()
    assert unpack_from("<I", answers)[0] in (0, errors.NO_PARTITION)
    for found in (peer, other):
        assert send(found, "s", "a", b"2") == 0
    assert poll(peer, "s", "a") == [b"2", b"2"]


# Processes that start


def test_requests_wait_until_other_processes_have_reported_their_topics() -> None:
    shards = make_shards(3, dialect=D2)
    peers = shown(shards, *TOPICS)
    shards.restart(1)
    late = Conversation(shards, 1)
    late.feed(classic(Code.SEND, sent("s", "a", b"x")))
    late.pass_by()
    assert late.take() == bytes(8)
    assert send(late, 0, "a", b"y") == 0
    assert poll(peers[0], "s", "a") == [b"x", b"y"]


def test_requests_fail_while_another_process_does_not_report_its_topics() -> None:
    shards = make_shards(3, dialect=D2)
    shown(shards, *TOPICS)
    shards.silent.add(2)
    shards.restart(1)
    late = connect(shards, 1)
    late.feed(classic(Code.GET_STREAM, ident("t")))
    late.pass_by()
    assert late.take() == b""
    late.pass_by(routed_broker.ANSWER_S)
    assert late.take() == pack("<II", errors.ERROR, 0)
    late.feed(classic(Code.SEND, sent("s", "a", b"x")))
    late.pass_by()
    assert late.take() == bytes(8), "the topic is known"


def test_a_link_that_is_lost_between_a_call_and_its_repeat(shards: MemoryShards) -> None:
    peers = shown(shards, *TOPICS)
    topic = next(topic for topic in TOPICS if shard_with(shards, f"s.{topic}") == 2)
    peers[0].feed(classic(Code.GET_GROUPS, ident("s") + ident(topic)))
    assert peers[0].session.paused()
    break_links(shards, peers[0], 2)
    peers[0].pass_by()
    assert peers[0].take() == pack("<II", errors.ERROR, 0)
    assert peers[0].ask(Code.GET_GROUPS, ident("s") + ident(topic)) == (0, b"")


def test_users_have_the_same_numbers_in_all_processes(shards: MemoryShards) -> None:
    hashed = hash_password("wonderland")
    shards.brokers[0].access.configure([ConfiguredUser("first", hashed, EVERYTHING)])
    shards.brokers[0].access.configure([ConfiguredUser(user, hashed, EVERYTHING) for user in ("first", "alice")])
    shards.loop.run_due()
    peers = [logged_in(shards, own, "alice", "wonderland") for own in range(3)]
    alice = pack("<I", shards.brokers[0].access.user("alice").id)
    for peer in peers:
        listed = peer.ask(Code.GET_CLIENTS)[1]
        users, at = [], 0
        while at < len(listed):
            users.append(listed[at + 4 : at + 8])
            at += 17 + unpack_from("<I", listed, at + 9)[0]
        assert users == [alice] * 3
