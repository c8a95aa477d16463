"""Fixtures of the tests of published pages: a broker on whose ports they speak."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker_process import BrokerProcess


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Serve one broker for all tests of a module, with every protocol, and a port that detects them."""
    with BrokerProcess(tmp_path_factory.mktemp("page") / "data", "--any", "127.0.0.1:0") as process:
        yield process
