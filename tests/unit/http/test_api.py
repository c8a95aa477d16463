"""Tests of the admin API's endpoints and their permissions."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import pytest

from polywire.broker.permissions import EVERYTHING, NOTHING, Action, Resource, parse_grants
from polywire.http import api, records, topics
from polywire.http.api import Api
from polywire.http.endpoints import PREFIX, Endpoint
from polywire.http.process import ConnectionView
from polywire.records.columns import Header, Record
from polywire.records.rows import from_records
from polywire.types import Level, PositionKind, TopicName
from tests.unit.http.site import Answer, Site, bucket_view
from tests.unit.http.test_guard import CHANGE, basic

ENDPOINTS = Api(None, None, None, None).table()  # type: ignore[arg-type]  # only its table is looked at


def get(site: Site, path: str, **headers: str) -> Answer:
    return site.ask("GET", PREFIX + path, headers)


def post(site: Site, path: str, body: Any, **headers: str) -> Answer:
    return site.ask("POST", PREFIX + path, CHANGE | headers, body)


def store(site: Site, topic: str, values: list[bytes], *, key: bytes | None = None) -> None:
    if site.broker.find_topic(topic) is None:
        site.broker.create_topic(TopicName.parse(topic), 2)
    batch = from_records([Record(value, key, (Header(b"n", b"\xff"),)) for value in values])
    site.broker.produce(site.broker.topic(topic).partitions[0], batch, level=Level.WRITTEN, done=None)
    site.broker.commit()


def values(answer: Answer) -> list[Any]:
    return [record["value"] and record["value"].get("text") for record in answer.json["records"]]


def test_a_topic_is_created_described_and_deleted(site: Site) -> None:
    assert post(site, "/topics/shop.orders", {"partitions": 3}).json == {"name": "shop.orders"}
    assert post(site, "/topics/shop.orders", {}).code == "topic_exists"
    assert [topic["name"] for topic in get(site, "/topics").json["topics"]] == ["shop.orders"]
    assert len(get(site, "/topics/shop.orders").json["partition_list"]) == 3
    assert site.ask("DELETE", f"{PREFIX}/topics/shop.orders", CHANGE).status == 200
    assert get(site, "/topics/shop.orders").status == 404


@pytest.mark.parametrize("name", ["a/b", "a%b", "ä", 'a"<b>', "a b", "..a"])
def test_any_topic_name_works_in_paths(site: Site, name: str) -> None:
    store(site, name, [b"v"])
    spelled = "".join(f"%{byte:02X}" for byte in name.encode())
    assert get(site, f"/topics/{spelled}").json["name"] == name
    assert values(get(site, f"/topics/{spelled}/partitions/0/records")) == ["v"]


def test_records_are_produced_and_read(site: Site) -> None:
    site.broker.create_topic(TopicName.parse("t"), 2)
    stored = post(site, "/topics/t/records", {"key": "k", "value": "hello", "headers": {"a": "b"}}).json
    page = get(site, f"/topics/t/partitions/{stored['partition']}/records?offset={stored['offset']}").json
    (record,) = page["records"]
    assert record["key"] == {"text": "k", "bytes": 1, "cut": False}
    assert record["headers"][0]["value"]["text"] == "b"
    raw = {"value_base64": b64encode(b"\xff\0").decode(), "partition": 1}
    stored = post(site, "/topics/t/records", raw).json
    page = get(site, "/topics/t/partitions/1/records?tail=1").json
    assert page["records"][0]["value"] == {"base64": "/wA=", "bytes": 2, "cut": False}
    assert post(site, "/topics/t/records", {"partition": 1, "value": None}).status == 200
    assert get(site, "/topics/t/partitions/1/records?tail=1").json["records"][0]["value"] is None


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/topics/t/records", {"key": "k", "valeu": "v"}, "did you mean 'value'?"),
        ("/topics/t/records", {"key": "k"}, "value or value_base64 is required"),
        ("/topics/t/records?partition=1", {"value": "v"}, "no such parameter"),
        ("/topics/t/groups/g/reset", {"to": "earliest", "dryrun": True}, "did you mean 'dry_run'?"),
        ("/topics/t/settings", {"retention_bites": 1}, "no such field"),
        ("/sql", {"statement": "select 1", "row": 1}, "did you mean 'rows'?"),
        ("/users/u", {"password": "p", "permission": []}, "did you mean 'permissions'?"),
        ("/quotas", {"user": "u", "produces": 1}, "did you mean 'produce'?"),
    ],
)
def test_a_misspelled_field_is_refused(site: Site, path: str, body: Mapping[str, Any], reason: str) -> None:
    store(site, "t", [b"a"])
    answer = post(site, path, body)
    assert (answer.status, reason in answer.json["error"]["message"]) == (400, True), answer.json
    assert site.broker.topic("t").partitions[0].log.next_offset == 1


def test_a_misspelled_parameter_is_refused(site: Site) -> None:
    store(site, "t", [b"a"])
    for path in ("/topics/t/download?partitions=0", "/topics/t/partitions/0/records?ofset=1", "/overview?x=1"):
        answer = site.ask("GET", PREFIX + path)
        assert (answer.status, answer.code) == (400, "invalid_request"), path


def test_a_resent_record_is_stored_unchanged(site: Site) -> None:
    store(site, "t", [b"a", b"\xff\0"], key=b"\x80")
    assert post(site, "/topics/t/resend", {"partition": 0, "offset": 1}).json == {"partition": 0, "offset": 2}
    old, new = get(site, "/topics/t/partitions/0/records?offset=1").json["records"]
    for name in ("key", "value", "headers"):
        assert new[name] == old[name]
    for body, status in (
        ({"partition": 0, "offset": 9}, 404),
        ({"partition": 9, "offset": 0}, 404),
        ({"partition": 0}, 400),
    ):
        assert post(site, "/topics/t/resend", body).status == status


def test_pages_are_contiguous(site: Site) -> None:
    for begin in range(0, 30, 10):
        store(site, "t", [str(number).encode() for number in range(begin, begin + 10)])
    found, offset = [], 0
    while offset < 30:
        page = get(site, f"/topics/t/partitions/0/records?offset={offset}&limit=7")
        assert page.json["records"][0]["offset"] == offset
        found += values(page)
        offset = page.json["next_offset"]
    assert found == [str(number) for number in range(30)]
    assert values(get(site, "/topics/t/partitions/0/records?tail=3")) == ["27", "28", "29"]
    assert values(get(site, "/topics/t/partitions/0/records?offset=99")) == []
    assert values(get(site, "/topics/t/partitions/0/records?time=2000-01-01&limit=1")) == ["0"]


def test_a_search_for_a_key_has_a_limit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    store(site, "t", [b"other"] * 25)
    store(site, "t", [b"mine"], key=b"k")
    assert values(get(site, "/topics/t/partitions/0/records?key=k")) == ["mine"]
    monkeypatch.setattr(records, "LOOKED_AT_MAX", 10)
    page = get(site, "/topics/t/partitions/0/records?key=k").json
    assert page["records"] == []
    assert page["next_offset"] == page["looked_at"] == 10
    assert values(get(site, "/topics/t/partitions/0/records?key=k&offset=20")) == ["mine"]


def test_large_values_are_truncated_by_default(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    store(site, "t", ["ä".encode() * 3000] * 3)
    (first, *_) = get(site, "/topics/t/partitions/0/records").json["records"]
    assert first["value"] == {"text": "ä" * 2048, "bytes": 6000, "cut": True}
    (first, *_) = get(site, "/topics/t/partitions/0/records?whole=1").json["records"]
    assert first["value"]["text"] == "ä" * 3000
    monkeypatch.setattr(records, "PAGE_BYTES_MAX", 13_000)
    page = get(site, "/topics/t/partitions/0/records?whole=1").json
    assert (len(page["records"]), page["next_offset"]) == (2, 2), "the rest is on the next page"


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=501", "limit=x", "offset=-1", "offset=" + "9" * 30, "tail=501", "time=soon", "limit=٣"]
)
def test_invalid_queries_are_rejected(site: Site, query: str) -> None:
    store(site, "t", [b"v"])

    assert get(site, f"/topics/t/partitions/0/records?{quote(query, safe='=')}").status == 400


@pytest.mark.parametrize(
    "body",
    [
        {"value": 1},
        {"value": "a", "value_base64": "YQ=="},
        {"value_base64": "?"},
        {"key": []},
        {"headers": {"a": 1}},
        [],
        "x",
    ],
    ids=str,
)
def test_invalid_bodies_are_rejected(site: Site, body: Any) -> None:
    store(site, "t", [b"v"])
    assert post(site, "/topics/t/records", body).status == 400


def test_a_body_that_is_not_json_is_rejected(site: Site) -> None:
    store(site, "t", [b"v"])
    for content in (b"{", b"[" * 100_000, b"\xff", b'{"value": "\xc3\x28"}'):
        assert site.ask("POST", f"{PREFIX}/topics/t/records", CHANGE, content).status == 400
    plain = CHANGE | {"Content-Type": "text/plain"}
    assert site.ask("POST", f"{PREFIX}/topics/t/records", plain, b"{}").status == 400


@pytest.mark.parametrize("number", ["2", "-1", "x", "99999999999"])
def test_missing_partitions_are_rejected(site: Site, number: str) -> None:
    store(site, "t", [b"v"])
    assert get(site, f"/topics/t/partitions/{number}/records").code == "partition_missing"


def test_offsets_are_reset_after_a_preview(site: Site) -> None:
    store(site, "t", [b"v"] * 5)
    site.broker.commit_position("t", 0, PositionKind.GROUP, "g", 4)
    preview = post(site, "/topics/t/groups/g/reset", {"to": "earliest", "dry_run": True}).json
    assert preview["partitions"][0] == {"partition": 0, "committed": 4, "new": 0, "lag_records": 5}
    assert site.broker.position("t", 0, PositionKind.GROUP, "g") == 4
    post(site, "/topics/t/groups/g/reset", {"to": "2", "partition": 0})
    assert site.broker.position("t", 0, PositionKind.GROUP, "g") == 2
    assert site.broker.position("t", 1, PositionKind.GROUP, "g") is None
    (group,) = get(site, "/groups").json["groups"]
    assert (group["group"], group["lag_records"]) == ("g", 3)
    assert get(site, "/topics/t/groups/g").json["partitions"][0]["records"] == 3
    assert get(site, "/topics/t/groups/unknown").code == "group_missing"
    assert post(site, "/topics/t/groups/g/reset", {"to": "someday"}).status == 400


@pytest.mark.parametrize(
    "name", ["g\r\nlevel=error", "\x1b[31m\x85", "a/b", "%2F", "\N{RIGHT-TO-LEFT OVERRIDE}", "漢" * 85]
)
def test_any_group_name_works_in_paths(site: Site, name: str) -> None:
    store(site, "t", [b"v"])
    path = "/topics/t/groups/" + "".join(f"%{byte:02X}" for byte in name.encode())
    assert post(site, f"{path}/reset", {"to": "latest"}).json["group"] == name
    assert get(site, path).json["group"] == name


@pytest.mark.parametrize(
    ("segment", "name"),
    [("%252E", "."), ("%252E%252E", ".."), ("%25252E", "%2E"), ("%25252E%25252E", "%2E%2E"), ("a%252E", "a%2E")],
)
def test_dots_and_their_escapes_are_encoded_twice(site: Site, segment: str, name: str) -> None:
    store(site, "t", [b"v"])
    assert post(site, f"/topics/t/groups/{segment}/reset", {"to": "latest"}).json["group"] == name


def test_offsets_of_a_group_with_members_are_not_reset(site: Site) -> None:
    store(site, "t", [b"v"])
    site.broker.groups.join("g", "t", "m", wire="flux")
    assert post(site, "/topics/t/groups/g/reset", {"to": "latest"}).code == "group_not_empty"


def test_lists_have_limits_and_set_more(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, limit in (
        (topics, "TOPICS_MAX"),
        (api, "GROUPS_MAX"),
        (topics, "GROUPS_MAX"),
        (api, "CONNECTIONS_MAX"),
    ):
        monkeypatch.setattr(module, limit, 2)
    for number in range(3):
        store(site, f"t{number}", [b"v"])
        site.broker.commit_position(f"t{number}", 0, PositionKind.GROUP, "g", 0)
        site.process.open.append(ConnectionView("flux", "", f"127.0.0.1:{number}", "", 1, 2))
    for path, name in (("/topics", "topics"), ("/groups", "groups"), ("/connections", "connections")):
        found = get(site, path).json
        assert (len(found[name]), found["more"]) == (2, True)


def test_the_overview_contains_the_bucket(site: Site) -> None:
    assert get(site, "/overview").json["bucket"] is None
    site.process.view = bucket_view()
    reported = get(site, "/overview").json["bucket"]
    assert (reported["node"], reported["epoch"], reported["unstored_bytes"], reported["unstored_seconds"]) == (
        "one",
        3,
        4096,
        0.25,
    )
    assert reported["nodes"][1] == {"name": "two", "state": "standby", "epoch": None}
    assert [(one["requests"], one["p99_s"]) for one in reported["requests"]] == [(2, 0.05), (1, None)]
    assert reported["charges"][0] == {"kind": "put", "requests": 2000, "price": 0.005, "cost": 0.01}


def test_overview_settings_and_users_contain_no_secret(site: Site) -> None:
    site.configure(alice=EVERYTHING)
    login = basic("alice", "alice")
    assert get(site, "/overview", **login).json["ready"] is True
    assert get(site, "/settings", **login).json["settings"]["data_dir"] == "polywire-data"
    answer = get(site, "/users", **login)
    assert [user["name"] for user in answer.json["users"]] == ["alice"]
    assert b"argon2" not in answer.body


def test_the_document_names_every_endpoint(site: Site) -> None:
    document = get(site, "/openapi.json").json
    assert document["openapi"].startswith("3.")
    named = {
        (method.upper(), path.removeprefix(PREFIX)) for path, verbs in document["paths"].items() for method in verbs
    }
    assert named == {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}


def path_of(endpoint: Endpoint) -> str:
    user = "late" if endpoint.action is Action.USER_CREATE else "made"
    return PREFIX + endpoint.path.format(
        topic="shop.t", partition="0", group="g", user=user, token="kept", query="q", link="old"
    )


OWN = [endpoint for endpoint in ENDPOINTS if endpoint.action.needs_no_permission]
BODY = {
    "to": "earliest",
    "value": "v",
    "password": "pass-word",
    "active": True,
    "partition": 0,
    "offset": 0,
    "statement": "select 1",
    "source": "kafka://old:9092",
    "topics": ["orders"],
    "paused": True,
    "partitions": 3,
    "user": "*",
    "produce": 1000,
}


def named(endpoint: Endpoint) -> str:
    return f"{endpoint.method} {endpoint.path}"


@pytest.mark.parametrize("endpoint", OWN, ids=named)
def test_own_user_and_tokens_need_only_a_login(endpoint: Endpoint) -> None:
    site = Site()
    try:
        site.configure(nothing=parse_grants(["transaction@other"]))
        site.broker.access.create_token(site.broker.access.user("nothing"), "made", None)
        path = PREFIX + endpoint.path.format(token="made" if endpoint.method == "DELETE" else "late")
        assert site.ask(endpoint.method, path, CHANGE).status == 401
        assert site.ask(endpoint.method, path, CHANGE | basic("nothing", "nothing")).status == 200
    finally:
        site.close()


@pytest.mark.parametrize("endpoint", [endpoint for endpoint in ENDPOINTS if endpoint not in OWN], ids=named)
def test_every_endpoint_checks_its_permission(endpoint: Endpoint) -> None:
    """All other permissions together are not enough, a required one is, and a login is always needed."""
    site = Site()
    try:
        store(site, "shop.t", [b"v"])
        if "/queues/" in endpoint.path:
            site.broker.shares.alter_offsets("g", {site.broker.topic("shop.t").partitions[0]: 0}, done=lambda _: None)
        else:
            site.broker.commit_position("shop.t", 0, PositionKind.GROUP, "g", 0)
        assert endpoint.action.permission is not NOTHING
        at = "@shop/t" if endpoint.action.resource in (Resource.TOPIC, Resource.ANY_TOPIC) else ""
        words = [str(next(iter(action.permission)).name).lower() + at for action in endpoint.actions]
        site.configure(may=parse_grants(words), nothing=parse_grants(["transaction@other"]))
        site.make_user("made", "old")
        assert site.process.queries is not None
        site.process.queries.running.add("q")
        is_empty = endpoint.path.endswith(("/redrive", "/settings", "/topics/{topic}"))
        given = {} if is_empty else {name: value for name, value in BODY.items() if name in endpoint.fields}
        body = json.dumps(given).encode() if endpoint.method != "GET" and endpoint.fields else b""
        for login, status in (({}, 401), (basic("nothing", "nothing"), 403)):
            assert site.ask(endpoint.method, path_of(endpoint), CHANGE | login, body).status == status
        assert site.ask(endpoint.method, path_of(endpoint), CHANGE | basic("may", "may"), body).status in (200, 409)
    finally:
        site.close()


@pytest.mark.parametrize("endpoint", [one for one in ENDPOINTS if one.method != "GET"], ids=named)
def test_a_foreign_page_changes_nothing(site: Site, endpoint: Endpoint) -> None:
    """Forms cannot send the header, other pages have another origin, and foreign names are another host."""
    body = json.dumps(BODY).encode()
    foreign = [
        {"Content-Type": "application/json"},
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
    ]
    for headers in ({}, *(CHANGE | one for one in foreign[1:]), foreign[0], CHANGE | {"Host": "evil.example"}):
        answer = site.ask(endpoint.method, path_of(endpoint), headers, body)
        assert (answer.status, answer.code) == (403, "denied"), headers


def test_lists_contain_only_permitted_topics(site: Site) -> None:
    store(site, "shop.t", [b"v"])
    store(site, "secret.t", [b"v"])
    for topic in ("shop.t", "secret.t"):
        site.broker.commit_position(topic, 0, PositionKind.GROUP, "g", 0)
    site.configure(reader=parse_grants(["consume@shop", "group@shop"]))
    login = basic("reader", "reader")
    assert [topic["name"] for topic in get(site, "/topics", **login).json["topics"]] == ["shop.t"]
    assert [group["topic"] for group in get(site, "/groups", **login).json["groups"]] == ["shop.t"]
    assert get(site, "/topics/secret.t", **login).status == get(site, "/topics/missing", **login).status == 403


def test_only_files_of_the_console_are_served(site: Site) -> None:
    page = site.ask("GET", "/")
    assert page.headers["content-type"].startswith("text/html")
    assert b"<script>" not in page.body
    for name in ("console.js", "views.js", "console.css", "icon.svg"):
        assert site.ask("GET", f"/static/{name}").status == 200
    for name in ("..%2Fapi.py", "../api.py", "__init__.py", "nothing"):
        assert site.ask("GET", f"/static/{name}").status == 404
