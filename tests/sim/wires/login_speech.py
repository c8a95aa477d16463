"""Protocols of clients that log in with an access token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from polywire.protocols.kafka.messages import Api
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import encode_head
from polywire.protocols.polywire.messages import Verb
from tests.sim.wires.guests import LoginSpeech, Rights
from tests.sim.wires.kafka_speech import Identity, KafkaSpeech
from tests.sim.wires.polywire_speech import PolywireSpeech
from tests.sim.wires.speech import Answer, Words

ACTS: Final = frozenset({"produce", "fetch", "ping"})


class PolywireLogin(PolywireSpeech, LoginSpeech):
    """Implements ``Speech``."""

    words = Words("polywire", ACTS, is_ordered=False)

    def __init__(self, rights: Rights) -> None:
        super().__init__()
        self._rights = rights

    def greeting(self) -> bytes:
        login = messages.LogIn(self._rights.name, self._rights.shown)
        return super().greeting() + encode_head(Verb.LOGIN, 0, login)

    def take(self, data: bytes) -> Iterator[Answer]:
        for answer in super().take(data):
            if answer.number:
                yield answer
            else:
                self.login = not answer.error


class KafkaLogin(KafkaSpeech, LoginSpeech):
    """Implements ``Speech``."""

    words = Words("kafka", ACTS)

    def __init__(self, rights: Rights) -> None:
        super().__init__(Identity())
        self._rights = rights

    def greeting(self) -> bytes:
        token = f"\0{self._rights.name}\0{self._rights.shown}".encode()
        handshake = self._request(0, Api.SASL_HANDSHAKE, mechanism="PLAIN")
        return handshake + self._request(0, Api.SASL_AUTHENTICATE, auth_bytes=token)

    def _greeted(self, api: Api, body: Any) -> None:
        if body.error or api is Api.SASL_AUTHENTICATE:
            self.login = not body.error


SPEAKERS: Final[tuple[Callable[[Rights], LoginSpeech], ...]] = (PolywireLogin, KafkaLogin)
