"""Error messages for failed connections, by the peer that listens at the address."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import pytest

import polywire
from polywire.client import connection, consumer, lane, link
from polywire.client.base import WireClient
from polywire.client.connect import connect
from polywire.client.consumer import Consumer
from polywire.client.failures import cannot_connect
from polywire.client.sockets import FramedSocket
from polywire.errors import BrokerError, Denied, ErrorCode, Invalid, Unavailable
from polywire.testing.process import lasting_port
from polywire.testing.thread import BrokerThread
from tests.unit.client.peers import answering

Work = Callable[[str], Awaitable[None]]

WIRES: Final = ("polywire", "kafka", "flux", "cursus", "iggy", "kafka07")


async def refusal(url: str) -> str:
    try:
        client = await connect(url)
    except BrokerError as error:
        return error.message
    await client.close()
    raise AssertionError("the peer responded")


@pytest.mark.parametrize("wire", WIRES)
def test_connection_refused(wire: str) -> None:
    port = lasting_port()
    reported = asyncio.run(refusal(f"{wire}://127.0.0.1:{port}"))
    assert (
        reported
        == f"cannot connect: connection refused (check that a broker is running there) address=127.0.0.1:{port}"
    )


@pytest.mark.parametrize("wire", WIRES)
def test_tls_on_a_plain_port(wire: str) -> None:
    with BrokerThread(wires=[wire]) as broker:
        reported = asyncio.run(refusal(broker.url(wire).replace("://", "+tls://")))
    assert reported.startswith("cannot connect: ")
    assert "TLS" in reported


async def visits(url: str, answer: bytes | None, work: Work) -> tuple[int, BrokerError]:
    """Return how often a port with this fixed reply is tried (None: it never replies), and the final error."""
    async with answering(answer) as visited:
        with pytest.raises(BrokerError) as raised:
            await work(f"{url}://{visited.place}")
    return visited.count, raised.value


async def list_topics(url: str) -> None:
    async with polywire.connect(url, connect_s=3600, reconnect_s=3600) as client:
        await client.topics()


async def ask_once(url: str) -> None:
    client = await connect(url)
    try:
        await client.topics()
    finally:
        await client.close()


async def send(url: str) -> None:
    async with polywire.connect(url, connect_s=3600) as client, client.producer(reconnect_s=3600) as producer:
        await producer.send_and_wait("orders", "hello")


async def read(url: str) -> None:
    async with Consumer(url, "orders", reconnect_s=3600) as reader:
        await reader.batch(timeout_s=3600)


async def list_topics_soon(url: str) -> None:
    async with polywire.connect(url, connect_s=0.5, reconnect_s=0.5) as client:
        await client.topics()


async def send_soon(url: str) -> None:
    async with polywire.connect(url) as client, client.producer(reconnect_s=0.5) as producer:
        await producer.send_and_wait("orders", "hello")


async def read_soon(url: str) -> None:
    async with Consumer(url, "orders", reconnect_s=0.5) as reader:
        await reader.batch(timeout_s=3600)


CASES: Final = [
    (wire, work)
    for wire in WIRES
    for work in (list_topics, send, read)
    if (wire, work) != ("kafka07", list_topics)  # that protocol cannot do it
]


@pytest.mark.parametrize(("wire", "work"), CASES)
def test_no_tls_on_a_port_with_tls(wire: str, work: Work) -> None:
    """A TLS port replies to plain text with an alert, and a retry cannot fix that."""
    count, error = asyncio.run(visits(wire, b"\x15\x03\x03\x00\x02\x02\x46", work))
    assert error.message == "the port uses TLS (add +tls to the scheme)"
    assert isinstance(error, Invalid)
    assert count <= 2  # the client's, and that of its producer


@pytest.mark.parametrize(("wire", "work"), CASES)
def test_a_port_that_always_closes_connections(wire: str, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((link, "BACKOFF_MIN_S"), (consumer, "BACKOFF_MIN_S"), (lane, "PAUSE_MIN_S")):
        monkeypatch.setattr(module, name, 0.001)
    monkeypatch.setattr(link, "AT_ONCE_S", 3600.0)
    count, error = asyncio.run(visits(wire, b"", work))
    assert ("without replying" in error.message) is (wire != "kafka07"), "that protocol refuses requests this way"
    assert "check th" in error.message, "it advises to check the port"
    assert ("whether it requires a login" in error.message) is (wire == "kafka")
    assert ("that this is the polywire listener (by default port 9555" in error.message) is (wire == "polywire")
    assert link.CLOSED_MAX <= count <= link.CLOSED_MAX + 1


@pytest.mark.parametrize("work", [list_topics_soon, send_soon, read_soon])
def test_a_port_that_closes_connections_slowly_is_retried(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby also closes connections, but not at once: there may be a leader a moment later."""
    for module, name in ((link, "BACKOFF_MIN_S"), (consumer, "BACKOFF_MIN_S"), (lane, "PAUSE_MIN_S")):
        monkeypatch.setattr(module, name, 0.001)
    for module, name in ((link, "BACKOFF_MAX_S"), (consumer, "BACKOFF_MAX_S"), (lane, "PAUSE_MAX_S")):
        monkeypatch.setattr(module, name, 0.01)
    monkeypatch.setattr(link, "AT_ONCE_S", 0.0)
    monkeypatch.setattr(link, "CLOSED_MAX", 2)
    count, error = asyncio.run(visits("cursus", b"", work))
    assert "that the cluster has a leader" in error.message
    assert count > link.CLOSED_MAX + 1


OTHERS: Final = (
    b"",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"V1|0|ERR|BAD_REQUEST|malformed\n",
    bytes.fromhex("b60f0000") + bytes(4),
    b"\x00\x00\x00\x05ERROR",
)


@pytest.mark.parametrize("answer", OTHERS)
@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire != "kafka07"])
def test_replies_of_another_protocols_port(wire: str, answer: bytes) -> None:
    """The error names the address and advises to check the port."""
    if (wire, answer[:1]) in (("flux", b"V"), ("cursus", b"\0"), ("iggy", b"\xb6")):
        pytest.skip("begins like an answer of this protocol, so it does not tell of another port")
    _, error = asyncio.run(visits(wire, answer, ask_once))
    assert error.message.startswith("cannot connect: ")
    assert " address=127.0.0.1:" in error.message
    assert "check th" in error.message or "this version of the polywire protocol" in error.message
    assert error.code in (ErrorCode.UNREACHABLE, ErrorCode.INVALID_REQUEST)


@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire not in ("kafka07", "polywire")])
def test_a_port_that_never_replies(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like the port of another protocol, which waits for the rest of what it takes for a request."""
    monkeypatch.setattr(connection, "FIRST_REPLY_S", 0.01)
    count, error = asyncio.run(visits(wire, None, list_topics))
    assert error.message.startswith(
        "cannot connect: no response in time (check that the port belongs to this protocol) address="
    )
    assert count == 1


def test_another_protocols_port() -> None:
    count, error = asyncio.run(visits("polywire", b"HTTP/1.1 400 Bad Request", list_topics))
    assert (count, type(error)) == (1, Invalid)
    assert "does not speak this version of the polywire protocol" in error.message


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "that this is the polywire listener (by default port 9555, not Kafka's 9094),"),
        (b"HTTP/1.1 400 Bad Request", "(check that the port is the polywire listener, by default 9555)"),
        (None, "no response in time (check that the port belongs to this protocol)"),
    ],
)
def test_the_blocking_socket_names_its_listener(answer: bytes | None, message: str) -> None:
    """Spark and bulk clients use it."""

    async def opened(url: str) -> None:
        host, _, port = url.rpartition("://")[2].partition(":")
        await asyncio.to_thread(FramedSocket, host, int(port), timeout_s=0.2)

    _, error = asyncio.run(visits("polywire", answer, opened))
    assert error.message.startswith("cannot connect: ")
    assert message in error.message


def test_no_tls_behind_a_port() -> None:
    count, error = asyncio.run(visits("polywire+tls", b"HTTP/1.1 400 Bad Request", list_topics))
    assert (count, type(error)) == (1, Invalid)
    assert "does not use TLS (remove +tls)" in error.message


def test_a_broker_that_has_responded_once_is_retried() -> None:
    """However often it closes connections afterwards: it may be starting behind a load balancer."""

    async def scenario() -> None:
        with BrokerThread(wires=["kafka"]) as broker:
            async with polywire.connect(broker.url("kafka")) as client:
                assert await client.topics() == []
                failures = 2 * link.CLOSED_MAX

                async def work(wire: WireClient) -> str:
                    nonlocal failures
                    failures -= 1
                    if failures:
                        raise Unavailable(ErrorCode.UNREACHABLE, "connection lost")
                    return "done"

                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(link, "BACKOFF_MAX_S", link.BACKOFF_MIN_S)
                    assert await client._link.read(work) == "done"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (TimeoutError(), "no response in time (check that the port belongs to this protocol)"),
        (OSError(113, "No route to host"), "[Errno 113] No route to host"),
        (OSError(), "OSError"),
    ],
)
def test_every_cause_has_a_message(error: Exception, cause: str) -> None:
    assert cannot_connect(error, "h", 1).message == f"cannot connect: {cause} address=h:1"


@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire != "kafka07"])
def test_a_connection_that_was_lost_before_a_call_is_replaced(wire: str) -> None:
    """Nothing was sent over it, so a call that must not be repeated does not fail."""
    with BrokerThread(wires=[wire]) as broker:

        async def scenario() -> list[str]:
            async with polywire.connect(broker.url(wire)) as client:
                await client.create_topic("first", 1)
                await asyncio.to_thread(broker.disconnect)
                await asyncio.sleep(0.05)  # until the client knows it
                await client.create_topic("second", 1)
                return [topic.name for topic in await client.topics()]

        assert asyncio.run(scenario())[-2:] == ["first", "second"]


def test_a_broker_that_is_still_starting_is_retried() -> None:
    async def scenario() -> None:
        port, begun = lasting_port(), asyncio.Event()
        tries = 0

        async def late() -> BrokerThread:
            await begun.wait()
            broker = BrokerThread(wires=["polywire"])
            broker.addresses = {"polywire": ("127.0.0.1", port)}
            await asyncio.to_thread(broker.start)
            return broker

        starting = asyncio.create_task(late())
        real = connect

        async def counted(url: str) -> WireClient:
            nonlocal tries
            tries += 1
            if tries == 2:
                begun.set()
            return await real(url)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link, "connect", counted)
            async with polywire.connect(f"127.0.0.1:{port}", connect_s=60) as client:
                assert await client.topics() == []
        assert tries > 2
        (await starting).stop()

    asyncio.run(scenario())


def test_retrying_ends_and_wrong_logins_are_not_retried() -> None:
    async def refused(url: str) -> int:
        tries = 0

        async def counted(_: str) -> WireClient:
            nonlocal tries
            tries += 1
            if "denied" in url:
                raise Denied(ErrorCode.LOGIN_FAILED, "no")
            raise Unavailable(ErrorCode.UNREACHABLE, "cannot connect")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link, "connect", counted)
            with pytest.raises(BrokerError):
                await polywire.connect(url, connect_s=0.2)
        return tries

    assert asyncio.run(refused("polywire://denied:1")) == 1
    assert asyncio.run(refused("polywire://unresolvable:1")) > 1
