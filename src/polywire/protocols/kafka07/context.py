"""What the Kafka 0.7 wire calls of the broker.

Promises: it sees nothing else of it. Must not know: sessions, sockets.
"""

from __future__ import annotations

from typing import Protocol

from polywire.broker.record_verbs import RecordVerbs
from polywire.broker.topic_verbs import TopicVerbs
from polywire.protocols.runtime.broker import WireBroker


class Kafka07Broker(TopicVerbs, RecordVerbs, WireBroker, Protocol):
    """What this wire calls of the broker: topics made in passing, and records."""
