"""The address of the admin API on the command line."""

from __future__ import annotations

import pytest
from cyclopts import Token

from polywire.cli.admin import _http_url


@pytest.mark.parametrize(
    ("option", "address", "url"),
    [
        ("--http", "http://broker:9081", "http://broker:9081"),
        ("-a", "broker:9555", "http://broker:9080"),
        ("--address", "polywire+tls://alice@broker:9555", "https://alice@broker:9080"),
        ("-a", "http://broker:9081", "http://broker:9081"),
        ("--address", "https://alice@broker:9081", "https://alice@broker:9081"),
    ],
)
def test_an_http_address_is_used_as_it_is(option: str, address: str, url: str) -> None:
    assert _http_url(str, [Token(keyword=option, value=address)]) == url
