"""``polywire link``: what a cut-over says if only some topics were ready in time."""

from __future__ import annotations

from typing import Any, cast

import pytest

from polywire.cli.admin import AdminApi
from polywire.cli.link import _Change
from polywire.cli.output import Failed, ListFormat
from polywire.link_orders import Phase


class Admin:
    """Answers every request with the same phases of topics."""

    def __init__(self, **phases: Phase) -> None:
        self.rows = [
            {"topic": name, "phase": phase.value, "pause_s": 0.0, "lag": 0, "error": ""}
            for name, phase in phases.items()
        ]

    def request(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        del method, path, body
        return {"topics": self.rows, "error": ""}


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (Phase.FOLLOWING, "not done in time, so nothing changes: stop them topics=orders,sales"),
        (
            Phase.CUT_OVER,
            "not done in time, so 1 of 2 topics are cut over, the others are as before: stop them topics=sales",
        ),
    ],
)
def test_an_error_says_which_topics_are_as_before(orders: Phase, message: str) -> None:
    change = _Change("old", "cut-over", Phase.CUT_OVER, "stop them", {"topics": []})
    with pytest.raises(Failed, match=message):
        change.make(cast(AdminApi, Admin(orders=orders, sales=Phase.FOLLOWING)), "0s", ListFormat.JSON)
