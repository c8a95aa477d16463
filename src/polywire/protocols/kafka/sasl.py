"""What is said to log in: the steps of a conversation, PLAIN's token, and the messages of SCRAM (spec: kafka#sasl).

Promises: pure; what cannot be read raises Refused; a step that is not in the table is refused. Must not know: users, frames, sockets.

    PLAIN   client  authzid NUL name NUL password
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
MECHANISMS: Final = (PLAIN, *(mechanism.value for mechanism in Mechanism))
BARE_SINCE: Final = 1  # version of SaslHandshake from which on tokens come in requests of their own
NONCE_BYTES: Final = 24
_NO_BINDING: Final = frozenset({"n", "y"})


class Step(IntEnum):
    """How far a login has come; each may be the last of the connection."""

    IDLE = 0
    """None is under way: before one, or after it."""
    AGREED = 1
    """A mechanism is chosen, whose first message is next."""
    CHALLENGED = 2
    """The proof is next (SCRAM)."""
    VERIFYING = 3
    """What was said is verified; nothing else is taken meanwhile."""


TRANSITIONS: Final[Mapping[Step, frozenset[Step]]] = {
    Step.IDLE: frozenset({Step.AGREED}),
    Step.AGREED: frozenset({Step.CHALLENGED, Step.VERIFYING}),
    Step.CHALLENGED: frozenset({Step.VERIFYING}),
    Step.VERIFYING: frozenset({Step.IDLE}),
}


class Words(NamedTuple):
    """A name, and what proves it: a password or an access token."""

    name: str
    secret: str


class Introduction(NamedTuple):
    """The first message of SCRAM: who it is, and the nonce; header and bare are what both sides prove to have seen."""

    header: str
    bare: str
    name: str
    nonce: str


class Challenge:
    """What a client was answered that wants to prove its password by SCRAM."""

    __slots__ = ("_introduction", "_nonce", "name", "text", "verifier")

    def __init__(self, introduction: Introduction, verifier: Verifier, nonce: str | None = None) -> None:
        self._introduction: Final = introduction
        self._nonce: Final = introduction.nonce + (nonce or secrets.token_urlsafe(NONCE_BYTES))
        self.name: Final = introduction.name
        self.verifier: Final = verifier
        self.text: Final = f"r={self._nonce},s={b64encode(verifier.salt).decode()},i={verifier.iterations}"

    def read(self, token: bytes) -> tuple[bytes, bytes]:
        """What both have said, and the proof. Raises Refused for what does not answer this challenge."""
        text = _text(token)
        without_proof, comma, proof = text.rpartition(",p=")
        binding, nonce, *extensions = [*without_proof.split(","), ""]
        expected = b64encode(self._introduction.header.encode()).decode()
        if not comma or binding != f"c={expected}" or nonce != f"r={self._nonce}" or _is_mandatory(extensions):
            raise _unreadable()
        return f"{self._introduction.bare},{self.text},{without_proof}".encode(), _from_base64(proof)

    def accepted(self, messages: bytes) -> bytes:
        """The last message, which proves to the client that this is its server."""
        return b"v=" + b64encode(self.verifier.signature(messages))


class Conversation:
    """The login of one connection. Invariant: ``step`` goes on as ``TRANSITIONS`` says; ``mechanism`` is what was agreed on last."""

    __slots__ = ("_step", "challenge", "is_bare", "mechanism")

    def __init__(self) -> None:
        self._step = Step.IDLE
        self.mechanism = PLAIN
        self.challenge: Challenge | None = None
        self.is_bare = False

    @property
    def takes_tokens(self) -> bool:
        """Whether what comes next is a token without a header."""
        return self.is_bare and self._step in (Step.AGREED, Step.CHALLENGED)

    @property
    def step(self) -> Step:
        """How far it has come."""
        return self._step

    def enter(self, step: Step) -> None:
        """Go on. Raises Refused for what is out of order."""
        if step not in TRANSITIONS[self._step]:
            raise Refused(WireError.ILLEGAL_SASL_STATE, "a login is in another step")
        self._step = step


def read_words(token: bytes) -> Words:
    """PLAIN's token. Raises Refused; who acts for somebody else has no words for that here."""
    parts = _text(token).split("\0")
    if len(parts) != 3 or not parts[1] or parts[0] not in ("", parts[1]):
        raise _unreadable()
    return Words(parts[1], parts[2])


def read_introduction(token: bytes) -> Introduction:
    """SCRAM's first message. Raises Refused."""
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
    """Whether one of these has to be understood, which none is (RFC 5802, section 5.1)."""
    return any(extension.startswith("m=") for extension in extensions)


def _unescaped(name: str) -> str:
    """A name as it is, of one in which ``=2C`` and ``=3D`` stand for what separates fields. Raises Refused."""
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
    return Refused(WireError.SASL_AUTHENTICATION_FAILED, "the login cannot be read")
