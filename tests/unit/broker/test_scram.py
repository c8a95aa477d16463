"""SCRAM verifiers, against the exchange printed in RFC 7677."""

from __future__ import annotations

import hashlib
from base64 import b64decode

import pytest

from polywire.broker.scram import ITERATIONS, Mechanism, make_verifier, no_verifier, parse_verifier, verifier_of

SALT = b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
MESSAGES = (
    b"n=user,r=rOprNGfwEbeRWgbNEkqO,"
    b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096,"
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
)
PROOF = b64decode("dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")


def test_the_exchange_of_the_rfc() -> None:
    salted = hashlib.pbkdf2_hmac("sha256", b"pencil", SALT, 4096)
    verifier = verifier_of(salted, Mechanism.SHA_256, salt=SALT, iterations=4096)
    assert verifier.admits(MESSAGES, PROOF)
    assert verifier.signature(MESSAGES) == b64decode("6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")
    assert not verifier.admits(MESSAGES + b"x", PROOF)
    assert not verifier.admits(MESSAGES, PROOF[:-1])
    assert not verifier.admits(MESSAGES, PROOF[:-1] + b"\0")
    assert not verifier.admits(MESSAGES, b"")


@pytest.mark.parametrize("mechanism", Mechanism)
def test_a_verifier_is_formatted_and_parsed(mechanism: Mechanism) -> None:
    verifier = make_verifier("pencil", mechanism)
    assert parse_verifier(str(verifier)) == verifier
    assert verifier.iterations == ITERATIONS
    assert make_verifier("pencil", mechanism).salt != verifier.salt


def test_the_verifier_of_an_unknown_user_looks_real_and_never_matches() -> None:
    first, again = (no_verifier(b"key", "bob", Mechanism.SHA_512) for _ in range(2))
    assert first.salt == again.salt
    assert len(first.salt) == len(make_verifier("x", Mechanism.SHA_512).salt)
    others = {no_verifier(b"key", "al", Mechanism.SHA_512).salt, no_verifier(b"key", "bob", Mechanism.SHA_256).salt}
    assert first.salt not in others | {no_verifier(b"other", "bob", Mechanism.SHA_512).salt}
    assert not first.admits(MESSAGES, bytes(64))
