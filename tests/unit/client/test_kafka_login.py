"""The client's side of Kafka logins: the example of RFC 7677, and brokers that cannot be trusted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from polywire.client.address import Login
from polywire.client.connect import connect
from polywire.client.kafka_connection import ITERATIONS_RANGE, ScramProof, log_in, mechanism_for
from polywire.errors import Denied, ErrorCode, Invalid

NONCE = "rOprNGfwEbeRWgbNEkqO"
JOINED = NONCE + "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
CHALLENGE = f"r={JOINED},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
SIGNATURE = "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def proof() -> ScramProof:
    return ScramProof(Login("user", "pencil"), "sha256", NONCE)


def test_the_example_of_rfc_7677() -> None:
    one = proof()
    assert one.first == f"n,,n=user,r={NONCE}"
    assert one.final(CHALLENGE) == f"c=biws,r={JOINED},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    one.verify(SIGNATURE)


def test_special_characters_of_names_are_escaped() -> None:
    assert ScramProof(Login("a=b,c", "p"), "sha256", "n").first == "n,,n=a=3Db=2Cc,r=n"


@pytest.mark.parametrize(
    "challenge",
    [
        "",
        "r=other,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
        CHALLENGE.replace(JOINED, NONCE),
        CHALLENGE.replace("i=4096", f"i={ITERATIONS_RANGE.start - 1}"),
        CHALLENGE.replace("i=4096", f"i={ITERATIONS_RANGE.stop}"),
        CHALLENGE.replace("i=4096", "i=many"),
        CHALLENGE.replace("s=W22", "s=%%"),
        "s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
        CHALLENGE + ",m=x",
    ],
)
def test_invalid_challenges_are_refused(challenge: str) -> None:
    with pytest.raises(Denied) as caught:
        proof().final(challenge)
    assert caught.value.code is ErrorCode.LOGIN_FAILED


@pytest.mark.parametrize("last", ["", "v=", "v=" + "A" * 43 + "=", "e=other-error", SIGNATURE + ",m=x"])
def test_a_broker_that_does_not_know_the_password_is_refused(last: str) -> None:
    one = proof()
    with pytest.raises(Denied):
        one.verify(last)
    one.final(CHALLENGE)
    with pytest.raises(Denied):
        one.verify(last)


def test_plain_passwords_are_sent_only_over_tls_or_loopback() -> None:
    assert mechanism_for("broker.example", is_secret=True) == "PLAIN"
    assert mechanism_for("127.0.0.1", is_secret=False) == "PLAIN"
    assert mechanism_for("::1", is_secret=False) == "PLAIN"
    assert mechanism_for("localhost", is_secret=False) == "PLAIN"
    assert mechanism_for("broker.example", is_secret=False) == "SCRAM-SHA-512"
    assert mechanism_for("10.0.0.1", is_secret=False) == "SCRAM-SHA-512"


def test_an_unknown_mechanism_sends_nothing() -> None:
    async def ask(*_: Any, **fields: Any) -> Any:
        raise AssertionError("something was sent")

    with pytest.raises(Invalid, match="known=PLAIN"):
        asyncio.run(log_in(ask, Login("a", "secret"), "GSSAPI"))


def test_a_refused_handshake_fails_before_the_password_is_sent() -> None:
    async def ask(*_: Any, **fields: Any) -> Any:
        assert "auth_bytes" not in fields
        return SimpleNamespace(error=33)

    with pytest.raises(Denied):
        asyncio.run(log_in(ask, Login("a", "secret"), "PLAIN"))


def test_only_protocols_with_logins_accept_a_user_name() -> None:
    with pytest.raises(Invalid, match="polywire://, kafka://"):
        asyncio.run(connect("flux://a:secret@h:1"))
