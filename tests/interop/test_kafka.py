"""Unmodified Kafka clients against a real broker that is killed: records in every codec, groups, administration.

The clients are not part of this project. Environment variables name their locations (spec: kafka#clients-to-test-with):
``POLYWIRE_KAFKA_CLIENTS`` an interpreter with the Python ones, ``POLYWIRE_KAFKA_JAVA`` and ``POLYWIRE_KAFKA_JAVA_OLD``
class paths, ``POLYWIRE_KAFKA_NODE`` a folder of modules, ``POLYWIRE_KAFKA_GO`` a Go module that requires them. Missing
ones are skipped with a reason.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from polywire.client.sync import connect
from polywire.records.columns import Record
from tests.interop.kafka_peer import NEXT, PEERS, SECONDS_MAX, Member, Peer, Toolbox, drive, until
from tests.three_brokers import Brokers, one_or_three, through

RECORDS = 100
PARTITIONS = 6
LIVES, TRANSACTIONS, COPIES = 2, 8, 3  # copies: a transaction writes to each of the partitions of a topic
COUNTS, MANY = (5_000, 20_000, 80_000), 60  # records and transactions, some of which remain when the broker is killed

each_member = pytest.mark.parametrize("peer", [*PEERS, *NEXT], ids=lambda peer: peer.name)
each = pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)


@pytest.fixture(scope="module")
def toolbox(tmp_path_factory: pytest.TempPathFactory) -> Toolbox:
    return Toolbox(tmp_path_factory.mktemp("drivers"))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    with one_or_three(tmp_path_factory.mktemp("kafka"), wires=["kafka", "polywire"]) as process:
        yield process


def address(broker: Brokers) -> str:
    host, port = broker.addresses["kafka"]
    return f"{host}:{port}"


@pytest.fixture(scope="module")
def written(toolbox: Toolbox, broker: Brokers) -> list[str]:
    """Return topics that every available client has written with each codec, before a kill of the broker."""
    topics = []
    for peer in PEERS:
        if peer.here:
            drive(toolbox, peer, "write", address(broker), peer.name, ",".join(peer.codecs), str(RECORDS))
            topics += [f"{peer.name}.{codec}" for codec in peer.codecs]
    broker.kill()
    broker.start()
    return topics


def expected(peer: Peer) -> list[list[object]]:
    """Return what each driver has written, as this client reports it."""
    every, empty, found = bytes(range(256)), "" if peer.says_empty else None, []
    for number in range(RECORDS):
        value = b"x" * 100_000 if number % 50 == 49 else [None, b"", b"v%d" % number * 20, every][number % 4]
        headers = [["h", b"1".hex()], ["h", empty], [f"n{number}", "00"]]
        reported = empty if value == b"" else value and value.hex()
        found.append([0, number, (b"k%d" % number).hex(), reported, headers, 1_700_000_000_000 + number])
    return found


@each
def test_it_reads_what_all_clients_wrote_before_a_kill(
    toolbox: Toolbox, broker: Brokers, written: list[str], peer: Peer
) -> None:
    toolbox.command(peer)
    group, total = f"all-{peer.name}", str(RECORDS * len(written))
    reported = expected(peer)
    said = drive(toolbox, peer, "read", address(broker), ",".join(written), group, total)
    read: dict[str, list[list[object]]] = {topic: [] for topic in written}
    for _, topic, *record in said:
        read[topic].append(record)
    assert not {topic: records for topic, records in read.items() if records != reported}


@pytest.fixture(scope="module")
def committed(toolbox: Toolbox, broker: Brokers) -> list[str]:
    """Return topics that every transactional client has written in two lives of the broker."""
    topics = []
    for life in range(LIVES):
        for peer in PEERS:
            if peer.transactions and peer.here:
                topic = f"committed.{peer.name}"
                drive(toolbox, peer, "transact", address(broker), topic, "lz4", str(TRANSACTIONS))
                topics += [] if life else [topic]
        broker.kill()
        broker.start()
    return topics


@each
def test_it_reads_what_all_clients_committed_and_nothing_else(
    toolbox: Toolbox, broker: Brokers, committed: list[str], peer: Peer
) -> None:
    toolbox.command(peer)
    numbers = sorted((b"%d" % number).hex() for number in range(TRANSACTIONS) if number % 3 != 2)
    wanted = sorted((topic, value) for topic in committed for value in numbers * COPIES * LIVES)
    group = f"committed-{peer.name}"
    said = drive(toolbox, peer, "read", address(broker), ",".join(committed), group, str(len(wanted)))
    assert sorted((topic, value) for _, topic, _, _, _, value, *_ in said) == wanted


@each
def test_offsets_are_committed_with_their_transactions(broker: Brokers, committed: list[str], peer: Peer) -> None:
    topic = f"committed.{peer.name}"
    if topic not in committed or not peer.moves_positions:
        pytest.skip(f"{peer.name} has moved no positions in transactions")
    with connect(broker.url("polywire")) as client:
        assert client.position(topic, topic, 0) == max(number for number in range(TRANSACTIONS) if number % 3 != 2)


def cut(toolbox: Toolbox, broker: Brokers, peer: Peer, verb: str, topic: str, count: int) -> bool:
    """Kill and restart the broker during a driver's writes; return whether it was still writing."""
    toolbox.command(peer)
    codec = () if verb == "transact" else (topic.rpartition(".")[2],)
    name = topic if verb == "transact" else topic.rpartition(".")[0]
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(drive, toolbox, peer, verb, address(broker), name, *(codec or ("none",)), str(count))
        until(lambda: done.done() or any(stored(broker, topic)), lambda: "nothing was written")
        broker.kill()
        midst = not done.done()
        broker.start()
        done.result()
    return midst


def stored(broker: Brokers, topic: str) -> list[int]:
    """Return the number of records of each partition."""
    with connect(broker.url("polywire")) as client:
        return [one.next_offset for one in client.bounds(topic)]


def keys_and_values(broker: Brokers, topic: str, partition: int) -> list[tuple[bytes | None, bytes | None]]:
    found: list[tuple[bytes | None, bytes | None]] = []
    with connect(broker.url("polywire")) as client:
        while len(found) < client.bounds(topic)[partition].next_offset:
            found += [(record.key, record.value) for record in client.fetch(topic, partition, len(found))]
    return found


@each
def test_it_continues_writing_after_a_kill(toolbox: Toolbox, broker: Brokers, peer: Peer) -> None:
    if not peer.outlives_kills:
        pytest.skip(f"{peer.name} tells its application what was lost")
    for count in COUNTS:
        topic = f"cut-{peer.name}-{count}.none"
        with connect(broker.url("polywire")) as client:
            client.create_topic(topic, 1)
        midst = cut(toolbox, broker, peer, "write", topic, count)
        keys = [key for key, _ in keys_and_values(broker, topic, 0)]
        assert list(dict.fromkeys(keys)) == [b"k%d" % number for number in range(count)]
        assert len(keys) == count or not peer.idempotent
        if midst:
            return
    pytest.fail("the broker was never killed before everything was written")


@each
def test_it_continues_transactions_after_a_kill(toolbox: Toolbox, broker: Brokers, peer: Peer) -> None:
    if not (peer.transactions and peer.outlives_kills):
        pytest.skip(f"{peer.name} has no transactions that go on by themselves")
    topic = f"cut-transactions-{peer.name}"
    with connect(broker.url("polywire")) as client:
        client.create_topic(topic, COPIES)
    assert cut(toolbox, broker, peer, "transact", topic, MANY), "hundreds of round trips were not over"
    committed = [number for number in range(MANY) if number % 3 != 2]
    for partition in range(COPIES):
        assert [value for _, value in keys_and_values(broker, topic, partition)] == [b"%d" % one for one in committed]
    if peer.moves_positions:
        with connect(broker.url("polywire")) as client:
            assert client.position(topic, topic, 0) == committed[-1]


def produce(broker: Brokers, topic: str, number: int) -> None:
    """Produce that many records to each partition."""
    with connect(broker.url("polywire")) as client:
        for partition in range(PARTITIONS):
            client.produce(topic, [Record(b"%d" % at) for at in range(number)], partition=partition)


@each_member
def test_two_members_share_survive_a_kill_and_leave(toolbox: Toolbox, broker: Brokers, peer: Peer) -> None:
    toolbox.command(peer)
    topic = group = f"shared-{peer.name}"
    with connect(broker.url("polywire")) as client:
        client.create_topic(topic, PARTITIONS)
    with (
        Member(toolbox, peer, address(broker), topic, group) as first,
        Member(toolbox, peer, address(broker), topic, group) as second,
    ):
        both = (first, second)
        produced = 0

        def pass_on() -> None:
            nonlocal produced
            produce(broker, topic, 5)
            produced += 5
            until(
                lambda: len({*first.records, *second.records}) == PARTITIONS * produced,
                lambda: [one.records for one in both],
            )

        if peer.says_assignments:
            until(
                lambda: all(len(one.assigned or ()) == PARTITIONS // 2 for one in both),
                lambda: [one.assigned for one in both],
            )
            pass_on()
        while not (first.records and second.records):
            pass_on()
        before = [len(one.assignments) for one in both]
        broker.kill()
        broker.start()
        pass_on()
        if peer.keeps_generation and through() is None:  # during a takeover sessions may expire
            assert [len(one.assignments) for one in both] == before, "no member had to rejoin"
        elif peer.says_assignments:
            until(
                lambda: sum(len(one.assigned or ()) for one in both) == PARTITIONS,  # whether it rejoins or not
                lambda: [one.assigned for one in both],
            )
        first.stop()
        pass_on()
        second.stop()
    produce(broker, topic, 1)
    with Member(toolbox, peer, address(broker), topic, group) as third:
        until(lambda: len(third.records) == PARTITIONS, lambda: third.records)
        assert sorted(third.records) == [(partition, produced) for partition in range(PARTITIONS)]


def test_a_member_subscribes_by_a_pattern(toolbox: Toolbox, broker: Brokers) -> None:
    """The broker matches it; topics that are created later are read, too."""
    (peer, *_) = NEXT
    toolbox.command(peer)

    def make(name: str) -> None:
        with connect(broker.url("polywire")) as client:
            client.create_topic(name, PARTITIONS)
        produce(broker, name, 1)

    make("pattern-one")
    make("no-pattern-one")
    with Member(toolbox, peer, address(broker), "^pattern-[a-z]+$", "by-pattern") as member:
        until(lambda: len(member.records) == PARTITIONS, lambda: member.records)
        make("pattern-two")
        until(lambda: len(member.records) == 2 * PARTITIONS, lambda: member.records)
        member.stop()


@each
def test_a_static_member_returns_to_its_partitions(toolbox: Toolbox, broker: Brokers, peer: Peer) -> None:
    toolbox.command(peer)
    if not peer.static:
        pytest.skip(f"{peer.name} has no static members")
    topic = group = f"static-{peer.name}"
    with connect(broker.url("polywire")) as client:
        client.create_topic(topic, PARTITIONS)
    with Member(toolbox, peer, address(broker), topic, group, "other") as other:
        with Member(toolbox, peer, address(broker), topic, group, "back") as gone:
            until(
                lambda: all(len(one.assigned or ()) == PARTITIONS // 2 for one in (other, gone)),
                lambda: (other.assigned, gone.assigned),
            )
        before = len(other.assignments)
        with Member(toolbox, peer, address(broker), topic, group, "back") as back:
            until(lambda: back.assigned is not None, lambda: back.assigned)
            assert back.assigned == gone.assigned
            produce(broker, topic, 1)
            until(lambda: len({*other.records, *back.records}) == PARTITIONS, lambda: (other.records, back.records))
            assert all(
                had == other.assigned for had in other.assignments[before:]
            )  # cooperative members report again what they retain
            reported = [len(one.assignments) for one in (other, back)]
            broker.kill()
            broker.start()
            produce(broker, topic, 1)
            until(lambda: len({*other.records, *back.records}) == 2 * PARTITIONS, lambda: (other.records, back.records))
            assert (
                not peer.keeps_generation
                or through() is not None
                or [len(one.assignments) for one in (other, back)] == reported
            )


@each
def test_it_creates_changes_and_deletes_topics(toolbox: Toolbox, broker: Brokers, peer: Peer) -> None:
    """The broker is killed in between."""
    command = [*toolbox.command(peer), peer.name, "admin", address(broker), f"made-{peer.name}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(2)]
            broker.kill()
            broker.start()
            reported, _ = process.communicate("go on\n", timeout=SECONDS_MAX)
        finally:
            process.kill()
    assert list(map(json.loads, [*said, *reported.splitlines()])) == [
        ["created", 3, "7200000"],
        ["grown", 5],
        ["listed", True],
        ["deleted", True],
    ]
