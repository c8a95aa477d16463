"""Permission checks and audit events. All protocols authorize actions here (decision 0115).

* A topic's access list applies to every client, even on a broker without users. A refusal looks the same whether or not
  the topic exists.
* Audit events report logins, refusals and changes of permissions, without secrets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final

import msgspec

from polywire.broker.permissions import ANYBODY, Action, Grants
from polywire.broker.topics import Streams, Topic
from polywire.broker.users import LINKS, ROOT, TABLES, Principal
from polywire.errors import Denied, ErrorCode
from polywire.types import TopicName

INTERNAL: Final[Mapping[Principal, frozenset[Action]]] = {
    TABLES: frozenset({Action.CONNECT, Action.TOPIC_DESCRIBE, Action.FETCH}),
    LINKS: frozenset(
        {
            Action.CONNECT,
            Action.TOPIC_DESCRIBE,
            Action.TOPIC_LIST,
            Action.TOPIC_CREATE,
            Action.TOPIC_ALTER,
            Action.TOPIC_LINK,
            Action.PRODUCE,
            Action.STAGED_PUBLISH,
            Action.GROUP_LIST,
            Action.GROUP_DESCRIBE,
            Action.OFFSET_FETCH,
            Action.OFFSET_COMMIT,
            Action.FETCH,
        }
    ),
}
"""The actions that the broker's internal clients may perform: the processes for tables and for links."""

Where = Topic | TopicName | str | None
"""The resource of an action: a topic, a topic's name, a stream's name, or None for everything."""


class Outcome(Enum):
    """Outcome of an audited action."""

    ALLOWED = "allowed"
    REFUSED = "refused"


class AuditEvent(msgspec.Struct, frozen=True):
    """One audited action.

    Attributes:
        peer: address of the connection, empty if there is none.
    """

    action: str
    outcome: Outcome
    user: str = ""
    peer: str = ""
    resource: str = ""
    reason: str = ""


AuditSink = Callable[[AuditEvent], None]


def discard(event: AuditEvent) -> None:
    """Drop an event."""
    del event


class Authorization(ABC):
    """Permission checks. Subclasses provide the users."""

    __slots__ = ()

    is_open: bool
    _streams: Streams

    @abstractmethod
    def _rights_of(self, principal: Principal) -> Grants | None: ...

    @abstractmethod
    def is_current(self, principal: Principal) -> bool:
        """Return whether a login is still valid."""

    def authorize(self, principal: Principal | None, action: Action, where: Where = None) -> None:
        """Raise Denied(LOGIN_REQUIRED, DENIED) unless the user may perform an action on a resource.

        Args:
            principal: None for a client that is not logged in.
            where: the resource. For a topic that does not exist, its name.
        """
        if not self.permits(principal, action, where):
            raise self.refusal(principal, action, where)

    def authorize_somewhere(self, principal: Principal | None, action: Action) -> None:
        """Raise Denied(LOGIN_REQUIRED, DENIED) unless the user may perform an action on at least one resource.

        The caller must check the resource itself when it knows it.
        """
        if not self.permits_somewhere(principal, action):
            raise self.refusal(principal, action, "any")

    def permits(self, principal: Principal | None, action: Action, where: Where = None) -> bool:
        """Return whether the user may perform an action on a resource. A deleted or inactive user may not.

        A topic's access list applies to every user, administrators included.
        """
        if principal is TABLES or principal is LINKS:
            return action in INTERNAL[principal]
        listed = where.settings.access if type(where) is Topic else None
        if listed is not None and action.listed is not None:
            name = None if principal is None or principal is ROOT else principal.name
            if not listed.admits(action.listed, name):
                return False
        if principal is None or principal is ROOT:
            return self.is_open or action in ANYBODY
        return self._holds(principal, action, where)

    def permits_somewhere(self, principal: Principal | None, action: Action) -> bool:
        """Return whether the user may perform an action on at least one resource."""
        if principal is TABLES or principal is LINKS:
            return action in INTERNAL[principal]
        if principal is None or principal is ROOT:
            return self.is_open or action in ANYBODY
        if action.needs_no_permission:
            return self.is_current(principal)
        rights = self._rights_of(principal)
        return rights is not None and rights.allow_somewhere(action.bits)

    def _holds(self, principal: Principal, action: Action, where: Where) -> bool:
        if action.needs_no_permission:
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
        # The topic's stream does not exist yet: the user needs permission to create it, or a permission that names the
        # stream or the topic.
        makes = rights.allow(Action.STREAM_CREATE.bits, name.stream, None)
        return makes or rights.name(action.bits, name.stream, name.topic)

    def refusal(self, principal: Principal | None, action: Action, where: Where = None) -> Denied:
        """Return the error for an action that is not permitted."""
        if principal is None or (principal is ROOT and not self.is_open):
            return Denied(ErrorCode.LOGIN_REQUIRED, "log in first")
        return Denied(
            ErrorCode.DENIED,
            f"not allowed (requires the permission {action.permission_words}) user={principal.name!r}"
            f" action={action.word} where={resource_text(where)!r}",
        )


def resource_text(where: Where) -> str:
    if isinstance(where, Topic):
        return where.name.full
    return where.full if isinstance(where, TopicName) else where or "everywhere"
