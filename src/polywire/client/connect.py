"""``connect(url)``: connect to a broker, with the client for the URL's scheme."""

from __future__ import annotations

import asyncio
from importlib import import_module
from ssl import SSLContext
from typing import Final

from polywire.client.address import SCHEME_SUFFIX, Login, client_context, split_address, split_brokers, split_login
from polywire.client.base import WireClient
from polywire.client.failures import no_broker_responds
from polywire.client.polywire import PolywireClient
from polywire.errors import ErrorCode, Invalid, Unavailable

DEFAULT_SCHEME: Final = "polywire"
MEMORY_SCHEME: Final = "memory"
MEMORY_MODULE: Final = "polywire.testing.thread"  # imported on demand, because a client does not need the broker's code
LOGIN_SCHEMES: Final = ("polywire", "kafka", "iggy")
MECHANISM_OPTION: Final = "?mechanism="  # kafka:// only
SCHEMES: Final = ("cursus", "flux", "iggy", "kafka", "kafka07", "polywire")


async def connect(url: str) -> WireClient:
    """Return a connected client for ``scheme://host:port``, or ``host:port`` for the `polywire` protocol.

    With several brokers, ``scheme://host:port,host:port``, the first that responds is used.

    Args:
        url: the scheme is cursus, flux, iggy, kafka, kafka07 or polywire; append ``+tls`` for TLS (``client.address``).
            polywire, kafka and iggy support a login (``client.address``): ``polywire://name:password@host:port``. For
            kafka, the option ``?mechanism=SCRAM-SHA-256`` selects the mechanism (``client.kafka``). With a login, iggy
            uses today's dialect (``client.iggy_today``). ``memory://name`` is a broker in this process, for tests.

    Raises:
        Invalid: INVALID_REQUEST: unknown scheme, invalid address, or a login over a protocol that has none.
        Unavailable: no broker responded.
        Denied: LOGIN_FAILED.

    Example:
        client = await connect("polywire+tls://billing:secret@broker.example:9555")
    """
    scheme, separator, address = url.partition("://")
    if not separator:
        scheme, address = DEFAULT_SCHEME, url
    if scheme == MEMORY_SCHEME:
        return await connect(await asyncio.to_thread(import_module(MEMORY_MODULE).memory_url, address))
    brokers, reasons = split_brokers(url), []
    if len(brokers) == 1:
        return await _connect(scheme, address)
    for broker in brokers:
        scheme, _, address = broker.rpartition("://")
        try:
            return await _connect(scheme or DEFAULT_SCHEME, address)
        except Unavailable as error:
            reasons.append(error.message)
    raise no_broker_responds(reasons)


async def _connect(scheme: str, address: str) -> WireClient:
    login, address = split_login(address)
    mechanism = None
    if scheme.removesuffix(SCHEME_SUFFIX) == "kafka":
        address, _, mechanism = address.partition(MECHANISM_OPTION)
    host, port = split_address(address)
    if login is not None and scheme.removesuffix(SCHEME_SUFFIX) not in LOGIN_SCHEMES:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"only {'://, '.join(LOGIN_SCHEMES)}:// addresses can have a user name and a password scheme={scheme}",
        )
    tls = client_context() if scheme.endswith(SCHEME_SUFFIX) else None
    match scheme.removesuffix(SCHEME_SUFFIX):
        case "polywire":
            return await PolywireClient.open(host, port, tls=tls, login=login)
        case "cursus":
            from polywire.client.cursus import CursusClient

            return await CursusClient.open(host, port, tls=tls)
        case "flux":
            from polywire.client.flux import FluxClient

            return await FluxClient.open(host, port, tls=tls)
        case "iggy":
            return await _open_iggy(host, port, tls, login)
        case "kafka":
            from polywire.client.kafka import KafkaClient

            return await KafkaClient.open(host, port, tls=tls, login=login, mechanism=mechanism or None)
        case "kafka07":
            from polywire.client.kafka07 import Kafka07Client

            return await Kafka07Client.open(host, port, tls=tls)
        case _:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown scheme scheme={scheme} known={','.join(SCHEMES)}")


async def _open_iggy(host: str, port: int, tls: SSLContext | None, login: Login | None) -> WireClient:
    """Connect with today's dialect if there is a login, otherwise with the dialect of 2023, which has no logins."""
    if login is not None:
        from polywire.client.iggy_today import IggyTodayClient

        return await IggyTodayClient.open(host, port, tls=tls, login=login)
    from polywire.client.iggy import IggyClient

    return await IggyClient.open(host, port, tls=tls)
