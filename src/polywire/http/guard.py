"""Authenticate HTTP requests, and reject cross-site requests.

* A page of another site cannot change anything with a request, and cannot read a response (decision 0121).
* Users log in as on every protocol: with a password, a token or a client certificate. A broker without users needs no
  login.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Collection, MutableMapping
from ipaddress import ip_address
from typing import Any, Final

from starlette.datastructures import Headers

from polywire.broker.access import ROOT, Access, Principal
from polywire.errors import BrokerError, Denied, ErrorCode
from polywire.http import errors
from polywire.http.exchange import PEER, Asgi, Receive, Scope, Send
from polywire.log.base import Completion
from polywire.protocols.runtime.session import Output

PRINCIPAL: Final = "polywire.principal"
"""Key of the user in an ASGI scope."""
# no login is needed, so that load balancers can check the health; nothing else is returned
OPEN_PATHS: Final = frozenset({"/livez", "/readyz"})
CHANGE_HEADER: Final = (
    "x-polywire"  # browsers send it to another site only after a CORS preflight, which this server never allows
)
READING: Final = frozenset({"GET", "HEAD"})
SAME_SITE: Final = frozenset({"same-origin", "none"})  # a browser sends "none" for a typed address or a bookmark
HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


class Guard:
    """An ASGI application that checks requests before it passes them to another application."""

    def __init__(self, app: Asgi, access: Access, *, names: Collection[str]) -> None:
        """``names`` are host names that browsers may use while there are no users, besides IP addresses and localhost."""
        self._app: Final = app
        self._access: Final = access
        self._names: Final = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        headers = Headers(scope=scope)
        try:
            check_origin(scope["method"], headers, names=self._names if self._access.is_open else None)
            if scope["path"] not in OPEN_PATHS:
                scope[PRINCIPAL] = await self._identify(scope[PEER], headers.get("authorization", ""))
        except BrokerError as error:
            await errors.error_response(error, scope["path"])(scope, receive, send_guarded)
            return
        await self._app(scope, receive, send_guarded)

    async def _identify(self, output: Output, authorization: str) -> Principal:
        """Return the user of a request. Raises BrokerError if the credentials are missing or wrong."""
        access = self._access
        if access.is_open:
            return ROOT
        scheme, _, credentials = authorization.partition(" ")
        match scheme.lower():
            case "":
                if output.certified is None:
                    raise Denied(ErrorCode.LOGIN_REQUIRED, "log in first")
                principal = output.certified
            case "bearer":
                principal = access.log_in_with_token(credentials.strip(), peer=output.peer)
            case "basic":
                principal = await self._log_in(credentials, output.peer)
            case _:
                raise Denied(ErrorCode.LOGIN_FAILED, "authentication must be Basic or Bearer")
        output.identified(principal)
        return principal

    async def _log_in(self, credentials: str, peer: str) -> Principal:
        try:
            name, colon, password = b64decode(credentials, validate=True).decode().partition(":")
        except (NotBase64, ValueError):
            colon = ""
        if not colon:
            raise Denied(ErrorCode.LOGIN_FAILED, "the Basic credentials are malformed")
        cached = self._access.recall(name, password, peer=peer)
        if cached is not None:
            return cached
        found: asyncio.Future[Principal] = asyncio.get_running_loop().create_future()
        self._access.log_in_with_either(name, password, completing(found), peer=peer)
        return await found


def completing(future: asyncio.Future[Any]) -> Completion[Any]:
    """Return a callback that sets the result or the exception of a future."""

    def done(result: Any) -> None:
        if future.done():  # done already if the request was cancelled
            return
        if isinstance(result, BrokerError):
            future.set_exception(result)
        else:
            future.set_result(result)

    return done


def check_origin(method: str, headers: Headers, *, names: Collection[str] | None) -> None:
    """Raise Denied(DENIED) for a request that a page of another site may have caused.

    ``names`` are the allowed host names; None allows all. Requests of HTTP/1.0 may have no host, as those of load
    balancers, but browsers always send one.
    """
    host = headers.get("host")
    if names is not None and host is not None and not _is_known(host, names):
        raise Denied(ErrorCode.DENIED, f"the host name is not allowed (add it to --http-names) host={host!r}")
    site = headers.get("sec-fetch-site")
    is_reading = method in READING
    navigates = (
        is_reading and headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    )
    if site is not None and site not in SAME_SITE and not navigates:
        raise Denied(ErrorCode.DENIED, f"cross-site requests are not allowed site={site!r}")
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        raise Denied(ErrorCode.DENIED, f"cross-origin requests are not allowed origin={origin!r}")
    if not is_reading and CHANGE_HEADER not in headers:
        raise Denied(
            ErrorCode.DENIED, f"a request that changes something needs the header {CHANGE_HEADER} (with any value)"
        )


def _is_known(host: str, names: Collection[str]) -> bool:
    """Return whether a Host header is an IP address, localhost or an allowed name.

    Other names are rejected to prevent DNS rebinding.
    """
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdigit():
        name = host
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    name = name.lower()
    if "%" in name:  # an IPv6 zone: Python accepts any characters after it, and no browser sends one
        return False
    if name == "localhost" or name in names:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
