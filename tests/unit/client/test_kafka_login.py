"""A client's side of logins over the Kafka wire: the example of RFC 7677, and brokers that are not to be trusted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from polywire.client.connect import connect
from polywire.client.kafka_login import ITERATIONS_RANGE, ScramProof, log_in, mechanism_for
from polywire.client.login import Login
from polywire.errors import Denied, ErrorCode, Invalid

NONCE = "rOprNGfwEbeRWgbNEkqO"
JOINED = NONCE + "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
CHALLENGE = f"r={JOINED},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
SIGNATURE = "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def proof() -> ScramProof:
    return ScramProof(Login("user", "pencil"), "sha256", NONCE)


def test_the_example_of_the_rfc() -> None:
    one = proof()
    assert one.first == f"n,,n=user,r={NONCE}"
    assert one.final(CHALLENGE) == f"c=biws,r={JOINED},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    one.verify(SIGNATURE)


def test_names_keep_their_signs() -> None:
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
def test_challenges_that_no_broker_sends(challenge: str) -> None:
    with pytest.raises(Denied) as caught:
        proof().final(challenge)
    assert caught.value.code is ErrorCode.LOGIN_FAILED


@pytest.mark.parametrize("last", ["", "v=", "v=" + "A" * 43 + "=", "e=other-error", SIGNATURE + ",m=x"])
def test_a_broker_that_does_not_know_the_password(last: str) -> None:
    one = proof()
    with pytest.raises(Denied):
        one.verify(last)
    one.final(CHALLENGE)
    with pytest.raises(Denied):
        one.verify(last)


def test_passwords_are_sent_only_where_nobody_can_read_them() -> None:
    assert mechanism_for("broker.example", is_secret=True) == "PLAIN"
    assert mechanism_for("127.0.0.1", is_secret=False) == "PLAIN"
    assert mechanism_for("::1", is_secret=False) == "PLAIN"
    assert mechanism_for("localhost", is_secret=False) == "PLAIN"
    assert mechanism_for("broker.example", is_secret=False) == "SCRAM-SHA-512"
    assert mechanism_for("10.0.0.1", is_secret=False) == "SCRAM-SHA-512"


def test_nothing_is_sent_by_a_mechanism_that_nobody_knows() -> None:
    async def ask(*_: Any, **fields: Any) -> Any:
        raise AssertionError("something was sent")

    with pytest.raises(Invalid, match="known=PLAIN"):
        asyncio.run(log_in(ask, Login("a", "secret"), "GSSAPI"))


def test_a_refused_handshake_ends_it_before_the_password_is_sent() -> None:
    async def ask(*_: Any, **fields: Any) -> Any:
        assert "auth_bytes" not in fields
        return SimpleNamespace(error=33)

    with pytest.raises(Denied):
        asyncio.run(log_in(ask, Login("a", "secret"), "PLAIN"))


def test_only_wires_with_logins_take_a_name() -> None:
    with pytest.raises(Invalid, match="polywire://, kafka://"):
        asyncio.run(connect("flux://a:secret@h:1"))
