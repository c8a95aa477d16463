"""Broker operations that every protocol uses; a protocol's ``context`` adds its own (decision 0107)."""

from __future__ import annotations

from typing import Protocol

from polywire.broker.access import Access
from polywire.broker.settings import BrokerSettings
from polywire.broker.sliced import SlicedWork
from polywire.broker.write_batch import WriteBatchVerbs
from polywire.clock import Clock
from polywire.log.base import Loop


class WireBroker(WriteBatchVerbs, Protocol):
    """Part of the broker that every protocol uses."""

    @property
    def access(self) -> Access:
        """Permissions."""

    @property
    def settings(self) -> BrokerSettings:
        """Limits and defaults."""

    @property
    def loop(self) -> Loop:
        """Loop of callbacks."""

    @property
    def clock(self) -> Clock:
        """Source of time."""

    @property
    def sliced(self) -> SlicedWork:
        """Long work, run in slices between other requests."""
