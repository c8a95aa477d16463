"""A broker whose bucket does not respond during recovery: it answers health checks, and stops on a signal."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polywire.clock import SystemClock
from polywire.errors import ErrorCode, NotOwner, Unavailable
from polywire.server import bucket as server_bucket
from polywire.server import bucket_watch, lifecycle, standby
from polywire.server.bucket_watch import BucketWatch
from polywire.server.config import OFF, ServeConfig
from polywire.server.lines import LineLimit
from polywire.server.signals import Signals
from polywire.server.standby import NO_LEADER
from polywire.store.objects import FIRST, Stored, shard_root
from polywire.testing.memory_objects import MemoryObjects
from polywire.types import NODE_TIMEOUT_S_MAX, NODE_TIMEOUT_S_MIN

SHARD = shard_root(FIRST)

WAIT_S = 60.0


class Silent(MemoryObjects):
    """Blocks reads of the journal while it is silent."""

    silent = True
    can_delete = True

    def read(self, name: str) -> Stored:
        if self.silent and name.startswith(SHARD):
            raise Unavailable(ErrorCode.STORAGE_FAILED, "the bucket does not answer")
        return super().read(name)

    def delete(self, name: str) -> None:
        if not self.can_delete:
            raise Unavailable(ErrorCode.STORAGE_FAILED, "the bucket does not answer")
        super().delete(name)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Silent:
    found = Silent()

    def opened(_: str, **__: Any) -> Silent:
        return found

    monkeypatch.setattr(server_bucket, "OPENING_END_S", WAIT_S)  # otherwise it ends the whole test run
    monkeypatch.setattr(bucket_watch, "open_bucket", opened)
    return found


def config_of(tmp_path: Path) -> ServeConfig:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        http = f"127.0.0.1:{free.getsockname()[1]}"
    return ServeConfig(
        data_dir=tmp_path,
        bucket="s3://bucket",
        http=http,
        flux=OFF,
        cursus=OFF,
        kafka=OFF,
        kafka07=OFF,
        iggy=OFF,
        polywire="127.0.0.1:0",
        node_timeout_s=NODE_TIMEOUT_S_MAX,  # a process of thousands of tests may stall for long
    )


async def ask(config: ServeConfig, path: str) -> bytes:
    """Return the response, as soon as there is one."""
    host, _, port = (config.http or "").partition(":")
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                answer = await reader.read()
                writer.close()
                return answer
            except ConnectionError:
                await asyncio.sleep(0.01)


def run_as_serving(work: Coroutine[Any, Any, int]) -> int:
    """Run on the loop of ``polywire serve``: asyncio's own drops connections while its listener is closed."""
    with asyncio.Runner(loop_factory=lifecycle._new_loop()) as runner:
        return runner.run(work)


async def serve(config: ServeConfig) -> int:
    signals = Signals()
    try:
        return await standby.serve_in_turn(
            config, LineLimit(SystemClock()), BucketWatch(config), signals, deposed=False
        )
    finally:
        signals.end()


def test_a_recovering_broker_answers_health_checks_and_stops_at_once(tmp_path: Path, bucket: Silent) -> None:
    config = config_of(tmp_path)

    async def run() -> int:
        async with asyncio.timeout(WAIT_S):
            serving = asyncio.create_task(serve(config))
            assert (await ask(config, "/livez")).startswith(b"HTTP/1.1 200")
            assert (await ask(config, "/readyz")).endswith(NO_LEADER.encode())
            os.kill(os.getpid(), signal.SIGTERM)
            return await serving

    assert run_as_serving(run()) == lifecycle.EXIT_OK
    assert bucket.list("nodes/") == [], "other requests need not wait for it"


def test_a_broker_serves_once_the_bucket_responds(tmp_path: Path, bucket: Silent) -> None:
    config = config_of(tmp_path)

    async def run() -> int:
        async with asyncio.timeout(WAIT_S):
            serving = asyncio.create_task(serve(config))
            assert (await ask(config, "/livez")).startswith(b"HTTP/1.1 200")
            bucket.silent = False
            while not (await ask(config, "/readyz")).endswith(b"ready\n"):  # noqa: ASYNC110 - looking is the point
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            return await serving

    assert run_as_serving(run()) == lifecycle.EXIT_OK


def test_a_broker_ignores_its_own_node_object_after_a_failed_takeover(tmp_path: Path, bucket: Silent) -> None:
    """The bucket is unreachable during the takeover, so the object that announces it cannot be removed."""
    config = replace(config_of(tmp_path), node_timeout_s=NODE_TIMEOUT_S_MIN)
    watch, signals = BucketWatch(config), Signals()
    bucket.can_delete = False

    async def serve_again() -> int:
        async with asyncio.timeout(WAIT_S):
            lines = LineLimit(SystemClock())
            code = await standby.serve_in_turn(config, lines, watch, signals, deposed=True)
            assert code == lifecycle.EXIT_DEPOSED
            bucket.silent, bucket.can_delete = False, True
            assert len(bucket.list("nodes/")) == 1
            serving = asyncio.create_task(standby.serve_in_turn(config, lines, watch, signals, deposed=True))
            while not (await ask(config, "/readyz")).endswith(b"ready\n"):  # noqa: ASYNC110 - looking is the point
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            return await serving

    try:
        assert run_as_serving(serve_again()) == lifecycle.EXIT_OK
    finally:
        signals.end()


def test_a_signal_between_two_terms_stops_cleanly(
    tmp_path: Path, bucket: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another broker becomes the leader, and the process is asked to stop before it is a standby again."""
    config, codes = config_of(tmp_path), list[int]()
    run_once = lifecycle.run_once

    async def deposed(*_: object, **__: object) -> int:
        raise NotOwner(ErrorCode.NOT_OWNER, "another broker leads")

    def run_and_tell(serving: Callable[[], Coroutine[None, None, int]]) -> int:
        codes.append(run_once(serving))
        if len(codes) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return codes[-1]

    monkeypatch.setattr(lifecycle, "serve", deposed)
    monkeypatch.setattr(lifecycle, "run_once", run_and_tell)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        assert standby.serve_in_turns(config, LineLimit(SystemClock()), BucketWatch(config)) == lifecycle.EXIT_OK
    finally:
        for number, meaning in before.items():
            signal.signal(number, meaning)
    assert codes == [lifecycle.EXIT_DEPOSED, lifecycle.EXIT_OK]
    assert bucket.list("nodes/") == [], "other requests need not wait for it"
