"""A hostile client of each protocol fills its quota: it is stopped, memory stays bounded, and others continue."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from struct import unpack

import pytest

from polywire.protocols.cursus.messages import frame
from polywire.protocols.iggy import client_codec
from polywire.protocols.iggy.messages import Code, Consumer
from polywire.protocols.polywire import messages as polywire
from polywire.protocols.polywire.codec import ERROR, MAGIC, PREFIX_BYTES, decode_prefix, encode_head
from polywire.protocols.polywire.messages import Verb
from tests.broker_process import BrokerProcess

HOSTILE, OTHER = "127.0.0.66", "127.0.0.1"  # both are this machine, but different owners
STATE_MIB = 1
REQUESTS_MAX = 20_000
GROWTH_BYTES_MAX = 64 * 1024 * 1024  # of the whole process with buffers, while clients send much more than a mebibyte
TIMEOUT_S = 60.0


class Line:
    """One connection that sends a request and waits for the response."""

    def __init__(self, broker: BrokerProcess, wire: str, source: str) -> None:
        self._socket = socket.create_connection(broker.addresses[wire], TIMEOUT_S, source_address=(source, 0))
        self._numbers = count(1)
        self._rest = b""
        if wire == "polywire":
            self._socket.sendall(MAGIC)
            self._take(len(MAGIC))
            self._polywire_answer()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _more(self) -> None:
        data = self._socket.recv(1 << 16)
        assert data, "the broker closed the connection"
        self._rest += data

    def _take(self, size: int) -> bytes:
        while len(self._rest) < size:
            self._more()
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def flux(self, command: str) -> bool:
        verb, _, words = command.partition(" ")
        self._socket.sendall(f"V1|{next(self._numbers)}|{verb}|{words}\n".encode())
        while b"\n" not in self._rest:
            self._more()
        answer, _, self._rest = self._rest.partition(b"\n")
        return b"|OK|" in answer

    def cursus(self, text: str) -> bool:
        self._socket.sendall(frame(text.encode()))
        answer = self._take(int.from_bytes(self._take(4), "big"))
        return answer.startswith(b"OK")

    def iggy(self, code: int, body: bytes) -> bool:
        self._socket.sendall(client_codec.request(code, body))
        status, size = unpack("<II", self._take(8))
        self._take(size)
        return bool(status == 0)

    def _polywire_answer(self) -> bool:
        prefix = decode_prefix(self._take(PREFIX_BYTES), 0)
        self._take(prefix.length)
        return not prefix.flags & ERROR

    def polywire(self, verb: Verb, head: polywire.Head) -> bool:
        self._socket.sendall(encode_head(verb, next(self._numbers), head))
        return self._polywire_answer()


def long(name: str) -> str:
    return name + "x" * 150


def flux_leaders(line: Line, name: str, number: int) -> bool:
    """Send 545 MB in 1,000 lines, once."""
    topic = f"l{name[:1]}{number // 500}"
    if number % 500 == 0:
        assert line.flux(f"ADMIN_CREATE_TOPIC {topic} 500 1")
    replicas = ",".join(str(2**40 + replica) for replica in range(1_000))
    return line.flux(f"ADMIN_SET_PARTITION_LEADER {topic} {number % 500} 1 {replicas}")


def iggy_consumer(line: Line, name: str, number: int) -> bool:
    who = (0 if name.startswith("h") else 10**6) + number
    if number == 0:
        line.iggy(Code.CREATE_STREAM, (1).to_bytes(4, "little") + b"\x01s")
        topic = (1).to_bytes(4, "little") + (1).to_bytes(4, "little")
        line.iggy(Code.CREATE_TOPIC, client_codec.ident(1) + topic + bytes(4) + b"\x01t")
    place = client_codec.place(Consumer(group=False, identifier=who), client_codec.ident(1) + client_codec.ident(1), 1)
    return line.iggy(Code.STORE_OFFSET, place + bytes(8))


FILLS: dict[str, Callable[[Line, str, int], bool]] = {
    "flux groups": lambda line, name, number: line.flux(f"JOIN {long(name)}{number} t m"),
    "flux members": lambda line, name, number: line.flux(f"JOIN {name}{number // 900} t {long('m')}{number}"),
    "flux brokers": lambda line, name, number: line.flux(
        f"ADMIN_REGISTER_BROKER {number + (10**6 if name[0] == 'o' else 1)} {long('host')} 1"
    ),
    "flux leader lists": flux_leaders,
    "flux topics": lambda line, name, number: line.flux(f"ADMIN_CREATE_TOPIC {name}{number} 1000 1"),
    "cursus groups": lambda line, name, number: line.cursus(f"REGISTER_GROUP topic=t group={long(name)}{number}"),
    "cursus members": lambda line, name, number: line.cursus(f"JOIN_GROUP topic=t group={name}{number} member=m"),
    "cursus transactional ids": lambda line, name, number: line.cursus(
        f"INIT_PRODUCER_ID transactional_id={long(name)}{number}"
    ),
    "cursus topic lists": lambda line, name, number: line.cursus(
        f"CREATE topic={name}{number} partitions=1 auth_policy=acl read_acl={'a,' * 8_000}x"
    ),
    "iggy consumers": iggy_consumer,
    "polywire writers": lambda line, name, number: line.polywire(
        Verb.PUBLISH, polywire.Publish(f"{long(name)}{number}", 1, [])
    ),
    "polywire positions": lambda line, name, number: line.polywire(
        Verb.COMMIT, polywire.Commit("t", 0, 0, f"{long(name)}{number}", 5)
    ),
    "polywire groups": lambda line, name, number: line.polywire(
        Verb.JOIN, polywire.Join(f"{long(name)}{number}", "t", "m")
    ),
}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data", "--state-mib", str(STATE_MIB), "--partitions", "1") as broker:
        with Line(broker, "polywire", OTHER) as line:
            assert line.polywire(Verb.CREATE_TOPIC, polywire.CreateTopic("t", 1))
        yield broker


@pytest.mark.parametrize("what", FILLS)
def test_a_hostile_client_is_stopped_and_others_continue(broker: BrokerProcess, what: str) -> None:
    wire, fill = what.split()[0], FILLS[what]
    before = broker.memory_bytes
    with Line(broker, wire, HOSTILE) as hostile:
        taken = next((number for number in range(REQUESTS_MAX) if not fill(hostile, "h", number)), REQUESTS_MAX)
    assert 10 < taken < REQUESTS_MAX
    assert broker.memory_bytes - before < GROWTH_BYTES_MAX * (3 if what == "flux topics" else 1)  # 45,000 partitions
    for number in range(2):
        if number:
            broker.kill()
            broker.start()
        with Line(broker, wire, OTHER) as line:
            assert fill(line, "o", number), "others are locked out"
        with Line(broker, wire, HOSTILE) as hostile:
            assert not fill(hostile, "h", taken), "it may continue"
