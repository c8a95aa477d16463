"""TLS between clients and sessions: on shared ports, with back-pressure, and with invalid settings."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shutil import which

import pytest

from polywire.client import connect
from polywire.client.bulk import BulkConnection
from polywire.client.sync import connect as connect_sync
from polywire.clock import SystemClock
from polywire.errors import Denied, Invalid, Unavailable
from polywire.protocols.flux.context import FluxSettings
from polywire.protocols.flux.factory import FluxFactory
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.server.config import Address, ServeConfig
from polywire.server.hub import Hub
from polywire.server.listener import close_listeners, open_listeners
from polywire.server.tls import ServerTls, is_hello, server_context
from polywire.server.users import add_user
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Level
from tests.broker_process import WIRES, BrokerProcess
from tests.certificates import Certificates

pytestmark = pytest.mark.skipif(
    which("openssl") is None, reason="TLS was NOT tried: no openssl to make a certificate with"
)
ROWS = 20_000
VALUE = bytes(range(256)) * 4


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[BrokerProcess]:
    """Serve every protocol with and without TLS, and the port for all of them."""
    options = ["--any", "127.0.0.1:0", "--tls-certificate", certificates.path("server")]
    options += ["--tls-key", certificates.path("server", "key")]
    for wire in WIRES:
        options += [f"--{wire}-tls", "127.0.0.1:0"]
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data", *options) as running:
        yield running
        assert running.stop() == 0, running.log_text()


def tls_to(broker: BrokerProcess, wire: str, certificates: Certificates) -> ssl.SSLSocket:
    """Return a socket of a client that trusts the certificate authority."""
    plain = socket.create_connection(broker.addresses[f"{wire}-tls"], timeout=60)
    return certificates.context().wrap_socket(plain, server_hostname="localhost")


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch, certificates: Certificates) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certificates.path("authority"))


async def create_topic(broker: BrokerProcess, topic: str) -> None:
    """Create it over the protocol that can do everything."""
    client = await connect.connect(broker.url("polywire"))
    await client.create_topic(topic, 1)
    await client.close()


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("port", ["own", "any"])
def test_every_protocol_works_with_tls(broker: BrokerProcess, wire: str, port: str) -> None:
    async def work() -> None:
        host, number = broker.addresses[f"{wire}-tls" if port == "own" else "any"]
        plain_host, plain_number = broker.addresses[wire if port == "own" else "any"]
        client = await connect.connect(f"{wire}+tls://{host}:{number}")
        plain = await connect.connect(f"{wire}://{plain_host}:{plain_number}")
        topic = f"{wire}-{port}"
        await create_topic(broker, topic)
        for number in range(3):
            await client.produce(topic, [Record(b"under-tls-%d" % number, b"k")])
            await plain.produce(topic, [Record(b"plain-%d" % number, b"k")])
        found = [record.value for record in await client.fetch(topic, 0, 0)]
        assert found == [b"%s-%d" % (kind, n) for n in range(3) for kind in (b"under-tls", b"plain")]
        assert [record.value for record in await plain.fetch(topic, 0, 0)] == found
        await client.close()
        await plain.close()

    asyncio.run(work())


@pytest.mark.usefixtures("trusted")
def test_large_amounts_of_data_are_sent_both_ways(broker: BrokerProcess, certificates: Certificates) -> None:
    """Frames are far larger than a record, the socket's buffers and a connection's limit; the reader is slow."""
    host, port = broker.addresses["polywire-tls"]
    client = BulkConnection(host, port, tls=certificates.context())
    client.create_topic("much", 1)
    batches = [
        from_records([Record(b"%d:" % number + VALUE) for number in range(first, first + 1000)])
        for first in range(0, ROWS, 1000)
    ]
    for batch in batches:
        client.produce("much", 0, [batch], Level.WRITTEN)
    found = client.bounds(["much"])[0]
    assert found.next_offset == ROWS
    values = sum(
        len(chunk.data) for chunk in client.fetch_range("much", 0, found.incarnation, 0, ROWS, epoch=found.epoch)
    )
    assert values > ROWS * len(VALUE)
    client.close()


@pytest.mark.usefixtures("trusted")
def test_blocking_client(broker: BrokerProcess) -> None:
    host, port = broker.addresses["any"]
    with connect_sync(f"polywire+tls://{host}:{port}") as client:
        client.create_topic("blocking", 1)
        client.produce("blocking", [Record(b"a")])
        assert [record.value for record in client.fetch("blocking", 0, 0)] == [b"a"]


def test_unread_responses_have_a_limit(broker: BrokerProcess, certificates: Certificates) -> None:
    """They wait in the broker, and arrive complete when the client reads again."""
    count, value = 2_000, b"v" * 50_000
    with tls_to(broker, "flux", certificates) as slow:
        slow.sendall(b"V1|0|PRODUCE|slow k:%b\n" % value)
        assert slow.recv(65_536).startswith(b"V1|0|OK")
        before = broker.memory_bytes
        slow.sendall(b"".join(b"V1|1|CONSUME|slow %d 0\n" % partition for partition in range(4)) * (count // 4))
        time.sleep(0.5)
        assert broker.memory_bytes < before + 32 * 1024 * 1024, "the broker would have sent 100 MB"
        received = lines = 0
        while lines < count:
            answer = slow.recv(65_536)
            received += len(answer)
            lines += answer.count(b"\n")
        assert lines == count
        assert received > count // 4 * len(value)


def send_and_wait(address: tuple[str, int], content: bytes) -> None:
    """Send these bytes only; the broker closes the connection."""
    with socket.create_connection(address, timeout=60) as plain, suppress(ConnectionResetError):
        plain.sendall(content)
        plain.shutdown(socket.SHUT_WR)
        while plain.recv(65_536):
            pass


def test_bad_handshakes_close_the_connection(broker: BrokerProcess, certificates: Certificates) -> None:
    address = broker.addresses["polywire-tls"]
    with socket.create_connection(address, timeout=60) as plain:
        plain.sendall(b"POLYWIRE in plain words\n")
        received = plain.recv(100)
        while received:
            received = plain.recv(100)
    unknown = ssl.create_default_context()
    plain = socket.create_connection(address)
    with pytest.raises(ssl.SSLCertVerificationError):
        unknown.wrap_socket(plain, server_hostname="localhost")
    old = certificates.context()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with old.wrap_socket(socket.create_connection(address), server_hostname="localhost") as tls:
        assert tls.version() == "TLSv1.2"
    chance = random.Random(1)
    for size in (1, 5, 6, 100, 5000):
        for start in (b"\x16\x03\x01", b"\x16\x03\x03\x00\x10\x01", b""):
            send_and_wait(broker.addresses["any"], (start + chance.randbytes(size))[:size])
    assert "unexpected error" not in broker.log_text()
    assert "Traceback" not in broker.log_text()


def test_the_end_of_the_stream_with_tls(broker: BrokerProcess, certificates: Certificates) -> None:
    """A client that has closed its sending side still gets its response."""
    with tls_to(broker, "flux", certificates) as tls:
        tls.sendall(b"V1|1|ADMIN_GET_METADATA|\n")
        socket.socket.shutdown(tls, socket.SHUT_WR)
        answer = b""
        while b"\n" not in answer:
            answer += tls.recv(65_536)
        assert tls.recv(100) == b""


def test_certificates_of_clients(tmp_path: Path, certificates: Certificates) -> None:
    options = ["--tls-certificate", certificates.path("server"), "--tls-key", certificates.path("server", "key")]
    options += ["--tls-client-authority", certificates.path("authority"), "--polywire-tls", "127.0.0.1:0"]
    with BrokerProcess(tmp_path / "data", *options) as broker:
        host, port = broker.addresses["polywire-tls"]
        known = BulkConnection(host, port, tls=certificates.context("client"))
        known.create_topic("t", 1)
        known.close()
        stranger = BulkConnection(host, port, tls=certificates.context(), reconnect_s=0)
        with pytest.raises(Unavailable):
            stranger.create_topic("u", 1)
        assert broker.stop() == 0


def test_a_client_certificate_sets_the_user(tmp_path: Path, certificates: Certificates) -> None:
    users = tmp_path / "users"
    add_user(users, "client", "unused", "manage_streams@shop")
    options = ["--tls-certificate", certificates.path("server"), "--tls-key", certificates.path("server", "key")]
    options += ["--tls-client-authority", certificates.path("authority"), "--users", str(users)]
    for wire in ("polywire", "flux"):
        options += [f"--{wire}-tls", "127.0.0.1:0"]
    with BrokerProcess(tmp_path / "data", *options) as broker:
        host, port = broker.addresses["polywire-tls"]
        known = BulkConnection(host, port, tls=certificates.context("client"))
        known.create_topic("shop.orders", 1)
        with pytest.raises(Denied):
            known.create_topic("other.orders", 1)
        known.close()
        assert flux_over_tls(broker, certificates, "client", b"PRODUCE|shop.orders k:v").startswith(b"V1|1|OK|")
        assert b"not allowed" in flux_over_tls(broker, certificates, "client", b"PRODUCE|other.orders k:v")
        assert flux_over_tls(broker, certificates, "server", b"PRODUCE|shop.orders k:v") == b"", (
            "there is no user called server"
        )
        assert "certificate does not name a user" in broker.log_text()
        assert broker.stop() == 0


def flux_over_tls(broker: BrokerProcess, certificates: Certificates, own: str, line: bytes) -> bytes:
    """Return the response to a client with its own certificate; nothing if it is rejected."""
    plain = socket.create_connection(broker.addresses["flux-tls"], timeout=60)
    with suppress(ConnectionError, ssl.SSLError), plain:
        peer = certificates.context(own).wrap_socket(plain, server_hostname="localhost")
        with peer:
            peer.sendall(b"V1|1|" + line + b"\n")
            return peer.recv(1000)
    return b""


def test_invalid_tls_settings_are_rejected(tmp_path: Path, certificates: Certificates) -> None:
    with pytest.raises(Invalid, match="certificate"):
        ServeConfig(tls={"flux": "127.0.0.1:0"}).listeners()
    with pytest.raises(Invalid, match="cannot use"):
        server_context(tmp_path / "none.pem", None, None)
    with pytest.raises(Invalid, match="cannot use"):
        server_context(Path(certificates.path("server")), Path(certificates.path("client", "key")), None)
    pem = Path(certificates.path("server"))
    wide = {"flux": "0.0.0.0:1"}
    with pytest.raises(Invalid, match="insecure"):
        ServeConfig(tls=wide, tls_certificate=pem).listeners()
    assert "flux-tls" in ServeConfig(tls=wide, tls_certificate=pem, tls_client_authority=pem).listeners()


def test_a_client_hello_is_detected() -> None:
    hello = b"\x16\x03\x01\x02\x00\x01\x00"
    assert [is_hello(hello[:size]) for size in range(8)] == [None] * 6 + [True, True]
    for other in (b"P", b"\x16\x04", b"\x16\x03\x01\x02\x00\x00", b"\x00\x00\x00\x05"):
        assert is_hello(other) is False


def shown_by(address: tuple[str, int], certificates: Certificates) -> object:
    """Return the name in the certificate that a broker presents."""
    context = certificates.context()
    context.check_hostname = False
    with context.wrap_socket(socket.create_connection(address, timeout=60)) as tls:
        certificate = tls.getpeercert()
        assert certificate is not None
        return certificate["subject"]


def test_reload_replaces_the_certificate(tmp_path: Path, certificates: Certificates) -> None:
    pem, key = tmp_path / "broker.pem", tmp_path / "broker.key"

    def place(name: str) -> None:
        pem.write_bytes(Path(certificates.path(name)).read_bytes())
        key.write_bytes(Path(certificates.path(name, "key")).read_bytes())
        key.chmod(0o600)

    place("server")
    tls = ("--polywire-tls", "127.0.0.1:0", "--tls-certificate", str(pem), "--tls-key", str(key))
    with BrokerProcess(tmp_path / "data", *tls, wires=()) as broker:

        def reload(times: int) -> object:
            os.kill(broker.pid, signal.SIGHUP)
            deadline = time.monotonic() + 60
            while broker.log_text().count("event=reloaded") < times:
                assert time.monotonic() < deadline, broker.log_text()
                time.sleep(0.02)
            return shown_by(broker.addresses["polywire-tls"], certificates)

        host, port = broker.addresses["polywire-tls"]
        before = BulkConnection(host, port, tls=certificates.context())
        before.create_topic("t", 1)
        place("client")
        assert reload(1) == ((("commonName", "client"),),)
        key.write_text("rubbish")
        assert reload(2) == ((("commonName", "client"),),), "the earlier certificate stays in use"
        assert "reload failed" in broker.log_text()
        before.create_topic("u", 1)
        before.close()
        assert broker.stop() == 0


def test_the_port_for_all_protocols_can_require_tls(certificates: Certificates) -> None:
    pem, key = Path(certificates.path("server")), Path(certificates.path("server", "key"))
    tls = ServerTls(ServeConfig(tls_certificate=pem, tls_key=key))

    def plain(address: tuple[str, int]) -> bytes:
        with socket.create_connection(address, timeout=60) as peer, suppress(ConnectionResetError):
            peer.sendall(b"V1|1|ADMIN_GET_METADATA|\n")
            peer.shutdown(socket.SHUT_WR)
            return peer.recv(100)
        return b""

    async def ask(*, any_plain: bool) -> bytes:
        memory = MemoryBroker(loop=asyncio.get_running_loop(), clock=SystemClock())
        factories = [FluxFactory(memory.broker, FluxSettings())]
        place = {"any": Address("127.0.0.1", 0)}
        hub = Hub(memory.broker)
        listeners = await open_listeners(hub, place, factories, any_plain=any_plain, tls=tls)
        address = listeners[0].address
        answer = await asyncio.to_thread(plain, (address.host, address.port))
        close_listeners(listeners)
        while hub.connections:  # noqa: ASYNC110 - looking is the point
            await asyncio.sleep(0.01)
        return answer

    assert asyncio.run(ask(any_plain=True)).startswith(b"V1|1|")
    assert not asyncio.run(ask(any_plain=False)).startswith(b"V1")
