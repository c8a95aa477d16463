"""Checks of a bucket before processes are forked."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from polywire.cluster.nodes import DIRECTORY, Candidate, Nodes, node_of
from polywire.errors import ErrorCode, Invalid, Unavailable
from polywire.protocols.runtime.shards import KEY_BYTES
from polywire.server import bucket
from polywire.server.bucket import check_machine, inspect_bucket
from polywire.server.config import ServeConfig
from polywire.store.identity import NAME, find_identity
from polywire.store.objects import Objects
from polywire.store.url import open_bucket

# the process that runs tests is multi-threaded
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture
def config(tmp_path: Path) -> ServeConfig:
    return ServeConfig(data_dir=tmp_path / "data", bucket=f"file://{tmp_path / 'bucket'}", node="one")


def bucket_of(config: ServeConfig) -> Objects:
    return open_bucket(config.bucket)


def test_the_first_start_creates_a_shard_for_each_process(config: ServeConfig) -> None:
    shards, key = inspect_bucket(replace(config, processes=3))
    identity = find_identity(bucket_of(config))
    assert identity is not None
    assert (shards, identity.shards, len(key)) == (3, 3, KEY_BYTES)
    assert inspect_bucket(config) == inspect_bucket(replace(config, processes=3, node="two")) == (3, key), (
        "every process sees the same"
    )
    for processes in (1, 2, 4):
        with pytest.raises(Invalid, match="has 3 shards"):
            inspect_bucket(replace(config, processes=processes))


def test_no_log_is_created_where_a_log_is_missing(config: ServeConfig, tmp_path: Path) -> None:
    """As if the bucket's directory was not mounted after a restart of the machine."""
    wanted = replace(config, processes=2)
    inspect_bucket(wanted)
    (tmp_path / "bucket").rename(tmp_path / "elsewhere")
    with pytest.raises(Unavailable, match="does not have the log that this broker has used"):
        inspect_bucket(wanted)
    assert find_identity(bucket_of(config)) is None
    other = replace(wanted, data_dir=tmp_path / "other")
    inspect_bucket(other)
    with pytest.raises(Unavailable, match="does not have the log"):
        inspect_bucket(wanted)
    shutil.rmtree(tmp_path / "bucket")
    (tmp_path / "elsewhere").rename(tmp_path / "bucket")
    assert inspect_bucket(wanted)[0] == 2


@pytest.mark.parametrize("processes", [0, 1])
def test_a_single_process_checks_its_bucket_itself(config: ServeConfig, processes: int) -> None:
    assert inspect_bucket(replace(config, processes=processes)) == (1, b"")
    assert find_identity(bucket_of(config)) is None
    assert bucket_of(config).list("probe/") == []


def test_errors_of_the_child_process_are_raised_in_the_parent(
    config: ServeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket_of(config).put(NAME, b"[]")
    with pytest.raises(Invalid, match="another program's object"):
        inspect_bucket(config)

    def silent(*_: object, **__: object) -> Objects:
        raise Unavailable(ErrorCode.STORAGE_FAILED, "it does not answer")

    def broken(*_: object, **__: object) -> Objects:
        raise AssertionError

    for opened, reported in ((silent, "it does not answer"), (broken, "the bucket cannot be read")):
        monkeypatch.setattr(bucket, "open_bucket", opened)
        with pytest.raises(Unavailable, match=reported):
            inspect_bucket(config)


@pytest.mark.parametrize("changes", [0, 1, 2])
def test_the_name_of_a_live_machine_is_rejected(
    config: ServeConfig, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    """One change may be the last request of a process that was killed."""
    nodes, candidate, over = Nodes(bucket_of(config)), Candidate("one", 1, 2), threading.Event()
    nodes.put(node_of(candidate, "x", {}, start=0, counter=0))
    nodes.put(node_of(Candidate("another", 1, 2), "y", {}, start=0, counter=0))
    monkeypatch.setattr(bucket, "POLL_S", 0.01)
    monkeypatch.setattr("polywire.cluster.nodes.wait_s", lambda _: 0.5)

    def live() -> None:
        for number in range(changes):
            if over.wait(0.2):
                return
            nodes.put(node_of(candidate, "x", {}, start=0, counter=1 + number))

    living = threading.Thread(target=live)
    living.start()
    try:
        if changes < 2:
            bucket._check_machine(config, 2)
        else:
            with pytest.raises(Invalid, match="another machine with this name"):
                bucket._check_machine(config, 2)
    finally:
        over.set()
        living.join()


def test_a_name_that_is_too_long_with_its_shard_is_rejected(config: ServeConfig) -> None:
    check_machine(replace(config, node="n" * 95), 2)
    with pytest.raises(Invalid, match="at most 95"):
        check_machine(replace(config, node="n" * 96), 2)
    assert bucket_of(config).list(DIRECTORY) == []
