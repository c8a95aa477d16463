"""``polywire queue``: list, describe, set, peek, purge, delete and redrive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import polywire
from polywire.cli.main import run
from polywire.cli.usage import EXIT_DONE
from polywire.testing.thread import BrokerThread


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerThread]:
    with BrokerThread(wires=["polywire"]) as running:
        monkeypatch.setenv("POLYWIRE_ADDRESS", running.url())
        yield running


@pytest.fixture
def rows(capsys: pytest.CaptureFixture[str]) -> Any:
    def listed(*words: str) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert run([*words, "--output", "json"]) == EXIT_DONE, capsys.readouterr().err
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return found

    return listed


async def work(url: str) -> None:
    """Acknowledge the first job, delay the second and reject the third."""
    async with polywire.connect(url) as client, client.queue("jobs", group="workers") as queue:
        for end in ("ack", "retry", "reject"):
            job = await queue.get(timeout_s=30)
            assert job is not None
            await (job.retry(delay_s=600) if end == "retry" else getattr(job, end)())


async def fill(url: str) -> None:
    async with polywire.connect(url) as client:
        await client.create_topic("jobs", 1)
        for number in range(5):
            await client.send("jobs", f"job {number}", key=f"k{number}")


def test_records_that_are_not_due_are_marked(broker: BrokerThread, rows: Any) -> None:
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(days=30)

    async def send() -> None:
        async with polywire.connect(broker.url()) as client:
            await client.create_topic("later", 1)
            await client.send("later", "now")
            await client.send("later", "past", deliver_at=due - timedelta(days=60))
            await client.send("later", "later", deliver_at=due)
            for value in ("soon", str(int(due.timestamp()) * 1_000_000)):
                await client.send("later", "ignored", headers={"deliver.at": value})

    asyncio.run(send())
    assert run(["queue", "set", "workers", "later", "--start", "earliest"]) == EXIT_DONE
    found = [(row["value"], row["due"]) for row in rows("queue", "peek", "workers", "later")]
    time = due.strftime("%Y-%m-%dT%H:%M:%S.000000Z")
    assert found == [("now", None), ("past", None), ("later", time), ("ignored", None), ("ignored", None)]


def test_a_queue_from_its_creation_to_its_end(
    broker: BrokerThread, rows: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(fill(broker.url()))
    settings = ["--attempts", "4", "--dead-letters", "jobs.dead", "--lock-s", "60", "--start", "earliest"]
    assert run(["queue", "set", "workers", "jobs", *settings]) == EXIT_DONE
    [queue] = rows("queue", "list")
    assert (queue["topic"], queue["group"], queue["waiting"], queue["dead_letters"]) == (
        "jobs",
        "workers",
        5,
        "jobs.dead",
    )
    asyncio.run(work(broker.url()))
    [partition] = rows("queue", "describe", "workers")
    assert (partition["finished_below"], partition["next_offset"], partition["delayed"]) == (1, 5, 1)
    assert [row["value"] for row in rows("queue", "peek", "workers", "jobs", "--count", "2")] == ["job 1", "job 2"]
    capsys.readouterr()
    assert run(["queue", "purge", "workers", "jobs", "--dry-run"]) == EXIT_DONE
    assert "records=3" in capsys.readouterr().err
    assert run(["queue", "purge", "workers", "jobs"]) == EXIT_DONE
    [queue] = rows("queue", "list")
    assert (queue["waiting"], queue["delayed"]) == (0, 0)
    assert run(["queue", "delete", "workers", "jobs", "--dry-run"]) == EXIT_DONE
    assert run(["queue", "delete", "workers", "jobs"]) == EXIT_DONE
    assert rows("queue", "list") == []
