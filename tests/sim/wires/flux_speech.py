"""A client of the FLUX protocol, over the client's side of its codec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from polywire.client.flux import Reply, items, number, parse_reply, read_records, split_consumed
from polywire.errors import Conflict
from polywire.records.partitioner import partition_of
from polywire.types import KeyHash, Level
from tests.sim.promises import require
from tests.sim.wires.group_ledger import GROUP, TOPIC, Membership
from tests.sim.wires.ledger import NOWHERE, TOPICS, Owner, Place
from tests.sim.wires.speech import GROUP_ACTS, Answer, Speech, Words

# texts, because the protocol has one code for both
LATER: Final = ("disk is full", "the log has no room", "too much waits")


def keys_of(kind: KeyHash) -> dict[Place, bytes]:
    """Return a key for each partition, for protocols in which keys choose the partition."""
    found: dict[Place, bytes] = {}
    for name, count in TOPICS.items():
        for digit in b"0123456789":
            key = bytes((digit,))
            found[name, partition_of(key, count, kind)] = key
    return found


KEYS: Final = keys_of(KeyHash.FNV32)


class FluxSpeech(Speech):
    """One line per record, whose key chooses the partition. Implements ``Speech``."""

    words = Words("flux", GROUP_ACTS | {"produce", "fetch", "ping"}, records_max=1, is_text=True, reads_all=True)

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._asked: dict[int, tuple[str, Place, int, str]] = {}

    def _request(
        self, number: int, command: str, place: Place, arguments: bytes, *, offset: int = 0, name: str = ""
    ) -> bytes:
        self._asked[number] = command, place, offset, name
        return b"V1|%d|%b|%b\n" % (number, command.encode(), arguments)

    def level(self, level: Level) -> Level:
        return Level.WRITTEN  # acks=all waits for other brokers

    def spelled(self, value: bytes) -> bytes:
        text = value.decode("utf-8", "surrogateescape")
        odd = [char < " " or char == "\x7f" or "\udc80" <= char <= "\udcff" for char in text]
        if not any(odd) and " hw=" not in text:
            return value
        found = bytearray()
        for at, (char, is_odd) in enumerate(zip(text, odd, strict=True)):
            raw = char.encode("utf-8", "surrogateescape")
            is_odd = is_odd or char == "%" or text.startswith(" hw=", at)
            found += b"%%%02X" % raw[0] if is_odd else raw
        return bytes(found)

    def produce(
        self, number: int, place: Place, values: Sequence[bytes], level: Level, sequence: tuple[int, int] | None
    ) -> bytes:
        [value] = values
        record = b"%b %b:%b" % (place[0].encode(), KEYS[place], value)
        return self._request(number, "PRODUCE", place, record + b" acks=1" * (number % 2))

    def fetch(self, number: int, place: Place, offset: int, wait_ms: int) -> bytes:
        return self._request(
            number, "CONSUME", place, b"%b %d %d" % (place[0].encode(), place[1], offset), offset=offset
        )

    def position(self, number: int, owner: Owner, place: Place) -> bytes:
        arguments = b"%b %b %d" % (owner[1].encode(), place[0].encode(), place[1])
        return self._request(number, "OFFSET", place, arguments)

    def join(self, number: int, name: str) -> bytes:
        return self._request(number, "JOIN", NOWHERE, f"{GROUP[1]} {TOPIC} {name}".encode(), name=name)

    def _as_member(self, number: int, command: str, place: Membership, arguments: str = "") -> bytes:
        words = f"{GROUP[1]} {TOPIC} {place.name} {place.generation}{arguments}".encode()
        return self._request(number, command, NOWHERE, words, name=place.name)

    def stay(self, number: int, place: Membership) -> bytes:
        return self._as_member(number, "SYNC", place)

    def leave(self, number: int, place: Membership) -> bytes:
        return self._as_member(number, "LEAVE", place)

    def move(self, number: int, place: Membership, partition: int, offset: int) -> bytes:
        return self._as_member(number, "COMMIT", place, f" {partition} {offset}")

    def ping(self, number: int) -> bytes:
        return self._request(number, "PING", NOWHERE, b"")

    def take(self, data: bytes) -> Iterator[Answer]:
        buffer = self._buffer
        buffer += data
        while (end := buffer.find(b"\n") + 1) > 0:
            reply = parse_reply(bytes(buffer[: end - 1]))
            del buffer[:end]
            asked = self._asked.pop(int(reply.id), None)
            require(asked is not None, "an answer is to a request", number=reply.id)
            assert asked is not None, "it was looked at"
            yield _answer(reply, *asked)


def _answer(reply: Reply, command: str, place: Place, offset: int, name: str) -> Answer:
    own, error = int(reply.id), reply.error
    if error is not None:
        later, is_fenced = error.message.startswith(LATER), isinstance(error, Conflict)
        return Answer(own, error=error.message, later=later, is_fenced=is_fenced)
    if command in ("JOIN", "SYNC"):
        partitions = tuple(map(int, items(reply.payload, b"assigned")))
        return Answer(own, place=Membership(name, number(reply.payload, b"generation"), partitions))
    if command == "OFFSET":
        return Answer(own, offset=number(reply.payload, b"offset") or None)
    if command == "PRODUCE":
        partition = number(reply.payload, b"partition")
        require(partition == place[1], "a key chooses a partition", place=place, found=partition)
        return Answer(own, offset=number(reply.payload, b"offset"))
    if command == "CONSUME":
        batch = read_records(*split_consumed(reply.payload, offset))
        records = [(batch.first + index, value) for index, value in enumerate(batch.values)]
        return Answer(own, offset=batch.next if records else offset, records=records)
    return Answer(own)
