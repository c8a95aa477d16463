"""Requests about topics of other shards: forwarded, merged, or refused when a shard is unreachable.

Three brokers in memory share the names; links are sessions of the other brokers without sockets.
"""

from __future__ import annotations

import time

import pytest

from polywire.broker.access import ConfiguredUser
from polywire.broker.owners import NO_CALLER
from polywire.broker.passwords import hash_password
from polywire.broker.permissions import EVERYTHING
from polywire.errors import Conflict, Denied, ErrorCode, Invalid, Missing, Unavailable
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import FRAME_BYTES_MAX, PREFIX_BYTES, encode_head
from polywire.protocols.polywire.combining import combined_response
from polywire.protocols.polywire.factory import RoutedPolywireFactory
from polywire.protocols.polywire.messages import Head, Verb
from polywire.protocols.polywire.session import REQUESTS_MAX
from polywire.routing import broker as routed_broker
from polywire.routing import link
from polywire.routing.broker import RoutedBroker
from polywire.routing.session import RouterFactory
from tests.unit.protocols import shards_in_memory
from tests.unit.protocols.polywire.peer import Answer, Peer, batch_of

SHARDS = 3
WAIT_S = 60.0
HASH = hash_password("wonderland")


class MemoryShards(shards_in_memory.MemoryShards):
    """Shards with connections of this protocol."""

    def __init__(self) -> None:
        super().__init__(lambda broker: RouterFactory(broker, shards_in_memory.KEY), SHARDS)
        self.factory = RoutedPolywireFactory(RoutedBroker(self.brokers[self.own], self))

    def peer(self) -> Peer:
        """Connect to this process's broker."""
        return Peer(broker=self.brokers[self.own], loop=self.loop, factory=self.factory)


@pytest.fixture
def shards() -> MemoryShards:
    return MemoryShards()


def create(peer: Peer, *names: str) -> None:
    for name in names:
        peer.ask(Verb.CREATE_TOPIC, messages.CreateTopic(name, 1)).decode(messages.TopicDescription)


def produce(peer: Peer, name: str, *values: bytes, create: bool = False) -> int:
    head = messages.Produce(name, 0, create=create)
    produced = peer.ask(Verb.PRODUCE, head, batch_of(*values)).decode(messages.Produced)
    return produced.appended[0].base_offset


def test_topics_are_spread_and_found_by_every_request(shards: MemoryShards) -> None:
    peer = shards.peer()
    create(peer, "a", "b", "c", "d")
    assert [len(broker.topics()) for broker in shards.brokers] == [2, 1, 1]
    for name in "abcd":
        assert produce(peer, name, b"1", b"2") == 0
        assert produce(peer, name, b"3") == 2
        assert peer.ask(Verb.DESCRIBE, messages.Describe(name)).decode(messages.TopicDescription).name == name
        answer = peer.ask(Verb.FETCH, messages.Fetch(name, 0, 0, offset_end=3))
        assert answer.decode(messages.Fetched).next_offset == 3
        assert answer.payload
        peer.ask(Verb.COMMIT, messages.Commit(name, 0, 1, "g", 2)).decode(Head)
        assert peer.ask(Verb.POSITION, messages.AskPosition(name, 0, 1, "g")).decode(messages.Position).offset == 2
    listed = peer.ask(Verb.TOPICS, messages.ListTopics()).decode(messages.TopicList)
    assert [topic.name for topic in listed.topics] == ["a", "b", "c", "d"]
    names = ["d", "a", "b", "a"]
    bounds = peer.ask(Verb.BOUNDS, messages.AskBounds(names)).decode(messages.BoundsList)
    assert [(topic.name, topic.partitions[0].next_offset) for topic in bounds.topics] == [("d", 3), ("a", 3), ("b", 3)]
    for name in "abcd":
        bounds = peer.ask(Verb.BOUNDS, messages.AskBounds([name])).decode(messages.BoundsList)
        assert [topic.name for topic in bounds.topics] == [name]
    groups = peer.ask(Verb.GROUPS, messages.AskGroups()).decode(messages.GroupList)
    assert [(group.name, group.group, group.positions) for group in groups.groups] == [
        (name, "g", [[0, 2]]) for name in "abcd"
    ]


def test_an_automatically_created_topic_is_in_the_shard_of_its_name(shards: MemoryShards) -> None:
    peer = shards.peer()
    assert produce(peer, "xx", b"1", create=True) == 0
    assert shards.brokers[2].find_topic("xx") is not None
    assert produce(peer, "xx", b"2", create=True) == 1
    with pytest.raises(Missing):
        produce(peer, "nowhere", b"1")
    with pytest.raises(Conflict):
        create(peer, "xx")


def test_the_next_request_sees_created_and_deleted_topics(shards: MemoryShards) -> None:
    peer = shards.peer()
    create(peer, "first")
    peer.send(Verb.CREATE_TOPIC, messages.CreateTopic("second", 1))
    assert peer.session.paused(), "the next request waits"
    shards.loop.run_due()
    assert not peer.session.paused()
    assert len(peer.frames()) == 1
    assert produce(peer, "second", b"1") == 0
    peer.send(Verb.DELETE_TOPIC, messages.DeleteTopic("second"))
    assert peer.session.paused()
    shards.loop.run_due()
    assert [frame.more for frame in peer.frames()] == [False]
    with pytest.raises(Missing):
        produce(peer, "second", b"2")


def test_requests_about_one_topic_keep_their_order(shards: MemoryShards) -> None:
    peer = shards.peer()
    create(peer, "a", "b")
    sent = [peer.send(Verb.PRODUCE, messages.Produce("b", 0), batch_of(b"%d" % number)) for number in range(20)]
    shards.loop.run_due()
    answered = {frame.correlation: frame.decode(messages.Produced).appended[0].base_offset for frame in peer.frames()}
    assert [answered[correlation] for correlation in sent] == list(range(20))


def test_requests_pending_at_a_lost_process_fail_and_others_are_served(shards: MemoryShards) -> None:
    peer = shards.peer()
    create(peer, "a", "b", "c")
    correlation = peer.send(Verb.PRODUCE, messages.Produce("b", 0), batch_of(b"1"))
    shards.links[0].break_off()
    (frame,) = peer.frames()
    assert frame.correlation == correlation
    assert isinstance(frame.error, Unavailable)
    assert frame.error.code is ErrorCode.STOPPING
    assert produce(peer, "a", b"1") == 0
    assert produce(peer, "c", b"1") == 0
    assert produce(peer, "b", b"1") == 0, "over a new link"
    peer.send(Verb.TOPICS, messages.ListTopics())
    shards.loop.run_pass()
    shards.loop.run_pass()
    shards.links[-1].break_off()
    assert isinstance(peer.frames()[0].error, Unavailable)
    assert not peer.session.paused(), "no request is pending any more"


def test_a_waiting_fetch_is_cancelled_in_its_shard(shards: MemoryShards) -> None:
    peer = shards.peer()
    create(peer, "a", "b")
    waiting = peer.send(Verb.FETCH, messages.Fetch("b", 0, 0, wait_ms=10_000))
    shards.loop.run_due()
    assert peer.frames() == []
    cancel = peer.send(Verb.CANCEL, messages.Cancel(waiting))
    shards.loop.run_due()
    assert sorted(frame.correlation for frame in peer.frames()) == [waiting, cancel]
    assert not peer.session.owes()


def test_a_correlation_in_use_is_refused(shards: MemoryShards) -> None:
    peer = shards.peer()
    create(peer, "a", "b")
    waiting = peer.send(Verb.FETCH, messages.Fetch("b", 0, 0, wait_ms=10_000))
    shards.loop.run_due()
    peer.correlations = iter([waiting])
    peer.send(Verb.FETCH, messages.Fetch("b", 0, 0))
    assert isinstance(peer.frames()[0].error, Invalid)


def test_requests_stop_while_a_shard_has_many_to_answer(shards: MemoryShards, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (routed_broker, link):
        monkeypatch.setattr(module, "CLOGGED_BYTES", 0)
    peer = shards.peer()
    create(peer, "a", "b")
    peer.send(Verb.PRODUCE, messages.Produce("b", 0), batch_of(b"1"))
    assert peer.session.paused()
    resumes = peer.resumes
    shards.loop.run_due()
    assert peer.resumes == resumes + 1
    assert not peer.session.paused()


def test_the_longest_frame_reaches_another_shard(shards: MemoryShards) -> None:
    """The link adds bytes to a frame, and may encode its head longer than the client did."""
    peer = shards.peer()
    create(peer, "a", "b")
    head = len(encode_head(Verb.PRODUCE, 1, messages.Produce("b", 0))) - PREFIX_BYTES
    with pytest.raises(Invalid):
        peer.ask(Verb.PRODUCE, messages.Produce("b", 0), bytes(FRAME_BYTES_MAX - head)).decode(messages.Produced)
    assert len(shards.links) == SHARDS - 1, "the link is the same"
    assert produce(peer, "b", b"1") == 0


def test_pending_forwarded_requests_are_limited(shards: MemoryShards) -> None:
    peer = shards.peer()
    create(peer, "a", "b")
    for _ in range(REQUESTS_MAX):
        peer.send(Verb.DESCRIBE, messages.Describe("b"))
    assert peer.session.paused()
    shards.loop.run_due()
    assert len(peer.frames()) == REQUESTS_MAX


def test_requests_before_the_end_of_the_stream_are_answered(shards: MemoryShards) -> None:
    peer = shards.peer()
    create(peer, "a", "b")
    peer.send(Verb.DESCRIBE, messages.Describe("b"))
    peer.session.finish(memoryview(b""))
    assert not peer.output.closed
    shards.loop.run_due()
    assert len(peer.frames()) == 1
    assert peer.output.closed


def test_links_end_with_the_connection(shards: MemoryShards) -> None:
    peer = shards.peer()
    create(peer, "a", "b")
    peer.send(Verb.FETCH, messages.Fetch("b", 0, 0, wait_ms=10_000))
    peer.session.close()
    shards.loop.run_due()
    assert peer.frames() == []


def test_a_publish_finds_its_shard_and_is_applied_once(shards: MemoryShards) -> None:
    peer = shards.peer()
    create(peer, "a", "b", "c")
    for name, token in (("c", b"t" * 16), ("b", b"u" * 16)):
        peer.ask(Verb.STAGE, messages.Stage(token, name, 0), batch_of(b"1")).decode(messages.Staged)
    other = shards.peer()
    published = other.ask(Verb.PUBLISH, messages.Publish("w", 1, [b"t" * 16])).decode(messages.Published)
    assert [found.name for found in published.ranges] == ["c"]
    assert other.ask(Verb.PUBLISH, messages.Publish("w", 1, [b"t" * 16])).decode(messages.Published).duplicate
    writers = other.ask(Verb.WRITERS, messages.ListEntries()).decode(messages.EntryList[messages.WriterEntry])
    assert [(writer.name, writer.number) for writer in writers.entries] == [("w", 1)]
    other.ask(Verb.ABANDON, messages.Abandon([b"u" * 16])).decode(Head)
    with pytest.raises(Missing) as caught:
        other.ask(Verb.PUBLISH, messages.Publish("w", 2, [b"u" * 16])).decode(messages.Published)
    assert caught.value.code is ErrorCode.STAGE_MISSING
    other.ask(Verb.DELETE_WRITER, messages.DeleteEntry("w")).decode(Head)
    with pytest.raises(Missing):
        other.ask(Verb.DELETE_WRITER, messages.DeleteEntry("w")).decode(Head)


def test_batches_staged_in_two_shards_cannot_be_published_together(shards: MemoryShards) -> None:
    peer = shards.peer()
    create(peer, "a", "b")
    tokens = [b"a" * 16, b"b" * 16]
    for name, token in zip("ab", tokens, strict=True):
        peer.ask(Verb.STAGE, messages.Stage(token, name, 0), batch_of(b"1")).decode(messages.Staged)
    with pytest.raises(Missing, match="topics of one process"):
        peer.ask(Verb.PUBLISH, messages.Publish("w", 1, tokens)).decode(messages.Published)
    assert peer.ask(Verb.PUBLISH, messages.Publish("w", 1, tokens[:1])).decode(messages.Published).ranges
    assert peer.ask(Verb.PUBLISH, messages.Publish("v", 1, tokens[1:])).decode(messages.Published).ranges


def offsets_of(*names: str) -> list[messages.GroupOffsets]:
    return [messages.GroupOffsets(name, "g", "", -1, {0: 1}) for name in names]


def test_offsets_are_published_in_the_shard_of_their_topic(shards: MemoryShards) -> None:
    peer = shards.peer()
    create(peer, "a", "b")
    produce(peer, "b", b"1")
    published = peer.ask(Verb.PUBLISH, messages.Publish("w", 1, [], offsets_of("b")))
    assert not published.decode(messages.Published).duplicate
    assert peer.ask(Verb.POSITION, messages.AskPosition("b", 0, 1, "g")).decode(messages.Position).offset == 1
    assert peer.ask(Verb.PUBLISH, messages.Publish("w", 1, [], offsets_of("b"))).decode(messages.Published).duplicate
    with pytest.raises(Invalid, match="topics of one process"):
        peer.ask(Verb.PUBLISH, messages.Publish("w", 2, [], offsets_of("a", "b"))).decode(messages.Published)
    peer.ask(Verb.STAGE, messages.Stage(b"a" * 16, "a", 0), batch_of(b"1")).decode(messages.Staged)
    with pytest.raises(Missing, match="topics of one process"):
        peer.ask(Verb.PUBLISH, messages.Publish("w", 2, [b"a" * 16], offsets_of("b"))).decode(messages.Published)


def test_an_epoch_fences_a_writer_in_all_shards(shards: MemoryShards) -> None:
    peer = shards.peer()
    create(peer, "a", "b", "c")
    # one shard has later epochs than the others, as after a failed attempt to begin one
    for _ in range(3):
        shards.brokers[1].staging.begin_epoch("w", epoch_min=0, by=NO_CALLER, done=None)
    assert peer.ask(Verb.BEGIN_EPOCH, messages.BeginEpoch("w")).decode(messages.EpochBegun).epoch == 4
    assert peer.ask(Verb.BEGIN_EPOCH, messages.BeginEpoch("w")).decode(messages.EpochBegun).epoch == 5
    for number, name in enumerate("abc", 1):
        with pytest.raises(Conflict) as caught:
            peer.ask(Verb.PUBLISH, messages.Publish("w", number, [], offsets_of(name), 4)).decode(messages.Published)
        assert caught.value.code is ErrorCode.PRODUCER_FENCED
        published = peer.ask(Verb.PUBLISH, messages.Publish("w", number, [], offsets_of(name), 5))
        assert not published.decode(messages.Published).duplicate


def test_unauthenticated_requests_are_not_forwarded(shards: MemoryShards) -> None:
    peer = shards.peer()
    create(peer, "a", "b")
    links = len(shards.links)
    for broker in shards.brokers:
        broker.access.configure([ConfiguredUser("alice", HASH, EVERYTHING)])
    other = shards.peer()
    with pytest.raises(Denied) as caught:
        other.ask(Verb.DESCRIBE, messages.Describe("b")).decode(messages.TopicDescription)
    assert caught.value.code is ErrorCode.LOGIN_REQUIRED
    assert len(shards.links) == links


def test_a_login_applies_in_every_shard(shards: MemoryShards) -> None:
    peer = shards.peer()
    create(peer, "a", "b")
    for broker in shards.brokers:
        broker.access.configure([ConfiguredUser("alice", HASH, EVERYTHING)])
    other = shards.peer()
    correlation = other.send(Verb.LOGIN, messages.LogIn("alice", "wonderland"))
    answers = wait_for(shards, other, 1)
    assert answers[0].correlation == correlation
    other.send(Verb.DESCRIBE, messages.Describe("b"))
    assert wait_for(shards, other, 1)[0].decode(messages.TopicDescription).name == "b"
    other.send(Verb.FETCH, messages.Fetch("b", 0, 0, wait_ms=10_000))
    shards.loop.run_due()
    other.send(Verb.LOGIN, messages.LogIn("alice", "wrong"))
    refused = wait_for(shards, other, 2)
    assert {answer.error.code for answer in refused} == {ErrorCode.LOGIN_REQUIRED, ErrorCode.LOGIN_FAILED}


def wait_for(shards: MemoryShards, peer: Peer, count: int) -> list[Answer]:
    """Return that many frames; passwords are verified by threads."""
    found: list[Answer] = []
    end = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < end
        shards.loop.run_due()
        found += peer.frames()
        time.sleep(0.001)
    return found


@pytest.mark.parametrize(("sizes", "limit"), [((5, 0, 3), 2), ((4, 4, 4), 3), ((0, 0, 0), 2), ((1, 7, 2), 4)], ids=str)
def test_pages_of_a_list_contain_every_group_once(sizes: tuple[int, ...], limit: int) -> None:
    """Each shard returns few groups at a time, as if ``GROUPS_MAX`` were small."""
    kept = [sorted(f"{(7 * n + shard) % 10}-{shard}-{n}" for n in range(size)) for shard, size in enumerate(sizes)]
    reported: list[str] = []
    after = ""
    for _ in range(sum(sizes) + 2):
        found = combined_response(MemoryShards(), Verb.WRITERS, messages.ListEntries(after))
        assert found is not None
        while (question := found.next_request()) is not None:
            shard, head = question
            assert isinstance(head, messages.ListEntries)
            left = [name for name in kept[shard] if name > head.after]
            page = messages.EntryList(
                [messages.WriterEntry(name, 1, 0, "") for name in left[:limit]], len(left) > limit
            )
            found.add(_encoded(page))
        result = found.result()
        assert isinstance(result, messages.EntryList)
        reported += [entry.name for entry in result.entries]
        if not result.more:
            break
        after = reported[-1]
    assert reported == sorted(name for names in kept for name in names)


def _encoded(head: Head) -> bytes:
    return encode_head(Verb.WRITERS, 1, head)[PREFIX_BYTES:]


def test_similar_frames_are_forwarded_one_by_one_and_merged_at_their_shard(shards: MemoryShards) -> None:
    peer = shards.peer()
    create(peer, "a", "b", "c")
    for name in "abc":
        batch = batch_of(b"1", b"2")
        frames = [
            encode_head(Verb.PRODUCE, at, messages.Produce(name, 0), payload_bytes=len(batch)) + bytes(batch)
            for at in range(1, 6)
        ]
        data = bytearray(b"".join(frames))
        assert peer.session.receive(memoryview(data)) == len(data)
        shards.loop.run_due()
        answers = sorted(peer.frames(), key=lambda answer: answer.correlation)
        offsets = [answer.decode(messages.Produced).appended[0].base_offset for answer in answers]
        assert offsets == [0, 2, 4, 6, 8], name
