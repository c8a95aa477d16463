"""What every wire calls of the broker; each adds to it, in its ``context``, the verbs that it calls beside (decision 0042).

Promises: a wire sees no more of the broker than it names. Must not know: any wire, the broker's facade.
"""

from __future__ import annotations

from typing import Protocol

from polywire.broker.access import Access
from polywire.broker.settings import BrokerSettings
from polywire.broker.sliced import SlicedWork
from polywire.broker.write_batch import WriteBatchVerbs
from polywire.clock import Clock
from polywire.log.base import Loop


class WireBroker(WriteBatchVerbs, Protocol):
    """The part of the broker that every wire calls."""

    @property
    def access(self) -> Access:
        """Who may do what."""

    @property
    def settings(self) -> BrokerSettings:
        """Its limits and defaults."""

    @property
    def loop(self) -> Loop:
        """Where callbacks are called."""

    @property
    def clock(self) -> Clock:
        """What the time is."""

    @property
    def sliced(self) -> SlicedWork:
        """Work that takes long, done in slices between which others are served."""
