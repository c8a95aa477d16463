"""A client of the Iggy protocol in its documented dialect, over the client's side of its codec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from polywire.protocols.iggy import client_codec
from polywire.protocols.iggy.client_codec import ident, request
from polywire.protocols.iggy.messages import HEAD, U64, Code, Consumer
from polywire.records.columns import Record
from polywire.types import DEFAULT_STREAM, Level, PositionKind
from tests.sim.wires.ledger import Owner, Place
from tests.sim.wires.ordered_speech import OrderedSpeech, Request
from tests.sim.wires.speech import Answer, Words

READER: Final = Consumer(group=False, identifier=99)
LATER: Final = 1  # the status of errors without a number of their own
RECORDS_MAX: Final = 1_000  # of one poll
FROM_OFFSET: Final = 1


def _topic(place: Place) -> bytes:
    return ident(DEFAULT_STREAM) + ident(place[0])


def _at(consumer: Consumer, place: Place) -> bytes:
    return client_codec.place(consumer, _topic(place), place[1] + 1)


class IggySpeech(OrderedSpeech):
    """Positions belong to a consumer and are the last offset read. Implements ``Speech``."""

    words = Words("iggy", tells_offsets=False, positions=PositionKind.CONSUMER, positions_within=True)

    def level(self, level: Level) -> Level:
        return Level.WRITTEN

    def produce(
        self, number: int, place: Place, values: Sequence[bytes], level: Level, sequence: tuple[int, int] | None
    ) -> bytes:
        records = client_codec.messages([Record(value) for value in values])
        body = _topic(place) + client_codec.to_partition(place[1] + 1) + records
        return self._ask(Request(number, "produce", place), request(Code.SEND, body))

    def fetch(self, number: int, place: Place, offset: int, wait_ms: int) -> bytes:
        body = client_codec.poll(_at(READER, place), FROM_OFFSET, offset, RECORDS_MAX)
        return self._ask(Request(number, "fetch", place, offset), request(Code.POLL, body))

    def commit(self, number: int, owner: Owner, place: Place, offset: int) -> bytes:
        body = _at(Consumer(group=False, identifier=int(owner[1])), place) + U64.pack(offset - 1)
        return self._ask(Request(number, "commit"), request(Code.STORE_OFFSET, body))

    def position(self, number: int, owner: Owner, place: Place) -> bytes:
        body = _at(Consumer(group=False, identifier=int(owner[1])), place)
        return self._ask(Request(number, "position"), request(Code.GET_OFFSET, body))

    def ping(self, number: int) -> bytes:
        return self._ask(Request(number, "ping"), request(Code.PING))

    def _end(self, buffer: bytearray) -> int:
        if len(buffer) < HEAD.size:
            return 0
        end = HEAD.size + int(HEAD.unpack_from(buffer)[1])
        return end if len(buffer) >= end else 0

    def _answer(self, request: Request, reply: bytes) -> Answer:
        status, payload = HEAD.unpack_from(reply)[0], reply[HEAD.size :]
        if status:
            return Answer(request.number, error=f"status={status}", later=status == LATER)
        if request.act == "fetch":
            records = [(record.offset, record.value) for record in client_codec.read_polled(payload).records]
            end = records[-1][0] + 1 if records else request.offset
            return Answer(request.number, offset=end, records=records)
        if request.act == "position":
            last = client_codec.read_offset(payload)[2]
            return Answer(request.number, offset=last + 1 if last else None)
        return Answer(request.number)
