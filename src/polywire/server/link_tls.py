"""TLS of the links between machines that serve one bucket: each shows its certificate and verifies the other's (decision 0075).

Promises: no byte of a link leaves for a machine whose certificate does not name the host that was connected to, and none is taken from one
whose certificate the authority has not signed; what is refused is told with what to do about it, and tried again after a pause.
Must not know: what links carry.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

import structlog

from polywire.errors import ErrorCode, Invalid
from polywire.server.config import ServeConfig
from polywire.server.connection import Connection
from polywire.server.hub import Hub
from polywire.server.tls import RECORD_BYTES, ServerTls, TlsConnection, TlsTransport, TlsUser, server_context

REFUSED_S: Final = 10.0  # that an address is left alone whose certificate, or who ours, was refused
STEPS_MAX: Final = 4  # of a handshake with oneself: each end answers the other's flights
ALERT: Final = "ALERT"  # in the name of an error that the other end has told
NAMES_NOBODY: Final = frozenset({62, 64})  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
OUT_OF_TIME: Final = frozenset({9, 10})  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
WRONG_USE: Final = frozenset({26})  # X509_V_ERR_INVALID_PURPOSE
SHOWS_NONE: Final = "PEER_DID_NOT_RETURN_A_CERTIFICATE"

log = structlog.get_logger("polywire.server")

_room: Final = memoryview(bytearray(RECORD_BYTES))
"""Decrypted bytes on their way to a user, who is given a copy at once: one buffer serves all links."""


class LinkUser(TlsUser, Protocol):
    """For whom a link under TLS is the transport."""

    def data_received(self, data: bytes) -> None:
        """Bytes came."""


class LinkTls(ServerTls):
    """The certificate that this machine shows to the others, and the authority that has signed theirs; links from now on see the files of the
    latest ``reload``. Guards: what the others would refuse is not taken up."""

    __slots__ = ("_asking", "_host", "_refused_until")

    def __init__(self, config: ServeConfig, host: str) -> None:
        """host: by which the others reach this machine. Raises Invalid(INVALID_REQUEST)."""
        self._host: Final = host
        self._refused_until: dict[tuple[str, int], float] = {}
        super().__init__(config)

    def over(self, hub: Hub, connection: Connection, *, plain_too: bool) -> TlsConnection:
        """See ``ServerTls``; nobody comes without TLS."""
        return _AskedConnection(hub, connection, self.context, plain_too=False)

    async def connect(self, user: LinkUser, place: tuple[str, int]) -> None:
        """Connect a user to another machine, once each has verified the other as far as can be told. Raises OSError: at once, as long as
        somebody was refused there a short time ago."""
        loop = asyncio.get_running_loop()
        if self._refused_until.get(place, 0.0) > loop.time():
            raise ConnectionRefusedError("a certificate was refused there a short time ago")
        end = LinkEnd(user, self._asking, place[0], lambda error: self._refused(place, error))
        error: OSError | None = ConnectionAbortedError("nobody waits for this link")
        try:
            await loop.create_connection(lambda: end, *place)
            error = await end.opened
        finally:
            if error is not None:
                end.abort()
        if error is not None:
            raise error

    def _load(self) -> ssl.SSLContext:
        """Both ends' part. Raises Invalid(INVALID_REQUEST), also where the machine would not take itself for one of them."""
        config = self._config
        assert config.tls_certificate is not None, "there is a certificate"
        assert config.tls_machine_authority is not None, "links are under TLS"
        asked = server_context(config.tls_certificate, config.tls_key, config.tls_machine_authority)
        asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        asking.minimum_version = asked.minimum_version
        asking.load_cert_chain(config.tls_certificate, config.tls_key)
        asking.load_verify_locations(config.tls_machine_authority)
        try:
            _shake_hands(asked, asking, self._host)
        except ssl.SSLError as error:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"other machines would reject the certificate ({remedy_of(error)}) reason={reason_of(error)!r}"
                f" certificate={config.tls_certificate} host={self._host} authority={config.tls_machine_authority}",
            ) from error
        self._asking = asking
        return asked

    def _refused(self, place: tuple[str, int], error: ssl.SSLError) -> None:
        now = asyncio.get_running_loop().time()
        self._refused_until = {at: until for at, until in self._refused_until.items() if until > now}
        self._refused_until[place] = now + REFUSED_S
        log.warning(
            "cannot forward requests: the other machine rejects this machine's certificate"
            if is_told(error)
            else "cannot forward requests: the other machine's certificate is not trusted",
            address=f"{place[0]}:{place[1]}",
            reason=reason_of(error),
            remedy=remedy_of(error),
            pause_s=REFUSED_S,
        )


class LinkEnd(TlsTransport):
    """The end of a link under TLS that has connected. ``opened`` has a result once the handshake is over: None, or why it failed."""

    __slots__ = ("_link_user", "_refused", "opened")

    def __init__(
        self, user: LinkUser, context: ssl.SSLContext, host: str, refused: Callable[[ssl.SSLError], object]
    ) -> None:
        """host: whom the peer's certificate must name. refused: told that one of both ends does not trust the other."""
        super().__init__(user)
        self._link_user: Final = user
        self._refused: Final = refused
        self._engine = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self.opened: Final[asyncio.Future[OSError | None]] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        self._over(ConnectionResetError("the other machine closed the connection during the handshake"))
        super().connection_lost(exc)

    def abort(self) -> None:
        if self._transport is not None:
            super().abort()

    def _over(self, error: OSError | None) -> None:
        if not self.opened.done():
            self.opened.set_result(error)

    def _may_open(self) -> bool:
        self._over(None)
        return True

    def _failed(self, reason: str, error: ssl.SSLError | None) -> None:
        """Whether our certificate is taken comes behind the handshake, as TLS 1.3 has it."""
        if error is not None and (not self._open or is_told(error)):
            self._refused(error)
        self._over(error or TimeoutError(reason))
        self._transport.close()  # the alert still leaves

    def _room(self) -> memoryview:
        return _room

    def _came(self, count: int) -> None:
        self._link_user.data_received(bytes(_room[:count]))


class _AskedConnection(TlsConnection):
    """A link that another machine has made: for whom it asks stands in its bytes, and is nothing that its certificate says."""

    __slots__ = ()

    def _may_open(self) -> bool:
        return True

    def _failed(self, reason: str, error: ssl.SSLError | None) -> None:
        if error is None:
            super()._failed(reason, error)
            return
        if not is_told(error):  # else the other machine tells why
            log.warning(
                "rejected a connection from another machine",
                peer=self._connection.peer,
                reason=reason_of(error),
                remedy=remedy_of(error),
            )
        self._transport.close()  # the alert still leaves


def is_told(error: ssl.SSLError) -> bool:
    """Whether it is the other end that has refused."""
    return ALERT in (error.reason or "")


def reason_of(error: ssl.SSLError) -> str:
    """What was wrong, as OpenSSL says it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    return (error.reason or str(error)).lower().replace("_", " ")


def remedy_of(error: ssl.SSLError) -> str:
    """What to do about it."""
    if is_told(error):
        return "see the log of the other machine"
    if not isinstance(error, ssl.SSLCertVerificationError):
        if error.reason == SHOWS_NONE:
            return "start that machine with a certificate and --tls-machine-authority"
        return "start every machine of the bucket with --tls-machine-authority"
    if error.verify_code in OUT_OF_TIME:
        return "check the clocks of both machines; if they are right, renew the certificate and reload it with SIGHUP"
    if error.verify_code in NAMES_NOBODY:
        return "use a certificate that names the host at which other machines reach this one (--advertise)"
    if error.verify_code in WRONG_USE:
        return "use a certificate for both server and client authentication"
    return "use a certificate signed by the CA of --tls-machine-authority, which must be the same on every machine"


def link_tls(config: ServeConfig, host: str) -> LinkTls | None:
    """TLS of links, where there is to be any. Raises Invalid(INVALID_REQUEST)."""
    return None if config.tls_machine_authority is None else LinkTls(config, host)


def _shake_hands(asked: ssl.SSLContext, asking: ssl.SSLContext, host: str) -> None:
    """Be both ends of a link. Raises SSLError."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = asking.wrap_bio(back, there, server_hostname=host), asked.wrap_bio(there, back, server_side=True)
    for _ in range(STEPS_MAX):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
