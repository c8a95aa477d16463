"""What lets somebody prove a password without sending it: verifiers of SCRAM (RFC 5802, RFC 7677).

Promises: pure; with a verifier nobody can log in, but guess its password, and far faster than with an Argon2id hash; comparisons take the
same time whatever differs. Must not know: users, wires, how messages are spelled.

    salted = PBKDF2(password, salt, iterations)    stored key = H(HMAC(salted, "Client Key"))    server key = HMAC(salted, "Server Key")

A client proves that it knows the password by ``HMAC(salted, "Client Key") ^ HMAC(stored key, what both have said)``.
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

ITERATIONS: Final = 16_384  # the most that other systems of Kafka's protocol take, and more than their usual 4096
ITERATIONS_RANGE: Final = range(4096, 1_000_001)  # the least of RFC 7677; what a client can be made to compute
SALT_BYTES: Final = 16
SALT_BYTES_MAX: Final = 64


class Mechanism(Enum):
    """A hash to use SCRAM with, by the name that IANA has for the mechanism."""

    SHA_256 = "SCRAM-SHA-256"
    SHA_512 = "SCRAM-SHA-512"

    @property
    def digest(self) -> str:
        """The hash, as ``hashlib`` calls it."""
        return "sha256" if self is Mechanism.SHA_256 else "sha512"

    @property
    def key_bytes(self) -> int:
        """Length of its keys."""
        return 32 if self is Mechanism.SHA_256 else 64


class Verifier(msgspec.Struct, frozen=True, array_like=True):
    """What is kept of a password for one mechanism."""

    mechanism: Mechanism
    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes

    def admits(self, messages: bytes, proof: bytes) -> bool:
        """Whether this proves the password, of who has exchanged these messages."""
        digest = self.mechanism.digest
        signature = hmac.digest(self.stored_key, messages, digest)
        if len(proof) != len(signature):
            return False
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        return hmac.compare_digest(_hash(client_key, digest), self.stored_key)

    def signature(self, messages: bytes) -> bytes:
        """What proves to the client that this server has its verifier."""
        return hmac.digest(self.server_key, messages, self.mechanism.digest)

    def __str__(self) -> str:
        parts = (self.salt, self.stored_key, self.server_key)
        return "$".join(
            ("", self.mechanism.value.lower(), str(self.iterations), *(b64encode(p).decode() for p in parts))
        )


def make_verifier(password: str, mechanism: Mechanism, *, iterations: int = ITERATIONS) -> Verifier:
    """A verifier with a salt of its own; takes some 10 ms."""
    salt = secrets.token_bytes(SALT_BYTES)
    salted = hashlib.pbkdf2_hmac(mechanism.digest, password.encode(), salt, iterations)
    return verifier_of(salted, mechanism, salt=salt, iterations=iterations)


def verifier_of(salted: bytes, mechanism: Mechanism, *, salt: bytes, iterations: int) -> Verifier:
    """A verifier of a password that was salted already."""
    digest = mechanism.digest
    stored_key = _hash(hmac.digest(salted, b"Client Key", digest), digest)
    return Verifier(mechanism, iterations, salt, stored_key, hmac.digest(salted, b"Server Key", digest))


def no_verifier(key: bytes, name: str, mechanism: Mechanism) -> Verifier:
    """What nobody's password fits, the same for a name each time: so that who asks for it cannot tell that there is none."""
    salt = hmac.digest(key, f"{mechanism.value}:{name}".encode("utf-8", "surrogatepass"), "sha256")[:SALT_BYTES]
    return Verifier(mechanism, ITERATIONS, salt, secrets.token_bytes(mechanism.key_bytes), b"")


def parse_verifier(text: str) -> Verifier:
    """A verifier as ``str`` spells it. Raises Invalid(INVALID_REQUEST)."""
    try:
        empty, name, iterations, *parts = text.split("$")
        mechanism = Mechanism(name.upper())
        salt, stored_key, server_key = (b64decode(part, validate=True) for part in parts)
        found = Verifier(mechanism, int(iterations), salt, stored_key, server_key)
    except ValueError:
        raise Invalid(ErrorCode.INVALID_REQUEST, "not a verifier of SCRAM") from None
    keys = {len(stored_key), len(server_key)}
    if empty or found.iterations not in ITERATIONS_RANGE or not is_salt(salt) or keys != {mechanism.key_bytes}:
        raise Invalid(ErrorCode.INVALID_REQUEST, "not a verifier of SCRAM")
    return found


def is_salt(salt: bytes) -> bool:
    """Whether a verifier may have it."""
    return 0 < len(salt) <= SALT_BYTES_MAX


def _hash(data: bytes, digest: str) -> bytes:
    return hashlib.new(digest, data).digest()
