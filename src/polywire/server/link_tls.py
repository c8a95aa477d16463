"""Mutual TLS of the links between machines that serve one bucket (decision 0126).

* No data is sent to a machine unless its certificate is signed by the CA and has the machine's host name.
* No data is accepted from a machine unless its certificate is signed by the CA.
* If a certificate is rejected, advice is logged, and the link is retried after a pause.
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

REFUSED_S: Final = 10.0  # pause before another attempt after either end rejected the other's certificate
STEPS_MAX: Final = 4  # steps of each end in the handshake that tests this machine's certificates
ALERT: Final = "ALERT"  # part of the name of an OpenSSL error that the other end reported
HOST_MISMATCH: Final = frozenset({62, 64})  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
OUT_OF_TIME: Final = frozenset({9, 10})  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
WRONG_USE: Final = frozenset({26})  # X509_V_ERR_INVALID_PURPOSE
NO_CERTIFICATE: Final = "PEER_DID_NOT_RETURN_A_CERTIFICATE"

log = structlog.get_logger("polywire.server")

_plain_memory: Final = memoryview(bytearray(RECORD_BYTES))
"""Memory for decrypted bytes, shared by all links, because the user of a link copies the bytes immediately."""


class LinkUser(TlsUser, Protocol):
    """The asyncio protocol that uses a TLS connection to another machine."""

    def data_received(self, data: bytes) -> None: ...


class LinkTls(ServerTls):
    """Certificate and CA for connections between machines. New connections use the files of the latest ``reload``.

    A certificate that other machines would reject is not loaded.
    """

    __slots__ = ("_client_context", "_host", "_refused_until")

    def __init__(self, config: ServeConfig, host: str) -> None:
        """Load the files. Raises Invalid(INVALID_REQUEST) if they are missing or unsuitable.

        ``host`` is the host name or address at which other machines reach this one.
        """
        self._host: Final = host
        self._refused_until: dict[tuple[str, int], float] = {}
        super().__init__(config)

    def over(self, hub: Hub, connection: Connection, *, plain_too: bool) -> TlsConnection:
        """Return the protocol for a connection that another machine opened. It rejects connections without TLS."""
        return _AcceptedLink(hub, connection, self.context, plain_too=False)

    async def connect(self, user: LinkUser, address: tuple[str, int]) -> None:
        """Connect to another machine. Return after the handshake, or raise OSError.

        With TLS 1.3, the other machine can reject this machine's certificate even after the handshake. For
        ``REFUSED_S`` after a rejection, calls for the same address fail immediately.
        """
        loop = asyncio.get_running_loop()
        if self._refused_until.get(address, 0.0) > loop.time():
            raise ConnectionRefusedError("a certificate was rejected at this address a short time ago")
        end = LinkEnd(user, self._client_context, address[0], lambda error: self._refused(address, error))
        error: OSError | None = ConnectionAbortedError("the connection attempt was cancelled")
        try:
            await loop.create_connection(lambda: end, *address)
            error = await end.opened
        finally:
            if error is not None:
                end.abort()
        if error is not None:
            raise error

    def _load(self) -> ssl.SSLContext:
        """Load the files, and return the TLS context for accepted connections.

        Raises Invalid(INVALID_REQUEST) for an invalid file, and for a certificate that other machines would reject.
        """
        config = self._config
        assert config.tls_certificate is not None, "there is a certificate"
        assert config.tls_machine_authority is not None, "links use TLS"
        server_end = server_context(config.tls_certificate, config.tls_key, config.tls_machine_authority)
        client_end = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client_end.minimum_version = server_end.minimum_version
        client_end.load_cert_chain(config.tls_certificate, config.tls_key)
        client_end.load_verify_locations(config.tls_machine_authority)
        try:
            _shake_hands(server_end, client_end, self._host)
        except ssl.SSLError as error:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"other machines would reject the certificate ({remedy_of(error)}) reason={reason_of(error)!r}"
                f" certificate={config.tls_certificate} host={self._host} authority={config.tls_machine_authority}",
            ) from error
        self._client_context = client_end
        return server_end

    def _refused(self, address: tuple[str, int], error: ssl.SSLError) -> None:
        now = asyncio.get_running_loop().time()
        self._refused_until = {at: until for at, until in self._refused_until.items() if until > now}
        self._refused_until[address] = now + REFUSED_S
        log.warning(
            "cannot forward requests: the other machine rejects this machine's certificate"
            if is_reported(error)
            else "cannot forward requests: the other machine's certificate is not trusted",
            address=f"{address[0]}:{address[1]}",
            reason=reason_of(error),
            remedy=remedy_of(error),
            pause_s=REFUSED_S,
        )


class LinkEnd(TlsTransport):
    """The connecting end of a TLS connection to another machine.

    The future ``opened`` completes after the handshake, with None or an error.
    """

    __slots__ = ("_link_user", "_refused", "opened")

    def __init__(
        self, user: LinkUser, context: ssl.SSLContext, host: str, refused: Callable[[ssl.SSLError], object]
    ) -> None:
        """Create the end.

        Args:
            user: the asyncio protocol that uses the connection.
            context: the certificates.
            host: the name that the certificate of the other machine must have.
            refused: called if either end rejects the other's certificate.
        """
        super().__init__(user)
        self._link_user: Final = user
        self._refused: Final = refused
        self._engine = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self.opened: Final[asyncio.Future[OSError | None]] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        self._opened_or_failed(ConnectionResetError("the other machine closed the connection during the handshake"))
        super().connection_lost(exc)

    def abort(self) -> None:
        if self._transport is not None:
            super().abort()

    def _opened_or_failed(self, error: OSError | None) -> None:
        if not self.opened.done():
            self.opened.set_result(error)

    def _may_open(self) -> bool:
        self._opened_or_failed(None)
        return True

    def _failed(self, reason: str, error: ssl.SSLError | None) -> None:
        """Report the failure. If a certificate was rejected, also call ``refused``."""
        if error is not None and (not self._open or is_reported(error)):
            self._refused(error)
        self._opened_or_failed(error or TimeoutError(reason))
        self._transport.close()  # sends a pending alert first

    def _plain_memory(self) -> memoryview:
        return _plain_memory

    def _plain_received(self, count: int) -> None:
        self._link_user.data_received(bytes(_plain_memory[:count]))


class _AcceptedLink(TlsConnection):
    """A TLS connection that another machine opened.

    Its certificate does not log in a user, because each forwarded request names its user.
    """

    __slots__ = ()

    def _may_open(self) -> bool:
        return True

    def _failed(self, reason: str, error: ssl.SSLError | None) -> None:
        if error is None:
            super()._failed(reason, error)
            return
        if not is_reported(error):  # otherwise the other machine logs the reason
            log.warning(
                "rejected a connection from another machine",
                peer=self._connection.peer,
                reason=reason_of(error),
                remedy=remedy_of(error),
            )
        self._transport.close()  # sends a pending alert first


def is_reported(error: ssl.SSLError) -> bool:
    """Return whether the other end detected the error and reported it in an alert."""
    return ALERT in (error.reason or "")


def reason_of(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    return (error.reason or str(error)).lower().replace("_", " ")


def remedy_of(error: ssl.SSLError) -> str:
    if is_reported(error):
        return "see the log of the other machine"
    if not isinstance(error, ssl.SSLCertVerificationError):
        if error.reason == NO_CERTIFICATE:
            return "start that machine with a certificate and --tls-machine-authority"
        return "start every machine of the bucket with --tls-machine-authority"
    if error.verify_code in OUT_OF_TIME:
        return "check the clocks of both machines; if they are right, renew the certificate and reload it with SIGHUP"
    if error.verify_code in HOST_MISMATCH:
        return "use a certificate that names the host at which other machines reach this one (--advertise)"
    if error.verify_code in WRONG_USE:
        return "use a certificate for both server and client authentication"
    return "use a certificate signed by the CA of --tls-machine-authority, which must be the same on every machine"


def link_tls(config: ServeConfig, host: str) -> LinkTls | None:
    """Return the TLS for connections between machines; None if it is not configured.

    Raises Invalid(INVALID_REQUEST) for invalid files.
    """
    return None if config.tls_machine_authority is None else LinkTls(config, host)


def _shake_hands(server_end: ssl.SSLContext, client_end: ssl.SSLContext, host: str) -> None:
    """Make a TLS handshake between two contexts, in memory. Raises SSLError if one rejects the other's certificate."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client_end.wrap_bio(back, there, server_hostname=host), server_end.wrap_bio(there, back, server_side=True)
    for _ in range(STEPS_MAX):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
