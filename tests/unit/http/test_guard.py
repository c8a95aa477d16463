"""Tests of logins, and of requests that a foreign page causes."""

from __future__ import annotations

from base64 import b64encode

import pytest

from polywire.broker.permissions import EVERYTHING, parse_grants
from polywire.http.guard import HEADERS
from tests.unit.http.site import Site

PAGES = ("/metrics",)
CHANGE = {"X-Polywire": "1", "Content-Type": "application/json"}


def basic(name: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + b64encode(f"{name}:{password}".encode()).decode()}


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:9080",
        "127.0.0.1",
        "127.0.0.1:9080",
        "[::1]:9080",
        "10.1.2.3:1",
        "LOCALHOST",
        "broker.example:9080",
    ],
)
def test_addresses_and_allowed_names_are_accepted(host: str) -> None:
    site = Site(names=["broker.example"])
    assert site.ask("GET", "/metrics", {"Host": host}).status == 200
    site.close()


def test_a_load_balancer_may_send_no_host(site: Site) -> None:
    assert site.exchange(b"GET /livez HTTP/1.0\r\n\r\n").status == 200
    assert site.exchange(b"GET /livez HTTP/1.0\r\nOrigin: http://evil.example\r\n\r\n").status == 403
    assert site.exchange(b"GET /livez HTTP/1.1\r\n\r\n").status == 400, "version 1.1 requires it"


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:9080",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        "[::1].evil",
        "evil.example:127.0.0.1",
        "[fe80::1%eth0]",
        "[fe80::1%25evil.example]:9080",
        "[::1%lo]:9080",
    ],
)
@pytest.mark.parametrize("path", ["/metrics", "/livez", "/nothing"])
def test_other_host_names_are_rejected(site: Site, host: str, path: str) -> None:
    """A page of evil.example resolves its name to our address, so the browser treats us as the same origin."""
    answer = site.ask("GET", path, {"Host": host})
    assert (answer.status, answer.code) == (403, "denied")


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"},
        {
            "Sec-Fetch-Site": "same-site",
            "Sec-Fetch-Mode": "cors",
            "Sec-Fetch-Dest": "empty",
        },  # another port of this machine
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
        {"Origin": "https://evil.example"},
        {"Origin": "http://127.0.0.1:8000"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9080.evil.example"},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_requests_of_foreign_pages_are_rejected(site: Site, headers: dict[str, str], method: str) -> None:
    answer = site.ask(method, "/metrics", headers | CHANGE)
    assert (answer.status, answer.code) == (403, "denied")
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors", "Origin": "http://127.0.0.1:9080"},
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},  # a link
        {},
    ],
    ids=str,
)
def test_own_pages_and_links_to_them_are_accepted(site: Site, headers: dict[str, str]) -> None:
    assert site.ask("GET", "/metrics", headers).status == 200


def test_a_foreign_form_cannot_navigate_to_a_change(site: Site) -> None:
    form = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert site.ask("POST", "/metrics", form | {"Content-Type": "text/plain"}, b"{}").status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_a_change_needs_a_header_that_no_form_can_send(site: Site, method: str) -> None:
    answer = site.ask(method, "/metrics")
    assert (answer.status, answer.code) == (403, "denied")
    assert "x-polywire" in answer.json["error"]["message"]
    assert site.ask(method, "/metrics", {"X-Polywire": "1"}).status == 405


def test_a_preflight_is_never_granted(site: Site) -> None:
    asked = {
        "Origin": "https://evil.example",
        "Access-Control-Request-Headers": "x-polywire",
        "Access-Control-Request-Method": "POST",
    }
    answer = site.ask("OPTIONS", "/metrics", asked)
    assert answer.status == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_every_response_has_security_headers(site: Site) -> None:
    for answer in (
        site.ask("GET", "/livez"),
        site.ask("GET", "/nothing"),
        site.ask("GET", "/metrics", {"Origin": "null"}),
    ):
        assert {name.decode(): value.decode() for name, value in HEADERS}.items() <= answer.headers.items()


@pytest.fixture
def users(site: Site) -> Site:
    site.configure(alice=EVERYTHING, reader=parse_grants(["consume@shop"]))
    return site


def test_a_broker_with_users_requires_a_login(users: Site) -> None:
    answer = users.ask("GET", "/metrics")
    assert (answer.status, answer.code) == (401, "login_required")
    assert answer.headers["www-authenticate"].startswith("Basic ")
    assert users.ask("GET", "/metrics", basic("alice", "wrong")).status == 401
    assert users.ask("GET", "/metrics", {"Authorization": "Basic !!!"}).status == 401
    assert users.ask("GET", "/metrics", {"Authorization": "Digest x"}).status == 401
    assert users.ask("GET", "/metrics", basic("alice", "alice")).status == 200
    assert users.peer.principal is not None
    assert users.peer.principal.name == "alice"
    assert users.ask("GET", "/metrics", basic("alice", "alice") | {"Host": "broker.example"}).status == 200


def test_a_token_logs_in(users: Site) -> None:
    access = users.broker.access
    alice = next(user for user in access.users() if user.name == "alice")
    token = access.create_token(alice, "prometheus", None)
    assert users.ask("GET", "/metrics", {"Authorization": f"Bearer {token}"}).status == 200
    assert users.ask("GET", "/metrics", {"Authorization": "Bearer nothing"}).status == 401


def test_metrics_need_permission(users: Site) -> None:
    answer = users.ask("GET", "/metrics", basic("reader", "reader"))
    assert (answer.status, answer.code) == (403, "denied")


def test_health_needs_no_login(users: Site) -> None:
    assert users.ask("GET", "/livez").status == users.ask("GET", "/readyz").status == 200


def test_a_trailing_slash_is_ignored() -> None:
    site = Site()
    site.configure(boss=EVERYTHING)
    for path in ("/livez", "/readyz", "/metrics", "/api/v1/topics", "/static/console.js"):
        for login in ({}, basic("boss", "boss")):
            assert site.ask("GET", path, login).status == site.ask("GET", f"{path}/", login).status in (200, 401), path
    site.close()
