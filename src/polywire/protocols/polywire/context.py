"""What the `polywire` wire calls of the broker.

Promises: it sees nothing else of it. Must not know: sessions, sockets.
"""

from __future__ import annotations

from typing import Protocol

from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.groups.positions import PositionVerbs
from polywire.broker.removal_verbs import RemovalVerbs
from polywire.broker.sliced import OrderedWork
from polywire.broker.staging_verbs import StagingVerbs
from polywire.broker.topic_verbs import TopicVerbs
from polywire.broker.transactions import Transactions
from polywire.protocols.runtime.broker import WireBroker


class PolywireBroker(TopicVerbs, RemovalVerbs, StagingVerbs, PositionVerbs, WireBroker, Protocol):
    """What this wire calls of the broker: nearly all of it, as it is our own."""

    @property
    def groups(self) -> Coordinator:
        """Groups and their members."""

    @property
    def publish_work(self) -> OrderedWork:
        """Publishes of many batches, one at a time."""

    @property
    def transactions(self) -> Transactions:
        """Transactions of other wires, to list and delete them."""
