"""The option --bucket-prices."""

from __future__ import annotations

from pathlib import Path

import pytest

from polywire.errors import Invalid
from polywire.server.config import ServeConfig, parse_prices
from polywire.store.metered import Charge


def test_prices_by_kind() -> None:
    assert parse_prices("") == {}
    assert parse_prices(" put=0.005, get=4e-4,") == {Charge.PUT: 0.005, Charge.GET: 0.0004}


@pytest.mark.parametrize(
    "given", ["put", "put=", "put=x", "put=-1", "put=nan", "put=inf", "put=5000", "puts=1", "put=1,put=1"]
)
def test_invalid_prices_are_rejected_at_the_start(given: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="price"):
        ServeConfig(data_dir=tmp_path, bucket="s3://bucket", bucket_prices=given).listeners()
