"""Requests to topics of several shards over FLUX: responses match a single process, in request order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polywire.errors import PeerError
from polywire.protocols.flux.factory import CarryingFluxFactory, FluxFactory, FluxLinkFactory
from polywire.protocols.flux.part_replies import HELD_BYTES_MAX, Lines, Merged, Replies, merged
from tests.unit.protocols.polywire.peer import CapturedOutput
from tests.unit.protocols.shards_in_memory import MemoryShards, ShardedConversation

TOPICS = ("a", "bb", "ccc", "dddd")
LINES = (
    *(f"PRODUCE|{topic} k{number}:v{number}" for topic in TOPICS for number in range(2)),
    *(f"PRODUCE|{topic} k:w acks=0" for topic in TOPICS[:2]),
    *(f"CONSUME|{topic} 0 0" for topic in TOPICS),
    *(f"ADMIN_CREATE_TOPIC|{topic} 3 1" for topic in TOPICS[2:]),
    *(f"JOIN|g {topic} m 30000" for topic in TOPICS[:2]),
    *(f"COMMIT|g {topic} m 1 0 0" for topic in TOPICS[:2]),
    *(f"OFFSET|g {topic} 0" for topic in TOPICS[:2]),
    "ADMIN_GET_METADATA|",
    "PING|",
    "NONSENSE|x",
    "CONSUME|%zz 0 0",
    "PRODUCE|",
)


class Conversation(ShardedConversation):
    """One connection in front of ``count`` shards."""

    def __init__(self, count: int) -> None:
        shards = MemoryShards(FluxFactory, count)
        own = shards.factories[0]
        assert isinstance(own, FluxFactory)
        super().__init__(shards, own if count == 1 else CarryingFluxFactory(own, shards))

    def say(self, data: bytes) -> None:
        self.feed(data)
        self.pass_by()

    def heard(self) -> list[str]:
        return self.take().decode().splitlines()

    def ask(self, line: str) -> str:
        self.say(f"V1|1|{line}\n".encode())
        (answer,) = self.heard()
        return answer.removeprefix("V1|1|")


@settings(max_examples=30, deadline=None)
@given(chosen=st.lists(st.sampled_from(LINES), min_size=1, max_size=30), size=st.integers(20, 400))
def test_responses_match_a_single_process(chosen: list[str], size: int) -> None:
    data = b"".join(f"V1|{number}|{line}\n".encode() for number, line in enumerate(chosen))
    heard = []
    for count in (1, 3):
        conversation = Conversation(count)
        for at in range(0, len(data), size):
            conversation.say(data[at : at + size])
        heard.append([without_index(line) for line in conversation.heard()])
    assert heard[0] == heard[1]
    assert len(heard[0]) == len(chosen)


def without_index(line: str) -> str:
    """Return a response without the metadata index, which each shard counts separately."""
    return line.partition(" term=")[0]


def test_topics_of_several_shards_are_listed_together() -> None:
    conversation = Conversation(3)
    for topic in TOPICS:
        assert conversation.ask(f"PRODUCE|{topic} k:v").startswith("OK|")
    assert sorted(len(broker.topics()) for broker in conversation.shards.brokers) == [1, 1, 2]
    assert conversation.ask("ADMIN_GET_METADATA|") == "OK|topics=[a bb ccc dddd] brokers=[0] fenced=[]"


def test_brokers_cannot_be_registered() -> None:
    assert Conversation(3).ask("ADMIN_REGISTER_BROKER|1 host 1").startswith("ERR|BAD_REQUEST|brokers cannot")


def test_a_lost_process_closes_connections_with_pending_requests() -> None:
    conversation = Conversation(3)
    conversation.ask("PRODUCE|a k:v")
    (link,) = conversation.shards.links
    conversation.session.receive(memoryview(bytearray(b"V1|1|PRODUCE|a k:v\n")))
    with pytest.raises(PeerError):
        link.break_off()


def test_a_lost_process_without_pending_requests_closes_no_connection() -> None:
    conversation = Conversation(3)
    conversation.ask("PRODUCE|a k:v")
    conversation.shards.links[0].break_off()
    assert conversation.ask("PRODUCE|a k:v").startswith("OK|")


def test_buffered_responses_of_later_requests_are_limited() -> None:
    conversation = Conversation(3)
    conversation.ask("PRODUCE|a k:v")
    (link,) = conversation.shards.links
    link.is_paused = False
    link.deliver(b"x" * (HELD_BYTES_MAX + 1))
    assert link.is_paused


def test_a_client_that_does_not_read_is_not_read_from() -> None:
    conversation = Conversation(3)
    conversation.ask("PRODUCE|a k:v")
    conversation.output.backlog = conversation.output.backlog_max + 1
    conversation.shards.links[0].deliver(b"")
    assert conversation.shards.links[0].is_paused
    assert conversation.session.paused()
    conversation.output.backlog = 0
    conversation.session.drained()
    assert not conversation.shards.links[0].is_paused


def test_a_line_that_is_too_long_gets_an_error_and_closes() -> None:
    conversation = Conversation(3)
    conversation.say(b"V1|1|PRODUCE|a k:v\n")
    conversation.say(b"V1|1|PRODUCE|a " + b"x" * 70_000 + b"\n")
    heard = conversation.heard()
    assert heard[0].startswith("V1|1|OK")
    assert heard[1].startswith("V1|0|ERR|BAD_REQUEST")
    assert conversation.output.closed


def test_requests_before_the_end_of_the_stream_are_answered() -> None:
    conversation = Conversation(3)
    conversation.say(b"V1|1|PRODUCE|bb k:v\n")
    conversation.session.finish(memoryview(b"V1|2|PRODUCE|a k:v\nV1|3|PRODUCE|a k:w"))
    conversation.shards.loop.run_due()
    assert [line[:6] for line in conversation.heard()] == ["V1|1|O", "V1|2|O", "V1|3|O"]
    assert conversation.output.closed


def test_a_partial_line_is_dropped_when_a_link_closes() -> None:
    """The forwarding process was killed in the middle of the line; the kernel delivers what it had, and the end."""
    conversation = Conversation(3)
    conversation.ask("PRODUCE|a k:v")
    output, factory = CapturedOutput(), conversation.shards.factories[1]
    session = FluxLinkFactory(factory).open(output, lambda: None)  # type: ignore[arg-type]  # it is of this wire
    session.finish(memoryview(b"V1|1|PRODUCE|a k:w\nV1|2|PRODUCE|a k:hal"))
    conversation.shards.loop.run_due()
    assert output.closed
    assert conversation.ask("CONSUME|a 0 0") == "OK|messages=0:v,1:w hw=1"


def test_a_kafka_client_is_rejected() -> None:
    with pytest.raises(PeerError, match="a Kafka client connected to the FLUX port"):
        Conversation(3).say(b"\x00\x00\x00\x25\x00\x12\x00\x03")


def test_a_browser_is_rejected() -> None:
    with pytest.raises(PeerError):
        Conversation(3).say(b"GET / HTTP/1.1\n")


@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=60),
)
def test_interleaved_partial_responses_reach_their_own_requests(sizes: list[int], cuts: list[int]) -> None:
    """Requests alternate between two shards, whose responses arrive a few bytes at a time."""
    sources = Replies(), Replies()
    said: list[list[bytes]] = [[], []]
    wanted: list[bytes] = []
    parts = []
    for number, size in enumerate(sizes):
        lines = [b"%d-%d\n" % (number, line) for line in range(size)]
        said[number % 2] += lines
        wanted += lines
        parts.append(Lines(sources[number % 2], size))
    streams = [b"".join(lines) for lines in said]
    written: list[bytes] = []
    turn = 0
    while any(streams):
        which = turn % 2
        cut = cuts[turn % len(cuts)]
        sources[which].held += streams[which][:cut]
        streams[which] = streams[which][cut:]
        turn += 1
        while parts and parts[0].advance(written):
            parts.pop(0)
    while parts and parts[0].advance(written):
        parts.pop(0)
    assert not parts
    assert b"".join(written) == b"".join(wanted)


def test_metadata_of_several_shards_is_one_line() -> None:
    answers = [b"V1|7|OK|topics=[b] brokers=[1] fenced=[]\n", b"V1|7|OK|topics=[] brokers=[] fenced=[]\n"]
    sources = [Replies(), Replies()]
    part = Merged(sources)
    written: list[bytes] = []
    for source, answer in zip(sources, [*answers[:1], b"V1|7|OK|topics=[a c] brokers=[] fenced=[]\n"], strict=True):
        assert not part.advance(written)
        source.held += answer
    assert part.advance(written)
    assert written == [b"V1|7|OK|topics=[a b c] brokers=[1] fenced=[]\n"]
    assert merged([answers[0], b"V1|7|ERR|BAD_REQUEST|no\n"]) == b"V1|7|ERR|BAD_REQUEST|no\n"
