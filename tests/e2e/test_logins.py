"""Logins on a running broker: deleted users are disconnected, silent clients lose their slot."""

from __future__ import annotations

import asyncio
import gzip
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import polywire
from polywire.errors import BrokerError, Denied, Unavailable
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import MAGIC, PREFIX, PREFIX_BYTES, decode_prefix, encode_head
from polywire.protocols.polywire.messages import Verb
from polywire.protocols.runtime.session import LOGIN_FRAME_BYTES_MAX
from polywire.server.logins import LOGIN_SECONDS_MAX
from polywire.server.users import add_user
from tests.broker_process import BrokerProcess
from tests.e2e.test_users import CREATE_USER, LOGIN, Peer
from tests.unit.protocols.iggy.dialogue import classic

DELETE_USER, UPDATE_USER, UPDATE_PERMISSIONS, CHANGE_PASSWORD = 34, 35, 36, 37
CREATE_TOKEN, DELETE_TOKEN, LOGIN_TOKEN = 42, 43, 44
ME = 20
ENDED_S_MAX = 5.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    users = tmp_path / "users"
    add_user(users, "alice", "wonderland", "all")
    with BrokerProcess(tmp_path / "data", "--users", str(users), "--any", "127.0.0.1:0") as process:
        yield process


def words(*texts: str) -> bytes:
    return b"".join(bytes((len(text),)) + text.encode() for text in texts)


def named(name: str) -> bytes:
    """Return the identifier of a user by its name."""
    return b"\x02" + words(name)


def logged_in(broker: BrokerProcess, name: str, password: str) -> Peer:
    peer = Peer(broker)
    assert peer.log_in(name, password) == 0
    return peer


EVERYTHING = b"\x01" + (11).to_bytes(4, "little") + b"\x01" * 10 + b"\x00"


def make_user(alice: Peer, name: str, permissions: bytes = b"\x00") -> None:
    assert alice.ask(CREATE_USER, words(name, "password") + b"\x01" + permissions)[0] == 0


def assert_ended(*sockets: socket.socket) -> None:
    """Assert that the broker closes the connections and sends nothing before."""
    for peer in sockets:
        peer.settimeout(ENDED_S_MAX)
        try:
            while peer.recv(65_536):
                pass
        except ConnectionResetError:
            pass


def text_peer(broker: BrokerProcess, *frames: bytes) -> tuple[socket.socket, list[bytes]]:
    """Open a connection to the Cursus protocol; return it with its responses."""
    peer = socket.create_connection(broker.addresses["cursus"], timeout=60)
    return peer, [cursus(peer, frame) for frame in frames]


def cursus(peer: socket.socket, text: bytes) -> bytes:
    peer.sendall(len(text).to_bytes(4, "big") + text)
    return received(peer, int.from_bytes(received(peer, 4), "big"))


def received(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        assert part, "the broker closed the connection"
        data += part
    return data


def native_peer(broker: BrokerProcess, name: str, password: str) -> tuple[socket.socket, bytes]:
    """Open a connection to the `polywire` protocol and log in; return it with the response."""
    peer = socket.create_connection(broker.addresses["polywire"], timeout=60)
    peer.sendall(MAGIC)
    received(peer, len(MAGIC))
    native_answer(peer)
    peer.sendall(encode_head(Verb.LOGIN, 1, messages.LogIn(name, password)))
    return peer, native_answer(peer)


def native_answer(peer: socket.socket) -> bytes:
    prefix = decode_prefix(received(peer, PREFIX_BYTES))
    return bytes((prefix.flags,)) + received(peer, prefix.length)


def test_a_deleted_user_is_disconnected_and_its_id_not_reused(broker: BrokerProcess) -> None:
    with logged_in(broker, "alice", "wonderland") as alice:
        make_user(alice, "first")
        with logged_in(broker, "first", "password") as first:
            before = int.from_bytes(first.ask(ME)[1][4:8], "little")
            assert alice.ask(DELETE_USER, named("first"))[0] == 0
            make_user(alice, "second")
            assert_ended(first.socket)
        with logged_in(broker, "second", "password") as second:
            assert int.from_bytes(second.ask(ME)[1][4:8], "little") > before


def test_every_protocol_disconnects_users_whose_login_ended(broker: BrokerProcess) -> None:
    with logged_in(broker, "alice", "wonderland") as alice:
        for name, change in (
            ("gone", (DELETE_USER, named("gone"))),
            ("idle", (UPDATE_USER, named("idle") + b"\x00\x01\x02")),
            ("new", (CHANGE_PASSWORD, named("new") + words("password", "another"))),
        ):
            make_user(alice, name)
            ours = logged_in(broker, name, "password")
            text, answers = text_peer(broker, f"AUTH principal={name} token=password".encode())
            assert answers[0].startswith(b"OK")
            native, answer = native_peer(broker, name, "password")
            assert answer[:1] == b"\x00"
            assert alice.ask(*change)[0] == 0
            assert_ended(ours.socket, text, native)
            for peer in (ours.socket, text, native):
                peer.close()


def test_changing_the_own_password_ends_all_other_logins(broker: BrokerProcess) -> None:
    with logged_in(broker, "alice", "wonderland") as alice:
        make_user(alice, "bob")
    with logged_in(broker, "bob", "password") as here, logged_in(broker, "bob", "password") as elsewhere:
        status, token = here.ask(CREATE_TOKEN, words("token") + bytes(8))
        assert status == 0
        with Peer(broker) as robot:
            assert robot.ask(LOGIN_TOKEN, token)[0] == 0
            assert here.ask(CHANGE_PASSWORD, named("bob") + words("password", "better"))[0] == 0
            assert_ended(elsewhere.socket, robot.socket)
        assert here.ask(ME)[0] == 0
        with Peer(broker) as robot:
            assert robot.ask(LOGIN_TOKEN, token)[0] != 0


def test_revoking_a_token_ends_its_logins(broker: BrokerProcess) -> None:
    with logged_in(broker, "alice", "wonderland") as alice, Peer(broker) as robot, Peer(broker) as other:
        tokens = [alice.ask(CREATE_TOKEN, words(name) + bytes(8))[1] for name in ("one", "two")]
        assert robot.ask(LOGIN_TOKEN, tokens[0])[0] == 0
        assert other.ask(LOGIN_TOKEN, tokens[1])[0] == 0
        assert alice.ask(DELETE_TOKEN, words("one"))[0] == 0
        assert_ended(robot.socket)
        assert (other.ask(ME)[0], alice.ask(ME)[0]) == (0, 0)


def test_a_stream_ends_with_its_user(broker: BrokerProcess) -> None:
    with logged_in(broker, "alice", "wonderland") as alice:
        make_user(alice, "reader", EVERYTHING)
        known = b"principal=reader auth_token=password"
        stream, answers = text_peer(broker, b"CREATE topic=orders partitions=1 " + known)
        assert answers[0].startswith(b"OK"), answers
        request = b"STREAM topic=orders partition=0 group=g offset=0 " + known
        stream.sendall(len(request).to_bytes(4, "big") + request)
        assert received(stream, 4) == bytes(4), "it is kept alive"
        assert alice.ask(DELETE_USER, named("reader"))[0] == 0
        stream.settimeout(ENDED_S_MAX)
        assert stream.recv(4) == b""
        stream.close()


def test_a_stream_ends_with_the_permission_to_read(broker: BrokerProcess) -> None:
    with logged_in(broker, "alice", "wonderland") as alice:
        make_user(alice, "reader", EVERYTHING)
        owner, answers = text_peer(
            broker, b"AUTH principal=alice token=wonderland", b"CREATE topic=orders partitions=1"
        )
        assert answers[1].startswith(b"OK"), answers
        stream, answers = text_peer(broker, b"AUTH principal=reader token=password")
        request = b"STREAM topic=orders partition=0 group=g offset=0"
        stream.sendall(len(request).to_bytes(4, "big") + request)
        assert received(stream, 4) == bytes(4), "it is kept alive"
        assert alice.ask(UPDATE_PERMISSIONS, named("reader") + b"\0")[0] == 0
        publish = b"PUBLISH topic=orders acks=1 producerId=p message=secret"
        assert not cursus(owner, publish).startswith(b"ERROR")
        reported = b""
        while not reported:
            reported = received(stream, int.from_bytes(received(stream, 4), "big"))
        assert reported.startswith(b"STREAM_CONTROL type=CLOSE reason=not_authorized"), reported
        owner.close()
        stream.close()


def opened(broker: BrokerProcess, wire: str, data: bytes) -> socket.socket:
    """Open a connection and send this."""
    peer = socket.create_connection(broker.addresses[wire], timeout=ENDED_S_MAX)
    peer.sendall(data)
    return peer


@pytest.mark.parametrize("wire", ["polywire", "kafka", "iggy", "cursus"])
def test_errors_without_a_login_say_to_log_in(broker: BrokerProcess, wire: str) -> None:
    """Kafka brokers only close the connection, and the Iggy of 2023 has no login errors."""

    async def list_topics() -> None:
        async with polywire.connect(broker.url(wire)) as client:
            await client.topics()

    with pytest.raises(BrokerError, match=r"log in|whether it requires a login|authentication_required") as raised:
        asyncio.run(list_topics())
    assert isinstance(raised.value, Unavailable if wire == "kafka" else Denied)


def test_unauthenticated_clients_have_a_small_frame_limit(broker: BrokerProcess) -> None:
    """The start of a frame is enough: the broker buffers nothing of the rest."""
    long = LOGIN_FRAME_BYTES_MAX + 1
    for wire, data in (
        ("iggy", long.to_bytes(4, "little") + b"\x26\0\0\0"),
        ("iggy", bytes(48) + (4 * long).to_bytes(4, "little") + bytes(8) + b"\x05" + bytes(195)),
        ("cursus", long.to_bytes(4, "big") + b"PUBLISH topic=t acks=1 message="),
        ("polywire", MAGIC + PREFIX.pack(long, Verb.LOGIN, 0, 0, 1, 1)),
    ):
        for place in (wire, "any"):
            with opened(broker, place, data) as peer:
                assert_ended(peer)
    with opened(broker, "cursus", b"") as peer:
        assert cursus(peer, gzip.compress(bytes(1_000_000))).startswith(b"ERROR: authentication_required")
        assert cursus(peer, b"CREATE topic=made partitions=1").startswith(b"ERROR: authentication_required")
        assert cursus(peer, b"PUBLISH topic=made acks=1 producerId=p message=x").startswith(b"ERROR: authentication")
        assert cursus(peer, b"AUTH principal=alice token=wonderland").startswith(b"OK")
        assert b"made" not in cursus(peer, b"LIST")
        assert cursus(peer, b"CREATE topic=large partitions=1").startswith(b"OK")
        answer = cursus(peer, b"PUBLISH topic=large acks=1 producerId=p message=" + b"x" * 20_000)
        assert not answer.startswith(b"ERROR"), "after the login larger frames are allowed"


@pytest.mark.slow
def test_clients_have_ten_seconds_to_log_in(broker: BrokerProcess) -> None:
    begun = time.monotonic()
    silent = [
        opened(broker, "iggy", b"\x04\0\0\0\x01\0\0\0"),
        opened(broker, "iggy", b""),
        opened(broker, "cursus", b""),
        opened(broker, "polywire", MAGIC),
        opened(broker, "any", MAGIC),
        opened(broker, "any", b""),
    ]
    with logged_in(broker, "alice", "wonderland") as alice:
        for peer in silent:
            peer.settimeout(60)
            while peer.recv(65_536):
                pass
            peer.close()
        assert time.monotonic() - begun > LOGIN_SECONDS_MAX - 1
        assert alice.ask(ME)[0] == 0, "a logged-in client may be silent"


class Guessers:
    """Many connections to the Iggy protocol that guess passwords one after the other, until they are stopped."""

    def __init__(self, broker: BrokerProcess, count: int) -> None:
        self.guesses = 0
        self._over = False
        self._selector = selectors.DefaultSelector()
        self._request = classic(LOGIN, words("alice", "wonderlend") + b"\x06\0\0\x000.10.0\0\0\0\0")
        self._place = broker.addresses["iggy"]
        for _ in range(count):
            self._begin()
        self._thread = threading.Thread(target=self._guess)

    def _begin(self) -> None:
        peer = socket.create_connection(self._place, timeout=10)
        peer.sendall(self._request)
        self._selector.register(peer, selectors.EVENT_READ)

    def _guess(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(0.1):
                peer = key.fileobj
                assert isinstance(peer, socket.socket)
                try:
                    answers = len(peer.recv(65_536)) // 8
                    peer.sendall(self._request)
                except OSError:
                    answers = 0
                self.guesses += answers
                if not answers:  # its time to log in is over
                    self._selector.unregister(peer)
                    peer.close()
                    self._begin()
            time.sleep(0.01)  # it shares the processors with the broker

    def __enter__(self) -> Guessers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()


@pytest.mark.slow
def test_guessers_lock_no_user_out(tmp_path: Path) -> None:
    """All of them share one address with the legitimate users, so that fairness by address does not help."""
    users = tmp_path / "users"
    names = ("bob", "carol", "dave", "alice")
    for name in names:
        add_user(users, name, "wonderland", "all")
    with BrokerProcess(tmp_path / "data", "--users", str(users)) as broker, Guessers(broker, 90) as guessers:
        deadline = time.monotonic() + 60
        while guessers.guesses < 20 and time.monotonic() < deadline:
            time.sleep(0.05)
        for name in names:
            with Peer(broker) as peer:
                peer.socket.settimeout(60)  # on a busy machine; a second or two on an idle one
                assert peer.log_in(name, "wonderland") == 0
        assert guessers.guesses > 20
