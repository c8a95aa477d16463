"""The interface through which handlers of group requests use a Kafka session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from polywire.broker.access import Principal, Where
from polywire.broker.owners import Caller
from polywire.broker.permissions import Action
from polywire.broker.topics import Topic
from polywire.protocols.kafka.context import KafkaBroker
from polywire.protocols.kafka.messages import Request
from polywire.protocols.kafka.structures import Record


class Peer(Protocol):
    """The client that sent a request."""

    @property
    def broker(self) -> KafkaBroker: ...

    @property
    def peer_address(self) -> str: ...

    def leads(self, topic: Topic) -> bool:
        """Return whether the topic belongs to this process."""

    @property
    def principal(self) -> Principal:
        """Return the client's user. Raises Denied(LOGIN_REQUIRED) before the login."""

    @property
    def caller(self) -> Caller:
        """The client's user, who becomes the owner of objects that the client creates."""

    def authorize(self, action: Action, where: Where = None) -> None:
        """Raise Denied if the client may not perform an action."""

    def permits(self, action: Action, where: Where = None) -> bool: ...


class Reply(Protocol):
    """The response to one request. ``ok`` is called once."""

    request: Request
    cancel: Callable[[], None] | None

    def ok(self, body: Record) -> None:
        """Send the response with this body."""
