"""What tests of clients have in common: a broker behind a socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.client.served import Served


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as server:
        yield server
