"""What tests of published pages have in common: a broker on whose ports they speak."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker_process import BrokerProcess


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker for all tests of a module, with every wire, and a port that recognises them."""
    with BrokerProcess(tmp_path_factory.mktemp("page") / "data", "--any", "127.0.0.1:0") as process:
        yield process
