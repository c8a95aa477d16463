"""A client of the `polywire` protocol, over its codec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polywire.errors import Conflict, Denied, Missing
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.arguments import KINDS
from polywire.protocols.polywire.codec import (
    ERROR,
    MAGIC,
    MORE,
    PREFIX_BYTES,
    decode_answer,
    decode_answer_prefix,
    encode_head,
)
from polywire.protocols.polywire.errors import KINDS as KINDS_OF_ERRORS
from polywire.protocols.polywire.messages import Head, Verb
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level
from tests.sim.log.client import records_of
from tests.sim.promises import require
from tests.sim.wires.group_ledger import GROUP, TOPIC, Membership
from tests.sim.wires.ledger import Owner, Place
from tests.sim.wires.speech import ACTS, GROUP_ACTS, Answer, Speech, Words

RETRY_LATER = 2
FENCED = (KINDS_OF_ERRORS[Conflict], KINDS_OF_ERRORS[Missing])


class PolywireSpeech(Speech):
    """Implements ``Speech``."""

    words = Words("polywire", ACTS | GROUP_ACTS, is_ordered=False)

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._greeted = False
        self._names: dict[int, str] = {}

    def greeting(self) -> bytes:
        return MAGIC

    def produce(
        self, number: int, place: Place, values: Sequence[bytes], level: Level, sequence: tuple[int, int] | None
    ) -> bytes:
        batch = bytes(from_records([Record(value) for value in values]))
        head = messages.Produce(*place, level=int(level))
        return encode_head(Verb.PRODUCE, number, head, payload_bytes=len(batch)) + batch

    def fetch(self, number: int, place: Place, offset: int, wait_ms: int) -> bytes:
        return encode_head(Verb.FETCH, number, messages.Fetch(*place, offset, wait_ms=wait_ms))

    def commit(self, number: int, owner: Owner, place: Place, offset: int) -> bytes:
        return encode_head(Verb.COMMIT, number, messages.Commit(*place, KINDS.index(owner[0]), owner[1], offset))

    def position(self, number: int, owner: Owner, place: Place) -> bytes:
        return encode_head(Verb.POSITION, number, messages.AskPosition(*place, KINDS.index(owner[0]), owner[1]))

    def join(self, number: int, name: str) -> bytes:
        self._names[number] = name
        return encode_head(Verb.JOIN, number, messages.Join(GROUP[1], TOPIC, name))

    def _as_member(self, number: int, verb: Verb, place: Membership) -> bytes:
        self._names[number] = place.name
        return encode_head(verb, number, messages.Member(GROUP[1], TOPIC, place.name, place.generation))

    def stay(self, number: int, place: Membership) -> bytes:
        return self._as_member(number, Verb.HEARTBEAT if number % 2 else Verb.SYNC, place)

    def leave(self, number: int, place: Membership) -> bytes:
        return self._as_member(number, Verb.LEAVE, place)

    def move(self, number: int, place: Membership, partition: int, offset: int) -> bytes:
        kind, owner = KINDS.index(GROUP[0]), GROUP[1]
        by = messages.Commit(TOPIC, partition, kind, owner, offset, member=place.name, generation=place.generation)
        return encode_head(Verb.COMMIT, number, by)

    def ping(self, number: int) -> bytes:
        return encode_head(Verb.PING, number, Head())

    def take(self, data: bytes) -> Iterator[Answer]:
        buffer = self._buffer
        buffer += data
        if not self._greeted and len(buffer) >= len(MAGIC):
            require(buffer[: len(MAGIC)] == MAGIC, "a broker greets in its wire", found=bytes(buffer[:8]))
            del buffer[: len(MAGIC)]
            self._greeted = True
        while self._greeted and len(buffer) >= PREFIX_BYTES:
            prefix = decode_answer_prefix(buffer)
            end = PREFIX_BYTES + prefix.length
            if len(buffer) < end:
                return
            body = PREFIX_BYTES + prefix.head_bytes
            head, payload = bytes(buffer[PREFIX_BYTES:body]), bytes(buffer[body:end])
            del buffer[:end]
            if prefix.verb != Verb.HELLO:
                name = self._names.pop(prefix.correlation, "")
                yield _answer(prefix.verb, prefix.flags, prefix.correlation, head, payload, name)


def _answer(verb: int, flags: int, number: int, head: bytes, payload: bytes, name: str) -> Answer:
    if flags & ERROR:
        failure = decode_answer(head, messages.Failure)
        later, is_fenced = failure.retry == RETRY_LATER, failure.kind in FENCED
        is_denied = failure.kind == KINDS_OF_ERRORS[Denied]
        return Answer(number, error=failure.message, later=later, is_fenced=is_fenced, is_denied=is_denied)
    if verb in (Verb.JOIN, Verb.SYNC, Verb.HEARTBEAT):
        reported = decode_answer(head, messages.Membership)
        return Answer(number, place=Membership(name, reported.generation, tuple(reported.partitions)))
    if verb == Verb.PRODUCE:
        return Answer(number, offset=decode_answer(head, messages.Produced).appended[0].base_offset)
    if verb == Verb.FETCH:
        fetched = decode_answer(head, messages.Fetched)
        records = [(record.offset, record.value) for record in records_of([memoryview(payload)])]
        return Answer(number, offset=fetched.next_offset, records=records, is_last=not flags & MORE)
    if verb == Verb.POSITION:
        return Answer(number, offset=decode_answer(head, messages.Position).offset)
    return Answer(number)
