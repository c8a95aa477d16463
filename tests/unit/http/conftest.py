"""A broker in memory with HTTP over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.http.site import Site


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()
