"""After any acknowledged request the next start succeeds: 2,000 damaged requests, and extreme numbers in batch headers.

The long form is ``python -m tests.hostile.restarts --count 100000``; HOSTILE_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
from itertools import count

import pytest

from polywire.broker import record_verbs
from polywire.protocols.kafka.messages import Codec
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import MAGIC, encode_head
from polywire.protocols.polywire.messages import Head, Verb
from polywire.records.columns import Record
from polywire.records.rows import from_records
from tests.hostile import restarts
from tests.hostile.dialogues import DIALOGUES
from tests.hostile.restarts import KAFKA_HEADER_BYTES, Victim, kafka_batches, resealed, run, stored_batches
from tests.unit.protocols.kafka.requests import produce_frame

RESTARTS = 1_000
SEED = int(os.environ.get("HOSTILE_SEED") or random.randrange(2**32))
TOKEN = b"0123456789abcdef"
ODD_BYTES = (0x00, 0x01, 0x7F, 0x80, 0xFF)
REQUESTS = 40  # between two restarts
SEALED_BYTES = 96  # of a stored batch's header, before its checksum
OF_PRODUCER = bytes(
    from_records([Record(b"v", key=b"k"), Record(b"w")], producer_id=b"p", producer_epoch=1, base_sequence=3)
)
PLAIN = bytes(from_records([Record(b"v", key=b"k"), Record(b"w")]))


def frame(verb: Verb, head: Head, payload: bytes) -> bytes:
    """Return one request for a new connection."""
    return MAGIC + encode_head(verb, 1, head, payload_bytes=len(payload)) + payload


def test_a_start_succeeds_after_any_acknowledged_request() -> None:
    figures = run(count(SEED), count_min=RESTARTS)
    expected = {*restarts.PROTOCOLS, *(dialogue.__name__ for dialogue in DIALOGUES)}
    assert set(figures.acknowledged) == expected, f"a protocol acknowledged nothing: {figures}"


def produced(base_sequence: int) -> bytes:
    """Return a PRODUCE of two records of a producer, the first with this sequence."""
    records = [Record(b"v"), Record(b"w")]
    batch = from_records(records, producer_id=b"p", producer_epoch=1, base_sequence=base_sequence)
    return frame(Verb.PRODUCE, messages.Produce("t", 0), bytes(batch))


@pytest.mark.parametrize(("base", "is_stored"), [(2**63 - 2, True), (2**63 - 1, False), (2**64 - 1, False)])
def test_a_sequence_that_snapshots_cannot_store_is_refused(base: int, is_stored: bool) -> None:
    victim = Victim(1)
    before = victim.stored
    victim.send("polywire", produced(base))
    assert (victim.stored > before) is is_stored
    victim.restart(is_killed=True)


def test_a_start_recovers_sequences_that_snapshots_cannot_store(monkeypatch: pytest.MonkeyPatch) -> None:
    victim = Victim(1)
    with monkeypatch.context() as patch:  # as earlier versions stored them
        patch.setattr(record_verbs, "SEQUENCE_MAX", 2**70)
        victim.send("polywire", produced(2**64 - 1))
    victim.restart(is_killed=True)


@pytest.mark.parametrize(
    ("protocol", "request_frame"),
    [
        ("polywire", frame(Verb.PRODUCE, messages.Produce("t", 0), PLAIN)),
        ("polywire", frame(Verb.PRODUCE, messages.Produce("t", 0), OF_PRODUCER)),
        ("polywire", frame(Verb.STAGE, messages.Stage(TOKEN, "t", 0), PLAIN)),
        ("kafka", produce_frame("t", acks=-1)),
        ("kafka", produce_frame("t", acks=-1, codec=Codec.GZIP)),
    ],
    ids=["produce", "produce with a producer", "stage", "kafka", "kafka compressed"],
)
def test_every_byte_of_a_batch_header(protocol: str, request_frame: bytes) -> None:
    victim, stored = Victim(1), 0
    ((at, _),) = stored_batches(request_frame) if protocol == "polywire" else kafka_batches(request_frame)
    size = SEALED_BYTES if protocol == "polywire" else KAFKA_HEADER_BYTES
    odd = [(place, byte) for place in range(at, at + size) for byte in ODD_BYTES]
    for number, (place, byte) in enumerate(odd, 1):
        changed = bytearray(request_frame)
        changed[place] = byte
        before = victim.stored
        victim.send(protocol, resealed(changed, batches_of=request_frame))
        stored += victim.stored > before
        if number % REQUESTS == 0 or number == len(odd):
            victim.restart(is_killed=True)
    assert stored, "valid requests are stored"
