"""Tests of the health checks."""

from __future__ import annotations

import pytest

from polywire.broker.state import PROBE_BYTES
from polywire.http import health
from tests.unit.http.site import Site


def test_a_broker_that_accepts_records_is_ready(site: Site) -> None:
    assert site.ask("GET", "/livez").body == site.ask("GET", "/livez/").body == b"alive\n"
    answer = site.ask("GET", "/readyz")
    assert (answer.status, answer.body) == (200, b"ready\n")


def test_a_full_disk_is_alive_but_not_ready(site: Site) -> None:
    site.memory.log.disk_full = True
    answer = site.ask("GET", "/readyz")
    assert answer.status == 503
    assert b"disk is full" in answer.body
    assert site.ask("GET", "/livez").status == 200


def test_a_disk_that_does_not_sync_in_time_is_not_ready(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "READY_S", 0.01)
    monkeypatch.setattr(site.memory.log, "barrier", lambda level, done: None)
    answer = site.ask("GET", "/readyz")
    assert answer.status == 503
    assert b"not synced" in answer.body


def test_failed_storage_is_not_ready(site: Site) -> None:
    site.memory.log.fail()
    assert site.ask("GET", "/readyz").status == 503


def test_a_stopping_broker_is_not_ready(site: Site) -> None:
    site.process.stopping = True
    assert site.ask("GET", "/readyz").body == b"not ready: the broker is stopping\n"


def test_the_readiness_check_stores_nothing(site: Site) -> None:
    before = site.broker.appended
    assert site.ask("GET", "/readyz").status == 200
    assert site.broker.appended == before
    assert PROBE_BYTES > 0


@pytest.mark.parametrize("path", ["/livez", "/metrics", "/", "/api/v1/topics", "/api/v1/topics/none"])
def test_head_returns_the_headers_of_get(site: Site, path: str) -> None:
    asked, looked = site.ask("GET", path), site.ask("HEAD", path)
    assert (looked.status, looked.body) == (asked.status, b"")
    assert looked.headers["content-type"] == asked.headers["content-type"]
