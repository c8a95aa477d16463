"""TLS links between machines: mutual verification, half-closed links, and pauses after a rejection."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from structlog.testing import capture_logs

from polywire.clock import SystemClock
from polywire.errors import Invalid
from polywire.protocols.flux.context import FluxSettings
from polywire.protocols.flux.factory import FluxFactory
from polywire.server import link_tls
from polywire.server.config import Address, ServeConfig
from polywire.server.hub import Hub
from polywire.server.link_tls import LinkTls
from polywire.server.listener import INSIDE, INSIDE_TLS, close_listeners, open_inside
from polywire.server.relay import Relay
from polywire.testing.memory_broker import MemoryBroker
from tests.certificates import Certificates

pytestmark = pytest.mark.skipif(
    which("openssl") is None, reason="TLS of links was NOT tried: no openssl to make a certificate with"
)
HERE = "127.0.0.1"
REQUEST = b"V1|1|ADMIN_GET_METADATA|\n"
FORWARD = "cannot forward requests: the other machine"
REFUSED = "rejected a connection from another machine"

Place = tuple[str, int]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("certificates"))
    made.sign("machine", "IP:127.0.0.1,DNS:localhost", use="serverAuth,clientAuth")
    made.sign("expired", "IP:127.0.0.1", days=-1)
    made.sign("elsewhere", "DNS:elsewhere.example")
    made.sign("serves", "IP:127.0.0.1", use="serverAuth")
    made.make_authority("stranger")
    made.sign("foreign", "IP:127.0.0.1", authority="stranger")
    return made


def config_of(certificates: Certificates, name: str) -> ServeConfig:
    certificate, key, authority = (
        certificates.path(name),
        certificates.path(name, "key"),
        certificates.path("authority"),
    )
    return ServeConfig(
        tls_certificate=Path(certificate), tls_key=Path(key), tls_machine_authority=Path(authority), bucket="file:///b"
    )


def tls_of(certificates: Certificates, name: str, monkeypatch: pytest.MonkeyPatch | None = None) -> LinkTls:
    """Return TLS settings; monkeypatch allows settings with which no machine would start."""
    if monkeypatch is not None:
        monkeypatch.setattr(link_tls, "_shake_hands", lambda *_: None)
    return LinkTls(config_of(certificates, name), HERE)


class User:
    """Collects what arrives over a link."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.received = b""
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def eof_received(self) -> bool:
        self.ended.set()
        return False

    def pause_writing(self) -> None:
        """Do nothing: these tests send little."""

    def resume_writing(self) -> None:
        """Do nothing: these tests send little."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


@asynccontextmanager
async def asked(tls: LinkTls) -> AsyncIterator[Place]:
    """Return a connector to another machine."""
    memory = MemoryBroker(loop=asyncio.get_running_loop(), clock=SystemClock())
    hub = Hub(memory.broker)
    factories = [FluxFactory(memory.broker, FluxSettings())]
    listener = await open_inside(hub, Address(HERE, 0), factories, None, tls)
    assert listener.name == INSIDE_TLS
    try:
        yield HERE, listener.address.port
    finally:
        close_listeners([listener])
        async with asyncio.timeout(60):
            while hub.connections:  # noqa: ASYNC110 - looking is the point
                await asyncio.sleep(0.01)


async def answered(tls: LinkTls, place: Place) -> bytes:
    """Return what arrives over a new link; nothing if the peer closes it. Raises OSError."""
    user = User()
    await asyncio.wait_for(tls.connect(user, place), 60)
    user.transport.write(REQUEST)
    user.transport.write_eof()
    await asyncio.wait_for(user.ended.wait(), 60)
    user.transport.close()
    return user.received


def said(lines: Sequence[Any], words: str) -> list[Any]:
    return [line for line in lines if words in line["event"]]


def test_one_direction_of_a_link_can_close_before_the_other(certificates: Certificates) -> None:
    tls = tls_of(certificates, "machine")

    async def run() -> None:
        async with asked(tls) as place:
            assert (await answered(tls, place)).startswith(b"V1|1|")

    asyncio.run(run())


def test_connections_forwarded_with_tls_arrive_whole(certificates: Certificates) -> None:
    """More bytes than buffers hold, both ways, with bytes sent before one direction ends."""
    tls, count, value = tls_of(certificates, "machine"), 50, b"v" * 50_000

    async def run() -> None:
        async with asked(tls) as at:
            asking = Relay(lambda _: at, connects={INSIDE: tls.connect})
            place = (await asking.listen({INSIDE: Address(HERE, 0)}))[INSIDE]
            reader, writer = await asyncio.open_connection(place.host, place.port, limit=len(value) * 2)
            writer.write(b"".join(b"V1|%d|PRODUCE|much k:%b\n" % (number, value) for number in range(count)))
            writer.write(b"".join(b"V1|%d|CONSUME|much %d 0\n" % (number, number % 4) for number in range(count)))
            writer.write_eof()
            received = await asyncio.wait_for(reader.read(), 300)
            assert received.count(b"\n") == 2 * count
            assert received.count(value) >= count // 4
            writer.close()
            await asking.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "host", "reason", "remedy"),
    [
        ("expired", HERE, "certificate has expired", "renew"),
        ("foreign", HERE, "unable to get local issuer certificate", "--tls-machine-authority"),
        ("elsewhere", HERE, "not valid for '127.0.0.1'", "--advertise"),
        ("elsewhere", "localhost", "not valid for 'localhost'", "--advertise"),
    ],
)
def test_nothing_is_sent_to_an_untrusted_machine(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, name: str, host: str, reason: str, remedy: str
) -> None:
    """The rejection is reported once, and the link is retried after a pause."""
    asking, other = tls_of(certificates, "machine"), tls_of(certificates, name, monkeypatch)

    async def run() -> None:
        async with asked(other) as (_, port):
            place = host, port
            with pytest.raises(ssl.SSLCertVerificationError):
                await asking.connect(User(), place)
            for _ in range(3):
                with pytest.raises(ConnectionRefusedError):
                    await asking.connect(User(), place)
            with pytest.raises(ConnectionRefusedError, match="Connect"):
                await asking.connect(User(), (HERE, 1))  # another address does not pause
            asking._refused_until = dict.fromkeys(asking._refused_until, 0.0)
            with pytest.raises(ssl.SSLCertVerificationError):
                await asking.connect(User(), place)

    with capture_logs() as lines:
        asyncio.run(run())
    reported = said(lines, FORWARD + "'s certificate is not trusted")
    assert len(reported) == 2
    assert reason in reported[0]["reason"]
    assert remedy in reported[0]["remedy"]
    assert not said(lines, REFUSED), "a rejected peer is notified by an alert only"


@pytest.mark.parametrize(
    ("name", "reason", "remedy"),
    [
        ("expired", "certificate has expired", "renew"),
        ("foreign", "unable to get local issuer certificate", "--tls-machine-authority"),
        ("serves", "unsuitable certificate purpose", "client authentication"),
    ],
)
def test_a_machine_that_others_reject_logs_it(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, name: str, reason: str, remedy: str
) -> None:
    other, asking = tls_of(certificates, "machine"), tls_of(certificates, name, monkeypatch)

    async def run() -> None:
        async with asked(other) as place:
            assert await answered(asking, place) == b"", "nothing is sent in reply"
            with pytest.raises(ConnectionRefusedError):
                await asking.connect(User(), place)

    with capture_logs() as lines:
        asyncio.run(run())
    (there,) = said(lines, REFUSED)
    assert reason in there["reason"]
    assert remedy in there["remedy"]
    (here,) = said(lines, FORWARD + " rejects this machine's certificate")
    assert here["remedy"] == "see the log of the other machine"


def test_an_accepted_link_can_have_any_host_name(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """The origin of a link is unknown: machines may use other addresses than those they are reached at."""
    other, asking = tls_of(certificates, "machine"), tls_of(certificates, "elsewhere", monkeypatch)

    async def run() -> None:
        async with asked(other) as place:
            assert (await answered(asking, place)).startswith(b"V1|1|")

    asyncio.run(run())


@pytest.mark.parametrize("shown", [None, "plain"])
def test_a_link_without_a_certificate_is_rejected(certificates: Certificates, shown: str | None) -> None:
    """With TLS or without."""
    tls = tls_of(certificates, "machine")

    def ask(place: Place) -> bytes:
        with socket.create_connection(place, timeout=60) as plain, suppress(ConnectionError, ssl.SSLError):
            peer = plain if shown else certificates.context().wrap_socket(plain, server_hostname="localhost")
            with peer:
                peer.sendall(REQUEST)
                found = b""
                while part := peer.recv(1000):
                    found += part
                return found
        return b""

    async def run() -> bytes:
        async with asked(tls) as place:
            return await asyncio.to_thread(ask, place)

    with capture_logs() as lines:
        assert b"V1" not in asyncio.run(run())
    (reported,) = said(lines, REFUSED)
    assert "--tls-machine-authority" in reported["remedy"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("expired", "renew the certificate"),
        ("foreign", "signed by the CA"),
        ("elsewhere", "--advertise"),
        ("serves", "both server and client authentication"),
    ],
)
def test_a_certificate_that_others_would_reject_is_an_error(certificates: Certificates, name: str, words: str) -> None:
    with pytest.raises(Invalid, match="other machines would reject") as caught:
        tls_of(certificates, name)
    assert words in caught.value.message


def test_reload_loads_valid_certificates_only(certificates: Certificates, tmp_path: Path) -> None:
    """A certificate that others would reject is not loaded."""
    config = config_of(certificates, "machine")
    assert config.tls_certificate is not None
    assert config.tls_key is not None
    tls = LinkTls(config, HERE)

    async def run() -> None:
        async with asked(tls) as place:
            first = await asyncio.to_thread(certificates.serial_shown, place, "client")
            certificates.sign("machine", "IP:127.0.0.1,DNS:localhost")
            tls.reload()
            second = await asyncio.to_thread(certificates.serial_shown, place, "client")
            assert first != second
            assert (await answered(tls, place)).startswith(b"V1|1|"), "it presents the new certificate, too"
            certificates.sign("machine", "IP:127.0.0.1", days=-1)
            with pytest.raises(Invalid, match="would reject"):
                tls.reload()
            assert await asyncio.to_thread(certificates.serial_shown, place, "client") == second

    asyncio.run(run())
    certificates.sign("machine", "IP:127.0.0.1,DNS:localhost")
