"""What the commands of groups ask of a conversation.

Promises: nothing but names. Must not know: frames, sockets, how answers are kept in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from polywire.broker.access import Principal, Where
from polywire.broker.actions import Action
from polywire.broker.owners import Caller
from polywire.protocols.kafka.context import KafkaBroker
from polywire.protocols.kafka.messages import Request


class Peer(Protocol):
    """Who asks."""

    @property
    def broker(self) -> KafkaBroker:
        """Whose verbs they are."""

    @property
    def peer_address(self) -> str:
        """Where it is."""

    def check_here(self, topic: str) -> None:
        """Refuse a topic that is not here because another process has it. Raises NotOwner(NOT_OWNER)."""

    @property
    def principal(self) -> Principal:
        """Who it is. Raises Denied(LOGIN_REQUIRED)."""

    @property
    def caller(self) -> Caller:
        """Whose it is what the peer makes."""

    def authorize(self, action: Action, where: Where = None) -> None:
        """Refuse what the peer may not do. Raises Denied."""

    def permits(self, action: Action, where: Where = None) -> bool:
        """Whether the peer may do it."""


class Reply(Protocol):
    """The answer to one request, which is filled once."""

    request: Request
    cancel: Callable[[], None] | None

    def ok(self, body: Any) -> None:
        """The body of the answer is known."""
