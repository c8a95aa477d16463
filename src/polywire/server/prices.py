"""The option ``--bucket-prices``: what the object store charges for 1,000 requests, in any currency."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Final

from polywire.errors import ErrorCode, Invalid
from polywire.http.process import PRICED_REQUESTS
from polywire.store.metered import Charge

PRICE_MAX: Final = 1_000.0  # a larger price is a typing error
_KINDS: Final = {charge.value: charge for charge in Charge}


def parse_prices(text: str) -> Mapping[Charge, float]:
    """Parse ``put=0.005,get=0.0004`` into prices by kind of request. Raises Invalid(INVALID_REQUEST).

    Kinds that are not named are free.
    """
    prices: dict[Charge, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        charge = _KINDS.get(name.strip())
        if charge is None or charge in prices:
            problem = "named twice" if charge is not None else f"none of {', '.join(_KINDS)}"
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"bucket prices are invalid (use put=0.005,get=0.0004): kind {name[:40]!r} is {problem}",
            )
        prices[charge] = _price(value, part)
    return prices


def _price(value: str, part: str) -> float:
    try:
        price = float(value)
    except ValueError:
        price = -1.0
    if not (isfinite(price) and 0 <= price <= PRICE_MAX):
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"price is not a number from 0 to {PRICE_MAX:g} for {PRICED_REQUESTS} requests got={part[:40]!r}",
        )
    return price
