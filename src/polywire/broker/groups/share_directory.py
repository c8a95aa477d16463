"""The names of all share groups, their owners and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol

from polywire.broker import changes
from polywire.broker.api import Topics
from polywire.broker.groups.coordinator import GroupBroker
from polywire.broker.groups.share_table import ShareTable, share_group_size
from polywire.broker.owners import ITSELF, NO_CALLER, UNOWNED, Caller, Owners, next_owner
from polywire.broker.permissions import Action
from polywire.broker.quotas import Kind
from polywire.broker.settings import BrokerSettings, check_name
from polywire.broker.state import State
from polywire.broker.topics import Topic
from polywire.errors import Conflict, ErrorCode, Invalid
from polywire.log.base import Completion
from polywire.share_settings import DEAD_LETTERS, ShareSettings, check
from polywire.types import Level, TopicName

if TYPE_CHECKING:
    from polywire.broker.access import Access


class DirectoryBroker(GroupBroker, Topics, Protocol):
    """The methods of the broker that the directory calls."""

    @property
    def access(self) -> Access: ...

    @property
    def owners(self) -> Owners: ...

    def group_resource(self, full_name: str) -> Topic | TopicName:
        """Return the resource for permission checks on a full name, in any shard."""


class ShareDirectory:
    """All share groups of one broker, without their members and records."""

    __slots__ = ("_broker", "_settings", "_state", "_table")

    def __init__(self, broker: DirectoryBroker, state: State, settings: BrokerSettings) -> None:
        self._broker = broker
        self._state = state
        self._table: Final[ShareTable] = state.shares
        self._settings = settings

    def check_owner(self, name: str, by: Caller) -> None:
        """Raise Denied(DENIED) for another user's group."""
        self._broker.check_owner(by, self._table.owner(name), "group", name)

    def owner(self, name: str) -> int:
        return self._table.owner(name)

    def names(self, *, by: Caller = ITSELF) -> list[str]:
        """Return the names of all share groups that the caller may use and that have or had members."""
        return sorted(name for name, group in self._table.groups.items() if group.has_members and self._may(by, name))

    def _may(self, by: Caller, name: str) -> bool:
        return self._broker.owners.may_use(by, self._table.owner(name))

    def exists(self, name: str, *, by: Caller = ITSELF) -> bool:
        """Return whether a share group exists that the caller may use."""
        stored = self._table.groups.get(name)
        return stored is not None and stored.has_members and self._may(by, name)

    def settings(self, name: str) -> ShareSettings:
        return self._table.settings(name)

    def create(self, name: str, by: Caller) -> None:
        """Create a group unless it exists.

        Raises Invalid(INVALID_NAME), Conflict(GROUP_PROTOCOL_MISMATCH) if a group of another kind has this name, and
        Busy(BUSY, DISK_FULL).
        """
        check_name(name, self._settings.name_bytes_max)
        stored = self._table.groups.get(name)
        is_new = stored is None or not stored.has_members
        if is_new and self._has_consumer_group(name, by):
            raise Conflict(
                ErrorCode.GROUP_PROTOCOL_MISMATCH, f"a consumer group has this name (use another one) group={name!r}"
            )
        owner = self._table.owner(name)
        if not is_new and (owner > UNOWNED or next_owner(owner, by) == owner):
            return
        settings = dict(self.stored_settings(name))
        made = changes.ShareGroupStored(name, settings, next_owner(owner, by), has_members=True)
        if stored is None:
            self._state.quotas.admit(Kind.GROUPS, by, share_group_size(made))
        self._broker.change_all([made], level=Level.WRITTEN, done=None)

    def _has_consumer_group(self, name: str, by: Caller) -> bool:
        """Return whether a consumer group has this name, except one whose topics are all hidden from the caller."""
        topics = self._state.group_topics.get(name, ())
        return name in self._state.classic_groups or any(
            self._broker.access.permits(by.principal, Action.GROUP_DESCRIBE, self._broker.group_resource(topic))
            for topic in topics
        )

    def stored_settings(self, name: str) -> Mapping[str, str]:
        """Return the settings of a group that differ from the defaults."""
        stored = self._table.groups.get(name)
        return {} if stored is None else stored.settings

    def configured(self, *, by: Caller = ITSELF) -> list[str]:
        """Return the names of all groups with settings of their own that the caller may use."""
        return sorted(name for name, group in self._table.groups.items() if group.settings and self._may(by, name))

    def check_configuration(self, name: str, settings: Mapping[str, str], *, by: Caller = NO_CALLER) -> None:
        """Check all settings of a group. Raises the same errors as ``configure``."""
        check_name(name, self._settings.name_bytes_max)
        self.check_owner(name, by)
        for key, value in settings.items():
            check(key, value)
        letters = settings.get(DEAD_LETTERS)
        if letters and letters != self.stored_settings(name).get(DEAD_LETTERS):
            self._check_dead_letters(letters, by)

    def _check_dead_letters(self, name: str, by: Caller) -> None:
        """Check a dead-letter topic. The broker itself writes to it, so the caller must be allowed to do so."""
        where = self._broker.group_resource(name)
        self._broker.access.authorize(by.principal, Action.PRODUCE, where)
        if isinstance(where, TopicName):
            self._broker.access.authorize(by.principal, Action.TOPIC_CREATE, where)
        elif self._broker.find_topic(name) is None:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"the dead-letter topic is in another process of the broker (use a new topic) topic={name!r}",
            )

    def configure(
        self, name: str, settings: Mapping[str, str], *, by: Caller = NO_CALLER, done: Completion[int] | None = None
    ) -> None:
        """Replace the settings of a group, which need not exist yet. Create its dead-letter topic.

        Raises Invalid(INVALID_NAME, INVALID_REQUEST), Denied(DENIED), Busy(BUSY, DISK_FULL), and Missing(TOPIC_MISSING)
        for a dead-letter topic that does not exist if topics are not created automatically.
        """
        self.check_configuration(name, settings, by=by)
        if letters := settings.get(DEAD_LETTERS):  # so that no other process of the broker creates it
            self._broker.ensure_topic(letters, by=by)
        stored = self._table.groups.get(name)
        owner, has_members = (UNOWNED, False) if stored is None else (stored.owner, stored.has_members)
        made = changes.ShareGroupStored(name, dict(settings), next_owner(owner, by), has_members)
        if not settings and not has_members:
            if stored is not None:
                self._broker.change_all([changes.ShareGroupDeleted(name)], level=Level.WRITTEN, done=done)
            elif done is not None:
                self._broker.change_all([], level=Level.WRITTEN, done=done)
            return
        grown = share_group_size(made) - (0 if stored is None else share_group_size(stored))
        self._state.quotas.admit(Kind.GROUPS, by, grown, count=int(stored is None), owner=owner)
        self._broker.change_all([made], level=Level.WRITTEN, done=done)
