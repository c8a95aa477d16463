"""Links to a real Apache Kafka: topic settings, users and ACLs, and the comparison of a copy.

``POLYWIRE_KAFKA_JAVA='directory/*'`` has the jars of Kafka's broker and tools; without it the tests are skipped.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator

import pytest

from benchmarks.peers.kafka import JARS, Kafka
from benchmarks.peers.peer import Absent
from polywire.client.comparing import Comparison, Pair, Rules
from polywire.client.copying import connected
from polywire.client.polywire import PolywireClient
from polywire.link_orders import LinkDefinition
from polywire.links.topic import LinkedTopic
from polywire.links.worker import plan_of
from polywire.records.columns import Record
from polywire.testing.thread import BrokerThread

CONFIG = "kafka.admin.ConfigCommand"
ACLS = "org.apache.kafka.tools.AclCommand"
TOPICS = "org.apache.kafka.tools.TopicCommand"


USERS = (
    "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer\n"
    "super.users=User:ANONYMOUS\nallow.everyone.if.no.acl.found=true\n"
)


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    try:
        with Kafka(USERS).running(tmp_path_factory.mktemp("kafka")) as server:
            host, port = server.address
            yield f"{host}:{port}"
    except Absent as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def new() -> Iterator[BrokerThread]:
    with BrokerThread(wires=["polywire"]) as running:
        yield running


def tool(kafka: str, program: str, *words: str) -> None:
    found = subprocess.run(
        ["java", "-cp", os.environ[JARS], program, "--bootstrap-server", kafka, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_settings_users_and_acls(kafka: str, new: BrokerThread) -> None:
    configs = [
        ("cleanup.policy", "compact,delete"),
        ("retention.ms", "86400000"),
        ("segment.bytes", "2000000"),
        ("message.timestamp.type", "LogAppendTime"),
    ]
    words = [word for name, value in configs for word in ("--config", f"{name}={value}")]
    tool(kafka, TOPICS, "--create", "--topic", "orders", "--partitions", "2", *words)
    tool(kafka, TOPICS, "--create", "--topic", "plain", "--partitions", "1")
    tool(
        kafka,
        ACLS,
        "--add",
        "--allow-principal",
        "User:alice",
        "--operation",
        "Read",
        "--topic",
        "orders",
        "--group",
        "*",
    )
    tool(kafka, ACLS, "--add", "--deny-principal", "User:mallory", "--operation", "Write", "--topic", "orders")
    scram = "SCRAM-SHA-512=[password=alice-secret]"
    tool(kafka, CONFIG, "--alter", "--add-config", scram, "--entity-type", "users", "--entity-name", "alice")

    async def run() -> None:
        url = f"kafka://{kafka}"
        async with connected(url) as source, connected(new.url()) as target:
            assert isinstance(target, PolywireClient)
            plan = await plan_of(LinkDefinition("old", url, ("orders", "plain")), target)
            orders, plain = plan.topics
            assert orders.settings["retention_age_us"] == 86_400_000_000
            assert orders.settings["compaction"] == 1
            assert sorted(orders.other_settings) == ["message.timestamp.type=LogAppendTime", "segment.bytes=2000000"]
            assert plain.settings["retention_age_us"] == 7 * 86_400_000_000, "the default of the cluster"
            assert plain.other_settings == []
            notes = "\n".join(plan.notes)
            command = "polywire user add alice --scram --permissions consume@default/orders,group@default/orders"
            assert command in notes
            assert "ACL has no equal permission: principal='User:mallory'" in notes
            await source.produce("orders", [Record(b"%d" % number, b"k%d" % number) for number in range(1000)])
            linked = LinkedTopic(LinkDefinition("old", url, ("orders",)), "orders", source, target)
            while await linked.step():
                pass
            settings = (await target.describe("orders")).settings
            assert (settings["retention_age_us"], settings["compaction"]) == (86_400_000_000, 1)
            rows = [row async for row in Comparison(source, target, Rules()).run(Pair("orders", "orders"))]
            assert [row.result for row in rows] == ["equal"] * 2, rows
            assert sum(row.source_records for row in rows) == 1000

    asyncio.run(run())
