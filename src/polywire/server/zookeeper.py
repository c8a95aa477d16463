"""Telling ZooKeeper which broker, topics and partitions the Kafka 0.7 wire serves (protocols: kafka07#zookeeper).

Promises: the loop only hands over what topics there are; everything that waits for ZooKeeper does so in a thread of its own, and serving goes
on without it. What is told is ephemeral: it goes when the broker goes. Must not know: any wire's bytes, consumers' nodes.

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

SESSION_S: Final = 6.0  # after which ZooKeeper forgets a broker that is gone; the default of 0.7
ROUND_S: Final = 1.0  # between two looks at what there is to tell
STOP_S: Final = 3.0  # for taking leave
EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})


class Registration:
    """Keeps one broker's nodes. Guards: nodes of another session are not taken over, they are waited out.

    Invariant: ``_topics`` is replaced, never changed, so that the thread sees one state or the next.
    """

    def __init__(self, hosts: str, address: Address, broker_id: int = 0) -> None:
        """hosts: ``HOST:PORT[,HOST:PORT…][/chroot]``. broker_id: the shard of this process, always the same: consumers' positions carry it.

        Raises Invalid(INVALID_REQUEST) without the package kazoo, or for an address whose host
        no 0.7 client can read."""
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
        self._topics: dict[str, int] = {}
        self._told: dict[str, bytes] = {}
        self._session = 0
        self._stopping = threading.Event()
        self._thread: Final = threading.Thread(target=self._serve, name="polywire-zookeeper", daemon=True)

    def start(self) -> None:
        """Begin to tell."""
        logging.getLogger("kazoo").setLevel(logging.CRITICAL)
        self._thread.start()

    def update(self, topics: Iterable[Topic]) -> None:
        """What topics there are now; told within about a second."""
        self._topics = {topic_bytes(topic.name.full).decode(): len(topic.partitions) for topic in topics}

    def stop(self) -> None:
        """Take leave, so that nobody looks for this broker."""
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
        refused = ""
        while not self._stopping.wait(ROUND_S):
            try:
                if client.connected:
                    self._tell_all(client)
                    refused = ""
            except KazooException as error:
                reason = f"{type(error).__name__} {error}".strip()
                if reason != refused:
                    log.warning("ZooKeeper update failed", hosts=self._hosts, reason=reason)
                refused = reason
        client.stop()
        client.close()

    def _tell_all(self, client: Any) -> None:
        """Bring this broker's nodes up to date. Raises KazooException."""
        session = client.client_id[0]
        if session != self._session:
            self._session, self._told = session, {}
        wanted = {f"/brokers/ids/{self._broker_id}": self._data}
        for name, count in self._topics.items():
            wanted[f"/brokers/topics/{name}/{self._broker_id}"] = str(count).encode()
        for path in self._told.keys() - wanted.keys():
            client.delete(path)
            del self._told[path]
        for path, data in wanted.items():
            if self._told.get(path) != data:
                self._tell(client, path, data)
                self._told[path] = data

    def _tell(self, client: Any, path: str, data: bytes) -> None:
        """Make one node, or give ours its new content. Raises KazooException, NodeExistsError for another session's."""
        known = client.exists(path)
        if known is not None and known.ephemeralOwner == self._session:
            client.set(path, data)
        else:
            client.create(path, data, ephemeral=True, makepath=True)
        if path.startswith("/brokers/ids/"):
            log.info("registered in ZooKeeper", hosts=self._hosts, broker=data.decode())
