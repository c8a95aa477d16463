"""Statements of Cursus' API reference of November 2025, on the protocol's own port and on the one for every protocol.

The page frames a command as a topic and a payload, and calls it a text: both are tested, and the topic may be empty.
"""

from __future__ import annotations

import gzip
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess
from tests.specs.pages import CURSUS_API, Differs, Row

PORTS = ("cursus", "any")
WRAPPINGS = {"raw": None, "empty": b"", "topic": b"admin", "type": b"CREATE"}
DONE, SENT, REMOVED = "\u2705", "\U0001f4e4", "\U0001f5d1\ufe0f"
HELP = (
    *("Available commands:", "CREATE <topic> [<partitions>]", "DELETE <topic>", "LIST", "SUBSCRIBE <topic>"),
    *("PUBLISH <topic> <message>", "CONSUME <topic> <pID> <offset>", "HELP", "EXIT"),
)
GONE = "what a topic was called by is no place for its bytes: who asks for a deletion may have to rely on it"


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Serve a broker that drops duplicates of the last 30 minutes."""
    options = ("--any", "127.0.0.1:0", "--cursus-dedup-minutes", "30")
    with BrokerProcess(tmp_path_factory.mktemp("dropping") / "data", *options) as process:
        yield process


@pytest.fixture(params=[f"{port}-{wrapping}" for port in PORTS for wrapping in WRAPPINGS])
def peer(broker: BrokerProcess, request: pytest.FixtureRequest) -> Iterator[Peer]:
    port, _, wrapping = request.param.partition("-")
    with Peer(broker, port, WRAPPINGS[wrapping]) as peer:
        yield peer


class Peer:
    """A connection that frames its commands in one way, and an unused topic."""

    def __init__(self, broker: BrokerProcess, port: str, envelope: bytes | None, topic: str = "") -> None:
        self.topic = topic or f"t{random.getrandbits(60)}"
        self._broker, self._port, self._envelope = broker, port, envelope
        self._socket = socket.create_connection(broker.addresses[port], timeout=20)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def another(self) -> Peer:
        """Open another connection like this one, for the same topic."""
        return Peer(self._broker, self._port, self._envelope, self.topic)

    def named(self, text: str) -> str:
        """Return a text with the topic in place of ``$``."""
        return text.replace("$", self.topic)

    def send(self, *texts: str) -> None:
        """Send commands all at once; ``$`` stands for the topic."""
        front = b"" if self._envelope is None else len(self._envelope).to_bytes(2, "big") + self._envelope
        bodies = [front + self.named(text).encode() for text in texts]
        self._socket.sendall(b"".join(len(body).to_bytes(4, "big") + body for body in bodies))

    def ask(self, text: str) -> str:
        """Send a command and return its response."""
        self.send(text)
        answer = self.take()
        assert answer is not None, "the broker closed the connection"
        return answer.decode()

    def put(self, topic: str, payload: bytes) -> str:
        """Send a message in the envelope of its topic; return the response."""
        name = topic.encode()
        body = len(name).to_bytes(2, "big") + name + payload
        self._socket.sendall(len(body).to_bytes(4, "big") + body)
        return (self.take() or b"").decode()

    def take(self) -> bytes | None:
        """Return the next frame's body, None at the end."""
        head = self._read(4)
        return None if head is None else self._read(int.from_bytes(head, "big"))

    def _read(self, size: int) -> bytes | None:
        found = b""
        while len(found) < size:
            part = self._socket.recv(size - len(found))
            if not part:
                assert not found, "a partial frame"
                return None
            found += part
        return found


def exchange(*lines: str) -> tuple[tuple[str, ...]]:
    """Run a row: commands and responses in turn."""
    return (lines,)


@CURSUS_API.rows(
    "lines",
    Row(33, "CREATE takes a topic and a number", exchange("CREATE $ 3", f"{DONE} Topic '$' now has 3 partitions")),
    Row(34, "without a number there are four", exchange("CREATE $", f"{DONE} Topic '$' now has 4 partitions")),
    Row(
        35,
        "CREATE of a topic that is there adds partitions",
        exchange(
            *("CREATE $ 2", f"{DONE} Topic '$' now has 2 partitions", "CREATE $ 5"),
            *(f"{DONE} Topic '$' now has 5 partitions", "CREATE $ 3", f"{DONE} Topic '$' now has 5 partitions"),
        ),
    ),
    Row(36, "CREATE says how many there are now", exchange("CREATE $ 1", f"{DONE} Topic '$' now has 1 partitions")),
    Row(
        37,
        "a count must be a positive integer",
        exchange(
            *(
                line
                for word in ("0", "-1", "x", "1.5")
                for line in (f"CREATE $ {word}", "ERROR: partitions must be a positive integer")
            )
        ),
    ),
    Row(38, "CREATE's example", exchange("CREATE $ 8", f"{DONE} Topic '$' now has 8 partitions")),
    Row(
        43,
        "DELETE takes a topic, which is gone then",
        exchange(
            *("CREATE $ 1", f"{DONE} Topic '$' now has 1 partitions", "DELETE $", f"{REMOVED} Topic '$' deleted"),
            *("DELETE $", "ERROR: topic '$' not found", "SUBSCRIBE $", "ERROR: topic '$' does not exist"),
        ),
    ),
    Row(
        62,
        "SUBSCRIBE takes one topic, and another",
        exchange(
            *("CREATE $ 1", f"{DONE} Topic '$' now has 1 partitions", "SUBSCRIBE $", f"{DONE} Subscribed to '$'"),
            *("CREATE $b 1", f"{DONE} Topic '$b' now has 1 partitions", "SUBSCRIBE $b", f"{DONE} Subscribed to '$b'"),
        ),
    ),
    Row(
        46,
        "DELETE says which topic",
        exchange("CREATE $ 1", f"{DONE} Topic '$' now has 1 partitions", "DELETE $", f"{REMOVED} Topic '$' deleted"),
    ),
    Row(47, "DELETE of a topic that is not there", exchange("DELETE $", "ERROR: topic '$' not found")),
    Row(
        65,
        "SUBSCRIBE says to which topic",
        exchange("CREATE $", f"{DONE} Topic '$' now has 4 partitions", "SUBSCRIBE $", f"{DONE} Subscribed to '$'"),
    ),
    Row(66, "SUBSCRIBE to a topic that is not there", exchange("SUBSCRIBE $", "ERROR: topic '$' does not exist")),
    Row(
        75,
        "PUBLISH says to which topic",
        exchange("CREATE $", f"{DONE} Topic '$' now has 4 partitions", "PUBLISH $ x", f"{SENT} Published to '$'"),
    ),
    Row(
        77,
        "a message may hold blanks, quotes and braces",
        exchange(
            *("CREATE $", f"{DONE} Topic '$' now has 4 partitions"),
            *('PUBLISH $ {"order_id":123, "amount":99.99}', f"{SENT} Published to '$'"),
        ),
    ),
    Row(
        128,
        "an empty command",
        exchange(*("CREATE $ 1", f"{DONE} Topic '$' now has 1 partitions"), *("  \r\n", "ERROR: empty command")),
    ),
    Row(
        129,
        "an unknown command, by its first word",
        exchange(
            *("CREATE $ 1", f"{DONE} Topic '$' now has 1 partitions", "FOO", "ERROR: unknown command: FOO"),
            *("  foo\n", "ERROR: unknown command: foo", "FOO bar baz", "ERROR: unknown command: FOO"),
        ),
    ),
    Row(130, "CREATE without a topic", exchange("CREATE", "ERROR: missing topic name")),
    Row(
        131,
        "an operation on a topic that is not there",
        exchange("DELETE nonexistent", "ERROR: topic 'nonexistent' not found"),
    ),
    Row(
        132,
        "SUBSCRIBE and PUBLISH to a topic that is not there",
        exchange(
            *("SUBSCRIBE nonexistent", "ERROR: topic 'nonexistent' does not exist"),
            *("PUBLISH nonexistent x", "ERROR: topic 'nonexistent' does not exist"),
        ),
    ),
    Row(133, "PUBLISH without a message", exchange("PUBLISH orders", "ERROR: invalid PUBLISH syntax")),
)
def test_a_command_is_answered_with_its_sentence(peer: Peer, lines: tuple[str, ...]) -> None:
    for command, answer in zip(lines[::2], lines[1::2], strict=True):
        assert peer.ask(command) == peer.named(answer)


@CURSUS_API.says(134, "CONSUME with a wrong count of arguments")
@CURSUS_API.says(86, "CONSUME's errors, in their order")
@CURSUS_API.says(118, "every error is a text that begins so")
@CURSUS_API.says(122, "an error is ERROR, a colon and its description")
def test_errors_of_reads(peer: Peer) -> None:
    peer.ask("CREATE $ 1")
    peer.ask("PUBLISH $ x")
    for text, reported in (
        ("CONSUME", "ERROR: invalid CONSUME syntax"),
        ("CONSUME $", "ERROR: invalid CONSUME syntax"),
        ("CONSUME $ 0", "ERROR: invalid CONSUME syntax"),
        ("CONSUME $ 0 0 0", "ERROR: invalid CONSUME syntax"),
        ("CONSUME $ x 0", "ERROR: invalid partition ID"),
        ("CONSUME $ 0 x", "ERROR: invalid offset"),
        ("CONSUME $ 0 -1", "ERROR: invalid offset"),
        ("CONSUME $ 7 0", "ERROR: failed to get disk handler"),
        ("CONSUME nonexistent 0 0", "ERROR: "),
    ):
        assert peer.ask(text).startswith(reported), text


@CURSUS_API.says(95, "HELP shows these lines in this order")
@CURSUS_API.says(92, "HELP takes nothing")
@CURSUS_API.says(94, "HELP lists every command with its syntax")
def test_help(peer: Peer) -> None:
    lines = [line.strip().partition(" - ")[0].strip() for line in peer.ask("HELP").split("\n")]
    assert lines == list(HELP)


@CURSUS_API.says(55, "LIST is all names with a comma and a blank between them")
@CURSUS_API.says(53, "LIST takes nothing")
@CURSUS_API.says(56, "and says so where there are none")
@CURSUS_API.says(57, "LIST's example")
def test_list(peer: Peer) -> None:
    for name in filter(lambda name: name != "(no topics)", peer.ask("LIST").split(", ")):
        assert peer.ask(f"DELETE {name}") == f"{REMOVED} Topic '{name}' deleted"
    assert peer.ask("LIST") == "(no topics)"
    names = ["orders", "payments", "notifications"]
    for name in names:
        peer.ask(f"CREATE {name} 1")
    assert sorted(peer.ask("LIST").split(", ")) == sorted(names)


@CURSUS_API.says(12, "four bytes, big-endian, tell a message's length, both ways")
@CURSUS_API.says(8, "all messages have such a prefix")
@CURSUS_API.says(101, "an answer is one such message, unless it is CONSUME's")
@CURSUS_API.says(103, "a simple command has one answer of this form")
def test_messages_can_arrive_together_and_in_pieces(broker: BrokerProcess) -> None:
    for port in PORTS:
        with socket.create_connection(broker.addresses[port], timeout=20) as plain:
            for byte in bytes.fromhex("00000004") + b"HELP":
                plain.sendall(bytes([byte]))
            plain.sendall(2 * (bytes.fromhex("00000004") + b"HELP"))
            stream = plain.makefile("rb")
            for _ in range(3):
                size = int.from_bytes(stream.read(4), "big")
                assert stream.read(size).startswith(b"Available commands:")


@CURSUS_API.says(21, "a payload that begins with one of seven words is a command")
@CURSUS_API.says(18, "a message has a topic, or the type of a command")
@CURSUS_API.says(19, "and a payload, a command or a message's content")
def test_a_payload_that_is_not_a_command_is_a_message_of_its_topic(peer: Peer) -> None:
    peer.ask("CREATE $ 1")
    for payload in (b"created long ago", b" \xff\x00 "):
        assert peer.put(peer.topic, payload) == "OK"
    for word in ("CREATE", "DELETE", "LIST", "SUBSCRIBE", "PUBLISH", "CONSUME", "HELP"):
        assert peer.put("orders", word.encode()) != "OK"
    peer.send("CONSUME $ 0 0")
    assert [peer.take(), peer.take()] == [b"created long ago", b" \xff\x00 "]


@CURSUS_API.says(72, "PUBLISH takes a topic and a message")
@CURSUS_API.says(73, "a message is the whole text behind the topic and its blank")
def test_a_message_keeps_its_surrounding_white_space(peer: Peer) -> None:
    peer.ask("CREATE $ 1")
    texts = ["  in front", "behind \t", " \n", "two  words", "\r\nlines\r\n", "topic=1"]
    for text in texts:
        assert peer.ask(f"PUBLISH $ {text}") == peer.named(f"{SENT} Published to '$'")
    peer.send("CONSUME $ 0 0")
    assert [(peer.take() or b"").decode() for _ in texts] == texts


@CURSUS_API.says(64, "messages are dealt to partitions in turn")
@CURSUS_API.says(74, "a message goes to one partition, in turn, and to the disk")
def test_messages_are_distributed_to_partitions_in_turn(peer: Peer) -> None:
    peer.ask("CREATE $ 3")
    for number in range(9):
        peer.ask(f"PUBLISH $ {number}")
    for partition in range(3):
        with peer.another() as reader:
            reader.ask("SUBSCRIBE $")  # identifies the page of this connection
            reader.send(f"CONSUME $ {partition} 0")
            assert [reader.take() for _ in range(3)] == [b"%d" % (partition + turn) for turn in (0, 3, 6)]


@CURSUS_API.says(83, "an offset counts the bytes of the segment in front of it; partitions are counted from 0")
@CURSUS_API.says(84, "one CONSUME reads up to 8192 bytes")
@CURSUS_API.says(174, "and no setting changes that")
def test_an_offset_counts_bytes_and_a_response_is_small(peer: Peer) -> None:
    peer.ask("CREATE $ 1")
    texts = [f"{number}".zfill(1_000) for number in range(20)]
    for text in texts:
        peer.ask(f"PUBLISH $ {text}")
    found: list[str] = []
    offset = 0
    while len(found) < len(texts):
        with peer.another() as reader:
            reader.ask("SUBSCRIBE $")
            reader.send(f"CONSUME $ 0 {offset}")
            part = [message.decode() for message in iter(reader.take, None)]
        size = sum(4 + len(message) for message in part)
        assert 0 < size <= 8_192
        offset += size
        found += part
    assert found == texts
    peer.send(f"CONSUME $ 0 {2 * 1_004}", "CONSUME $ 0 1", "PUBLISH $ " + "x" * 20_000, f"CONSUME $ 0 {offset}")
    assert [(peer.take() or b"").decode() for _ in range(8)] == texts[2:10]
    assert (peer.take() or b"").startswith(b"ERROR: invalid offset")
    assert (peer.take() or b"").decode() == peer.named(f"{SENT} Published to '$'")
    assert len(peer.take() or b"") == 20_000, "a message is never split"


@CURSUS_API.says(82, "CONSUME takes a topic, a partition and an offset")
@CURSUS_API.says(110, "only CONSUME has several messages for an answer")
def test_the_response_to_the_next_command_ends_the_messages(peer: Peer) -> None:
    peer.ask("CREATE $ 1")
    for text in ("first", "second"):
        peer.ask(f"PUBLISH $ {text}")
    for _ in range(2):
        peer.send("CONSUME $ 0 0", "CONSUME $ 0 9", "DELETE nonexistent")
        assert [peer.take() for _ in range(4)] == [
            *(b"first", b"second", b"second"),
            b"ERROR: topic 'nonexistent' not found",
        ]
    peer.send("CONSUME $ 0 19")
    assert peer.take() is None, "no other command was sent"


@CURSUS_API.says(85, "each message comes as its length and its bytes")
@CURSUS_API.says(87, "CONSUME's example")
@CURSUS_API.says(111, "one such frame behind the other")
def test_consume_streams_each_message_in_a_frame(peer: Peer) -> None:
    peer.ask("CREATE $ 1")
    texts = [b"x" * 45, b"y" * 52]
    for text in texts:
        peer.ask("PUBLISH $ " + text.decode())
    peer.send("CONSUME $ 0 0")
    assert [peer.take(), peer.take()] == texts


@CURSUS_API.says(
    82,
    "CONSUME as a bare text, the first on its connection",
    Differs(
        "a command without a topic in front closes the connection",
        "the Java client's page is meant: one batch; behind any command that only this page has, or in an envelope, it is this page's",
        "both pages have the same command, and only this one has envelopes",
    ),
)
@pytest.mark.parametrize("port", PORTS)
def test_an_empty_bare_consume_belongs_to_the_other_page(broker: BrokerProcess, port: str) -> None:
    with Peer(broker, port, None) as peer:
        peer.ask("CREATE $ 1")
        peer.ask("PUBLISH $ x")
        peer.send("CONSUME $ 0 0")
        assert peer.take() == b"x"
        with peer.another() as fresh:
            fresh.send("CONSUME $ 0 0")
            assert (fresh.take() or b"").startswith(b"\xba\x7c")


@CURSUS_API.says(172, "a partition takes 10,000 unread messages")
@CURSUS_API.says(173, "and a subscriber 1,000")
@pytest.mark.parametrize("port", PORTS)
def test_messages_wait_for_their_reader(broker: BrokerProcess, port: str) -> None:
    count = 10_001
    with Peer(broker, port, b"") as peer:
        peer.ask("CREATE $ 1")
        peer.ask("SUBSCRIBE $")
        for first in range(0, count, 100):
            texts = [f"{number:05}" for number in range(first, min(first + 100, count))]
            peer.send(*(f"PUBLISH $ {text}" for text in texts))
            assert all((peer.take() or b"").decode() == peer.named(f"{SENT} Published to '$'") for _ in texts)
        for number in (0, 1_000, 10_000):
            peer.send(f"CONSUME $ 0 {9 * number}", "DELETE nonexistent")
            found = list(iter(peer.take, b"ERROR: topic 'nonexistent' not found"))
            assert found == [b"%05d" % other for other in range(number, min(number + 8_192 // 9, count))]


@CURSUS_API.says(146, "each connection has a state of its own")
def test_subscriptions_belong_to_a_connection(peer: Peer) -> None:
    peer.ask("CREATE $ 1")
    peer.ask("SUBSCRIBE $")
    peer.ask("PUBLISH $ x")
    for _ in range(2):
        with peer.another() as reader:
            reader.ask("SUBSCRIBE $")
            reader.send("CONSUME $ 0 0")
            assert reader.take() == b"x", "each reads all of it"
    assert peer.ask("DELETE $") == peer.named(f"{REMOVED} Topic '$' deleted")


@CURSUS_API.says(
    45,
    "DELETE takes a topic out, but leaves its segment files",
    Differs("the files stay, and a topic of that name has its messages again", "the data goes, too", GONE),
)
def test_a_recreated_topic_is_empty(peer: Peer) -> None:
    peer.ask("CREATE $ 1")
    peer.ask("PUBLISH $ old")
    assert peer.ask("DELETE $") == peer.named(f"{REMOVED} Topic '$' deleted")
    assert peer.ask("PUBLISH $ lost") == peer.named("ERROR: topic '$' does not exist")
    peer.ask("CREATE $ 1")
    peer.ask("PUBLISH $ new")
    peer.send("CONSUME $ 0 0")
    assert peer.take() == b"new"


@CURSUS_API.says(24, "where gzip is used, messages are compressed before they are framed, both ways")
@CURSUS_API.says(26, "and expanded without further ado")
@pytest.mark.parametrize("port", PORTS)
def test_messages_can_be_gzipped(broker: BrokerProcess, port: str) -> None:
    topic = f"t{random.getrandbits(60)}"
    with socket.create_connection(broker.addresses[port], timeout=20) as plain:
        stream = plain.makefile("rb")

        def reported() -> str:
            return gzip.decompress(stream.read(int.from_bytes(stream.read(4), "big"))).decode()

        for text, answer in (
            (f"CREATE {topic} 1", f"{DONE} Topic '{topic}' now has 1 partitions"),
            (f"PUBLISH {topic} first", f"{SENT} Published to '{topic}'"),
            (f"PUBLISH {topic} second", f"{SENT} Published to '{topic}'"),
            ("DELETE nonexistent", "ERROR: topic 'nonexistent' not found"),
            (f"CONSUME {topic} 0 0", "first"),
        ):
            body = gzip.compress(b"\x00\x06orders" + text.encode())
            plain.sendall(len(body).to_bytes(4, "big") + body)
            assert reported() == answer
        assert reported() == "second"


@CURSUS_API.says(
    74,
    "a message that was published in the last 30 minutes is dropped",
    Differs(
        "dropped, in whichever topic it was (gone since December 2025)",
        "stored; `--cursus-dedup-minutes 30` drops it in its own topic",
        "two messages may say the same, and both count",
    ),
)
def test_the_same_message_twice_is_two_messages(peer: Peer) -> None:
    peer.ask("CREATE $ 1")
    for _ in range(2):
        assert peer.ask("PUBLISH $ x") == peer.named(f"{SENT} Published to '$'")
    peer.send("CONSUME $ 0 0")
    assert [peer.take(), peer.take()] == [b"x", b"x"]


@pytest.mark.parametrize("port", PORTS)
def test_a_duplicate_is_dropped_if_configured(dropping: BrokerProcess, port: str) -> None:
    with Peer(dropping, port, b"admin") as peer:
        peer.ask("CREATE $ 1")
        for text in ("x", "x", "y", "x"):
            assert peer.ask(f"PUBLISH $ {text}") == peer.named(f"{SENT} Published to '$'")
        assert peer.put(peer.topic, b"y") == "OK"
        peer.ask("PUBLISH $ end")
        peer.send("CONSUME $ 0 0")
        assert [peer.take() for _ in range(3)] == [b"x", b"y", b"end"]


@CURSUS_API.says(
    64,
    "messages that are published after a SUBSCRIBE are delivered to who subscribed",
    Differs(
        "delivers nothing: messages are read by CONSUME",
        "delivers nothing either",
        "a client of the page has no way to tell a delivered message from an answer",
    ),
)
@CURSUS_API.says(74, "PUBLISH distributes a message to consumers")
def test_a_subscriber_reads_by_consume(peer: Peer) -> None:
    peer.ask("CREATE $ 1")
    with peer.another() as reader:
        reader.ask("SUBSCRIBE $")
        peer.ask("PUBLISH $ x")
        reader.send("DELETE nonexistent", "CONSUME $ 0 0")
        assert reader.take() == b"ERROR: topic 'nonexistent' not found", "nothing was delivered before this response"
        assert reader.take() == b"x"


LOGGED = Differs(
    "logs a line for each command",
    "counts requests in `/metrics`; the log has events of connections and of the broker",
    "a line for each command would be nearly all of the log, and cost more than the command",
)


@CURSUS_API.says(85, "the broker logs how many messages a CONSUME streamed, behind [STREAM]", LOGGED)
@CURSUS_API.says(141, "the broker logs a command that succeeded, behind [CMD] SUCCESS", LOGGED)
@CURSUS_API.says(142, "the broker logs a command that failed, behind [CMD] FAILURE", LOGGED)
def test_commands_are_not_logged_one_by_one(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", wires=("cursus",)) as broker:
        with Peer(broker, "cursus", b"admin") as peer:
            peer.ask("CREATE $ 1")
            peer.ask("PUBLISH $ x")
            peer.send("CONSUME $ 0 0")
            assert peer.take() == b"x"
            assert peer.ask("DELETE nonexistent").startswith("ERROR")
        assert broker.stop() == 0
        for word in ("[STREAM]", "[CMD]", "nonexistent"):
            assert word not in broker.log_text()


BUFFERED = Differs(
    "has neither setting: the sizes are fixed, and a full partition refuses a message",
    "has none: records are in the log as soon as they are answered, and readers read them from there",
    "there is no buffer between the log and a reader that could fill",
)


@CURSUS_API.rows(
    "name",
    Row(
        24,
        "the setting enable_gzip compresses all messages",
        ("enable_gzip",),
        Differs(
            "one setting for the broker; plain frames close the connection then",
            "has no such setting: each frame is recognised, and answered in kind",
            "clients that compress and clients that do not can use one broker",
        ),
    ),
    Row(
        172,
        "a partition's buffer is set by partition_channel_buffer_size",
        ("partition_channel_buffer_size",),
        BUFFERED,
    ),
    Row(173, "a consumer's buffer is set by consumer_channel_buffer_size", ("consumer_channel_buffer_size",), BUFFERED),
)
def test_a_setting_of_the_page_is_refused_and_not_ignored(tmp_path: Path, name: str) -> None:
    settings = tmp_path / "polywire.toml"
    settings.write_text(f"{name} = 1\n")
    with (
        pytest.raises(AssertionError, match=f"unknown key '{name}'"),
        BrokerProcess(tmp_path / "data", "--config", str(settings), wires=("cursus",)),
    ):
        pass
