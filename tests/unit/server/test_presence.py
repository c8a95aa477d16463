"""A leader that cannot write heartbeats for too long is deposed."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from threading import Event

import pytest

from polywire.cluster.nodes import Node, Nodes, Watch
from polywire.errors import ErrorCode, Unavailable
from polywire.server.bucket_watch import BucketWatch
from polywire.server.config import ServeConfig
from polywire.server.standby import UNHEARD, Presence
from polywire.store.identity import NAME, make_identity
from polywire.store.url import open_bucket
from tests.unit.server.test_bucket_watch import SHARD

WAIT_S = 60.0


def leading(config: ServeConfig) -> BucketWatch:
    """Return the watch of a leader of a new log."""
    watch = BucketWatch(config)
    identity, _ = make_identity(open_bucket(config.bucket), secrets.token_bytes, 0)
    watch.leads(bucket_id=identity.id, node="one", shard=lambda: SHARD)
    return watch


def test_a_recovering_broker_without_responses_lets_others_take_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests arrive, but it cannot recover the log, because the responses are lost."""
    put = Nodes.put

    def put_and_fail(nodes: Nodes, node: Node) -> None:
        put(nodes, node)
        raise Unavailable(ErrorCode.STORAGE_FAILED, "the response is lost")

    monkeypatch.setattr(Nodes, "put", put_and_fail)
    config = ServeConfig(data_dir=tmp_path, bucket=f"file://{tmp_path / 'bucket'}", node="one", node_timeout_s=1.0)
    presence, watch, nodes = Presence(config, BucketWatch(config)), Watch("two"), Nodes(open_bucket(config.bucket))
    presence.announce({}, -1)
    assert watch.leader(nodes.read(), time.monotonic()) is not None
    end = time.monotonic() + WAIT_S
    while watch.leader(nodes.read(), time.monotonic()) is not None:
        assert time.monotonic() < end, "standbys wait for it"
        time.sleep(0.05)
    while watch.leader(nodes.read(), time.monotonic()) is None:
        assert time.monotonic() < end, "it never tries again"
        time.sleep(0.05)
    presence.end()


def test_a_leader_without_heartbeats_is_deposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Event()
    put = Nodes.put

    def put_or_fail(nodes: Nodes, node: Node) -> None:
        if out.is_set():
            raise Unavailable(ErrorCode.STORAGE_FAILED, "the bucket is out")
        put(nodes, node)

    monkeypatch.setattr(Nodes, "put", put_or_fail)
    reported: list[str] = []
    deposed = Event()

    def on_deposed(reason: str) -> None:
        reported.append(reason)
        deposed.set()

    config = ServeConfig(data_dir=tmp_path, bucket=f"file://{tmp_path / 'bucket'}", node="one", node_timeout_s=1.0)
    presence, objects = Presence(config, leading(config)), open_bucket(config.bucket)
    presence.announce({}, 3, on_deposed)
    assert not deposed.wait(0.5), "the heartbeat arrived"
    assert [node.timeout_s for node in Nodes(open_bucket(config.bucket)).read()] == [config.node_timeout_s]
    out.set()
    assert deposed.wait(20)
    assert reported[0] == UNHEARD
    assert not presence.is_alive
    out.clear()
    presence.announce({}, 3)
    Nodes(objects).put(Node("two", "x", {}, start=4))
    deposed.clear()
    presence.announce({}, 3, on_deposed)
    assert deposed.wait(20)
    assert reported[-1] == "another broker leads with a higher start number"
    presence.end()


def test_a_leader_whose_log_has_disappeared_is_deposed(tmp_path: Path) -> None:
    """As if the directory of the bucket was unmounted, or the bucket was emptied."""
    config = ServeConfig(data_dir=tmp_path, bucket=f"file://{tmp_path / 'bucket'}", node="one", node_timeout_s=1.0)
    presence, objects = Presence(config, leading(config)), open_bucket(config.bucket)
    reported: list[str] = []
    deposed = Event()

    def on_deposed(reason: str) -> None:
        reported.append(reason)
        deposed.set()

    presence.announce({}, 3, on_deposed)
    assert not deposed.wait(0.5)
    objects.delete(NAME)
    assert deposed.wait(20)
    assert reported[0] == "the bucket has lost the log that this broker leads, or has another one"
    presence.announce({}, 3)
    make_identity(objects, secrets.token_bytes, 0)
    deposed.clear()
    presence.announce({}, 3, on_deposed)
    assert deposed.wait(20), "another log"
    presence.end()
