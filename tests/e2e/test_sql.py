"""SQL over HTTP in real processes: results, cancellation, limits, and crashes."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from polywire.client.sync import SyncClient
from polywire.http.sql import SQL_ROWS_MAX
from polywire.records.columns import Record
from polywire.server.queries import SQL_QUERIES_OF_USER_MAX, SQL_SECONDS_MAX
from tests.broker_process import BrokerProcess

pytest.importorskip("duckdb", reason="NOT TRIED: DuckDB is not installed (extra duckdb)")
pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc")
ENDLESS = "select count(*) from range(10000000) a, range(10000000) b where (a.range + b.range) % 7 = 3"
WAIT_S = 60.0
PROGRAM = b"polywire.tables.query_process"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    given = ("--table", "delta", "--table-freshness-s", "1")
    with BrokerProcess(tmp_path_factory.mktemp("sql") / "data", *given, wires=("polywire", "http")) as process:
        fill(process)
        yield process


def fill(broker: BrokerProcess) -> None:
    with SyncClient(broker.url()) as client:
        for topic in ("orders", "shop.returns"):
            client.create_topic(topic, 2)
            for partition in (0, 1):
                client.produce(topic, [Record(b"%d" % number) for number in range(100)], partition=partition)


def ask(broker: BrokerProcess, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection(*broker.addresses["http"], timeout=WAIT_S)) as connection:
        headers = {"X-Polywire": "1", "Content-Type": "application/json"}
        connection.request(method, f"/api/v1{path}", None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def run(broker: BrokerProcess, statement: str, name: str = "") -> tuple[int, Any]:
    return ask(broker, "POST", "/sql", {"statement": statement, "id": name})


def message(answer: tuple[int, Any]) -> str:
    return str(answer[1]["error"]["message"])


def is_running(pid: int) -> bool:
    """Return whether a process runs a query."""
    try:
        return PROGRAM in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _is_below(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            return False
    return pid == ancestor


def processes(broker: BrokerProcess) -> list[int]:
    """Return the processes that run queries of a broker."""
    found = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in found if is_running(pid) and _is_below(pid, broker.pid)]


def until(is_true: Callable[[], Any]) -> Any:
    end = time.monotonic() + WAIT_S
    while not (found := is_true()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def started(broker: BrokerProcess, pool: ThreadPoolExecutor, name: str = "") -> Future[tuple[int, Any]]:
    """Start a query that ends by itself only after the limit of time. Its process exists."""
    before = set(processes(broker))
    found = pool.submit(run, broker, ENDLESS, name)
    until(lambda: set(processes(broker)) - before)
    return found


def test_a_result_has_table_and_tail(broker: BrokerProcess) -> None:
    statement = "select partition, count(*) as n, sum(decode(value)::int) as total from {} group by all order by all"
    for topic in ("orders", "shop.returns"):
        status, found = run(broker, statement.format(topic))
        assert (status, found["rows"]) == (200, [[0, 100, 4950], [1, 100, 4950]]), found
        assert [column["name"] for column in found["columns"]] == ["partition", "n", "total"]


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("from missing", "no such topic"),
        ("select offset from orders", 'write "offset"'),
        ("copy orders to '/tmp/orders.csv'", "only a single SELECT"),
        ("from read_text('/etc/passwd')", "file system operations are disabled"),
        ("select repeat('x', 10000000000)", "query failed"),
        ("select list(range) from range(1000000000)", "too much memory"),
        ("select repeat('x', 250000) from range(50000)", "too much memory"),
        ("select " + "(" * 20_000 + "1" + ")" * 20_000, "query failed"),
        ("select * from (select repeat('x', 60000) from range(100)) cross join (select 1)", None),
        ("with recursive t(n) as (select 1 union all select n + 1 from t) select n from t", None),
        ("from range(1000000000000)", None),
    ],
)
def test_greedy_statements(broker: BrokerProcess, statement: str, expected: str | None) -> None:
    status, found = run(broker, statement)
    if expected is None:
        assert (status, found["more"]) == (200, True)
        assert len(found["rows"]) == SQL_ROWS_MAX or found["limit"] == "bytes"
    else:
        assert status in (400, 404)
        assert expected in found["error"]["message"]


def test_a_query_is_cancelled(broker: BrokerProcess, pool: ThreadPoolExecutor) -> None:
    begun = time.monotonic()
    query = started(broker, pool, "mine")
    assert ask(broker, "DELETE", "/sql/other")[0] == 404
    assert ask(broker, "DELETE", "/sql/mine")[0] == 200
    assert "cancelled" in message(query.result())
    assert not processes(broker)
    assert time.monotonic() - begun < SQL_SECONDS_MAX
    assert ask(broker, "DELETE", "/sql/mine")[0] == 404


def test_a_query_beyond_the_limit_is_rejected(broker: BrokerProcess, pool: ThreadPoolExecutor) -> None:
    queries = [started(broker, pool, f"number-{number}") for number in range(SQL_QUERIES_OF_USER_MAX)]
    status, found = run(broker, "select 1")
    assert (status, found["error"]["code"]) == (503, "busy")
    assert "this id" in message(run(broker, "select 1", "number-0"))
    for number, query in enumerate(queries):
        ask(broker, "DELETE", f"/sql/number-{number}")
        query.result()
    assert run(broker, "select 1")[1]["rows"] == [[1]]


def test_a_killed_process_is_an_error(broker: BrokerProcess, pool: ThreadPoolExecutor) -> None:
    query = started(broker, pool)
    for pid in processes(broker):
        os.kill(pid, signal.SIGKILL)
    status, found = query.result()
    assert status == 503
    assert "signal=SIGKILL" in found["error"]["message"]
    assert run(broker, "select 1")[0] == 200


def test_a_broker_that_stops_or_is_killed_leaves_no_process(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with BrokerProcess(tmp_path / "data", wires=("polywire", "http")) as broker:
        fill(broker)
        query = started(broker, pool)
        pids, begun = processes(broker), time.monotonic()
        assert broker.stop() == 0
        assert time.monotonic() - begun < SQL_SECONDS_MAX / 2
        assert not any(map(is_running, pids))
        assert query.result()[1]["error"]["code"] == "stopping"
    with BrokerProcess(tmp_path / "data", wires=("polywire", "http")) as broker:
        query = started(broker, pool)
        pids = processes(broker)
        broker.kill()
        assert isinstance(query.exception(), OSError | http.client.HTTPException)
        until(lambda: not any(map(is_running, pids)))


def test_several_processes_share_topics_and_cancel_queries(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with BrokerProcess(tmp_path / "data", "--processes", "2", wires=("polywire", "http")) as broker:
        fill(broker)
        for _ in range(4):  # of both processes, probably
            for topic in ("orders", "shop.returns"):
                assert run(broker, f"select count(*) from {topic}")[1]["rows"] == [[200]]
        query = started(broker, pool, "mine")
        assert ask(broker, "DELETE", "/sql/mine")[0] == 200
        assert "cancelled" in message(query.result())
