"""A client of the Kafka 0.7 protocol, over the client's side of its codec.

The answer to a later request shows that earlier produced records are stored.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Final

from polywire.protocols.kafka07.messages import (
    LATEST,
    MAGIC_1,
    encode_fetch,
    encode_offsets,
    encode_produce,
    encode_set,
    parse_error,
)
from polywire.types import Level
from tests.sim.promises import require
from tests.sim.wires.ledger import TOPICS, Place
from tests.sim.wires.ordered_speech import Marks, OrderedSpeech, Request, framed_end
from tests.sim.wires.speech import Answer, Words

FETCH_BYTES: Final = 64 * 1024
HEAD_BYTES: Final = 10  # of a message of magic 1


class Kafka07Speech(OrderedSpeech):
    """Implements ``Speech``."""

    words = Words("kafka07", frozenset({"produce", "fetch", "ping"}), tells_offsets=False, hangs_up=True)

    def __init__(self) -> None:
        super().__init__()
        self._marks = Marks()

    def level(self, level: Level) -> Level:
        return Level.WRITTEN

    def produce(
        self, number: int, place: Place, values: Sequence[bytes], level: Level, sequence: tuple[int, int] | None
    ) -> bytes:
        topic = place[0].encode()
        sent = encode_produce(topic, place[1], encode_set(values))
        return self._ask(Request(number, "produce", place), sent + encode_offsets(topic, place[1], LATEST, 1))

    def fetch(self, number: int, place: Place, offset: int, wait_ms: int) -> bytes:
        known, address = self._marks.nearest(place, offset)
        frame = encode_fetch(place[0].encode(), place[1], address, FETCH_BYTES)
        return self._ask(Request(number, "fetch", place, known, address), frame)

    def ping(self, number: int) -> bytes:
        return self._ask(Request(number, "ping"), encode_offsets(next(iter(TOPICS)).encode(), 0, LATEST, 1))

    def _end(self, buffer: bytearray) -> int:
        return framed_end(buffer)

    def _answer(self, request: Request, reply: bytes) -> Answer:
        code = parse_error(reply, 4)
        if code:
            return Answer(request.number, error=f"code={code}")
        if request.act != "fetch":
            return Answer(request.number)
        values = list(_values(reply[6:]))
        records = [(request.offset + index, value) for index, value in enumerate(values)]
        end = request.offset + len(values)
        self._marks.note(request.place, end, request.address + sum(HEAD_BYTES + len(value) for value in values))
        return Answer(request.number, offset=end if records else None, records=records)


def _values(data: bytes) -> Iterator[bytes]:
    """Yield the values of a plain message set; the last message may be cut."""
    at = 0
    while len(data) - at >= HEAD_BYTES and (end := at + 4 + int.from_bytes(data[at : at + 4], "big")) <= len(data):
        value, crc = data[at + HEAD_BYTES : end], int.from_bytes(data[at + 6 : at + HEAD_BYTES], "big")
        require(data[at + 4] == MAGIC_1 and not data[at + 5], "a message is plain", head=data[at : at + 6])
        require(zlib.crc32(value) == crc, "a message is whole", value=value[:40])
        yield value
        at = end
