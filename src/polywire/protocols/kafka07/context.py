"""Broker operations that the Kafka 0.7 protocol uses."""

from __future__ import annotations

from typing import Protocol

from polywire.broker.api import Records, Topics
from polywire.protocols.runtime.broker import WireBroker


class Kafka07Broker(Topics, Records, WireBroker, Protocol):
    """The methods of the broker that the Kafka 0.7 protocol uses."""
