"""The Iceberg REST catalog: namespaces, tables, permissions, and errors in its own form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from polywire.broker.permissions import Grants, Permission
from polywire.broker.settings import BrokerSettings, TableFormat, TopicSettings
from polywire.types import TopicName
from tests.unit.http.site import Answer, Site
from tests.unit.http.test_guard import basic

CATALOG = "/iceberg/v1"


class CatalogSite:
    """A broker whose topics have Iceberg metadata, which the test writes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        settings = BrokerSettings(tables_url=f"file://{directory}", table=TableFormat.DELTA_AND_ICEBERG)
        self.site = Site(settings=settings)

    def make(self, stream: str, topic: str, settings: TopicSettings | None = None) -> Path:
        self.site.broker.create_topic(TopicName(stream, topic), 1, settings)
        return self.directory / stream / topic / "metadata"

    def write(self, metadata: Path, version: int, content: object) -> None:
        metadata.mkdir(parents=True, exist_ok=True)
        (metadata / f"v{version}.metadata.json").write_text(json.dumps(content))
        (metadata / "version-hint.text").write_text(str(version))

    def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> Answer:
        return self.site.ask(method, f"{CATALOG}{path}", headers)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[CatalogSite]:
    made = CatalogSite(tmp_path)
    yield made
    made.site.close()


def error_of(answer: Answer) -> tuple[int, str, int]:
    error = answer.json["error"]
    assert error["message"]
    return answer.status, error["type"], error["code"]


def test_streams_and_topics_are_namespaces_and_tables(catalog: CatalogSite) -> None:
    catalog.make("default", "orders")
    catalog.make("sales", "b")
    catalog.make("sales", "a")
    catalog.make("sales", "plain", TopicSettings(table=TableFormat.DELTA))
    catalog.make("other", "none", TopicSettings(table=TableFormat.NONE))
    assert catalog.get("/namespaces").json == {"namespaces": [["default"], ["sales"]]}
    assert catalog.get("/namespaces?parent=sales").json == {"namespaces": []}
    assert catalog.get("/namespaces/sales").json == {"namespace": ["sales"], "properties": {}}
    found = catalog.get("/namespaces/sales/tables").json["identifiers"]
    assert found == [{"namespace": ["sales"], "name": "a"}, {"namespace": ["sales"], "name": "b"}]
    assert all(endpoint.startswith(("GET ", "HEAD ")) for endpoint in catalog.get("/config").json["endpoints"])


def test_a_table_is_its_newest_metadata(catalog: CatalogSite) -> None:
    metadata = catalog.make("sales", "a")
    assert error_of(catalog.get("/namespaces/sales/tables/a")) == (404, "NoSuchTableException", 404)
    catalog.write(metadata, 1, {"n": 1})
    catalog.write(metadata, 2, {"n": 2})
    assert catalog.get("/namespaces/sales/tables/a").json == {
        "metadata-location": f"file://{metadata}/v2.metadata.json",
        "metadata": {"n": 2},
        "config": {},
    }
    exists = catalog.get("/namespaces/sales/tables/a", method="HEAD")
    assert (exists.status, exists.body) == (200, b"")
    (metadata / "version-hint.text").write_text("")
    assert error_of(catalog.get("/namespaces/sales/tables/a")) == (503, "ServiceUnavailableException", 503)


@pytest.mark.parametrize(
    "path",
    [
        "/namespaces/nothing",
        "/namespaces/sales/tables/nothing",
        "/namespaces/default/tables/sales.a",
        "/namespaces/sales/tables/plain",
        "/namespaces/sales/tables/..%2Fa",
        "/namespaces/sales%1Fa",
        "/views",
        "/",
    ],
)
def test_what_does_not_exist(catalog: CatalogSite, path: str) -> None:
    catalog.write(catalog.make("sales", "a"), 1, {})
    catalog.write(catalog.make("sales", "plain", TopicSettings(table=TableFormat.DELTA)), 1, {})
    answer = catalog.get(path)
    assert answer.status == 404
    if path not in ("/", "/views"):
        assert error_of(answer) == (404, "NoSuchTableException", 404)


def test_permissions(catalog: CatalogSite) -> None:
    catalog.write(catalog.make("sales", "a"), 1, {})
    catalog.write(catalog.make("default", "orders"), 1, {})
    catalog.site.configure(
        ann=Grants(topics={"sales/a": Permission.CONSUME}), bob=Grants(topics={"sales/a": Permission.PRODUCE})
    )
    ann, bob = basic("ann", "ann"), basic("bob", "bob")
    assert error_of(catalog.get("/config")) == (401, "NotAuthorizedException", 401)
    assert error_of(catalog.get("/config", basic("ann", "wrong"))) == (401, "NotAuthorizedException", 401)
    assert catalog.get("/namespaces", ann).json == {"namespaces": [["sales"]]}
    assert catalog.get("/namespaces/sales/tables/a", ann).status == 200
    assert error_of(catalog.get("/namespaces/default/tables/orders", ann)) == (403, "ForbiddenException", 403)
    assert error_of(catalog.get("/namespaces/default/tables/nothing", ann)) == (403, "ForbiddenException", 403)
    assert error_of(catalog.get("/namespaces/sales/tables/a", bob)) == (403, "ForbiddenException", 403)
    catalog.site.peer.on_loopback = False
    assert error_of(catalog.get("/namespaces/sales/tables/a", ann)) == (403, "ForbiddenException", 403)
