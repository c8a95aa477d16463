"""The broker that a command talks to: its address option, and one place where clients are opened and closed.

Promises: every noun reaches brokers through here, so the address option reads and behaves the same everywhere.
Must not know: any noun.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Annotated, Final, TypeVar

from cyclopts import Parameter

from polywire.cli.output import Failed, note
from polywire.client.base import WireClient
from polywire.client.group_names import no_such_group, no_such_topic
from polywire.client.link import CONNECT_S, Link
from polywire.client.polywire import PolywireClient
from polywire.errors import ErrorCode, Invalid, Missing, Unavailable

Result = TypeVar("Result")

ADDRESS_DEFAULT: Final = "polywire://127.0.0.1:9555"
CONNECT_VARIABLE: Final = "POLYWIRE_CONNECT_S"
QUIET_S: Final = 1.0  # before it is reported that a command waits for its broker

Address = Annotated[
    str,
    Parameter(
        name=("--address", "-a"),
        env_var="POLYWIRE_ADDRESS",
        help="Broker address as scheme://host:port; the scheme selects the wire (polywire, flux, cursus, iggy, "
        "kafka, kafka07). With polywire://name@host:port, the password is read from POLYWIRE_PASSWORD. A broker that does not "
        "listen yet is waited for, up to POLYWIRE_CONNECT_S seconds (10).",
    ),
]


def run_with_client(
    address: str, work: Callable[[WireClient], Awaitable[Result]], *, topic: str | None = None, group: str | None = None
) -> Result:
    """Connect, run ``work``, close. Where ``topic`` or ``group`` does not exist, the error names those that do.

    Waits for a broker that does not listen yet as ``polywire.connect`` does, and reports that it waits. Raises Failed when none answers
    in time, and the kinds of ``polywire.errors``.
    """
    limit_s = connect_limit_s()

    async def connected() -> Result:
        link = Link(address, connect_s=limit_s)
        where = address.rpartition("@")[2]  # without a password
        waits = asyncio.get_running_loop().call_later(
            QUIET_S, note, f"waiting for a broker address={where} seconds={limit_s:g}"
        )
        try:
            await link.open()
            client = await link.wire()
        except Unavailable as error:
            words = "" if error.message.startswith("cannot connect") else "cannot connect: "
            raise Failed(f"{words}{error.message} code={error.code.value}") from error
        finally:
            waits.cancel()
        try:
            return await work(client)
        except Missing as error:
            if topic is not None and error.code is ErrorCode.TOPIC_MISSING:
                raise await no_such_topic(client, topic) from error
            if group is not None and error.code is ErrorCode.GROUP_MISSING:
                raise await no_such_group(client, group, topic) from error
            raise
        finally:
            await client.close()

    return asyncio.run(connected())


def connect_limit_s() -> float:
    """Return how many seconds a command waits for its broker. Raises Failed for a setting that is no such number."""
    given = os.environ.get(CONNECT_VARIABLE) or CONNECT_S
    try:
        limit_s = float(given)
    except ValueError:
        limit_s = -1.0
    if not 0 <= limit_s < float("inf"):
        raise Failed(f"invalid number of seconds {CONNECT_VARIABLE}={given!r}")
    return limit_s


def polywire_only(client: WireClient, what: str) -> PolywireClient:
    """The client, for what no other wire has words for. Raises Invalid."""
    if not isinstance(client, PolywireClient):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"{what} over the polywire wire only: use a polywire:// address")
    return client
