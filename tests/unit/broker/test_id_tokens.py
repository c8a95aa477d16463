"""Tokens of an OpenID Connect provider: what is accepted, keys from a file and a URL, and the logins they make."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from polywire.broker.access import ConfiguredUser
from polywire.broker.authorization import AuditEvent
from polywire.broker.id_tokens import KEYS_BYTES_MAX, REFETCH_S, TOKEN_BYTES_MAX, IdTokens, Provider
from polywire.broker.passwords import hash_password
from polywire.broker.permissions import EVERYTHING
from polywire.errors import Denied, Invalid
from polywire.testing.loop import ManualLoop, SimulatedClock
from polywire.testing.memory_broker import MemoryBroker

ISSUER, AUDIENCE = "https://login.example", "polywire"
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())


def jwk(key: Any, key_id: str | None, **more: str) -> dict[str, Any]:
    kind = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
    found: dict[str, Any] = json.loads(kind.to_jwk(key.public_key()))
    return found | more | ({} if key_id is None else {"kid": key_id})


KEYS = {"keys": [jwk(RSA, "one", use="sig"), jwk(EC, "two"), jwk(OTHER, "enc", use="enc")]}


def token(key: Any = RSA, key_id: str | None = "one", algorithm: str = "RS256", **claims: Any) -> str:
    known = {"iss": ISSUER, "aud": AUDIENCE, "exp": int(time.time()) + 600, "sub": "alice"}
    body = {name: value for name, value in (known | claims).items() if value is not None}
    return jwt.encode(body, key, algorithm, headers={} if key_id is None else {"kid": key_id})


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(KEYS))
    return path


@pytest.fixture
def id_tokens(keys_file: Path) -> IdTokens:
    made = IdTokens(Provider(ISSUER, AUDIENCE, str(keys_file)))
    made.load()
    return made


def test_a_signed_token_names_the_user(id_tokens: IdTokens) -> None:
    end = int(time.time()) + 100
    assert id_tokens.verify(token(exp=end)) == ("alice", end * 1_000_000)
    assert id_tokens.verify(token(EC, "two", "ES256", sub="bob"))[0] == "bob"
    assert id_tokens.verify(token(aud=["other", AUDIENCE]))[0] == "alice"


def test_another_claim_may_name_the_user(keys_file: Path) -> None:
    made = IdTokens(Provider(ISSUER, AUDIENCE, str(keys_file), user_claim="email"))
    made.load()
    assert made.verify(token(email="alice@example"))[0] == "alice@example"
    with pytest.raises(Denied, match="no user claim='email'"):
        made.verify(token())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: token(iss="https://other.example"), "issuer"),
        (lambda: token(aud="other"), "[Aa]udience"),
        (lambda: token(exp=int(time.time()) - 100), "expired"),
        (lambda: token(nbf=int(time.time()) + 1000), "not yet valid"),
        (lambda: token(exp=None), "exp"),
        (lambda: token(iss=None), "iss"),
        (lambda: token(aud=None), "aud"),
        (lambda: token(sub=None), "no user"),
        (lambda: token(exp="never"), ""),
        (lambda: token(sub=""), "no user"),
        (lambda: token(OTHER), "[Ss]ignature"),
        (lambda: token(OTHER, "enc"), "unknown key"),
        (lambda: token(key_id="three"), "unknown key"),
        (lambda: token(key_id=None), "unknown key"),
        (lambda: jwt.encode({"sub": "alice"}, "", "none", headers={"kid": "one"}), ""),
        (lambda: token("x" * 64, "one", "HS256"), ""),
        (lambda: token(EC, "one", "ES256"), ""),
        (lambda: token()[:-4] + "AAAA", "[Ss]ignature"),
        (lambda: "a.b.c", ""),
        (lambda: "..", ""),
        (lambda: "x" * (TOKEN_BYTES_MAX + 1), "too long"),
    ],
)
def test_other_tokens_are_refused(id_tokens: IdTokens, make: Callable[[], str], message: str) -> None:
    with pytest.raises(Denied) as caught:
        id_tokens.verify(make())
    if message:
        caught.match(message)


def test_a_symmetric_key_is_never_used(keys_file: Path) -> None:
    secret = {"kty": "oct", "kid": "one", "k": "eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4"}
    keys_file.write_text(json.dumps({"keys": [secret, jwk(EC, "two")]}))
    made = IdTokens(Provider(ISSUER, AUDIENCE, str(keys_file)))
    made.load()
    with pytest.raises(Denied):
        made.verify(token("x" * 33, "one", "HS256"))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"keys": []}', '{"keys": 5}', '{"keys": [{"kty": "x"}]}', " " * (KEYS_BYTES_MAX + 1)]
)
def test_invalid_keys_are_an_error_and_the_previous_ones_remain(
    id_tokens: IdTokens, keys_file: Path, text: str
) -> None:
    keys_file.write_text(text)
    with pytest.raises(Invalid, match="keys of the token issuer are invalid"):
        id_tokens.load()
    assert id_tokens.verify(token())[0] == "alice"


@pytest.mark.parametrize(
    "provider",
    [
        Provider("", AUDIENCE, "keys.json"),
        Provider(ISSUER, "", "keys.json"),
        Provider(ISSUER, AUDIENCE, ""),
        Provider(ISSUER, AUDIENCE, "http://login.example/keys"),
        Provider(ISSUER, AUDIENCE, "file:///etc/passwd"),
        Provider(ISSUER, AUDIENCE, "keys.json", ""),
    ],
)
def test_invalid_settings_are_errors(provider: Provider) -> None:
    with pytest.raises(Invalid):
        IdTokens(provider)


class Keys(BaseHTTPRequestHandler):
    found: bytes = b""
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.found)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Keys.asked = 0
    with HTTPServer(("127.0.0.1", 0), Keys) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/keys"
        http.shutdown()
        thread.join()


def test_keys_of_a_url_are_fetched_again_for_an_unknown_key_but_not_often(server: str) -> None:
    clock = SimulatedClock()
    made = IdTokens(Provider(ISSUER, AUDIENCE, server), clock)
    made._run = lambda work: work()
    Keys.found = json.dumps({"keys": [jwk(EC, "two")]}).encode()
    made.load()
    Keys.found = json.dumps(KEYS).encode()
    for _ in range(5):
        with pytest.raises(Denied, match="unknown key"):
            made.verify(token())
    assert Keys.asked == 1
    clock.advance(REFETCH_S)
    with pytest.raises(Denied, match="unknown key"):
        made.verify(token())
    assert made.verify(token())[0] == "alice"
    Keys.found = b"no json"
    made.load()
    assert made.verify(token())[0] == "alice", "the previous keys remain"


def test_a_login_needs_a_user_and_ends_with_the_token(id_tokens: IdTokens) -> None:
    clock = SimulatedClock(int(time.time() * 1e6))
    memory = MemoryBroker(loop=ManualLoop(clock), clock=clock)
    access, events = memory.broker.access, list[AuditEvent]()
    access.configure([ConfiguredUser("alice", hash_password("secret"), EVERYTHING)])
    access.audit, access.id_tokens = events.append, id_tokens
    alice = access.log_in_with_token(token(exp=int(time.time()) + 100), peer="10.0.0.1:5")
    assert (alice.name, access.is_current(alice)) == ("alice", True)
    assert access.is_current(access.acting(replace(alice)))
    for bad in (token(sub="bob"), token(aud="other"), "a.b.c"):
        with pytest.raises(Denied, match="no such token, or it has expired"):
            access.log_in_with_token(bad, peer="10.0.0.1:5")
    assert [event.user for event in events] == ["bob", "", ""]
    assert "audience" in events[1].reason.lower()
    with pytest.raises(Denied):
        access.log_in_with_token(token(), name="bob")
    clock.advance(101)
    assert not access.is_current(alice)
