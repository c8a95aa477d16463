"""Register the broker, its topics and partitions in ZooKeeper for Kafka 0.7 clients (protocols: kafka07#zookeeper).

All requests to ZooKeeper are made in a thread, so the broker serves even if ZooKeeper does not respond. All nodes are
ephemeral, so they disappear with the broker.

    /brokers/ids/<id>              <host>-<epoch ms>:<host>:<port>
    /brokers/topics/<topic>/<id>   number of partitions
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

import structlog

from polywire.broker.topics import Topic
from polywire.errors import ErrorCode, Invalid
from polywire.protocols.kafka07.messages import topic_bytes
from polywire.server.config import Address

log = structlog.get_logger("polywire.server")

SESSION_S: Final = 6.0  # ZooKeeper removes the nodes of a dead broker after this time; the default of Kafka 0.7
ROUND_S: Final = 1.0  # pause between two updates
STOP_S: Final = 3.0  # time limit for removing the nodes at shutdown
EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})


class Registration:
    """The ZooKeeper nodes of one broker. Nodes of another session are never overwritten; they expire."""

    def __init__(self, hosts: str, address: Address, broker_id: int = 0) -> None:
        """Check the arguments.

        Args:
            hosts: ``HOST:PORT[,HOST:PORT…][/chroot]`` of ZooKeeper.
            address: where clients reach this broker.
            broker_id: number of this process's shard. It must not change, because consumers' offsets contain it.

        Raises Invalid(INVALID_REQUEST) if the package kazoo is missing, or for an IPv6 address, which Kafka 0.7 clients
        cannot parse.
        """
        host = socket.gethostname() if address.host in EVERYWHERE else address.host
        if ":" in host:
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"Kafka 0.7 clients do not support IPv6 addresses in ZooKeeper host={host}"
            )
        try:
            import kazoo.client  # noqa: F401 - an extra
        except ImportError:
            raise Invalid(
                ErrorCode.INVALID_REQUEST, "ZooKeeper registration needs the package kazoo (pip install 'polywire[zk]')"
            ) from None
        self._hosts: Final = hosts
        self._broker_id: Final = broker_id
        self._data: Final = f"{host}-{time.time_ns() // 1_000_000}:{host}:{address.port}".encode()
        self._topics: dict[str, int] = {}  # replaced, never changed, so the thread needs no lock
        self._registered: dict[str, bytes] = {}
        self._session = 0
        self._stopping = threading.Event()
        self._thread: Final = threading.Thread(target=self._serve, name="polywire-zookeeper", daemon=True)

    def start(self) -> None:
        logging.getLogger("kazoo").setLevel(logging.CRITICAL)
        self._thread.start()

    def update(self, topics: Iterable[Topic]) -> None:
        """Set the topics; they are registered within about a second."""
        self._topics = {topic_bytes(topic.name.full).decode(): len(topic.partitions) for topic in topics}

    def stop(self) -> None:
        """Remove the nodes, so that clients stop using this broker."""
        self._stopping.set()
        self._thread.join(STOP_S)

    # In the thread

    def _serve(self) -> None:
        from kazoo.client import KazooClient
        from kazoo.exceptions import KazooException
        from kazoo.retry import KazooRetry

        retry = KazooRetry(max_tries=-1, delay=0.5, max_delay=5.0)
        client = KazooClient(hosts=self._hosts, timeout=SESSION_S, connection_retry=retry)
        client.start_async()
        last_failure = ""
        while not self._stopping.wait(ROUND_S):
            try:
                if client.connected:
                    self._register_all(client)
                    last_failure = ""
            except KazooException as error:
                reason = f"{type(error).__name__} {error}".strip()
                if reason != last_failure:
                    log.warning("ZooKeeper update failed", hosts=self._hosts, reason=reason)
                last_failure = reason
        client.stop()
        client.close()

    def _register_all(self, client: Any) -> None:
        """Update this broker's nodes. Raises KazooException if that fails."""
        session = client.client_id[0]
        if session != self._session:
            self._session, self._registered = session, {}
        nodes = {f"/brokers/ids/{self._broker_id}": self._data}
        for name, count in self._topics.items():
            nodes[f"/brokers/topics/{name}/{self._broker_id}"] = str(count).encode()
        for path in self._registered.keys() - nodes.keys():
            client.delete(path)
            del self._registered[path]
        for path, data in nodes.items():
            if self._registered.get(path) != data:
                self._register(client, path, data)
                self._registered[path] = data

    def _register(self, client: Any, path: str, data: bytes) -> None:
        """Create one node, or update it if it belongs to this session.

        Raises NodeExistsError if the node belongs to another session, and other KazooExceptions.
        """
        known = client.exists(path)
        if known is not None and known.ephemeralOwner == self._session:
            client.set(path, data)
        else:
            client.create(path, data, ephemeral=True, makepath=True)
        if path.startswith("/brokers/ids/"):
            log.info("registered in ZooKeeper", hosts=self._hosts, broker=data.decode())
