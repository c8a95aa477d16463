"""Convert records for another protocol: unsupported fields are removed and counted.

Values do not change, except that a null value becomes an empty one if the target protocol has no null values.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, Self

from polywire.client.base import Ability, WireClient
from polywire.client.kafka import KafkaClient
from polywire.client.polywire import PolywireClient
from polywire.records.columns import Header, HeaderKind, Record

MILLISECOND_US: Final = 1000
_PLAIN_KINDS: Final = frozenset({HeaderKind.RAW, HeaderKind.STRING, HeaderKind.NULL})


@dataclass(frozen=True, slots=True)
class Carried:
    """The fields that a protocol supports.

    ``headers`` and ``times`` are set if the protocol stores them without loss, ``plain_headers`` if it stores header
    values only as bytes, ``times_ms`` if it stores times in milliseconds.
    """

    keys: bool
    headers: bool
    plain_headers: bool
    ids: bool
    times: bool
    times_ms: bool
    events: bool
    null_values: bool

    @classmethod
    def by(cls, client: WireClient) -> Self:
        """Return the fields that the client's protocol supports."""
        able, kafka = client.abilities, isinstance(client, KafkaClient)
        return cls(
            keys=Ability.KEYS_READ in able,
            headers=Ability.HEADERS in able,
            plain_headers=kafka,
            ids=Ability.IDS in able,
            times=Ability.ORIGIN_TIMES in able,
            times_ms=kafka,
            events=isinstance(client, PolywireClient),
            null_values=Ability.NULL_VALUES in able,
        )


def carry(record: Record, target: Carried, lost: Counter[str]) -> Record:
    """Return the record without the fields that the target does not support, and count these in ``lost``.

    If the record has no time of origin, its append time is used. The key is always passed on, because it chooses the
    partition even if the target does not store it.
    """
    if record.key is not None and not target.keys:
        lost["keys"] += 1
    value = record.value
    if value is None and not target.null_values:
        lost["null_values_made_empty"] += 1
        value = b""
    id_ = record.id if target.ids else None
    event = record.event if target.events else None
    lost["ids"] += id_ is not record.id
    lost["events"] += event is not record.event
    headers = _headers(record.headers, target, lost)
    time_us = _time_us(record, target, lost)
    return Record(value, record.key, headers, id=id_, event=event, origin_time_us=time_us)


def _headers(headers: tuple[Header, ...], target: Carried, lost: Counter[str]) -> tuple[Header, ...]:
    if not headers or target.headers:
        return headers
    if not target.plain_headers:
        lost["headers"] += 1
        return ()
    lost["kinds_of_headers"] += any(header.value_kind not in _PLAIN_KINDS for header in headers)
    return headers


def _time_us(record: Record, target: Carried, lost: Counter[str]) -> int | None:
    time_us = record.origin_time_us if record.origin_time_us is not None else record.append_time_us or None
    if time_us is None or target.times:
        return time_us
    if not target.times_ms:
        lost["times"] += 1
        return None
    lost["microseconds"] += bool(time_us % MILLISECOND_US)
    return time_us - time_us % MILLISECOND_US
