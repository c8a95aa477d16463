"""Clients with passwords, sent or proved by SCRAM over the Kafka protocol.

Passwords change during connections and logins. A server that accepts a client must prove that it has the stored form of
the password.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

from polywire.broker.access import Access, User
from polywire.broker.authentication import UNKNOWN_USER_HASH
from polywire.broker.scram import Mechanism, Verifier, make_verifier
from polywire.errors import BrokerError, Busy
from polywire.log.base import Completion
from polywire.protocols.kafka.messages import Api
from tests.sim.chance import Chance
from tests.sim.promises import require
from tests.sim.story import Story
from tests.sim.wires.guests import LOGIN, NO_MEMBERS, WRONG, LoginSpeech, Rights, State, cheap_hash
from tests.sim.wires.kafka_speech import Identity, KafkaSpeech
from tests.sim.wires.login_speech import ACTS, SPEAKERS
from tests.sim.wires.speech import Words

ITERATIONS: Final = 4096  # the lowest permitted number
SHOWS_OLD: Final = 0.2  # of connections: with an old password
NEITHER: Final[Mapping[Mechanism, Verifier | None]] = {**NO_MEMBERS, Mechanism.SHA_512: None}


class PasswordRights(Rights):
    """Guards: ``_passwords`` are all passwords so far."""

    def __init__(self, name: str, chance: Chance, story: Story) -> None:
        super().__init__(name, chance, story)
        self._passwords: list[str] = []

    def show(self) -> None:
        super().show()
        if self._passwords and self._chance.happens(SHOWS_OLD):
            self.shown = self._chance.one_of(self._passwords)

    def _counts(self, password: str) -> None:
        """Make this the current password."""
        self._passwords.append(password)
        self.token, self.ended = password, self.now

    def _let_in(self, access: Access, user: User, state: State) -> None:
        """Set a password; hashing takes a while."""
        password, states = self._chance.token(8).hex(), self._states

        def finished(found: User | BrokerError) -> None:
            if states is not self._states or (isinstance(found, BrokerError) and not isinstance(found, Busy)):
                return  # of an earlier process, or with an unknown result
            self.is_changing = False
            if isinstance(found, Busy):
                states.pop()
            else:
                self._counts(password)

        def ask(done: Completion[User]) -> None:
            def reported(found: User | BrokerError) -> None:
                done(found)
                finished(found)

            access.reset_password(user, password, done=reported)

        self._note(state | {(LOGIN, password)}, ask)
        self.is_changing = True

    def _shut_out(self, access: Access, user: User, rest: State) -> None:
        """Delete the user."""
        self._note(frozenset(), lambda done: access.delete_user(user, done=done))
        self.token, self.ended = WRONG, self.now

    def _logins_of(self, user: User | None, tokens: Collection[str]) -> State:
        kept = UNKNOWN_USER_HASH if user is None else user.password_hash
        found = {token for token in tokens if cheap_hash(token) == kept}
        require(found or kept == UNKNOWN_USER_HASH, "a password that was replaced is no more", user=self.name)
        return frozenset((LOGIN, token) for token in found)


class ScramRights(PasswordRights):
    """Guards: ``_verifiers`` has the stored form of each password so far."""

    def __init__(self, name: str, chance: Chance, story: Story) -> None:
        super().__init__(name, chance, story)
        self._verifiers: dict[str, Mapping[Mechanism, Verifier]] = {}

    def _let_in(self, access: Access, user: User, state: State) -> None:
        password = self._chance.token(8).hex()
        kept = {mechanism: make_verifier(password, mechanism, iterations=ITERATIONS) for mechanism in Mechanism}
        self._note(state | {(LOGIN, password)}, lambda done: access.set_verifiers(self.name, kept, done=done))
        self._verifiers[password] = kept
        self._counts(password)

    def _shut_out(self, access: Access, user: User, rest: State) -> None:
        self._note(rest, lambda done: access.set_verifiers(self.name, NEITHER, done=done))
        self.token, self.ended = WRONG, self.now

    def _logins_of(self, user: User | None, tokens: Collection[str]) -> State:
        kept = () if user is None else user.verifiers
        found = {token for token in tokens if set(self._verifiers[token].values()) == set(kept)}
        is_nobodys = not kept or set(kept) == set(NO_MEMBERS.values())
        require(found or is_nobodys, "a password that was replaced is no more", user=self.name)
        return frozenset((LOGIN, token) for token in found)


class ScramLogin(KafkaSpeech, LoginSpeech):
    """Implements ``Speech``. Guards: ``_expected`` is what only a server with the password's verifier can send."""

    words = Words("kafka", ACTS)

    def __init__(self, mechanism: Mechanism, rights: Rights) -> None:
        super().__init__(Identity())
        self._mechanism: Final = mechanism
        self._rights: Final = rights
        self._first = f"n={rights.name},r={mechanism.value}"
        self._expected = b""
        self._says = b""

    def greeting(self) -> bytes:
        handshake = self._request(0, Api.SASL_HANDSHAKE, mechanism=self._mechanism.value)
        return handshake + self._request(0, Api.SASL_AUTHENTICATE, auth_bytes=f"n,,{self._first}".encode())

    def reply(self) -> bytes:
        said, self._says = self._says, b""
        return said

    def _greeted(self, api: Api, body: Any) -> None:
        if body.error:
            self.login = False
        elif api is Api.SASL_AUTHENTICATE and not self._expected:
            self._says = self._request(0, Api.SASL_AUTHENTICATE, auth_bytes=self._proof(body.auth_bytes.decode()))
        elif api is Api.SASL_AUTHENTICATE:
            require(bytes(body.auth_bytes) == self._expected, "who lets in has the verifier", guest=self._rights.name)
            self.login = True

    def _proof(self, challenge: str) -> bytes:
        """Return the proof of the password for this challenge (RFC 5802)."""
        said = dict(part.split("=", 1) for part in challenge.split(","))
        digest, last = self._mechanism.digest, f"c=biws,r={said['r']}"
        salted = _salted(digest, self._rights.shown, b64decode(said["s"]), int(said["i"]))
        messages = f"{self._first},{challenge},{last}".encode()
        key = hmac.digest(salted, b"Client Key", digest)
        signature = hmac.digest(hashlib.new(digest, key).digest(), messages, digest)
        proof = bytes(a ^ b for a, b in zip(key, signature, strict=True))
        server = hmac.digest(hmac.digest(salted, b"Server Key", digest), messages, digest)
        self._expected = b"v=" + b64encode(server)
        return f"{last},p={b64encode(proof).decode()}".encode()


PROVING: Final[Sequence[tuple[type[PasswordRights], Callable[[Any], LoginSpeech]]]] = (
    *((ScramRights, partial(ScramLogin, mechanism)) for mechanism in Mechanism),
    *((PasswordRights, speaker) for speaker in SPEAKERS),
)
"""The kinds of secrets and how clients send them."""


@cache
def _salted(digest: str, password: str, salt: bytes, iterations: int) -> bytes:
    return hashlib.pbkdf2_hmac(digest, password.encode(), salt, min(iterations, ITERATIONS))
