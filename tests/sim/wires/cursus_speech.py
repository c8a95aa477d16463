"""Clients of the Cursus protocol, over the client's side of its codec.

They use the dialects of its SDKs and of the older API reference. Batches of one producer have consecutive sequences
over all of its connections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from polywire.client.cursus import decode_batch, encode_batch, error_of, fields, last_offset, number, numbers
from polywire.errors import BrokerError, ErrorCode
from polywire.protocols.cursus.messages import decoded, enveloped, frame
from polywire.records.columns import Record
from polywire.types import Level
from tests.sim.wires.group_ledger import GROUP, TOPIC, Membership
from tests.sim.wires.ledger import Owner, Place
from tests.sim.wires.ordered_speech import Marks, OrderedSpeech, Request, framed_end
from tests.sim.wires.speech import ACTS, GAP, GROUP_ACTS, Answer, Words

ACKS: Final = {Level.MEMORY: "0", Level.WRITTEN: "1", Level.SYNCED: "-1"}
LATER: Final = ("disk is full", "the log has no room", "too much waits", "broker_busy")
GAPS: Final = ("idempotency gap", "must have seqNum 1")
FENCED: Final = ("GEN_MISMATCH", "NOT_OWNER", "member_not_found", "group_not_found", "offset_regression")
PARTIAL: Final = b'"status":"PARTIAL"'
HELP: Final = b"Available commands:"
VALUE_HEAD_BYTES: Final = 4  # of each value, where offsets count bytes


def _refused(own: int, error: str) -> Answer:
    is_gap = any(text in error for text in GAPS)
    later, is_fenced = any(text in error for text in LATER), error.startswith(FENCED)
    return Answer(own, error=GAP if is_gap else error, later=later, is_fenced=is_fenced)


@dataclass(slots=True)
class Producer:
    """A producer with a name of its own. sequences: the last one by partition."""

    name: str
    number: int = 0
    sequences: dict[Place, int] = field(default_factory=dict)


class CursusSpeech(OrderedSpeech):
    """Batches of idempotent producers, and commands with keys and values. Implements ``Speech``."""

    words = Words("cursus", ACTS | GROUP_ACTS, tells_repeats=False, goes_back=False)

    def __init__(self, producer: Producer) -> None:
        super().__init__()
        self._producer = producer

    def _command(self, request: Request, text: str) -> bytes:
        return self._ask(request, frame(enveloped("", text.encode())))

    def sequence(self, place: Place, count: int) -> tuple[int, int] | None:
        last = self._producer.sequences.get(place, 0)
        self._producer.sequences[place] = last + count
        return self._producer.number, last + 1

    def give_up(self) -> None:
        self._producer.number += 1
        self._producer.sequences.clear()

    def produce(
        self, number: int, place: Place, values: Sequence[bytes], level: Level, sequence: tuple[int, int] | None
    ) -> bytes:
        producer, first = sequence or (0, 0)
        records = [Record(value, sequence=first + index) for index, value in enumerate(values)]
        name = f"{self._producer.name}-{producer}".encode()
        body = encode_batch(place[0], place[1], ACKS[level], records, producer=name)
        return self._ask(Request(number, "produce", place, len(values)), frame(body))

    def fetch(self, number: int, place: Place, offset: int, wait_ms: int) -> bytes:
        at = f"topic={place[0]} partition={place[1]} offset={offset} member=m wait_ms={wait_ms}"
        return self._command(Request(number, "fetch", place, offset), f"CONSUME {at}")

    def commit(self, number: int, owner: Owner, place: Place, offset: int) -> bytes:
        return self._command(Request(number, "commit"), f"COMMIT {place[0]} {owner[1]} {place[1]} {offset}")

    def position(self, number: int, owner: Owner, place: Place) -> bytes:
        at = f"topic={place[0]} partition={place[1]} group={owner[1]}"
        return self._command(Request(number, "position"), f"FETCH_OFFSET {at}")

    def join(self, number: int, name: str) -> bytes:
        at = f"topic={TOPIC} group={GROUP[1]} member={name}"
        return self._command(Request(number, "join"), f"JOIN_GROUP {at}")

    def _as_member(self, number: int, act: str, command: str, place: Membership) -> bytes:
        at = f"topic={TOPIC} group={GROUP[1]} member={place.name} generation={place.generation}"
        return self._command(Request(number, act, name=place.name), f"{command} {at}")

    def stay(self, number: int, place: Membership) -> bytes:
        return self._as_member(number, "join", "SYNC_GROUP", place)

    def leave(self, number: int, place: Membership) -> bytes:
        return self._as_member(number, "leave", "LEAVE_GROUP", place)

    def move(self, number: int, place: Membership, partition: int, offset: int) -> bytes:
        return self._as_member(number, "move", f"COMMIT_OFFSET partition={partition} offset={offset}", place)

    def ping(self, number: int) -> bytes:
        return self._command(Request(number, "ping"), "PROTOCOL_INFO")

    def _end(self, buffer: bytearray) -> int:
        return framed_end(buffer)

    def _answer(self, request: Request, reply: bytes) -> Answer:
        own, body = request.number, reply[4:]
        try:
            if request.act == "produce":
                return Answer(own, offset=last_offset(body) + 1 - request.offset)
            if body.startswith(b"ERROR:"):
                raise error_of(decoded(body))
        except BrokerError as error:
            if PARTIAL in body:
                return Answer(own, error=error.message, later=True, is_partial=True)
            if request.act == "position" and error.code is ErrorCode.GROUP_MISSING:
                return Answer(own)
            return _refused(own, error.message)
        if request.act == "fetch":
            records = [(record.offset, record.value) for record in decode_batch(body)]
            return Answer(own, offset=records[-1][0] + 1 if records else request.offset, records=records)
        if request.act == "join":
            reported = fields(body)
            partitions = numbers(reported, "assignments")
            return Answer(own, place=Membership(reported["member"], number(reported, "generation"), partitions))
        if request.act == "position":
            return Answer(own, offset=number(fields(body), "offset") or None)
        return Answer(own)


class CursusApiSpeech(OrderedSpeech):
    """One record per command, to the only partition of a topic, and reads by byte offset. Implements ``Speech``."""

    words = Words(
        "cursus",
        frozenset({"produce", "fetch", "commit", "ping"}),
        places=(("b", 0),),
        records_max=1,
        tells_offsets=False,
        goes_back=False,
    )

    def __init__(self) -> None:
        super().__init__()
        self._marks = Marks()
        self._values: list[bytes] = []
        """Of the response that has begun."""

    @staticmethod
    def _enveloped(command: bytes) -> bytes:
        return frame(enveloped("admin", command))

    def level(self, level: Level) -> Level:
        return Level.WRITTEN

    def produce(
        self, number: int, place: Place, values: Sequence[bytes], level: Level, sequence: tuple[int, int] | None
    ) -> bytes:
        [value] = values
        command = b"PUBLISH %b %b" % (place[0].encode(), value)
        return self._ask(Request(number, "produce", place), self._enveloped(command))

    def fetch(self, number: int, place: Place, offset: int, wait_ms: int) -> bytes:
        known, address = self._marks.nearest(place, offset)
        command = f"CONSUME {place[0]} {place[1]} {address}".encode()
        asked = self._enveloped(command) + self._enveloped(b"HELP")  # its response follows the last value
        return self._ask(Request(number, "fetch", place, known, address), asked)

    def commit(self, number: int, owner: Owner, place: Place, offset: int) -> bytes:
        command = f"COMMIT {place[0]} {owner[1]} {place[1]} {offset}".encode()
        return self._ask(Request(number, "commit"), frame(enveloped("", command)))

    def ping(self, number: int) -> bytes:
        return self._ask(Request(number, "ping"), self._enveloped(b"HELP"))

    def _end(self, buffer: bytearray) -> int:
        return framed_end(buffer)

    def _answer(self, request: Request, reply: bytes) -> Answer | None:
        own, body = request.number, reply[4:]
        if request.act != "fetch":
            return _refused(own, decoded(body)) if body.startswith(b"ERROR:") else Answer(own)
        if not body.startswith(HELP):
            self._values.append(body)
            return None
        values, self._values = self._values, []
        if values and values[-1].startswith(b"ERROR:"):
            return _refused(own, decoded(values[-1]))
        records = [(request.offset + index, value) for index, value in enumerate(values)]
        end = request.offset + len(values)
        self._marks.note(request.place, end, request.address + sum(VALUE_HEAD_BYTES + len(value) for value in values))
        return Answer(own, offset=end if records else None, records=records)
