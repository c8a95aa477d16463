"""Transactions over several processes: one coordinator, participants in the topics' shards, atomic ends."""

from __future__ import annotations

from typing import Any

import pytest

from polywire.broker.owners import ITSELF
from polywire.broker.participants import AGAIN_S_MAX
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import decode_batches
from polywire.protocols.kafka.messages import Api, WireError
from polywire.protocols.kafka.transactions import SETTLED_S
from tests.unit.protocols.kafka.test_processes import COUNT, TOPICS, Client, Processes, join
from tests.unit.protocols.kafka.transaction_dialogue import TIMEOUT_MS, Producer

# an id coordinated by the shard that owns topic ccc, and topics of the other two shards
HOME, ELSEWHERE = "TTT", ("a", "bb")
GROUP = "dddd"  # of shard 1


class Everywhere:
    """A client that finds the coordinator, over a connection to each process."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.clients = [Client(processes, own) for own in range(COUNT)]

    def _place(self, api: Api, fields: dict[str, Any]) -> Client:
        home = self.processes.shards.shard_by_hash
        if api is Api.PRODUCE:
            return self.clients[home(fields["topics"][0].name)]
        if api is Api.TXN_OFFSET_COMMIT:
            return self.clients[home(fields["group_id"])]
        return self.clients[home(fields["transactional_id"])]

    def ask(self, api: Api, version: int | None = None, /, **fields: Any) -> Any:
        return self._place(api, fields).ask(api, version, **fields)


@pytest.fixture
def processes() -> Processes:
    made = Processes()
    made.make(*TOPICS)
    return made


def producer(processes: Processes, id_: str = HOME) -> Producer:
    made = Producer(Everywhere(processes), id_)  # type: ignore[arg-type]  # it asks, and nothing more
    assert made.init() == 0
    return made


def stored(processes: Processes, topic: str, partition: int = 0) -> list[bytes | None]:
    client = Client(processes, processes.shards.shard_by_hash(topic))
    asked = schema.request(Api.FETCH).Topics
    entries = [asked.Partitions(partition=partition, fetch_offset=0, partition_max_bytes=1 << 24)]
    reported = client.ask(Api.FETCH, 12, topics=[asked(topic=topic, partitions=entries)])
    return [record.value for record in decode_batches(reported.responses[0].partitions[0].records or b"")]


def everywhere(processes: Processes) -> list[list[bytes | None]]:
    return [stored(processes, topic) for topic in ("a", "bb", "ccc")]


def position(processes: Processes, group: str, topic: str) -> int | None:
    held = processes.broker(topic).classic.positions(group, topic)
    return held[0].offset if held else None


def decisions(processes: Processes) -> int:
    return sum(len(broker._state.transactions.decisions) for broker in processes.shards.brokers)


def write(made: Producer, dialect: int, *topics: str, first: int = 0, value: bytes = b"v") -> None:
    """Write a record to each topic with this transaction version."""
    for topic in topics:
        if dialect == 1:
            assert made.add(0, topic=topic) == [0]
        assert made.produce(first, value, topic=topic, version=9 if dialect == 1 else 12).error == 0


def end(made: Producer, dialect: int, *, commits: bool = True) -> int:
    return made.end(commits=commits) if dialect == 1 else made.finish(commits=commits)


each_dialect = pytest.mark.parametrize("dialect", [1, 2])
either_end = pytest.mark.parametrize("commits", [True, False], ids=["committed", "aborted"])


@each_dialect
@either_end
def test_a_transaction_ends_in_all_shards_or_none(processes: Processes, dialect: int, commits: bool) -> None:
    made = producer(processes)
    write(made, dialect, "a", "bb", "ccc")
    assert everywhere(processes) == [[], [], []]
    assert end(made, dialect, commits=commits) == 0
    assert everywhere(processes) == [[b"v"] * commits] * 3
    assert decisions(processes) == 0, "all participants have followed before the client is notified"


@each_dialect
def test_consecutive_transactions(processes: Processes, dialect: int) -> None:
    """Sequences continue across transactions of an epoch, even if participants were aborted or absent."""
    made, sequences = producer(processes), dict.fromkeys(("a", "bb", "ccc"), 0)
    rounds = [("a", "bb"), ("bb", "ccc"), ("a",), ("a", "ccc"), ("ccc",), ("bb",)]
    expected: dict[str, list[bytes]] = {topic: [] for topic in sequences}
    for number, topics in enumerate(rounds):
        for topic in topics:
            write(made, dialect, topic, first=sequences[topic], value=b"%d" % number)
            sequences[topic] += 1
            if number % 3 != 1:
                expected[topic].append(b"%d" % number)
        assert end(made, dialect, commits=number % 3 != 1) == 0
        if dialect == 2:
            sequences = dict.fromkeys(sequences, 0)
    assert everywhere(processes) == [expected["a"], expected["bb"], expected["ccc"]]


@each_dialect
def test_repeated_requests_store_records_once(processes: Processes, dialect: int) -> None:
    made = producer(processes)
    for _ in range(2):
        write(made, dialect, "a", "ccc")
    assert end(made, dialect) == 0
    assert everywhere(processes) == [[b"v"], [], [b"v"]]


def test_other_processes_answer_with_not_coordinator(processes: Processes) -> None:
    client, refused = Client(processes, 1), WireError.NOT_COORDINATOR
    who = {"transactional_id": HOME, "producer_id": 1, "producer_epoch": 0}
    assert client.ask(Api.INIT_PRODUCER_ID, transactional_id=HOME, transaction_timeout_ms=1000).error == refused
    assert client.ask(Api.END_TXN, 3, **who, committed=True).error == refused
    assert client.ask(Api.ADD_OFFSETS_TO_TXN, **who, group_id="g").error == refused
    topics = [schema.request(Api.ADD_PARTITIONS_TO_TXN).Topics(name="a", partitions=[0, 1])]
    reported = client.ask(Api.ADD_PARTITIONS_TO_TXN, **who, topics=topics)
    assert [one.error for one in reported.topics[0].partitions] == [refused] * 2
    made = schema.request(Api.TXN_OFFSET_COMMIT).Topics
    reported = client.ask(
        Api.TXN_OFFSET_COMMIT, **who, group_id="ccc", topics=[made(name="a", partitions=[made.Partitions(offset=1)])]
    )
    assert reported.topics[0].partitions[0].error == refused
    (reported,) = client.ask(Api.FIND_COORDINATOR, 6, coordinator_keys=[HOME], key_type=1).coordinators
    assert (reported.error, reported.node_id, reported.port) == (0, 1, 9100)
    reported = client.ask(Api.DESCRIBE_TRANSACTIONS, transactional_ids=[HOME]).transaction_states[0]
    assert reported.error == refused


def test_partitions_are_added_all_or_none(processes: Processes) -> None:
    made = producer(processes)
    topics = schema.request(Api.ADD_PARTITIONS_TO_TXN).Topics
    asked = [topics(name="a", partitions=[0]), topics(name="bb", partitions=[7]), topics(name="no", partitions=[0])]
    reported = made.ask(Api.ADD_PARTITIONS_TO_TXN, topics=asked)
    assert {one.name: one.partitions[0].error for one in reported.topics} == {
        "a": WireError.OPERATION_NOT_ATTEMPTED,
        "bb": WireError.UNKNOWN_TOPIC_OR_PARTITION,
        "no": WireError.UNKNOWN_TOPIC_OR_PARTITION,
    }


def test_records_need_partitions_known_to_the_coordinator(processes: Processes) -> None:
    made = producer(processes)
    assert made.produce(0, b"v", topic="a").error == WireError.INVALID_TXN_STATE, (
        "the first version adds partitions explicitly"
    )
    assert made.produce(0, b"v", topic="a", version=11).error == WireError.TRANSACTION_ABORTABLE
    assert made.add(0, topic="a") == [0]
    assert made.produce(0, b"v", topic="a", partition=1).error == WireError.INVALID_TXN_STATE
    made.epoch += 1
    assert made.produce(0, b"v", topic="bb", version=12).error == WireError.INVALID_PRODUCER_EPOCH
    made.epoch, made.number = made.epoch - 1, made.number + 1
    assert made.produce(0, b"v", topic="bb", version=12).error == WireError.INVALID_PRODUCER_ID_MAPPING
    assert processes.broker("bb").participants.find(HOME) is None


# Fencing


@each_dialect
def test_the_next_holder_of_the_id_aborts_open_participants_everywhere(processes: Processes, dialect: int) -> None:
    old = producer(processes)
    write(old, dialect, "a", "ccc")
    new = producer(processes)
    assert (new.number, new.epoch) == (old.number, old.epoch + 1)
    assert old.produce(1, b"late", topic="a", version=12).error == WireError.INVALID_PRODUCER_EPOCH
    assert old.produce(1, b"late", topic="a").error == WireError.INVALID_PRODUCER_EPOCH
    assert old.produce(0, b"late", topic="bb", version=12).error == WireError.INVALID_PRODUCER_EPOCH
    assert old.add(0, topic="a") == [WireError.PRODUCER_FENCED]
    assert old.end() == WireError.PRODUCER_FENCED
    write(new, dialect, "a", "bb", value=b"new")
    assert end(new, dialect) == 0
    assert everywhere(processes) == [[b"new"], [b"new"], []]


def test_holders_over_different_protocols_fence_each_other(processes: Processes) -> None:
    old = producer(processes)
    write(old, 1, "a", "ccc")
    coordinator = processes.shards.brokers[0]
    coordinator.transactions.begin_epoch(HOME, epoch_min=5, done=None)
    back(processes, {})
    assert old.end() == WireError.PRODUCER_FENCED
    assert old.produce(1, b"late", topic="a", version=12).error == WireError.INVALID_PRODUCER_EPOCH
    known = coordinator.transactions.find(HOME)
    assert known is not None
    coordinator.transactions.begin(known, done=None)
    new = producer(processes)
    held = coordinator.transactions.find(HOME)
    assert held is not None
    assert not held.is_open
    write(new, 2, "a", "ccc", value=b"new")
    assert end(new, 2) == 0
    assert everywhere(processes) == [[b"new"], [], [b"new"]]


# Offsets


@each_dialect
@either_end
def test_offsets_are_committed_with_the_transaction_in_any_shard(
    processes: Processes, dialect: int, commits: bool
) -> None:
    made = producer(processes)
    version = 3 if dialect == 1 else 5
    client = Client(processes, 1)
    member, generation = join(client, GROUP)
    write(made, dialect, "bb")
    if dialect == 1:
        assert made.offsets(GROUP) == 0
    who = {"member_id": member, "generation_id": generation}
    for number, topic in enumerate(("a", "bb", "ccc")):
        assert made.move(7 + number, group=GROUP, topic=topic, version=version, **who) == 0
        assert position(processes, GROUP, topic) is None
    asked = schema.request(Api.OFFSET_FETCH).Topics
    fields = {"group_id": GROUP, "topics": [asked(name=one, indexes=[0]) for one in ("a", "bb", "ccc")]}
    reported = client.ask(Api.OFFSET_FETCH, 7, **fields, require_stable=True)
    assert [one.partitions[0].error for one in reported.topics] == [WireError.UNSTABLE_OFFSET_COMMIT] * 3
    assert end(made, dialect, commits=commits) == 0
    expected = [7, 8, 9] if commits else [None] * 3
    assert [position(processes, GROUP, topic) for topic in ("a", "bb", "ccc")] == expected
    reported = client.ask(Api.OFFSET_FETCH, 7, **fields, require_stable=True)
    assert [one.partitions[0].error for one in reported.topics] == [0] * 3


@each_dialect
def test_transactional_offsets_need_a_current_member(processes: Processes, dialect: int) -> None:
    made = producer(processes)
    version = 3 if dialect == 1 else 5
    member, generation = join(Client(processes, 1), GROUP)
    if dialect == 1:
        assert made.move(1, group=GROUP, topic="a", version=3, member_id=member, generation_id=generation) == (
            WireError.INVALID_TXN_STATE
        )
        assert made.offsets(GROUP) == 0
    moved = made.move(1, group=GROUP, topic="bb", version=version, member_id="other", generation_id=generation)
    assert moved == WireError.UNKNOWN_MEMBER_ID
    moved = made.move(1, group=GROUP, topic="bb", version=version, member_id=member, generation_id=generation - 1)
    assert moved == WireError.ILLEGAL_GENERATION
    made.epoch += 1
    moved = made.move(1, group=GROUP, topic="bb", version=version, member_id=member, generation_id=generation)
    assert moved == WireError.INVALID_PRODUCER_EPOCH
    assert processes.broker("bb").participants.find(HOME) is None


# Unresponsive shards


def away(processes: Processes, *shards: int) -> dict[int, Any]:
    """Make processes accept no requests; return what restores them."""
    factories, was = processes.shards.factories, {shard: processes.shards.factories[shard] for shard in shards}
    for shard in shards:
        factories[shard] = Deaf()  # type: ignore[call-overload]
        for link in processes.shards.links:
            if link._peer is not None and link.shard == shard:
                link.break_off()
    return was


class Deaf:
    """Opens sessions that never respond."""

    def open(self, output: Any, resume: Any) -> Any:
        return self

    def receive(self, data: memoryview) -> int:
        return len(data)

    def paused(self) -> bool:
        return False

    def close(self) -> None:
        pass


def back(processes: Processes, was: dict[int, Any]) -> None:
    for shard, factory in was.items():
        processes.shards.factories[shard] = factory
    for link in processes.shards.links:
        if link._peer is not None and isinstance(link._session, Deaf):
            link.break_off()
    for _ in range(3):
        processes.loop.advance(AGAIN_S_MAX)
        for broker in processes.shards.brokers:
            broker.commit()
        processes.loop.run_due()


@either_end
def test_an_unresponsive_shard_follows_when_it_is_back(processes: Processes, commits: bool) -> None:
    made = producer(processes)
    write(made, 1, "a", "bb", "ccc")
    was = away(processes, 2)
    client = made.peer.clients[0]  # type: ignore[attr-defined]
    version = client.tell(Api.END_TXN, 3, **made.who, committed=commits)
    assert client.hear(Api.END_TXN, version) is None
    processes.loop.advance(SETTLED_S)
    assert client.hear(Api.END_TXN, version).error == 0, "the decision is made"
    assert stored(processes, "a") == [b"v"] * commits
    assert made.add(0, topic="a") == [WireError.CONCURRENT_TRANSACTIONS]
    assert made.end(commits=commits) == WireError.CONCURRENT_TRANSACTIONS
    back(processes, was)
    assert decisions(processes) == 0
    assert everywhere(processes) == [[b"v"] * commits] * 3
    assert made.end(commits=commits) == 0, "it has ended accordingly"
    write(made, 1, "a", first=1, value=b"next")
    assert made.end() == 0
    assert stored(processes, "a") == [b"v"] * commits + [b"next"]


def test_after_a_storage_failure_the_next_coordinator_process_completes_the_end(
    processes: Processes,
) -> None:
    made = producer(processes)
    write(made, 1, "a", "bb")
    was = away(processes, 2)
    client = made.peer.clients[0]  # type: ignore[attr-defined]
    client.hear(Api.END_TXN, client.tell(Api.END_TXN, 3, **made.who, committed=True))
    processes.shards.brokers[0]._log.fail()  # type: ignore[attr-defined]  # it is in memory
    back(processes, was)
    assert stored(processes, "bb") == [b"v"], "no error of the loop came in between"
    assert decisions(processes) == 1


def test_a_transaction_that_times_out_is_aborted_everywhere(processes: Processes) -> None:
    made = producer(processes)
    write(made, 2, "a", "ccc")
    processes.loop.advance(TIMEOUT_MS / 1000 + 1)
    assert made.finish() == WireError.PRODUCER_FENCED
    participant = processes.broker("a").participants.find(HOME)
    assert participant is not None
    assert not participant.is_open
    assert everywhere(processes) == [[], [], []]


def test_a_participant_is_kept_while_its_coordinator_is_away(processes: Processes) -> None:
    made = producer(processes)
    write(made, 2, "a")
    was = away(processes, 0, 1)
    processes.loop.advance(3 * 3600)  # other staged batches expire after one hour
    participant = processes.broker("a").participants.find(HOME)
    assert participant is not None
    assert participant.is_open
    back(processes, was)
    ended = processes.broker("a").participants.find(HOME)
    assert ended is not None
    assert not ended.is_open
    assert decisions(processes) == 0


def test_a_participant_unknown_to_its_coordinator_is_aborted(processes: Processes) -> None:
    made = producer(processes)
    write(made, 2, "a")
    home = processes.shards.brokers[0]
    home._state.transactions.forget(HOME)
    back(processes, {})
    participant = processes.broker("a").participants.find(HOME)
    assert participant is not None
    assert not participant.is_open
    assert stored(processes, "a") == []


# Tools


def test_the_coordinator_describes_a_transaction_with_all_its_partitions(processes: Processes) -> None:
    made = producer(processes)
    write(made, 1, "a", "bb", "ccc")
    reported = Client(processes, 0).ask(Api.DESCRIBE_TRANSACTIONS, transactional_ids=[HOME, "no"]).transaction_states
    assert [(one.transactional_id, one.error) for one in reported] == [(HOME, 0), ("no", WireError.NOT_COORDINATOR)]
    assert reported[0].transaction_state == "Ongoing"
    assert {one.topic: one.partitions for one in reported[0].topics} == {"a": [0], "bb": [0], "ccc": [0]}
    listed = [
        {one.transactional_id: one.transaction_state for one in reported.transaction_states}
        for reported in (Client(processes, own).ask(Api.LIST_TRANSACTIONS) for own in range(COUNT))
    ]
    assert listed == [{HOME: "Ongoing"}, {}, {}]
    for broker in processes.shards.brokers:
        assert [one.id for one in broker.transactions.visible(by=ITSELF)] == (
            [HOME] if broker is processes.shards.brokers[0] else []
        )


def test_deleting_an_id_aborts_its_participants(processes: Processes) -> None:
    made = producer(processes)
    write(made, 1, "a", "ccc")
    processes.shards.brokers[0].transactions.delete(HOME)
    back(processes, {})
    assert everywhere(processes) == [[], [], []]
    assert decisions(processes) == 0
    again = producer(processes)
    write(again, 1, "a", value=b"again")
    assert again.end() == 0
    assert stored(processes, "a") == [b"again"]
