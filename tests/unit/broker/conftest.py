"""What the broker's tests have in common: a broker in memory and the answers it gave."""

from __future__ import annotations

import pytest

from polywire.testing.memory_broker import MemoryBroker


@pytest.fixture
def memory() -> MemoryBroker:
    return MemoryBroker()
