"""Every command rejects a name that does not exist, and lists the names that do."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from polywire.cli.main import app, run
from polywire.cli.usage import EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from polywire.client.connect import connect
from polywire.client.polywire import PolywireClient
from polywire.client.queue_calls import QueueCalls
from polywire.records.columns import Record
from polywire.share_settings import AUTO_OFFSET_RESET
from polywire.testing.thread import BrokerThread
from tests.unit.cli.test_lists import verbs

OPTION: Final = "Unknown option"
TOPIC: Final = "no such topic, did you mean 'orders'? topic='ordrs'"
QUEUE: Final = "no such group, did you mean 'workers'? group='worker'"
GROUP: Final = "no such group, did you mean 'billing'? group='biling'"

# By command: arguments that name something missing, and part of the error message.
UNKNOWN: Final[dict[tuple[str, ...], list[tuple[tuple[str, ...], str]]]] = {
    ("topic", "describe"): [(("ordrs",), TOPIC)],
    ("topic", "alter"): [(("ordrs", "--partitions", "9"), TOPIC)],
    ("topic", "delete"): [(("ordrs",), TOPIC), (("ordrs", "--dry-run"), TOPIC)],
    ("topic", "create"): [(("new", "--compression", "gzp"), "Invalid value")],
    ("record", "produce"): [(("orders", "--partition", "9"), "no such partition")],
    ("record", "consume"): [(("ordrs",), TOPIC), (("orders", "-p", "9"), "no such partition")],
    ("record", "tail"): [(("ordrs",), TOPIC), (("orders", "-p", "9"), "no such partition")],
    ("record", "copy"): [
        (("ordrs", "copied"), f"{TOPIC} end=source known=orders"),
        (("orders", "copied", "--group", "biling"), f"{GROUP} topic='orders' known=billing"),
        (("orders", "copied", "--group", "billing", "--group", "biling"), GROUP),
        (
            ("orders", "copied", "--partition", "9"),
            "no such partition partition=9 topic='orders' end=source known=0..2",
        ),
    ],
    ("record", "compare"): [
        (("ordrs", "orders"), f"{TOPIC} end=source known=orders"),
        (("orders", "ordrs"), f"{TOPIC} end=copy known=orders"),
        (("orders", "orders", "--ignore", "kee"), "source and copy are the same topic"),
    ],
    ("sql",): [(("select * from ordrs",), TOPIC)],
    ("group", "describe"): [(("biling",), f"{GROUP} known=billing")],
    ("group", "reset"): [
        (("billing", "ordrs", "--to", "latest"), TOPIC),
        (("billing", "orders", "--to", "latest", "-p", "9"), "no such partition"),
    ],
    ("group", "delete"): [
        (("biling", "orders"), GROUP),
        (("biling", "orders", "--dry-run"), GROUP),
        (("billing", "ordrs"), "no such group"),
    ],
    ("queue", "describe"): [(("worker",), QUEUE)],
    ("queue", "peek"): [(("worker", "orders"), QUEUE), (("workers", "ordrs"), "the group does not read this topic")],
    ("queue", "purge"): [(("worker", "orders"), QUEUE), (("worker", "orders", "--dry-run"), QUEUE)],
    ("queue", "delete"): [(("worker", "orders"), QUEUE), (("workers", "ordrs"), "the group does not read")],
    ("queue", "set"): [(("workers", "ordrs", "--attempts", "3"), TOPIC)],
    ("group", "offsets", "show"): [(("biling",), GROUP)],
    ("group", "offsets", "export"): [(("biling",), GROUP)],
    ("group", "offsets", "set"): [
        (("billing", "ordrs", "0=0"), TOPIC),
        (("billing", "orders", "9=0"), "no such partition"),
    ],
    ("group", "offsets", "import"): [((), TOPIC)],
    ("transaction", "delete"): [(("lader",), "no such transactional id")],
    ("writer", "delete"): [(("nightl",), "no such writer, did you mean 'nightly'? writer='nightl' known=nightly")],
    ("pipeline", "describe"): [(("lnd",), "no such pipeline, did you mean 'land'?")],
    ("pipeline", "run"): [
        (("lnd",), "no such pipeline, did you mean 'land'?"),
        (("land", "-s", "topic=ordrs", "-s", "path=x", "-s", "checkpoint=y"), TOPIC),
        (("land", "-s", "tpic=orders"), "no such setting, did you mean 'topic'?"),
    ],
    ("user", "alter"): [
        (("alise", "--permissions", "consume"), "no such user, did you mean 'alice'? user='alise' known=alice"),
        (("alice", "--permissions", "cnsume"), "cnsume"),
    ],
    ("user", "remove"): [(("alise",), "no such user, did you mean 'alice'? user='alise' known=alice")],
    ("user", "add"): [(("bob", "--permissions", "cnsume"), "cnsume")],
    ("backup", "create"): [(("shelf", "--data-dir", "nowhere"), "the directory is not a broker's data directory")],
    ("backup", "list"): [(("nowhere",), "directory of backups does not exist")],
    ("backup", "verify"): [(("nowhere",), "no backup found")],
    ("backup", "restore"): [(("nowhere", "--data-dir", "made"), "no backup found")],
    ("segment", "list"): [(("--data-dir", "nowhere"), "nowhere")],
    ("segment", "inspect"): [(("segments/1", "--data-dir", "nowhere"), "nowhere")],
    ("segment", "verify"): [(("segments/1", "--data-dir", "nowhere"), "nowhere")],
    ("log", "verify"): [(("--data-dir", "nowhere"), "nowhere")],
    ("log", "repair"): [(("--data-dir", "nowhere"), "nowhere")],
    ("doctor",): [(("--data-dir", "nowhere"), "nowhere")],
    ("stop",): [(("--data-dir", "nowhere"), "no detached broker is running")],
    ("cluster", "import"): [(("nowhere", "file:///HERE/made"), "nowhere")],
    ("completion",): [(("bsh",), "Invalid value")],
}
# Commands without names of existing things. Their unknown options are tested, too.
WITHOUT_NAMES: Final = {
    ("mcp",),
    ("serve",),
    ("dev",),
    ("topic", "list"),
    ("group", "list"),
    ("transaction", "list"),
    ("writer", "list"),
    ("pipeline", "list"),
    ("pipeline", "init"),
    ("user", "list"),
    ("config", "show"),
    ("config", "check"),
    ("top",),
    ("bench", "produce"),
    ("bench", "consume"),
    ("bench", "latency"),
    # the HTTP server: tests/unit/http/test_links.py
    # the file of contexts: tests/unit/cli/test_contexts.py
    ("context", "add"),
    ("context", "delete"),
    ("context", "list"),
    ("context", "show"),
    ("context", "use"),
    # the HTTP server: tests/e2e/test_quotas.py
    ("queue", "list"),
    ("queue", "redrive"),
    ("quota", "list"),
    ("quota", "remove"),
    ("quota", "set"),
    ("link", "compare"),
    ("link", "create"),
    ("link", "list"),
    ("link", "status"),
    ("link", "pause"),
    ("link", "resume"),
    ("link", "delete"),
    ("link", "cut-over"),
    ("link", "fall-back"),
    # a bucket: tests/unit/cli/test_cluster.py
    ("cluster", "check"),
    ("cluster", "init"),
    ("cluster", "status"),
    ("cluster", "shards"),
    ("cluster", "takeover"),
    ("cluster", "drain"),
}
CASES: Final = [(verb, words, says) for verb, cases in UNKNOWN.items() for words, says in cases]


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerThread]:
    with BrokerThread(wires=["polywire", "kafka", "iggy", "cursus", "flux"]) as running:
        asyncio.run(_fill(running.url()))
        yield running


async def _fill(url: str) -> None:
    client = await connect(url)
    assert isinstance(client, PolywireClient)
    await client.create_topic("orders", 3)
    await client.produce("orders", [Record(b"a"), Record(b"b")], partition=0)
    await client.commit("billing", "orders", 0, 1)
    await client.publish("nightly", 7, [])
    await QueueCalls(client).configure("workers", "orders", {AUTO_OFFSET_RESET: "earliest"})
    await client.close()


@pytest.fixture
def at(broker: BrokerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BrokerThread:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLYWIRE_ADDRESS", broker.url())
    monkeypatch.setenv("POLYWIRE_SERVE_USERS", str(tmp_path / "users"))
    monkeypatch.setattr("sys.stdin", io.StringIO("a long password\n"))
    assert run(["user", "add", "alice"]) == EXIT_DONE
    return broker


def test_every_command_is_covered() -> None:
    assert {words for words, _ in verbs(app)} == set(UNKNOWN) | WITHOUT_NAMES
    assert not set(UNKNOWN) & WITHOUT_NAMES


@pytest.mark.parametrize(("verb", "words", "says"), CASES, ids=[" ".join((*verb, *words)) for verb, words, _ in CASES])
def test_an_unknown_name_is_an_error(
    verb: tuple[str, ...],
    words: tuple[str, ...],
    says: str,
    at: BrokerThread,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    typed = tmp_path / "typed"
    lines = {
        ("group", "offsets", "import"): '{"group": "billing", "topic": "ordrs", "partition": 0, "offset": 1}\n',
        ("user", "add"): "a long password\n",
    }
    typed.write_text(lines.get(verb, '{"value": "x"}\n'))
    capfd.readouterr()
    with typed.open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert run([*verb, *(word.replace("/HERE", str(tmp_path)) for word in words)]) not in (EXIT_DONE, None)
    assert says in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("verb", [words for words, _ in verbs(app)], ids=" ".join)
def test_an_unknown_option_is_an_error(
    verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POLYWIRE_SERVE_DATA_DIR", "data")
    assert run([*verb, "--grup", "x"]) == EXIT_USAGE
    assert "--grup" in capfd.readouterr().err


@pytest.mark.parametrize("wire", ["kafka", "iggy", "cursus", "flux"])
def test_copy_rejects_an_unknown_group_over_every_protocol(
    wire: str, at: BrokerThread, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    source = f"{at.url(wire)}/orders"
    assert run(["record", "copy", source, f"over-{wire}", "--group", "biling"]) == EXIT_FAILED
    assert "no such group" in capfd.readouterr().err.splitlines()[-1]
    assert run(["topic", "describe", f"over-{wire}"]) == EXIT_FAILED, "something was copied"


def test_copy_lists_existing_groups_over_kafka(at: BrokerThread, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["record", "copy", f"{at.url('kafka')}/orders", "o2", "--group", "biling"]) == EXIT_FAILED
    assert f"{GROUP} topic='orders' known=billing" in capfd.readouterr().err.splitlines()[-1]


def test_a_group_that_reset_creates_is_reported(at: BrokerThread, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["group", "reset", "billing2", "orders", "--to", "latest", "--dry-run"]) == EXIT_DONE
    assert "new_groups=billing2" in capfd.readouterr().err.splitlines()[-1]
    assert run(["group", "reset", "billing", "orders", "--to", "latest", "--dry-run"]) == EXIT_DONE
    assert "new_groups" not in capfd.readouterr().err
