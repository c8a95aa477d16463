"""SQL in the admin API: fields, limits and permissions. Other tests run statements."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from polywire.broker.permissions import parse_grants
from polywire.http.endpoints import PREFIX
from polywire.http.sql import SQL_BYTES_MAX, SQL_ID_CHARS_MAX, SQL_ROWS_MAX
from tests.unit.http.site import Answer, Queries, Site

CHANGE = {"X-Polywire": "1", "Content-Type": "application/json"}


def ask(site: Site, **body: Any) -> Answer:
    return site.ask("POST", f"{PREFIX}/sql", CHANGE, body)


def queries_of(site: Site) -> Queries:
    assert site.process.queries is not None
    return site.process.queries


def test_a_statement_is_run(site: Site) -> None:
    assert ask(site, statement="select 1").json == {"rows": [[1]]}
    assert ask(site, statement="select 2", rows=5, id="mine").status == 200
    assert queries_of(site).asked == [("select 1", SQL_ROWS_MAX, ""), ("select 2", 5, "mine")]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"statement": 1},
        {"statement": "x" * (SQL_BYTES_MAX + 1)},
        {"statement": "x", "rows": 0},
        {"statement": "x", "rows": SQL_ROWS_MAX + 1},
        {"statement": "x", "rows": True},
        {"statement": "x", "rows": "5"},
        {"statement": "x", "id": 5},
        {"statement": "x", "id": "a" * (SQL_ID_CHARS_MAX + 1)},
    ],
)
def test_wrong_fields_are_rejected(site: Site, body: dict[str, Any]) -> None:
    found = ask(site, **body)
    assert (found.status, found.code) == (400, "invalid_request")
    assert queries_of(site).asked == []


def test_other_sites_cannot_query(site: Site) -> None:
    without = {"Content-Type": "application/json"}
    assert site.ask("POST", f"{PREFIX}/sql", without, {"statement": "select 1"}).status == 403
    crossed = {**CHANGE, "Origin": "http://other.example"}
    assert site.ask("POST", f"{PREFIX}/sql", crossed, {"statement": "select 1"}).status == 403
    assert queries_of(site).asked == []


def test_users_need_the_permission_to_consume_something(site: Site) -> None:
    site.configure(reader=parse_grants(["consume@default/orders"]), writer=parse_grants(["produce"]))

    def status(user: str) -> int:
        login = {"Authorization": f"Basic {b64encode(f'{user}:{user}'.encode()).decode()}"} if user else {}
        return site.ask("POST", f"{PREFIX}/sql", CHANGE | login, {"statement": "select 1"}).status

    assert [status(user) for user in ("", "writer", "reader")] == [401, 403, 200]


def test_a_query_can_be_cancelled(site: Site) -> None:
    assert site.ask("DELETE", f"{PREFIX}/sql/mine", CHANGE).status == 404
    queries_of(site).running.add("mine")
    assert site.ask("DELETE", f"{PREFIX}/sql/mine", CHANGE).json == {"id": "mine"}


def test_a_process_that_starts_runs_no_queries(site: Site) -> None:
    site.process.queries = None
    assert ask(site, statement="select 1").status == 503
    assert site.ask("DELETE", f"{PREFIX}/sql/mine", CHANGE).status == 404


def test_metrics_count_statements(site: Site) -> None:
    assert 'polywire_sql_queries_total{outcome="done"} 3.0' in site.ask("GET", "/metrics").body.decode()
    site.process.queries = None
    assert "polywire_sql" not in site.ask("GET", "/metrics").body.decode()
