"""Open a connection over any protocol."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TypeVar

from polywire.client.failures import cannot_connect
from polywire.client.tls import secured

Opened = TypeVar("Opened", bound=asyncio.BaseProtocol)


async def open_connection(
    make: Callable[[asyncio.AbstractEventLoop], Opened],
    host: str,
    port: int,
    *,
    timeout_s: float,
    tls: ssl.SSLContext | None,
) -> Opened:
    """Connect, and return the protocol object that ``make`` creates. Raises Unavailable(UNREACHABLE)."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(lambda: make(loop), host, port, **secured(tls, host))
    except (OSError, TimeoutError) as error:
        raise cannot_connect(error, host, port) from None
    return connection
