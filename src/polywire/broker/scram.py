"""SCRAM: check a client's proof that it knows a password, without receiving the password (RFC 5802, RFC 7677).

A stolen verifier does not allow a login. But it lets an attacker guess the password much faster than an Argon2id hash
does. Comparisons take constant time.

    salted = PBKDF2(password, salt, iterations)
    stored key = H(HMAC(salted, "Client Key"))
    server key = HMAC(salted, "Server Key")

The client's proof is ``HMAC(salted, "Client Key") ^ HMAC(stored key, messages of both sides)``.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import b64decode, b64encode
from enum import Enum
from typing import Final

import msgspec

from polywire.errors import ErrorCode, Invalid

ITERATIONS: Final = 16_384  # the maximum that Apache Kafka allows; its default is 4096
# the minimum of RFC 7677, and the most work that a client should have to do
ITERATIONS_RANGE: Final = range(4096, 1_000_001)
SALT_BYTES: Final = 16
SALT_BYTES_MAX: Final = 64


class Mechanism(Enum):
    """A SCRAM mechanism, which determines the hash function. The values are the registered names (RFC 7677)."""

    SHA_256 = "SCRAM-SHA-256"
    SHA_512 = "SCRAM-SHA-512"

    @property
    def digest(self) -> str:
        """Name of the hash in ``hashlib``."""
        return "sha256" if self is Mechanism.SHA_256 else "sha512"

    @property
    def key_bytes(self) -> int:
        """The length of its keys in bytes."""
        return 32 if self is Mechanism.SHA_256 else 64


class Verifier(msgspec.Struct, frozen=True, array_like=True):
    """The stored verifier of a password for one mechanism."""

    mechanism: Mechanism
    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes

    def admits(self, messages: bytes, proof: bytes) -> bool:
        """Return whether the client's proof over these messages is correct."""
        digest = self.mechanism.digest
        signature = hmac.digest(self.stored_key, messages, digest)
        if len(proof) != len(signature):
            return False
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        return hmac.compare_digest(_hash(client_key, digest), self.stored_key)

    def signature(self, messages: bytes) -> bytes:
        """Return the server's signature over these messages, which proves to the client that the server knows the
        verifier.
        """
        return hmac.digest(self.server_key, messages, self.mechanism.digest)

    def __str__(self) -> str:
        parts = (self.salt, self.stored_key, self.server_key)
        return "$".join(
            ("", self.mechanism.value.lower(), str(self.iterations), *(b64encode(p).decode() for p in parts))
        )


def make_verifier(password: str, mechanism: Mechanism, *, iterations: int = ITERATIONS) -> Verifier:
    """Return a verifier with a new salt. This takes some 10 ms."""
    salt = secrets.token_bytes(SALT_BYTES)
    salted = hashlib.pbkdf2_hmac(mechanism.digest, password.encode(), salt, iterations)
    return verifier_of(salted, mechanism, salt=salt, iterations=iterations)


def verifier_of(salted: bytes, mechanism: Mechanism, *, salt: bytes, iterations: int) -> Verifier:
    digest = mechanism.digest
    stored_key = _hash(hmac.digest(salted, b"Client Key", digest), digest)
    return Verifier(mechanism, iterations, salt, stored_key, hmac.digest(salted, b"Server Key", digest))


def no_verifier(key: bytes, name: str, mechanism: Mechanism) -> Verifier:
    """Return a verifier that no password matches.

    A name always gets the same verifier, so that a client cannot find out whether the user exists.
    """
    salt = hmac.digest(key, f"{mechanism.value}:{name}".encode("utf-8", "surrogatepass"), "sha256")[:SALT_BYTES]
    return Verifier(mechanism, ITERATIONS, salt, secrets.token_bytes(mechanism.key_bytes), b"")


def parse_verifier(text: str) -> Verifier:
    """Parse a verifier. Raises Invalid(INVALID_REQUEST)."""
    try:
        empty, name, iterations, *parts = text.split("$")
        mechanism = Mechanism(name.upper())
        salt, stored_key, server_key = (b64decode(part, validate=True) for part in parts)
        found = Verifier(mechanism, int(iterations), salt, stored_key, server_key)
    except ValueError:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            "SCRAM verifier is malformed (use $MECHANISM$ITERATIONS$SALT$STORED_KEY$SERVER_KEY)",
        ) from None
    keys = {len(stored_key), len(server_key)}
    if empty or found.iterations not in ITERATIONS_RANGE or not is_salt(salt) or keys != {mechanism.key_bytes}:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            "SCRAM verifier is malformed (use $MECHANISM$ITERATIONS$SALT$STORED_KEY$SERVER_KEY)",
        )
    return found


def is_salt(salt: bytes) -> bool:
    """Return whether a verifier may have this salt."""
    return 0 < len(salt) <= SALT_BYTES_MAX


def _hash(data: bytes, digest: str) -> bytes:
    return hashlib.new(digest, data).digest()
