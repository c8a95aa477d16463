"""Statistics of the bucket: none while the process is a standby, and counters survive a loss of leadership."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from polywire.cluster.nodes import Candidate, Node, NodeState
from polywire.cluster.opening import ShardState
from polywire.errors import Unavailable
from polywire.http.process import BucketNode
from polywire.server.bucket_watch import BucketWatch
from polywire.server.config import ServeConfig
from polywire.store.identity import NAME, find_identity, make_identity
from polywire.store.url import open_bucket

SHARD = ShardState("0000", 3, 9, unstored_bytes=100, unstored_s=0.5, cached_bytes=7)


def watch_of(tmp_path: Path, prices: str = "") -> BucketWatch:
    return BucketWatch(ServeConfig(data_dir=tmp_path, bucket=f"file://{tmp_path / 'bucket'}", bucket_prices=prices))


def test_only_a_leader_has_statistics(tmp_path: Path) -> None:
    watch = watch_of(tmp_path)
    assert watch.view() is None
    watch.open(timeout_s=1).put("a/one", b"123")
    watch.deposed()  # it never led: another process was faster
    watch.leads(bucket_id="ab", node="one", shard=lambda: SHARD)
    watch.sees([(Node("one", "x", {}, start=3), NodeState.LEADS), (Node("two", "y", {}), NodeState.STANDBY)])
    view = watch.view()
    assert view is not None
    assert (view.shard, view.led, view.deposed, view.put_bytes) == (SHARD, 1, 0, 3)
    assert view.nodes == [BucketNode("one", "leads", 3), BucketNode("two", "standby", None)]
    assert [charge.cost for charge in view.charges] == [None] * 4
    watch.deposed()
    assert watch.view() is None
    watch.leads(bucket_id="ab", node="one", shard=lambda: SHARD)
    again = watch.view()
    assert again is not None
    assert (again.led, again.deposed, again.put_bytes) == (2, 1, 3)


def test_a_standby_notes_which_log_the_bucket_has(tmp_path: Path) -> None:
    watch = watch_of(tmp_path)
    objects = watch.open(timeout_s=1)
    watch.check()
    assert not watch.is_checked, "there is no log yet"
    identity, _ = make_identity(objects, secrets.token_bytes, 0)
    watch.check()
    assert watch.is_checked
    objects.delete(NAME)
    for broker in (watch, watch_of(tmp_path)):
        with pytest.raises(Unavailable, match=f"expected={identity.id} found=none"):
            broker.join(objects, lambda: make_identity(objects, secrets.token_bytes, 0)[0])
    assert find_identity(objects) is None


def test_requests_have_prices(tmp_path: Path) -> None:
    watch = watch_of(tmp_path, "put=5,list=2")
    objects = watch.open(timeout_s=1)
    for number in range(4):
        objects.put(f"a/{number}", b"")
    objects.list("a/")
    objects.read("a/1")
    watch.leads(bucket_id="ab", node="one", shard=lambda: SHARD)
    view = watch.view()
    assert view is not None
    costs = {charge.kind: (charge.requests, charge.price, charge.cost) for charge in view.charges}
    assert costs == {"put": (4, 5, 0.02), "get": (1, 0.0, 0.0), "list": (1, 2, 0.002), "delete": (0, 0.0, 0.0)}


def test_a_bucket_is_tested_once_for_each_process(tmp_path: Path) -> None:
    watch = watch_of(tmp_path)
    make_identity(open_bucket(f"file://{tmp_path / 'bucket'}"), secrets.token_bytes, 0)
    assert not watch.is_checked
    watch.check()
    watch.leads(bucket_id="ab", node="one", shard=lambda: SHARD)
    first = watch.view()
    assert watch.is_checked
    watch.check()
    second = watch.view()
    assert first is not None
    assert second is not None
    counts = [[(row.verb, row.outcome, row.durations.count) for row in view.requests] for view in (first, second)]
    assert counts[0]
    assert counts[1] == counts[0]


def test_the_parent_process_tests_the_bucket_of_several_shards(tmp_path: Path) -> None:
    config = ServeConfig(data_dir=tmp_path, bucket=f"file://{tmp_path / 'bucket'}")
    watch = BucketWatch(config, Candidate("one", shards=2))
    watch.check()
    watch.leads(bucket_id="ab", node="one", shard=lambda: SHARD)
    view = watch.view()
    assert view is not None
    assert {row.verb for row in view.requests if row.durations.count} == {"read"}, "it only reads the log's id"
