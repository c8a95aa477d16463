"""``polywire.Client.queue``: jobs that are acknowledged, retried, rejected, renewed, and lost with their connection."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

import polywire
from polywire import Client, Job
from polywire.client.polywire import needs_polywire
from polywire.client.queue_calls import Acquisition, QueueCalls
from polywire.client.queue_worker import PolywireWorker
from polywire.errors import Conflict, ErrorCode, Invalid, Missing, Unavailable
from polywire.protocols.polywire.messages import AcknowledgedRun, QueueEntry
from tests.unit.client.served import Play, Served
from tests.unit.client.test_consumer import fill, numbers
from tests.unit.client.test_transaction import texts

WAIT_S = 30.0


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not in time")


async def described(client: Client) -> QueueEntry:
    wire = needs_polywire(await client._link.wire(), "be a test")
    [entry] = await QueueCalls(wire).entries()
    return entry


async def held(client: Client) -> tuple[int, int]:
    """Return the number of unfinished records that workers hold, and that wait for a delay."""
    entry = await described(client)
    return sum(entry.acquired.values()), sum(part.delayed for part in entry.partitions)


def test_each_job_goes_to_one_worker(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "jobs", 60)
        seen: list[str] = []

        async def work(job: Job) -> None:
            seen.append(job.text)
            await asyncio.sleep(0)

        async with (
            client.queue("jobs", group="g", prefetch=5) as one,
            client.queue("jobs", group="g", prefetch=5, worker="b") as two,
        ):
            running = [asyncio.ensure_future(queue.run(work, concurrency=3)) for queue in (one, two)]
            await until(lambda: len(seen) == 60)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        assert sorted(seen, key=int) == numbers(0, 60)

    play(scenario)


def test_a_full_worker_acknowledges_and_acquires_in_one_request(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire, acknowledge = QueueCalls.acquire, QueueCalls.acknowledge
    combined, alone = list[int](), list[int]()

    async def noted(calls: QueueCalls, *args: Any, runs: Any = (), **named: Any) -> Any:
        combined.append(len(runs))
        return await acquire(calls, *args, runs=runs, **named)

    async def noted_alone(calls: QueueCalls, *args: Any) -> Any:
        alone.append(1)
        return await acknowledge(calls, *args)

    monkeypatch.setattr(QueueCalls, "acquire", noted)
    monkeypatch.setattr(QueueCalls, "acknowledge", noted_alone)

    async def scenario(client: Client) -> None:
        await fill(client, "jobs", 10)
        async with client.queue("jobs", group="g", prefetch=2) as queue:
            for number in range(10):
                job = await queue.get(timeout_s=WAIT_S)
                assert job is not None
                assert (job.text, job.attempt) == (str(number), 1)
                await job.ack()
        assert await held(client) == (0, 0)

    play(scenario)
    assert sum(combined) >= 8
    assert sum(combined) + len(alone) == 10


def test_acknowledgements_that_an_older_broker_ignores_are_sent_alone() -> None:
    class OlderCalls:
        def __init__(self) -> None:
            self.sent: list[object] = []

        async def acquire(self, *_: object, **named: object) -> Acquisition:
            return Acquisition(30.0, [], [])

        async def acknowledge(self, *args: object) -> dict[int, Exception]:
            self.sent.append(args)
            return {}

    async def scenario() -> None:
        calls: Any = OlderCalls()
        worker = PolywireWorker(calls, group="g", topic="t", worker="w")
        runs = [AcknowledgedRun(0, 3, 4, 1)]
        found = await worker.acquire(records_max=1, wait_ms=0, runs=runs)
        assert found.refused == {}
        assert calls.sent == [("g", "t", "w", runs)]
        assert not worker.combines

    asyncio.run(scenario())


def test_a_job_is_retried_and_becomes_a_dead_letter(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "polywire.client")  # commands that ran in this process before have changed it

    async def scenario(client: Client) -> None:
        await fill(client, "jobs", 4)
        attempts: Counter[str] = Counter()

        async def work(job: Job) -> None:
            attempts[job.text] += 1
            assert job.attempt == attempts[job.text]
            if job.text == "1":
                raise ValueError("boom")
            if job.text == "2":
                await job.reject()

        async with client.queue("jobs", group="g", attempts=3, dead_letters="dead") as queue:
            running = asyncio.ensure_future(queue.run(work, retry_delays_s=[0.01]))
            await until(lambda: attempts.total() == 6)
            await asyncio.sleep(0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert attempts == {"0": 1, "1": 3, "2": 1, "3": 1}
        assert await held(client) == (0, 0)
        assert sorted(await texts(client, "dead")) == ["1", "2"]

    play(scenario)
    assert "job failed" in caplog.text


def test_a_job_ends_once(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "jobs", 3)
        async with client.queue("jobs", group="g") as queue:
            jobs = [await queue.get() for _ in range(3)]
            assert await queue.get(timeout_s=0.01) is None
            first, second, third = (job for job in jobs if job is not None)
            await asyncio.gather(first.ack(), third.ack())
            with pytest.raises(Conflict) as caught:
                await first.ack()
            assert caught.value.code is ErrorCode.RECORD_NOT_ACQUIRED
            with pytest.raises(Invalid, match="delay_s"):
                await second.retry(delay_s=-1)
            await second.retry()
            again = await queue.get(timeout_s=WAIT_S)
            assert again is not None
            assert (again.text, again.attempt) == ("1", 2)
            await again.retry(delay_s=3600)
            assert await held(client) == (0, 1)

    play(scenario)


def test_a_dead_letter_has_the_reason(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "jobs", 3)

        async def work(job: Job) -> None:
            if job.text == "0":
                raise ValueError("boom")
            if job.text == "1":
                await job.reject("no such customer")
            await asyncio.sleep(60)

        with pytest.raises(Invalid, match="its own dead-letter topic"):
            await client.queue("jobs", group="g", dead_letters="jobs").start()
        async with client.queue("jobs", group="g", attempts=1, dead_letters="dead") as queue:
            running = asyncio.ensure_future(queue.run(work, concurrency=3, job_timeout_s=0.05))
            for _ in range(int(WAIT_S / 0.05)):
                if len(await dead(client)) == 3:
                    break
                await asyncio.sleep(0.05)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert await dead(client) == {"0": b"ValueError('boom')", "1": b"no such customer", "2": b"TimeoutError()"}

    async def dead(client: Client) -> dict[str, object]:
        if "dead" not in {topic.name for topic in await client.topics()}:
            return {}
        parts = [part for part in await client.bounds("dead") if part.next_offset]
        records = [record for part in parts for record in await client.fetch("dead", part.partition, 0)]
        return {record.text: record.headers["dead.reason"] for record in records}

    play(scenario)


def test_a_reason_is_cut_to_what_the_broker_stores(play: Play) -> None:
    async def scenario(client: Client) -> None:
        reasons = ["ä" * (2 << 20), "half a pair \udc80", "a" * 1023 + "ä"]
        await client.create_topic("jobs", 1)
        await fill(client, "jobs", len(reasons))
        async with client.queue("jobs", group="g", start="earliest", dead_letters="dead") as queue:
            for reason in reasons:
                job = await queue.get(timeout_s=WAIT_S)
                assert job is not None
                await job.reject(reason)
        found = [record.headers["dead.reason"] for record in await client.fetch("dead", 0, 0)]
        assert found == [text.encode() for text in ("ä" * 512, "half a pair ?", "a" * 1023)]

    play(scenario)


def test_many_acknowledgements_with_long_reasons_fit_in_requests(play: Play) -> None:
    async def scenario(client: Client) -> None:
        count = 1_100
        await client.create_topic("jobs", 1)
        await fill(client, "jobs", count)
        async with client.queue("jobs", group="g", start="earliest", dead_letters="dead", prefetch=count) as queue:
            jobs = [await queue.get(timeout_s=WAIT_S) for _ in range(count)]
            await asyncio.gather(*(job.reject(f"{number:04}" * 256) for number, job in enumerate(jobs) if job))
        assert sum(bounds.next_offset for bounds in await client.bounds("dead")) == count

    play(scenario)


def test_closing_ends_a_worker_that_waits(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("jobs", 1)
        queue = client.queue("jobs", group="g")
        await queue.start()
        done: list[str] = []

        async def take() -> None:
            async for job in queue:
                done.append(job.text)
                await job.ack()

        async def handle(job: Job) -> None:
            done.append(job.text)
            await queue.close()

        working = [asyncio.ensure_future(work) for work in (queue.get(), take(), queue.run(handle))]
        await asyncio.sleep(0.05)
        await queue.close()
        assert await asyncio.wait_for(asyncio.gather(*working), WAIT_S) == [None] * 3
        assert done == []
        with pytest.raises(Unavailable, match="queue was closed"):
            await queue.get()
        await client.send("jobs", "the last")
        queue = client.queue("jobs", group="g")
        await asyncio.wait_for(queue.run(handle), WAIT_S)
        assert done == ["the last"]

    play(scenario)


def test_an_unforeseen_exception_is_raised(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unforeseen(*_: object, **__: object) -> None:
        raise ZeroDivisionError("unforeseen")

    async def scenario(client: Client) -> None:
        await client.create_topic("jobs", 1)
        await fill(client, "jobs", 2)
        async with client.queue("jobs", group="g", start="earliest", prefetch=2) as queue:
            job = await queue.get(timeout_s=WAIT_S)
            assert job is not None
            monkeypatch.setattr(PolywireWorker, "acquire", unforeseen)
            monkeypatch.setattr(PolywireWorker, "acknowledge", unforeseen)
            with pytest.raises(Conflict, match="the request could not be sent"):
                await asyncio.wait_for(job.ack(), WAIT_S)
        async with client.queue("jobs", group="g", start="earliest") as queue:
            with pytest.raises(Unavailable, match="the queue stopped reason=ZeroDivisionError"):
                await asyncio.wait_for(queue.get(), WAIT_S)

    play(scenario)


def test_a_handler_must_be_a_coroutine_function(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "jobs", 1)
        async with client.queue("jobs", group="g") as queue:
            with pytest.raises(ExceptionGroup) as caught:
                await queue.run(lambda job: None)  # type: ignore[arg-type,return-value]
            assert caught.group_contains(Invalid, match="async def")

    play(scenario)


def test_a_job_whose_lock_has_expired_cannot_be_acknowledged(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "jobs", 1)
        monkeypatch.setattr("polywire.client.queue.RENEWALS", 0.1)  # locks are not renewed
        async with client.queue("jobs", group="g", lock_s=1) as queue:
            first, second = [await queue.get(timeout_s=WAIT_S) for _ in range(2)]
            assert first is not None
            assert second is not None
            assert (first.attempt, second.attempt) == (1, 2)
            with pytest.raises(Conflict, match="its lock has ended"):
                await first.ack()
            await second.ack()

    play(scenario)


def test_the_blocking_queue(served: Served) -> None:
    with polywire.connect_sync(served.address) as client:
        client.create_topic("jobs", 1)
        client.send("jobs", "a")
        with client.queue("jobs", group="g") as queue:
            job = next(iter(queue))
            assert (job.text, job.attempt, job.record.offset) == ("a", 1, 0)
            job.ack()
            assert queue.get(timeout_s=0.01) is None


def test_a_client_works_under_uvloop(served: Served) -> None:
    async def scenario() -> str:
        async with polywire.connect(served.address) as client:
            await client.send("t", "a")
            async with client.consumer("t") as consumer:
                return (await anext(consumer)).text

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(scenario()) == "a"


def test_locks_are_renewed_while_a_job_runs(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "jobs", 1)
        async with client.queue("jobs", group="g", lock_s=1) as queue, client.queue("jobs", group="g") as other:
            job = await queue.get(timeout_s=WAIT_S)
            assert job is not None
            assert await other.get(timeout_s=2.5) is None
            await job.ack()

    play(scenario)


def test_a_lost_connection_gives_the_jobs_to_another_worker(served: Served) -> None:
    async def scenario() -> None:
        async with polywire.connect(served.address) as client:
            await fill(client, "jobs", 2)
            async with client.queue("jobs", group="g") as queue:
                job = await queue.get(timeout_s=WAIT_S)
                assert job is not None
                await asyncio.get_running_loop().run_in_executor(None, served.drop_connections)
                with pytest.raises(Conflict, match="another worker gets the record"):
                    await job.ack()
                texts_again = []
                for _ in range(2):
                    again = await queue.get(timeout_s=WAIT_S)
                    assert again is not None
                    texts_again.append((again.text, again.attempt))
                    await again.ack()
                assert texts_again == [("0", 2), ("1", 2)]

    asyncio.run(scenario())


def test_settings_and_mistakes(play: Play) -> None:
    async def scenario(client: Client) -> None:
        with pytest.raises(Missing):
            await client.queue("jobs", group="g").start()
        await fill(client, "jobs", 1)
        with pytest.raises(Invalid, match=r"share\.delivery\.count\.limit"):
            await client.queue("jobs", group="g", attempts=0).start()
        with pytest.raises(Invalid, match="prefetch"):
            client.queue("jobs", group="g", prefetch=0)
        with pytest.raises(Invalid, match="must be names"):
            client.queue("jobs", group="")
        async with client.queue("jobs", group="g", attempts=7, lock_s=90):
            pass
        async with client.queue("jobs", group="g", start=None):
            settings = (await described(client)).settings
            assert settings["share.delivery.count.limit"] == "7"
            assert settings["share.record.lock.duration.ms"] == "90000"
        async with client.consumer("jobs", group="c"), asyncio.timeout(WAIT_S):
            with pytest.raises(Conflict) as caught:
                await client.queue("jobs", group="c").get()
            assert caught.value.code is ErrorCode.GROUP_PROTOCOL_MISMATCH

    play(scenario)


def test_a_job_is_delivered_when_it_is_due_and_before_it_expires(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("jobs", 1)
        async with client.queue("jobs", group="g", start="earliest", dead_letters="dead") as queue:
            sent_at = asyncio.get_running_loop().time()
            await client.send("jobs", "later", delay_s=0.5)
            await client.send("jobs", "worthless", ttl_s=0)
            await client.send("jobs", "now", ttl_s=60)
            async with client.producer() as producer:
                await producer.send_many("jobs", [polywire.Record("last", delay_s=0.7)])
            delivered_s = {}
            for _ in range(3):
                job = await queue.get(timeout_s=WAIT_S)
                assert job is not None
                delivered_s[job.text] = asyncio.get_running_loop().time() - sent_at
            assert delivered_s.keys() == {"now", "later", "last"}
            assert delivered_s["later"] > 0.4
            assert delivered_s["last"] > 0.6
            assert await texts(client, "dead") == ["worthless"]

    play(scenario)


def test_a_topic_has_all_records_at_once_for_other_consumers(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("jobs", 1)
        await client.send("jobs", "later", delay_s=500)
        assert await texts(client, "jobs") == ["later"]

    play(scenario)
