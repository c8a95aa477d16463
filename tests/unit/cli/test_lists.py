"""Every command that prints a list prints the same rows as table, json, jsonl and csv."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from cyclopts import App

from polywire.cli.main import app, run
from polywire.cli.output import ListFormat
from polywire.cli.usage import EXIT_DONE
from polywire.client.connect import connect
from polywire.client.polywire import PolywireClient
from polywire.client.queue_calls import QueueCalls
from polywire.records.columns import Record
from polywire.share_settings import AUTO_OFFSET_RESET
from polywire.testing.thread import BrokerThread

LISTING_NAMES: Final = {"list", "show", "describe", "inspect", "verify"}
OFFLINE: Final = {
    ("log", "repair"): "tests/unit/cli/test_doctor.py damages what it lists",
    ("backup", "list"): "tests/unit/cli/test_backup.py",
    ("backup", "verify"): "tests/unit/cli/test_backup.py",
    ("cluster", "check"): "tests/unit/cluster/test_bucket_probe.py has a bucket",
    ("cluster", "status"): "tests/crash/test_standby.py has brokers that it lists",
    ("cluster", "shards"): "tests/crash/test_shards.py has shards that it lists",
    ("log", "verify"): "tests/unit/cli/test_segment.py",
    ("segment", "list"): "tests/unit/cli/test_segment.py",
    ("segment", "inspect"): "tests/unit/cli/test_segment.py",
    ("segment", "verify"): "tests/unit/cli/test_segment.py",
    ("doctor",): "tests/unit/cli/test_doctor.py",
    ("record", "compare"): "tests/unit/cli/test_compare.py",
    ("context", "list"): "tests/unit/cli/test_contexts.py",
    ("context", "show"): "tests/unit/cli/test_contexts.py",
    ("quota", "list"): "tests/e2e/test_quotas.py",
    ("link", "compare"): "tests/e2e/test_links.py",
    ("link", "create"): "tests/e2e/test_links.py has a source",
    ("link", "list"): "tests/e2e/test_links.py",
    ("link", "status"): "tests/e2e/test_links.py",
    ("link", "cut-over"): "tests/e2e/test_link_cut_over.py",
    ("link", "fall-back"): "tests/e2e/test_link_cut_over.py",
}
SAMPLES: Final[dict[tuple[str, ...], tuple[str, ...]]] = {
    ("topic", "list"): (),
    ("topic", "describe"): ("orders",),
    ("topic", "alter"): ("orders", "-p", "5", "--dry-run"),
    ("group", "list"): (),
    ("group", "describe"): ("billing",),
    ("group", "reset"): ("billing", "orders", "--to", "latest", "--dry-run"),
    ("group", "offsets", "show"): ("billing",),
    ("group", "offsets", "set"): ("billing", "orders", "0=1", "1=0", "--dry-run"),
    ("group", "offsets", "import"): ("--dry-run",),
    ("queue", "list"): (),
    ("queue", "describe"): ("workers",),
    ("queue", "peek"): ("workers", "orders"),
    ("transaction", "list"): (),
    ("writer", "list"): (),
    ("pipeline", "list"): (),
    ("pipeline", "describe"): ("land",),
    ("user", "list"): (),
    ("config", "show"): ("--origin",),
    ("sql",): ('select partition, "offset", decode(value) as text, timestamp from orders order by all',),
}
TYPED: Final[dict[tuple[str, ...], str]] = {
    ("group", "offsets", "import"): '{"group": "billing", "topic": "orders", "partition": 0, "offset": 1}\n'
}
CHANGING: Final = {"idle_ms", "lag_seconds"}  # they change between two runs


def verbs(parent: App, *words: str) -> Iterator[tuple[tuple[str, ...], App]]:
    if parent.default_command is not None:
        yield words, parent
    for name in parent:
        if not name.startswith("-"):
            yield from verbs(parent[name], *words, name)


def lists(command: App) -> bool:
    collection = command.assemble_argument_collection(parse_docstring=True)
    return any(argument.hint is ListFormat for argument in collection)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with BrokerThread(wires=["polywire"]) as broker:
        asyncio.run(_fill(broker.url()))
        yield broker.url()


async def _fill(url: str) -> None:
    client = await connect(url)
    assert isinstance(client, PolywireClient)
    await client.create_topic("orders", 3)
    await client.produce("orders", [Record(b"a"), Record(b"b")], partition=0)
    await client.commit("billing", "orders", 0, 1)
    await client.publish("nightly", 7, [])
    await QueueCalls(client).configure("workers", "orders", {AUTO_OFFSET_RESET: "earliest"})
    await client.close()


def test_every_list_command_is_covered() -> None:
    found = {words for words, command in verbs(app) if lists(command)}
    assert found == set(SAMPLES) | set(OFFLINE)
    assert not [words for words, _ in verbs(app) if words[-1] in LISTING_NAMES and words not in found]


@pytest.mark.parametrize("words", list(SAMPLES), ids=" ".join)
def test_a_list_is_the_same_in_every_format(
    words: tuple[str, ...],
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POLYWIRE_ADDRESS", url)
    users = tmp_path / "users"
    monkeypatch.setenv("POLYWIRE_SERVE_USERS", str(users))
    monkeypatch.setattr("sys.stdin", io.StringIO("a long password\n"))
    assert run(["user", "add", "alice"]) == EXIT_DONE

    def printed(form: str) -> str:
        capsys.readouterr()
        monkeypatch.setattr("sys.stdin", io.StringIO(TYPED.get(words, "")))
        assert run([*words, *SAMPLES[words], "--output", form]) == EXIT_DONE, capsys.readouterr().err
        return capsys.readouterr().out

    rows: list[dict[str, Any]] = json.loads(printed("json"))
    if words != ("transaction", "list"):
        assert rows
    columns = list(rows[0]) if rows else []

    def steady(found: list[dict[str, Any]]) -> list[list[Any]]:
        return [[row[name] for name in columns if name not in CHANGING] for row in found]

    assert steady([json.loads(line) for line in printed("jsonl").splitlines()]) == steady(rows)
    csv_rows = list(csv.DictReader(io.StringIO(printed("csv"))))
    assert [list(row) for row in csv_rows] == [columns] * len(rows)
    texts = [["" if value is None else str(value) for value in row] for row in steady(rows)]
    assert steady(csv_rows) == texts
    head, *lines = printed("table").splitlines()
    assert len(lines) == len(rows)
    if rows:
        assert [name.replace("_", " ") for name in columns] == _cut(head, columns)


def _cut(head: str, columns: list[str]) -> list[str]:
    """Return the headings of a table, which must appear in this order."""
    found = []
    for name in columns:
        heading = name.replace("_", " ")
        before, there, head = head.partition(heading)
        assert there, f"no heading {heading!r}"
        assert not before.strip()
        found.append(heading)
    return found
