"""Requests about share groups over the `polywire` protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from polywire.client.failures import beyond
from polywire.client.polywire import PolywireClient, decode
from polywire.client.record import Record, decode_batches
from polywire.errors import BrokerError
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.errors import error_of
from polywire.protocols.polywire.messages import Head, Verb

_H = TypeVar("_H", bound=Head)


class Acquisition(NamedTuple):
    """Records that a member of a share group has acquired.

    Attributes:
        lock_s: how long the member may hold them without renewing them.
        records: each with its delivery count.
        gaps: partitions and offsets without a record, which the member must acknowledge, too.
        refused: errors of refused acknowledgements, by index. None if the broker does not acknowledge and acquire in one
            request, and has ignored them.
    """

    lock_s: float
    records: list[tuple[Record, int]]
    gaps: list[tuple[int, int]]
    refused: Mapping[int, BrokerError] | None = None


class QueueCalls:
    """The requests of one connection about share groups."""

    __slots__ = ("_client",)

    def __init__(self, client: PolywireClient) -> None:
        self._client: Final = client

    async def close(self) -> None:
        """Close the connection. The broker then releases the records that were acquired over it."""
        await self._client.close()

    async def _ask(self, verb: Verb, head: Head, kind: type[_H]) -> _H:
        response, _ = await self._client.ask(verb, head)
        return decode(response, kind)

    async def acquire(
        self,
        group: str,
        topic: str,
        member: str,
        *,
        records_max: int = 500,
        wait_ms: int = 0,
        runs: Sequence[messages.AcknowledgedRun] = (),
    ) -> Acquisition:
        """Acquire records of a topic for a member of a share group. See ``Queue`` for a simpler interface.

        Args:
            group: share group.
            topic: full name.
            member: name of the member.
            records_max: maximum number of records.
            wait_ms: how long to wait for records if there are none.
            runs: acknowledgements, which take effect first. With any, the request does not wait.

        Raises Missing(TOPIC_MISSING), Denied(DENIED), Conflict(GROUP_PROTOCOL_MISMATCH).
        """
        head = messages.Acquire(group, topic, member, records_max, wait_ms=wait_ms, runs=list(runs))
        response, payloads = await self._client.ask(Verb.ACQUIRE, head)
        found = decode(response, messages.Acquired)
        payload, at = memoryview(b"".join(payloads)), 0
        refused = None if found.refused is None else _errors(found.refused)
        acquisition = Acquisition(found.lock_ms / 1000, [], [], refused)
        for part in found.partitions:
            decoded = decode_batches(payload[at : at + part.payload_bytes], topic, part.partition, 0)
            at += part.payload_bytes
            by_offset = {record.offset: record for record in decoded}
            attempts = ((offset, attempt) for first, last, attempt in part.runs for offset in range(first, last + 1))
            for offset, attempt in attempts:
                record = by_offset.get(offset)
                if record is None:
                    acquisition.gaps.append((part.partition, offset))
                else:
                    acquisition.records.append((record, attempt))
        return acquisition

    async def acknowledge(
        self, group: str, topic: str, member: str, runs: Sequence[messages.AcknowledgedRun]
    ) -> dict[int, BrokerError]:
        """Acknowledge acquired records. Return the errors of refused entries, by index. Raises Missing(TOPIC_MISSING)."""
        head = messages.Acknowledge(group, topic, member, list(runs))
        answer = await self._ask(Verb.ACKNOWLEDGE, head, messages.Acknowledged)
        return _errors(answer.refused)

    async def entries(self, group: str | None = None) -> list[messages.QueueEntry]:
        """Return the share groups, one entry for each topic, sorted by topic and name.

        ``group`` limits the result to one name.
        """
        found: list[messages.QueueEntry] = []
        after, more = ("", ""), True
        while more:
            start_after = list(after) if found else []
            answer = await self._ask(Verb.QUEUES, messages.AskQueues(group, start_after), messages.QueueList)
            found += answer.queues
            more = answer.more and bool(answer.queues)
            if more:
                after = beyond(after, (found[-1].name, found[-1].group), "queue")
        return found

    async def configure(self, group: str, topic: str, settings: Mapping[str, str | None]) -> None:
        """Create a share group or change its settings. None restores a default.

        Raises Missing(TOPIC_MISSING), Invalid(INVALID_REQUEST) for an invalid setting, Denied(DENIED).
        """
        await self._ask(Verb.CONFIGURE_QUEUE, messages.ConfigureQueue(group, topic, dict(settings)), Head)

    async def reset(self, group: str, topic: str, offsets: Mapping[int, int] | None = None) -> None:
        """Set where a share group without members continues to read, by partition. Without offsets: at the end.

        Raises Missing(TOPIC_MISSING, PARTITION_MISSING), Conflict(GROUP_NOT_EMPTY), Denied(DENIED).
        """
        await self._ask(Verb.RESET_QUEUE, messages.ResetQueue(group, topic, dict(offsets or {})), Head)

    async def delete(self, group: str, topic: str) -> None:
        """Delete a share group's progress in a topic, and its settings if it reads no other topic.

        Raises Missing(TOPIC_MISSING, GROUP_MISSING), Conflict(GROUP_NOT_EMPTY), Denied(DENIED).
        """
        await self._ask(Verb.DELETE_QUEUE, messages.DeleteQueue(group, topic), Head)


def _errors(refused: Sequence[tuple[int, messages.Failure]]) -> dict[int, BrokerError]:
    return {index: error_of(failure) for index, failure in refused}
