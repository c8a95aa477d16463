"""Tests of users and tokens in the admin API."""

from __future__ import annotations

from typing import Any

import pytest

from polywire.broker.permissions import EVERYTHING, parse_grants
from polywire.http import users
from polywire.http.endpoints import PREFIX
from tests.unit.http.site import Answer, Site
from tests.unit.http.test_guard import CHANGE, basic

BOSS = basic("boss", "boss")


@pytest.fixture
def closed(site: Site) -> Site:
    """Return a broker with an administrator, and a user who may manage users but read no topic."""
    site.configure(boss=EVERYTHING, clerk=parse_grants(["manage_users"]))
    return site


def ask(site: Site, method: str, path: str, body: Any = b"", login: dict[str, str] = BOSS) -> Answer:
    return site.ask(method, PREFIX + path, CHANGE | login, body)


def test_a_user_is_created_changed_and_deleted(closed: Site) -> None:
    made = ask(closed, "POST", "/users/carol", {"password": "first", "permissions": ["consume@shop", "produce@shop/a"]})
    assert made.json["permissions"] == ["consume@shop", "produce@shop/a"]
    assert not made.json["everything"]
    carol = basic("carol", "first")
    assert ask(closed, "GET", "/self", login=carol).json["name"] == "carol"
    ask(closed, "POST", "/users/carol/permissions", {"permissions": ["admin"]})
    assert ask(closed, "GET", "/users/carol").json["permissions"] == ["admin"]
    ask(closed, "POST", "/users/carol/permissions", {"permissions": []})
    assert ask(closed, "GET", "/users/carol").json["permissions"] == []
    assert ask(closed, "POST", "/users/carol/active", {"active": False}).json["active"] is False
    assert ask(closed, "GET", "/self", login=carol).status == 401
    ask(closed, "POST", "/users/carol/active", {"active": True})
    assert [user["name"] for user in ask(closed, "GET", "/users").json["users"]] == ["boss", "clerk", "carol"]
    assert ask(closed, "DELETE", "/users/carol").status == 200
    assert ask(closed, "GET", "/users/carol").status == 404
    assert ask(closed, "GET", "/self", login=carol).status == 401


def test_a_password_reset_needs_no_old_password(closed: Site) -> None:
    ask(closed, "POST", "/users/carol", {"password": "first"})
    assert ask(closed, "POST", "/users/carol/password", {"password": "second"}).status == 200
    assert ask(closed, "GET", "/self", login=basic("carol", "first")).status == 401
    assert ask(closed, "GET", "/self", login=basic("carol", "second")).status == 200


def test_changing_the_own_password_needs_the_old_one_only(closed: Site) -> None:
    ask(closed, "POST", "/users/carol", {"password": "first"})
    ask(closed, "POST", "/users/dave", {"password": "first", "permissions": ["manage_users"]})
    for name in ("carol", "dave"):
        login, path = basic(name, "first"), f"/users/{name}/password"
        assert ask(closed, "POST", path, {"password": "second"}, login).status == 400
        wrong = ask(closed, "POST", path, {"password": "second", "old": "x"}, login)
        assert (wrong.status, wrong.code) == (401, "login_failed")
        assert ask(closed, "POST", path, {"password": "second", "old": "first"}, login).status == 200
        assert ask(closed, "GET", f"/users/{name}", login=basic(name, "second")).json["name"] == name
    assert ask(closed, "GET", "/users/boss", login=basic("carol", "second")).status == 403
    assert ask(closed, "POST", "/users/dave/password", {"password": "x"}, basic("carol", "second")).status == 403


@pytest.mark.parametrize("word", ["consume@sh*", "consume@shop/", "consume@/orders", "read_servers@shop"])
def test_permissions_that_grant_nothing_are_refused(closed: Site, word: str) -> None:
    answer = ask(closed, "POST", "/users/carol", {"password": "first", "permissions": ["produce@shop", word]})
    assert answer.status == 400
    assert word in answer.json["error"]["message"]
    assert ask(closed, "GET", "/users/carol").status == 404


def test_users_with_more_permissions_cannot_be_changed(closed: Site) -> None:
    clerk = basic("clerk", "clerk")
    ask(closed, "POST", "/users/reader", {"password": "x", "permissions": ["consume@shop"]})
    for path, body in (
        ("/users/late", {"password": "x", "permissions": ["consume@shop"]}),
        ("/users/reader/permissions", {"permissions": ["all"]}),
        ("/users/reader/password", {"password": "y"}),
        ("/users/reader/active", {"active": False}),
    ):
        assert ask(closed, "POST", path, body, clerk).code == "denied", path
    assert ask(closed, "DELETE", "/users/reader", login=clerk).code == "denied"
    assert ask(closed, "POST", "/users/late", {"password": "x", "permissions": ["read_users"]}, clerk).status == 200


def test_users_of_the_users_file_cannot_be_changed(closed: Site) -> None:
    for path, body in (("permissions", {}), ("active", {"active": False}), ("password", {"password": "x"})):
        assert ask(closed, "POST", f"/users/clerk/{path}", body).code == "denied"
    assert ask(closed, "DELETE", "/users/clerk").code == "denied"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/users/late", {}),
        ("/users/late", {"password": ""}),
        ("/users/late", {"password": "x", "permissions": "all"}),
        ("/users/late", {"password": "x", "permissions": ["fly"]}),
        ("/users/late", {"password": "x", "permissions": [1]}),
        ("/users/late", {"password": "x", "active": "yes"}),
        ("/users/" + "n" * 256, {"password": "x"}),
        ("/tokens/new", {"expires_in_s": 0}),
        ("/tokens/new", {"expires_in_s": True}),
        ("/tokens/new", {"expires_in_s": 10**12}),
    ],
    ids=str,
)
def test_invalid_fields_are_rejected(closed: Site, path: str, body: Any) -> None:
    assert ask(closed, "POST", path, body).status == 400
    assert ask(closed, "GET", "/users/late").status == 404


def test_tokens_are_private_and_shown_once(closed: Site) -> None:
    made = ask(closed, "POST", "/tokens/prometheus", {"expires_in_s": 60}).json
    login = {"Authorization": f"Bearer {made['token']}"}
    assert ask(closed, "GET", "/self", login=login).json["tokens"] == ["prometheus"]
    assert ask(closed, "POST", "/tokens/prometheus", {}).code == "token_exists"
    assert made["token"].encode() not in ask(closed, "GET", "/users").body
    assert ask(closed, "DELETE", "/tokens/prometheus").status == 200
    assert ask(closed, "GET", "/self", login=login).status == 401


def test_an_open_broker_reports_that_it_is_open(site: Site) -> None:
    assert ask(site, "GET", "/self", login={}).json["open"] is True
    assert ask(site, "GET", "/self", login={}).json["everything"] is True
    assert ask(site, "POST", "/tokens/new", {}, {}).code == "denied"


def test_no_response_contains_a_hash(closed: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ask(closed, "POST", "/users/carol", {"password": "first"})
    monkeypatch.setattr(users, "USERS_MAX", 2)
    listed = ask(closed, "GET", "/users")
    assert listed.json["more"] is True
    for answer in (made, listed, ask(closed, "GET", "/self")):
        assert b"argon2" not in answer.body
