"""Hostile requests that the broker acknowledges, each followed by a restart: ``python -m tests.hostile.restarts --count 100000``.

A request of any protocol is damaged, often with corrected checksums, and sent to a broker over a simulated disk. Other clients use the
broker's responses, as in transactions, and replace numbers in them. When the broker has stored something, it is killed or closed and
restarted over the same disk. The start must succeed, every record must be readable, and the next record must be stored. A run is a pure
function of its seed.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

import structlog

from polywire.broker.settings import BrokerSettings, TopicSettings
from polywire.errors import BrokerError
from polywire.log.base import Read
from polywire.log.log import FileLog
from polywire.protocols.kafka.crc32c import crc32c
from polywire.records.batch import validate
from polywire.records.checksum import xxh64
from polywire.records.columns import HEADER_BYTES
from polywire.records.compression import expand_body
from polywire.records.rows import to_records
from polywire.testing.loop import SimulatedClock
from polywire.types import Level, TopicName
from tests.fuzz.chance import damaged
from tests.hostile.dialogues import DIALOGUES, Dialogue
from tests.hostile.exchanges import STREAMS
from tests.sim.chance import Chance
from tests.sim.disk import SimulatedDisk
from tests.sim.log.world import SETTINGS, small_compaction
from tests.sim.story import Story
from tests.sim.tokens import tokens_by
from tests.sim.wires.process import WiresProcess
from tests.unit.protocols.polywire.peer import batch_of

PROTOCOLS: Final = [
    name for name in STREAMS if name != "http"
]  # HTTP needs a real loop; test_conversations covers restarts after it
DISK_BYTES: Final = 64 * 1024 * 1024
LOG: Final = replace(SETTINGS, slot_bytes=256 * 1024, slot_count_min=2, slot_count_max=4, scrub_hours=0)
BROKER: Final = BrokerSettings(producer_window=3).within(LOG.batch_bytes_max)
STEP: Final = 10_000  # restarts between two lines of output
REQUESTS_MAX: Final = 40  # per disk, acknowledged or not: what they leave slows the next start
DIALOGUE_SHARE: Final = 0.2
TOPICS: Final = ("t", "u", "orders")
STEPS_MAX: Final = 200_000  # of one request: a broker that never comes to rest is an error
MAINTENANCE_S: Final = 2.0  # simulated seconds, in which compaction and merging run
BATCH_MAGIC: Final = b"PWB1"
KAFKA_HEADER_BYTES: Final = 61
FIELDS: Final = (
    (8, 4),
    (12, 4),
    (16, 8),
    (24, 4),
    (28, 4),
    (32, 8),
    (40, 8),
    (48, 8),
    (56, 8),
    (64, 8),
    (80, 4),
    (84, 4),
)
"""Position and size of every header field of a stored batch that is no size or checksum."""
KAFKA_FIELDS: Final = ((0, 8), (12, 4), (21, 2), (23, 4), (27, 8), (35, 8), (43, 8), (51, 2), (53, 4), (57, 4))
"""The same of Kafka's record batches."""


@dataclass
class Figures:
    """The figures of a run.

    ``acknowledged`` counts restarts by the protocol or dialogue after which something was stored.
    """

    requests: int = 0
    acknowledged: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def __str__(self) -> str:
        shares = " ".join(f"{name}={number}" for name, number in sorted(self.acknowledged.items()))
        total = self.acknowledged.total()
        return f"{total:,} restarts behind {self.requests:,} requests in {self.seconds:.0f} s, every start succeeded: {shares}"


@dataclass
class Peer:
    """The sending end of a connection. ``answer``: the response."""

    reads = True
    answer: bytes = b""
    is_over: bool = False

    def received(self, data: bytes) -> None:
        """Add to the response."""
        self.answer += data

    def hung_up(self, *, is_aborted: bool) -> None:
        """Note that the broker closed the connection."""
        self.is_over = True


class Victim:
    """A broker over a simulated disk that is restarted repeatedly."""

    def __init__(self, seed: int) -> None:
        self._chance = Chance(seed)
        self._clock = SimulatedClock()
        self._disk = SimulatedDisk(DISK_BYTES, reads_past=True)
        self.process = self._start()
        broker = self.process.broker
        for name in TOPICS:
            settings = TopicSettings(compaction=True) if name == "u" else TopicSettings()
            broker.create_topic(TopicName("default", name), 2, settings)
        broker.create_topic(TopicName("default", "events"), 1, TopicSettings(event_sourcing=True))
        self.rest()

    def _start(self) -> WiresProcess:
        process = WiresProcess(self._disk, LOG, BROKER, self._clock, self._chance, Story())
        process.connections_max = 16
        process.open()
        return process

    @property
    def log(self) -> FileLog:
        """The log of the running process."""
        return self.process.log

    @property
    def stored(self) -> int:
        """Return the number of groups written so far, which grows with everything acknowledged."""
        return int(self.log._writer.sequence)

    def send(self, protocol: str, stream: bytes) -> bytes:
        """Send bytes on a new connection, wait until the broker has nothing left to do, and return the response."""
        peer = Peer()
        link = self.process.accept(peer, protocol)
        while stream and (size := link.free):
            link.send(stream[:size])
            stream = stream[size:]
            self.rest()
        link.cut() if peer.is_over else link.finish()
        self.rest()
        link.cut()  # whatever it still waits for
        self.rest()
        return peer.answer

    def converse(self, dialogue: Dialogue) -> int:
        """Send the requests of a dialogue, each after the previous response; return their number."""
        requests, answer = 0, None
        with suppress(StopIteration):
            while True:
                protocol, stream = next(dialogue) if answer is None else dialogue.send(answer)
                answer = self.send(protocol, stream)
                requests += 1
        return requests

    def rest(self) -> None:
        """Run the broker until nothing happens without time passing."""
        loop = self.process.loop
        for _ in range(STEPS_MAX):
            if not loop.step():
                return
        raise AssertionError(f"the broker did not come to rest steps={STEPS_MAX}")

    def maintain(self) -> None:
        """Let timers run, including compaction, merging and expiry."""
        end = self._clock.monotonic() + MAINTENANCE_S
        while self._clock.monotonic() < end:
            self.process.loop.pass_time(0.25)
            self.rest()

    def restart(self, *, is_killed: bool) -> None:
        """End the process, start another over the same disk and check all it serves. Raises AssertionError."""
        if not is_killed:
            self.process.close()
        self.process.files.faults.dead = True
        self._disk.close_all()
        try:
            self.process = self._start()
        except BrokerError as error:
            raise AssertionError(f"the start failed: {error.message}") from error
        self.rest()
        self._check_records()
        self._check_produce()

    def _check_records(self) -> None:
        for topic in list(self.process.broker.topics()):
            for partition in topic.partitions:
                offset, end = partition.log.first_offset, partition.log.next_offset
                while offset < end:
                    found = self.process.read(partition.incarnation, offset)
                    assert isinstance(found, Read), (
                        f"a record cannot be read topic={topic.name} offset={offset}: {found}"
                    )
                    assert found.next_offset > offset, f"a read makes no progress topic={topic.name} offset={offset}"
                    check_batches(b"".join(bytes(chunk) for chunk in found.chunks))
                    found.pin.release()
                    offset = found.next_offset

    def _check_produce(self) -> None:
        """Store one more record, synced."""
        broker = self.process.broker
        topic = broker.find_topic(TOPICS[0]) or broker.create_topic(TopicName("default", TOPICS[0]), 1)
        answers: list[int | BrokerError] = []
        if topic.settings.link:  # a request made it the copy of a link, which the next one may end
            broker.link_topic(topic, "", done=None)
        broker.produce(topic.partitions[0], batch_of(b"after"), level=Level.SYNCED, done=answers.append)
        self.process.until(lambda: answers)
        assert isinstance(answers[0], int), f"a record cannot be stored after the restart: {answers[0]}"


def check_batches(stored: bytes) -> None:
    """Check that stored batches are complete and decodable."""
    at = 0
    while at < len(stored):
        length = int.from_bytes(stored[at + 4 : at + 8], "little")
        batch = expand_body(stored[at : at + length])
        validate(batch)
        to_records(batch)
        at += length


# Damage


def with_odd_number(stream: bytearray, at: int, size: int, chance: random.Random) -> None:
    """Write an extreme number at a position."""
    top = 1 << (8 * size - 1)
    number = chance.choice((0, 1, 2, 7, top - 1, top, 2 * top - 1, 2 * top - 2, chance.randrange(2 * top)))
    stream[at : at + size] = number.to_bytes(size, chance.choice(("little", "big")))


def stored_batches(stream: bytes) -> Iterator[tuple[int, int]]:
    """Yield the position and length of the stored batches in a stream."""
    at = stream.find(BATCH_MAGIC)
    while at >= 0:
        length = int.from_bytes(stream[at + 4 : at + 8], "little")
        if HEADER_BYTES <= length <= len(stream) - at:
            yield at, length
        at = stream.find(BATCH_MAGIC, at + 4)


def kafka_batches(stream: bytes) -> Iterator[tuple[int, int]]:
    """Yield the position and length of Kafka's record batches in a stream."""
    for at in range(len(stream) - KAFKA_HEADER_BYTES):
        if stream[at + 16] != 2:
            continue
        length = 12 + int.from_bytes(stream[at + 8 : at + 12])
        checksum = int.from_bytes(stream[at + 17 : at + 21])
        if KAFKA_HEADER_BYTES <= length <= len(stream) - at and crc32c(stream[at + 21 : at + length]) == checksum:
            yield at, length


def resealed(stream: bytearray, *, batches_of: bytes) -> bytes:
    """Return the stream with corrected checksums of its batches; ``batches_of``: the unchanged stream."""
    for at, _ in stored_batches(batches_of):
        stream[at + 96 : at + HEADER_BYTES] = xxh64(bytes(stream[at : at + 96])).to_bytes(8, "little")
    for at, length in kafka_batches(batches_of):
        stream[at + 17 : at + 21] = crc32c(bytes(stream[at + 21 : at + length])).to_bytes(4)
    return bytes(stream)


def with_odd_headers(stream: bytes, chance: random.Random) -> bytes:
    """Write extreme numbers into the headers of batches, and correct their checksums."""
    found = bytearray(stream)
    fields = [(at, FIELDS) for at, _ in stored_batches(stream)] + [
        (at, KAFKA_FIELDS) for at, _ in kafka_batches(stream)
    ]
    for at, known in fields:
        for _ in range(chance.randrange(1, 3)):
            place, size = chance.choice(known)
            with_odd_number(found, at + place, size, chance)
    return resealed(found, batches_of=stream)


def with_odd_numbers(stream: bytes, chance: random.Random) -> bytes:
    """Write an extreme number anywhere."""
    found = bytearray(stream)
    size = chance.choice((1, 2, 4, 8))
    if len(found) > size:
        with_odd_number(found, chance.randrange(len(found) - size), size, chance)
    return bytes(found)


def unharmed(stream: bytes, chance: random.Random) -> bytes:
    """Leave a request unchanged."""
    return stream


def flipped(stream: bytes, chance: random.Random) -> bytes:
    """Flip, remove and insert bytes."""
    return damaged(stream, chance, times_max=2)


DAMAGES: Final[tuple[Callable[[bytes, random.Random], bytes], ...]] = (
    with_odd_headers,
    with_odd_headers,
    with_odd_numbers,
    flipped,
    unharmed,
)


# Runs


def run(seeds: Iterator[int], *, count_min: int) -> Figures:
    """Restart until that many requests were acknowledged. Raises AssertionError with the seed of the failing disk."""
    figures, begun = Figures(), time.monotonic()
    while figures.acknowledged.total() < count_min:
        seed = next(seeds)
        try:
            with small_compaction(), tokens_by(Chance(seed)):
                _run_disk(seed, figures)
        except Exception as error:
            raise AssertionError(f"seed={seed} {error!r}; repeat with --seed {seed} --count 1") from error
    figures.seconds = time.monotonic() - begun
    return figures


def _run_disk(seed: int, figures: Figures) -> None:
    chance = random.Random(seed)
    victim = Victim(seed)
    for _ in range(REQUESTS_MAX):
        before = victim.stored
        if chance.random() < DIALOGUE_SHARE:
            begin = chance.choice(DIALOGUES)
            name = begin.__name__
            figures.requests += victim.converse(begin(chance))
        else:
            name = chance.choice(PROTOCOLS)
            victim.send(name, chance.choice(DAMAGES)(STREAMS[name](chance), chance))
            figures.requests += 1
        if victim.stored == before:
            continue
        if chance.random() < 0.2:
            victim.maintain()
        victim.restart(is_killed=chance.random() < 0.8)
        figures.acknowledged[name] += 1


def main() -> int:
    """Run, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.restarts", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="acknowledged requests, each followed by a restart")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of the first disk")
    asked = parser.parse_args()
    print(f"seed={asked.seed}", flush=True)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    seeds = count(asked.seed)
    for done in range(0, asked.count, STEP):
        print(run(seeds, count_min=min(STEP, asked.count - done)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
