"""Two machines of a bucket with TLS links: takeovers, renewed certificates, and rejection of other machines."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from shutil import which

import pytest

from polywire.client.connect import connect
from polywire.cluster.nodes import Node, Nodes
from polywire.errors import BrokerError
from polywire.protocols.runtime.shards import KEY_BYTES
from polywire.routing.messages import MAGIC
from polywire.server.listener import INSIDE, INSIDE_TLS
from polywire.store.url import open_bucket
from tests.broker_process import BrokerProcess
from tests.certificates import HERE, Certificates
from tests.crash.test_processes import Producer, go_on, until
from tests.crash.test_shards import SHARDS, TOPICS, counts, leaders, machine, produced, url_of
from tests.crash.test_standby import _cluster

BALANCED = ("--processes", str(SHARDS), "--balance-s", "1")
REFUSED = "rejected a connection from another machine"
WRONG_KEY = "only processes of this broker can connect here"

pytestmark = [
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="several processes share addresses on Linux only"),
    pytest.mark.skipif(which("openssl") is None, reason="TLS of links was NOT tried: no openssl to make certificates"),
]


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    directory = tmp_path / "certificates"
    directory.mkdir()
    made = Certificates(directory)
    made.sign("one", HERE)
    made.sign("two", HERE, use="serverAuth,clientAuth")
    return made


def secure(certificates: Certificates, name: str) -> tuple[str, ...]:
    """Return the options for a machine's certificate."""
    own = ("--tls-certificate", certificates.path(name), "--tls-key", certificates.path(name, "key"))
    return (*own, "--tls-machine-authority", certificates.path("authority"))


def leader_of(tmp_path: Path, shard: int) -> Node:
    nodes = Nodes(open_bucket(url_of(tmp_path))).read()
    return max((node for node in nodes if node.shard == shard), key=lambda node: node.start)


def logs(broker: BrokerProcess, words: str) -> bool:
    return words in broker.log_text()


def open_link(place: tuple[str, int], context: ssl.SSLContext | None) -> None:
    """Begin a link with a wrong key, and wait until the process closes the connection."""
    with suppress(ConnectionError, ssl.SSLError), socket.create_connection(place, timeout=60) as plain:
        peer = plain if context is None else context.wrap_socket(plain, server_hostname="localhost")
        with peer:
            peer.sendall(MAGIC + bytes(KEY_BYTES))
            assert peer.recv(100) == b""


def test_links_use_tls_and_accept_renewed_certificates(tmp_path: Path, certificates: Certificates) -> None:
    url = url_of(tmp_path)
    with (
        machine(tmp_path, "one", *BALANCED, *secure(certificates, "one")) as one,
        machine(tmp_path, "two", "--balance-s", "1", *secure(certificates, "two")) as two,
    ):

        async def work(producers: list[Producer]) -> None:
            await until(lambda: leaders(url) == ["one-0000", "two-0001"], "nothing was handed over")
            await go_on(producers, len(producers))
            for shard, broker in enumerate((one, two)):
                at = leader_of(tmp_path, shard).addresses
                assert INSIDE not in at
                place = at[INSIDE_TLS]
                for context in (None, certificates.context()):
                    await asyncio.to_thread(open_link, place, context)
                assert WRONG_KEY not in broker.log_text(), "without a certificate, not even the key is read"
                await asyncio.to_thread(open_link, place, certificates.context("two"))
                await until(partial(logs, broker, WRONG_KEY), "a link with a certificate was not accepted")
            await asyncio.to_thread(_renew, tmp_path, certificates, one, two)
            words = "takeover", url, "--shard", "1", "--node", "one"
            assert "one-0001 is now the leader" in await asyncio.to_thread(_cluster, *words)
            await go_on(producers, len(producers))

        asyncio.run(produced([one, two], work))
        assert counts(one, REFUSED, 0) == counts(two, REFUSED, 1) == 2
        for broker in (one, two):
            assert "cannot forward requests" not in broker.log_text()
            assert broker.stop() == 0, broker.log_text()


def _renew(tmp_path: Path, certificates: Certificates, *brokers: BrokerProcess) -> None:
    """Change the authority in steps: a machine that presents or accepts only the old one would be isolated."""
    place, authority = leader_of(tmp_path, 0).addresses[INSIDE_TLS], Path(certificates.path("authority"))
    before = certificates.serial_shown(place, "two")
    certificates.make_authority("next")
    following = Path(certificates.path("next")).read_bytes()
    authority.write_bytes(authority.read_bytes() + following)
    _reload(brokers, times=1)
    certificates.sign("one", HERE, authority="next")
    certificates.sign("two", HERE, authority="next")
    _reload(brokers, times=2)
    authority.write_bytes(following)
    _reload(brokers, times=3)
    assert certificates.serial_shown(place, "two") != before


def _reload(brokers: Sequence[BrokerProcess], *, times: int) -> None:
    """Make every process reload its files, leader or standby."""

    def are_reloaded() -> bool:
        return all(broker.log_text().count("event=reloaded") == times * SHARDS for broker in brokers)

    for broker in brokers:
        os.kill(broker.pid, signal.SIGHUP)
    asyncio.run(until(are_reloaded, "not reloaded"))


def test_machines_with_and_without_tls_reject_each_other(tmp_path: Path, certificates: Certificates) -> None:
    """Both log what to do."""
    url = url_of(tmp_path)
    with (
        machine(tmp_path, "one", *BALANCED, *secure(certificates, "one")) as one,
        machine(tmp_path, "two", "--balance-s", "1") as two,
    ):

        async def ask(broker: BrokerProcess) -> None:
            for topic in (name for names in TOPICS.values() for name in names):
                with suppress(BrokerError, OSError):
                    client = await connect(broker.url("polywire"))
                    with suppress(BrokerError, OSError):
                        await client.bounds(topic)
                    await client.close()

        def have_reported() -> bool:
            return all(words in broker.log_text() for broker, words in reported.items())

        async def run() -> None:
            await until(lambda: leaders(url) == ["one-0000", "two-0001"], "nothing was handed over")
            while not have_reported():
                await asyncio.wait_for(asyncio.gather(*(ask(broker) for broker in (one, two))), 60)

        reported = {one: "accepts connections without TLS only", two: "accepts connections with TLS only"}
        asyncio.run(asyncio.wait_for(run(), 120))
        for broker, words in reported.items():
            (line,) = [line for line in broker.log_text().splitlines() if words in line]
            assert "--tls-machine-authority" in line
            assert broker.stop() == 0, broker.log_text()


def test_a_machine_that_others_would_reject_does_not_start(tmp_path: Path, certificates: Certificates) -> None:
    certificates.sign("one", HERE, days=-1)
    _cluster("init", url_of(tmp_path), "--shards", str(SHARDS))
    with pytest.raises(AssertionError, match="other machines would reject the certificate") as caught:
        machine(tmp_path, "one", *secure(certificates, "one")).start()
    assert "certificate has expired" in str(caught.value)
    assert open_bucket(url_of(tmp_path)).list("nodes/") == []
