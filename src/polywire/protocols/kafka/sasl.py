"""SASL logins of Kafka clients: their states, and PLAIN and SCRAM messages (spec: kafka#sasl).

Malformed messages, and steps that ``TRANSITIONS`` does not allow, raise Refused.

    PLAIN   client  authzid NUL name NUL password
    OAUTHBEARER   client  n,a=NAME,^Aauth=Bearer TOKEN^A^A
    SCRAM   client  n,,n=NAME,r=NONCE                     server  r=NONCE NONCE,s=SALT,i=ITERATIONS
            client  c=biws,r=NONCE NONCE,p=PROOF          server  v=SIGNATURE
"""

from __future__ import annotations

import secrets
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from polywire.broker.scram import Mechanism, Verifier
from polywire.protocols.kafka.messages import Refused, WireError

PLAIN: Final = "PLAIN"
OAUTHBEARER: Final = "OAUTHBEARER"  # only if the broker accepts tokens of a provider
MECHANISMS: Final = (PLAIN, *(mechanism.value for mechanism in Mechanism))
BARE_SINCE: Final = 1  # first version of SaslHandshake after which tokens are sent in SaslAuthenticate requests
NONCE_BYTES: Final = 24
_NO_BINDING: Final = frozenset({"n", "y"})


class Step(IntEnum):
    """State of a login. The connection may close in any state."""

    IDLE = 0
    """No login is in progress."""
    AGREED = 1
    """A mechanism is chosen; its first message is expected."""
    CHALLENGED = 2
    """The client's proof is expected (SCRAM)."""
    VERIFYING = 3
    """Credentials are being verified; no other message is accepted."""


TRANSITIONS: Final[Mapping[Step, frozenset[Step]]] = {
    Step.IDLE: frozenset({Step.AGREED}),
    Step.AGREED: frozenset({Step.CHALLENGED, Step.VERIFYING}),
    Step.CHALLENGED: frozenset({Step.VERIFYING}),
    Step.VERIFYING: frozenset({Step.IDLE}),
}


class Words(NamedTuple):
    """The content of a PLAIN token: a user name, and a password or an access token."""

    name: str
    secret: str


class Introduction(NamedTuple):
    """The client's first SCRAM message.

    Attributes:
        header, bare: the two parts of the message as text. The proofs are computed from them.
    """

    header: str
    bare: str
    name: str
    nonce: str


class Challenge:
    """The server's first SCRAM message: nonce, salt and iterations."""

    __slots__ = ("_introduction", "_nonce", "name", "text", "verifier")

    def __init__(self, introduction: Introduction, verifier: Verifier, nonce: str | None = None) -> None:
        self._introduction: Final = introduction
        self._nonce: Final = introduction.nonce + (nonce or secrets.token_urlsafe(NONCE_BYTES))
        self.name: Final = introduction.name
        self.verifier: Final = verifier
        self.text: Final = f"r={self._nonce},s={b64encode(verifier.salt).decode()},i={verifier.iterations}"

    def read(self, token: bytes) -> tuple[bytes, bytes]:
        """Return the messages from which the proofs are computed, and the client's proof.

        Raises Refused if the client's message does not belong to this challenge.
        """
        text = _text(token)
        without_proof, comma, proof = text.rpartition(",p=")
        binding, nonce, *extensions = [*without_proof.split(","), ""]
        expected = b64encode(self._introduction.header.encode()).decode()
        if not comma or binding != f"c={expected}" or nonce != f"r={self._nonce}" or _is_mandatory(extensions):
            raise _unreadable()
        return f"{self._introduction.bare},{self.text},{without_proof}".encode(), _from_base64(proof)

    def accepted(self, messages: bytes) -> bytes:
        """Return the server's last message. It proves to the client that the server knows the user's verifier."""
        return b"v=" + b64encode(self.verifier.signature(messages))


class Conversation:
    """The login of one connection.

    Attributes:
        mechanism: the SASL mechanism that the client has chosen last.
        is_bare: whether tokens are sent without a request header (SaslHandshake version 0).
    """

    __slots__ = ("_step", "challenge", "is_bare", "mechanism")

    def __init__(self) -> None:
        self._step = Step.IDLE
        self.mechanism = PLAIN
        self.challenge: Challenge | None = None
        self.is_bare = False

    @property
    def takes_tokens(self) -> bool:
        return self.is_bare and self._step in (Step.AGREED, Step.CHALLENGED)

    @property
    def step(self) -> Step:
        return self._step

    def enter(self, step: Step) -> None:
        """Change to a state. Raises Refused if ``TRANSITIONS`` does not allow it."""
        if step not in TRANSITIONS[self._step]:
            raise Refused(WireError.ILLEGAL_SASL_STATE, "the message does not fit the state of the login")
        self._step = step


def read_words(token: bytes) -> Words:
    """Decode a PLAIN token. Raises Refused if it is malformed, or has an authorization id other than the user's."""
    parts = _text(token).split("\0")
    if len(parts) != 3 or not parts[1] or parts[0] not in ("", parts[1]):
        raise _unreadable()
    return Words(parts[1], parts[2])


def read_bearer(token: bytes) -> Words:
    """Decode an OAUTHBEARER message (RFC 7628): the user name, which may be empty, and the provider's token.

    Raises Refused if it is malformed.
    """
    head, *pairs = _text(token).split("\x01")
    binding, comma, authzid = head.partition(",")
    found = [pair.removeprefix("auth=") for pair in pairs if pair.startswith("auth=")]
    scheme, _, value = found[0].partition(" ") if len(found) == 1 else ("", "", "")
    name = _unescaped(authzid[2:-1]) if authzid.startswith("a=") else ""
    if binding not in _NO_BINDING or not comma or not head.endswith(",") or scheme.lower() != "bearer" or not value:
        raise _unreadable()
    return Words(name, value.strip())


def read_introduction(token: bytes) -> Introduction:
    """Decode the client's first SCRAM message. Raises Refused if it is malformed."""
    text = _text(token)
    binding, _, rest = text.partition(",")
    authzid, _, bare = rest.partition(",")
    name, nonce, *extensions = [*bare.split(","), ""]
    if (
        binding not in _NO_BINDING
        or _is_mandatory(extensions)
        or not name.startswith("n=")
        or not nonce.startswith("r=")
        or len(nonce) == 2
    ):
        raise _unreadable()
    if authzid not in ("", f"a={name[2:]}"):
        raise _unreadable()
    return Introduction(f"{binding},{authzid},", bare, _unescaped(name[2:]), nonce[2:])


def _is_mandatory(extensions: Sequence[str]) -> bool:
    """Return whether one of the extensions must be supported. The broker supports none (RFC 5802, section 5.1)."""
    return any(extension.startswith("m=") for extension in extensions)


def _unescaped(name: str) -> str:
    """Replace ``=2C`` and ``=3D`` in a user name. Raises Refused for any other ``=``."""
    first, *others = name.split("=")
    found = [first]
    for other in others:
        sign = {"2C": ",", "3D": "="}.get(other[:2])
        if sign is None:
            raise _unreadable()
        found += sign, other[2:]
    if name == "":
        raise _unreadable()
    return "".join(found)


def _text(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        raise _unreadable() from None


def _from_base64(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError:
        raise _unreadable() from None


def _unreadable() -> Refused:
    return Refused(WireError.SASL_AUTHENTICATION_FAILED, "login message is malformed")
