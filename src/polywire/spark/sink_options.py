"""Options of the sink, with the names of Spark's Kafka sink and of Delta's idempotent writes.

Every option is checked before any request to a broker. A wrong option raises an error that suggests the right one.
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

# Settings of Kafka's producer without a counterpart here: accepted without effect, so that existing code runs.
WITHOUT_EFFECT: Final = (
    "includeHeaders",
    "kafka.batch.size", "kafka.buffer.memory", "kafka.client.id", "kafka.compression.type",
    "kafka.enable.idempotence", "kafka.linger.ms", "kafka.max.block.ms", "kafka.max.in.flight.requests.per.connection",
    "kafka.max.request.size", "kafka.retries",
)  # fmt: skip
# Spark also passes its own options of a query to the sink.
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

    PUBLISHED = "true"  # staged by tasks and published by the driver: stored once
    # appended directly, with sequences: stored once if a repeated batch is divided into the same tasks
    SEQUENCE = "sequence"
    AT_LEAST_ONCE = "false"


@dataclass(frozen=True, slots=True)
class Transaction:
    """Permanent name of a batch write. Writing again under the same name has no effect (txnAppId, txnId)."""

    application: str
    number: int


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """All options of a write, checked.

    Attributes:
        topic: topic of every row; None uses the column topic.
        sink_id: identifies a streaming query to the broker, instead of the id in its checkpoint.
        level: durability level of appends that are not staged.
        timeout_s: longest wait for one response.
        reconnect_s: how long an unreachable broker is retried.
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
    """Check and convert the options of a write. Names ignore case. Raises Invalid(INVALID_REQUEST)."""
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
            "must be set together with exactly one of txnId and txnVersion (a number that increases with each write)",
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
