"""The protocol page of the Java client, statement by statement: batches, acknowledgements, compression."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import cramjam
import pytest

from polywire.types import Buffer
from tests.broker_process import BrokerProcess
from tests.specs.cursus_java_client import Batch, Client, Message
from tests.specs.pages import CURSUS_JAVA as PAGE
from tests.specs.pages import Differs, Row

PORTS = ("cursus", "any")
KEYS = ("status", "last_offset", "producer_epoch", "producer_id", "seq_start", "seq_end", "leader", "error")
NUMBERS = ("last_offset", "producer_epoch", "seq_start", "seq_end")
NAMED = Message(producer="p")
LONG = "\u00e9" * 32_767  # 65,534 bytes: the longest for a length of two bytes, or one less
HIGHEST = 2**63 - 1
FRAME_BYTES_MAX = 64 * 1024 * 1024
LONGEST_PAYLOAD = 10_000_000


@pytest.fixture(params=PORTS)
def client(broker: BrokerProcess, request: pytest.FixtureRequest) -> Iterator[Client]:
    client = Client(broker.addresses[request.param])
    yield client
    client.close()


@pytest.fixture
def topic(client: Client) -> str:
    """Create an unused topic of twelve partitions."""
    name = f"t{random.getrandbits(60)}"
    assert not client.ask(f"CREATE {name} 12").startswith("ERROR:")
    return name


def run(first: int, last: int, producer: str = "p", epoch: int = 0) -> list[Message]:
    """Return messages of one producer with these sequences."""
    return [Message(sequence=n, producer=producer, epoch=epoch, payload=f"v{n}") for n in range(first, last + 1)]


def payloads(batch: Batch) -> list[str]:
    return [message.payload for message in batch.messages]


# The batch


@PAGE.rows(
    "sent",
    Row(65, "a frame that begins with the magic is a batch", (NAMED,)),
    Row(84, "a batch begins with BA 7C", (NAMED,)),
    Row(98, "a message has a sequence number of 64 bits", (replace(NAMED, sequence=HIGHEST),)),
    Row(100, "a message has a producer", (Message(producer="producer-\u00e9"),)),
    Row(102, "a message has a key", (Message(key="k\u00e9y"),)),
    Row(101, "the length of a key has two bytes", (Message(key=LONG),)),
    Row(103, "a message has an epoch of 64 bits", (replace(NAMED, epoch=HIGHEST),)),
    Row(104, "the length of a payload has four bytes", (Message(payload="x" * 70_000),)),
    Row(105, "a payload is UTF-8", (Message(payload="h\u00e9llo \U0001f4e4"),)),
    Row(107, "a message has an event type", (Message(event_type="Paid\u00e9"),)),
    Row(106, "the length of an event type has two bytes", (Message(event_type=LONG),)),
    Row(108, "a message has a schema version of 32 bits", (Message(event_type="e", schema_version=2**31 - 1),)),
    Row(109, "a message has an aggregate version of 64 bits", (Message(event_type="e", aggregate_version=HIGHEST),)),
    Row(111, "a message has metadata", (Message(event_type="e", metadata='{"\u00e9": 1}'),)),
    Row(110, "the length of metadata has two bytes", (Message(event_type="e", metadata=LONG),)),
    Row(115, "integers are big-endian", (Message(0, 258, "p", "", 3, "v", "e", 0x01020304, 0x0102030405060708),)),
    Row(115, "an empty string is its length alone", (Message(),)),
)
def test_every_field_of_a_message_round_trips(client: Client, topic: str, sent: Message) -> None:
    assert client.produce(Batch(topic, 0, [sent, sent]))["last_offset"] == 1
    for ask in (client.consume(topic, 0, 0), streamed(client, topic)):
        assert ask.messages == [sent, replace(sent, offset=1)]


def streamed(client: Client, topic: str) -> Batch:
    """Return the first batch of a stream from the start."""
    other = Client(client.address)
    other.send(f"STREAM {topic} 0 0".encode())
    found = Batch.decode(other.receive())
    other.close()
    return found


@PAGE.says(86, "a batch names its topic")
@PAGE.says(88, "a batch names its partition in decimal")
def test_a_batch_is_stored_in_the_partition_it_names(client: Client, topic: str) -> None:
    for partition in (0, 1, 11):
        assert client.produce(Batch(topic, partition, [Message(payload=f"to {partition}")]))["status"] == "OK"
        found = client.consume(topic, partition, 0)
        assert (found.topic, found.partition, payloads(found)) == (topic, partition, [f"to {partition}"])
    assert client.exchange(Batch(topic, 12, [NAMED]).encode()).startswith(b"ERROR: partition_not_found")
    assert client.exchange(Batch(topic + "x", 0, [NAMED]).encode()).startswith(b"ERROR: topic_not_found")


@PAGE.says(90, "acks are 1, 0 or -1; each is acknowledged")
@PAGE.says(121, "an acknowledgement comes when a batch was processed, in a frame")
def test_acks(client: Client, topic: str) -> None:
    for offset, acks in enumerate(("1", "0", "-1")):
        assert client.produce(Batch(topic, 0, [NAMED], acks))["last_offset"] == offset
        assert len(client.consume(topic, 0, 0).messages) == offset + 1
    assert client.exchange(Batch(topic, 0, [NAMED], "2").encode()).startswith(b"ERROR: invalid_acks")


@PAGE.says(91, "idempotent 1: what was stored before is not stored again")
def test_an_idempotent_batch(client: Client, topic: str) -> None:
    for messages in (run(1, 3), run(1, 3), run(2, 5)):
        assert client.produce(Batch(topic, 0, messages, idempotent=True))["status"] == "OK"
    assert payloads(client.consume(topic, 0, 0)) == ["v1", "v2", "v3", "v4", "v5"]


@PAGE.says(91, "idempotent 0: every batch is stored")
def test_a_batch_that_is_not_idempotent(client: Client, topic: str) -> None:
    for _ in range(2):
        assert client.produce(Batch(topic, 0, run(1, 2)))["status"] == "OK"
    assert payloads(client.consume(topic, 0, 0)) == ["v1", "v2", "v1", "v2"]


@PAGE.says(92, "the first sequence stands before the messages")
@PAGE.says(93, "and the last one behind it")
@PAGE.says(94, "and the number of messages")
def test_the_header_describes_the_messages(client: Client, topic: str) -> None:
    """``Batch.decode`` compares them with the messages."""
    assert client.produce(Batch(topic, 0, run(7, 9)))["status"] == "OK"
    assert [message.sequence for message in client.consume(topic, 0, 0).messages] == [7, 8, 9]
    assert client.consume(topic, 0, 3).messages == []


@PAGE.says(97, "a message has its offset")
def test_offsets(client: Client, topic: str) -> None:
    assert client.produce(Batch(topic, 0, [replace(NAMED, offset=99) for _ in range(3)]))["last_offset"] == 2
    assert [message.offset for message in client.consume(topic, 0, 0).messages] == [0, 1, 2]


@PAGE.rows(
    "sent, error",
    Row(
        85,
        "a topic may have 65,535 bytes",
        (Batch("t" * 250, 0, [NAMED]), "ERROR: topic_not_found "),
        Differs(
            "249 at most", "249 at most", "a topic is made by CREATE, which takes no more; other wires make longer ones"
        ),
    ),
    Row(
        94,
        "a batch may have any number of messages of 32 bits",
        (Batch("$", 0, [Message()] * 100_001), "ERROR: batch_decode_failed "),
        Differs("100,000 at most", "100,000 at most", "what one frame makes the broker hold has a limit"),
    ),
    Row(
        103,
        "an epoch may be negative",
        (Batch("$", 0, [replace(NAMED, epoch=-1)]), "ERROR: batch_decode_failed "),
        Differs("stores nothing", "refused", "epochs count up from 0"),
    ),
)
def test_limits(client: Client, topic: str, sent: Batch, error: str) -> None:
    sent = replace(sent, topic=sent.topic.replace("$", topic))
    assert client.exchange(sent.encode()).decode().startswith(error)
    assert client.consume(topic, 0, 0).messages == []


def largest(topic: str) -> bytes:
    """Return a batch that fills a frame to the last byte."""
    pieces = [Message(payload="x" * (1024 * 1024))] * 60
    rest = FRAME_BYTES_MAX - len(Batch(topic, 0, [*pieces, Message()]).encode())
    return Batch(topic, 0, [*pieces, Message(payload="y" * rest)]).encode()


@PAGE.says(12, "a frame of 64 MiB is not too long, also where several come at once and others are half way")
def test_several_frames_of_maximum_length(client: Client, topic: str) -> None:
    body = largest(topic)
    assert len(body) == FRAME_BYTES_MAX
    senders = [Client(client.address) for _ in range(3)]
    others = [Client(client.address) for _ in range(20)]
    for other in others:
        other.begin(100_000, b"CREATE ")
    with ThreadPoolExecutor(len(senders)) as pool:
        reported = list(pool.map(lambda sender: sender.exchange(body), senders))
    assert [json.loads(answer)["error"] for answer in reported] == [""] * 3
    assert len(client.consume(topic, 0, 3 * 61 - 1).messages) == 1
    for one in (*senders, *others):
        one.close()


@PAGE.says(158, "a compressed batch may have 64 MiB before it was compressed")
def test_the_longest_compressed_batch(client: Client, topic: str) -> None:
    assert b'"status":"OK"' in client.exchange(gzip.compress(largest(topic), 1))
    assert client.consume(topic, 0, 60).messages[0].offset == 60


@PAGE.says(
    104,
    "a payload may be as long as its frame allows",
    Differs(
        "16 MiB, as its frames",
        "10,000,000 bytes; a longer one is refused by itself, and `PARTIAL` or `ERROR` says so",
        "what is stored together is at most 16 MiB, which is what every reader of the log makes room for",
    ),
)
def test_the_longest_payload(client: Client, topic: str) -> None:
    longest = Message(payload="x" * (LONGEST_PAYLOAD - 100))
    assert client.produce(Batch(topic, 0, [longest]))["status"] == "OK"
    assert client.consume(topic, 0, 0).messages == [longest]
    reported = client.produce(Batch(topic, 0, [Message(), Message(payload="x" * 20_000_000)]))
    assert (reported["status"], reported["last_offset"], "too large" in reported["error"]) == ("PARTIAL", 1, True)
    reported = client.produce(Batch(topic, 0, [Message(payload="x" * (LONGEST_PAYLOAD + 1))]))
    assert (reported["status"], "too large" in reported["error"]) == ("ERROR", True)


# The acknowledgement


@PAGE.says(124, "an acknowledgement is a JSON object of eight members, in this order")
@PAGE.says(138, "status is a string")
@PAGE.says(145, "error is an empty string when status is OK")
def test_an_acknowledgement_has_all_members(client: Client, topic: str) -> None:
    reported = client.produce(Batch(topic, 0, run(1, 1)))
    assert tuple(reported) == KEYS
    assert (reported["status"], reported["error"]) == ("OK", "")
    for key in KEYS:
        assert isinstance(reported[key], int if key in NUMBERS else str)


@PAGE.rows(
    "key, value",
    Row(139, "last_offset is the highest offset of the batch", ("last_offset", 12)),
    Row(140, "producer_epoch is the producer's epoch", ("producer_epoch", 7)),
    Row(141, "producer_id is the producer's", ("producer_id", "abc-def-123")),
    Row(142, "seq_start is the first sequence of the batch", ("seq_start", 4)),
    Row(143, "seq_end is the last sequence of the batch", ("seq_end", 13)),
)
def test_fields_of_an_acknowledgement(client: Client, topic: str, key: str, value: object) -> None:
    for messages in (run(1, 3, "abc-def-123", 7), run(4, 13, "abc-def-123", 7)):
        reported = client.produce(Batch(topic, 0, messages, idempotent=True))
    assert reported[key] == value


@PAGE.says(144, "leader is where the client should go: the address it came to")
@PAGE.says(151, "NOT_LEADER sends a client elsewhere; one broker leads everything, and never says it")
def test_the_leader(client: Client, topic: str) -> None:
    for partition in range(12):
        assert client.produce(Batch(topic, partition, [NAMED]))["leader"] == "{}:{}".format(*client.address)


@PAGE.says(138, "status is ERROR on failure")
@PAGE.says(145, "error says why")
def test_a_refused_batch(client: Client, topic: str) -> None:
    reported = client.produce(Batch(topic, 0, run(5, 6), idempotent=True))
    assert tuple(reported) == KEYS
    assert (reported["status"], bool(reported["error"])) == ("ERROR", True)
    assert client.consume(topic, 0, 0).messages == []


@PAGE.says(138, "status is PARTIAL when only some messages were stored: those up to seq_end")
@PAGE.says(139, "last_offset is that of the last message that was stored")
def test_a_batch_stored_in_part(client: Client, topic: str) -> None:
    reported = client.produce(Batch(topic, 0, run(1, 3) + run(7, 8), idempotent=True))
    assert tuple(reported) == KEYS
    assert (reported["status"], reported["last_offset"], reported["seq_start"], reported["seq_end"]) == (
        "PARTIAL",
        2,
        1,
        3,
    )
    assert "expected 4, got 7" in reported["error"]
    assert client.produce(Batch(topic, 0, run(reported["seq_end"] + 1, 8), idempotent=True))["status"] == "OK"
    assert payloads(client.consume(topic, 0, 0)) == [f"v{n}" for n in range(1, 9)]


@PAGE.says(139, "a batch that is repeated has the offset it had")
def test_a_duplicate_batch(client: Client, topic: str) -> None:
    first = client.produce(Batch(topic, 0, run(1, 3), idempotent=True))
    client.produce(Batch(topic, 0, run(1, 3, "q"), idempotent=True))
    assert client.produce(Batch(topic, 0, run(1, 3), idempotent=True)) == first


@PAGE.says(99, "a producer may have 65,535 bytes")
def test_a_producer_with_the_longest_id(client: Client, topic: str) -> None:
    long, other = "p" * 65_535, "p" * 65_534 + "q"
    first = client.produce(Batch(topic, 0, run(1, 3, long), idempotent=True))
    assert (first["status"], first["producer_id"]) == ("OK", long)
    assert client.produce(Batch(topic, 0, run(1, 3, long), idempotent=True)) == first
    assert client.produce(Batch(topic, 0, run(1, 3, other), idempotent=True))["last_offset"] == 5
    shown = [message.producer for message in client.consume(topic, 0, 0).messages]
    assert (len(set(shown)), {len(name) for name in shown}) == (2, {255}), "the stored records distinguish them"
    refused = client.produce(Batch(topic, 0, run(9, 9, long), idempotent=True))
    assert (refused["status"], len(refused["error"]) < 1000) == ("ERROR", True)


@PAGE.says(140, "producer_epoch is the one that the broker keeps, for a producer that is behind")
def test_the_epoch_returned_to_a_fenced_producer(client: Client, topic: str) -> None:
    client.produce(Batch(topic, 0, run(1, 1, epoch=3), idempotent=True))
    reported = client.produce(Batch(topic, 0, run(2, 2, epoch=2), idempotent=True))
    assert (reported["status"], reported["producer_epoch"]) == ("ERROR", 3)


# Compression


@PAGE.says(158, "the body of a batch may be compressed")
@PAGE.says(161, "the frame's length is that of the compressed bytes")
@PAGE.says(164, "gzip is built in")
@PAGE.says(169, "there may be others, zstd for example")
@pytest.mark.parametrize("compress", [gzip.compress, cramjam.zstd.compress], ids=["gzip", "zstd"])
def test_a_compressed_batch(client: Client, topic: str, compress: Callable[[bytes], Buffer]) -> None:
    for first in (1, 1001):
        reported = client.exchange(bytes(compress(Batch(topic, 0, run(first, first + 999)).encode())))
        assert b'"status":"OK"' in reported
    assert [message.sequence for message in client.consume(topic, 0, 0).messages] == list(range(1, 2001))
