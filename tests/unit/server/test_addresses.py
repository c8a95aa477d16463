"""Addresses of both families: formatting, and which listeners accept them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from polywire.cli.serve import Listeners, Process, Storage, Tls, Wires, config_of
from polywire.clock import SystemClock
from polywire.errors import Busy
from polywire.protocols.flux.context import FluxSettings
from polywire.protocols.flux.factory import FluxFactory
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api
from polywire.server.config import Address
from polywire.server.hub import Hub
from polywire.server.listener import close_listeners, open_listeners
from polywire.server.readiness import ReadinessDriver
from polywire.server.recognition import format_address, host_and_port, is_loopback
from polywire.server.relay import Relay
from polywire.server.standby import StandbyHealth
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import host_of, spell_address
from tests.unit.protocols.cursus.dialogue import World as CursusWorld
from tests.unit.protocols.kafka.dialogue import World as KafkaWorld


@pytest.mark.parametrize(
    ("name", "host", "spelled", "loopback"),
    [
        (("127.0.0.1", 5), "127.0.0.1", "127.0.0.1:5", True),
        (("::1", 5, 0, 0), "::1", "[::1]:5", True),
        (("2001:db8::7", 5, 0, 0), "2001:db8::7", "[2001:db8::7]:5", False),
        (("fe80::1%eth0", 5, 0, 2), "fe80::1%eth0", "[fe80::1%eth0]:5", False),
        (("::ffff:127.0.0.1", 5, 0, 0), "127.0.0.1", "127.0.0.1:5", True),
        (("::ffff:10.0.0.1", 5, 0, 0), "10.0.0.1", "10.0.0.1:5", False),
    ],
)
def test_addresses_of_socket_ends_are_formatted(
    name: tuple[object, ...], host: str, spelled: str, loopback: bool
) -> None:
    assert host_and_port(name) == (host, 5)
    assert format_address(name) == spelled == spell_address(host, 5) == str(Address(host, 5))
    assert host_of(spelled) == host
    assert is_loopback(name) is loopback


def test_a_unix_socket_has_no_host() -> None:
    assert (host_and_port(""), format_address("/run/socket"), host_of("")) == (("localhost", 0), "/run/socket", "")
    assert format_address(None) == "localhost"


@pytest.fixture
def has_ipv6() -> None:
    """Skip a test if this machine has no IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6 loopback address: {error}")


def answer_from(host: str, port: int, request: bytes) -> bytes:
    """Return the first bytes of the response, or nothing if no socket listens."""
    try:
        with socket.create_connection((host, port), timeout=60) as peer:
            peer.sendall(request)
            return peer.recv(100)
    except ConnectionRefusedError:
        return b""


async def who_answers(host: str, *, watched: bool) -> dict[str, bytes]:
    """Return what a FLUX listener on this host replies to clients of each family. watched: by the readiness driver."""
    loop = asyncio.get_running_loop()
    memory = MemoryBroker(loop=loop, clock=SystemClock())
    hub = Hub(memory.broker)
    driver = ReadinessDriver(hub, loop) if watched else None
    places = {"flux": Address(host, 0)}
    listeners = await open_listeners(hub, places, [FluxFactory(memory.broker, FluxSettings())], driver=driver)
    try:
        port = listeners[0].address.port
        request = b"V1|1|ADMIN_GET_METADATA|\n"
        return {one: await asyncio.to_thread(answer_from, one, port, request) for one in ("127.0.0.1", "::1")}
    finally:
        close_listeners(listeners)
        while hub.connections:  # noqa: ASYNC110 - looking is the point
            await asyncio.sleep(0.01)
        memory.broker.close()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_port_that_another_process_gets_first_is_in_use(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(socket.socket):
        """A socket that binds its port just before another one listens on it."""

        def bind(self, address: Any, /) -> None:
            super().bind(address)
            other.bind(self.getsockname())
            other.listen()

    async def start() -> None:
        memory = MemoryBroker(loop=asyncio.get_running_loop(), clock=SystemClock())
        factories = [FluxFactory(memory.broker, FluxSettings())]
        try:
            with pytest.raises(Busy, match="the address is in use"):
                await open_listeners(Hub(memory.broker), {"flux": Address("127.0.0.1", 0)}, factories)
        finally:
            memory.broker.close()

    with socket.socket() as other, asyncio.Runner(loop_factory=loop) as runner:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        monkeypatch.setattr("polywire.server.listener.socket.socket", Late)
        runner.run(start())


@pytest.mark.usefixtures("has_ipv6")
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize(
    ("host", "families"),
    [("::", {"127.0.0.1", "::1"}), ("::1", {"::1"}), ("0.0.0.0", {"127.0.0.1"}), ("127.0.0.1", {"127.0.0.1"})],
)
def test_the_ipv6_wildcard_accepts_both_families(host: str, families: set[str], watched: bool) -> None:
    answers = asyncio.run(who_answers(host, watched=watched))
    assert {one for one, answer in answers.items() if answer.startswith(b"V1|1|")} == families


@pytest.mark.usefixtures("has_ipv6")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_standby_accepts_both_families_on_the_ipv6_wildcard(host: str) -> None:
    async def livez() -> list[bytes]:
        relay = Relay(lambda _: None, lambda listener, first: b"HTTP/1.1 200", answered=("http",))
        health, answers = StandbyHealth(lambda: False), []
        request = b"GET /livez HTTP/1.1\r\n\r\n"
        for at in (
            (await relay.listen({"http": Address("::", 0)}))["http"],
            await health.listen(Address("::", 0), None),
        ):
            answers.append(await asyncio.to_thread(answer_from, host, at.port, request))
        await relay.stop()
        await health.stop()
        return answers

    assert [answer[:12] for answer in asyncio.run(livez())] == [b"HTTP/1.1 200"] * 2


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_advertised_ipv6_host_can_have_brackets(host: str) -> None:
    """Other brokers of a bucket connect to it unchanged."""
    config = config_of(
        listeners=Listeners(), tls=Tls(), storage=Storage(advertise=host), process=Process(), wires=Wires()
    )
    assert config.reached_at(Address("::", 5)) == "::1"


def test_responses_name_the_address_that_a_client_connected_to() -> None:
    cursus = CursusWorld().connect()
    cursus.local = ("::1", 9000)
    assert " leaders=[::1]:9000 " in (cursus.ask("CREATE topic=t partitions=1") and cursus.ask("METADATA topic=t"))
    assert cursus.ask("FIND_COORDINATOR group=g").endswith(" host=::1 port=9000")
    kafka = KafkaWorld().connect()
    kafka.local = ("::1", 9094)
    [broker] = kafka.ask(Api.METADATA, topics=[]).brokers
    assert (broker.host, broker.port) == ("::1", 9094)
    coordinator = kafka.ask(Api.FIND_COORDINATOR, 3, key="g")
    assert (coordinator.host, coordinator.port) == ("::1", 9094)
    resource = schema.request(Api.DESCRIBE_CONFIGS).Resources(resource_type=4, resource_name="1")
    [described] = kafka.ask(Api.DESCRIBE_CONFIGS, resources=[resource]).results
    values = {config.name: config.value for config in described.configs}
    assert values["listeners"] == values["advertised.listeners"] == "PLAINTEXT://[::1]:9094"
