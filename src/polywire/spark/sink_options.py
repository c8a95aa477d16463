"""The options of the sink, under the names of Spark's Kafka sink, and of Delta's idempotent writes.

Promises: every option is checked before anything is asked of a broker; a wrong one is an error that names the option meant.
Must not know: Spark, sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from polywire.client.bulk import RECONNECT_S, TIMEOUT_S
from polywire.client.login import Login
from polywire.spark.option_values import ADDRESSES, LOGIN, addresses, choice, count, known, login, refuse, switch
from polywire.types import Level

# What configures Kafka's producer and needs no counterpart here: accepted, so that code moves over, and without effect.
WITHOUT_EFFECT: Final = (
    "includeHeaders",
    "kafka.batch.size", "kafka.buffer.memory", "kafka.client.id", "kafka.compression.type",
    "kafka.enable.idempotence", "kafka.linger.ms", "kafka.max.block.ms", "kafka.max.in.flight.requests.per.connection",
    "kafka.max.request.size", "kafka.retries",
)  # fmt: skip
# Spark hands its own options of a query on to the sink.
OF_SPARK: Final = ("checkpointLocation", "queryName", "outputMode")
OPTIONS: Final = (
    *ADDRESSES, *LOGIN,
    "topic", "createTopics", "exactlyOnce", "sinkId", "txnAppId", "txnId", "txnVersion", "acks", "kafka.acks",
    "kafka.delivery.timeout.ms", "kafka.request.timeout.ms",
    *WITHOUT_EFFECT, *OF_SPARK,
)  # fmt: skip
NUMBER_MAX: Final = 2**63 - 1
_LEVELS: Final = {"0": Level.MEMORY, "1": Level.WRITTEN, "all": Level.SYNCED, "-1": Level.SYNCED}


class Guarantee(Enum):
    """How often a row may be stored (exactlyOnce)."""

    PUBLISHED = "true"  # staged by tasks, published by the driver: once
    SEQUENCE = "sequence"  # appended at once by a numbered producer: once, if a re-run cuts its tasks the same way
    AT_LEAST_ONCE = "false"


@dataclass(frozen=True, slots=True)
class Transaction:
    """Names one batch write for good: writing it again changes nothing (txnAppId, txnId)."""

    application: str
    number: int


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """All options of a write, checked.

    topic: where every row goes; None leaves it to the column. sink_id: who a streaming query is to the broker, instead of the id in its
    checkpoint. level: of appends that are not staged. timeout_s: longest wait for one answer. reconnect_s: how long a broker that is gone is
    tried again.
    """

    addresses: tuple[str, ...]
    login: Login | None
    topic: str | None
    create_topics: bool
    guarantee: Guarantee
    sink_id: str | None
    transaction: Transaction | None
    level: Level
    timeout_s: float
    reconnect_s: float


def write_options(given: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Check and type the options of a write. Keys are compared without case. Raises Invalid(INVALID_REQUEST)."""
    options = known(given, OPTIONS, topics="topic")
    guarantee = choice(
        options, "exactlyOnce", Guarantee, Guarantee.PUBLISHED, among=[guarantee.value for guarantee in Guarantee]
    )
    transaction = _transaction(options)
    if streaming and transaction is not None:
        refuse("txnAppId", "is for batch writes inside foreachBatch; a streaming query has the option sinkId")
    if not streaming and "sinkId" in options:
        refuse("sinkId", "is for streaming queries; a batch write has the options txnAppId and txnId")
    if guarantee is Guarantee.SEQUENCE and not streaming and transaction is None:
        refuse("exactlyOnce", "can be sequence in a batch write only with the options txnAppId and txnId")
    return SinkOptions(
        addresses=addresses(options),
        login=login(options),
        topic=_name(options, "topic"),
        create_topics=switch(options, "createTopics", default=True),
        guarantee=guarantee,
        sink_id=_name(options, "sinkId"),
        transaction=transaction,
        level=_level(options),
        timeout_s=max(TIMEOUT_S, (count(options, "kafka.request.timeout.ms") or 0) / 1000),
        reconnect_s=max(RECONNECT_S, (count(options, "kafka.delivery.timeout.ms") or 0) / 1000),
    )


def _name(options: Mapping[str, str], name: str) -> str | None:
    text = options.get(name)
    if text is not None and not text.strip():
        refuse(name, "is empty")
    return text


def _transaction(options: Mapping[str, str]) -> Transaction | None:
    application = _name(options, "txnAppId")
    numbers = [name for name in ("txnId", "txnVersion") if name in options]
    if application is None and not numbers:
        return None
    if application is None or len(numbers) != 1:
        refuse(
            "txnAppId",
            "and one of txnId and txnVersion (a number that grows with each write) are given together or not at all",
        )
    text = options[numbers[0]].strip()
    if not text.isdecimal() or int(text) > NUMBER_MAX:
        refuse(numbers[0], f"must be a whole number of 0 or more, not {text!r}")
    return Transaction(application, int(text))


def _level(options: Mapping[str, str]) -> Level:
    given = [name for name in ("acks", "kafka.acks") if name in options]
    if not given:
        return Level.SYNCED
    if len(given) > 1:
        refuse("acks", "is given twice, once as kafka.acks")
    level = _LEVELS.get(options[given[0]].strip().lower())
    if level is None:
        refuse(given[0], f"must be 0, 1 or all, not {options[given[0]]!r}")
    return level
