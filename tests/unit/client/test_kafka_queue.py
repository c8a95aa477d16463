"""``polywire.Client.queue`` over the Kafka protocol: jobs, delays that the worker holds, memberships, and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

import polywire
from polywire import Client, Job
from polywire.client.kafka import KafkaClient
from polywire.client.kafka_connection import VERSIONS
from polywire.client.kafka_worker import KafkaWorker
from polywire.client.queue_worker import queue_worker
from polywire.errors import Busy, Conflict, Denied, ErrorCode, Invalid, Missing, Unavailable
from polywire.protocols.kafka.messages import Api, WireError
from polywire.protocols.polywire.messages import AcknowledgedRun
from polywire.testing.thread import BrokerThread
from polywire.types import Outcome
from tests.unit.client.test_consumer import fill, numbers

WAIT_S = 30.0
EARLIEST = {"share.auto.offset.reset": "earliest"}


@pytest.fixture(scope="module")
def started() -> Iterator[BrokerThread]:
    with BrokerThread(wires=["kafka", "polywire", "flux", "cursus", "iggy", "kafka07"]) as running:
        yield running


@pytest.fixture
def broker(started: BrokerThread) -> BrokerThread:
    started.stop()
    return started.start()


def play(broker: BrokerThread, scenario: Callable[[Client], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with polywire.connect(broker.url("kafka")) as client:
            await asyncio.wait_for(scenario(client), 120)

    asyncio.run(whole())


async def job_of(queue: polywire.Queue) -> Job:
    job = await queue.get(timeout_s=WAIT_S)
    assert job is not None
    return job


async def worker_of(broker: BrokerThread, topic: str = "jobs") -> KafkaWorker:
    wire = await KafkaClient.open(*broker.addresses["kafka"])
    worker = queue_worker(wire, group="g", topic=topic, worker="w")
    assert isinstance(worker, KafkaWorker)
    return worker


def test_jobs_are_shared_by_workers_of_two_protocols(broker: BrokerThread) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("jobs", 3)
        async with client.producer() as producer:
            await producer.send_many("jobs", numbers(0, 60))
        seen: list[tuple[str, str]] = []
        async with (
            polywire.connect(broker.url()) as native,
            client.queue("jobs", group="g", prefetch=5) as one,
            native.queue("jobs", group="g", prefetch=5) as two,
        ):

            async def work(queue: polywire.Queue, name: str) -> None:
                async for job in queue:
                    seen.append((job.text, name))
                    await job.ack()

            running = [asyncio.ensure_future(work(queue, name)) for queue, name in ((one, "kafka"), (two, "polywire"))]
            for _ in range(1000):
                if len(seen) >= 60:
                    break
                await asyncio.sleep(0.02)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        assert sorted((text for text, _ in seen), key=int) == numbers(0, 60)
        assert {name for _, name in seen} == {"kafka", "polywire"}

    play(broker, scenario)


def test_a_job_is_acknowledged_retried_rejected_and_a_dead_letter(broker: BrokerThread) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "jobs", 3)
        async with client.queue("jobs", group="g", attempts=2, dead_letters="dead", order="key") as queue:
            first, second, third = [await job_of(queue) for _ in range(3)]
            assert (first.text, first.attempt, first.record.partition, first.record.offset) == ("0", 1, 0, 0)
            await asyncio.gather(first.ack(), second.retry(), third.reject("no reason over Kafka"))
            with pytest.raises(Conflict, match="the job has ended"):
                await first.ack()
            again = await job_of(queue)
            assert (again.text, again.attempt) == ("1", 2)
            await again.retry()  # the last attempt
            assert await queue.get(timeout_s=0.3) is None
        letters = [
            record for part in await client.bounds("dead") for record in await client.fetch("dead", part.partition, 0)
        ]
        assert {record.text: record.headers["dead.reason"] for record in letters} == {
            "1": b"delivered too often",
            "2": b"rejected by the consumer",
        }

    play(broker, scenario)


def test_the_worker_holds_a_record_during_its_delay(broker: BrokerThread) -> None:
    """It renews the lock meanwhile, and another worker does not get the record."""

    async def scenario(client: Client) -> None:
        await fill(client, "jobs", 1)
        async with client.queue("jobs", group="g", lock_s=1) as queue, client.queue("jobs", group="g") as other:
            job = await job_of(queue)
            await job.retry(delay_s=2.5)
            with pytest.raises(Conflict, match="the job has ended"):
                await job.ack()
            taken = [asyncio.ensure_future(one.get(timeout_s=WAIT_S)) for one in (queue, other)]
            started = asyncio.get_running_loop().time()
            await asyncio.wait(taken, return_when=asyncio.FIRST_COMPLETED)
            assert asyncio.get_running_loop().time() - started > 2
            [again] = [task.result() for task in taken if task.done()]
            assert again is not None
            assert (again.text, again.attempt) == ("0", 2)
            for task in taken:
                task.cancel()
            await again.ack()
            await asyncio.gather(*taken, return_exceptions=True)

    play(broker, scenario)


def test_a_record_is_released_if_its_worker_ends_during_the_delay(broker: BrokerThread) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "jobs", 1)
        async with client.queue("jobs", group="g") as queue:
            await (await job_of(queue)).retry(delay_s=0.5)
        async with client.queue("jobs", group="g") as queue:
            assert (await job_of(queue)).attempt == 2
            await asyncio.sleep(0.6)  # the first queue does nothing when the delay is over

    play(broker, scenario)


def test_long_delays_are_rejected(broker: BrokerThread) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "jobs", 1)
        async with client.queue("jobs", group="g") as queue:
            job = await job_of(queue)
            with pytest.raises(Invalid, match="polywire:// URL for longer delays"):
                await job.retry(delay_s=601)
            await job.ack()

            async def work(job: Job) -> None:
                pass

            with pytest.raises(Invalid, match="polywire:// URL for longer delays"):
                await queue.run(work, retry_delays_s=[1, 3600])

    play(broker, scenario)


def test_a_job_whose_lock_has_expired_cannot_be_acknowledged(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "jobs", 1)
        monkeypatch.setattr("polywire.client.queue.RENEWALS", 0.1)  # locks are not renewed
        async with client.queue("jobs", group="g", lock_s=1) as queue:
            first = await job_of(queue)
            second = await job_of(queue)
            assert (first.attempt, second.attempt) == (1, 2)
            with pytest.raises(Conflict, match="its lock has ended"):
                await first.ack()
            await second.ack()

    play(broker, scenario)


def test_a_killed_broker_delivers_again(broker: BrokerThread) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "jobs", 2)
        async with client.queue("jobs", group="g") as queue:
            job = await job_of(queue)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, broker.kill)
            await loop.run_in_executor(None, broker.start)
            with pytest.raises(Conflict, match="another worker gets the record"):
                await job.ack()
            found = []
            for _ in range(2):
                again = await job_of(queue)
                found.append((again.text, again.attempt))
                await again.ack()
            assert found == [("0", 2), ("1", 2)]

    play(broker, scenario)


def test_the_prefetch_limits_the_records_of_a_worker(broker: BrokerThread) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "jobs", 3)
        async with client.queue("jobs", group="g", prefetch=1) as queue, client.queue("jobs", group="g") as other:
            job = await job_of(queue)
            rest = [await job_of(other) for _ in range(2)]
            assert await queue.get(timeout_s=0.3) is None
            assert sorted([job.text, *(one.text for one in rest)]) == ["0", "1", "2"]

    play(broker, scenario)


def test_settings_and_mistakes(broker: BrokerThread) -> None:
    async def scenario(client: Client) -> None:
        with pytest.raises(Missing) as missing:
            await client.queue("jobs", group="g").start()
        assert missing.value.code is ErrorCode.TOPIC_MISSING
        await fill(client, "jobs", 1)
        with pytest.raises(Invalid, match=r"share\.delivery\.count\.limit"):
            await client.queue("jobs", group="g", attempts=0).start()
        with pytest.raises(Invalid, match=r"share\.order \(use none or key\) value='no such'$"):
            await client.queue("jobs", group="g", order="no such").start()
        with pytest.raises(Invalid, match=r"only Polywire brokers have share\.order"):
            await client.queue("jobs", group="g", order="key", attempts=0).start()
        async with client.consumer("jobs", group="c"), asyncio.timeout(WAIT_S):
            with pytest.raises(Conflict) as caught:
                await client.queue("jobs", group="c").get()
            assert caught.value.code is ErrorCode.GROUP_PROTOCOL_MISMATCH
        async with client.queue("jobs", group="g", start=None) as queue:
            assert await queue.get(timeout_s=0.2) is None
            await client.delete_topic("jobs")
            with pytest.raises(Missing):
                await queue.get(timeout_s=WAIT_S)

    play(broker, scenario)


@pytest.mark.parametrize("wire", ["flux", "cursus", "iggy", "kafka07"])
def test_protocols_without_queues(broker: BrokerThread, wire: str) -> None:
    async def scenario() -> None:
        async with polywire.connect(broker.url(wire)) as client:
            with pytest.raises(Invalid, match="polywire:// or kafka:// URL"):
                await client.queue("jobs", group="g").start()

    asyncio.run(scenario())


def test_a_broker_without_share_groups(broker: BrokerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERSIONS, Api.SHARE_FETCH, 9)

    async def scenario(client: Client) -> None:
        with pytest.raises(Invalid, match=r"Apache Kafka 4\.2 or later"):
            await client.queue("jobs", group="g").start()

    play(broker, scenario)


async def with_worker(broker: BrokerThread, steps: Callable[[KafkaWorker], Awaitable[None]], count: int = 6) -> None:
    async with polywire.connect(broker.url("kafka")) as client:
        await fill(client, "jobs", count)
    worker = await worker_of(broker)
    await worker.configure(EARLIEST)
    try:
        await asyncio.wait_for(steps(worker), WAIT_S)
    finally:
        await worker.leave()
        await worker._client.close()


def test_one_refused_acknowledgement_does_not_refuse_others(broker: BrokerThread) -> None:
    async def steps(worker: KafkaWorker) -> None:
        found = await worker.acquire(records_max=10, wait_ms=1000)
        assert [record.offset for record, _ in found.records] == [0, 1, 2, 3, 4, 5]
        accept = [AcknowledgedRun(0, at, at, Outcome.ACCEPT) for at in range(6)]
        assert await worker.acknowledge([accept[3]]) == {}
        refused = await worker.acknowledge(accept)
        assert {index: error.code for index, error in refused.items()} == {3: ErrorCode.RECORD_NOT_ACQUIRED}
        assert (await worker.acquire(records_max=10, wait_ms=0)).records == []
        elsewhere = await worker.acknowledge([AcknowledgedRun(7, 0, 0, Outcome.ACCEPT)])
        assert elsewhere[0].code is ErrorCode.RECORD_NOT_ACQUIRED

    asyncio.run(with_worker(broker, steps))


def test_a_member_that_is_unknown_joins_again(broker: BrokerThread) -> None:
    async def steps(worker: KafkaWorker) -> None:
        await worker.acquire(records_max=1, wait_ms=0)
        worker._epoch = 99
        await worker._beat()
        assert worker._epoch < 99

    asyncio.run(with_worker(broker, steps))


def test_a_session_that_the_broker_has_ended(broker: BrokerThread) -> None:
    async def steps(worker: KafkaWorker) -> None:
        await worker.acquire(records_max=1, wait_ms=0)
        [session] = worker._sessions.values()
        session.epoch = 7
        with pytest.raises(Unavailable):
            await worker.acquire(records_max=1, wait_ms=0)

    asyncio.run(with_worker(broker, steps))


def test_offsets_without_a_record_and_too_many_records(broker: BrokerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polywire.client.kafka_worker.ACQUIRED_MAX", 5)

    async def steps(worker: KafkaWorker) -> None:
        run = SimpleNamespace(first_offset=3, last_offset=5, delivery_count=2)
        entry: Any = SimpleNamespace(index=0, records=b"", acquired_records=[run])
        found = await worker.acquire(records_max=1, wait_ms=0)
        worker._add(entry, found)
        assert found.gaps == [(0, 3), (0, 4), (0, 5)]
        run.last_offset = 2**62
        with pytest.raises(Unavailable, match="too many acquired records"):
            worker._add(entry, found)

    asyncio.run(with_worker(broker, steps))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (WireError.TOPIC_AUTHORIZATION_FAILED, Denied),
        (WireError.KAFKA_STORAGE_ERROR, Busy),
        (WireError.NOT_LEADER_OR_FOLLOWER, None),
        (WireError.UNKNOWN_TOPIC_ID, None),  # the topic exists: its metadata are not complete yet
    ],
)
def test_errors_of_a_partition(broker: BrokerThread, code: WireError, kind: type[Exception] | None) -> None:
    async def steps(worker: KafkaWorker) -> None:
        await worker.acquire(records_max=1, wait_ms=0)
        with suppress(*([kind] if kind else [])):
            await worker._raise_or_look_again([SimpleNamespace(error=code, message=None)])
            assert kind is None
            assert worker._placed is None
        found = await worker.acquire(records_max=1, wait_ms=0)
        assert [record.offset for record, _ in found.records] == [1]

    asyncio.run(with_worker(broker, steps))
