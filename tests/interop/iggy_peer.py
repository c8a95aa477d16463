"""Drives one unmodified Iggy SDK for Python, in a process that has that SDK and nothing of this project.

usage: iggy_peer.py HOST PORT ACTION [STREAM ...]. Prints one line of JSON per stream and "done" at the end.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import sys
from typing import Any

try:
    import apache_iggy as iggy
except ImportError:
    import iggy_py as iggy  # its name before the project joined Apache

COUNT = 10_000
BATCH = 1_000
ENDURED = 2_000
ENDURED_AT_ONCE = 4
ERRORS_MAX = 200  # in a row, with pauses of 0.2 s
SPREAD = 240
SPREAD_PARTITIONS = 12
TOPIC = "paid"
NEWEST = hasattr(iggy, "Partitioning")  # the form of the SDK's arguments since 0.9
PATCHES = hasattr(iggy, "TopicOptions")  # and since protocol 0.12


def payload(stream: str, number: int) -> bytes:
    """Return the message of this number: text of many lengths, some of it not ASCII."""
    return f"{stream} {number} {'é' * (number % 50)}".encode()


def first_partition() -> int:
    """Return the first partition: 1 up to apache-iggy 0.5, then 0."""
    return 1 if os.environ["IGGY_BASE"] == "1" else 0


async def connected(host: str, port: str) -> Any:
    client = iggy.IggyClient(f"{host}:{port}")
    await client.connect()
    await client.login_user("iggy", "iggy")
    await client.ping()
    return client


async def create_topic(client: Any, stream: str, topic: str, raw: dict[str, str] | None = None) -> None:
    """Create a topic of three partitions."""
    if PATCHES:
        await client.create_topic(stream, topic, iggy.TopicOptions(partitions_count=3, raw=raw))
    elif raw is None:
        await client.create_topic(stream, topic, 3)
    else:
        await client.create_topic(stream, topic, 3, options=raw)


async def write(client: Any, stream: str) -> dict[str, object]:
    await client.create_stream(stream)
    await create_topic(client, stream, TOPIC)
    topic = await client.get_topic(stream, TOPIC)
    for start in range(0, COUNT, BATCH):
        messages = [iggy.SendMessage(payload(stream, number).decode()) for number in range(start, start + BATCH)]
        where = iggy.Partitioning.partition_id(0) if NEWEST else first_partition()
        await client.send_messages(stream, TOPIC, where, messages)
    found = await client.get_stream(stream)
    return {"topic": topic.name, "messages": found.messages_count, "topics": found.topics_count}


async def endure(client: Any, stream: str) -> dict[str, object]:
    """Write a little at a time through a kill of the broker: after each error check what is stored, and continue.

    The last messages are sent after the standard input has ended, that is, after the kill.
    """
    await client.create_stream(stream)
    await create_topic(client, stream, TOPIC)
    where = iggy.Partitioning.partition_id(0) if NEWEST else first_partition()
    number = errors = 0
    while number < ENDURED:
        try:
            if client is None:
                client = await connected(sys.argv[1], sys.argv[2])
                number = await end(client, stream)
                continue
            if number == ENDURED - ENDURED_AT_ONCE:
                await asyncio.to_thread(sys.stdin.read)
            messages = [iggy.SendMessage(payload(stream, number + step).decode()) for step in range(ENDURED_AT_ONCE)]
            await client.send_messages(stream, TOPIC, where, messages)
            number += ENDURED_AT_ONCE
            if number == ENDURED_AT_ONCE:
                print(json.dumps({"begun": True}), flush=True)
        except RuntimeError:
            if errors == ERRORS_MAX:
                raise
            errors += 1
            client = None
            await asyncio.sleep(0.2)
    found: list[Any] = []
    while len(found) < ENDURED:
        found += await poll(client, stream, iggy.PollingStrategy.Offset(len(found)), BATCH, False)
    assert [bytes(message.payload()) for message in found] == [payload(stream, number) for number in range(ENDURED)]
    return {"read": len(found)}


async def end(client: Any, stream: str) -> int:
    """Return the number of messages."""
    last = await poll(client, stream, iggy.PollingStrategy.Last(), 1, False)
    return last[0].offset() + 1 if last else 0


async def poll(client: Any, stream: str, strategy: Any, count: int, commit: bool, consumer: int = 9) -> list[Any]:
    if NEWEST:
        return list(
            await client.poll_messages(
                stream,
                TOPIC,
                consumer=iggy.Consumer.Single(consumer),
                polling_strategy=strategy,
                count=count,
                auto_commit=commit,
                partition_id=0,
            )
        )
    return list(await client.poll_messages(stream, TOPIC, first_partition(), strategy, count, commit))


async def create(client: Any, stream: str) -> dict[str, object]:
    await client.create_stream(stream)
    await create_topic(client, stream, TOPIC)
    return {}


async def send_one(client: Any, stream: str) -> dict[str, object]:
    """Send one message, with a header if the SDK has them."""
    if NEWEST:
        message = iggy.SendMessage("one", {"colour": "red"})
        await client.send_messages(stream, TOPIC, iggy.Partitioning.partition_id(0), [message])
    else:
        await client.send_messages(stream, TOPIC, first_partition(), [iggy.SendMessage("one")])
    return {}


async def poll_one(client: Any, stream: str) -> dict[str, object]:
    """Poll one message with auto commit: the next one, or that at the offset IGGY_START."""
    start = os.environ.get("IGGY_START")
    strategy = iggy.PollingStrategy.Next() if start is None else iggy.PollingStrategy.Offset(int(start))
    consumer = int(os.environ.get("IGGY_CONSUMER", "9"))
    [message] = await poll(client, stream, strategy, 1, True, consumer)
    return {"offset": message.offset()}


async def look(client: Any, stream: str) -> dict[str, object]:
    """Describe the messages of the first partition, and the numbers of the stream and the topic."""
    messages = await poll(client, stream, iggy.PollingStrategy.Offset(0), BATCH, False)
    return {
        "messages": [
            [message.offset(), str(message.id()), message.timestamp(), bytes(message.payload()).decode()]
            for message in messages
        ],
        "headers": [message.user_headers() is not None for message in messages] if NEWEST else [],
        "stream id": (await client.get_stream(stream)).id,
        "topic id": (await client.get_topic(stream, TOPIC)).id,
    }


async def read(client: Any, stream: str) -> dict[str, object]:
    """Read everything from the start by offset, then the ends, and the next messages of a new consumer."""
    number = 0
    while number < COUNT:
        messages = await poll(client, stream, iggy.PollingStrategy.Offset(number), BATCH, False)
        assert messages, f"nothing at offset {number}"
        for message in messages:
            assert message.offset() == number, f"offset {message.offset()} instead of {number}"
            assert bytes(message.payload()) == payload(stream, number), f"another payload at {number}"
            number += 1
    assert await poll(client, stream, iggy.PollingStrategy.Offset(COUNT), 10, False) == []
    last = await poll(client, stream, iggy.PollingStrategy.Last(), 10, False)
    assert [message.offset() for message in last] == list(range(COUNT - 10, COUNT))
    first = await poll(client, stream, iggy.PollingStrategy.First(), 3, False)
    assert [message.offset() for message in first] == [0, 1, 2]
    return {"read": number, "timestamp": first[0].timestamp()}


async def commit(client: Any, stream: str) -> dict[str, object]:
    """Poll with auto commit: each poll continues after the previous one."""
    nexts = []
    for _ in range(3):
        messages = await poll(client, stream, iggy.PollingStrategy.Next(), 7, True)
        nexts.append(messages[0].offset())
    return {"nexts": nexts}


async def group(client: Any, stream: str) -> dict[str, object]:
    """Use the SDK's group consumer: it creates the group, joins, reads all partitions, stores offsets."""
    consumer = consumer_of(client, f"group-of-{os.environ['IGGY_NAME']}", stream)
    if asyncio.iscoroutine(consumer) or asyncio.isfuture(consumer):
        consumer = await consumer
    seen: list[int] = []
    over = asyncio.Event()

    async def take(message: Any) -> None:
        assert bytes(message.payload()) == payload(stream, message.offset())
        seen.append(message.offset())
        if len(seen) == COUNT:
            over.set()

    await asyncio.wait_for(consumer.consume_messages(take, over), 30)
    partition = first_partition()
    assert seen == list(range(COUNT))
    await consumer.store_offset(COUNT - 1, partition)
    stored = consumer.get_last_stored_offset(partition)
    await consumer.delete_offset(partition)
    return {"consumed": len(seen), "stored": stored is not None}


def consumer_of(client: Any, name: str, stream: str) -> Any:
    """Return the SDK's group consumer, which creates the group and joins it."""
    pause: dict[str, Any] = {} if PATCHES else {"poll_interval": datetime.timedelta(milliseconds=20)}
    return client.consumer_group(
        name,
        stream,
        TOPIC,
        batch_length=1000,
        auto_commit=iggy.AutoCommit.When(iggy.AutoCommitWhen.ConsumingAllMessages()),
        polling_strategy=iggy.PollingStrategy.Next(),
        **pause,
    )


async def share(client: Any, stream: str) -> dict[str, object]:
    """Print the messages of this member of a group of all SDKs, until the input ends."""
    consumer = consumer_of(client, "shared", stream)
    if asyncio.iscoroutine(consumer) or asyncio.isfuture(consumer):
        consumer = await consumer
    over = asyncio.Event()

    async def take(message: Any) -> None:
        print(json.dumps({"got": bytes(message.payload()).decode()}), flush=True)

    async def wait() -> None:
        await asyncio.to_thread(sys.stdin.read)
        over.set()

    waiting = asyncio.create_task(wait())
    await consumer.consume_messages(take, over)
    await waiting
    return {"over": True}


async def spread(client: Any, stream: str) -> dict[str, object]:
    """Write to a topic of many partitions once that many members share it."""
    members = int(os.environ["IGGY_MEMBERS"])
    joined = 0
    while joined < members:
        await asyncio.sleep(0.05)
        joined = len(list((await client.get_consumer_group(stream, TOPIC, "shared")).members))
    for number in range(SPREAD):
        where = iggy.Partitioning.partition_id(number % SPREAD_PARTITIONS)
        await client.send_messages(stream, TOPIC, where, [iggy.SendMessage(f"shared {number}")])
    return {"wrote": SPREAD}


async def prepare(client: Any, stream: str) -> dict[str, object]:
    """Create a topic that a group can share."""
    await client.create_stream(stream)
    await client.create_topic(stream, TOPIC, iggy.TopicOptions(partitions_count=SPREAD_PARTITIONS))
    await client.create_consumer_group(stream, TOPIC, "shared")
    return {"prepared": True}


async def refused(call: Any) -> bool:
    try:
        await call
    except RuntimeError:
        return True
    return False


async def admin(client: Any, stream: str) -> dict[str, object]:
    """Administer what the newest SDK can: streams, topics, partitions and groups."""
    await client.create_stream(stream)
    await create_topic(client, stream, "t", {"max_topic_size": "10 GB"})
    await client.update_stream(stream, stream + "-2")
    stream += "-2"
    await client.update_topic(
        stream, "t", "t2", message_expiry=iggy.IggyExpiry.ExpireDuration(datetime.timedelta(days=7))
    )
    await client.create_partitions(stream, "t2", 2)
    await client.delete_partitions(stream, "t2", 1)
    headers = {"colour": "red"}
    await client.send_messages(stream, "t2", iggy.Partitioning.messages_key("k"), [iggy.SendMessage("x", headers)])
    topic = await client.get_topic(stream, "t2")
    found: dict[str, object] = {
        "options": len(await client.describe_options("topic")),
        "partitions": topic.partitions_count,
        "messages": topic.messages_count,
        "old name": await client.get_topic(stream, "t"),
    }
    await client.create_consumer_group(stream, "t2", "g")
    await client.join_consumer_group(stream, "t2", "g")
    group = await client.get_consumer_group(stream, "t2", "g")
    found["member"] = group.members[0].partitions
    await client.leave_consumer_group(stream, "t2", "g")
    await client.delete_consumer_group(stream, "t2", "g")
    found["groups"] = len(await client.get_consumer_groups(stream, "t2"))
    if not PATCHES:  # 0.12 has no purge
        await client.purge_topic(stream, "t2")
        found["purged"] = (await client.get_topic(stream, "t2")).messages_count
    await client.delete_topic(stream, "t2")
    await client.delete_stream(stream)
    found["deleted"] = await client.get_stream(stream)
    stats = await client.get_stats()
    found["stats"] = stats.process_id > 0 and stats.memory_usage > 0 and stats.clients_count > 0
    return found


async def users(client: Any, stream: str) -> dict[str, object]:
    """Create a user who may read streams, rename it, change its password, and revoke everything."""
    del stream
    rights = iggy.Permissions(iggy.GlobalPermissions(read_streams=True))
    await client.create_user("alice", "secret", permissions=rights)
    kept = await client.get_user("alice")
    await client.update_user("alice", "alicia")
    await client.change_password("alicia", "secret", "secret2")
    other = iggy.IggyClient(f"{sys.argv[1]}:{sys.argv[2]}")
    await other.connect()
    await other.login_user("alicia", "secret2")
    await other.get_streams()
    found: dict[str, object] = {
        "kept": kept.permissions == rights,
        "may not create": await refused(other.create_stream("hers")),
    }
    await client.update_permissions("alicia", None)
    found["may not read"] = await refused(other.get_streams())
    await client.delete_user("alicia")
    found["users"] = [user.username for user in await client.get_users()]
    return found


async def main(host: str, port: str, action: str, streams: list[str]) -> None:
    client = await connected(host, port)
    for stream in streams:
        result = await globals()[action](client, stream)
        print(json.dumps({"stream": stream, **result}), flush=True)


asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
print("done", flush=True)
os._exit(0)  # some of these SDKs abort the interpreter on exit, after everything succeeded
