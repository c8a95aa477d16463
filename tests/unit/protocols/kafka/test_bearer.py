"""Logins with OAUTHBEARER (RFC 7628): a provider's token instead of a password."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from polywire.broker.access import ConfiguredUser
from polywire.broker.id_tokens import IdTokens, Provider
from polywire.broker.passwords import hash_password
from polywire.broker.permissions import EVERYTHING
from polywire.protocols.kafka.messages import Api, WireError
from tests.unit.broker.test_id_tokens import AUDIENCE, ISSUER, KEYS, token
from tests.unit.protocols.kafka.dialogue import Dialogue, World


@pytest.fixture
def peer(tmp_path: Path) -> Dialogue:
    world = World(now_us=int(time.time() * 1e6))
    access = world.memory.broker.access
    access.configure([ConfiguredUser("alice", hash_password("secret"), EVERYTHING)])
    world.memory.run()
    (tmp_path / "keys").write_text(json.dumps(KEYS))
    access.id_tokens = IdTokens(Provider(ISSUER, AUDIENCE, str(tmp_path / "keys")))
    access.id_tokens.load()
    return world.connect()


def log_in(peer: Dialogue, message: str) -> Any:
    found = peer.ask(Api.SASL_HANDSHAKE, mechanism="OAUTHBEARER")
    assert found.error == WireError.NONE
    return peer.ask(Api.SASL_AUTHENTICATE, auth_bytes=message.encode())


@pytest.mark.parametrize("head", ["n,,", "n,a=alice,", "y,,"])
def test_a_token_logs_in_and_the_client_is_asked_to_renew_it(peer: Dialogue, head: str) -> None:
    found = log_in(peer, f"{head}\x01auth=Bearer {token(exp=int(time.time()) + 100)}\x01x=y\x01\x01")
    assert (found.error, found.auth_bytes) == (WireError.NONE, b"")
    assert 80_000 < found.session_lifetime_ms <= 101_000
    assert peer.principal is not None
    assert peer.principal.name == "alice"
    assert peer.ask(Api.METADATA, topics=[]).throttle_ms == 0
    assert log_in(peer, f"n,,\x01auth=Bearer {token()}\x01\x01").error == WireError.NONE, "it is renewed"


@pytest.mark.parametrize(
    "message",
    [
        "n,,\x01auth=Bearer a.b.c\x01\x01",
        "n,a=bob,\x01auth=Bearer TOKEN\x01\x01",
        "n,,\x01auth=Basic TOKEN\x01\x01",
        "n,,\x01auth=Bearer \x01\x01",
        "n,,\x01\x01",
        "n,,\x01auth=Bearer TOKEN\x01auth=Bearer TOKEN\x01\x01",
        "p=x,,\x01auth=Bearer TOKEN\x01\x01",
        "n\x01auth=Bearer TOKEN\x01\x01",
        "",
    ],
)
def test_other_messages_fail_and_close_the_connection(peer: Dialogue, message: str) -> None:
    found = log_in(peer, message.replace("TOKEN", token()))
    assert found.error == WireError.SASL_AUTHENTICATION_FAILED
    assert peer.principal is None


def test_the_mechanism_is_offered_only_with_a_provider(peer: Dialogue) -> None:
    assert "OAUTHBEARER" in peer.ask(Api.SASL_HANDSHAKE, mechanism="OAUTHBEARER").mechanisms
    found = World().connect().ask(Api.SASL_HANDSHAKE, mechanism="OAUTHBEARER")
    assert found.error == WireError.UNSUPPORTED_SASL_MECHANISM
    assert "OAUTHBEARER" not in found.mechanisms
