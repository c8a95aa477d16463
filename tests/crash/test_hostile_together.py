"""Hostile clients of all protocols at once against one broker: together they must stay within the memory limit.

Memory is the process's peak resident size, including the mapped journal.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from polywire.build_info import compiled_modules
from polywire.client.sync import SyncClient
from polywire.protocols.cursus.compression import algorithm
from polywire.protocols.cursus.messages import frame
from polywire.protocols.iggy import client_codec
from polywire.protocols.iggy.messages import HEAD, U32, Code, Consumer
from polywire.protocols.kafka07.compression import EXPANDED_BYTES_MAX, wrap
from polywire.protocols.kafka07.messages import (
    CompressionCodec,
    encode_fetch,
    encode_message,
    encode_offsets,
    encode_produce,
    encode_set,
)
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import PREFIX, encode_head
from polywire.protocols.polywire.messages import Verb
from polywire.records.columns import Record
from tests.broker_process import BrokerProcess
from tests.crash.test_hostile_peers import MEMORY_MB_MAX, GoodClient, RawPeer, memory_mb, record_batch

ATTACK_S = 8.0
FLOOD_S = 0.7
CACHE_MB = 64  # of stored records; they would fill the default 512 MiB, as quickly as the machine stores them
# Kafka 0.7 requests can be that long, and one request of any protocol may exceed the shared limit. While it is stored, one
# more may be decompressed. The peak does not depend on the length of the attack: 615 MB after 8 s, 585 MB after 40 s.
REQUEST_MB_MAX = 100
SMALL_MB = 256
HELD_CONNECTIONS = 50  # per protocol, 300 in all, each with a large incomplete request
TOPIC = b"large"
IGGY_TOPIC = client_codec.ident("default") + client_codec.ident("large")
VALUES = [bytes(900)] * 1_000
# Uncompiled code handles each record in Python; requests of the maximum length would take minutes each.
COMPILED = all(compiled_modules().values())
RECORDS = 3_900_000 if COMPILED else 20_000
IGGY_MESSAGES = 1_300_000 if COMPILED else 10_000

Attack = Callable[[BrokerProcess], None]


def flood(broker: BrokerProcess, wire: str, request: bytes) -> None:
    """Send requests repeatedly and read no response."""
    with RawPeer(broker, wire) as peer:
        peer.flood(request, FLOOD_S)


def send(broker: BrokerProcess, wire: str, data: bytes) -> None:
    """Send one request on a new connection, and read the response if there is one."""
    with RawPeer(broker, wire) as peer:
        peer.send(data)
        peer.socket.recv(65_536)


def poll(kind: int, count: int) -> bytes:
    at = client_codec.place(Consumer(group=False, identifier=1), IGGY_TOPIC, 1)
    return client_codec.request(Code.POLL, client_codec.poll(at, kind, 0, count))


def iggy_messages(count: int) -> bytes:
    message = bytes(20) + U32.pack(1) + b"x"
    return client_codec.request(Code.SEND, IGGY_TOPIC + client_codec.to_partition(2) + message * count)


def attacks() -> list[Attack]:
    """Return the attacks, each repeated by its own thread."""
    fetch = encode_head(Verb.FETCH, 1, messages.Fetch("large", 0, 0)) * 100
    topics = encode_head(Verb.BOUNDS, 1, messages.AskBounds(["large"])) * 1_000
    many = record_batch(RECORDS)
    produce = encode_head(Verb.PRODUCE, 1, messages.Produce("many", 0, create=True), payload_bytes=len(many)) + many
    bombs = [frame(algorithm(name).compress(bytes(60 << 20))) for name in ("gzip", "lz4", "xerial")]
    bomb = wrap(encode_message(bytes(EXPANDED_BYTES_MAX)), CompressionCodec.GZIP)
    nested = encode_produce(TOPIC, 0, wrap(wrap(bomb, CompressionCodec.GZIP) * 40, CompressionCodec.GZIP))
    stream = frame(b"STREAM topic=large partition=0 group=g offset=0")
    return [
        lambda broker: flood(broker, "flux", b"V1|1|ADMIN_GET_METADATA|\n" * 1_000),
        lambda broker: flood(broker, "flux", b"V1|1|CONSUME|large 0 0\n" * 1_000),
        lambda broker: flood(broker, "polywire", fetch),
        lambda broker: flood(broker, "polywire", topics),
        lambda broker: send(broker, "polywire", produce),
        lambda broker: flood(broker, "cursus", frame(b"CONSUME topic=large partition=0 offset=0 member=m") * 100),
        lambda broker: flood(broker, "cursus", stream),
        *(lambda broker, data=data: send(broker, "cursus", data) for data in bombs),
        lambda broker: flood(broker, "iggy", poll(1, 1_000) * 100),
        lambda broker: send(broker, "iggy", iggy_messages(IGGY_MESSAGES)),
        lambda broker: flood(broker, "kafka07", encode_fetch(TOPIC, 0, 0, 64 << 20) * 100),
        lambda broker: send(broker, "kafka07", nested),
    ]


def unfinished(wire: str) -> bytes:
    """Return the beginning of a request of the maximum length."""
    begun = {
        "flux": b"V1|1|PRODUCE|large k:",
        "cursus": (64 << 20).to_bytes(4, "big") + b"\xba\x7c\x00\x05large",
        "iggy": HEAD.pack(31 << 20, Code.SEND),
        "kafka": (31 << 20).to_bytes(4, "big") + b"\0\0\0\x09\0\0\0\x01\xff\xff\0",
        "kafka07": ((16 << 20) - 4).to_bytes(4, "big") + b"\0\0",
        "polywire": PREFIX.pack(16 << 20, Verb.PRODUCE, 0, 0, 1, 16),
    }[wire]
    return begun + b"x" * (60_000 if wire == "flux" else 400_000)


def stall(broker: BrokerProcess) -> list[RawPeer]:
    """Open connections of every protocol that each hold a large incomplete request, as far as the broker accepts it."""
    held = []
    for wire in [wire for wire in broker.addresses for _ in range(HELD_CONNECTIONS)]:
        peer = RawPeer(broker, wire)
        peer.socket.settimeout(FLOOD_S)
        with suppress(OSError):
            peer.send(unfinished(wire))
        held.append(peer)
    return held


class Attacker(threading.Thread):
    """Repeats an attack; the broker may close its connections at any time."""

    def __init__(self, attack: Attack, broker: BrokerProcess, end: float) -> None:
        super().__init__(daemon=True)
        self.turns = 0
        self._attack = attack
        self._broker = broker
        self._end = end

    def run(self) -> None:
        while time.monotonic() < self._end:
            with suppress(OSError, EOFError):
                self._attack(self._broker)
            self.turns += 1


def fill(broker: BrokerProcess) -> None:
    """Fill a topic with about 45 MB."""
    with socket.create_connection(broker.addresses["kafka07"], timeout=60) as peer:
        produce = encode_produce(TOPIC, 0, encode_set(VALUES))
        for _ in range(50):
            peer.sendall(produce)
        peer.sendall(encode_offsets(TOPIC, 0, -1, 1))
        assert peer.recv(100)


def attack(broker: BrokerProcess) -> tuple[list[int], int]:
    """Run all attacks at once for a while; return how often each ran, and the broker's peak memory."""
    held = stall(broker)
    attackers = [Attacker(attack, broker, time.monotonic() + ATTACK_S) for attack in attacks()]
    for attacker in attackers:
        attacker.start()
    own = 0
    while any(attacker.is_alive() for attacker in attackers):
        own = max(own, broker.memory_bytes)
        time.sleep(0.05)
    for peer in held:
        peer.socket.close()
    return [attacker.turns for attacker in attackers], own


@pytest.mark.slow
def test_all_protocols_at_once_stay_within_the_memory_limit(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", "--cache-mib", str(CACHE_MB)) as broker:
        fill(broker)
        with GoodClient(broker) as good:
            turns, own = attack(broker)
            served = len(good.times)
            good.wait(served + 10)
        assert not good._failures
        peak = memory_mb(broker)
        print(
            f"peak {peak} MB, of its own {own >> 20} MB; attacks {turns}, {served} requests of others served meanwhile,"
            f" for one of them the loop was busy for {max(good.times):.2f} s"
        )
        log = broker.log_text()
        assert not [word for word in ("Traceback", "level=error", "level=critical") if word in log], log
        assert all(turns)
        assert peak < MEMORY_MB_MAX + CACHE_MB + 2 * REQUEST_MB_MAX
        assert broker.stop() == 0


@pytest.mark.slow
def test_the_smallest_budget_is_enough_for_a_full_load(tmp_path: Path) -> None:
    records = [Record(bytes(1_000))] * 4_000
    options = "--memory-mib", str(SMALL_MB)
    with BrokerProcess(tmp_path / "data", *options, wires=("polywire",)) as broker, SyncClient(broker.url()) as client:
        client.create_topic("full", 1)
        for _ in range(100):
            client.produce("full", records)
        assert len(client.fetch("full", 0, 0)) > 0
        assert memory_mb(broker) < SMALL_MB
