"""``python -m benchmarks.client``: processor time of the application per record, with our client and with others.

Each client runs in its own process, whose processor time with all threads is divided by the records. Clients take turns
in every round, so that other load affects all alike. Values have 100 bytes; a batch has as many as the client chooses.

The result is the minimum and the median of the rounds; a client that is not installed is listed with its source.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from benchmarks.peers.kafka_clients import PYTHON
from benchmarks.peers.nats import Nats
from benchmarks.peers.peer import Absent
from polywire.testing.process import BrokerProcess

RECORDS: Final = 500_000
ROUNDS: Final = 5
NATS: Final = "POLYWIRE_NATS_CLIENT"
TIMEOUT_S: Final = 300.0

_POLYWIRE: Final = """
import asyncio, json, sys, time
import polywire
async def main(url, topic, records):
    values, paid = [b"x" * 100] * 100, {}
    async with polywire.connect(url) as client:
        await client.create_topic(topic, 1)
        begun = time.process_time()
        async with client.producer() as producer:
            for _ in range(records // 100):
                await producer.send_many(topic, values)
        paid["produce"] = time.process_time() - begun
        for how in ("async for", "batches()"):
            count, begun = 0, time.process_time()
            async with client.consumer(topic, start="earliest") as consumer:
                if how == "async for":
                    async for record in consumer:
                        count += 1
                        if count == records:
                            break
                else:
                    async for found in consumer.batches():
                        count += len(found)
                        if count == records:
                            break
            paid[how] = time.process_time() - begun
    print(json.dumps(paid))
asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""

_CONFLUENT: Final = """
import json, sys, time
from confluent_kafka import Consumer, Producer
servers, topic, records = sys.argv[1], sys.argv[2], int(sys.argv[3])
producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 5,
                     "queue.buffering.max.messages": 1000000})
producer.list_topics(topic, timeout=30)
paid, value, begun = {}, b"x" * 100, time.process_time()
for _ in range(records):
    while True:
        try:
            producer.produce(topic, value)
            break
        except BufferError:
            producer.poll(0.01)
left = producer.flush(60)
assert not left, left
paid["produce"] = time.process_time() - begun
for how, size in (("poll()", 1), ("consume(10000)", 10000)):
    consumer = Consumer({"bootstrap.servers": servers, "group.id": f"{topic}-{size}", "auto.offset.reset": "earliest",
                         "queued.min.messages": 1000000, "fetch.queue.backoff.ms": 5})
    count, begun = 0, time.process_time()
    consumer.subscribe([topic])
    while count < records:
        if size == 1:
            count += consumer.poll(1) is not None
        else:
            count += len(consumer.consume(size, 0.1))
    paid[how] = time.process_time() - begun
    consumer.close()
print(json.dumps(paid))
"""

_NATS: Final = """
import asyncio, json, sys, time
import nats
async def main(url, topic, records):
    paid, value = {}, b"x" * 100
    connection = await nats.connect(url)
    stream = connection.jetstream()
    await stream.add_stream(name=topic, subjects=[topic])
    begun = time.process_time()
    for _ in range(records // 1000):
        await asyncio.gather(*[await stream.publish_async(topic, value) for _ in range(1000)])
    paid["produce"] = time.process_time() - begun
    config = nats.js.api.ConsumerConfig(ack_policy=nats.js.api.AckPolicy.NONE)
    subscription = await stream.pull_subscribe(topic, "bench", config=config)
    count, begun = 0, time.process_time()
    while count < records:
        count += len(await subscription.fetch(1000, timeout=5))
    paid["fetch(1000)"] = time.process_time() - begun
    print(json.dumps(paid))
    await connection.close()
asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""

Paid = dict[str, float]
Run = Callable[[str], Paid]


def run(python: str, program: str, server: str, topic: str, records: int, **extra: str) -> Paid:
    """Return microseconds per record by operation, in one process."""
    command = [python, "-c", program, server, topic, str(records)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env={**os.environ, **extra}
    )
    if done.returncode:
        raise AssertionError(f"a client failed\n{done.stderr[-1500:]}")
    paid: Paid = json.loads(done.stdout.splitlines()[-1])
    return {how: 1e6 * seconds / records for how, seconds in paid.items()}


def clients(held: ExitStack, place: Path, records: int) -> Mapping[str, Run]:
    """Yield each installed client with a server of its protocol."""
    broker = held.enter_context(BrokerProcess(place / "polywire", wires=("polywire", "kafka")))
    found: dict[str, Run] = {"polywire": lambda topic: run(sys.executable, _POLYWIRE, broker.url(), topic, records)}
    python = os.environ.get(PYTHON, "")
    if Path(python).is_file():
        host, port = broker.addresses["kafka"]
        found["confluent-kafka"] = lambda topic: run(python, _CONFLUENT, f"{host}:{port}", topic, records)
    else:
        print(f"skipped: confluent-kafka: set {PYTHON} to a Python that has it")
    folder = os.environ.get(NATS, "")
    try:
        if not Path(folder, "nats").is_dir():
            raise Absent(f"set {NATS} to a folder with nats-py (pip install --target)")
        (place / "nats").mkdir()
        where = held.enter_context(Nats().running(place / "nats")).address
        url = f"nats://{where[0]}:{where[1]}"
        found["nats-py"] = lambda topic: run(sys.executable, _NATS, url, topic, records // 10, PYTHONPATH=folder)
    except Absent as absent:
        print(f"skipped: nats-py: {absent}")
    return found


def table(rounds: Mapping[str, list[Paid]]) -> str:
    """Return lines of Markdown."""
    lines = ["| client | | median µs | least µs |", "|---|---|---|---|"]
    for name, paid in rounds.items():
        for how in paid[0]:
            figures = [one[how] for one in paid]
            lines.append(f"| {name} | {how} | {statistics.median(figures):.2f} | {min(figures):.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all, and print the table."""
    parser = argparse.ArgumentParser(description="Processor time of a client for a record of 100 bytes.")
    parser.add_argument("--records", type=int, default=RECORDS, help="of one round; nats-py gets a tenth")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        found = clients(held, Path(folder), asked.records)
        rounds: dict[str, list[Paid]] = {name: [] for name in found}
        for number in range(asked.rounds):
            for name, measure in found.items():
                rounds[name].append(measure(f"round-{number}"))
    print(f"processor time of a client's process for a record, {asked.rounds} rounds of {asked.records} records\n")
    print(table(rounds))


if __name__ == "__main__":
    main()
