"""The interface with the broker's operations that every protocol uses.

Each protocol adds more in its module ``context`` (decision 0107).
"""

from __future__ import annotations

from typing import Protocol

from polywire.broker.access import Access
from polywire.broker.api import Settling
from polywire.broker.settings import BrokerSettings
from polywire.broker.sliced import SlicedWork
from polywire.clock import Clock
from polywire.log.base import Loop


class WireBroker(Settling, Protocol):
    """The part of the broker that the sessions of every protocol use."""

    @property
    def access(self) -> Access:
        """Users and permissions."""

    @property
    def users(self) -> Access:
        """The methods of ``access`` that change users. With several processes, the first one executes them."""

    @property
    def settings(self) -> BrokerSettings:
        """Limits and defaults."""

    @property
    def loop(self) -> Loop: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def sliced(self) -> SlicedWork:
        """Queue for long work, which runs in several passes of the loop, between other requests."""
