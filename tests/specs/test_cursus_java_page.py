"""The protocol page of the Java client, statement by statement: transport, frames and commands.

The records of batches and acknowledgements are in test_cursus_java_batches.py.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest

from polywire.server.config import ServeConfig
from tests.broker_process import BrokerProcess
from tests.certificates import Certificates
from tests.specs.cursus_java_client import Batch, Client, Message
from tests.specs.pages import CURSUS_JAVA as PAGE
from tests.specs.pages import Differs, Row

PORTS = ("cursus", "any")
FRAME_BYTES_MAX = 64 * 1024 * 1024
STILL_S = 0.3  # a stream without data for that long is silent


@pytest.fixture(params=PORTS)
def address(broker: BrokerProcess, request: pytest.FixtureRequest) -> tuple[str, int]:
    return broker.addresses[request.param]


@pytest.fixture
def client(address: tuple[str, int]) -> Iterator[Client]:
    client = Client(address)
    yield client
    client.close()


@pytest.fixture
def topic() -> str:
    """Return an unused name."""
    return f"t{random.getrandbits(60)}"


def filled(client: Client, topic: str, *payloads: str, partition: int = 0) -> None:
    """Create a topic of two partitions with messages in one of them."""
    assert not client.ask(f"CREATE {topic} 2").startswith("ERROR:")
    if payloads:
        batch = Batch(topic, partition, [Message(payload=payload) for payload in payloads])
        assert client.produce(batch)["status"] == "OK"


def payloads(batch: Batch) -> list[str]:
    return [message.payload for message in batch.messages]


# Transport and frames


@PAGE.says(10, "the broker listens on port 9000")
def test_the_default_port() -> None:
    assert ServeConfig(data_dir=Path()).cursus.rpartition(":")[2] == "9000"


@PAGE.says(11, "a frame is four bytes of length, big-endian, and the payload")
@PAGE.says(18, "what is received has the same frame as what is sent")
@PAGE.says(22, "the length does not count itself")
@PAGE.says(43, "the text of a command is the whole payload")
def test_a_frame(address: tuple[str, int], topic: str) -> None:
    with socket.create_connection(address, timeout=20) as peer, peer.makefile("rb") as answers:
        for text in (b"CREATE %b 1" % topic.encode(), b"DELETE %b" % topic.encode()):
            peer.sendall(len(text).to_bytes(4, "big") + text)
            assert answers.read(int.from_bytes(answers.read(4), "big")).count(topic.encode()) == 1


@PAGE.says(12, "a frame of more than 64 MiB is too long")
def test_a_frame_that_is_too_long(client: Client, address: tuple[str, int]) -> None:
    assert not client.ask("LIST").startswith("ERROR:")
    with socket.create_connection(address, timeout=20) as peer:
        peer.sendall((4).to_bytes(4, "big") + b"LIST")
        assert peer.recv(65536)
        peer.sendall((FRAME_BYTES_MAX + 1).to_bytes(4, "big") + b"LIST")
        assert peer.recv(1) == b""


@PAGE.says(13, "commands are UTF-8")
def test_commands_are_utf8(client: Client, topic: str) -> None:
    filled(client, topic)
    assert " member=gr\u00f6\u00dfe-" in client.ask(f"JOIN_GROUP {topic} {topic} gr\u00f6\u00dfe")


@pytest.mark.skipif(which("openssl") is None, reason="TLS was NOT tried: no openssl to make a certificate with")
@PAGE.says(14, "TLS is optional")
def test_tls(tmp_path: Path, topic: str) -> None:
    certificates = Certificates(tmp_path)
    options = ["--tls-certificate", certificates.path("server"), "--tls-key", certificates.path("server", "key")]
    options += ["--cursus-tls", "127.0.0.1:0", "--any", "127.0.0.1:0"]
    with BrokerProcess(tmp_path / "data", *options, wires=["cursus"]) as broker:
        for port, context in (("cursus-tls", certificates.context()), ("any", certificates.context()), ("any", None)):
            client = Client(broker.addresses[port], context)
            filled(client, f"{topic}{port}{context is None}", "hello")
            client.close()


# Commands: each row is sent from top to bottom. $ is an unused topic, % an unused group, @c1 the id of the member c1.

# Commands that both pages of the protocol have get the other page's sentences: this client knows errors by their prefix
# only.
CREATED = ("CREATE $ 2", "$")
JOINED = ("JOIN_GROUP $ % c1", "OK generation=1 member=c1-")
OTHER = ("JOIN_GROUP $ % c2", "OK generation=2 member=c2-")


@PAGE.rows(
    "steps",
    Row(47, "CREATE makes a topic of so many partitions", ((CREATED, ("METADATA topic=$", " partitions=2 ")),)),
    Row(48, "DELETE removes a topic", ((CREATED, ("DELETE $", "Topic '$' deleted"), ("DELETE $", "ERROR: ")),)),
    Row(49, "LIST tells the topics", ((CREATED, ("LIST", "$")),)),
    Row(51, "SUBSCRIBE gives a group a topic", ((CREATED, ("SUBSCRIBE $ %", "OK group=% topic=$ registered=true")),)),
    Row(
        51,
        "SUBSCRIBE gives a group further topics, each with its own partitions for the group's members",
        (
            (
                *(CREATED, ("CREATE $b 3", "$b"), ("SUBSCRIBE $ %", "OK "), ("SUBSCRIBE $b %", "OK group=% topic=$b ")),
                *(JOINED, ("JOIN_GROUP $b % c1", "OK generation=1 member=@c1 assignments=[0 1 2]")),
                *(("SYNC_GROUP $ % @c1 1", "assignments=[0 1]"), ("SYNC_GROUP $b % @c1 1", "assignments=[0 1 2]")),
                *(("HEARTBEAT $ % c1 @c1 1", "OK "), ("HEARTBEAT $b % c1 @c1 1", "OK ")),
                *(
                    ("BATCH_COMMIT $ % @c1 1 P1:4", "OK "),
                    ("BATCH_COMMIT $b % @c1 1 P1:5", "OK "),
                    ("COMMIT $b % 2 6", "OK"),
                ),
                *(
                    ("FETCH_OFFSET topic=$ partition=1 group=%", "=4"),
                    ("FETCH_OFFSET topic=$b partition=1 group=%", "=5"),
                ),
                *(
                    ("JOIN_GROUP $b % c2", "OK generation=2 member=c2-"),
                    ("HEARTBEAT $b % c1 @c1 1", "REBALANCE_REQUIRED"),
                ),
                *(("HEARTBEAT $ % c1 @c1 1", "OK "), ("LEAVE_GROUP $b % c1", "OK "), ("SYNC_GROUP $ % @c1 1", "[0 1]")),
            ),
        ),
    ),
    Row(
        52,
        "JOIN_GROUP makes a member, which the broker registers",
        ((CREATED, JOINED, ("GROUP_STATUS group=%", '"member_id":"@c1"')),),
    ),
    Row(
        53,
        "LEAVE_GROUP ends a membership by its original name, and redistributes the partitions",
        (
            (
                *(CREATED, JOINED, OTHER, ("JOIN_GROUP $ % c1", "assignments=[0]")),
                *(("LEAVE_GROUP $ % c2", "OK "), ("HEARTBEAT $ % c1 @c1 2", "REBALANCE_REQUIRED")),
                ("JOIN_GROUP $ % c1", "OK generation=3 member=@c1 assignments=[0 1]"),
            ),
        ),
    ),
    Row(
        55,
        "COMMIT stores a group's offset of a partition",
        ((CREATED, ("COMMIT $ % 1 5", "OK"), ("FETCH_OFFSET topic=$ partition=1 group=%", "OK offset=5")),),
    ),
    Row(56, "HEARTBEAT keeps a member alive", ((CREATED, JOINED, ("HEARTBEAT $ % c1 @c1 1", "OK ")),)),
    Row(
        56,
        "HEARTBEAT may be answered with REBALANCE_REQUIRED",
        ((CREATED, JOINED, OTHER, ("HEARTBEAT $ % c1 @c1 1", "REBALANCE_REQUIRED")),),
    ),
    Row(
        57,
        "BATCH_COMMIT stores offsets of several partitions at once",
        (
            (
                *(CREATED, JOINED, ("BATCH_COMMIT $ % @c1 1 0:6,1:3", "OK batched=2")),
                *(
                    ("FETCH_OFFSET topic=$ partition=0 group=%", "=6"),
                    ("FETCH_OFFSET topic=$ partition=1 group=%", "=3"),
                ),
            ),
        ),
    ),
    Row(
        58,
        "SYNC_GROUP tells a member's partitions",
        ((CREATED, JOINED, ("SYNC_GROUP $ % @c1 1", "OK generation=1 member=@c1 assignments=[0 1]")),),
    ),
    Row(
        64,
        "a frame that does not begin with the magic is a command, also one with digits or letters of it",
        ((CREATED, ("\u7c00\u00ba7c", "ERROR: "), ("BA7C", "ERROR: ")),),
    ),
    Row(117, "a frame without the magic is a command", ((("CREATE", "ERROR: "), CREATED),)),
    Row(
        152,
        "a member of a changed group gets REBALANCE_REQUIRED",
        ((CREATED, JOINED, OTHER, ("SYNC_GROUP $ % @c1 1", "REBALANCE_REQUIRED")),),
    ),
    Row(
        152,
        "an unknown member gets REBALANCE_REQUIRED, and rejoins",
        (
            (
                *(CREATED, JOINED, ("HEARTBEAT $ % c9 c9-0001 1", "REBALANCE_REQUIRED")),
                *(
                    ("HEARTBEAT $ %x c9 c9-0001 1", "REBALANCE_REQUIRED"),
                    ("SYNC_GROUP $ % c9-0001 1", "REBALANCE_REQUIRED"),
                ),
            ),
        ),
    ),
    Row(
        153,
        "an old generation gets GEN_MISMATCH",
        (
            (
                *(CREATED, JOINED, OTHER, ("SYNC_GROUP $ % @c1 1", "GEN_MISMATCH")),
                *(("HEARTBEAT $ % c1 @c1 1", "GEN_MISMATCH"), ("BATCH_COMMIT $ % @c1 1 0:1", "GEN_MISMATCH")),
            ),
        ),
    ),
    Row(
        154,
        "an error begins with ERROR: and describes itself",
        (
            (
                *(("DELETE $", "ERROR: "), ("FOO", "ERROR: "), ("CREATE $ x", "ERROR: "), ("CREATE", "ERROR: ")),
                *(
                    ("CONSUME $ 0 0", "ERROR: command_failed reason="),
                    ("STREAM $ 0 0", "ERROR: command_failed reason="),
                ),
                *(
                    ("COMMIT $ % 0 0", "ERROR: topic_not_found topic=$"),
                    ("JOIN_GROUP $ % c1", "ERROR: topic_not_found "),
                ),
                *(
                    CREATED,
                    ("CONSUME $ 2 0", "ERROR: command_failed"),
                    ("COMMIT $ % 2 0", "ERROR: partition_not_found "),
                ),
                *(("STREAM $ 0", "ERROR: invalid_stream_syntax"), ("CONSUME $ 0", "ERROR: invalid_consume_syntax")),
            ),
        ),
    ),
)
def test_commands(client: Client, topic: str, steps: tuple[tuple[str, str], ...]) -> None:
    ids: dict[str, str] = {}

    def full(text: str) -> str:
        for name, member in ids.items():
            text = text.replace(f"@{name}", member)
        return text.replace("$", topic).replace("%", f"g{topic}")

    for ask, reported in steps:
        answer = client.ask(full(ask))
        assert full(reported) in answer, f"{ask} was answered with {answer}"
        member = answer.partition(" member=")[2].partition(" ")[0]
        if member:
            ids[member.rpartition("-")[0]] = member


@PAGE.says(48, "DELETE removes a topic's data, too")
def test_a_recreated_topic_is_empty(client: Client, topic: str) -> None:
    filled(client, topic, "old")
    assert not client.ask(f"DELETE {topic}").startswith("ERROR:")
    filled(client, topic)
    assert payloads(client.consume(topic, 0, 0)) == []


@PAGE.says(50, "CONSUME brings messages of a partition from an offset on")
def test_consume(client: Client, topic: str) -> None:
    filled(client, topic, "a", "b", "c", partition=1)
    found = client.consume(topic, 1, 1)
    assert (found.topic, found.partition) == (topic, 1)
    assert [(message.offset, message.payload) for message in found.messages] == [(1, "b"), (2, "c")]
    assert payloads(client.consume(topic, 1, 0)) == ["a", "b", "c"]
    assert payloads(client.consume(topic, 1, 3)) == payloads(client.consume(topic, 0, 0)) == []


@PAGE.says(50, "CONSUME need not bring all at once: who asks on gets all, each once")
def test_consume_in_pieces(client: Client, topic: str) -> None:
    filled(client, topic)
    for start in range(0, 20_000, 5_000):
        batch = Batch(topic, 0, [Message(payload=str(start + n)) for n in range(5_000)])
        assert client.produce(batch)["last_offset"] == start + 4_999
    offset, pieces = 0, 0
    while messages := client.consume(topic, 0, offset).messages:
        assert [message.payload for message in messages] == [str(offset + n) for n in range(len(messages))]
        offset, pieces = offset + len(messages), pieces + 1
    assert (offset, pieces > 1) == (20_000, True)


@PAGE.says(
    55,
    "COMMIT stores whatever offset it names",
    Differs(
        "no release knows COMMIT; its COMMIT_OFFSET refuses to go back",
        "refused with `offset_regression` when it goes back",
        "commits name no member, and a slow one must not move a group back",
    ),
)
def test_a_commit_that_goes_back(client: Client, topic: str) -> None:
    filled(client, topic)
    for offset, reported in ((5, "OK"), (5, "OK"), (4, "ERROR: offset_regression "), (6, "OK")):
        assert client.ask(f"COMMIT {topic} g{topic} 0 {offset}").startswith(reported)


@PAGE.says(54, "STREAM pushes batches as messages arrive, on a connection that stays")
def test_stream(client: Client, address: tuple[str, int], topic: str) -> None:
    filled(client, topic, "a", "b")
    reader = Client(address)
    reader.send(f"STREAM {topic} 0 1".encode())
    assert payloads(Batch.decode(reader.receive())) == ["b"]
    for payload in ("c", "d"):
        client.produce(Batch(topic, 0, [Message(payload=payload)]))
        assert payloads(Batch.decode(reader.receive())) == [payload]
    reader.close()


@PAGE.says(54, "a stream has batches only: while nothing arrives it is silent")
def test_a_silent_stream(client: Client, topic: str) -> None:
    filled(client, topic)
    client.send(f"STREAM {topic} 0 0".encode())
    with pytest.raises(TimeoutError):
        client.receive(STILL_S)


@PAGE.says(154, "a stream that cannot go on ends with ERROR:, and the connection takes commands again")
def test_the_end_of_a_stream(client: Client, address: tuple[str, int], topic: str) -> None:
    filled(client, topic, "a")
    reader = Client(address)
    reader.send(f"STREAM {topic} 0 0".encode())
    assert payloads(Batch.decode(reader.receive())) == ["a"]
    assert not client.ask(f"DELETE {topic}").startswith("ERROR:")
    assert reader.receive().decode() == f"ERROR: topic_not_found topic={topic}"
    assert not reader.ask("LIST").startswith("ERROR:")
    reader.close()
