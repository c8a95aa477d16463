"""A broker of several processes: calls for topics of others have the results of a single process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import pytest

from polywire.broker.access import ConfiguredUser
from polywire.broker.api import Pending
from polywire.broker.broker import Broker
from polywire.broker.owners import NO_CALLER, Caller
from polywire.broker.permissions import EVERYTHING
from polywire.broker.settings import TopicSettings
from polywire.broker.sliced import SlicedWork
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError, Busy, Conflict, Denied, ErrorCode, Invalid, Missing, PeerError, Unavailable
from polywire.log.base import Read
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import PREFIX_BYTES, decode_prefix, encode_head
from polywire.protocols.polywire.messages import Verb
from polywire.protocols.runtime.append_queue import BUSY_PAUSE_S
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.routing import broker as routed_broker
from polywire.routing import link, session
from polywire.routing.broker import ANSWER_S, FOUND_S, RoutedBroker
from polywire.routing.link import RETRY_S
from polywire.routing.messages import MAGIC
from polywire.routing.session import RouterFactory
from polywire.types import Level, TopicName
from tests.unit.log.rig import records_of
from tests.unit.protocols.polywire.peer import Answer, CapturedOutput
from tests.unit.protocols.shards_in_memory import KEY, MemoryShards

HERE, THERE = "bb", "a"  # names of shards 0 and 1
_Result = TypeVar("_Result")


class Together:
    """Two processes, of which the first routes."""

    def __init__(self) -> None:
        self.shards = MemoryShards(lambda broker: RouterFactory(broker, KEY), 2)
        self.broker = RoutedBroker(self.shards.brokers[0], self.shards)
        self.run()

    @property
    def there(self) -> Broker:
        """The broker of the other process."""
        return self.shards.brokers[1]

    def run(self, seconds: float = 0) -> None:
        self.shards.loop.clock.advance(seconds)
        for _ in range(20):
            self.shards.loop.run_due()

    def call(self, verb: Callable[[], _Result]) -> _Result:
        """Call a verb, again if another process must answer first."""
        try:
            return verb()
        except Pending as pending:
            came: list[bool] = []
            pending.then(lambda: came.append(True))
            self.run()
            assert came == [True]
            with pending:
                return verb()

    def find(self, name: str) -> Topic | None:
        return self.call(lambda: self.broker.find_topic(name))

    def partition(self, name: str = THERE, number: int = 0) -> Partition:
        return self.call(lambda: self.broker.ensure_topic(name)).partitions[number]

    def produce(self, partition: Partition, *values: bytes) -> list[Any]:
        """Append a batch for each value; return the list of results, which fills later."""
        results: list[Any] = []
        for value in values:
            batch = from_records([Record(value=value)])
            self.broker.produce(partition, batch, level=Level.WRITTEN, done=results.append)
        return results

    def fetch(self, partition: Partition, offset: int = 0) -> Read | BrokerError:
        found: list[Read | BrokerError] = []
        self.broker.fetch(partition, offset, bytes_max=1 << 20, then=found.append)
        self.run()
        return found[0]

    def values(self, partition: Partition, offset: int = 0) -> list[bytes | None]:
        read = self.fetch(partition, offset)
        assert isinstance(read, Read)
        return [record.value for record in records_of(read)[max(offset - read.next_offset, 0) :]]


@pytest.fixture
def together() -> Together:
    return Together()


def test_records_of_another_process(together: Together) -> None:
    partition = together.partition()
    results = together.produce(partition, b"1", b"2", b"3")
    assert results == [], "a completion is never called inside the call"
    together.run()
    assert results == [0, 1, 2]
    assert together.values(partition, 1) == [b"2", b"3"]
    assert [topic.name.full for topic in together.there.topics()] == [THERE]


def test_records_of_this_process_take_no_link(together: Together) -> None:
    partition = together.partition(HERE)
    together.produce(partition, b"1")
    together.shards.links[0].break_off()
    read = together.broker.fetch(partition, 0, bytes_max=1000, then=lambda _: None)
    assert isinstance(read, Read)
    assert together.broker.when_current(partition, lambda _: None) is None


def test_a_topic_that_does_not_exist(together: Together) -> None:
    assert together.broker.find_topic("nowhere") is None
    assert together.broker.resource("nowhere") == TopicName.parse("nowhere")
    assert together.broker.partition_count("nowhere") == together.broker.settings.partition_count


def test_a_topic_is_known_when_its_creation_is_answered(together: Together) -> None:
    together.there.create_topic(TopicName.parse(THERE), 2)
    with pytest.raises(Pending):
        together.broker.find_topic(THERE)
    found = together.find(THERE)
    assert found is not None
    assert len(found.partitions) == 2


def test_changes_of_topics_are_reported(together: Together) -> None:
    topic = together.there.create_topic(TopicName.parse(THERE), 2)
    together.run()
    found = together.broker.find_topic(THERE)
    assert found is not None
    together.there.grow_topic(topic, 4)
    together.there.configure_topic(topic, TopicSettings(retention_bytes=12345678))
    together.run()
    assert len(found.partitions) == 4
    assert found.settings.retention_bytes == 12345678
    last = found.partitions[3]
    together.there.shrink_topic(topic, 1)
    together.run()
    assert last.ended
    assert len(found.partitions) == 1
    together.there.delete_topic(topic)
    together.run()
    assert found.partitions[0].ended
    assert together.broker.find_topic(THERE) is None


def test_a_topic_that_was_created_again_is_another_one(together: Together) -> None:
    partition = together.partition()
    together.produce(partition, b"1")
    together.run()
    together.there.delete_topic(together.there.topic(THERE))
    together.there.create_topic(TopicName.parse(THERE), 1)
    results = together.produce(partition, b"2")
    together.run()
    assert isinstance(results[0], Missing)
    with pytest.raises(Missing):
        together.produce(partition, b"3")
    assert together.values(together.partition()) == []


def test_internal_topics_are_not_reported(together: Together) -> None:
    together.there.create_topic(TopicName.parse("__own"), 1, internal=True)
    together.run()
    assert together.broker.find_topic("__own") is None


def test_a_creation_that_is_rejected(together: Together) -> None:
    with pytest.raises(Invalid):
        together.call(lambda: together.broker.ensure_topic("x" * 301))


def test_a_creation_that_another_process_rejects(together: Together, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise Conflict(ErrorCode.TOPIC_EXISTS, "refused there")

    monkeypatch.setattr(Broker, "ensure_topic", refuse)
    with pytest.raises(Conflict, match="refused there"):
        together.call(lambda: together.broker.ensure_topic(THERE))


def test_offsets_are_current_after_a_request(together: Together) -> None:
    partition = together.partition()
    batch = from_records([Record(value=b"1")])
    together.there.produce(together.there.topic(THERE).partitions[0], batch, level=Level.WRITTEN, done=None)
    together.run()
    assert partition.log.next_offset == 0
    came: list[BrokerError | None] = []
    assert together.broker.when_current(partition, came.append) is not None
    together.run()
    assert came == [None]
    assert (partition.log.first_offset, partition.log.next_offset, partition.log.readable_offset) == (0, 1, 1)
    assert partition.log.next_address == together.there.topic(THERE).partitions[0].log.next_address


def test_offsets_by_time_and_address(together: Together) -> None:
    partition = together.partition()
    together.produce(partition, b"1", b"22")
    together.run()
    log = partition.log
    found: list[int | BrokerError] = []
    log.address_of_offset(1, found.append)
    together.run()
    address = found.pop()
    assert isinstance(address, int)
    log.offset_of_address(address, found.append)
    log.offset_of_address(address + 1, found.append)
    log.offset_of_address(address + 1, found.append, covering=True)
    log.offset_at(0, found.append)
    log.address_of_offset(99, found.append)
    together.run()
    assert found[:4] == [1, -1, 1, 0]
    assert isinstance(found[4], Missing)


def test_an_offset_that_does_not_exist(together: Together) -> None:
    assert isinstance(together.fetch(together.partition(), 7), Missing)


def test_a_cancelled_call_has_no_result(together: Together) -> None:
    found: list[object] = []
    read = together.broker.fetch(together.partition(), 0, bytes_max=1000, then=found.append)
    assert not isinstance(read, Read)
    read.cancel()
    together.run()
    assert found == []


def test_batches_of_a_partition_stay_in_order_when_the_log_is_full(
    together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = together.partition(number=0), together.partition(number=1)
    full, produce = [True], Broker.produce

    def fill(broker: Broker, partition: Partition, batch: Any, **named: Any) -> None:
        if full[0] and partition.number == 0:
            raise Busy(ErrorCode.BUSY, "full")
        produce(broker, partition, batch, **named)

    monkeypatch.setattr(Broker, "produce", fill)
    waiting = together.produce(first, b"1", b"2")
    together.run()
    others = together.produce(second, b"x")
    together.run()
    assert (waiting, others) == ([], [0]), "only batches of the partition wait"
    full[0] = False
    waiting += together.produce(first, b"3")
    together.run()
    for _ in range(3):
        together.run(BUSY_PAUSE_S)
    assert waiting == [0, 1]
    assert together.values(first) == [b"1", b"2", b"3"]


def test_batches_on_the_way_are_limited(together: Together, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = together.partition()
    monkeypatch.setattr(link, "UNANSWERED_BYTES_MAX", 1000)
    together.produce(partition, bytes(300))
    with pytest.raises(Busy):
        together.produce(partition, bytes(900))
    together.run()
    assert together.produce(partition, b"1") == []


def test_a_lost_process_answers_nothing(together: Together) -> None:
    partition = together.partition()
    results = together.produce(partition, b"1")
    together.shards.links[0].break_off()
    together.run()
    assert isinstance(results[0], Unavailable)
    assert isinstance(together.fetch(partition), Read), "the next call opens the link again"


def test_a_link_is_opened_again(together: Together) -> None:
    partition = together.partition()
    together.shards.links[0].break_off()
    together.there.delete_topic(together.there.topic(THERE))
    together.there.create_topic(TopicName.parse("x"), 1)
    together.run(RETRY_S)
    assert len(together.shards.links) == 2
    assert partition.ended
    assert together.broker.find_topic("x") is not None


def test_topics_are_reported_in_slices(together: Together, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "TOPICS_AT_ONCE", 2)
    for number in range(5):
        together.there.create_topic(TopicName.parse(f"t{number}"), 1)
    together.run()
    topics = [together.broker.find_topic(f"t{number}") for number in range(5)]
    together.shards.links[0].break_off()
    together.there.delete_topic(together.there.topic("t0"))
    together.run(RETRY_S)
    assert [topic is not None and not topic.partitions[0].ended for topic in topics] == [False, *[True] * 4]
    assert [together.broker.find_topic(f"t{number}") for number in range(5)] == [None, *topics[1:]]


def test_a_topic_is_found_before_all_are_reported(together: Together, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlicedWork, "put", lambda *_: None)
    together.shards.links[0].break_off()
    together.there.create_topic(TopicName.parse(THERE), 1)
    together.run(RETRY_S)
    assert together.find(THERE) is not None


def test_a_process_that_does_not_answer_has_no_topics(together: Together) -> None:
    together.there.create_topic(TopicName.parse(THERE), 1)

    def find() -> Topic | None:
        return together.broker.find_topic(THERE)

    with pytest.raises(Pending) as pending:
        find()
    pending.value.then(lambda: None)
    together.shards.links[0].break_off()
    with pytest.raises(Unavailable):
        find()
    together.run(max(FOUND_S, RETRY_S))
    assert together.find(THERE) is not None


def test_a_wait_ends_when_the_record_is_readable(together: Together) -> None:
    partition = together.partition()
    woken: list[bool] = []
    together.broker.wait(partition, 0, lambda: woken.append(True))
    together.run()
    assert woken == []
    together.produce(partition, b"1")
    together.run()
    assert woken == [True]


def test_a_cancelled_wait_ends_in_the_other_process(together: Together, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    wait = Broker.wait

    def watched(broker: Broker, *given: Any) -> Any:
        handle = wait(broker, *given)

        class Watched:
            def cancel(self) -> None:
                ended.append(True)
                handle.cancel()

        return Watched()

    monkeypatch.setattr(Broker, "wait", watched)
    woken: list[bool] = []
    handle = together.broker.wait(together.partition(), 0, lambda: woken.append(True))
    together.run()
    handle.cancel()
    together.run()
    assert (woken, ended) == ([], [True])


def test_a_wait_ends_when_the_process_is_lost(together: Together) -> None:
    woken: list[bool] = []
    together.broker.wait(together.partition(), 0, lambda: woken.append(True))
    together.run()
    together.shards.links[0].break_off()
    assert woken == [True]


def test_the_end_of_an_epoch(together: Together) -> None:
    partition = together.partition()
    together.produce(partition, b"1")
    together.run()
    found: list[int | BrokerError] = []
    assert not isinstance(together.broker.epoch_end(partition, together.there.epoch, found.append), int)
    together.broker.epoch_end(partition, 999, found.append)
    together.run()
    assert found[0] == 1
    assert isinstance(found[1], Missing)


def joined(together: Together, shard: int, by: Caller) -> Answer | BrokerError:
    """Join a group in a shard on behalf of a caller."""
    frame = encode_head(Verb.JOIN, 5, messages.Join("g", (HERE, THERE)[shard], "m"))
    found: list[bytes | BrokerError] = []
    together.broker.forward(shard, by, frame, found.append)
    assert found == [], "a completion is never called inside the call"
    together.run()
    if isinstance(found[0], BrokerError):
        return found[0]
    prefix = decode_prefix(found[0])
    body = PREFIX_BYTES + prefix.head_bytes
    return Answer(prefix.verb, prefix.flags, prefix.correlation, found[0][PREFIX_BYTES:body], found[0][body:])


@pytest.mark.parametrize("shard", [0, 1])
def test_a_request_is_executed_in_its_shard(together: Together, shard: int) -> None:
    together.partition(HERE), together.partition(THERE)
    answer = joined(together, shard, NO_CALLER)
    assert isinstance(answer, Answer)
    assert answer.correlation == 5
    assert answer.decode(messages.Membership).generation == 2
    assert [broker.groups.view("g", (HERE, THERE)[shard]) is not None for broker in together.shards.brokers] == [
        number == shard for number in range(2)
    ]


def test_a_user_owns_what_it_makes_in_another_process(together: Together) -> None:
    together.partition(THERE)
    users = [ConfiguredUser(name, "$argon2id$x", EVERYTHING) for name in ("alice", "bob")]
    for broker in together.shards.brokers:
        broker.access.configure(users)
    bob = together.broker.access.vouched("bob")
    assert isinstance(joined(together, 1, Caller(bob, bob.user_id)), Answer)
    assert together.there.groups.owner(THERE, "g") == bob.user_id


def test_a_user_whom_the_other_process_does_not_know(together: Together) -> None:
    together.partition(THERE)
    together.shards.brokers[0].access.configure([ConfiguredUser("alice", "$argon2id$x", EVERYTHING)])
    alice = together.broker.access.vouched("alice")
    assert isinstance(joined(together, 1, Caller(alice, alice.user_id)), Denied)


def test_requests_wait_for_nothing_when_no_batch_is_on_the_way(
    together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (routed_broker, link):
        monkeypatch.setattr(module, "CLOGGED_BYTES", 0)
    partition = together.partition()
    relieved: list[bool] = []
    assert not together.broker.is_clogged
    together.produce(partition, b"1")
    assert together.broker.is_clogged
    together.broker.on_relief(lambda: relieved.append(True))
    together.run()
    assert (together.broker.is_clogged, relieved) == (False, [True])


def test_only_processes_of_the_broker_open_links(together: Together) -> None:
    output = CapturedOutput()
    session = RouterFactory(together.there, KEY).open(output, lambda: None)
    with pytest.raises(PeerError, match="only processes"):
        session.receive(memoryview(MAGIC + bytes(16)))


def test_the_link_is_recognised(together: Together) -> None:
    factory = RouterFactory(together.there, KEY)
    assert [factory.recognise(MAGIC[:size]) for size in (1, 7, 8)] == [None, None, True]
    assert factory.recognise(b"\xf3LINX") is False


class SharedNames:
    """The names of all processes, of which this shard claims some. Implements ``Claims``."""

    def __init__(self, own: int, owners: dict[str, int]) -> None:
        self.own = own
        self.owners = owners

    def claim(self, full_name: str) -> None:
        if self.owners.setdefault(full_name, self.own) != self.own:
            raise Busy(ErrorCode.BUSY, "another process is creating the topic")

    def release(self, full_name: str) -> None:
        del self.owners[full_name]


@pytest.fixture
def racing(together: Together, monkeypatch: pytest.MonkeyPatch) -> Together:
    """Two processes, the other one of which creates each topic right after this one has found no owner of its name."""
    owners: dict[str, int] = {}
    for number, broker in enumerate(together.shards.brokers):
        broker.claims = SharedNames(number, owners)

    def shard_of(name: str) -> int | None:
        owner = owners.get(name)
        if owner is None:
            together.there.create_topic(TopicName.parse(name), 2)
        return owner

    monkeypatch.setattr(together.shards, "shard_of", shard_of)
    return together


@pytest.mark.parametrize("name", [HERE, THERE])
def test_a_topic_that_another_process_creates_meanwhile_is_used(racing: Together, name: str) -> None:
    found: list[Topic] = []

    def ensure() -> None:
        found.append(racing.broker.ensure_topic(name))

    for _ in range(2):  # it is looked up again after the name was claimed
        try:
            racing.call(ensure)
        except Pending:
            racing.run()
    assert [len(topic.partitions) for topic in found[:1]] == [2]
    assert racing.there.find_topic(name) is not None


@pytest.mark.parametrize("shard", [0, 1])
def test_a_creation_that_another_process_begins_meanwhile_is_repeated_there(
    racing: Together, monkeypatch: pytest.MonkeyPatch, shard: int
) -> None:
    monkeypatch.setattr(RoutedBroker, "next_shard", lambda _: shard)
    results: list[Any] = []
    with suppress(Conflict):
        racing.broker.make_topic(TopicName.parse(HERE), 2, then=results.append, done=results.append)
    racing.run()
    assert [type(result) for result in results] == [Conflict], "as if the topic had existed before"
    assert results[0].code is ErrorCode.TOPIC_EXISTS


def test_a_list_has_the_topics_that_exist_when_it_is_requested(together: Together) -> None:
    together.there.create_topic(TopicName.parse(THERE), 2)

    def listed() -> list[str]:
        together.broker.require_latest()
        return [topic.name.full for topic in together.broker.topics()]

    assert together.broker.topics() == []
    assert together.call(listed) == [THERE]


def test_a_list_has_known_topics_if_a_process_does_not_respond(together: Together) -> None:
    together.partition()
    together.shards.links[0].pause()
    with pytest.raises(Pending) as pending:
        together.broker.require_latest()
    came: list[None] = []
    pending.value.then(lambda: came.append(None))
    together.run(ANSWER_S)
    assert came == [None]
    with pending.value:
        together.broker.require_latest()
    assert [topic.name.full for topic in together.broker.topics()] == [THERE]
