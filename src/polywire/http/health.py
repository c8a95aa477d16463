"""Whether the broker lives, and whether it would take a record now.

Promises: ready is what the write path says: everything that was taken is synced in time, and there is space for more; nothing is stored
for it. Must not know: who asks.
"""

from __future__ import annotations

import asyncio
from typing import Final

from polywire.broker.broker import Broker
from polywire.errors import BrokerError, Busy, ErrorCode, Unavailable
from polywire.http.guard import completing
from polywire.http.process import Process

READY_S: Final = 5.0  # a disk that takes longer to sync serves nobody


async def check_ready(broker: Broker, process: Process) -> None:
    """Ask the log what it would say to an append. Raises BrokerError, when not."""
    if process.stopping:
        raise Unavailable(ErrorCode.STOPPING, "the broker is stopping")
    synced: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    broker.probe(completing(synced))
    try:
        await asyncio.wait_for(synced, READY_S)
    except TimeoutError:
        raise Busy(
            ErrorCode.BUSY, f"records are not synced in time limit_s={READY_S:g}", retry_after_ms=1_000
        ) from None


async def readiness(broker: Broker, process: Process) -> tuple[int, str]:
    """Status and body of /readyz."""
    try:
        await check_ready(broker, process)
    except BrokerError as error:
        return 503, f"not ready: {error.message}\n"
    return 200, "ready\n"
