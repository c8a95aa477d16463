"""Fixtures of the broker's tests: a broker in memory and recorded results."""

from __future__ import annotations

import pytest

from polywire.testing.memory_broker import MemoryBroker


@pytest.fixture
def memory() -> MemoryBroker:
    return MemoryBroker()
