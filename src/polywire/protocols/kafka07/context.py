"""Broker operations that the Kafka 0.7 protocol uses."""

from __future__ import annotations

from typing import Protocol

from polywire.broker.record_verbs import RecordVerbs
from polywire.broker.topic_verbs import TopicVerbs
from polywire.protocols.runtime.broker import WireBroker


class Kafka07Broker(TopicVerbs, RecordVerbs, WireBroker, Protocol):
    """Implicit creation of topics, and records."""
