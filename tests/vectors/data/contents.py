"""The content of a data directory as JSON: every record, and the broker's whole state by field names.

The same content gives the same value, whichever release reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from enum import Enum
from hashlib import sha256
from typing import Any, Final

from polywire.broker.broker import Broker
from polywire.broker.changes import decode_snapshot
from polywire.broker.topics import Partition
from polywire.log.base import Read
from polywire.records.columns import Record
from polywire.records.compression import expand_body
from polywire.records.header import walk
from polywire.records.rows import to_records

VALUE_BYTES_MAX: Final = 64  # longer values are replaced by their digest
READ_BYTES: Final = 1 << 20


def plain(value: Any) -> Any:
    """Return a value as JSON has it: bytes as Latin-1 text or their digest, instances by the names of their fields."""
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return data.decode("latin-1") if len(data) <= VALUE_BYTES_MAX else f"sha256:{sha256(data).hexdigest()}"
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, dict):
        return {str(plain(key)): plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [plain(held) for held in value]
    names = getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", None)
    if names:
        return {name: plain(getattr(value, name)) for name in names}
    assert value is None or isinstance(value, str | int | float | bool), type(value)
    return value


def _short(record: Record) -> dict[str, Any]:
    """Return a record without its absent fields."""
    fields: dict[str, Any] = plain(record)
    return {name: value for name, value in fields.items() if value not in (None, []) and (name, value) != ("flags", 0)}


async def records_of(broker: Broker, partition: Partition) -> list[Record]:
    """Return every readable record of a partition."""
    records: list[Record] = []
    offset = partition.log.first_offset
    while offset < partition.log.next_offset:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        found = broker.fetch(partition, offset, bytes_max=READ_BYTES, then=answer.set_result)
        chunks = [bytes(chunk) for chunk in (found if isinstance(found, Read) else await answer).chunks]
        read = [record for chunk in chunks for batch in _batches(chunk) for record in to_records(expand_body(batch))]
        if not read:
            break
        records += [record for record in read if record.offset >= offset]
        offset = records[-1].offset + 1
    return records


def _batches(chunk: bytes) -> Iterable[bytes]:
    starts = list(walk(chunk))
    return [chunk[start:end] for start, end in zip(starts, [*starts[1:], len(chunk)], strict=True)]


async def contents(broker: Broker, staged: Iterable[Any]) -> dict[str, Any]:
    """Return everything that a broker has; ``staged``: the log's staged tokens."""
    state = plain(decode_snapshot(broker._state.snapshot()))
    topics = {}
    for topic in broker.topics(internal=True):
        topics[topic.name.full] = [
            {
                "first_offset": partition.log.first_offset,
                "next_offset": partition.log.next_offset,
                "records": [_short(record) for record in await records_of(broker, partition)],
            }
            for partition in topic.partitions
        ]
    tokens = [{"token": plain(token.token), "batches": len(token.batches)} for token in staged]
    tokens.sort(key=lambda token: str(token["token"]))
    return {"records": topics, "state": state, "staged": tokens}
