"""The port between a queue and a connection, implemented for each protocol that has share groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from polywire.client.base import WireClient
from polywire.client.polywire import PolywireClient
from polywire.client.queue_calls import Acquisition, QueueCalls
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.protocols.polywire.messages import AcknowledgedRun


class QueueWorker(Protocol):
    """A worker of a share group over one connection."""

    @property
    def stores_delays(self) -> bool:
        """Whether the broker delays the next delivery of a released record. Otherwise, delays must be 0."""

    @property
    def combines(self) -> bool:
        """Whether ``acquire`` can acknowledge records, too."""

    async def configure(self, settings: Mapping[str, str | None]) -> None:
        """Change settings of the group.

        Raises Missing(TOPIC_MISSING), Invalid(INVALID_REQUEST) for an invalid setting, Denied(DENIED).
        """

    async def acquire(self, *, records_max: int, wait_ms: int, runs: Sequence[AcknowledgedRun] = ()) -> Acquisition:
        """Acquire records. Wait for up to ``wait_ms`` if there are none.

        Args:
            records_max: maximum number of records.
            wait_ms: how long to wait, in milliseconds.
            runs: acknowledgements, only if ``combines`` is true. They take effect first, and the request does not wait.

        Raises Missing(TOPIC_MISSING), Denied(DENIED), Conflict(GROUP_PROTOCOL_MISMATCH), Unavailable.
        """

    async def acknowledge(self, runs: Sequence[AcknowledgedRun]) -> Mapping[int, BrokerError]:
        """Acknowledge acquired records. Return the errors of rejected runs, by index."""

    async def leave(self) -> None:
        """Leave the group. The records are released when the connection ends."""


def queue_worker(wire: WireClient, *, group: str, topic: str, worker: str) -> QueueWorker:
    """Return a worker over this connection. Raises Invalid(INVALID_REQUEST) if the protocol has no share groups."""
    if isinstance(wire, PolywireClient):
        return PolywireWorker(QueueCalls(wire), group=group, topic=topic, worker=worker)
    from polywire.client.kafka import KafkaClient  # imported only if needed, as in ``connect``

    if isinstance(wire, KafkaClient):
        from polywire.client.kafka_worker import KafkaWorker

        return KafkaWorker(wire, group=group, topic=topic, worker=worker)
    raise Invalid(ErrorCode.INVALID_REQUEST, "this protocol has no queues: connect with a polywire:// or kafka:// URL")


class PolywireWorker:
    """A worker over the `polywire` protocol, which needs no membership."""

    __slots__ = ("_calls", "_group", "_topic", "_worker", "combines")

    stores_delays: Final = True

    def __init__(self, calls: QueueCalls, *, group: str, topic: str, worker: str) -> None:
        self._calls: Final = calls
        self._group, self._topic, self._worker = group, topic, worker
        self.combines = False  # until a response shows that the broker can

    async def configure(self, settings: Mapping[str, str | None]) -> None:
        """Change settings of the group, and let it read the topic."""
        await self._calls.configure(self._group, self._topic, settings)

    async def acquire(self, *, records_max: int, wait_ms: int, runs: Sequence[AcknowledgedRun] = ()) -> Acquisition:
        """Acquire records. If the broker has ignored the acknowledgements, send them alone."""
        found = await self._calls.acquire(
            self._group, self._topic, self._worker, records_max=records_max, wait_ms=wait_ms, runs=runs
        )
        self.combines = found.refused is not None
        if runs and found.refused is None:
            found = found._replace(refused=await self.acknowledge(runs))
        return found

    async def acknowledge(self, runs: Sequence[AcknowledgedRun]) -> Mapping[int, BrokerError]:
        """Acknowledge acquired records."""
        return await self._calls.acknowledge(self._group, self._topic, self._worker, runs)

    async def leave(self) -> None:
        """Do nothing, because the broker knows a worker by its connection."""
