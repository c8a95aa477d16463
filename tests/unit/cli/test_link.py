"""``polywire link``: addresses, the status of a link that fails, and cut-overs of which only some topics were ready."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from polywire.cli.admin import AdminApi
from polywire.cli.link import _Change
from polywire.cli.main import run
from polywire.cli.output import Failed, ListFormat
from polywire.cli.usage import EXIT_DONE, EXIT_FAILED
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


FAILING = {
    "topic": "orders",
    "phase": "following",
    "partitions": 3,
    "copied": 7,
    "lag": None,
    "lag_s": None,
    "rate": 0.0,
}


def test_the_lag_of_a_link_that_fails_is_unknown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {**FAILING, "shifted": 0, "late": 0, "settings": "", "error": "no broker"}
    link = {**FAILING, "name": "old", "source": "kafka://a:1", "state": "failing", "topic_reports": [row]}
    monkeypatch.setattr(AdminApi, "request", lambda *_: {**link, "error": "no broker"})
    assert run(["link", "status", "old"]) == EXIT_DONE
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split()[:7] == ["orders", "failing", "3", "7", "–", "–", "0.0"]
    assert "state=failing lag=- lag_s=- rate=0.0 error=" in err
    assert run(["link", "status", "old", "--output", "json"]) == EXIT_DONE
    [found] = json.loads(capsys.readouterr().out)
    assert (found["lag"], found["lag_s"]) == (None, None)


@pytest.mark.parametrize("words", [("link", "list"), ("quota", "list"), ("link", "compare", "old")])
def test_commands_of_the_admin_api_find_the_broker_by_its_address(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("polywire.cli.admin.HTTP_PORT", 1)
    monkeypatch.delenv("POLYWIRE_HTTP", raising=False)
    monkeypatch.setenv("POLYWIRE_ADDRESS", "polywire://127.0.0.2:9555")
    for option in ("--address", "-a"):
        assert run([*words, option, "127.0.0.3:9555"]) == EXIT_FAILED
        assert "address=127.0.0.3:1 (name the broker's HTTP listener with --http" in capsys.readouterr().err
    assert run([*words, "--http", "http://127.0.0.4:2"]) == EXIT_FAILED
    assert "address=127.0.0.4:2 code=unreachable" in capsys.readouterr().err
    assert run([*words]) == EXIT_FAILED
    assert "address=127.0.0.2:1" in capsys.readouterr().err
