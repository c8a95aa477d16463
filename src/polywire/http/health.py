"""The readiness check: whether the log accepts records and syncs them in time. It stores no record."""

from __future__ import annotations

import asyncio
from typing import Final

from polywire.broker.broker import Broker
from polywire.errors import BrokerError, Busy, ErrorCode, Unavailable
from polywire.http.guard import completing
from polywire.http.process import Process

READY_S: Final = 5.0  # a broker that needs longer for a sync is not ready


async def check_ready(broker: Broker, process: Process) -> None:
    """Raise the error with which an append would fail now."""
    if process.stopping:
        raise Unavailable(ErrorCode.STOPPING, "the broker is stopping")
    synced: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    broker.probe(completing(synced))
    try:
        await asyncio.wait_for(synced, READY_S)
    except TimeoutError:
        raise Busy(
            ErrorCode.BUSY,
            f"records were not synced in time (check the disk) limit_s={READY_S:g}",
            retry_after_ms=1_000,
        ) from None


async def readiness(broker: Broker, process: Process) -> tuple[int, str]:
    """Return the status and body of the response to /readyz."""
    try:
        await check_ready(broker, process)
    except BrokerError as error:
        return 503, f"not ready: {error.message}\n"
    return 200, "ready\n"
