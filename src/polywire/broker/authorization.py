"""Who may do what: the one check of the one table of permissions (decision 0028).

Promises: every action of every wire is asked for here; a topic's access list counts for everybody, on an open broker too; a refusal is the
same whether or not there is such a topic. Must not know: passwords, tokens, wires.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from polywire.broker.actions import ANYBODY, Action
from polywire.broker.elsewhere import TopicElsewhere
from polywire.broker.permissions import Grants
from polywire.broker.topics import Topic
from polywire.broker.users import ROOT, Principal
from polywire.errors import Denied, ErrorCode
from polywire.types import TopicName

Where = Topic | TopicElsewhere | TopicName | str | None
"""What an action is asked for: a topic, one by its name, a stream by its name, or everything."""


class KnownStreams(Protocol):
    """Which streams there are."""

    def exists(self, name: str, /) -> bool:
        """Whether there is a stream of this name."""


class Authorization(ABC):
    """What users of a broker may do; who they are is a subclass's."""

    __slots__ = ()

    is_open: bool
    _streams: KnownStreams

    @abstractmethod
    def _rights_of(self, principal: Principal) -> Grants | None:
        """The opened grants of somebody whose login counts."""

    @abstractmethod
    def is_current(self, principal: Principal) -> bool:
        """Whether a login still counts."""

    def authorize(self, principal: Principal | None, action: Action, where: Where = None) -> None:
        """Refuse what somebody may not do: with a topic, in a stream (by its name), or (without either) everywhere.

        None is who has not logged in. A topic that does not exist is given by its name. Raises Denied(LOGIN_REQUIRED, DENIED).
        """
        if not self.permits(principal, action, where):
            raise self.refusal(principal, action, where)

    def authorize_somewhere(self, principal: Principal | None, action: Action) -> None:
        """Refuse what somebody may do nowhere; what it is done with is asked for again. Raises Denied(LOGIN_REQUIRED, DENIED)."""
        if not self.permits_somewhere(principal, action):
            raise self.refusal(principal, action, "any")

    def permits(self, principal: Principal | None, action: Action, where: Where = None) -> bool:
        """Whether somebody may do it; nothing any more once it was deleted or made inactive. A topic's access list counts for all."""
        listed = None
        if type(where) is Topic:
            listed = where.settings.access
        elif type(where) is TopicElsewhere:
            listed = where.access
        if listed is not None and action.listed is not None:
            name = None if principal is None or principal is ROOT else principal.name
            if not listed.admits(action.listed, name):
                return False
        if principal is None or principal is ROOT:
            return self.is_open or action in ANYBODY
        return self._holds(principal, action, where)

    def permits_somewhere(self, principal: Principal | None, action: Action) -> bool:
        """Whether somebody may do it everywhere, in some stream or with some topic."""
        if principal is None or principal is ROOT:
            return self.is_open or action in ANYBODY
        if action.is_everybodys:
            return self.is_current(principal)
        rights = self._rights_of(principal)
        return rights is not None and rights.allow_somewhere(action.bits)

    def _holds(self, principal: Principal, action: Action, where: Where) -> bool:
        if action.is_everybodys:
            return self.is_current(principal)
        rights = self._rights_of(principal)
        if rights is None:
            return False
        if where is None or isinstance(where, str):
            return rights.allow(action.bits, where, None)
        name = where if isinstance(where, TopicName) else where.name
        if not rights.allow(action.bits, name.stream, name.topic):
            return False
        if action is not Action.TOPIC_CREATE or self._streams.exists(name.stream):
            return True
        # Nobody makes a stream in passing but who may make streams, or was given rights in this one before it was there.
        makes = rights.allow(Action.STREAM_CREATE.bits, name.stream, None)
        return makes or rights.name(action.bits, name.stream, name.topic)

    def refusal(self, principal: Principal | None, action: Action, where: Where = None) -> Denied:
        """The error for what was not permitted."""
        if principal is None or (principal is ROOT and not self.is_open):
            return Denied(ErrorCode.LOGIN_REQUIRED, "log in first")
        return Denied(
            ErrorCode.DENIED,
            f"not allowed, ask for the permission {action.permission_words} user={principal.name!r}"
            f" action={action.word} where={resource_text(where)!r}",
        )


def resource_text(where: Where) -> str:
    """Name a resource for logs and errors."""
    if isinstance(where, Topic | TopicElsewhere):
        return where.name.full
    return where.full if isinstance(where, TopicName) else where or "everywhere"
