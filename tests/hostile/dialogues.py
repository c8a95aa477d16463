"""Dialogues of hostile clients that use what the broker has answered: transactions, event sourcing, positions, settings and publishes.

A dialogue yields requests, each with its protocol, and is sent the answer. At times one number of a request is replaced by one at which
arithmetic goes wrong. A dialogue depends on its chance and the answers only.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator
from struct import error, unpack_from
from typing import Any, Final

from polywire.protocols.cursus.messages import frame
from polywire.protocols.cursus.transactions import producer_of
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import encode_batch
from polywire.protocols.kafka.messages import Api
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import MAGIC, encode_head
from polywire.protocols.polywire.messages import Head, Verb
from polywire.records.columns import Record
from tests.unit.protocols.kafka.requests import frame_of, partition_frame
from tests.unit.protocols.polywire.peer import batch_of

Dialogue = Generator[tuple[str, bytes], bytes, None]

ODD_SHARE: Final = 0.12  # of numbers: most requests must be valid, or later ones achieve nothing
TRANSACTIONAL: Final = 16  # of a Kafka batch's attributes
INITIALIZED_AT: Final = 13  # in the response to InitProducerId 4: error, producer id, epoch
TOPIC_RESOURCE: Final = 2
KAFKA_SETTINGS: Final = (
    "retention.ms",
    "retention.bytes",
    "max.message.bytes",
    "message.timestamp.before.max.ms",
    "message.timestamp.after.max.ms",
)
SETTINGS: Final = ("retention_age_us", "retention_bytes", "compaction")
TEXT_NUMBERS: Final = (
    0,
    -1,
    2**31,
    2**32,
    2**63 - 2,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    10**30,
    -(2**63),
    -(2**63) - 1,
)


class Odd:
    """Replaces numbers by extreme ones, at times."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def number(self, right: int, bits: int = 64) -> int:
        """Return the number, or another one of a signed field of that many bits."""
        if self._chance.random() >= ODD_SHARE:
            return right
        top = 1 << (bits - 1)
        return self._chance.choice((0, 1, -1, top - 1, top - 2, -top, 1 - top))

    def text(self, right: int) -> str:
        """Return the digits of the number, or of another one of any size."""
        return str(self._chance.choice(TEXT_NUMBERS) if self._chance.random() < ODD_SHARE else right)


def kafka_transaction(chance: random.Random) -> Dialogue:
    """Use a transactional id: produce, commit offsets, and end the transaction or leave it open."""
    odd, name, topic = Odd(chance), chance.choice(("k1", "k2")), chance.choice(("t", "u"))
    timeout = odd.number(60_000, 32)
    answer = yield "kafka", frame_of(Api.INIT_PRODUCER_ID, 4, transactional_id=name, transaction_timeout_ms=timeout)
    try:
        _, producer_id, epoch = unpack_from(">hqh", answer, INITIALIZED_AT)
    except error:
        return

    def holder() -> dict[str, Any]:
        return {
            "transactional_id": name,
            "producer_id": odd.number(producer_id),
            "producer_epoch": odd.number(epoch, 16),
        }

    added = schema.request(Api.ADD_PARTITIONS_TO_TXN).Topics(name=topic, partitions=[1, odd.number(0, 32)])
    yield "kafka", frame_of(Api.ADD_PARTITIONS_TO_TXN, 3, topics=[added], **holder())
    for sequence in range(0, 2 * chance.randrange(3), 2):
        records = encode_batch(
            [Record(b"v", key=b"k", origin_time_us=1_000)] * 2,
            producer_id=odd.number(producer_id),
            producer_epoch=odd.number(epoch, 16),
            base_sequence=odd.number(sequence, 32),
            attributes=TRANSACTIONAL,
        )
        topics = schema.request(Api.PRODUCE).Topics
        one = topics(name=topic, partitions=[topics.Partitions(index=1, records=records)])
        yield "kafka", frame_of(Api.PRODUCE, 9, acks=-1, transactional_id=name, topics=[one])
    yield "kafka", frame_of(Api.ADD_OFFSETS_TO_TXN, 3, group_id="held", **holder())
    committed = schema.request(Api.TXN_OFFSET_COMMIT).Topics
    offset = committed.Partitions(index=odd.number(0, 32), offset=odd.number(1), leader_epoch=odd.number(1, 32))
    commit = committed(name=topic, partitions=[offset])
    yield "kafka", frame_of(Api.TXN_OFFSET_COMMIT, 3, group_id="held", topics=[commit], **holder())
    if chance.random() < 0.8:
        yield "kafka", frame_of(Api.END_TXN, 3, committed=chance.random() < 0.6, **holder())


def cursus_transaction(chance: random.Random) -> Dialogue:
    """Do the same over Cursus, with a member of a group."""
    odd, name = Odd(chance), chance.choice(("c1", "c2"))
    answer = yield "cursus", frame(f"INIT_PRODUCER_ID transactional_id={name}".encode())
    epoch = _number(answer, rb"epoch=(\d+)")
    joined = yield "cursus", frame(b"JOIN_GROUP topic=t group=held member=a")
    member = re.search(rb"member=(\S+)", joined)
    word = f"transactional_id={name} producerId={producer_of(name)}"
    lines = [f"BEGIN_TXN {word} epoch={odd.text(epoch)}"]
    for sequence in range(1, chance.randrange(1, 4)):
        staged = f"partition={odd.text(0)} seqNum={odd.text(sequence)} epoch={odd.text(epoch)}"
        lines.append(f"TXN_PUBLISH {word} topic={chance.choice('tu')} {staged} key=k message=held")
    if member is not None:
        scope = (
            f"group=held member={member[1].decode()} generation={odd.text(_number(joined, rb'generation=([0-9]+)'))}"
        )
        offsets = f"P{odd.text(0)}:{odd.text(9)},P1:{odd.text(3)}"
        lines.append(f"SEND_OFFSETS_TO_TXN {word} epoch={odd.text(epoch)} topic=t {scope} {offsets}")
        lines.append(f"COMMIT_OFFSET topic=t partition=0 {scope} offset={odd.text(5)}")
    if chance.random() < 0.8:
        lines.append(f"END_TXN {word} epoch={odd.text(epoch)} result={chance.choice(('commit', 'abort'))}")
    for line in lines:
        yield "cursus", frame(line.encode())


def events(chance: random.Random) -> Dialogue:
    """Append events and save a snapshot, with consecutive versions."""
    odd, key = Odd(chance), chance.choice("ab")
    answer = yield "cursus", frame(f"STREAM_VERSION topic=events key={key}".encode())
    version = _number(answer, rb"(\d+)\D*$")
    for following in range(version + 1, version + 3):
        facts = f"version={odd.text(following)} event_type=T schema_version={odd.text(2)}"
        yield "cursus", frame(f"APPEND_STREAM topic=events key={key} {facts} metadata={{}} message=event".encode())
    saved = f"SAVE_SNAPSHOT topic=events key={key} version={odd.text(version + 1)} message={{}}"
    yield "cursus", frame(saved.encode())


def positions(chance: random.Random) -> Dialogue:
    """Commit offsets of groups and consumers, for existing and missing topics."""
    odd = Odd(chance)
    topics = schema.request(Api.OFFSET_COMMIT).Topics
    offset = topics.Partitions(index=odd.number(0, 32), offset=odd.number(5), leader_epoch=odd.number(1, 32))
    one = topics(name=chance.choice(("t", "none")), partitions=[offset])
    yield "kafka", frame_of(Api.OFFSET_COMMIT, 8, group_id="alone", topics=[one])
    for kind in (0, 1):
        commit = messages.Commit(chance.choice(("t", "none")), odd.number(0), kind, "g", odd.number(5))
        yield "polywire", _asked(Verb.COMMIT, commit)
    yield "cursus", frame(f"COMMIT t g {odd.text(0)} {odd.text(5)}".encode())
    yield "kafka", partition_frame(Api.DELETE_RECORDS, "t", offset=odd.number(-1))


def settings(chance: random.Random) -> Dialogue:
    """Change settings of topics."""
    odd = Odd(chance)
    resources = schema.request(Api.ALTER_CONFIGS).Resources
    config = resources.Configs(name=chance.choice(KAFKA_SETTINGS), value=odd.text(1_000_000))
    resource = resources(resource_type=TOPIC_RESOURCE, resource_name=chance.choice(("t", "u")), configs=[config])
    yield "kafka", frame_of(Api.ALTER_CONFIGS, resources=[resource])
    given: dict[str, messages.SettingValue] = {chance.choice(SETTINGS): odd.number(1)}
    yield "polywire", _asked(Verb.CONFIGURE_TOPIC, messages.ConfigureTopic(chance.choice("tu"), given))
    given = {"compression": chance.choice(("lz4", "zstd", "none"))}
    yield "polywire", _asked(Verb.CONFIGURE_TOPIC, messages.ConfigureTopic("t", given))
    yield "polywire", _asked(Verb.GROW_TOPIC, messages.GrowTopic("t", odd.number(3)))


def publishes(chance: random.Random) -> Dialogue:
    """Publish staged batches under numbers of a writer."""
    odd, token = Odd(chance), chance.randbytes(16)
    batch = bytes(batch_of((b"k", b"value"), (None, b"")))
    yield "polywire", _asked(Verb.STAGE, messages.Stage(token, "t", 0), batch)
    yield (
        "polywire",
        _asked(Verb.PUBLISH, messages.Publish(chance.choice(("w", "x")), odd.number(chance.randrange(9)), [token])),
    )


DIALOGUES: Final[tuple[Callable[[random.Random], Dialogue], ...]] = (
    kafka_transaction,
    cursus_transaction,
    events,
    positions,
    settings,
    publishes,
)


def _asked(verb: Verb, head: Head, payload: bytes = b"") -> bytes:
    """Return one request for a new connection."""
    return MAGIC + encode_head(verb, 1, head, payload_bytes=len(payload)) + payload


def _number(answer: bytes, pattern: bytes) -> int:
    """Return a number of a response, 0 if it has none."""
    found = re.search(pattern, answer)
    return int(found[1]) if found else 0
