"""Client logins over the Kafka protocol: PLAIN and SCRAM (spec: kafka#sasl; RFC 5802, RFC 7677).

SCRAM does not send the password. The broker must prove that it stores a verifier of the password. Otherwise the client
aborts the login. The number of iterations that a broker may ask for is limited.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any, Final

from polywire.client.kafka_errors import check
from polywire.client.login import Login
from polywire.errors import Denied, ErrorCode, Invalid
from polywire.protocols.kafka.messages import Api

PLAIN: Final = "PLAIN"
HASHES: Final[Mapping[str, str]] = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
MECHANISMS: Final = (PLAIN, *HASHES)
NONCE_BYTES: Final = 24
# at least the minimum of RFC 7677; the maximum takes less than a second
ITERATIONS_RANGE: Final = range(4096, 1_000_001)
_HEADER: Final = "n,,"

Ask = Callable[..., Awaitable[Any]]


def mechanism_for(host: str, *, is_secret: bool) -> str:
    """Return the default mechanism.

    It is PLAIN if the connection is encrypted or stays on this machine, otherwise SCRAM-SHA-512.
    """
    return PLAIN if is_secret or _is_own(host) else "SCRAM-SHA-512"


def _is_own(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def log_in(ask: Ask, login: Login, mechanism: str) -> None:
    """Log in. Raises Denied(LOGIN_FAILED), and Invalid(INVALID_REQUEST) for an unknown mechanism."""
    if mechanism not in MECHANISMS:
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"unknown mechanism mechanism={mechanism} known={','.join(MECHANISMS)}"
        )
    check(await ask(Api.SASL_HANDSHAKE, mechanism=mechanism))
    if mechanism == PLAIN:
        await _say(ask, f"\0{login.name}\0{login.password}")
        return
    proof = ScramProof(login, HASHES[mechanism])
    challenge = await _say(ask, proof.first)
    final = await asyncio.to_thread(proof.final, challenge)
    proof.verify(await _say(ask, final))


async def _say(ask: Ask, text: str) -> str:
    answer = await ask(Api.SASL_AUTHENTICATE, auth_bytes=text.encode())
    check(answer)
    return bytes(answer.auth_bytes).decode("utf-8", "replace")


class ScramProof:
    """The client side of one SCRAM exchange. Call ``first``, ``final`` and ``verify`` in this order."""

    __slots__ = ("_bare", "_digest", "_nonce", "_password", "_signature", "first")

    def __init__(self, login: Login, digest: str, nonce: str | None = None) -> None:
        self._digest: Final = digest
        self._password: Final = login.password
        self._nonce: Final = nonce or secrets.token_urlsafe(NONCE_BYTES)
        name = login.name.replace("=", "=3D").replace(",", "=2C")
        self._bare: Final = f"n={name},r={self._nonce}"
        self._signature = b""
        self.first: Final = _HEADER + self._bare

    def final(self, challenge: str) -> str:
        """Return the response to the broker's challenge. It takes some milliseconds to compute.

        Raises Denied(LOGIN_FAILED) for an invalid challenge.
        """
        nonce, salt, iterations = _read_challenge(challenge)
        if not nonce.startswith(self._nonce) or nonce == self._nonce or iterations not in ITERATIONS_RANGE:
            raise _untrusted()
        salted = hashlib.pbkdf2_hmac(self._digest, self._password.encode(), salt, iterations)
        client_key = hmac.digest(salted, b"Client Key", self._digest)
        without_proof = f"c={b64encode(_HEADER.encode()).decode()},r={nonce}"
        messages = f"{self._bare},{challenge},{without_proof}".encode()
        stored_key = hashlib.new(self._digest, client_key).digest()
        mask = hmac.digest(stored_key, messages, self._digest)
        proof = bytes(a ^ b for a, b in zip(client_key, mask, strict=True))
        self._signature = hmac.digest(hmac.digest(salted, b"Server Key", self._digest), messages, self._digest)
        return f"{without_proof},p={b64encode(proof).decode()}"

    def verify(self, last: str) -> None:
        """Check the broker's proof that it stores a verifier of the password. Raises Denied(LOGIN_FAILED)."""
        signature, *extensions = last.split(",")
        said = signature.removeprefix("v=").encode()
        if (
            _is_mandatory(extensions)
            or not self._signature
            or not hmac.compare_digest(said, b64encode(self._signature))
        ):
            raise _untrusted()


def _read_challenge(challenge: str) -> tuple[str, bytes, int]:
    """Return nonce, salt and number of iterations. Raises Denied(LOGIN_FAILED)."""
    try:
        nonce, salt, iterations, *extensions = challenge.split(",")
        if (nonce[:2], salt[:2], iterations[:2]) != ("r=", "s=", "i=") or _is_mandatory(extensions):
            raise ValueError
        return nonce[2:], b64decode(salt[2:], validate=True), int(iterations[2:])
    except ValueError:
        raise _untrusted() from None


def _is_mandatory(extensions: Sequence[str]) -> bool:
    """Return whether an extension is mandatory. This client supports none (RFC 5802, section 5.1)."""
    return any(extension.startswith("m=") for extension in extensions)


def _untrusted() -> Denied:
    return Denied(ErrorCode.LOGIN_FAILED, "the broker's SCRAM proof is wrong: it does not know the user's password")
