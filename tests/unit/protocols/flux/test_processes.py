"""Requests to topics of several processes over FLUX: responses match a single process, in request order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polywire.broker.access import ROOT
from polywire.broker.broker import Broker
from polywire.broker.owners import caller_of
from polywire.broker.topics import Partition
from polywire.errors import Busy, ErrorCode, PeerError
from polywire.protocols.flux.factory import DATA_COMMANDS, FluxFactory
from polywire.protocols.flux.session import BUSY_WAIT_S
from polywire.protocols.runtime.append_queue import BUSY_PAUSE_S
from polywire.protocols.runtime.forwarded import Executor
from polywire.routing import broker as routed_broker
from polywire.routing import link
from polywire.routing.broker import ANSWER_S, RoutedBroker
from polywire.routing.session import RouterFactory
from polywire.types import TopicName
from tests.unit.protocols.polywire.peer import CapturedOutput
from tests.unit.protocols.shards_in_memory import KEY, MemoryLink, MemoryShards, ShardedConversation

TOPICS = ("a", "bb", "ccc", "dddd")  # of shards 1, 2, 0 and 1
LINES = (
    *(f"PRODUCE|{topic} k{number}:v{number}" for topic in TOPICS for number in range(2)),
    *(f"PRODUCE|{topic} k:w acks=0" for topic in TOPICS[:2]),
    "PRODUCE|a k:w acks=all",
    "PRODUCE|bb k:\x01",
    *(f"CONSUME|{topic} 0 0" for topic in TOPICS),
    "BROKER_FETCH|a 0 1 0",
    "REPLICA_FETCH|a 0 1 0",
    *(f"SET_PARTITION_ROLE|{topic} 0 leader" for topic in TOPICS[:2]),
    *(f"ADMIN_CREATE_TOPIC|{topic} 3 1" for topic in TOPICS[2:]),
    *(f"JOIN|g {topic} m 30000" for topic in TOPICS[:2]),
    *(f"COMMIT|g {topic} m 1 0 0" for topic in TOPICS[:2]),
    *(f"OFFSET|g {topic} 0" for topic in TOPICS[:2]),
    "ADMIN_GET_METADATA|",
    "ADMIN_GET_METADATA|x",
    "PING|",
    "NONSENSE|x",
    "CONSUME|%zz 0 0",
    "CONSUME|%ff 0 0",
    "PRODUCE|__a k:v",
    "PRODUCE|",
)


class Processes(MemoryShards):
    """Processes that share topics. Clients connect to the process ``own``."""

    def __init__(self, count: int, own: int = 0) -> None:
        executors: list[dict[str, Executor]] = [{} for _ in range(count)]
        unused = iter(executors)
        super().__init__(lambda broker: RouterFactory(broker, KEY, executors=next(unused)), count, own)
        self.routers = [RoutedBroker(broker, self.seen_by(number)) for number, broker in enumerate(self.brokers)]
        self.flux: list[FluxFactory] = []
        for broker, router, known in zip(self.brokers, self.routers, executors, strict=True):
            self.flux.append(FluxFactory(broker, router=router if count > 1 else None))
            known["flux"] = self.flux[-1].execute
            router.executors.update(known)
        for _ in range(20):
            self.loop.run_due()

    def seen_by(self, own: int) -> Processes:
        """Return these processes as one of them sees them."""
        seen = type(self).__new__(type(self))
        seen.__dict__.update(self.__dict__, own=own)
        return seen


class Client(CapturedOutput):
    """The output of a client. Unread bytes are a backlog."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[str] = []

    @property
    def backlog(self) -> int:
        return len(self.written)

    @backlog.setter
    def backlog(self, size: int) -> None:
        """Do nothing."""

    def fail(self, error: PeerError) -> None:
        self.failures.append(error.message)


class Conversation(ShardedConversation):
    """One connection to a process of ``count``."""

    shards: Processes
    output: Client

    def __init__(self, count: int, own: int = 0, shards: Processes | None = None) -> None:
        shards = shards or Processes(count, own)
        super().__init__(shards, shards.flux[own], Client())

    def say(self, data: bytes) -> None:
        self.feed(data)
        self.pass_by()

    def heard(self) -> list[str]:
        return self.take().decode().splitlines()

    def ask(self, line: str) -> str:
        self.say(f"V1|1|{line}\n".encode())
        (answer,) = self.heard()
        return answer.removeprefix("V1|1|")

    def link(self, shard: int) -> MemoryLink:
        """Return the link of the client's process to a shard."""
        peer = self.shards.routers[self.shards.own]._links[shard]
        return next(one for one in self.shards.links if one._peer is peer)


@settings(max_examples=60, deadline=None)
@given(
    chosen=st.lists(st.sampled_from(LINES), min_size=1, max_size=30), size=st.integers(20, 400), own=st.integers(0, 2)
)
def test_responses_match_a_single_process(chosen: list[str], size: int, own: int) -> None:
    data = b"".join(f"V1|{number}|{line}\n".encode() for number, line in enumerate(chosen))
    heard = []
    for count in (1, 3):
        conversation = Conversation(count, own if count > 1 else 0)
        for at in range(0, len(data), size):
            conversation.say(data[at : at + size])
        while conversation.session.owes():
            conversation.pass_by(1)
        heard.append([without_index(line) for line in conversation.heard()])
    assert heard[0] == heard[1]
    assert len(heard[0]) == len(chosen)


def without_index(line: str) -> str:
    """Return a response without the metadata index, which each shard counts separately."""
    return line.partition(" term=")[0]


def test_topics_of_several_processes_are_listed_together() -> None:
    for own in range(3):
        conversation = Conversation(3, own)
        for topic in TOPICS:
            assert conversation.ask(f"PRODUCE|{topic} k:v").startswith("OK|")
        assert sorted(len(broker.topics()) for broker in conversation.shards.brokers) == [1, 1, 2]
        assert conversation.ask("ADMIN_GET_METADATA|") == "OK|topics=[a bb ccc dddd] brokers=[0] fenced=[]"


def test_the_brokers_of_the_first_process_are_listed() -> None:
    conversation = Conversation(3, own=1)
    conversation.shards.flux[0].state.register(7, "host", 1, 0, done=None)
    conversation.pass_by()
    assert conversation.ask("ADMIN_GET_METADATA|") == "OK|topics=[] brokers=[0 7] fenced=[]"
    conversation.say(b"V1|] brokers=|ADMIN_GET_METADATA|\nV1|] brokers=|ADMIN_GET_METADATA|x\n")
    assert conversation.heard() == [
        "V1|] brokers=|OK|topics=[] brokers=[0 7] fenced=[]",
        "V1|] brokers=|ERR|BAD_REQUEST|ADMIN_GET_METADATA requires no args",
    ]


def test_topics_that_processes_have_yet_to_report_are_listed() -> None:
    conversation = Conversation(3)
    for topic in TOPICS:
        conversation.ask(f"PRODUCE|{topic} k:v")
    shards = conversation.shards
    factory = FluxFactory(shards.brokers[0], router=RoutedBroker(shards.brokers[0], shards))
    started = ShardedConversation(shards, factory)
    started.feed(b"V1|1|PING|\nV1|2|ADMIN_GET_METADATA|\nV1|3|PRODUCE|dddd k:v\n")
    assert started.session.paused()
    started.pass_by()
    heard = started.take().decode().splitlines()
    assert heard[1:] == [
        "V1|2|OK|topics=[a bb ccc dddd] brokers=[0] fenced=[]",
        "V1|3|OK|partition=0 offset=1 hw=1",
    ]


def test_topics_are_not_listed_if_a_process_does_not_report_them() -> None:
    shards = Processes(3)
    factory = FluxFactory(shards.brokers[0], router=RoutedBroker(shards.brokers[0], shards))
    shards.links[-1].is_paused = True
    started = ShardedConversation(shards, factory)
    started.feed(b"V1|2|ADMIN_GET_METADATA|\n")
    started.pass_by()
    assert started.take() == b""
    started.pass_by(ANSWER_S)
    assert started.take().startswith(b"V1|2|ERR|NOT_LEADER|another process has not reported its topics")


REGISTRY_LINES = (
    *(f"ADMIN_CREATE_TOPIC|{topic} 2 1" for topic in TOPICS),
    "ADMIN_REGISTER_BROKER|1 host 1 5",
    "ADMIN_REGISTER_BROKER|0 other 2",
    "ADMIN_REGISTER_BROKER|-1 host 1",
    "ADMIN_BROKER_HEARTBEAT|1",
    "ADMIN_BROKER_HEARTBEAT|9",
    "ADMIN_FENCE_BROKER|1",
    "ADMIN_UNFENCE_BROKER|1",
    "ADMIN_FENCE_BROKER|0",
    "ADMIN_RECONCILE_BROKER_HEALTH|100000",
    *(f"ADMIN_ELECT_TOPIC_LEADERS|{topic}" for topic in TOPICS),
    *(f"ADMIN_SET_PARTITION_LEADER|{topic} 0 1 0,1" for topic in TOPICS),
    "ADMIN_GET_METADATA|",
)


@settings(max_examples=40, deadline=None)
@given(chosen=st.lists(st.tuples(st.sampled_from(REGISTRY_LINES), st.integers(0, 2)), min_size=1, max_size=30))
def test_the_registry_is_that_of_a_single_process(chosen: list[tuple[str, int]]) -> None:
    """Clients of all processes share one registry. The topics' processes elect leaders by it."""
    heard = []
    for count in (1, 3):
        shards = Processes(count)
        clients = [Conversation(count, own % count, shards) for own in range(3)]
        heard.append([without_index(clients[own].ask(line)) for line, own in chosen])
    assert heard[0] == heard[1]


def test_pipelined_changes_of_the_registry_are_executed_in_order() -> None:
    conversation = Conversation(3, own=1)
    conversation.say(b"V1|1|ADMIN_REGISTER_BROKER|7 host 1\nV1|2|ADMIN_GET_METADATA|\nV1|3|ADMIN_FENCE_BROKER|7\n")
    assert "brokers=[0 7]" in conversation.heard()[1]
    conversation.say(b"V1|4|ADMIN_GET_METADATA|\n")
    assert conversation.heard() == ["V1|4|OK|topics=[] brokers=[0 7] fenced=[7]"]


def test_the_registry_of_the_first_process_is_known_without_it() -> None:
    conversation = Conversation(3, own=1)
    conversation.ask("ADMIN_REGISTER_BROKER|7 host 1")
    conversation.link(0).break_off()
    assert conversation.ask("ADMIN_GET_METADATA|") == "OK|topics=[] brokers=[0 7] fenced=[]"


def test_commands_that_are_turned_off_are_unknown() -> None:
    conversation = Conversation(3, own=1)
    for factory in conversation.shards.flux:
        factory.commands = dict(DATA_COMMANDS)
    conversation.session = conversation.shards.flux[1].open(conversation.output, conversation._resume)
    for line in ("ADMIN_REGISTER_BROKER|1 host 1", "ADMIN_GET_METADATA|", "SET_PARTITION_ROLE|a 0 leader"):
        assert conversation.ask(line) == "ERR|UNKNOWN_COMMAND|unsupported command"


def test_lines_of_a_run_that_names_topics_of_several_processes() -> None:
    conversation = Conversation(3)
    names = [TOPICS[number % 4] for number in range(40)] + ["a", "ccc", "ccc"]
    conversation.say(b"".join(b"V1|%d|PRODUCE|%b k:%d\n" % (at, name.encode(), at) for at, name in enumerate(names)))
    heard = conversation.heard()
    assert [line.split("|")[1] for line in heard] == [str(number) for number in range(len(names))]
    for topic in TOPICS:
        own = [at for at, name in enumerate(names) if name == topic]
        replies = [conversation.ask(f"CONSUME|{topic} {number} 0").split()[0] for number in range(3)]
        values = [reply.partition("messages=")[2] for reply in replies]
        assert "".join(values) == ",".join(f"{offset}:{at}" for offset, at in enumerate(own))
        assert [heard[at].partition("offset=")[2].split()[0] for at in own] == [str(at) for at in range(len(own))]


@pytest.mark.parametrize(
    "line", ["PRODUCE|a k:v", "PRODUCE|a k:v\nV1|1|PRODUCE|ccc k:v", "CONSUME|a 0 0", "ADMIN_REGISTER_BROKER|1 h 1"]
)
def test_a_lost_process_closes_connections_with_pending_requests(line: str) -> None:
    conversation = Conversation(3, own=1 if "REGISTER" in line else 0)
    conversation.ask("PRODUCE|a k:v")
    conversation.session.receive(memoryview(bytearray(f"V1|1|{line}\n".encode() * 3)))
    conversation.link(0 if "REGISTER" in line else 1).break_off()
    conversation.shards.loop.run_due()
    assert len(conversation.output.failures) == 1
    assert conversation.heard() == []


def test_a_lost_process_without_pending_requests_closes_no_connection() -> None:
    conversation = Conversation(3)
    conversation.ask("PRODUCE|a k:v")
    conversation.link(1).break_off()
    assert conversation.ask("PRODUCE|a k:v").startswith("OK|")


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


def test_produced_lines_of_a_client_that_closes_are_stored() -> None:
    conversation = Conversation(3)
    conversation.ask("PRODUCE|a k:v")
    conversation.session.receive(memoryview(bytearray(b"V1|1|PRODUCE|a k:w\nV1|1|PRODUCE|a k:x acks=0\n")))
    conversation.session.close()
    conversation.shards.loop.run_due()
    assert Conversation(3, shards=conversation.shards).ask("CONSUME|a 0 0") == "OK|messages=0:v,1:w,2:x hw=2"


def test_a_lost_process_does_not_concern_a_client_that_has_left() -> None:
    conversation = Conversation(3)
    conversation.ask("PRODUCE|a k:v")
    conversation.session.receive(memoryview(bytearray(b"V1|1|PRODUCE|a k:w\n")))
    conversation.session.close()
    conversation.link(1).break_off()
    assert conversation.output.failures == []


def test_a_kafka_client_is_rejected() -> None:
    with pytest.raises(PeerError, match="a Kafka client connected to the FLUX port"):
        Conversation(3).say(b"\x00\x00\x00\x25\x00\x12\x00\x03")


def test_a_browser_is_rejected() -> None:
    with pytest.raises(PeerError):
        Conversation(3).say(b"GET / HTTP/1.1\n")


VALUE = b"x" * 60_000


def long_topic(count: int) -> tuple[Conversation, bytes]:
    """Return a client, and the response to a CONSUME of a topic with 6 MB."""
    conversation = Conversation(count)
    for _ in range(100):
        assert conversation.ask("PRODUCE|a k:" + VALUE.decode()).startswith("OK|")
    number = next(
        number for number in range(3) if conversation.ask(f"CONSUME|a {number} 0 max=1") != "OK|messages= hw=-1"
    )
    values = b",".join(b"%d:%b" % (offset, VALUE) for offset in range(100))
    conversation.feed(b"V1|1|CONSUME|a %d 0\nV1|2|PING|\n" % number)
    return conversation, b"V1|1|OK|messages=%b hw=99\nV1|2|OK\n" % values


def test_a_long_response_arrives_as_the_client_reads_it() -> None:
    conversation, expected = long_topic(2)
    most, received = 0, b""
    for _ in range(1000):
        for _ in range(20):
            conversation.shards.loop.run_due()
        most = max(most, len(conversation.output.written))
        before, data = received, conversation.take()
        received += data
        if received == before and not conversation.session.owes():
            break
        conversation.session.drained()
        conversation.feed(b"")
    assert received == expected
    assert 1 << 20 < most < 2 << 20, "neither all at once nor piece by piece"


def test_an_unread_long_response_is_held_by_no_process() -> None:
    conversation, _ = long_topic(2)
    sent: list[int] = []
    link_output: Any = conversation.link(1)._output
    write_many = link_output.write_many

    def count(parts: Sequence[bytes]) -> None:
        sent.append(len(parts[-1]))
        write_many(parts)

    link_output.write_many = count
    for _ in range(200):
        conversation.shards.loop.run_due()
    assert sum(sent) == len(conversation.output.written) < 2 << 20
    conversation.session.close()
    for _ in range(10):
        conversation.shards.loop.run_due()
    assert not conversation.shards.flux[1]._waiting.sessions, "the other process has ended the response, too"


def test_a_process_that_ends_within_a_long_response() -> None:
    conversation, _ = long_topic(2)
    for _ in range(20):
        conversation.shards.loop.run_due()
    conversation.link(1).break_off()
    conversation.session.drained()
    assert len(conversation.output.failures) == 1


def test_lines_stay_in_order_when_the_log_of_another_process_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(2)
    conversation.ask("PRODUCE|a k:0")
    full, produce = [True], Broker.produce

    def fill(broker: Broker, partition: Partition, batch: Any, **named: Any) -> None:
        if full[0]:
            full[0] = len(conversation.shards.flux[1]._waiting.sessions) < 3
            raise Busy(ErrorCode.BUSY, "full")
        produce(broker, partition, batch, **named)

    monkeypatch.setattr(Broker, "produce", fill)
    for number in range(1, 6):
        conversation.say(b"V1|%d|PRODUCE|a k:%d\n" % (number, number))
    for _ in range(20):
        conversation.pass_by(BUSY_PAUSE_S)
    assert [line[:6] for line in conversation.heard()] == [f"V1|{number}|O" for number in range(1, 6)]
    messages = [conversation.ask(f"CONSUME|a {number} 0") for number in range(3)]
    assert "OK|messages=0:0,1:1,2:2,3:3,4:4,5:5 hw=5" in messages


def test_batches_that_find_no_space_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(2)
    conversation.ask("PRODUCE|a k:0")

    def fill(*_: Any, **__: Any) -> None:
        raise Busy(ErrorCode.BUSY, "full")

    monkeypatch.setattr(Broker, "produce", fill)
    conversation.say(b"V1|1|PRODUCE|a k:1\nV1|2|PRODUCE|a k:2\n")
    conversation.pass_by(BUSY_WAIT_S)
    heard = conversation.heard()
    assert [line.partition("the log")[0] for line in heard] == ["V1|1|ERR|BAD_REQUEST|", "V1|2|ERR|BAD_REQUEST|"]


def test_lines_wait_while_a_shard_has_many_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(2)
    conversation.ask("PRODUCE|a k:0")
    for module in (routed_broker, link):
        monkeypatch.setattr(module, "CLOGGED_BYTES", 0)
    conversation.feed(b"V1|1|PRODUCE|a k:1\n")
    assert conversation.session.paused()
    resumes = conversation.resumes
    conversation.shards.loop.run_due()
    assert conversation.resumes == resumes + 1
    assert not conversation.session.paused()


def test_too_many_bytes_for_another_process_close_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(2)
    conversation.ask("PRODUCE|a k:0")
    monkeypatch.setattr(link, "UNANSWERED_BYTES_MAX", 30)
    conversation.feed(b"V1|1|PRODUCE|a k:1\n")
    conversation.feed(b"V1|2|PRODUCE|a k:1\n")
    conversation.pass_by()
    assert len(conversation.output.failures) == 1


def test_a_topic_that_was_created_again_elsewhere() -> None:
    conversation = Conversation(3)
    conversation.ask("PRODUCE|a k:0")
    brokers = conversation.shards.brokers
    brokers[1].delete_topic(brokers[1].topic("a"))
    brokers[2].create_topic(TopicName.parse("a"), 1)
    assert conversation.ask("PRODUCE|a k:1") == "OK|partition=0 offset=0 hw=0"
    assert conversation.ask("CONSUME|a 0 0") == "OK|messages=0:1 hw=0"


def test_a_forwarded_line_counts_for_the_client_and_its_user() -> None:
    conversation = Conversation(2)
    conversation.output.peer = "192.0.2.1:9"
    conversation.ask("PRODUCE|a k:0")
    topic = conversation.shards.brokers[1].topic("a")
    assert topic.owner == caller_of(ROOT, "192.0.2.1:9").owner
