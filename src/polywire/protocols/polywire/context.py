"""Broker operations that the `polywire` protocol uses."""

from __future__ import annotations

from typing import Protocol

from polywire.broker.groups.commits import PositionVerbs
from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.groups.share_groups import ShareGroups
from polywire.broker.sliced import OrderedWork
from polywire.broker.staging import StagingVerbs
from polywire.broker.topic_verbs import RemovalVerbs, TopicVerbs
from polywire.broker.transactions import Transactions
from polywire.protocols.runtime.broker import WireBroker


class PolywireBroker(TopicVerbs, RemovalVerbs, StagingVerbs, PositionVerbs, WireBroker, Protocol):
    """The methods of the broker that the `polywire` protocol uses: nearly all, because it is the native protocol."""

    @property
    def groups(self) -> Coordinator: ...

    @property
    def shares(self) -> ShareGroups: ...

    @property
    def publish_work(self) -> OrderedWork:
        """Queue for publishes of many batches, which run one at a time."""

    @property
    def transactions(self) -> Transactions:
        """Transactions of other protocols, to list and delete them."""
