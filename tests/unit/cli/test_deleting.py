"""Delete commands report and delete exactly what they name, and nothing with ``--dry-run``."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest

from polywire.cli.main import run
from polywire.cli.usage import EXIT_DONE, EXIT_FAILED
from polywire.client.connect import connect
from polywire.client.polywire import PolywireClient
from polywire.records.columns import Record
from polywire.testing.thread import BrokerThread


async def fill(url: str) -> None:
    client = await connect(url)
    assert isinstance(client, PolywireClient)
    await client.create_topic("orders", 2)
    await client.produce("orders", [Record(b"a"), Record(b"b")], partition=0)
    for group in ("billing", "audit"):
        await client.commit(group, "orders", 0, 1)
    await client.close()


def test_a_group_is_deleted_with_its_offsets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def groups() -> set[str]:
        capsys.readouterr()
        assert run(["group", "list", "-o", "json"]) == EXIT_DONE
        return {row["group"] for row in json.loads(capsys.readouterr().out)}

    with BrokerThread(wires=["polywire"]) as broker:
        monkeypatch.setenv("POLYWIRE_ADDRESS", broker.url())
        asyncio.run(fill(broker.url()))
        assert run(["group", "delete", "billing", "orders", "--dry-run"]) == EXIT_DONE
        assert capsys.readouterr().err == "would delete group=billing topic=orders members=0 offsets=1\n"
        assert groups() == {"billing", "audit"}
        assert run(["group", "delete", "billing", "orders"]) == EXIT_DONE
        assert capsys.readouterr().err == "deleted group=billing topic=orders members=0 offsets=1\n"
        assert groups() == {"audit"}
        for words in (["--dry-run"], []):
            assert run(["group", "delete", "billing", "orders", *words]) == EXIT_FAILED
            assert "code=group_missing" in capsys.readouterr().err


def test_a_user_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(tmp_path / "users")
    for name in ("alice", "bob"):
        monkeypatch.setattr("sys.stdin", io.StringIO("a long password\n"))
        assert run(["user", "add", name, "--users", file]) == EXIT_DONE
    capsys.readouterr()
    assert run(["user", "remove", "alice", "--users", file]) == EXIT_DONE
    assert capsys.readouterr().err == f"removed user=alice users={file}\n"
    assert run(["user", "list", "--users", file, "-o", "json"]) == EXIT_DONE
    assert [row["user"] for row in json.loads(capsys.readouterr().out)] == ["bob"]
    assert run(["user", "remove", "alice", "--users", file]) == EXIT_FAILED
    assert "alice" in capsys.readouterr().err
