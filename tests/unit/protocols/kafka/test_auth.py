"""Logins over the Kafka protocol: PLAIN and SCRAM, refusals, and closed connections (spec: kafka#sasl)."""

from __future__ import annotations

import hashlib
import hmac
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from struct import pack
from typing import Any

import pytest

from polywire.broker.access import ConfiguredUser
from polywire.broker.authorization import AuditEvent, Outcome
from polywire.broker.passwords import ADDRESS_FREE, DELAY_MIN_S, hash_password
from polywire.broker.permissions import EVERYTHING, Grants
from polywire.broker.scram import Mechanism, make_verifier
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_codec import decode_response
from polywire.protocols.kafka.messages import Api, WireError
from polywire.protocols.kafka.session import LINGER_S
from polywire.protocols.runtime.session import LOGIN_FRAME_BYTES_MAX
from tests.unit.protocols.kafka.dialogue import Dialogue, World

WAIT_S_MAX = 60.0
PASSWORD = "pencil"
ALICE = ConfiguredUser(
    "alice, =1", hash_password(PASSWORD), EVERYTHING, tuple(make_verifier(PASSWORD, one) for one in Mechanism)
)
BOB = ConfiguredUser("bob", ALICE.password_hash, Grants())


@pytest.fixture
def world() -> World:
    world = World()
    world.memory.broker.access.configure([ALICE, BOB])
    world.memory.run()
    return world


def settle(peer: Dialogue) -> None:
    """Run until the thread has verified the login."""
    end = time.monotonic() + WAIT_S_MAX
    while not peer.sent and not peer.closed:
        assert time.monotonic() < end, "no response arrived"
        peer.pass_by()
        time.sleep(0.001)


def authenticate(peer: Dialogue, token: bytes, version: int = 2) -> Any:
    peer.tell(Api.SASL_AUTHENTICATE, version, schema.request(Api.SASL_AUTHENTICATE)(auth_bytes=token))
    settle(peer)
    return decode_response(Api.SASL_AUTHENTICATE, version, next(peer.frames()))[1]


def plain(peer: Dialogue, name: str, password: str, version: int = 2) -> Any:
    assert peer.ask(Api.SASL_HANDSHAKE, mechanism="PLAIN").error == WireError.NONE
    return authenticate(peer, f"\0{name}\0{password}".encode(), version)


def scram(
    peer: Dialogue,
    mechanism: Mechanism,
    name: str,
    password: str,
    *,
    spoil: Callable[[str], str] = lambda text: text,
    header: str = "n,,",
) -> tuple[Any, bytes]:
    """Log in as a client of RFC 5802; return the last response and the expected server signature."""
    digest = mechanism.digest
    assert peer.ask(Api.SASL_HANDSHAKE, mechanism=mechanism.value).error == WireError.NONE
    bare = f"n={name.replace('=', '=3D').replace(',', '=2C')},r=abc,tokenauth=false"
    first = authenticate(peer, (header + bare).encode())
    if first.error:
        return first, b""
    challenge = bytes(first.auth_bytes).decode()
    nonce, salt, iterations = (field[2:] for field in challenge.split(","))
    assert nonce.startswith("abc")
    assert len(nonce) > 20
    salted = hashlib.pbkdf2_hmac(digest, password.encode(), b64decode(salt), int(iterations))
    binding = b64encode(header.encode()).decode()
    without_proof = spoil(f"c={binding},r={nonce}")
    messages = f"{bare},{challenge},{without_proof}".encode()
    client_key = hmac.digest(salted, b"Client Key", digest)
    signature = hmac.digest(hashlib.new(digest, client_key).digest(), messages, digest)
    proof = b64encode(bytes(a ^ b for a, b in zip(client_key, signature, strict=True))).decode()
    last = authenticate(peer, f"{without_proof},p={proof}".encode())
    return last, b"v=" + b64encode(hmac.digest(hmac.digest(salted, b"Server Key", digest), messages, digest))


def is_ended(peer: Dialogue) -> bool:
    """Return whether the connection closes after its last response, and handles no further request."""
    peer.take()
    assert not peer.closed, "the client may not have read the response yet"
    peer.tell(Api.API_VERSIONS, 0, schema.request(Api.API_VERSIONS)())
    peer.world.memory.advance(LINGER_S)
    peer.pass_by()
    return peer.closed and not peer.sent


def is_logged_in(peer: Dialogue) -> bool:
    return not peer.closed and peer.ask(Api.DESCRIBE_CLUSTER).error == WireError.NONE


@pytest.mark.parametrize("version", range(3))
def test_login_with_a_name_and_a_password(world: World, version: int) -> None:
    peer = world.connect()
    answer = plain(peer, ALICE.name, PASSWORD, version)
    assert (answer.error, answer.auth_bytes, answer.session_lifetime_ms) == (WireError.NONE, b"", 0)
    assert peer.principal is not None
    assert peer.principal.name == ALICE.name
    assert is_logged_in(peer)


def test_login_with_a_token_as_password(world: World) -> None:
    access = world.memory.broker.access
    token = access.create_token(access.user("bob"), "t", None)
    peer = world.connect()
    assert plain(peer, "bob", token).error == WireError.NONE
    assert is_logged_in(peer)
    other = world.connect()
    assert plain(other, ALICE.name, token).error == WireError.SASL_AUTHENTICATION_FAILED


@pytest.mark.parametrize("mechanism", Mechanism)
def test_login_with_scram(world: World, mechanism: Mechanism) -> None:
    peer = world.connect()
    answer, signature = scram(peer, mechanism, ALICE.name, PASSWORD)
    assert (answer.error, answer.auth_bytes) == (WireError.NONE, signature)
    assert is_logged_in(peer)
    y = world.connect()
    assert scram(y, mechanism, ALICE.name, PASSWORD, header="y,,")[0].error == WireError.NONE


@pytest.mark.parametrize(
    ("name", "password"),
    [(ALICE.name, "pen"), ("unknown", PASSWORD), ("bob", PASSWORD), ("x" * 1000, "y" * 1000)],
    ids=["wrong password", "no such user", "no verifier", "long"],
)
def test_all_wrong_logins_get_the_same_error_and_close_the_connection(world: World, name: str, password: str) -> None:
    reported: list[AuditEvent] = []
    world.memory.broker.access.audit = reported.append
    answers = set()
    for mechanism in Mechanism:
        peer = world.connect()
        answer, _ = scram(peer, mechanism, name, password)
        answers.add((int(answer.error), answer.message, bytes(answer.auth_bytes)))
        assert is_ended(peer)
    if name != "bob":
        peer = world.connect()
        answer = plain(peer, name, password)
        answers.add((int(answer.error), answer.message, bytes(answer.auth_bytes)))
        assert is_ended(peer)
    assert answers == {(58, "wrong user or password", b"")}
    assert {(event.action, event.outcome) for event in reported} == {("login", Outcome.REFUSED)}
    assert {event.peer for event in reported} >= {peer.peer}


def test_scram_salts_do_not_reveal_which_users_exist(world: World) -> None:
    def challenge(name: str) -> list[str]:
        peer = world.connect()
        peer.ask(Api.SASL_HANDSHAKE, mechanism="SCRAM-SHA-256")
        text = bytes(authenticate(peer, f"n,,n={name},r=abc".encode()).auth_bytes).decode()
        return text.split(",")[1:]

    missing, bare = challenge("missing"), challenge("bob")
    there = challenge("alice=2C =3D1")
    assert len({missing[0], bare[0], there[0]}) == 3
    assert {len(salt) for salt, _ in (missing, bare, there)} == {len(there[0])}
    assert missing[1] == bare[1] == there[1]
    world.restart()
    assert [challenge("missing"), challenge("bob"), challenge("alice=2C =3D1")] == [missing, bare, there]


def test_guessed_proofs_are_delayed_like_guessed_passwords(world: World) -> None:
    for _ in range(ADDRESS_FREE):
        scram(world.connect(), Mechanism.SHA_256, "unknown", "x")
    peer = world.connect()
    peer.ask(Api.SASL_HANDSHAKE, mechanism="PLAIN")
    peer.tell(Api.SASL_AUTHENTICATE, 2, schema.request(Api.SASL_AUTHENTICATE)(auth_bytes=b"\0bob\0x"))
    for _ in range(20):
        peer.pass_by()
        time.sleep(0.001)
    assert not peer.sent
    assert peer.session.paused(), "the response is pending"
    world.memory.advance(DELAY_MIN_S)
    settle(peer)
    assert is_ended(peer)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace("r=", "r=x"),
        lambda text: text + "x",
        lambda text: text + ",m=x",
        lambda text: text + ",t=x,m=",
        lambda text: "c=eSws" + text[6:],
        lambda text: text[2:],
        lambda text: "",
    ],
)
def test_a_proof_of_other_messages_is_refused(world: World, spoil: Callable[[str], str]) -> None:
    peer = world.connect()
    assert scram(peer, Mechanism.SHA_256, ALICE.name, PASSWORD, spoil=spoil)[0].error == 58
    assert is_ended(peer)


@pytest.mark.parametrize(
    ("mechanism", "token"),
    [
        ("PLAIN", b""),
        ("PLAIN", b"bob\0pencil"),
        ("PLAIN", b"alice\0bob\0pencil"),
        ("PLAIN", b"\0\0pencil"),
        ("PLAIN", b"\0bob\0pencil\0"),
        ("PLAIN", b"\0b\xffb\0pencil"),
        ("SCRAM-SHA-256", b""),
        ("SCRAM-SHA-256", b"n,,"),
        ("SCRAM-SHA-256", b"n,,n=bob"),
        ("SCRAM-SHA-256", b"n,,n=bob,r="),
        ("SCRAM-SHA-256", b"n,,n=,r=abc"),
        ("SCRAM-SHA-256", b"n,,n=b=b,r=abc"),
        ("SCRAM-SHA-256", b"n,a=alice,n=bob,r=abc"),
        ("SCRAM-SHA-256", b"p=tls-unique,,n=bob,r=abc"),
        ("SCRAM-SHA-256", b"n,,m=x,n=bob,r=abc"),
        ("SCRAM-SHA-256", b"n,,n=bob,r=abc,m=x"),
        ("SCRAM-SHA-512", b"\0bob\0pencil"),
    ],
)
def test_malformed_tokens_are_refused(world: World, mechanism: str, token: bytes) -> None:
    peer = world.connect()
    peer.ask(Api.SASL_HANDSHAKE, mechanism=mechanism)
    assert authenticate(peer, token).error == WireError.SASL_AUTHENTICATION_FAILED
    assert is_ended(peer)


def test_an_unknown_mechanism_closes_the_connection(world: World) -> None:
    peer = world.connect()
    answer = peer.ask(Api.SASL_HANDSHAKE, mechanism="GSSAPI")
    assert answer.error == WireError.UNSUPPORTED_SASL_MECHANISM
    assert list(answer.mechanisms) == ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
    assert is_ended(peer)


def test_steps_out_of_order_close_the_connection(world: World) -> None:
    peer = world.connect()
    assert authenticate(peer, b"\0bob\0pencil").error == WireError.ILLEGAL_SASL_STATE
    assert is_ended(peer)
    peer = world.connect()
    peer.ask(Api.SASL_HANDSHAKE, mechanism="PLAIN")
    assert peer.ask(Api.SASL_HANDSHAKE, mechanism="PLAIN").error == WireError.ILLEGAL_SASL_STATE
    assert is_ended(peer)


@pytest.mark.parametrize("api", [Api.METADATA, Api.FIND_COORDINATOR, Api.DESCRIBE_CLUSTER, Api.PRODUCE, Api.FETCH])
def test_before_the_login_other_requests_are_refused(world: World, api: Api) -> None:
    peer = world.connect()
    assert peer.ask(Api.API_VERSIONS, 0).error == WireError.NONE
    peer.tell(api, 9, schema.request(api)())
    peer.pass_by()
    assert peer.sent == b""
    assert peer.gave_up is not None


def test_unauthenticated_requests_have_a_size_limit(world: World) -> None:
    peer = world.connect()
    peer.feed(pack(">i", LOGIN_FRAME_BYTES_MAX + 1))
    assert peer.gave_up is not None
    known = world.connect()
    assert plain(known, ALICE.name, PASSWORD).error == WireError.NONE
    known.feed(pack(">i", LOGIN_FRAME_BYTES_MAX + 1))
    assert known.gave_up is None


def test_logins_without_the_authenticate_request(world: World) -> None:
    peer = world.connect()
    assert peer.ask(Api.SASL_HANDSHAKE, 0, mechanism="PLAIN").error == WireError.NONE
    token = f"\0{ALICE.name}\0{PASSWORD}".encode()
    peer.feed(pack(">i", len(token)) + token)
    settle(peer)
    assert peer.take() == pack(">i", 0)
    assert is_logged_in(peer)
    wrong = world.connect()
    wrong.ask(Api.SASL_HANDSHAKE, 0, mechanism="PLAIN")
    wrong.feed(pack(">i", 7) + b"\0bob\0pe")
    settle(wrong)
    assert wrong.closed
    assert not wrong.sent


def test_a_client_that_closes_after_a_refusal_is_not_waited_for(world: World) -> None:
    peer = world.connect()
    assert plain(peer, "unknown", PASSWORD).error == WireError.SASL_AUTHENTICATION_FAILED
    peer.session.finish(memoryview(b""))
    assert peer.closed


def test_a_login_can_be_repeated_on_the_same_connection(world: World) -> None:
    peer = world.connect()
    assert plain(peer, ALICE.name, PASSWORD).error == WireError.NONE
    assert plain(peer, ALICE.name, PASSWORD).error == WireError.NONE
    assert is_logged_in(peer)
    assert scram(peer, Mechanism.SHA_256, ALICE.name, "wrong")[0].error == 58
    assert is_ended(peer)


def test_a_repeated_login_cannot_change_the_user(world: World) -> None:
    peer = world.connect()
    assert plain(peer, ALICE.name, PASSWORD).error == WireError.NONE
    answer = plain(peer, "bob", PASSWORD)
    assert answer.error == WireError.SASL_AUTHENTICATION_FAILED
    assert peer.principal is not None
    assert peer.principal.name == ALICE.name
    assert is_ended(peer)


def test_a_deleted_user_loses_all_permissions(world: World) -> None:
    peer = world.connect()
    assert plain(peer, "bob", PASSWORD).error == WireError.NONE
    world.memory.broker.access.configure([ALICE])
    assert peer.ask(Api.DESCRIBE_CLUSTER).error == WireError.CLUSTER_AUTHORIZATION_FAILED


def test_verifiers_of_a_user_changed_during_the_login_are_refused(world: World) -> None:
    peer = world.connect()
    peer.ask(Api.SASL_HANDSHAKE, mechanism="SCRAM-SHA-256")
    verifier = ALICE.verifiers[0]
    reported: list[Any] = []
    messages = b"what both have said"
    salted = hashlib.pbkdf2_hmac("sha256", PASSWORD.encode(), verifier.salt, verifier.iterations)
    key = hmac.digest(salted, b"Client Key", "sha256")
    signature = hmac.digest(verifier.stored_key, messages, "sha256")
    proof = bytes(a ^ b for a, b in zip(key, signature, strict=True))
    assert verifier.admits(messages, proof)
    access = world.memory.broker.access
    access.log_in_with_proof(ALICE.name, verifier, messages, proof, reported.append)
    access.configure([ConfiguredUser(ALICE.name, ALICE.password_hash, EVERYTHING)])
    end = time.monotonic() + WAIT_S_MAX
    while not reported:
        assert time.monotonic() < end
        world.memory.run()
        time.sleep(0.001)
    assert "wrong user" in reported[0].message


def test_an_open_broker_accepts_logins_of_its_default_user() -> None:
    peer = World().connect()
    assert plain(peer, "iggy", "iggy").error == WireError.NONE
    assert is_logged_in(peer)
    other = peer.beside()
    assert plain(other, "alice", "x").error == WireError.SASL_AUTHENTICATION_FAILED
