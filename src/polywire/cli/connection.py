"""The broker that a command talks to: its address option, and one place where clients are opened and closed.

Promises: every noun reaches brokers through here, so the address option reads and behaves the same everywhere.
Must not know: any noun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Final, TypeVar

from cyclopts import Parameter

from polywire.cli.output import Failed
from polywire.client.base import WireClient
from polywire.client.connect import connect
from polywire.client.polywire import PolywireClient
from polywire.errors import ErrorCode, Invalid, Unavailable

Result = TypeVar("Result")

ADDRESS_DEFAULT: Final = "polywire://127.0.0.1:9555"

Address = Annotated[
    str,
    Parameter(
        name=("--address", "-a"),
        env_var="POLYWIRE_ADDRESS",
        help="Broker address as scheme://host:port; the scheme selects the wire (polywire, flux, cursus, iggy, "
        "kafka, kafka07). With polywire://name@host:port, the password is read from POLYWIRE_PASSWORD.",
    ),
]


def run_with_client(address: str, work: Callable[[WireClient], Awaitable[Result]]) -> Result:
    """Connect, run ``work``, close. Raises Failed when nobody answers, and the kinds of ``polywire.errors``."""

    async def connected() -> Result:
        try:
            client = await connect(address)
        except Unavailable as error:
            words = "" if error.message.startswith("cannot connect") else "cannot connect: "
            raise Failed(f"{words}{error.message} code={error.code.value}") from error
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(connected())


def polywire_only(client: WireClient, what: str) -> PolywireClient:
    """The client, for what no other wire has words for. Raises Invalid."""
    if not isinstance(client, PolywireClient):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"{what} over the polywire wire only: use a polywire:// address")
    return client
