"""The ``--address`` option, and the client that a command runs with."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Annotated, Final, TypeVar

from cyclopts import Parameter

from polywire.cli.output import Failed, note
from polywire.client.base import WireClient
from polywire.client.link import CONNECT_S, Link
from polywire.client.polywire import PolywireClient
from polywire.errors import ErrorCode, Invalid, Missing, Unavailable

Result = TypeVar("Result")

ADDRESS_DEFAULT: Final = "polywire://127.0.0.1:9555"
CONNECT_VARIABLE: Final = "POLYWIRE_CONNECT_S"
QUIET_S: Final = 1.0  # seconds after which a command reports that it is waiting for its broker

Address = Annotated[
    str,
    Parameter(
        name=("--address", "-a"),
        env_var="POLYWIRE_ADDRESS",
        help="Broker address as scheme://host:port. The scheme selects the protocol: polywire, flux, cursus, iggy, "
        "kafka or kafka07. With polywire://name@host:port, the password is read from POLYWIRE_PASSWORD. Connecting is retried for "
        "POLYWIRE_CONNECT_S seconds (10).",
    ),
]


def run_with_client(
    address: str, work: Callable[[WireClient], Awaitable[Result]], *, topic: str | None = None, group: str | None = None
) -> Result:
    """Connect, run ``work``, close the connection, and return the result of ``work``.

    If ``topic`` or ``group`` does not exist, the error lists the existing ones. Connecting is retried as in
    ``polywire.connect``, and the wait is reported. Raises Failed if no broker answers in time, and the errors of
    ``polywire.errors``.
    """
    limit_s = connect_limit_s()

    async def connected() -> Result:
        logging.getLogger("polywire.client").setLevel(logging.ERROR)  # the command reports the wait itself
        link = Link(address, connect_s=limit_s)
        without_login = address.rpartition("@")[2]
        reminder = asyncio.get_running_loop().call_later(
            QUIET_S, note, f"waiting for a broker address={without_login} seconds={limit_s:g}"
        )
        try:
            await link.open()
            client = await link.wire()
        except Unavailable as error:
            prefix = "" if error.message.startswith("cannot connect") else "cannot connect: "
            raise Failed(f"{prefix}{error.message} code={error.code.value}") from error
        finally:
            reminder.cancel()
        try:
            return await work(client)
        except Missing as error:
            from polywire.client.group_names import no_such_group, no_such_topic

            if topic is not None and error.code is ErrorCode.TOPIC_MISSING:
                raise await no_such_topic(client, topic) from error
            if group is not None and error.code is ErrorCode.GROUP_MISSING:
                raise await no_such_group(client, group, topic) from error
            raise
        finally:
            await client.close()

    return asyncio.run(connected())


def connect_limit_s() -> float:
    """Return the number of seconds for which a command tries to connect.

    Raises Failed if the environment variable has an invalid value.
    """
    setting = os.environ.get(CONNECT_VARIABLE) or CONNECT_S
    try:
        limit_s = float(setting)
    except ValueError:
        limit_s = -1.0
    if not 0 <= limit_s < float("inf"):
        raise Failed(f"the connect timeout must be a number of seconds {CONNECT_VARIABLE}={setting!r}")
    return limit_s


def polywire_only(client: WireClient, action: str) -> PolywireClient:
    """Return the client if it uses the polywire protocol. Otherwise raise Invalid.

    ``action`` completes the message "only the polywire protocol can …".
    """
    if not isinstance(client, PolywireClient):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"only the polywire protocol can {action} (use a polywire:// address)")
    return client
